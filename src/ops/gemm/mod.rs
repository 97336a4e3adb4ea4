//! Matrix products with what follows them, in one kernel where there is one: what `linear`,
//! `matmul_add_relu` and the cells share.

#[cfg(not(tch_extension_cuda))]
mod absent;
#[cfg(tch_extension_cuda)]
mod kernels;

/// How a product is computed.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// What was measured to be fastest; chosen in `csrc/gemm`.
    #[default]
    Automatic,
    /// One call of cuBLASLt, by a plan.
    Plan,
    /// The kernel for small products.
    Small,
    /// The kernel for Hopper: a bias of full shape, in the half kinds.
    Hopper,
    /// Sums of products, for up to 4 columns or rows.
    Skinny,
    /// One call of cuBLASLt, of factors copied to rows that begin at multiples of 16 bytes.
    Padded,
    /// One call of cuBLASLt, with a kernel for the ReLU behind it.
    Pass,
    /// libtorch's product, with a kernel behind it.
    Composite,
}

/// What a thread's cache of plans did so far.
#[doc(hidden)]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub hits: i64,
    pub misses: i64,
    /// Kept at the moment.
    pub plans: i64,
}

super::way::ways!(Way);

#[cfg(not(tch_extension_cuda))]
use absent as calls;
#[cfg(tch_extension_cuda)]
use kernels as calls;

/// `relu(lhs @ rhs + bias)`; nothing where this way is not open: for other tensors than those of
/// one kind on one CUDA device, for a bias that enlarges the product, for layouts that would have
/// to be copied, for arguments that do not fit together.
pub(crate) use calls::matmul_add_relu;

/// `input @ weightᵀ + bias`, likewise.
pub(crate) use calls::linear;

/// `lhs @ rhs` by a kernel of ours, without a graph; nothing where libtorch's is faster.
pub(crate) use calls::product;

#[doc(hidden)]
pub use calls::counters;
