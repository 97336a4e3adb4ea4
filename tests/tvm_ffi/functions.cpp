// Functions for the tests, as other projects write them: against the headers of TVM FFI.
#define TVM_FFI_DLL_EXPORT_INCLUDE_METADATA 1
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>

namespace ffi = tvm::ffi;

namespace {

constexpr DLDataType kFloat{kDLFloat, 32, 1};

// y = x + 1 for fp32 of one dimension.
void add_one(ffi::TensorView x, ffi::TensorView y) {
  if (x.ndim() != 1 || y.ndim() != 1) TVM_FFI_THROW(ValueError) << "x and y need one dimension";
  if (x.size(0) != y.size(0))
    TVM_FFI_THROW(ValueError) << "x has " << x.size(0) << " elements, and y has " << y.size(0);
  if (x.dtype() != kFloat || y.dtype() != kFloat) TVM_FFI_THROW(TypeError) << "x and y need fp32";
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.size(0); ++i) to[i * y.stride(0)] = from[i * x.stride(0)] + 1;
}

ffi::Tensor add_one_alloc(ffi::TensorView x) {
  auto y = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, x.shape(), x.dtype(), x.device());
  add_one(x, ffi::TensorView(y));
  return y;
}

}  // namespace

int call_add_one(const TVMFFIAny* arguments, int32_t len, TVMFFIAny* result);

namespace {

DLTensor view(ffi::TensorView x) {
  return {x.data_ptr(),
          x.device(),
          x.ndim(),
          x.dtype(),
          const_cast<int64_t*>(x.shape().data()),
          const_cast<int64_t*>(x.strides().data()),
          0};
}

// The time of a call of add_one by its C function, in ns: what a caller in C pays.
double time_of_add_one(ffi::TensorView x, ffi::TensorView y, int64_t calls) {
  DLTensor views[2] = {view(x), view(y)};
  TVMFFIAny arguments[2] = {};
  for (int i = 0; i < 2; ++i) {
    arguments[i].type_index = kTVMFFIDLTensorPtr;
    arguments[i].v_ptr = &views[i];
  }
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    TVMFFIAny result{};
    call_add_one(arguments, 2, &result);
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(calls);
}

// What a function sees of a tensor.
ffi::String describe(ffi::TensorView x) {
  std::string text = ffi::DLDataTypeToString(x.dtype()) + " on " +
                     std::to_string(x.device().device_type) + ", sizes";
  for (int i = 0; i < x.ndim(); ++i) text += ' ' + std::to_string(x.size(i));
  text += ", strides";
  for (int i = 0; i < x.ndim(); ++i) text += ' ' + std::to_string(x.stride(i));
  return text;
}

// A view of a tensor of its own, of the same size and first element.
ffi::Tensor transposed(ffi::TensorView x) {
  auto y = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, x.shape(), x.dtype(), x.device());
  for (int64_t i = 0; i < y.numel(); ++i)
    static_cast<float*>(y.data_ptr())[i] = static_cast<const float*>(x.data_ptr())[i];
  const int64_t strides[2] = {1, x.size(1)};
  return y.as_strided(x.shape(), ffi::ShapeView(strides, 2));
}

ffi::Tensor empty_like(ffi::TensorView x) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, x.shape(), x.dtype(), x.device());
}

// FlashInfer's function on the CPU, in fp64: y = x / sqrt(mean(x²) + eps) · weight.
void rmsnorm(ffi::TensorView y, ffi::TensorView x, ffi::TensorView weight, double eps, bool) {
  const int64_t rows = x.size(0), columns = x.size(1);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* from = static_cast<const double*>(x.data_ptr()) + row * x.stride(0);
    auto* to = static_cast<double*>(y.data_ptr()) + row * y.stride(0);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += from[i] * from[i];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(columns) + eps);
    for (int64_t i = 0; i < columns; ++i)
      to[i] = from[i] * scale * static_cast<const double*>(weight.data_ptr())[i];
  }
}

ffi::Optional<ffi::Tensor> kept;

void keep(ffi::Tensor x) { kept = x; }
ffi::Tensor give_back() {
  ffi::Tensor x = kept.value();
  kept = std::nullopt;
  return x;
}
ffi::Tensor same(ffi::Tensor x) { return x; }

double scalars(int64_t a, double b, bool c) { return static_cast<double>(a) + b + (c ? 100 : 0); }
ffi::String twice(ffi::String text) { return text + text; }
int64_t sum(ffi::Array<int64_t> numbers) {
  int64_t result = 0;
  for (int64_t number : numbers) result += number;
  return result;
}
int64_t elements(ffi::Array<ffi::Tensor> tensors) {
  int64_t result = 0;
  for (const ffi::Tensor& tensor : tensors) result += tensor.numel();
  return result;
}
bool is_absent(ffi::Optional<ffi::TensorView> x) { return !x.has_value(); }
DLDataType dtype(DLDataType dtype) { return dtype; }
DLDevice device(DLDevice device) { return device; }
ffi::Tuple<ffi::Tensor, ffi::Tuple<int64_t, ffi::String>> nested(ffi::Tensor x) {
  return ffi::Tuple<ffi::Tensor, ffi::Tuple<int64_t, ffi::String>>(
      x, ffi::Tuple<int64_t, ffi::String>(x.numel(), "a text of more than seven bytes"));
}
ffi::Shape shape(ffi::TensorView x) { return ffi::Shape(x.shape()); }
ffi::Function function() {
  return ffi::Function::FromTyped([] { return 1; });
}
int64_t stream(ffi::TensorView x) {
  const DLDevice device = x.device();
  return reinterpret_cast<int64_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}
void throws() { throw std::runtime_error("a std::runtime_error\nof two lines"); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one, add_one);
int call_add_one(const TVMFFIAny* arguments, int32_t len, TVMFFIAny* result) {
  return __tvm_ffi_add_one(nullptr, arguments, len, result);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_one_alloc, add_one_alloc);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(time_of_add_one, time_of_add_one);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, describe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty_like, empty_like);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transposed, transposed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, rmsnorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(keep, keep);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(give_back, give_back);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(same, same);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scalars, scalars);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice, twice);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum, sum);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elements, elements);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(is_absent, is_absent);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dtype, dtype);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device, device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nested, nested);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shape, shape);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(function, function);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream, stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(throws, throws);
