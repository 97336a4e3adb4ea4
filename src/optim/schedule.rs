//! Learning rates as functions of the step: multiply the largest learning rate by the factor, and
//! give it to [`FusedOptimizer::set_lr`](super::FusedOptimizer::set_lr) before each step.
//!
//! ```
//! # use tch::{Device, nn};
//! use tch_extension::optim::{AdamW, OptimizerConfig, schedule::Schedule};
//!
//! # let vs = nn::VarStore::new(Device::Cpu);
//! # let _ = vs.root().ones("w", &[1]);
//! let mut optimizer = AdamW::default().build(&vs, 0.0)?;
//! let schedule = Schedule::cosine(100, 1000, 0.1);
//! for step in 0..1000 {
//!     optimizer.set_lr(6e-4 * schedule.factor(step))?;
//!     // …
//! #   break;
//! }
//! assert_eq!(optimizer.lr_of_group(0), Some(6e-4 * 0.01));
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! `set_lr` writes to the device, so that this also works with a step that was captured in a graph.

use std::f64::consts::PI;

/// A warm-up and what follows it. The factor of each step is between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    warm_up: u64,
    steps: u64,
    last: f64,
    shape: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Constant,
    Linear,
    Cosine,
}

impl Schedule {
    /// After `warm_up` steps with growing factors, the factor 1.
    ///
    /// ```
    /// # use tch_extension::optim::schedule::Schedule;
    /// let factors = [0, 1, 2, 3, 4, 1_000_000].map(|step| Schedule::constant(4).factor(step));
    /// assert_eq!(factors, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    /// ```
    pub fn constant(warm_up: u64) -> Self {
        Schedule { warm_up, steps: warm_up, last: 1.0, shape: Shape::Constant }
    }

    /// After the warm-up, a straight line from 1 to `last`, which step `steps` and all later ones
    /// have.
    ///
    /// ```
    /// # use tch_extension::optim::schedule::Schedule;
    /// let schedule = Schedule::linear(2, 6, 0.0);
    /// let factors = [0, 1, 2, 3, 4, 5, 6, 7].map(|step| schedule.factor(step));
    /// assert_eq!(factors, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    /// ```
    pub fn linear(warm_up: u64, steps: u64, last: f64) -> Self {
        Schedule { warm_up, steps, last, shape: Shape::Linear }
    }

    /// After the warm-up, half a period of a cosine from 1 to `last`, which step `steps` and all
    /// later ones have.
    ///
    /// ```
    /// # use tch_extension::optim::schedule::Schedule;
    /// let schedule = Schedule::cosine(2, 6, 0.2);
    /// assert_eq!([0, 1, 2, 6, 7].map(|step| schedule.factor(step)), [0.5, 1.0, 1.0, 0.2, 0.2]);
    /// assert!((schedule.factor(4) - 0.6).abs() < 1e-12);
    /// ```
    pub fn cosine(warm_up: u64, steps: u64, last: f64) -> Self {
        Schedule { warm_up, steps, last, shape: Shape::Cosine }
    }

    /// The factor for a step, which counts from 0. The first steps have (step + 1) / `warm_up`.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warm_up {
            return (step + 1) as f64 / self.warm_up as f64;
        }
        if self.shape == Shape::Constant {
            return 1.0;
        }
        if step >= self.steps {
            return self.last;
        }
        let done = (step - self.warm_up) as f64 / (self.steps - self.warm_up) as f64;
        let left = match self.shape {
            Shape::Cosine => 0.5 * (1.0 + (PI * done).cos()),
            _ => 1.0 - done,
        };
        self.last + (1.0 - self.last) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_fall_from_one_to_the_last() {
        for schedule in [Schedule::linear(10, 100, 0.1), Schedule::cosine(10, 100, 0.1)] {
            let factors: Vec<f64> = (10..=100).map(|step| schedule.factor(step)).collect();
            assert_eq!((factors[0], factors[90]), (1.0, 0.1));
            assert!(factors.windows(2).all(|pair| pair[1] < pair[0]), "{factors:?}");
        }
    }

    #[test]
    fn a_schedule_without_steps_has_its_last_factor() {
        assert_eq!(Schedule::cosine(0, 0, 0.5).factor(0), 0.5);
        assert_eq!(Schedule::linear(5, 3, 0.5).factor(5), 0.5);
        assert_eq!(Schedule::constant(0).factor(0), 1.0);
    }
}
