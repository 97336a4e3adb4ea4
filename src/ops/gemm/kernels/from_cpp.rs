//! The kernels that only the C++ of `csrc/gemm` calls. They are declared here, as all others are in
//! Rust, because C++'s declarations and the list of what kernels export are made of these.

use crate::cuda::{LaunchStatus, cudaStream_t};
use crate::ops::gemm::plan::{Product, Skinny};
use std::ffi::c_void;

/// The factors that are padded together: lhs, rhs and bias.
const FACTORS: usize = 3;

/// The contiguous lines (rows or columns) of a batch of matrices, and their padded copy. The copy
/// has the lines one after another, each padded with zeros to `padded_length`, and lines of zeros
/// up to `padded_lines` per matrix.
#[repr(C)]
struct Lines {
    from: *const c_void,
    to: *mut c_void,
    /// Elements from one line to the next, in `from`.
    line: i64,
    /// Elements from one matrix to the next, in `from`.
    batch: i64,
    matrices: i64,
    /// Per matrix.
    lines: i64,
    length: i64,
    padded_lines: i64,
    /// A multiple of 16 bytes.
    padded_length: i64,
}

/// A factor with `matrices` = 0 is left out.
#[repr(C)]
struct PadFactors {
    factor: [Lines; FACTORS],
    kind: i32,
}

/// Copies matrices with padded rows to `out`, which is contiguous, and applies the ReLU if `relu` is
/// set. If nothing is padded, `out` may be the same as `from`. NaN stays NaN.
#[repr(C)]
struct FinishProduct {
    from: *const c_void,
    out: *mut c_void,
    batch: i64,
    rows: i64,
    columns: i64,
    padded_rows: i64,
    /// `columns`, or a multiple of 16 bytes.
    padded_columns: i64,
    kind: i32,
    relu: i32,
}

unsafe extern "C" {
    /// Whether M or N is small, and the other side's operand is contiguous in one dimension; and
    /// how the kernels would then read the product.
    fn tch_extension_gemm_skinny_facts_cuda(product: *const Product, result: *mut Skinny) -> bool;
    /// Whether this is a product with a bias of full shape, bulk copies support its addresses and
    /// strides, and the kernel was compiled for the current device.
    fn tch_extension_gemm_hopper_can_cuda(product: *const Product) -> bool;
    /// Whether the sizes are within the limits of the grid and of 32-bit indices.
    fn tch_extension_gemm_small_can_cuda(product: *const Product) -> bool;
    fn tch_extension_gemm_small_cuda(product: *const Product, stream: cudaStream_t)
    -> LaunchStatus;
    /// `is_started` becomes false if the driver cannot make tensor maps for these matrices; then
    /// nothing was launched.
    fn tch_extension_gemm_hopper_cuda(
        product: *const Product,
        is_started: *mut bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_gemm_skinny_cuda(
        product: *const Product,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    /// Up to three products of one lhs, whose few rows tensor cores read, in one launch. With a gate,
    /// the first output is silu(first) second, and there are no others. If the weight `[K]` of an RMS norm is
    /// not null, the products are those of the norm of lhs, and of kind BFloat16.
    fn tch_extension_gemm_skinny_together_cuda(
        products: *const Product,
        count: i32,
        norm_weight: *const c_void,
        norm_eps: f32,
        is_gated: bool,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    /// Pads lhs, rhs and bias in one launch.
    fn tch_extension_gemm_pad_factors_cuda(
        factors: *const PadFactors,
        stream: cudaStream_t,
    ) -> LaunchStatus;
    fn tch_extension_gemm_finish_product_cuda(
        finish: *const FinishProduct,
        stream: cudaStream_t,
    ) -> LaunchStatus;
}
