//! The ways to compute a product.

/// The ways to compute a product. Each is a file of `csrc/gemm`.
#[doc(hidden)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The fastest way, as measured. `csrc/gemm/product.cpp` chooses it, because that is where
    /// cuBLASLt's heuristic is queried.
    #[default]
    Automatic,
    /// One call of cuBLASLt, with a plan that is kept for later calls.
    Plan,
    /// A kernel of this crate for small products.
    Small,
    /// A kernel of this crate for compute capability 9.0: half kinds with a bias of full shape.
    Hopper,
    /// Dot products, for at most 4 rows or columns.
    Skinny,
    /// One call of cuBLASLt on padded copies, whose rows begin at multiples of 16 bytes.
    Padded,
    /// One call of cuBLASLt, followed by a kernel for the ReLU.
    Pass,
    /// libtorch's product, followed by a kernel for the rest.
    Composite,
}

/// Counters of this thread's cache of plans.
#[doc(hidden)]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub hits: i64,
    pub misses: i64,
    /// How many plans the cache holds now.
    pub plans: i64,
}

crate::ops::way::ways!(Way);
