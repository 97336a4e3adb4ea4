//! Jacobians, and the messages about wrong ones.

use crate::testing::compare::{Bound, Mismatch, count_of, mismatch, place};
use std::fmt;
use tch::Kind;

/// The derivatives of each component of an output (a row) with respect to each component of an
/// input (a column). A component is an element or, for a complex tensor, the real or the imaginary
/// part of an element.
pub(super) struct Jacobian {
    columns: usize,
    /// In row-major order.
    values: Vec<f64>,
}

impl Jacobian {
    pub fn zeros(rows: usize, columns: usize) -> Jacobian {
        Jacobian { columns, values: vec![0.0; rows * columns] }
    }

    /// Sets the derivatives of output component `row`. The engine has made sure that a gradient has
    /// its input's shape and kind.
    pub fn set_row(&mut self, row: usize, gradient: &[f64]) {
        self.values[row * self.columns..][..self.columns].copy_from_slice(gradient);
    }

    /// Sets the derivatives with respect to input component `column`.
    pub fn set_column(&mut self, column: usize, derivatives: impl Iterator<Item = f64>) {
        for (row, derivative) in derivatives.enumerate() {
            self.values[row * self.columns + column] = derivative;
        }
    }

    /// Adds the rows, each multiplied by its weight, to `sums`.
    pub fn add_rows(&self, weights: &[f64], sums: &mut [f64]) {
        for (row, weight) in self.values.chunks(self.columns.max(1)).zip(weights) {
            row.iter().zip(&mut *sums).for_each(|(value, sum)| *sum += weight * value);
        }
    }

    pub fn mismatch(&self, expected: &Jacobian, bound: Bound) -> Option<Mismatch> {
        mismatch(&self.values, &expected.values, bound)
    }
}

impl fmt::Display for Jacobian {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in self.values.chunks(self.columns.max(1)) {
            // `+ 0.0` turns a negative zero into a plain zero.
            let numbers: Vec<String> =
                row.iter().map(|value| format!("{:>13.6e}", value + 0.0)).collect();
            writeln!(f, "  [{}]", numbers.join(", "))?;
        }
        Ok(())
    }
}

/// Two Jacobians of one output with respect to one input that should agree but do not.
pub(super) struct Disagreement<'a> {
    /// The output's index, shape and kind.
    pub output: (usize, &'a [i64], Kind),
    /// The input's index, shape and kind.
    pub input: (usize, &'a [i64], Kind),
    /// The beginning of the sentence that names the place.
    pub problem: &'a str,
    pub sides: Sides<'a>,
    pub mismatch: Mismatch,
    pub bound: Bound,
}

/// The names and the Jacobians that are compared.
pub(super) type Sides<'a> = [(&'a str, &'a Jacobian); 2];

/// Larger Jacobians are not printed, because so many numbers say less than the worst one.
const MAX_SHOWN: usize = 64;

impl fmt::Display for Disagreement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [(left, left_jacobian), (right, right_jacobian)] = self.sides;
        let ((output, output_size, output_kind), (input, input_size, input_kind)) =
            (self.output, self.input);
        let (worst, columns, total) =
            (self.mismatch.worst, left_jacobian.columns, left_jacobian.values.len());
        let (row, column) = (worst / columns, worst % columns);
        let (row_element, column_element) =
            (place(row, output_size, output_kind), place(column, input_size, input_kind));
        write!(f, "gradcheck: output {output}, input {input}: {} at row {row} ", self.problem)?;
        write!(
            f,
            "(output element {row_element}), column {column} (input element {column_element}): "
        )?;
        let (left_value, right_value) = (left_jacobian.values[worst], right_jacobian.values[worst]);
        write!(f, "{left} {left_value:?}, {right} {right_value:?}; ")?;
        let Bound { rtol, atol, .. } = self.bound;
        let count = count_of(self.mismatch.count, total, "entries");
        write!(f, "{count} wrong (rtol {rtol:?}, atol {atol:?})")?;
        if total <= MAX_SHOWN {
            write!(f, "\n{left}:\n{left_jacobian}{right}:\n{right_jacobian}")?;
        }
        Ok(())
    }
}
