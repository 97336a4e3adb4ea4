// Streams of libtorch's pool, the current stream, and memory that is used on more than one stream.
#ifdef TCH_EXTENSION_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;
using c10::cuda::CUDAStream;

// `raw` alone is not enough: libtorch's allocator would treat it as an external stream, and would
// keep memory for it apart from the memory of the same stream in the pool.
struct tch_extension::StreamParts {
  void* raw;   // the cudaStream_t
  int64_t id;  // libtorch's own identifier of the stream
  int32_t device;
};

namespace {

CUDAStream unpack(const StreamParts& parts) {
  return CUDAStream::unpack3(parts.id, static_cast<c10::DeviceIndex>(parts.device),
                             c10::DeviceType::CUDA);
}

StreamParts pack(const CUDAStream& stream) {
  const c10::StreamData3 data = stream.pack3();
  return {stream.stream(), data.stream_id, data.device_index};
}

}  // namespace

// The stream on which a kernel is to be launched; src/ffi/cuda.rs mirrors it.
struct tch_extension::LaunchPlace {
  void* stream;
  int32_t device_before;
  bool exists;
};

// If `device` exists, makes it current until tch_extension_cuda_leave, and returns libtorch's
// current stream there. This does the work of a guard and a stream object in one call, without an
// allocation.
TCH_EXTENSION_API Message tch_extension_cuda_enter(int32_t device, LaunchPlace* place) {
  return guard([&] {
    if (device < 0 || device >= c10::cuda::device_count()) return;
    const auto index = static_cast<c10::DeviceIndex>(device);
    place->stream = c10::cuda::getCurrentCUDAStream(index).stream();
    place->device_before = c10::cuda::ExchangeDevice(index);
    // Set last: if one of these calls throws, LaunchPlace has no device to restore.
    place->exists = true;
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_leave(int32_t device_before) {
  return guard(
      [&] { c10::cuda::MaybeExchangeDevice(static_cast<c10::DeviceIndex>(device_before)); });
}

TCH_EXTENSION_API Message tch_extension_cuda_stream_current(int32_t device, StreamParts* result) {
  return guard([&] {
    *result = pack(c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)));
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_stream_default(int32_t device, StreamParts* result) {
  return guard([&] {
    *result = pack(c10::cuda::getDefaultCUDAStream(static_cast<c10::DeviceIndex>(device)));
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_stream_from_pool(int32_t device, bool high_priority,
                                                              StreamParts* result) {
  return guard([&] {
    *result =
        pack(c10::cuda::getStreamFromPool(high_priority, static_cast<c10::DeviceIndex>(device)));
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_stream_synchronize(const StreamParts* stream) {
  return guard([&] { unpack(*stream).synchronize(); });
}

TCH_EXTENSION_API Message tch_extension_cuda_stream_is_idle(const StreamParts* stream, bool* idle) {
  return guard([&] { *idle = unpack(*stream).query(); });
}

// The caller owns the guard and must delete it in the same thread.
TCH_EXTENSION_API Message tch_extension_cuda_stream_guard_new(const StreamParts* stream,
                                                              c10::cuda::CUDAStreamGuard** result) {
  return guard([&] { *result = new c10::cuda::CUDAStreamGuard(unpack(*stream)); });
}

TCH_EXTENSION_API Message
tch_extension_cuda_stream_guard_delete(c10::cuda::CUDAStreamGuard* stream_guard) {
  return guard([&] { delete stream_guard; });
}

TCH_EXTENSION_API Message tch_extension_cuda_record_stream(const at::Tensor* tensor,
                                                           const StreamParts* stream) {
  return guard([&] { tensor->record_stream(unpack(*stream)); });
}

TCH_EXTENSION_API Message tch_extension_cuda_synchronize(int32_t device) {
  return guard([&] {
    c10::cuda::CUDAGuard device_guard(static_cast<c10::DeviceIndex>(device));
    c10::cuda::device_synchronize();
  });
}

#endif  // TCH_EXTENSION_CUDA
