//! The linear layer: `y = x Wᵀ + b`, with x `[M, K]`, W `[N, K]` and b `[N]`.
//!
//! Backward: `dx = dy W`, `dW = dyᵀ x`, `db = Σ dy`.

pub mod aten;
pub mod composed;
pub mod function;
pub mod kernels;

use tch::Tensor;
use tch_extension::Result;

/// The function type of the operator: from x, W and b to y.
pub type Linear = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// The same operator at each of the four levels.
pub const LEVELS: [(&str, Linear); 4] = [
    ("tch operations", composed::linear),
    ("Function in Rust", function::linear),
    ("C++ on ATen", aten::linear),
    ("kernels", kernels::linear),
];
