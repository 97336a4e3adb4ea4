// The state of libtorch's random generator, for dropout.
#ifdef TCH_EXTENSION_CUDA

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>

#include <mutex>

#include "params.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Takes the state of the device's default generator for one kernel that draws one number of 128
// bits per sequence. While a graph is captured, the state is where each replay will find its own.
TCH_EXTENSION_API Message tch_extension_norm_random(int32_t device, NormRandom* result) {
  return guard([&] {
    // The generator asks the current device whether a graph is captured.
    const c10::cuda::CUDAGuard on_device(static_cast<c10::DeviceIndex>(device));
    at::Generator generator =
        at::cuda::detail::getDefaultCUDAGenerator(static_cast<c10::DeviceIndex>(device));
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* implementation = at::check_generator<at::CUDAGeneratorImpl>(generator);
    const at::PhiloxCudaState state = implementation->philox_cuda_state(4);
    *result = {};
    if (state.captured_) {
      result->seed_at = state.seed_.ptr;
      result->offset_at = state.offset_.ptr;
      result->offset = state.offset_intragraph_;
    } else {
      result->seed = state.seed_.val;
      result->offset = state.offset_.val;
    }
  });
}

#endif
