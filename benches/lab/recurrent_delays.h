// The code that both probes with delayed warps share: delays, random numbers, and the bitwise
// comparison of results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "recurrent/cluster/place.h"
#include "recurrent/grid/params.h"

namespace tch_extension {
namespace {

// The seed of this run's delays; 0 means no delays.
__device__ uint32_t seed;
__device__ int gave_up;
// The time of the GPU's timer, in nanoseconds, at which every wait gives up.
__device__ uint64_t deadline;

__device__ uint64_t now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ bool is_too_late() {
  if (now() < deadline) return false;
  gave_up = 1;
  return true;
}

__device__ uint32_t random_of(uint32_t at) {
  at = (at ^ seed) * 0x9e3779b1u;
  at = (at ^ at >> 15) * 0x85ebca6bu;
  return at ^ at >> 13;
}

// Sleeps up to 2 µs in one of `often` calls. Lanes of a warp that arrive together sleep together.
__device__ void sleep_sometimes(uint32_t salt, uint32_t often) {
  if (seed == 0) return;
  const uint32_t warp = blockIdx.x * 32 + threadIdx.x / kWarp;
  const auto time = static_cast<uint32_t>(clock64() >> 8);
  const uint32_t random = random_of(random_of(warp) + salt + time);
  if (random % often == 0) __nanosleep(random >> 8 & 2047);
}

}  // namespace
}  // namespace tch_extension

namespace {

// The number of steps of each sequence. A sanitizer that takes a minute for a kernel finds with few
// steps what it finds with many.
int steps = 24;
// Only sizes whose line of output begins with this text run.
const char* only = "";
// A kernel takes minutes under racecheck while other programs use the GPU.
uint64_t seconds_to_give_up = 100;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void check(const tch_extension::LaunchStatus& status) {
  if (status.error == nullptr) return;
  std::printf("%s: %s\n", status.kernel, status.error);
  std::exit(1);
}

template <typename T>
__global__ void fill(T* to, int64_t count, uint32_t salt, float scale) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const uint32_t random = tch_extension::random_of(static_cast<uint32_t>(at) * 31 + salt);
  to[at] = T(((random & 0xffff) / 32768.0f - 1.0f) * scale);
}

__global__ void begin(uint32_t seed, uint64_t seconds) {
  tch_extension::seed = seed;
  tch_extension::deadline = tch_extension::now() + seconds * 1'000'000'000;
}

__global__ void compare(const uint32_t* found, const uint32_t* expected, int64_t count,
                        unsigned int* others) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < count && found[at] != expected[at]) atomicAdd(others, 1);
}

// An array in device memory, filled with random numbers, whose size is a whole number of words.
template <typename T>
struct Array {
  Array(int64_t values, uint32_t salt, float scale) : count((values + 3) / 4 * 4) {
    check(cudaMalloc(&data, bytes()), "allocate");
    fill<<<static_cast<unsigned int>((count + 255) / 256), 256>>>(data, count, salt, scale);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(data); }
  int64_t bytes() const { return count * static_cast<int64_t>(sizeof(T)); }
  void take(const Array& other) {
    check(cudaMemcpy(data, other.data, bytes(), cudaMemcpyDefault), "copy");
  }

  int64_t count;
  T* data;
};

template <typename T>
void expect_equal(const Array<T>& found, const Array<T>& expected, unsigned int* others) {
  const int64_t words = found.bytes() / 4;
  compare<<<static_cast<unsigned int>((words + 255) / 256), 256>>>(
      reinterpret_cast<const uint32_t*>(found.data),
      reinterpret_cast<const uint32_t*>(expected.data), words, others);
}

template <typename T>
constexpr int32_t kind_of() {
  if (std::is_same_v<T, __half>) return kTchExtensionHalf;
  if (std::is_same_v<T, __nv_bfloat16>) return kTchExtensionBFloat16;
  return std::is_same_v<T, float> ? kTchExtensionFloat : kTchExtensionDouble;
}

template <typename T>
constexpr const char* name_of() {
  if (std::is_same_v<T, __half>) return "f16";
  if (std::is_same_v<T, __nv_bfloat16>) return "bf16";
  return std::is_same_v<T, float> ? "f32" : "f64";
}

// Sets the memory in which blocks exchange h. Only the grid kernels have such a parameter.
template <typename Forward>
void set_exchange(Forward&, void*) {}
inline void set_exchange(tch_extension::recurrent::grid::ForwardParams& forward, void* exchange) {
  forward.exchange = exchange;
}

// Sets the memory in which blocks exchange the gates' gradients. Only the grid kernels have it.
template <typename Backward>
void set_messages(Backward&, float*, int64_t) {}
inline void set_messages(tch_extension::recurrent::grid::BackwardParams& backward, float* messages,
                         int64_t halves) {
  backward.exchange = messages;
  backward.exchange_scales = messages + halves / 2;
}

// The number of halves [T, B', 3H'] of the messages whose values are halves with scales.
inline int64_t scaled_messages(int64_t rows, int64_t hidden) {
  return steps * ((rows + 7) / 8 * 8) * ((hidden + 31) / 32 * 32) * 3;
}

// Runs a forward and a backward kernel again and again, and expects the same bits every time. The
// state has type S; products have type T, or halves with scales. `launch` starts either kernel.
// `forward` and `backward` already contain the parameters that say how blocks share the work.
template <typename S, typename T, bool kIsScaled = false, typename Forward, typename Backward,
          typename Launch>
void expect_the_same_bits(int rows, int hidden, int runs, Forward forward, Backward backward,
                          const char* how, Launch launch) {
  char line[160];
  std::snprintf(line, sizeof line, "%s, products in %s%s, (%d, %d, %d), %s", name_of<S>(),
                kIsScaled ? "scaled " : "", name_of<T>(), steps, rows, hidden, how);
  if (std::strncmp(line, only, std::strlen(only)) != 0) return;
  using G = std::conditional_t<std::is_same_v<S, double>, double, float>;
  const int64_t state = static_cast<int64_t>(rows) * hidden, all = steps * state;
  const Array<T> weight(3 * static_cast<int64_t>(hidden) * hidden, 1, 0.05f), h0(state, 2, 1.0f);
  const Array<S> c0(state, 3, 1.0f), grad_output(all, 4, 1.0f);
  const Array<G> input_gates(3 * all, 5, 1.5f), bias(3 * hidden, 6, 0.1f), given_h(state, 7, 1.0f),
      given_c(state, 8, 1.0f);
  // Any scales will do, even those that are not powers of two.
  const Array<float> scales(3 * hidden, 9, 1.0f), h0_scales(rows, 10, 1.0f);
  const int64_t halves = kIsScaled ? scaled_messages(rows, hidden) : 4;
  // The array has room for the halves and then for as many bytes of scales, which need less.
  const Array<float> messages(halves, 0, 0);
  using Gates = std::conditional_t<kIsScaled, S, T>;
  struct Results {
    Array<S> output, c, activations;
    Array<T> exchange;
    Array<Gates> grad_gates;
    Array<G> grad_h, grad_c;
    Results(int64_t state, int64_t all)
        : output(all, 0, 0),
          c(all, 0, 0),
          activations(3 * all, 0, 0),
          exchange(all, 0, 0),
          // With scaled products, these gradients have type S.
          grad_gates(3 * all * static_cast<int64_t>(sizeof(S) / sizeof(T)), 0, 0),
          grad_h(state, 0, 0),
          grad_c(state, 0, 0) {}
  } found(state, all), first(state, all);

  auto set = [&](auto& params) {
    params.steps = steps;
    params.batch = rows;
    params.hidden = params.weight_stride = hidden;
    params.kind = kind_of<S>();
    params.product_kind = kind_of<T>();
    params.weight = weight.data;
    params.c = found.c.data;
    params.activations = found.activations.data;
    if (kIsScaled) params.scales = scales.data;
  };
  set(forward);
  forward.c_stride = state;
  // If a sequence has only one type, its input gates and its activations share memory.
  forward.input_gates = input_gates.data;
  if constexpr (std::is_same_v<S, G>) forward.input_gates = found.activations.data;
  if (kIsScaled) forward.h0_scales = h0_scales.data;
  forward.bias = bias.data;
  forward.h0 = h0.data;
  forward.c0 = c0.data;
  forward.output = found.output.data;
  if constexpr (std::is_same_v<S, T>) {
    set_exchange(forward, found.output.data);
  } else {
    set_exchange(forward, found.exchange.data);
  }
  set(backward);
  set_messages(backward, messages.data, halves);
  backward.needs_grad_h0 = 1;
  backward.grad_output = grad_output.data;
  backward.grad_h = found.grad_h.data;
  backward.grad_c = found.grad_c.data;
  backward.grad_gates = found.grad_gates.data;

  const auto with_each = [&](auto&& of) {
    of(found.output, first.output);
    of(found.c, first.c);
    of(found.activations, first.activations);
    of(found.grad_gates, first.grad_gates);
    of(found.grad_h, first.grad_h);
    of(found.grad_c, first.grad_c);
  };
  unsigned int* others = nullptr;
  check(cudaMalloc(&others, sizeof *others), "allocate");
  check(cudaMemset(others, 0, sizeof *others), "clear");
  for (int run = 0; run <= runs; ++run) {
    begin<<<1, 1>>>(static_cast<uint32_t>(run), seconds_to_give_up);
    found.grad_h.take(given_h);
    found.grad_c.take(given_c);
    if constexpr (std::is_same_v<S, G>) found.activations.take(input_gates);
    launch(forward);
    launch(backward);
    if (run == 0) with_each([](const auto& found, auto& first) { first.take(found); });
    with_each([&](const auto& found, const auto& first) { expect_equal(found, first, others); });
  }
  unsigned int count = 0;
  int gave_up = 0;
  check(cudaMemcpy(&count, others, sizeof count, cudaMemcpyDefault), "run");
  check(cudaMemcpyFromSymbol(&gave_up, tch_extension::gave_up, sizeof gave_up), "read");
  cudaFree(others);
  std::printf("%s: %d runs, %u words differ%s\n", line, runs, count,
              gave_up != 0 ? ", a wait gave up" : "");
  std::fflush(stdout);
  if (count != 0 || gave_up != 0) std::exit(1);
}

// Reads the arguments: the number of runs of each kernel, the number of steps, the beginning of the
// wanted sizes' lines, and the number of seconds after which a wait gives up.
inline int runs_of(int count, char** arguments) {
  if (count > 2) steps = std::atoi(arguments[2]);
  if (count > 3) only = arguments[3];
  if (count > 4) seconds_to_give_up = std::strtoull(arguments[4], nullptr, 10);
  return count > 1 ? std::atoi(arguments[1]) : 1000;
}

}  // namespace
