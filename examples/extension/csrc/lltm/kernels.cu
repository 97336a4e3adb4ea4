// The CUDA kernels: one thread for each element. If there are more elements than threads, each
// thread continues with the element that is one grid further.

#include "kernels.h"
#include "tch_extension/launch.h"

namespace {

template <typename Element>
__global__ void __launch_bounds__(tch_extension::kThreads)
    for_each_kernel(Element element, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < count; index += step)
    element(index);
}

template <typename Element>
void for_each(const Element& element, cudaStream_t stream) {
  const int64_t count = element.count();
  // CUDA rejects a grid without blocks.
  if (count == 0) return;
  for_each_kernel<<<tch_extension::blocks_for(count), tch_extension::kThreads, 0, stream>>>(element,
                                                                                            count);
}

}  // namespace

extern "C" tch_extension::LaunchStatus extension_lltm_forward_cuda(const LltmForward* params,
                                                                   cudaStream_t stream) {
  if (params->c.kind == kTchExtensionFloat)
    for_each(extension::ForwardElement<float>(*params), stream);
  if (params->c.kind == kTchExtensionDouble)
    for_each(extension::ForwardElement<double>(*params), stream);
  return tch_extension::launch_status("lltm_forward");
}

extern "C" tch_extension::LaunchStatus extension_lltm_backward_cuda(const LltmBackward* params,
                                                                    cudaStream_t stream) {
  if (params->new_c.kind == kTchExtensionFloat)
    for_each(extension::BackwardElement<float>(*params), stream);
  if (params->new_c.kind == kTchExtensionDouble)
    for_each(extension::BackwardElement<double>(*params), stream);
  return tch_extension::launch_status("lltm_backward");
}
