//! The arguments of an operator.

use super::{Layout, MemoryFormat, Output, SymInt};
use crate::ffi::library as ffi;
use tch::{Device, Kind, Tensor};

/// An argument of an operator: a tensor, a number, a list of them, ….
///
/// `into()` makes it, and [`args!`](crate::args) calls `into()`. It accepts `&Tensor`,
/// `Option<&Tensor>`, `i64`, `i32`, `f64`, `f32`, `bool`, `&str`, `&String`, [`Device`], [`Kind`],
/// [`Layout`], [`MemoryFormat`], `&`[`SymInt`] and `&`[`Output`]; slices, arrays and vectors of them; and an `Option` of any of
/// these, in which `None` is Python's `None`.
///
/// The schema says which of them an argument accepts: `Tensor`, `Tensor?` (may be `None`),
/// `Tensor[]`, `Tensor?[]`, `int` and `SymInt`, `float` (also accepts an int), `Scalar` (any
/// number), `bool`, `str`, `Device`, `ScalarType` (a `Kind`), `Layout`, `MemoryFormat`. An `int[2]`
/// also accepts one int, which is used for both. A `Generator?` can only be `None`. Values of other
/// types cannot be made in Rust.
pub struct Value<'a>(pub(super) ffi::Value<'a>);

/// Python's `None`, for a place where nothing else determines the type of the `Option`: `args![&x,
/// NONE]`.
pub const NONE: Option<i64> = None;

macro_rules! value_from {
    ($($type:ty: $value:ident => $made:expr;)*) => {$(
        impl<'a> From<$type> for Value<'a> {
            fn from($value: $type) -> Self {
                Value($made)
            }
        }
    )*};
}

value_from! {
    &'a Tensor: tensor => ffi::Value::tensor(tensor);
    i64: value => ffi::Value::int(value);
    i32: value => ffi::Value::int(value.into());
    f64: value => ffi::Value::float(value);
    f32: value => ffi::Value::float(value.into());
    bool: value => ffi::Value::bool(value);
    &'a str: text => ffi::Value::string(text);
    &'a String: text => ffi::Value::string(text);
    Device: device => ffi::Value::device(device);
    Kind: kind => ffi::Value::kind(kind);
    Layout: layout => ffi::Value::layout(layout);
    MemoryFormat: format => ffi::Value::memory_format(format);
    &'a SymInt: value => ffi::Value::sym_int(value);
    &'a [SymInt]: values => list(values.iter());
    &'a Vec<SymInt>: values => list(values.iter());
    &'a Output: output => ffi::Value::of(output);
    &'a [i64]: values => ffi::Value::ints(values);
    &'a Vec<i64>: values => ffi::Value::ints(values);
    &'a [f64]: values => ffi::Value::floats(values);
    &'a Vec<f64>: values => ffi::Value::floats(values);
    &'a [Tensor]: tensors => list(tensors.iter());
    &'a Vec<Tensor>: tensors => list(tensors.iter());
    &'a [&'a Tensor]: tensors => list(tensors.iter().copied());
    &'a Vec<&'a Tensor>: tensors => list(tensors.iter().copied());
    &'a [Option<&'a Tensor>]: tensors => list(tensors.iter().copied());
    &'a Vec<Option<&'a Tensor>>: tensors => list(tensors.iter().copied());
    &'a [Option<Tensor>]: tensors => list(tensors.iter().map(Option::as_ref));
    &'a Vec<Option<Tensor>>: tensors => list(tensors.iter().map(Option::as_ref));
}

impl<'a, const N: usize> From<&'a [i64; N]> for Value<'a> {
    fn from(values: &'a [i64; N]) -> Self {
        Value(ffi::Value::ints(values))
    }
}

impl<'a, const N: usize> From<&'a [f64; N]> for Value<'a> {
    fn from(values: &'a [f64; N]) -> Self {
        Value(ffi::Value::floats(values))
    }
}

impl<'a, const N: usize> From<&'a [Tensor; N]> for Value<'a> {
    fn from(tensors: &'a [Tensor; N]) -> Self {
        tensors.as_slice().into()
    }
}

impl<'a, const N: usize> From<&'a [&'a Tensor; N]> for Value<'a> {
    fn from(tensors: &'a [&'a Tensor; N]) -> Self {
        tensors.as_slice().into()
    }
}

impl<'a, const N: usize> From<&'a [Option<&'a Tensor>; N]> for Value<'a> {
    fn from(tensors: &'a [Option<&'a Tensor>; N]) -> Self {
        tensors.as_slice().into()
    }
}

impl<'a, T: Into<Value<'a>>> From<Vec<T>> for Value<'a> {
    fn from(values: Vec<T>) -> Self {
        Value(list(values.into_iter()))
    }
}

impl<'a, T: Into<Value<'a>>, const N: usize> From<[T; N]> for Value<'a> {
    fn from(values: [T; N]) -> Self {
        Value(list(values.into_iter()))
    }
}

impl<'a, T: Into<Value<'a>>> From<Option<T>> for Value<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or_else(|| Value(ffi::Value::none()), Into::into)
    }
}

fn list<'a>(values: impl Iterator<Item = impl Into<Value<'a>>>) -> ffi::Value<'a> {
    ffi::Value::list(values.map(|value| value.into().0).collect())
}

/// The arguments of a call, by position and by name; [`args!`](crate::args) makes them.
#[derive(Default)]
pub struct Args<'a> {
    pub(super) positional: Vec<ffi::Value<'a>>,
    pub(super) named: Vec<(&'a str, Value<'a>)>,
}

impl<'a> Args<'a> {
    /// Makes an empty list.
    pub fn new() -> Self {
        Args { positional: Vec::with_capacity(8), named: Vec::new() }
    }

    /// A list of arguments by position.
    pub(crate) fn positional(values: Vec<Value<'a>>) -> Self {
        Args { positional: values.into_iter().map(|value| value.0).collect(), named: Vec::new() }
    }

    /// Adds the next argument by position.
    #[must_use]
    pub fn arg(mut self, value: impl Into<Value<'a>>) -> Self {
        self.positional.push(value.into().0);
        self
    }

    /// Adds an argument by name.
    #[must_use]
    pub fn named(mut self, name: &'a str, value: impl Into<Value<'a>>) -> Self {
        self.named.push((name, value.into()));
        self
    }
}

/// The arguments of a call: `args![&x, 2, alpha = 0.5]`. An argument that is left out gets the
/// default of the schema.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::{args, library::Operator};
///
/// let add = Operator::find("aten::add.Tensor")?;
/// let x = Tensor::from_slice(&[1.0, 2.0]);
/// let y: Tensor = add.call(args![&x, &x, alpha = 0.5])?;
/// assert_eq!(y, Tensor::from_slice(&[1.5, 3.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[macro_export]
macro_rules! args {
    (@ [$($made:tt)*]) => { $($made)* };
    (@ [$($made:tt)*] $name:ident = $value:expr $(, $($rest:tt)*)?) => {
        $crate::args!(@ [$($made)* .named(stringify!($name), $value)] $($($rest)*)?)
    };
    (@ [$($made:tt)*] $value:expr $(, $($rest:tt)*)?) => {
        $crate::args!(@ [$($made)* .arg($value)] $($($rest)*)?)
    };
    ($($all:tt)*) => { $crate::args!(@ [$crate::library::Args::new()] $($all)*) };
}
