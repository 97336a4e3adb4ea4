//! What every plan is given, and how all of them count.

use crate::ops::costs::coefficients;
use crate::ops::kinds::Kind;

/// The direction in which a kernel goes through the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    pub fn name(self) -> &'static str {
        if self == Direction::Forward { "forward" } else { "backward" }
    }
}

/// The sizes of a sequence.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Sizes {
    pub steps: i64,
    pub batch: i64,
    pub features: i64,
    pub hidden: i64,
}

/// Whether V·T·B·H fits in i32, in which the kernels count. V is the number of values that a step
/// reads or writes for a column.
pub(in crate::ops) fn counts_in_32_bits(
    Sizes { steps, batch, hidden, .. }: Sizes,
    values: i64,
) -> bool {
    let values =
        [batch, hidden, values].iter().try_fold(steps, |product, &size| product.checked_mul(size));
    values.is_some_and(|values| i32::try_from(values).is_ok())
}

coefficients! {
    /// A cost that grows with one size.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Line {
        Latency fixed: f64,
        Latency each: f64,
    }
}

impl Line {
    pub fn at(self, size: i64) -> f64 {
        self.fixed + self.each * size as f64
    }
}

/// How a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Product {
    Half,
    /// `Float` as scaled fp16 values, because tf32 is allowed.
    Scaled,
    Float,
    Double,
}

impl Product {
    pub fn name(self) -> &'static str {
        match self {
            Product::Half => "half",
            Product::Scaled => "scaled",
            Product::Float => "float",
            Product::Double => "double",
        }
    }

    pub fn of(kind: Kind, tf32: bool) -> Product {
        match kind {
            Kind::Half | Kind::BFloat16 => Product::Half,
            Kind::Float if tf32 => Product::Scaled,
            Kind::Float => Product::Float,
            Kind::Double => Product::Double,
        }
    }
}

pub(in crate::ops) fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}
