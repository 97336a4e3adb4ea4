//! Compares lists of numbers that should be equal except for rounding.

use crate::ffi::tensor::plain;
use crate::{Error, Result};
use std::fmt;
use tch::{Device, Kind, Tensor};

/// What can be compared.
pub(super) trait Number: Copy + PartialEq + fmt::Debug {
    fn magnitude(self) -> f64;
    fn distance(self, other: Self) -> f64;
}

impl Number for f64 {
    fn magnitude(self) -> f64 {
        self.abs()
    }

    fn distance(self, other: f64) -> f64 {
        (self - other).abs()
    }
}

#[derive(Clone, Copy, PartialEq)]
pub(super) struct Complex {
    re: f64,
    im: f64,
}

impl Number for Complex {
    fn magnitude(self) -> f64 {
        // `hypot` of infinity and NaN is infinite.
        if self.re.is_nan() || self.im.is_nan() { f64::NAN } else { self.re.hypot(self.im) }
    }

    fn distance(self, other: Complex) -> f64 {
        Complex { re: self.re - other.re, im: self.im - other.im }.magnitude()
    }
}

impl fmt::Debug for Complex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:+?}i", self.re, self.im)
    }
}

/// How far apart two numbers may be: `|actual - expected| <= atol + rtol |expected|`.
#[derive(Clone, Copy)]
pub(super) struct Bound {
    pub rtol: f64,
    pub atol: f64,
    /// Whether NaN equals NaN. It never equals a number.
    pub equal_nan: bool,
}

impl Bound {
    pub fn allowed(&self, expected: impl Number) -> f64 {
        self.atol + self.rtol * expected.magnitude()
    }

    pub fn holds<T: Number>(&self, actual: T, expected: T) -> bool {
        let difference = actual.distance(expected);
        // If `expected` is infinite, so is the allowed difference; hence only finite differences
        // count.
        actual == expected
            || (difference.is_finite() && difference <= self.allowed(expected))
            || (self.equal_nan && actual.magnitude().is_nan() && expected.magnitude().is_nan())
    }

    /// How far the bound is exceeded. NaN and infinity count as infinitely far.
    fn excess<T: Number>(&self, actual: T, expected: T) -> f64 {
        let excess = actual.distance(expected) - self.allowed(expected);
        if excess.is_nan() { f64::INFINITY } else { excess }
    }
}

/// How two lists differ.
#[derive(Debug)]
pub(super) struct Mismatch {
    /// The index at which the bound is exceeded most, or the first of several equally bad ones.
    pub worst: usize,
    /// The number of places at which the bound is exceeded.
    pub count: usize,
}

/// Compares two lists of the same length. `None` when the bound holds everywhere.
pub(super) fn mismatch<T: Number>(actual: &[T], expected: &[T], bound: Bound) -> Option<Mismatch> {
    let mut found: Option<(Mismatch, f64)> = None;
    for (index, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
        if bound.holds(actual, expected) {
            continue;
        }
        let excess = bound.excess(actual, expected);
        match &mut found {
            None => found = Some((Mismatch { worst: index, count: 1 }, excess)),
            Some((mismatch, largest)) => {
                mismatch.count += 1;
                if excess > *largest {
                    (mismatch.worst, *largest) = (index, excess);
                }
            }
        }
    }
    found.map(|(mismatch, _)| mismatch)
}

/// A text about `count` of `total` things: `1 of 6 entries is`, `2 of 6 entries are`.
pub(super) fn count_of(count: usize, total: usize, things: &str) -> String {
    format!("{count} of {total} {things} {}", if count == 1 { "is" } else { "are" })
}

/// The indices of element number `position`, counted in row-major order.
pub(super) fn element_index(mut position: usize, size: &[i64]) -> Vec<usize> {
    let mut index = vec![0; size.len()];
    for (place, &len) in index.iter_mut().zip(size).rev() {
        let len = usize::try_from(len).unwrap_or(0).max(1);
        *place = position % len;
        position /= len;
    }
    index
}

/// Whether the elements have a real and an imaginary part.
pub(super) fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble)
}

/// The number of real numbers in an element of this kind.
pub(super) fn parts(kind: Kind) -> usize {
    if is_complex(kind) { 2 } else { 1 }
}

/// Like [`values`], but a complex element becomes two numbers: its real part and its imaginary
/// part.
pub(super) fn components(tensor: &Tensor) -> Result<Vec<f64>> {
    if !is_complex(tensor.f_kind()?) {
        return values(tensor);
    }
    // `plain` resolves a pending conjugation, for which view_as_real fails.
    values(&plain(&tensor.f_detach()?)?.f_view_as_real()?)
}

/// The elements of a complex kind, in row-major order.
pub(super) fn complex_values(tensor: &Tensor) -> Result<Vec<Complex>> {
    let pairs = components(tensor)?;
    Ok(pairs.chunks_exact(2).map(|pair| Complex { re: pair[0], im: pair[1] }).collect())
}

/// The inverse of [`components`]: a tensor of these components, with the shape, kind and device of
/// `like`.
pub(super) fn from_components(components: &[f64], like: &Tensor) -> Result<Tensor> {
    let kind = like.f_kind()?;
    let flat = Tensor::f_from_slice(components)?;
    let flat = if is_complex(kind) { flat.f_reshape([-1, 2])?.f_view_as_complex()? } else { flat };
    Ok(flat.f_to_kind(kind)?.f_to_device(like.device())?.f_reshape(like.size())?)
}

/// The place of component number `position`, as text: `[1, 3]`, or `[1, 3], imaginary part`.
pub(super) fn place(position: usize, size: &[i64], kind: Kind) -> String {
    let element = element_index(position / parts(kind), size);
    match (is_complex(kind), position % 2) {
        (false, _) => format!("{element:?}"),
        (true, 0) => format!("{element:?}, real part"),
        (true, _) => format!("{element:?}, imaginary part"),
    }
}

/// The elements in row-major order, from any layout and any device.
pub(super) fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    let kind = tensor.f_kind()?;
    if is_complex(kind) {
        return Err(Error::msg(format!(
            "complex numbers ({kind:?}) are not supported; use view_as_real"
        )));
    }
    // tch copies the raw memory, which would lose a pending negation, and would read from a null
    // pointer for zeros without memory.
    let flat = plain(&tensor.f_detach()?)?.f_to_device(Device::Cpu)?.f_reshape([-1])?;
    Ok(Vec::<f64>::try_from(&flat)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Bound = Bound { rtol: 0.1, atol: 0.01, equal_nan: false };

    #[test]
    fn the_bound_is_relative_to_what_is_expected() {
        assert!(mismatch(&[110.0], &[100.0], BOUND).is_none());
        assert!(mismatch(&[100.0], &[90.0], BOUND).is_some());
        assert!(mismatch(&[0.01, 0.0], &[0.0, -0.0], BOUND).is_none());
    }

    #[test]
    fn infinity_is_close_to_itself_only() {
        let infinity = f64::INFINITY;
        assert!(mismatch(&[infinity], &[infinity], BOUND).is_none());
        for (actual, expected) in [(1.0, infinity), (infinity, 1.0), (-infinity, infinity)] {
            assert!(mismatch(&[actual], &[expected], BOUND).is_some(), "{actual} {expected}");
        }
    }

    #[test]
    fn nan_is_close_to_nan_only_and_only_when_allowed() {
        let allowed = Bound { equal_nan: true, ..BOUND };
        assert!(mismatch(&[f64::NAN], &[f64::NAN], allowed).is_none());
        assert!(mismatch(&[f64::NAN], &[f64::NAN], BOUND).is_some());
        for bound in [BOUND, allowed] {
            assert!(mismatch(&[f64::NAN], &[1.0], bound).is_some());
            assert!(mismatch(&[1.0], &[f64::NAN], bound).is_some());
        }
    }

    #[test]
    fn the_worst_place_is_found() {
        let found = mismatch(&[1.0, 2.0, 9.0, 5.0], &[1.0, 1.0, 1.0, 1.0], BOUND).unwrap();
        assert_eq!((found.worst, found.count), (2, 3));
        let found = mismatch(&[9.0, f64::NAN], &[1.0, 1.0], BOUND).unwrap();
        assert_eq!((found.worst, found.count), (1, 2));
    }

    #[test]
    fn indices_are_counted_row_by_row() {
        assert_eq!(element_index(7, &[2, 4]), [1, 3]);
        assert_eq!(element_index(0, &[]), [0_usize; 0]);
        assert_eq!(place(7, &[2, 4], Kind::Double), "[1, 3]");
        assert_eq!(place(7, &[2, 2], Kind::ComplexDouble), "[1, 1], imaginary part");
        assert_eq!(place(0, &[], Kind::ComplexDouble), "[], real part");
    }

    #[test]
    fn components_are_pairs_of_complex_kinds() {
        let complex = Tensor::from_slice(&[1.0, 2.0, 3.0, -4.0]).reshape([2, 2]).view_as_complex();
        assert_eq!(components(&complex).unwrap(), [1.0, 2.0, 3.0, -4.0]);
        assert_eq!(components(&complex.conj()).unwrap(), [1.0, -2.0, 3.0, 4.0]);
        let again = from_components(&[1.0, 2.0, 3.0, -4.0], &complex).unwrap();
        assert_eq!((again.kind(), again.size()), (Kind::ComplexDouble, vec![2]));
        assert_eq!(components(&again).unwrap(), components(&complex).unwrap());
        let real = from_components(&[1.0, 2.0], &Tensor::zeros([1, 2], (Kind::Float, Device::Cpu)))
            .unwrap();
        assert_eq!((real.kind(), real.size()), (Kind::Float, vec![1, 2]));
        assert_eq!(components(&complex.narrow(0, 0, 0)).unwrap(), [0.0; 0]);
    }
}
