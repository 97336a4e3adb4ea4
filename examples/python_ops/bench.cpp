// Two operators as PyTorch's tutorial writes them in C++: what bench.py compares the Rust with.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The operator itself, to be called below autograd. Each of its calls looks it up once.
template <typename Signature>
static auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// muladd: kernels in plain C++.

static Tensor muladd(const Tensor& a, const Tensor& b, double c) {
  TORCH_CHECK(a.sizes() == b.sizes(), "a is ", a.sizes(), " and b is ", b.sizes());
  TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat);
  const Tensor x = a.contiguous(), y = b.contiguous();
  Tensor z = at::empty_like(x);
  const float *x_data = x.const_data_ptr<float>(), *y_data = y.const_data_ptr<float>();
  float* z_data = z.mutable_data_ptr<float>();
  for (int64_t at = 0; at < z.numel(); ++at) {
    z_data[at] = x_data[at] * y_data[at] + static_cast<float>(c);
  }
  return z;
}

static std::tuple<Tensor, Tensor> muladd_backward(const Tensor& grad, const Tensor& a,
                                                  const Tensor& b) {
  const Tensor g = grad.contiguous(), x = a.contiguous(), y = b.contiguous();
  Tensor grad_a = at::empty_like(x), grad_b = at::empty_like(y);
  const float *g_data = g.const_data_ptr<float>(), *x_data = x.const_data_ptr<float>();
  const float* y_data = y.const_data_ptr<float>();
  float *a_data = grad_a.mutable_data_ptr<float>(), *b_data = grad_b.mutable_data_ptr<float>();
  for (int64_t at = 0; at < g.numel(); ++at) {
    a_data[at] = g_data[at] * y_data[at];
    b_data[at] = g_data[at] * x_data[at];
  }
  return {grad_a, grad_b};
}

struct MulAdd : torch::autograd::Function<MulAdd> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b, double c) {
    static const auto op = find<decltype(muladd)>("python_ops_cpp::muladd");
    context->save_for_backward({a, b});
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(a, b, c);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find<decltype(muladd_backward)>("python_ops_cpp::muladd_backward");
    const auto saved = context->get_saved_variables();
    auto [grad_a, grad_b] = op.call(grads[0], saved[0], saved[1]);
    return {grad_a, grad_b, Tensor()};
  }
};

// swish: ATen's operations.

static Tensor swish(const Tensor& x, double beta) { return x.mul(beta).sigmoid().mul(x); }

struct Swish : torch::autograd::Function<Swish> {
  static Tensor forward(AutogradContext* context, const Tensor& x, double beta) {
    static const auto op = find<decltype(swish)>("python_ops_cpp::swish");
    context->save_for_backward({x});
    context->saved_data["beta"] = beta;
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, beta);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const Tensor scaled =
        context->get_saved_variables()[0].mul(context->saved_data["beta"].toDouble());
    const Tensor sigmoid = scaled.sigmoid();
    const Tensor inner = scaled.mul(at::rsub(sigmoid, 1)).add(1);
    return {grads[0].mul(sigmoid.mul(inner)), Tensor()};
  }
};

TORCH_LIBRARY(python_ops_cpp, library) {
  library.def("muladd(Tensor a, Tensor b, float c=1.0) -> Tensor");
  library.def("muladd_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)");
  library.def("swish(Tensor x, float beta=1.0) -> Tensor");
}

TORCH_LIBRARY_IMPL(python_ops_cpp, CPU, library) {
  library.impl("muladd", &muladd);
  library.impl("muladd_backward", &muladd_backward);
  library.impl("swish", &swish);
}

TORCH_LIBRARY_IMPL(python_ops_cpp, Autograd, library) {
  library.impl("muladd", [](const Tensor& a, const Tensor& b, double c) -> Tensor {
    return MulAdd::apply(a, b, c);
  });
  library.impl("swish",
               [](const Tensor& x, double beta) -> Tensor { return Swish::apply(x, beta); });
}
