//! Matrix products and the operations that follow them, fused into one kernel where one exists.
//! `linear`, `matmul_add_relu` and the cells share this module.

// The epilogue with a GELU is that of the feature `mlp`.
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

/// gelu(z), and z if it is wanted.
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
pub(crate) struct WithZ {
    pub output: Tensor,
    pub z: Option<Tensor>,
}

/// `gelu(z)` of z = `input weightᵀ + bias`, with tanh, of matrices, as one call of cuBLASLt. `None` if
/// cuBLASLt has no such call, and unless all tensors share one half kind and one CUDA device.
#[cfg_attr(not(feature = "mlp"), allow(unused_imports))]
pub(crate) use calls::linear_gelu;

#[doc(hidden)]
pub use calls::counters;
