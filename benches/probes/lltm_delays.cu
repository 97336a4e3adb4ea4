// Whether the persistent LLTM kernels compute the same bits whoever comes late: each warp sleeps for a random
// time before its waits, 1000 runs of each kernel. From the root of the repository:
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 --expt-relaxed-constexpr -I csrc
//     -I csrc/include -o lltm_delays benches/probes/lltm_delays.cu && ./lltm_delays
//
// Every wait gives up after a while, so that a mistake ends instead of hanging.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "lltm/persistent_device.h"

namespace tch_extension {
namespace {

// Of the run; 0 for none.
__device__ uint32_t seed;
__device__ int gave_up;

__device__ uint32_t random_of(uint32_t at) {
  at = (at ^ seed) * 0x9e3779b1u;
  at = (at ^ at >> 15) * 0x85ebca6bu;
  return at ^ at >> 13;
}

// One time in four up to 2 µs.
__device__ void sleep_sometimes(uint32_t salt) {
  if (seed == 0) return;
  const uint32_t warp = blockIdx.x * 32 + threadIdx.x / kWarp;
  const uint32_t random = random_of(random_of(warp) + salt + static_cast<uint32_t>(clock64()));
  if (random % 4 == 0) __nanosleep(random >> 8 & 2047);
  __syncwarp();
}

__device__ void late_wait_for_arrival(uint32_t barrier, uint32_t parity) {
  sleep_sometimes(barrier);
  for (int tries = 0; tries < 1 << 18; ++tries) {
    if (has_arrived(barrier, parity)) return;
  }
  gave_up = 1;
}

__device__ void late_barrier_of_tile(const Place& place) {
  sleep_sometimes(1);
  barrier_of_tile(place);
  sleep_sometimes(2);
}

}  // namespace
}  // namespace tch_extension

#define wait_for_arrival late_wait_for_arrival
#define barrier_of_tile late_barrier_of_tile
#include "lltm/persistent_backward.cu"
#include "lltm/persistent_forward.cu"

namespace {

constexpr int kSteps = 24;
constexpr int kRuns = 1000;

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

__global__ void compare(const uint32_t* found, const uint32_t* expected, int64_t count,
                        unsigned int* others) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < count && found[at] != expected[at]) atomicAdd(others, 1);
}

// Device memory with numbers in it, of a whole number of words.
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
  void take(const Array& other) { check(cudaMemcpy(data, other.data, bytes(), cudaMemcpyDefault), "copy"); }

  int64_t count;
  T* data;
};

template <typename T>
void expect_equal(const Array<T>& found, const Array<T>& expected, unsigned int* others) {
  const int64_t words = found.bytes() / 4;
  compare<<<static_cast<unsigned int>((words + 255) / 256), 256>>>(
      reinterpret_cast<const uint32_t*>(found.data), reinterpret_cast<const uint32_t*>(expected.data), words,
      others);
}

template <typename T, typename G>
struct Sequence {
  Sequence(int rows, int hidden, int cluster, int groups, bool tf32)
      : rows(rows), hidden(hidden), cluster(cluster), groups(groups), tf32(tf32) {}

  void run() {
    const int64_t state = static_cast<int64_t>(rows) * hidden, all = kSteps * state;
    const Array<T> weight(3 * static_cast<int64_t>(hidden) * hidden, 1, 0.05f), h0(state, 2, 1.0f),
        c0(state, 3, 1.0f), grad_output(all, 4, 1.0f);
    const Array<G> input_gates(3 * all, 5, 1.5f), bias(3 * hidden, 6, 0.1f), given_h(state, 7, 1.0f),
        given_c(state, 8, 1.0f);
    Array<T> output(all, 0, 0), c(all, 0, 0), activations(3 * all, 0, 0), grad_gates(3 * all, 0, 0);
    Array<G> grad_h(state, 0, 0), grad_c(state, 0, 0);
    Array<T> first_output(all, 0, 0), first_c(all, 0, 0), first_activations(3 * all, 0, 0),
        first_gates(3 * all, 0, 0);
    Array<G> first_h(state, 0, 0), first_grad_c(state, 0, 0);

    LltmPersistentForward forward{};
    LltmPersistentBackward backward{};
    auto set = [&](auto& params) {
      params.steps = kSteps;
      params.batch = rows;
      params.hidden = params.weight_stride = hidden;
      params.kind = params.product_kind = kind();
      params.cluster = cluster;
      params.tf32 = tf32;
      params.weight = weight.data;
      params.c = c.data;
      params.activations = activations.data;
    };
    set(forward);
    forward.groups = groups;
    forward.c_stride = state;
    forward.input_gates = input_gates.data;
    forward.bias = bias.data;
    forward.h0 = h0.data;
    forward.c0 = c0.data;
    forward.output = output.data;
    // As a sequence of one kind has them: in the same memory.
    if constexpr (std::is_same_v<T, G>) forward.input_gates = activations.data;
    set(backward);
    backward.needs_grad_h0 = 1;
    backward.grad_output = grad_output.data;
    backward.grad_h = grad_h.data;
    backward.grad_c = grad_c.data;
    backward.grad_gates = grad_gates.data;

    unsigned int* others = nullptr;
    check(cudaMalloc(&others, sizeof *others), "allocate");
    check(cudaMemset(others, 0, sizeof *others), "clear");
    for (uint32_t run = 0; run <= kRuns; ++run) {
      check(cudaMemcpyToSymbol(tch_extension::seed, &run, sizeof run), "write");
      grad_h.take(given_h);
      grad_c.take(given_c);
      if constexpr (std::is_same_v<T, G>) activations.take(input_gates);
      check(tch_extension_lltm_persistent_forward_cuda(&forward, nullptr));
      check(tch_extension_lltm_persistent_backward_cuda(&backward, nullptr));
      if (run == 0) {
        first_output.take(output);
        first_c.take(c);
        first_activations.take(activations);
        first_gates.take(grad_gates);
        first_h.take(grad_h);
        first_grad_c.take(grad_c);
      }
      expect_equal(output, first_output, others);
      expect_equal(c, first_c, others);
      expect_equal(activations, first_activations, others);
      expect_equal(grad_gates, first_gates, others);
      expect_equal(grad_h, first_h, others);
      expect_equal(grad_c, first_grad_c, others);
    }
    unsigned int count = 0;
    int gave_up = 0;
    check(cudaMemcpy(&count, others, sizeof count, cudaMemcpyDefault), "run");
    check(cudaMemcpyFromSymbol(&gave_up, tch_extension::gave_up, sizeof gave_up), "read");
    cudaFree(others);
    std::printf("%s (%d, %d, %d), clusters of %d, %d groups: %d runs, %u words differ%s\n", name(), kSteps,
                rows, hidden, cluster, groups, kRuns, count, gave_up != 0 ? ", a wait gave up" : "");
    std::fflush(stdout);
    if (count != 0 || gave_up != 0) std::exit(1);
  }

  static int32_t kind() {
    if (std::is_same_v<T, __half>) return kTchExtensionHalf;
    if (std::is_same_v<T, __nv_bfloat16>) return kTchExtensionBFloat16;
    return std::is_same_v<T, float> ? kTchExtensionFloat : kTchExtensionDouble;
  }

  const char* name() const {
    if (sizeof(T) == 2) return std::is_same_v<T, __half> ? "f16" : "bf16";
    if (sizeof(T) == 8) return "f64";
    return tf32 ? "tf32" : "f32";
  }

  int rows, hidden, cluster, groups;
  bool tf32;
};

}  // namespace

int main() {
  Sequence<__nv_bfloat16, float>(17, 128, 8, 1, false).run();
  Sequence<__half, float>(250, 100, 8, 1, false).run();
  Sequence<__nv_bfloat16, float>(24, 256, 8, 1, false).run();
  Sequence<__nv_bfloat16, float>(24, 512, 16, 1, false).run();
  Sequence<__nv_bfloat16, float>(130, 512, 8, 1, false).run();
  Sequence<__nv_bfloat16, float>(24, 768, 16, 1, false).run();
  Sequence<float, float>(17, 128, 8, 1, true).run();
  Sequence<float, float>(24, 256, 8, 1, true).run();
  Sequence<float, float>(24, 512, 16, 1, true).run();
  Sequence<float, float>(40, 512, 16, 2, true).run();
  Sequence<float, float>(17, 128, 8, 1, false).run();
  Sequence<double, double>(17, 128, 8, 1, false).run();
  return 0;
}
