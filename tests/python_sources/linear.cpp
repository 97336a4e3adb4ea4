// A linear layer, written for torch.utils.cpp_extension.
#include <torch/extension.h>

#include <vector>

torch::Tensor linear_forward(const torch::Tensor& input, const torch::Tensor& weight,
                             const torch::optional<torch::Tensor>& bias) {
  TORCH_CHECK(input.size(-1) == weight.size(1), "linear_forward: input has ", input.size(-1),
              " features, but weight wants ", weight.size(1));
  auto output = input.matmul(weight.t());
  if (bias.has_value()) {
    output = output + *bias;
  }
  return output;
}

// Returns the gradients of input, weight and bias.
std::vector<torch::Tensor> linear_backward(torch::Tensor grad, torch::Tensor input,
                                           torch::Tensor weight) {
  auto rows = grad.reshape({-1, grad.size(-1)});
  return {grad.matmul(weight), rows.t().mm(input.reshape({-1, input.size(-1)})), rows.sum(0)};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "A linear layer";
  m.def("forward", &linear_forward, "Linear forward", py::arg("input"), py::arg("weight"),
        py::arg("bias") = py::none());
  m.def("backward", &linear_backward, "Linear backward");
}
