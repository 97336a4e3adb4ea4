//! Numbers that are in their ranges, or an error that names the option.

use anyhow::{Result, ensure};
use std::fmt::Debug;

/// Refuses a number that is not between these two, which it may also be.
pub fn check<T: PartialOrd + Debug + Copy>(
    option: &str,
    value: T,
    [low, high]: [T; 2],
) -> Result<()> {
    ensure!(
        (low..=high).contains(&value),
        "{option} {value:?} is out of range: give {low:?} to {high:?}"
    );
    Ok(())
}

/// Refuses 0 and what is below it.
pub fn check_above_0(option: &str, value: f64, high: f64) -> Result<()> {
    ensure!(
        value > 0.0 && value <= high,
        "{option} {value:?} is out of range: give a number above 0, up to {high:?}"
    );
    Ok(())
}

/// Refuses 1 and what is above it.
pub fn check_below_1(option: &str, value: f64) -> Result<()> {
    ensure!(
        (0.0..1.0).contains(&value),
        "{option} {value:?} is out of range: give 0 or more, below 1"
    );
    Ok(())
}
