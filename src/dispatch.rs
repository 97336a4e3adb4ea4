//! Conversions between a tensor's kind, which is known at run time, and a Rust type, which is known
//! at compile time.

use tch::Kind;
use tch::kind::Element;

/// The kind of tensors whose elements are `T`. It corrects [`Element::KIND`].
///
/// In tch 0.24, that constant is `Half` even for the half crate's `bf16`, which only its type name
/// distinguishes from `f16`. Both are plain numbers of two bytes, so a wrong guess could only give
/// a wrong number and never corrupt memory.
///
/// ```
/// use tch::Kind;
/// use tch_extension::kind_of;
///
/// assert_eq!(kind_of::<f32>(), Kind::Float);
/// ```
pub fn kind_of<T: Element>() -> Kind {
    let is_bf16 = T::KIND == Kind::Half && std::any::type_name::<T>().ends_with("::bf16");
    if is_bf16 { Kind::BFloat16 } else { T::KIND }
}

/// The kind of the sum of two tensors of floating-point kinds.
pub(crate) fn promote(a: Kind, b: Kind) -> Kind {
    let digits = |kind| match kind {
        Kind::Double => 3,
        Kind::Float => 2,
        _ => 1,
    };
    match digits(a).cmp(&digits(b)) {
        std::cmp::Ordering::Less => b,
        std::cmp::Ordering::Greater => a,
        std::cmp::Ordering::Equal if a == b => a,
        // Half has more mantissa bits and BFloat16 a larger range, so neither can represent the
        // other.
        std::cmp::Ordering::Equal => Kind::Float,
    }
}

/// Evaluates an expression with a type alias for the Rust type of a kind. A kind that is not listed
/// is an [`Error`](crate::Error).
///
/// ```
/// use tch::Kind;
/// use tch_extension::{Result, dispatch};
///
/// fn element_size(kind: Kind) -> Result<usize> {
///     dispatch!("element_size", kind, [f32, f64], |T| std::mem::size_of::<T>())
/// }
///
/// assert_eq!(element_size(Kind::Double)?, 8);
/// let error = element_size(Kind::Int64).unwrap_err().to_string();
/// assert_eq!(error, "element_size: kind: expected Float or Double, got Int64; cast with to_kind");
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[macro_export]
macro_rules! dispatch {
    ($op:expr, $kind:expr, [$($scalar:ty),+ $(,)?], |$alias:ident| $body:expr) => {{
        let kind: $crate::tch::Kind = $kind;
        $(if kind == $crate::kind_of::<$scalar>() {
            type $alias = $scalar;
            $crate::Result::Ok($body)
        } else)+ {
            let names = [$(format!("{:?}", $crate::kind_of::<$scalar>())),+].join(" or ");
            $crate::Result::Err($crate::Error::argument($op, "kind", names, format!("{kind:?}"), "cast with to_kind"))
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Tensor};

    #[test]
    fn the_half_kinds_are_two() {
        assert_eq!((kind_of::<half::f16>(), kind_of::<half::bf16>()), (Kind::Half, Kind::BFloat16));
        let name = |kind| {
            dispatch!("op", kind, [half::f16, half::bf16, f32], |T| std::any::type_name::<T>())
        };
        assert!(name(Kind::BFloat16).unwrap().ends_with("bf16"));
        assert!(
            name(Kind::Half).unwrap().ends_with("f16")
                && !name(Kind::Half).unwrap().ends_with("bf16")
        );
        let error = name(Kind::Double).unwrap_err().to_string();
        assert!(error.contains("expected Half or BFloat16 or Float, got Double"), "{error}");
    }

    #[test]
    fn kinds_are_promoted_as_libtorch_does() {
        let kinds = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];
        for (a, b) in kinds.into_iter().flat_map(|a| kinds.map(|b| (a, b))) {
            let ones = |kind| Tensor::ones([2], (kind, Device::Cpu));
            assert_eq!(promote(a, b), (ones(a) + ones(b)).kind(), "{a:?} {b:?}");
        }
    }
}
