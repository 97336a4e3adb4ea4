//! `torch.testing.assert_close`.

use super::compare::{Bound, count_of, element_index, mismatch, values};
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// The relative and the absolute tolerance, `(rtol, atol)`, that rounding of this kind deserves: those of
/// `torch.testing.assert_close`.
///
/// | kind | rtol | atol |
/// |---|---|---|
/// | `Half` | 1e-3 | 1e-5 |
/// | `BFloat16` | 1.6e-2 | 1e-5 |
/// | `Float` | 1.3e-6 | 1e-5 |
/// | `Double` | 1e-7 | 1e-7 |
/// | others | 0 | 0 |
pub fn tolerance(kind: Kind) -> (f64, f64) {
    match kind {
        Kind::Half => (1e-3, 1e-5),
        Kind::BFloat16 => (1.6e-2, 1e-5),
        Kind::Float => (1.3e-6, 1e-5),
        Kind::Double => (1e-7, 1e-7),
        _ => (0.0, 0.0),
    }
}

/// Asserts that two tensors have the same shape and kind, and that `|actual - expected| <= atol + rtol
/// |expected|` for each element. NaN is close to NaN only, infinity to the same infinity only. Strides and
/// devices may differ. Elements are compared as `f64`.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::testing::{assert_close, tolerance};
///
/// let (rtol, atol) = tolerance(Kind::Double);
/// let x = Tensor::from_slice(&[1.0, 2.0]);
/// assert_close(&(&x / 3.0 * 3.0), &x, rtol, atol);
/// ```
///
/// # Panics
/// When they are not close, with the worst element's index, both values and what was allowed. Also on
/// undefined and on complex tensors.
#[track_caller]
pub fn assert_close(actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64) {
    if let Err(error) = close(actual, expected, rtol, atol) {
        panic!("assert_close: {error}");
    }
}

fn close(actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64) -> Result<()> {
    for (tensor, name) in [(actual, "actual"), (expected, "expected")] {
        if !tensor.defined() {
            return Err(Error::msg(format!("{name} is an undefined tensor")));
        }
    }
    let description =
        |tensor: &Tensor| -> Result<String> { Ok(format!("{:?} {:?}", tensor.f_kind()?, tensor.size())) };
    let (found, wanted) = (description(actual)?, description(expected)?);
    if found != wanted {
        return Err(Error::msg(format!("actual is {found}, expected is {wanted}")));
    }
    let bound = Bound { rtol, atol, equal_nan: true };
    let (actual, size, expected) = (values(actual)?, expected.size(), values(expected)?);
    let Some(found) = mismatch(&actual, &expected, bound) else { return Ok(()) };

    let (a, e) = (actual[found.worst], expected[found.worst]);
    Err(Error::msg(format!(
        "element {:?}: actual {a:?}, expected {e:?}: they differ by {:?}, allowed is {:?} (rtol {rtol:?}, \
         atol {atol:?}); {} not close",
        element_index(found.worst, &size),
        (a - e).abs(),
        bound.allowed(e),
        count_of(found.count, actual.len(), "elements"),
    )))
}
