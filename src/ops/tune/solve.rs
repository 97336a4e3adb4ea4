//! Least squares of the logarithms of times, by the method of Levenberg and Marquardt: a time that is
//! 10 % off counts the same whether it is long or short.

/// Costs that are changed until predictions agree with what was measured.
pub(super) struct Fit<'a> {
    /// What was measured.
    pub micros: &'a [f64],
    /// Predicts all of it from the costs; `None` where nothing is predicted.
    pub predict: &'a dyn Fn(&[f64]) -> Vec<Option<f64>>,
}

/// A point further off than this, as a logarithm, is no reason to change the costs more.
const FAR: f64 = 0.25;
/// What pulls a cost back to where it was, so that costs stay which few times depend on: a table is also
/// asked for sizes larger than those that were measured.
const PULL: f64 = 0.02;
/// The least cost, instead of zero.
const LEAST: f64 = 1e-6;
const ROUNDS: usize = 40;

impl Fit<'_> {
    /// The costs that agree best.
    pub fn solve(&self, start: &[f64]) -> Vec<f64> {
        let start: Vec<f64> = start.iter().map(|cost| cost.max(LEAST).ln()).collect();
        let (mut at, mut damping) = (start.clone(), 1e-2);
        let mut residuals = self.residuals(&at);
        let mut error = Self::error(&residuals, &at, &start);
        for _ in 0..ROUNDS {
            let step = self.step(&at, &residuals, &start, damping);
            let next: Vec<f64> =
                at.iter().zip(&step).map(|(at, step)| at + step.clamp(-1.0, 1.0)).collect();
            let of_next = self.residuals(&next);
            let error_of_next = Self::error(&of_next, &next, &start);
            if error_of_next < error {
                let is_done = error - error_of_next < 1e-6 * error;
                (at, residuals, error, damping) = (next, of_next, error_of_next, damping / 3.0);
                if is_done {
                    break;
                }
            } else {
                damping *= 4.0;
            }
        }
        at.iter().map(|log| log.exp()).collect()
    }

    /// How far each prediction is off, as a logarithm; 0 where there is none.
    fn residuals(&self, at: &[f64]) -> Vec<f64> {
        let costs: Vec<f64> = at.iter().map(|log| log.exp()).collect();
        let predicted = (self.predict)(&costs);
        let off = |(predicted, micros): (&Option<f64>, &f64)| {
            predicted.map_or(0.0, |predicted| (predicted.max(LEAST) / micros).ln())
        };
        predicted.iter().zip(self.micros).map(off).collect()
    }

    /// The sum of Huber's losses, and of the pull.
    fn error(residuals: &[f64], at: &[f64], start: &[f64]) -> f64 {
        let loss = |off: &f64| match off.abs() {
            near if near <= FAR => near * near,
            far => FAR * (2.0 * far - FAR),
        };
        let pull: f64 = at.iter().zip(start).map(|(at, start)| (at - start).powi(2)).sum();
        residuals.iter().map(loss).sum::<f64>() + PULL * pull
    }

    fn step(&self, at: &[f64], residuals: &[f64], start: &[f64], damping: f64) -> Vec<f64> {
        const CHANGE: f64 = 1e-4;
        let count = at.len();
        let weights: Vec<f64> =
            residuals.iter().map(|off| (FAR / off.abs().max(1e-12)).min(1.0)).collect();
        let slopes: Vec<Vec<(usize, f64)>> = (0..count)
            .map(|place| {
                let mut changed = at.to_vec();
                changed[place] += CHANGE;
                let changed = self.residuals(&changed);
                let slope = |(row, (new, old)): (usize, (&f64, &f64))| {
                    let slope = (new - old) / CHANGE;
                    (slope != 0.0).then_some((row, slope))
                };
                changed.iter().zip(residuals).enumerate().filter_map(slope).collect()
            })
            .collect();
        let mut matrix = vec![vec![0.0; count]; count];
        let mut right = vec![0.0; count];
        let mut dense = vec![0.0; residuals.len()];
        for (i, slope) in slopes.iter().enumerate() {
            slope.iter().for_each(|&(row, slope)| dense[row] = slope * weights[row]);
            for (j, other) in slopes.iter().enumerate().skip(i) {
                let sum: f64 = other.iter().map(|&(row, slope)| dense[row] * slope).sum();
                (matrix[i][j], matrix[j][i]) = (sum, sum);
            }
            right[i] = -slope.iter().map(|&(row, _)| dense[row] * residuals[row]).sum::<f64>();
            right[i] -= PULL * (at[i] - start[i]);
            slope.iter().for_each(|&(row, _)| dense[row] = 0.0);
        }
        for (place, row) in matrix.iter_mut().enumerate() {
            row[place] += PULL;
            row[place] *= 1.0 + damping;
        }
        solved(matrix, right)
    }
}

/// The solution of a symmetric, positive definite system, by Cholesky's decomposition.
fn solved(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let count = right.len();
    for i in 0..count {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| matrix[i][k] * matrix[j][k]).sum();
            let left = matrix[i][j] - sum;
            matrix[i][j] = if i == j { left.max(1e-12).sqrt() } else { left / matrix[j][j] };
        }
    }
    for i in 0..count {
        let sum: f64 = (0..i).map(|k| matrix[i][k] * right[k]).sum();
        right[i] = (right[i] - sum) / matrix[i][i];
    }
    for i in (0..count).rev() {
        let sum: f64 = (i + 1..count).map(|k| matrix[k][i] * right[k]).sum();
        right[i] = (right[i] - sum) / matrix[i][i];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_found_again() {
        // Many, so that the pull does not count.
        let sizes: Vec<f64> = (1..400).map(f64::from).collect();
        let predict = |costs: &[f64]| -> Vec<Option<f64>> {
            sizes.iter().map(|size| Some((costs[0] + costs[1] * size).max(costs[2]))).collect()
        };
        let mut micros: Vec<f64> = predict(&[30.0, 0.5, 45.0, 1.0]).into_iter().flatten().collect();
        // A time that something else disturbed.
        micros[20] *= 5.0;
        let found = Fit { micros: &micros, predict: &predict }.solve(&[100.0, 1.0, 200.0, 7.0]);
        for (found, expected) in found.iter().zip([30.0, 0.5, 45.0, 7.0]) {
            assert!((found / expected - 1.0).abs() < 0.02, "{found} instead of {expected}");
        }
    }
}
