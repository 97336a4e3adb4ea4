//! The ways to compute a product.

/// The ways to compute a product. Each is a file of `csrc/gemm`.
#[doc(hidden)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The fastest, as measured. `csrc/gemm/product.cpp` chooses it, because cuBLASLt's heuristic is
    /// asked there.
    #[default]
    Automatic,
    /// One call of cuBLASLt with a plan that is kept.
    Plan,
    /// A kernel of ours for small products.
    Small,
    /// A kernel of ours for compute capability 9.0: half kinds with a bias of full shape.
    Hopper,
    /// Dot products, for up to 4 rows or columns.
    Skinny,
    /// One call of cuBLASLt on copies whose rows begin at multiples of 16 bytes.
    Padded,
    /// One call of cuBLASLt, and then a kernel for the ReLU.
    Pass,
    /// libtorch's product, and then a kernel for the rest.
    Composite,
}

/// What this thread's cache of plans did so far.
#[doc(hidden)]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub hits: i64,
    pub misses: i64,
    /// How many plans are kept now.
    pub plans: i64,
}

crate::ops::way::ways!(Way);
