//! Plans with one or two kernels for each step.

use crate::ops::recurrent::plan::{Direction, Sizes};

/// What a step costs if it has one or two kernels of its own, in hundredths of a microsecond.
pub(super) fn cost_step_by_step(direction: Direction, sizes: Sizes) -> i64 {
    /// With more rows, libtorch's products are twice as fast.
    const FEW_ROWS: i64 = 64;
    let Sizes { batch, hidden, .. } = sizes;
    let launches = match direction {
        Direction::Forward => 480,
        Direction::Backward => 700,
    };
    // Operations per hundredth of a microsecond.
    let speed = if batch <= FEW_ROWS { 25e4 } else { 50e4 };
    let products = 6.0 * batch as f64 * hidden as f64 * hidden as f64 / speed;
    launches + products as i64
}
