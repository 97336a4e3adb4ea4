//! Level 3: C++ on ATen, which is also differentiated in C++ (`csrc/linear/aten.cpp`). Rust calls
//! it by its name in libtorch's dispatcher.

use std::sync::LazyLock;
use tch::Tensor;
use tch_extension::library::Operator;
use tch_extension::{Result, args};

static LINEAR: LazyLock<Operator> = LazyLock::new(|| {
    Operator::find("extension_example::linear").expect("csrc/linear/aten.cpp is linked")
});

/// Computes `x Wᵀ + b`.
pub fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    LINEAR.call(args![x, w, b])
}
