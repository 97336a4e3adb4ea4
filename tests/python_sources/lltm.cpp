// The LLTM cell (a long long-term memory: an LSTM without a forget gate) in C++ on ATen, written
// for torch.utils.cpp_extension.
#include <torch/extension.h>

#include <iostream>
#include <vector>

torch::Tensor d_sigmoid(torch::Tensor z) {
  auto s = torch::sigmoid(z);
  return s * (1 - s);
}

torch::Tensor d_tanh(torch::Tensor z) { return 1 - z.tanh().pow(2); }

torch::Tensor d_elu(torch::Tensor z) { return torch::where(z > 0, torch::ones_like(z), z.exp()); }

// Returns {h', c', input gate, output gate, candidate, [h, x], gates before activation}.
std::vector<torch::Tensor> lltm_forward(torch::Tensor input, torch::Tensor weights,
                                        torch::Tensor bias, torch::Tensor old_h,
                                        torch::Tensor old_cell) {
  auto X = torch::cat({old_h, input}, /*dim=*/1);
  auto gate_weights = torch::addmm(bias, X, weights.transpose(0, 1));
  auto gates = gate_weights.chunk(3, /*dim=*/1);
  auto input_gate = torch::sigmoid(gates[0]);
  auto output_gate = torch::sigmoid(gates[1]);
  auto candidate_cell = torch::elu(gates[2], /*alpha=*/1.0);
  auto new_cell = old_cell + candidate_cell * input_gate;
  auto new_h = torch::tanh(new_cell) * output_gate;
  return {new_h, new_cell, input_gate, output_gate, candidate_cell, X, gate_weights};
}

// Returns the gradients of old_h, input, weights, bias and old_cell.
std::vector<torch::Tensor> lltm_backward(torch::Tensor grad_h, torch::Tensor grad_cell,
                                         torch::Tensor new_cell, torch::Tensor input_gate,
                                         torch::Tensor output_gate, torch::Tensor candidate_cell,
                                         torch::Tensor X, torch::Tensor gate_weights,
                                         torch::Tensor weights) {
  auto d_output_gate = torch::tanh(new_cell) * grad_h;
  auto d_new_cell = output_gate * grad_h * d_tanh(new_cell) + grad_cell;
  auto gates = gate_weights.chunk(3, /*dim=*/1);
  auto d_gates =
      torch::cat({d_new_cell * candidate_cell * d_sigmoid(gates[0]),
                  d_output_gate * d_sigmoid(gates[1]), d_new_cell * input_gate * d_elu(gates[2])},
                 /*dim=*/1);
  auto d_X = d_gates.mm(weights);
  const auto state_size = grad_h.size(1);
  return {d_X.slice(/*dim=*/1, 0, state_size), d_X.slice(/*dim=*/1, state_size), d_gates.t().mm(X),
          d_gates.sum(/*dim=*/0, /*keepdim=*/true), d_new_cell};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &lltm_forward, "LLTM forward");
  m.def("backward", &lltm_backward, "LLTM backward");
}
