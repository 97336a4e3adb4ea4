// Defines an operator that operators.cpp also defines.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(tch_test, m) { m.def("cube(Tensor x) -> Tensor"); }
