//! Cosines and sines for rotary positions.

use super::KINDS;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The tables for [`rope`](super::rope()): cosines and sines of the angles of each position.
///
/// ```text
/// cos[p, i] = cos(p / base^(2i / dim))      sin[p, i] = sin(p / base^(2i / dim))
/// ```
///
/// * `positions`: P, the number of positions, from 0 to P - 1
/// * `dim`: R, an even number: how many values of a head are rotated, mostly all D
/// * `base`: greater than 0; 10000 in the paper
/// * `options`: the kind of the tables, which is best `Float` also for q and k of half kinds, and their
///   device
///
/// Returns `cos` and `sin`, `[P, R / 2]`, contiguous, without gradients. The angles are computed in
/// `Double`, with errors of less than p / 2⁴⁸ at position p, which tables of the other kinds do not show.
/// Where a model computes them in `Float`, as Hugging Face's do, the errors are up to p / 2²⁴.
///
/// ```
/// # use tch::{Kind, Device};
/// # use tch_extension::ops::rope_tables;
/// let (cos, sin) = rope_tables(4096, 128, 10000.0, (Kind::Float, Device::Cpu));
/// assert_eq!((cos.size(), sin.size()), (vec![4096, 64], vec![4096, 64]));
/// assert_eq!(sin.double_value(&[7, 0]), f64::from(7_f64.sin() as f32));
/// ```
///
/// # Panics
/// If [`f_rope_tables`] returns an error.
pub fn rope_tables(
    positions: i64,
    dim: i64,
    base: f64,
    options: (Kind, Device),
) -> (Tensor, Tensor) {
    crate::ops::unwrap(f_rope_tables(positions, dim, base, options))
}

/// [`rope_tables`], with an error instead of a panic.
///
/// # Errors
/// If an argument is not what is stated (the error names it), or if libtorch or CUDA fails.
pub fn f_rope_tables(
    positions: i64,
    dim: i64,
    base: f64,
    options: (Kind, Device),
) -> Result<(Tensor, Tensor)> {
    f_scaled_rope_tables(positions, dim, base, RopeScaling::None, options)
}

/// How a model that was trained with short sequences got longer ones: by other frequencies than
/// `base^(-2i / dim)`. The names are Hugging Face's values of `rope_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// `default`: the frequencies as they are.
    #[default]
    None,
    /// `linear`: all frequencies are divided, as if positions were.
    Linear {
        /// The divisor, greater than 0.
        factor: f64,
    },
    /// `llama3`, of Llama 3.1 and later: low frequencies are divided, and high ones stay as they are.
    ///
    /// ```text
    /// w = original_positions · frequency / 2π            the periods within the original positions
    /// s = (w - low_freq_factor) / (high_freq_factor - low_freq_factor), limited to 0 … 1
    /// frequency' = (1 - s) frequency / factor + s frequency
    /// ```
    Llama3 {
        /// The divisor, greater than 0.
        factor: f64,
        /// Frequencies with at most so many periods are divided.
        low_freq_factor: f64,
        /// Frequencies with at least so many periods stay. It is greater than `low_freq_factor`.
        high_freq_factor: f64,
        /// The number of positions that the model was first trained with.
        original_positions: i64,
    },
}

impl RopeScaling {
    /// What is wrong with it, if anything is.
    fn problem(self) -> Option<&'static str> {
        let is_positive = |number: f64| number > 0.0 && number.is_finite();
        match self {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. }
                if !is_positive(factor) =>
            {
                Some("a finite factor greater than 0")
            }
            RopeScaling::Linear { .. } => None,
            RopeScaling::Llama3 {
                low_freq_factor, high_freq_factor, original_positions, ..
            } => {
                let is_rising = is_positive(low_freq_factor)
                    && is_positive(high_freq_factor)
                    && low_freq_factor < high_freq_factor;
                (!is_rising || original_positions < 1)
                    .then_some("0 < low_freq_factor < high_freq_factor and original_positions ≥ 1")
            }
        }
    }

    fn scaled(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_positions,
            } => {
                let periods = original_positions as f64 * frequency / std::f64::consts::TAU;
                let share = ((periods - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - share) * frequency / factor + share * frequency
            }
        }
    }
}

/// [`f_rope_tables`] with scaled frequencies, for models such as Llama 3.1.
///
/// ```
/// # use tch::{Kind, Device};
/// # use tch_extension::ops::{RopeScaling, f_rope_tables, f_scaled_rope_tables};
/// let options = (Kind::Float, Device::Cpu);
/// let halved = RopeScaling::Linear { factor: 2.0 };
/// let (cos, _) = f_scaled_rope_tables(4096, 64, 10000.0, halved, options)?;
/// let (plain, _) = f_rope_tables(2048, 64, 10000.0, options)?;
/// assert_eq!(cos.slice(0, 0, 4096, 2), plain);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`f_rope_tables`], and if the scaling is not what [`RopeScaling`] says.
pub fn f_scaled_rope_tables(
    positions: i64,
    dim: i64,
    base: f64,
    scaling: RopeScaling,
    (kind, device): (Kind, Device),
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "rope_tables";
    let refuse = |argument: &str, expected: &str, got: String| {
        Err(Error::argument(OP, argument, expected, got, ""))
    };
    if positions < 0 {
        return refuse("positions", "a number that is not negative", positions.to_string());
    }
    if dim < 0 || dim % 2 != 0 {
        return refuse("dim", "an even number that is not negative", dim.to_string());
    }
    if !(base > 0.0 && base.is_finite()) {
        return refuse("base", "a finite number greater than 0", base.to_string());
    }
    if let Some(expected) = scaling.problem() {
        return refuse("scaling", expected, format!("{scaling:?}"));
    }
    if !KINDS.contains(&kind) {
        return refuse("options", "kind Float or Double or Half or BFloat16", format!("{kind:?}"));
    }
    let _no_grad = tch::no_grad_guard();
    // base^-x as e^(-x log base).
    let frequency = |pair: i64| (-base.ln() * (2 * pair) as f64 / dim as f64).exp();
    let frequencies: Vec<f64> = (0..dim / 2).map(|pair| scaling.scaled(frequency(pair))).collect();
    let frequencies = Tensor::f_from_slice(&frequencies)?.f_to_device(device)?;
    let angles = Tensor::f_arange(positions, (Kind::Double, device))?.f_unsqueeze(1)?;
    let angles = angles.f_mul(&frequencies)?;
    Ok((angles.f_cos()?.f_to_kind(kind)?, angles.f_sin()?.f_to_kind(kind)?))
}
