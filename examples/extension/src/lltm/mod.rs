//! One step of an LLTM cell: `[i│o│g] = [h, x] Wᵀ + b`, `c' = c + elu(g) σ(i)`, `h' = tanh(c')
//! σ(o)`, with x `[B, F]`, W `[3H, H + F]`, b `[3H]`, h and c `[B, H]`.

pub mod aten;
pub mod composed;
pub mod function;
pub mod kernels;

use tch::Tensor;
use tch_extension::Result;

/// The function type of the operator: from x, W, b and (h, c) to (h', c').
pub type Lltm = fn(&Tensor, &Tensor, &Tensor, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

/// The same operator at each of the four levels.
pub const LEVELS: [(&str, Lltm); 4] = [
    ("tch operations", composed::lltm),
    ("Function in Rust", function::lltm),
    ("C++ on ATen", aten::lltm),
    ("kernels", kernels::lltm),
];
