//! Fused operators with hand-written kernels, forward and backward, for CPU and CUDA.
//!
//! Each operator has three functions: `op(…)` panics on bad arguments, as tch's functions do;
//! `f_op(…)` returns a [`Result`](crate::Result); `op_reference(…)` computes the same in plain tch
//! operations.
//!
//! Operators belong to families, each of which is a feature of this crate and on by default:
//! `norm` (`layer_norm`, `rms_norm`, `add_layer_norm`, `add_rms_norm`), `loss` (`cross_entropy`,
//! `linear_cross_entropy`), `gemm` (`linear`,
//! `matmul_add_relu`), `mlp` (`gelu_mlp`, `swiglu_mlp`; it needs `gemm`), `recurrent` (`lstm`, `gru`,
//! `lltm`, `lltm_cell`; it needs `gemm`) and `rope` (`rope`). The kernels of a family that is off are
//! not compiled.

#[macro_use]
mod list;
pub(crate) mod kinds;
mod tch_kinds;

#[cfg(feature = "norm")]
mod add_layer_norm;
#[cfg(feature = "norm")]
pub(crate) mod add_rms_norm;
pub(crate) mod attention;
#[cfg(feature = "gemm")]
mod column_sums;
#[cfg(feature = "gemm")]
mod costs;
#[cfg(feature = "loss")]
mod cross_entropy;
#[cfg(feature = "mlp")]
mod gelu_mlp;
#[cfg(feature = "gemm")]
mod gemm;
#[cfg(all(test, feature = "recurrent", feature = "norm"))]
mod generated;
#[cfg(feature = "recurrent")]
mod gru;
#[cfg(feature = "norm")]
pub(crate) mod layer_norm;
#[cfg(feature = "gemm")]
mod linear;
#[cfg(feature = "loss")]
mod linear_cross_entropy;
#[cfg(feature = "recurrent")]
mod lltm;
#[cfg(feature = "recurrent")]
mod lltm_cell;
#[cfg(feature = "loss")]
pub(crate) mod loss;
#[cfg(feature = "recurrent")]
mod lstm;
#[cfg(feature = "gemm")]
mod matmul_add_relu;
#[cfg(feature = "mlp")]
mod mlp;
#[cfg(feature = "norm")]
pub(crate) mod norm;
#[cfg(all(
    test,
    feature = "gemm",
    feature = "loss",
    feature = "mlp",
    feature = "norm",
    feature = "recurrent",
    feature = "rope"
))]
mod python;
#[cfg(feature = "recurrent")]
mod recurrent;
#[cfg(feature = "norm")]
pub(crate) mod rms_norm;
#[cfg(feature = "rope")]
pub(crate) mod rope;
#[cfg(feature = "mlp")]
mod swiglu_mlp;
#[cfg(feature = "recurrent")]
#[doc(hidden)]
pub mod tune;
mod way;
#[cfg(all(test, feature = "recurrent", feature = "norm"))]
mod ways;

#[cfg(feature = "norm")]
pub use add_layer_norm::AddLayerNormOptions;
#[cfg(feature = "norm")]
pub use add_rms_norm::AddRmsNormOptions;
#[cfg(feature = "gemm")]
pub use costs::{CostSource, Tuning, tuning};
#[cfg(feature = "loss")]
pub use cross_entropy::CrossEntropyOptions;
#[cfg(feature = "mlp")]
pub use gelu_mlp::GeluMlpOptions;
#[cfg(feature = "gemm")]
#[doc(hidden)]
pub use gemm::{Way as ProductWay, counters as product_plans};
#[cfg(all(feature = "norm", feature = "mlp"))]
pub(crate) use linear::{InputNorm, linear_add, normed_gate, normed_linear_each};
#[cfg(feature = "gemm")]
#[doc(hidden)]
pub use linear::{f_linear_each, f_linear_parts};
#[cfg(feature = "loss")]
pub use linear_cross_entropy::LinearCrossEntropyOptions;
#[cfg(feature = "mlp")]
pub use mlp::Activation;
#[cfg(feature = "mlp")]
#[doc(hidden)]
pub use mlp::Way as MlpWay;
#[cfg(feature = "norm")]
#[doc(hidden)]
pub use norm::Way as NormWay;
#[cfg(feature = "recurrent")]
#[doc(hidden)]
pub use recurrent::Way as RnnWay;
#[cfg(feature = "recurrent")]
pub use recurrent::{RnnOptions, RnnWeights};
#[cfg(feature = "recurrent")]
pub(crate) use recurrent::{check_lengths, flatten_for_cudnn, with_half_of_the_gpu};
#[cfg(feature = "rope")]
pub use rope::{RopeOptions, RopeScaling, f_scaled_rope_tables};
#[cfg(feature = "mlp")]
pub use swiglu_mlp::SwigluMlpOptions;
#[doc(hidden)]
pub use way::force;

/// Exports the definition of each operator.
macro_rules! definitions {
    ($($name:ident of $family:literal { operator: [$operator:ident, $tensors:ident], $($rest:tt)* })*) => {
        $(
            #[cfg(feature = $family)]
            pub use super::$name::{$operator, $tensors};
        )*
    };
}

/// Operators of which each is one definition: an [`Operator`](crate::operator::Operator). The package
/// tch-extension-python registers them.
#[doc(hidden)]
pub mod definitions {
    operators!(definitions);
}

/// Exports the functions and the ways of each operator.
macro_rules! export {
    ($($name:ident of $family:literal {
        operator: [$operator:ident, $tensors:ident],
        functions: [$($function:ident),*],
        way: [$($way:ident)?],
        files: [$($file:literal),* $(,)?],
    })*) => {
        $(
            #[cfg(feature = $family)]
            pub use $name::{$($function),*};
            $(
                #[cfg(feature = $family)]
                #[doc(hidden)]
                pub use $name::Way as $way;
            )?
        )*
    };
}
operators!(export);

/// The value, or a panic with the error's text, as in tch's functions without `f_`.
fn unwrap<T>(result: crate::Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// `[..., n]` as a matrix `[rows, n]`.
fn rows(tensor: &tch::Tensor) -> crate::Result<tch::Tensor> {
    let size = tensor.size();
    let columns = size.last().copied().unwrap_or(1);
    let rows = count_rows(&size)
        .ok_or_else(|| crate::Error::msg(format!("{size:?} has too many rows")))?;
    Ok(tensor.f_reshape([rows, columns])?)
}

/// A new contiguous tensor in another size. It is no view: where no graph is recorded, libtorch makes
/// views that cannot be changed in place later.
#[cfg(feature = "gemm")]
fn reshaped(tensor: &tch::Tensor, size: &[i64]) -> crate::Result<tch::Tensor> {
    Ok(tensor.f_internal_unsafe_view(size)?)
}

/// The product of the leading dimensions; `None` if it exceeds 64 bits, which it may without
/// elements.
fn count_rows(size: &[i64]) -> Option<i64> {
    let leading = &size[..size.len().saturating_sub(1)];
    leading.iter().try_fold(1_i64, |rows, &size| rows.checked_mul(size))
}
