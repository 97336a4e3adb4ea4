// A kernel for libtorch's stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

using torch::stable::Tensor;

static Tensor twice(const Tensor& x) { return torch::stable::subtract(x, x, -1.0); }

STABLE_TORCH_LIBRARY(_stable_cpu_1, m) { m.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(_stable_cpu_1, CPU, m) { m.impl("twice", TORCH_BOX(&twice)); }
