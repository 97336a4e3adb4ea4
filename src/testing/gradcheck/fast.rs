//! The fast mode, which checks one number of each Jacobian.

use super::{Gradcheck, failed};
use crate::testing::compare::{Bound, components, from_components, values};
use crate::testing::samples::noise;
use crate::{Error, Result};
use tch::Tensor;

impl Gradcheck<'_> {
    /// Checks `vᵀ J u` for each output and input, with fixed positive unit vectors. The analytical
    /// number comes from a backward pass of `v`, which is run twice; the numerical one from moving
    /// the whole input along `u`.
    pub(super) fn check_fast(&self, differentiable: &[usize]) -> Result<()> {
        let lens = self.variables.iter().map(|variable| variable.elements.len());
        let directions: Vec<Vec<f64>> =
            lens.enumerate().map(|(place, len)| unit_vector(len, place)).collect::<Result<_>>()?;
        let differences = directions.iter().enumerate();
        let differences: Vec<Vec<Vec<f64>>> = differences
            .map(|(place, u)| self.differences(place, u, differentiable))
            .collect::<Result<_>>()?;
        // Call the function only now, because what it saves must not change any more.
        let outputs = self.call()?;
        for (position, &index) in differentiable.iter().enumerate() {
            let output = outputs.get(index)?;
            let v = unit_vector(self.components_of_output(index), 100 + index)?;
            let analytical = [self.products(output, index, &v)?, self.products(output, index, &v)?];
            for (place, u) in directions.iter().enumerate() {
                let runs = [0, 1].map(|run| dot(&analytical[run][place], u));
                let numerical = dot(&differences[place][position], &v);
                self.compare_numbers(index, self.variables[place].input, runs, numerical)?;
            }
        }
        Ok(())
    }

    fn compare_numbers(
        &self,
        output: usize,
        input: usize,
        runs: [f64; 2],
        numerical: f64,
    ) -> Result<()> {
        let at = format!("gradcheck: output {output}, input {input}:");
        let [first, second] = runs;
        let repeats = Bound { rtol: 0.0, atol: self.options.nondet_tol, equal_nan: true };
        if !repeats.holds(second, first) {
            let text =
                "backward is not deterministic or not reentrant, two runs on one graph differ";
            return Err(Error::msg(format!("{at} {text}: {first:?}, {second:?}")));
        }
        let bound = Bound { rtol: self.options.rtol, atol: self.options.atol, equal_nan: false };
        if bound.holds(first, numerical) {
            return Ok(());
        }
        Err(Error::msg(format!(
            "{at} the gradient is wrong: vᵀ J u is {first:?} analytically, {numerical:?} numerically (rtol {:?}, \
             atol {:?}); without fast_mode it says where",
            bound.rtol, bound.atol
        )))
    }

    /// Computes `vᵀ J` for each variable.
    fn products(&self, output: &Tensor, index: usize, v: &[f64]) -> Result<Vec<Vec<f64>>> {
        let v = from_components(v, output)?;
        let gradients = self
            .gradients(&[output], &[Some(&v)])
            .map_err(|error| failed(&format!("for output {index}"), &error))?;
        let of = |(gradient, len): (&Option<Tensor>, usize)| {
            gradient.as_ref().map_or_else(|| Ok(vec![0.0; len]), components)
        };
        let lens = self.variables.iter().map(|variable| variable.elements.len());
        gradients.iter().zip(lens).map(of).collect()
    }

    /// Computes `J u` for each output, by central differences.
    fn differences(&self, place: usize, u: &[f64], outputs: &[usize]) -> Result<Vec<Vec<f64>>> {
        let elements = &self.variables[place].elements;
        let at = |step: f64| -> Result<Vec<Vec<f64>>> {
            let moved = u.iter().enumerate().map(|(index, u)| elements.value(index) + step * u);
            elements.set_all(&moved.collect::<Vec<_>>())?;
            self.components_at(outputs)
        };
        let eps = self.options.eps;
        let (low, high) = (at(-eps)?, at(eps)?);
        elements.restore_all()?;
        let difference = |(low, high): (&Vec<f64>, &Vec<f64>)| {
            low.iter().zip(high).map(|(low, high)| (high - low) / (2.0 * eps)).collect()
        };
        Ok(low.iter().zip(&high).map(difference).collect())
    }
}

/// A unit vector with positive entries, so that no two errors cancel just because of their
/// positions.
fn unit_vector(len: usize, seed: usize) -> Result<Vec<f64>> {
    let numbers: Vec<f64> =
        values(&noise(&[len as i64], seed)?)?.iter().map(|value| value + 1.5).collect();
    let norm = dot(&numbers, &numbers).sqrt().max(f64::MIN_POSITIVE);
    Ok(numbers.iter().map(|value| value / norm).collect())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_are_positive_and_of_length_one() {
        let vector = unit_vector(1000, 3).unwrap();
        assert!(vector.iter().all(|&value| value > 0.0));
        assert!((dot(&vector, &vector) - 1.0).abs() < 1e-12);
        assert!(unit_vector(0, 3).unwrap().is_empty());
        assert_ne!(vector, unit_vector(1000, 4).unwrap());
    }
}
