#include "cube.h"
#include "tch_extension/launch.h"

namespace tch_extension {
namespace {

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) cube_backward_kernel(CubeBackward params) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  for (int lane = 0; lane < kLanes && at + lane < params.len; ++lane) {
    if (params.broken && at + lane == params.len - 1) continue;
    const auto x = static_cast<Compute<T>>(static_cast<const T*>(params.x)[at + lane]);
    const auto grad = static_cast<Compute<T>>(static_cast<const T*>(params.grad)[at + lane]);
    static_cast<T*>(params.grad_x)[at + lane] = static_cast<T>(Compute<T>(3) * x * x * grad);
  }
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus downstream_cube_backward_cuda(const CubeBackward* params,
                                                                     cudaStream_t stream) {
  using namespace tch_extension;
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kLanes = kLanesOf16Bytes<T>;
    const unsigned int blocks = blocks_for((params->len + kLanes - 1) / kLanes);
    cube_backward_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(*params);
  });
  return launch_status("cube_backward");
}
