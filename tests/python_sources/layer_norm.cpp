// LayerNorm over the last dimension, written for torch.utils.cpp_extension, with its own loop over
// rows.
#include <torch/extension.h>

#include <cmath>
#include <tuple>

#define CHECK_INPUT(x) TORCH_CHECK((x).is_contiguous(), #x " must be contiguous")

// Returns the normalised rows, and the means and reciprocal standard deviations, which the backward
// needs.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(at::Tensor input, at::Tensor weight,
                                                       at::Tensor bias, float eps) {
  CHECK_INPUT(input);
  CHECK_INPUT(weight);
  CHECK_INPUT(bias);
  const int columns = weight.size(0);
  const int64_t rows = columns == 0 ? 0 : input.numel() / columns;
  auto output = torch::empty_like(input);
  auto mean = torch::empty({rows}, input.options());
  auto rstd = torch::empty({rows}, input.options());
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "layer_norm_forward", ([&] {
                               const auto* x = input.data_ptr<scalar_t>();
                               const auto* w = weight.data_ptr<scalar_t>();
                               const auto* b = bias.data_ptr<scalar_t>();
                               auto* y = output.data_ptr<scalar_t>();
                               for (int64_t row = 0; row < rows; ++row) {
                                 const auto* from = x + row * columns;
                                 scalar_t sum = 0;
                                 for (int i = 0; i < columns; ++i) sum += from[i];
                                 const scalar_t m = sum / columns;
                                 scalar_t squares = 0;
                                 for (int i = 0; i < columns; ++i)
                                   squares += (from[i] - m) * (from[i] - m);
                                 const scalar_t r =
                                     1 / std::sqrt(squares / columns + static_cast<scalar_t>(eps));
                                 for (int i = 0; i < columns; ++i)
                                   y[row * columns + i] = (from[i] - m) * r * w[i] + b[i];
                                 mean.data_ptr<scalar_t>()[row] = m;
                                 rstd.data_ptr<scalar_t>()[row] = r;
                               }
                             }));
  return {output, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(at::Tensor grad, at::Tensor input,
                                                        at::Tensor mean, at::Tensor rstd,
                                                        at::Tensor weight) {
  auto m = mean.reshape({-1, 1});
  auto r = rstd.reshape({-1, 1});
  auto g = grad.reshape({-1, weight.size(0)});
  auto normalised = (input.reshape_as(g) - m) * r;
  auto gw = g * weight;
  auto d_input = r * (gw - gw.mean(1, true) - normalised * (gw * normalised).mean(1, true));
  return {d_input.reshape_as(input), (g * normalised).sum(0), g.sum(0)};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward, py::arg("input"), py::arg("weight"), py::arg("bias"),
        py::arg("eps") = 1e-5, py::call_guard<py::gil_scoped_release>());
  m.def("backward", &backward, py::call_guard<py::gil_scoped_release>());
}
