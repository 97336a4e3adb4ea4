//! From a tensor's kind, known when the program runs, to a Rust type, known when it is compiled;
//! and back.

use tch::Kind;
use tch::kind::Element;

/// The kind of tensors whose elements are `T`: what [`Element::KIND`] is meant to be.
///
/// tch 0.24 says `Half` of the half crate's `bf16`, too, and nothing but the name tells it from
/// `f16`. As both are two bytes of plain numbers, a wrong guess could only give a wrong number,
/// never harm memory.
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

/// The kind of a sum of two floating kinds.
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
        // Half has more digits, BFloat16 more range.
        std::cmp::Ordering::Equal => Kind::Float,
    }
}

/// Runs an expression with a type alias bound to the Rust type of a kind; other kinds are an
/// [`Error`](crate::Error).
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
