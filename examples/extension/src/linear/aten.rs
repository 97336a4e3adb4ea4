//! Level 3: C++ on ATen, differentiated there (`csrc/linear/aten.cpp`). The dispatcher knows it by
//! name.

use std::sync::LazyLock;
use tch::Tensor;
use tch_extension::library::Operator;
use tch_extension::{Result, args};

static LINEAR: LazyLock<Operator> = LazyLock::new(|| {
    Operator::find("extension_example::linear").expect("csrc/linear/aten.cpp is linked")
});

/// `x Wᵀ + b`
pub fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    LINEAR.call(args![x, w, b])
}
