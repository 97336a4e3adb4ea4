//! Matrix products and the operations that follow them, fused into one kernel where one exists.
//! `linear`, `matmul_add_relu` and the cells share this module.

// Epilogues with a GELU are those of the feature `mlp`.
#[cfg(not(tch_extension_cuda))]
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
mod absent;
#[cfg(tch_extension_cuda)]
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
mod kernels;
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
mod plan;

#[doc(hidden)]
pub use plan::{Counters, Way};

use tch::Tensor;

#[cfg(not(tch_extension_cuda))]
use absent as calls;
#[cfg(tch_extension_cuda)]
use kernels as calls;

/// `relu(lhs @ rhs + bias)`. `None` unless all tensors share one kind and one CUDA device, the bias
/// does not enlarge the product, no operand has to be copied because of its layout, and the shapes
/// fit together.
pub(crate) use calls::matmul_add_relu;

/// `input @ weightᵀ + bias`, under the same conditions.
pub(crate) use calls::linear;

/// `lhs @ rhs` by a kernel of this crate, without autograd; `None` where libtorch's product is
/// faster.
pub(crate) use calls::product;

/// A product, and what else its epilogue computed.
pub(crate) struct WithExtra {
    pub product: Tensor,
    pub extra: Option<Tensor>,
}

/// `gelu(z)` of z = `input weightᵀ + bias`, with tanh, as one call of cuBLASLt, and z as `extra` if it
/// is wanted; of matrices. `None` if cuBLASLt has no such call, and unless all tensors share one half
/// kind and one CUDA device.
#[cfg_attr(not(feature = "mlp"), allow(unused_imports))]
pub(crate) use calls::linear_gelu;

/// `(lhs rhs) gelu'(z)` and, as `extra` if they are wanted, the sums of its columns. `None` as above.
#[cfg_attr(not(feature = "mlp"), allow(unused_imports))]
pub(crate) use calls::product_gelu_grad;

/// `lhs rhs` and, as `extra`, the sums of the rows of `lhs`: of a gradient's transpose and the inputs
/// of its layer, the gradients of the weight and of the bias. `None` as above.
pub(crate) use calls::product_and_sums;

#[doc(hidden)]
pub use calls::counters;
