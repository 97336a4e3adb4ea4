//! From a tensor's kind, known when the program runs, to a Rust type, known when it is compiled.

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
        $(if kind == <$scalar as $crate::tch::kind::Element>::KIND {
            type $alias = $scalar;
            $crate::Result::Ok($body)
        } else)+ {
            let names = [$(format!("{:?}", <$scalar as $crate::tch::kind::Element>::KIND)),+].join(" or ");
            $crate::Result::Err($crate::Error::argument($op, "kind", names, format!("{kind:?}"), "cast with to_kind"))
        }
    }};
}
