// Products over all steps at once.
#pragma once

#include <ATen/core/Tensor.h>

namespace tch_extension::recurrent {

// lhs rhs, plus a bias [N] on each row if there is one. All are of one kind; lhs is [M, K] and rhs
// [K, N], with any strides.
//
// Calls libtorch's own products. For float on the CPU that may be oneDNN's: MKL, which `mm` calls,
// reaches only half of its rate on processors that are not Intel's, 209 GFLOP/s compared with 464
// on two cores of an EPYC.
at::Tensor product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* bias);

// lhs rhs of float on CUDA by cuBLAS in tf32, without regard to libtorch's switch for products.
// Each operand is row-major, or the transpose of a row-major matrix. With `to`, which is
// contiguous, the product is added to it, and it is the result.
at::Tensor tf32_product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* to);

// A bias of zeros, [columns], for a product of float on CUDA that has so few rows that cuBLAS has
// kernels for it that take ten times as long as those of cuBLASLt, which libtorch calls if the bias
// is a vector: on an H200 at B = 16, H = 128 they take 32 µs compared with 2.7 forward, and 51
// compared with 5 backward. Undefined for any other product.
at::Tensor zeros_for(const at::Tensor& like, int64_t columns, int64_t rows);

}  // namespace tch_extension::recurrent
