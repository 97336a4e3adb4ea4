// Operators that are registered with libtorch's dispatcher by name and schema. The CPU kernels are
// in this file, the CUDA kernels in muladd.cu.

#include "muladd.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

namespace extension {

void check(const char* name, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.sizes() == b.sizes(), name, ": a has shape ", a.sizes(), ", but b has ", b.sizes());
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), name, ": a is ", a.scalar_type(), ", but b is ",
              b.scalar_type());
  TORCH_CHECK(a.device() == b.device(), name, ": a is on ", a.device(), ", but b on ", b.device());
}

void check_out(const char* name, const at::Tensor& a, const at::Tensor& out) {
  check(name, a, out);
  TORCH_CHECK(out.is_contiguous(), name, ": out must be contiguous");
}

namespace {

template <typename Body>
void for_each(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, Body body) {
  const at::Tensor a_values = a.contiguous(), b_values = b.contiguous();
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "extension_example", [&] {
    const auto* from_a = a_values.const_data_ptr<scalar_t>();
    const auto* from_b = b_values.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    for (int64_t index = 0; index < a.numel(); ++index)
      to[index] = body(from_a[index], from_b[index]);
  });
}

at::Tensor muladd_cpu(const at::Tensor& a, const at::Tensor& b, double c) {
  check("muladd", a, b);
  at::Tensor out = at::empty(a.sizes(), a.options());
  for_each(a, b, out, [c](auto x, auto y) { return x * y + static_cast<decltype(x)>(c); });
  return out;
}

at::Tensor mul_cpu(const at::Tensor& a, const at::Tensor& b) {
  check("mul", a, b);
  at::Tensor out = at::empty(a.sizes(), a.options());
  for_each(a, b, out, [](auto x, auto y) { return x * y; });
  return out;
}

void add_out_cpu(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  check("add_out", a, b);
  check_out("add_out", a, out);
  for_each(a, b, out, [](auto x, auto y) { return x + y; });
}

}  // namespace
}  // namespace extension

// The schemas: what the operators take and return. An argument that is written to has an
// exclamation mark.
TORCH_LIBRARY(extension_example, m) {
  m.def("muladd(Tensor a, Tensor b, float c) -> Tensor");
  m.def("mul(Tensor a, Tensor b) -> Tensor");
  m.def("add_out(Tensor a, Tensor b, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(extension_example, CPU, m) {
  m.impl("muladd", &extension::muladd_cpu);
  m.impl("mul", &extension::mul_cpu);
  m.impl("add_out", &extension::add_out_cpu);
}
