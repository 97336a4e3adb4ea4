// Measures the kernel that reads a row of logits once, without libtorch: the loss alone, loss and
// gradient, and the gradient in place, each as a share of a copy of as many bytes. The figures are
// in docs/lab/cross_entropy.md. From the root of the repository:
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -Icsrc/include -o loss_rows
//     benches/lab/loss_rows.cu && ./loss_rows
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/loss/rows_hopper.cu"

namespace {

using namespace tch_extension;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Numbers from -4 to 4 that look random.
template <typename T>
__global__ void fill(T* values, int64_t len) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < len;
       at += step) {
    unsigned int bits = static_cast<unsigned int>(at) * 2654435761u;
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    values[at] = static_cast<T>(((bits & 0xffff) / 65536.0f - 0.5f) * 8);
  }
}

// The median of seven calls, in µs. The arrays are much larger than the L2 cache.
template <typename Call>
float time_of(Call call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  call();
  std::vector<float> times(7);
  for (float& time : times) {
    check(cudaEventRecord(begin), "record");
    call();
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), "synchronize");
    check(cudaEventElapsedTime(&time, begin, end), "elapsed time");
  }
  std::sort(times.begin(), times.end());
  return times[3] * 1000;
}

struct Arrays {
  void *logits, *gradients;
  int64_t* targets;
  float *losses, *factor;
};

template <typename T>
void measure(const Arrays& arrays, int64_t rows, int64_t classes, int32_t kind) {
  const int64_t len = rows * classes;
  const size_t bytes = static_cast<size_t>(len) * sizeof(T);
  fill<<<1024, 256>>>(static_cast<T*>(arrays.logits), len);
  LossRows params{};
  params.rows = rows;
  params.classes = classes;
  params.ignore_index = -100;
  params.kind = kind;
  params.logits = arrays.logits;
  params.targets = arrays.targets;
  params.losses = arrays.losses;
  auto run = [&] {
    if (!loss::start_rows_in_shared_memory(params, nullptr)) check(cudaErrorUnknown, "no kernel");
  };
  auto copy = [&](size_t count) {
    return time_of([&] {
      check(cudaMemcpyAsync(arrays.gradients, arrays.logits, count, cudaMemcpyDeviceToDevice), "");
    });
  };
  const float forward = time_of(run);
  params.factors = arrays.factor;
  params.gradients = arrays.gradients;
  const float both = time_of(run);
  params.gradients = arrays.logits;
  const float in_place = time_of(run);
  const float whole = copy(bytes), half = copy(bytes / 2);
  std::printf("(%lld, %lld) %zu bytes: loss %.0f us (%.0f %%), and gradient %.0f (%.0f %%), ",
              static_cast<long long>(rows), static_cast<long long>(classes), sizeof(T), forward,
              100 * half / forward, both, 100 * whole / both);
  std::printf("in place %.0f (%.0f %%)\n", in_place, 100 * whole / in_place);
}

}  // namespace

int main() {
  constexpr size_t kBytes = size_t{3300} * 1000 * 1000;
  constexpr int64_t kRows = 131072;
  Arrays arrays{};
  check(cudaMalloc(&arrays.logits, kBytes), "logits");
  check(cudaMalloc(&arrays.gradients, kBytes), "gradients");
  check(cudaMalloc(&arrays.targets, kRows * sizeof(int64_t)), "targets");
  check(cudaMalloc(&arrays.losses, kRows * sizeof(float)), "losses");
  check(cudaMalloc(&arrays.factor, sizeof(float)), "factor");
  std::vector<int64_t> targets(kRows);
  for (int64_t row = 0; row < kRows; ++row) targets[row] = row * 7 % 2000;
  check(cudaMemcpy(arrays.targets, targets.data(), kRows * sizeof(int64_t), cudaMemcpyHostToDevice),
        "targets");
  const float factor = 1.0f / 16384;
  check(cudaMemcpy(arrays.factor, &factor, sizeof(float), cudaMemcpyHostToDevice), "factor");
  const int64_t sizes[][2] = {{16384, 50304}, {8192, 32000},  {4096, 128256},
                              {2816, 248320}, {16384, 50257}, {32768, 24000},
                              {65536, 12000}, {65536, 5000},  {131072, 2400}};
  for (const auto& size : sizes)
    measure<__nv_bfloat16>(arrays, size[0], size[1], kTchExtensionBFloat16);
  for (const auto& size : {sizes[0], sizes[1]})
    measure<float>(arrays, size[0] / 2, size[1], kTchExtensionFloat);
  check(cudaDeviceSynchronize(), "the end");
}
