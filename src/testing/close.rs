//! Comparison of tensors: `torch.testing.assert_close`.

use super::compare::{
    Bound, Number, complex_values, count_of, element_index, is_complex, mismatch, values,
};
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// The relative and the absolute tolerance, `(rtol, atol)`, for rounding errors in this kind. They
/// are those of `torch.testing.assert_close`.
///
/// | kind | rtol | atol |
/// |---|---|---|
/// | `Half`, `ComplexHalf` | 1e-3 | 1e-5 |
/// | `BFloat16` | 1.6e-2 | 1e-5 |
/// | `Float`, `ComplexFloat` | 1.3e-6 | 1e-5 |
/// | `Double`, `ComplexDouble` | 1e-7 | 1e-7 |
/// | others | 0 | 0 |
pub fn tolerance(kind: Kind) -> (f64, f64) {
    match kind {
        Kind::Half | Kind::ComplexHalf => (1e-3, 1e-5),
        Kind::BFloat16 => (1.6e-2, 1e-5),
        Kind::Float | Kind::ComplexFloat => (1.3e-6, 1e-5),
        Kind::Double | Kind::ComplexDouble => (1e-7, 1e-7),
        _ => (0.0, 0.0),
    }
}

/// Asserts that two tensors have the same shape and kind, and that `|actual - expected| <= atol +
/// rtol |expected|` for each element. NaN is close only to NaN, and infinity only to the same
/// infinity. Strides and devices may differ. Elements are compared as `f64`, complex ones by the
/// absolute value of their difference.
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
/// When the tensors are not close. The message has the worst element's index, both values, and the
/// allowed difference. Also when a tensor is undefined.
#[track_caller]
pub fn assert_close(actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64) {
    if let Err(error) = close(actual, expected, rtol, atol) {
        panic!("assert_close: {error}");
    }
}

/// Like [`assert_close`], but returns an error.
pub(super) fn close(actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64) -> Result<()> {
    for (tensor, name) in [(actual, "actual"), (expected, "expected")] {
        if !tensor.defined() {
            return Err(Error::msg(format!("{name} is an undefined tensor")));
        }
    }
    let description = |tensor: &Tensor| -> Result<String> {
        Ok(format!("{:?} {:?}", tensor.f_kind()?, tensor.size()))
    };
    let (found, wanted) = (description(actual)?, description(expected)?);
    if found != wanted {
        return Err(Error::msg(format!("actual is {found}, expected is {wanted}")));
    }
    let (bound, size) = (Bound { rtol, atol, equal_nan: true }, expected.size());
    match is_complex(expected.f_kind()?) {
        true => all_close(&complex_values(actual)?, &complex_values(expected)?, bound, &size),
        false => all_close(&values(actual)?, &values(expected)?, bound, &size),
    }
}

fn all_close<T: Number>(actual: &[T], expected: &[T], bound: Bound, size: &[i64]) -> Result<()> {
    let Some(found) = mismatch(actual, expected, bound) else { return Ok(()) };
    let (a, e) = (actual[found.worst], expected[found.worst]);
    let Bound { rtol, atol, .. } = bound;
    Err(Error::msg(format!(
        "element {:?}: actual {a:?}, expected {e:?}: they differ by {:?}, allowed is {:?} (rtol {rtol:?}, \
         atol {atol:?}); {} not close",
        element_index(found.worst, size),
        a.distance(e),
        bound.allowed(e),
        count_of(found.count, actual.len(), "elements"),
    )))
}

/// Asserts that `actual` is as close to `exact` as `rival` is. The rival is usually libtorch's own
/// computation of the same result. Neither the largest nor the root mean square error of `actual`
/// may exceed the rival's by more than two roundings to its kind, of the largest and of the root
/// mean square value. (Two, because in small tensors either error is partly luck.) Use it for kinds
/// in which even a chain of correctly rounded operations exceeds [`tolerance`].
///
/// `actual` and `rival` must have the same kind and shape. `exact` must be of kind `Double`,
/// computed from the same inputs. No value may be infinite or NaN.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::testing::assert_as_accurate;
///
/// let x = Tensor::randn([1000], (Kind::Half, Device::Cpu));
/// let fused = (x.to_kind(Kind::Float) * 3.0).tanh().to_kind(Kind::Half);
/// assert_as_accurate(&fused, &(&x * 3.0).tanh(), &(x.to_kind(Kind::Double) * 3.0).tanh());
/// ```
///
/// # Panics
/// When `actual` is less accurate; the message has both errors. Also for other kinds and shapes
/// than stated, and for values that are not finite.
#[track_caller]
pub fn assert_as_accurate(actual: &Tensor, rival: &Tensor, exact: &Tensor) {
    if let Err(error) = as_accurate(actual, rival, exact) {
        panic!("assert_as_accurate: {error}");
    }
}

fn as_accurate(actual: &Tensor, rival: &Tensor, exact: &Tensor) -> Result<()> {
    let kind = actual.f_kind()?;
    let rounding = match kind {
        Kind::Half => 2f64.powi(-11),
        Kind::BFloat16 => 2f64.powi(-8),
        Kind::Float => 2f64.powi(-24),
        Kind::Double => 2f64.powi(-53),
        _ => return Err(Error::msg(format!("actual is {kind:?}, expected a floating kind"))),
    };
    for (tensor, name, expected) in [(rival, "rival", kind), (exact, "exact", Kind::Double)] {
        if (tensor.f_kind()?, tensor.size()) != (expected, actual.size()) {
            let found = (tensor.f_kind()?, tensor.size());
            return Err(Error::msg(format!(
                "{name} is {found:?}, expected {:?}",
                (expected, actual.size())
            )));
        }
    }
    let exact = values(exact)?;
    let scale = Norms::of(exact.iter().copied());
    let error = |tensor| -> Result<Norms> {
        Ok(Norms::of(values(tensor)?.iter().zip(&exact).map(|(value, exact)| value - exact)))
    };
    let (found, allowed) = (error(actual)?, error(rival)?.plus(&scale, rounding));
    // `<=` is false for NaN, so NaN is wrong, too.
    if found.largest <= allowed.largest && found.rms <= allowed.rms && allowed.largest.is_finite() {
        return Ok(());
    }
    Err(Error::msg(format!(
        "of {} elements the largest error is {:e}, allowed are {:e}; the root mean square error {:e}, allowed are \
         {:e}: the rival's and what rounding to {kind:?} explains",
        exact.len(),
        found.largest,
        allowed.largest,
        found.rms,
        allowed.rms,
    )))
}

struct Norms {
    largest: f64,
    rms: f64,
}

impl Norms {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let (mut largest, mut squares, mut len) = (0.0_f64, 0.0, 0.0_f64);
        for value in values {
            // f64::max would drop NaN.
            largest = if value.abs() <= largest { largest } else { value.abs() };
            squares += value * value;
            len += 1.0;
        }
        Norms { largest, rms: (squares / len.max(1.0)).sqrt() }
    }

    /// Adds room for rounding values of this scale.
    fn plus(&self, scale: &Norms, rounding: f64) -> Norms {
        let room = 2.0 * rounding;
        Norms { largest: self.largest + room * scale.largest, rms: self.rms + room * scale.rms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).to_kind(Kind::Half)
    }

    #[test]
    fn complex_numbers_are_compared_by_their_distance() {
        let complex = |parts: &[f64]| Tensor::from_slice(parts).reshape([-1, 2]).view_as_complex();
        let (x, nan) = (complex(&[3.0, 4.0, 0.0, -2.0]), complex(&[f64::NAN, 1.0]));
        assert_close(&x, &x.conj().conj(), 0.0, 0.0);
        assert_close(&nan, &complex(&[2.0, f64::NAN]), 0.0, 0.0);
        assert_close(&complex(&[f64::INFINITY, 1.0]), &complex(&[f64::INFINITY, 1.0]), 0.0, 0.0);
        // 0.03 + 0.04i is 0.05 away, and 1 % of 5 are 0.05.
        let off = complex(&[3.03, 4.04, 0.0, -2.0]);
        assert!(close(&off, &x, 0.0101, 0.0).is_ok());
        let error = close(&off, &x, 0.0, 0.045).unwrap_err().to_string();
        for part in ["element [0]: actual 3.03+4.04i, expected 3.0+4.0i", "1 of 2 elements is not"]
        {
            assert!(error.contains(part), "{error}");
        }
        let wrong = [
            (&x, &x.conj()),
            (&nan, &complex(&[1.0, 1.0])),
            (&complex(&[f64::INFINITY, 1.0]), &complex(&[f64::INFINITY, 2.0])),
            (&complex(&[f64::INFINITY, f64::NAN]), &complex(&[1.0, 1.0])),
        ];
        for (actual, expected) in wrong {
            assert!(close(actual, expected, 0.1, 0.1).is_err(), "{actual:?} {expected:?}");
        }
        assert!(close(&x, &x.real(), 0.1, 0.1).is_err());
        assert_eq!(tolerance(Kind::ComplexFloat), tolerance(Kind::Float));
    }

    #[test]
    fn as_accurate_as_the_rival_but_for_rounding() {
        let exact = Tensor::from_slice(&[1.0, 2.0, 4.0, -8.0]);
        let rival = half(&[1.0, 2.0, 4.0, -8.0]);
        assert_as_accurate(&rival, &rival, &exact);
        // Two roundings of the largest value are 2⁻⁷ = 7.8125e-3.
        assert!(as_accurate(&half(&[1.0, 2.0, 4.0, -7.9921875]), &rival, &exact).is_ok());
        let error = as_accurate(&half(&[1.0, 2.0, 4.0, -7.984375]), &rival, &exact).unwrap_err();
        assert!(
            error.to_string().contains("the largest error is 1.5625e-2, allowed are 7.8125e-3"),
            "{error}"
        );
        // Each element's error is allowed, but not all of them together.
        let ones = Tensor::ones([4], (Kind::Double, tch::Device::Cpu)) * 8.0;
        let spread = Tensor::from_slice(&[8.0, 0.0, 0.0, 0.0]);
        let off = half(&[8.0, 0.007, 0.007, 0.007]);
        assert!(as_accurate(&off, &half(&[8.0, 0.0, 0.0, 0.0]), &spread).is_err());
        // The less accurate the rival, the more error is allowed.
        let worse = half(&[8.03125, 8.0, 8.0, 8.0]);
        assert!(as_accurate(&worse, &worse, &ones).is_ok());
        assert!(as_accurate(&worse, &half(&[8.0, 8.0, 8.0, 8.0]), &ones).is_err());
    }

    #[test]
    fn two_roundings_of_each_kind() {
        let kinds = [(Kind::Half, 11), (Kind::BFloat16, 8), (Kind::Float, 24), (Kind::Double, 53)];
        for (kind, digits) in kinds {
            let one = Tensor::from_slice(&[1.0]);
            let off = |roundings: f64| (&one + roundings * 2f64.powi(-digits)).to_kind(kind);
            assert!(as_accurate(&off(2.0), &off(0.0), &one).is_ok(), "{kind:?}");
            assert!(as_accurate(&off(4.0), &off(0.0), &one).is_err(), "{kind:?}");
        }
    }

    #[test]
    fn nothing_to_compare_with_is_an_error() {
        let exact = Tensor::from_slice(&[1.0, f64::NAN]);
        let some = half(&[1.0, 2.0]);
        assert!(as_accurate(&some, &some, &exact).is_err());
        assert!(
            as_accurate(&half(&[1.0, f64::NAN]), &some, &Tensor::from_slice(&[1.0, 2.0])).is_err()
        );
        assert!(
            as_accurate(&some, &half(&[1.0, f64::INFINITY]), &Tensor::from_slice(&[1.0, 2.0]))
                .is_err()
        );
        assert!(as_accurate(&some, &some, &some).is_err());
        assert!(as_accurate(&some, &half(&[1.0]), &Tensor::from_slice(&[1.0, 2.0])).is_err());
        assert!(as_accurate(&half(&[]), &half(&[]), &Tensor::from_slice::<f64>(&[])).is_ok());
    }
}
