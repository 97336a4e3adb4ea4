// Products over all steps at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace tch_extension::recurrent {

// lhs rhs, and a bias [N] for each row if there is one, all of one kind: [M, K] and [K, N] of any
// strides.
//
// libtorch's own, which for float on the CPU may be oneDNN's: MKL, to which `mm` goes, does half as
// much a second on processors that are not Intel's: 209 GFLOP/s against 464, on two cores of an
// EPYC.
at::Tensor product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* bias);

}  // namespace tch_extension::recurrent
