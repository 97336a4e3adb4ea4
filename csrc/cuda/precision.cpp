// libtorch's switches for TF32 in matrix products and in cuDNN's recurrent layers. They hold for
// the whole process.

#include <ATen/Context.h>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

TCH_EXTENSION_API Message tch_extension_matmul_allow_tf32(bool* result) {
  // libtorch's products read this setting. `allowTF32CuBLAS` throws if the newer of libtorch's two
  // switches was ever set.
  return guard([&] {
    *result = at::globalContext().float32Precision(
                  at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
  });
}

TCH_EXTENSION_API Message tch_extension_set_matmul_allow_tf32(bool allow) {
  return guard([&] { at::globalContext().setAllowTF32CuBLAS(allow); });
}

TCH_EXTENSION_API Message tch_extension_rnn_allow_tf32(bool* result) {
  return guard([&] { *result = at::globalContext().allowTF32CuDNN(at::Float32Op::RNN); });
}

TCH_EXTENSION_API Message tch_extension_set_rnn_allow_tf32(bool allow) {
  return guard([&] {
    at::globalContext().setFloat32Precision(
        at::Float32Backend::CUDA, at::Float32Op::RNN,
        allow ? at::Float32Precision::TF32 : at::Float32Precision::IEEE);
  });
}
