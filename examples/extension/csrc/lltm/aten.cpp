// Level 3: forward and backward in C++ on ATen, bound with pybind11. The same file also works as an
// extension for Python.

#include <torch/extension.h>

#include <vector>

// Returns h' and c', and for the backward [h, x] and the activations σ(i), σ(o), g.
std::vector<torch::Tensor> lltm_forward(torch::Tensor x, torch::Tensor w, torch::Tensor b,
                                        torch::Tensor h, torch::Tensor c) {
  TORCH_CHECK(x.dim() == 2 && h.dim() == 2, "lltm takes x [B, F] and h [B, H]");
  auto hx = torch::cat({h, x}, 1);
  auto gates = torch::addmm(b, hx, w.t()).chunk(3, 1);
  auto i = gates[0].sigmoid(), o = gates[1].sigmoid(), g = gates[2];
  auto new_c = c + torch::elu(g) * i;
  auto new_h = new_c.tanh() * o;
  return {new_h, new_c, hx, i, o, g};
}

// Returns the gradients of x, w, b, h and c.
std::vector<torch::Tensor> lltm_backward(torch::Tensor dh, torch::Tensor dc, torch::Tensor w,
                                         torch::Tensor new_c, torch::Tensor hx, torch::Tensor i,
                                         torch::Tensor o, torch::Tensor g) {
  auto tanh_c = new_c.tanh();
  dc = dc + dh * o * (1 - tanh_c * tanh_c);
  auto di = dc * torch::elu(g) * i * (1 - i);
  auto d_o = dh * tanh_c * o * (1 - o);
  auto dg = dc * i * g.clamp_max(0).exp();
  auto dgates = torch::cat({di, d_o, dg}, 1);
  auto dhx = dgates.mm(w);
  auto hidden = new_c.size(1);
  return {dhx.slice(1, hidden), dgates.t().mm(hx), dgates.sum(0), dhx.slice(1, 0, hidden), dc};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("lltm_forward", &lltm_forward, "One step of an LLTM cell");
  m.def("lltm_backward", &lltm_backward, "Its gradients");
}
