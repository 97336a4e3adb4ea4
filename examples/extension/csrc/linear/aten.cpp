// Level 3: the operator and its backward in C++, as a torch::autograd::Function.

#include <torch/all.h>
#include <torch/library.h>

namespace {

class Linear : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& w, const at::Tensor& b) {
    ctx->save_for_backward({x, w});
    return at::addmm(b, x, w.t());
  }

  // This consists of differentiable operations, so it can be differentiated again.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& dy = grads[0];
    return {
        ctx->needs_input_grad(0) ? dy.mm(saved[1]) : at::Tensor(),
        ctx->needs_input_grad(1) ? dy.t().mm(saved[0]) : at::Tensor(),
        ctx->needs_input_grad(2) ? dy.sum(0) : at::Tensor(),
    };
  }
};

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
  TORCH_CHECK(x.dim() == 2 && w.dim() == 2 && b.dim() == 1,
              "linear takes x [M, K], w [N, K] and b [N]");
  return Linear::apply(x, w, b);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(extension_example, m) {
  m.def("linear(Tensor x, Tensor w, Tensor b) -> Tensor", &linear);
}
