// The operator muladd as PyTorch's tutorial writes it in C++: what bench.py compares the Rust with.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <ATen/ATen.h>

static at::Tensor cpu(const at::Tensor& a, const at::Tensor& b, double c) {
  TORCH_CHECK(a.sizes() == b.sizes(), "a is ", a.sizes(), " and b is ", b.sizes());
  TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat);
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  at::Tensor z = at::empty_like(x);
  const float *x_data = x.const_data_ptr<float>(), *y_data = y.const_data_ptr<float>();
  float* z_data = z.mutable_data_ptr<float>();
  for (int64_t at = 0; at < z.numel(); ++at) {
    z_data[at] = x_data[at] * y_data[at] + static_cast<float>(c);
  }
  return z;
}

static std::tuple<at::Tensor, at::Tensor> cpu_backward(const at::Tensor& grad, const at::Tensor& a,
                                                       const at::Tensor& b) {
  const at::Tensor g = grad.contiguous(), x = a.contiguous(), y = b.contiguous();
  at::Tensor grad_a = at::empty_like(x), grad_b = at::empty_like(y);
  const float *g_data = g.const_data_ptr<float>(), *x_data = x.const_data_ptr<float>();
  const float* y_data = y.const_data_ptr<float>();
  float *a_data = grad_a.mutable_data_ptr<float>(), *b_data = grad_b.mutable_data_ptr<float>();
  for (int64_t at = 0; at < g.numel(); ++at) {
    a_data[at] = g_data[at] * y_data[at];
    b_data[at] = g_data[at] * x_data[at];
  }
  return {grad_a, grad_b};
}

template <typename Signature>
static auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct MulAdd : torch::autograd::Function<MulAdd> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a,
                            const at::Tensor& b, double c) {
    static const auto op =
        find<at::Tensor(const at::Tensor&, const at::Tensor&, double)>("python_ops_cpp::muladd");
    context->save_for_backward({a, b});
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(a, b, c);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op =
        find<decltype(cpu_backward)>("python_ops_cpp::muladd_backward");
    const auto saved = context->get_saved_variables();
    auto [grad_a, grad_b] = op.call(grads[0], saved[0], saved[1]);
    return {grad_a, grad_b, at::Tensor()};
  }
};

static at::Tensor autograd(const at::Tensor& a, const at::Tensor& b, double c) {
  return MulAdd::apply(a, b, c);
}

TORCH_LIBRARY(python_ops_cpp, library) {
  library.def("muladd(Tensor a, Tensor b, float c=1.0) -> Tensor");
  library.def("muladd_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(python_ops_cpp, CPU, library) {
  library.impl("muladd", &cpu);
  library.impl("muladd_backward", &cpu_backward);
}

TORCH_LIBRARY_IMPL(python_ops_cpp, Autograd, library) { library.impl("muladd", &autograd); }
