//! An exponential moving average, which an optimizer keeps of the weights.

use tch::Tensor;
use tch_extension::{Result, check};

/// `average ← decay · average + (1 − decay) · value`
pub fn update(average: &mut Tensor, value: &Tensor, decay: f64) -> Result<()> {
    let shape = average.size();
    let known = check!("ema_", "average", *average).defined()?;
    check!("ema_", value).defined()?.like(&known)?.shape("average", &shape)?;
    let _ = average.f_lerp_(value, 1.0 - decay)?;
    Ok(())
}
