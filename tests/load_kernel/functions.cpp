// A kernel that exports its function by TVM FFI.

#include <tvm/ffi/tvm_ffi.h>

static void twice_cpu(tvm::ffi::TensorView y, tvm::ffi::TensorView x) {
  for (int64_t i = 0; i < x.numel(); i++)
    static_cast<double*>(y.data_ptr())[i] = 2 * static_cast<const double*>(x.data_ptr())[i];
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice_cpu, twice_cpu);
