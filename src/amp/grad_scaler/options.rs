//! The options and the state of a scaler, and the ranges of their numbers.

use crate::{Error, Result};

/// The options of a [`GradScaler`](super::GradScaler). The defaults are torch's.
///
/// ```
/// use tch_extension::amp::{GradScaler, GradScalerOptions};
///
/// let scaler = GradScaler::new(GradScalerOptions { growth_interval: 100, ..Default::default() })?;
/// assert_eq!(scaler.scale_factor()?, 65536.0);
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerOptions {
    /// The initial scale. It must be positive. The default is 65536.
    pub init_scale: f64,
    /// The scale is multiplied by this after `growth_interval` steps in a row without infinite or
    /// NaN gradients. It must be above 1. The default is 2.
    pub growth_factor: f64,
    /// The scale is multiplied by this after a step that was skipped. It must be between 0 and 1.
    /// The default is 0.5.
    pub backoff_factor: f64,
    /// The number of updates in a row without infinite or NaN gradients after which the scale
    /// grows. It must be positive. The default is 2000.
    pub growth_interval: i64,
    /// If false, the scaler does nothing and [`GradScaler::step`](super::GradScaler::step) always
    /// steps. The default is true.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        GradScalerOptions {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
        }
    }
}

/// The state of a [`GradScaler`](super::GradScaler) that must be saved along with weights and
/// optimizers. The fields are those of torch's `state_dict`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerState {
    /// The current scale.
    pub scale: f64,
    /// As in [`GradScalerOptions`].
    pub growth_factor: f64,
    /// As in [`GradScalerOptions`].
    pub backoff_factor: f64,
    /// As in [`GradScalerOptions`].
    pub growth_interval: i64,
    /// The number of updates since the scale last changed; `_growth_tracker` in torch.
    pub growth_tracker: i64,
}

pub(super) fn check_scale(op: &str, argument: &str, scale: f64) -> Result<()> {
    let rounded = scale as f32;
    if rounded.is_finite() && rounded > 0.0 {
        return Ok(());
    }
    Err(out_of_range(op, argument, "a positive f32", scale))
}

pub(super) fn check_factors(op: &str, state: &GradScalerState) -> Result<()> {
    if !(state.growth_factor > 1.0 && state.growth_factor.is_finite()) {
        return Err(out_of_range(op, "growth_factor", "more than 1", state.growth_factor));
    }
    if !(state.backoff_factor > 0.0 && state.backoff_factor < 1.0) {
        return Err(out_of_range(op, "backoff_factor", "between 0 and 1", state.backoff_factor));
    }
    // libtorch counts with 32 bits.
    if !(1..=i64::from(i32::MAX)).contains(&state.growth_interval) {
        return Err(out_of_range(
            op,
            "growth_interval",
            "1 or more, in 32 bits",
            state.growth_interval,
        ));
    }
    Ok(())
}

pub(super) fn out_of_range(
    op: &str,
    argument: &str,
    expected: &str,
    got: impl std::fmt::Debug,
) -> Error {
    Error::argument(op, argument, expected, format!("{got:?}"), "")
}
