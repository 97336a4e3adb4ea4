// An operator in the newer style of PyTorch's extensions: a schema, a kernel for the CPU, and a
// module that exists only so that Python can import it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <Python.h>
#include <torch/library.h>

extern "C" {
PyObject* PyInit__C(void) {
  static struct PyModuleDef module_def = {
      PyModuleDef_HEAD_INIT, "_C", NULL, -1, NULL,
  };
  return PyModule_Create(&module_def);
}
}

namespace {

at::Tensor muladd_cpu(const at::Tensor& a, const at::Tensor& b, double c) {
  TORCH_CHECK(a.sizes() == b.sizes());
  TORCH_CHECK(a.dtype() == at::kFloat && b.dtype() == at::kFloat);
  const at::Tensor a_contiguous = a.contiguous();
  const at::Tensor b_contiguous = b.contiguous();
  at::Tensor result = at::empty_like(a_contiguous);
  const float* from_a = a_contiguous.const_data_ptr<float>();
  const float* from_b = b_contiguous.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    to[i] = from_a[i] * from_b[i] + static_cast<float>(c);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY(tch_test_muladd, m) { m.def("muladd(Tensor a, Tensor b, float c) -> Tensor"); }

TORCH_LIBRARY_IMPL(tch_test_muladd, CPU, m) { m.impl("muladd", &muladd_cpu); }
