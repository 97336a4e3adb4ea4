//! Arithmetic with ints that may be symbolic.

use crate::Result;
use crate::ffi::sym_int as ffi;
pub use crate::ffi::sym_int::SymInt;
use std::cmp::Ordering;
use std::ops::{Add, Div, Mul, Rem, Sub};
use tch::{Kind, Tensor};

/// The sizes of a tensor, symbolic where a trace says so. In a fake kernel, use it instead of
/// `Tensor::size`, which makes the traced program one for this size only.
///
/// # Panics
/// When the tensor has no sizes, which is so for some sparse and nested tensors.
pub fn sizes(tensor: &Tensor) -> Vec<SymInt> {
    ffi::sizes(tensor).unwrap_or_else(|error| panic!("sizes: {error}"))
}

/// An uninitialised, contiguous tensor of these sizes, on the device of `like`: what a fake kernel
/// returns.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::library::{empty, sizes};
///
/// let x = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
/// let [rows, columns] = &sizes(&x)[..] else { panic!() };
/// let y = empty(&[rows * 2, columns + 1], Kind::Half, &x)?;
/// assert_eq!((y.size(), y.kind()), (vec![4, 4], Kind::Half));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// An error of libtorch, such as a negative size.
pub fn empty(sizes: &[SymInt], kind: Kind, like: &Tensor) -> Result<Tensor> {
    ffi::new_empty(like, sizes, Some(kind))
}

/// [`empty`] of the kind of `like`.
///
/// # Errors
/// As for [`empty`].
pub fn new_empty(like: &Tensor, sizes: &[SymInt]) -> Result<Tensor> {
    ffi::new_empty(like, sizes, None)
}

impl SymInt {
    /// The lesser of both.
    #[must_use]
    pub fn min(&self, other: &SymInt) -> SymInt {
        combine(b'<', self, other)
    }

    /// The greater of both.
    #[must_use]
    pub fn max(&self, other: &SymInt) -> SymInt {
        combine(b'>', self, other)
    }

    /// The quotient, rounded up: `(self + other - 1) / other`.
    #[must_use]
    pub fn div_ceil(&self, other: &SymInt) -> SymInt {
        &(self + other - 1) / other
    }
}

/// Like an overflow of an i64, an error here has no result: it is a panic, which a kernel's caller
/// gets as an error.
fn combine(operation: u8, a: &SymInt, b: &SymInt) -> SymInt {
    if let (Some(a), Some(b)) = (a.number(), b.number()) {
        let known = match operation {
            b'+' => a + b,
            b'-' => a - b,
            b'*' => a * b,
            b'/' => a / b,
            b'%' => a % b,
            b'<' => a.min(b),
            _ => a.max(b),
        };
        return known.into();
    }
    a.combine(operation, b).unwrap_or_else(|error| panic!("SymInt: {error}"))
}

impl From<i64> for SymInt {
    fn from(number: i64) -> Self {
        SymInt::known(number)
    }
}

macro_rules! operations {
    ($($trait:ident $method:ident $operation:literal;)*) => {$(
        operations!(@ $trait $method $operation SymInt, SymInt: |a, b| combine($operation, &a, &b));
        operations!(@ $trait $method $operation SymInt, &SymInt: |a, b| combine($operation, &a, b));
        operations!(@ $trait $method $operation &SymInt, SymInt: |a, b| combine($operation, a, &b));
        operations!(@ $trait $method $operation &SymInt, &SymInt: |a, b| combine($operation, a, b));
        operations!(@ $trait $method $operation SymInt, i64: |a, b| combine($operation, &a, &b.into()));
        operations!(@ $trait $method $operation &SymInt, i64: |a, b| combine($operation, a, &b.into()));
        operations!(@ $trait $method $operation i64, SymInt: |a, b| combine($operation, &a.into(), &b));
        operations!(@ $trait $method $operation i64, &SymInt: |a, b| combine($operation, &a.into(), b));
    )*};
    (@ $trait:ident $method:ident $operation:literal $left:ty, $right:ty: $body:expr) => {
        impl $trait<$right> for $left {
            type Output = SymInt;

            fn $method(self, other: $right) -> SymInt {
                let body: fn($left, $right) -> SymInt = $body;
                body(self, other)
            }
        }
    };
}

operations! {
    Add add b'+';
    Sub sub b'-';
    Mul mul b'*';
    Div div b'/';
    Rem rem b'%';
}

fn is_less(a: &SymInt, b: &SymInt) -> bool {
    match (a.number(), b.number()) {
        (Some(a), Some(b)) => a < b,
        _ => a.is_less(b).unwrap_or_else(|error| panic!("SymInt: {error}")),
    }
}

/// A comparison of symbols makes what is traced valid only where the answer is the same.
///
/// It panics when the answer depends on the values of a tensor.
impl PartialEq for SymInt {
    fn eq(&self, other: &SymInt) -> bool {
        match (self.number(), other.number()) {
            (Some(a), Some(b)) => a == b,
            _ => self.equals(other).unwrap_or_else(|error| panic!("SymInt: {error}")),
        }
    }
}

impl PartialEq<i64> for SymInt {
    fn eq(&self, other: &i64) -> bool {
        self == &SymInt::from(*other)
    }
}

/// As for `PartialEq`.
impl PartialOrd for SymInt {
    fn partial_cmp(&self, other: &SymInt) -> Option<Ordering> {
        if let (Some(a), Some(b)) = (self.number(), other.number()) {
            return Some(a.cmp(&b));
        }
        if self == other {
            return Some(Ordering::Equal);
        }
        Some(if is_less(self, other) { Ordering::Less } else { Ordering::Greater })
    }

    // Each asks one question, so that what is traced gets one guard.
    fn lt(&self, other: &SymInt) -> bool {
        is_less(self, other)
    }

    fn gt(&self, other: &SymInt) -> bool {
        is_less(other, self)
    }

    fn le(&self, other: &SymInt) -> bool {
        !is_less(other, self)
    }

    fn ge(&self, other: &SymInt) -> bool {
        !is_less(self, other)
    }
}

impl PartialOrd<i64> for SymInt {
    fn partial_cmp(&self, other: &i64) -> Option<Ordering> {
        self.partial_cmp(&SymInt::from(*other))
    }

    fn lt(&self, other: &i64) -> bool {
        self < &SymInt::from(*other)
    }

    fn gt(&self, other: &i64) -> bool {
        self > &SymInt::from(*other)
    }

    fn le(&self, other: &i64) -> bool {
        self <= &SymInt::from(*other)
    }

    fn ge(&self, other: &i64) -> bool {
        self >= &SymInt::from(*other)
    }
}

/// The number, or the expression of a symbolic one.
impl std::fmt::Display for SymInt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text().unwrap_or_else(|_| "?".to_string()))
    }
}

impl std::fmt::Debug for SymInt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}
