//! Checks incoming gradients that are not 1, and that arrive for all outputs at once.

use super::jacobian::Jacobian;
use super::{Gradcheck, failed};
use crate::testing::compare::{Bound, components, from_components, mismatch, parts, place};
use crate::{Error, Result};
use tch::Tensor;

/// Weights of several sizes and of both signs. None is 1, because 1 is its own square.
const WEIGHTS: [f64; 5] = [-2.0, 0.5, 3.0, -0.25, 1.5];

impl Gradcheck<'_> {
    /// Checks that incoming gradients for all outputs at once give the matching combination of
    /// rows. The rows of the Jacobians were computed one at a time, each from an incoming gradient
    /// with a single 1 for a single output.
    pub(super) fn check_combination(
        &self,
        differentiable: &[usize],
        jacobians: &[Vec<Jacobian>],
    ) -> Result<()> {
        let outputs = self.differentiable_outputs(differentiable)?;
        let weights = outputs.iter().enumerate().map(weights).collect::<Result<Vec<_>>>()?;
        let vectors =
            outputs.iter().zip(&weights).map(|(output, weights)| from_components(weights, output));
        let vectors = vectors.collect::<Result<Vec<_>>>()?;
        let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
        let gradients = self
            .gradients(&outputs.iter().collect::<Vec<_>>(), &vectors)
            .map_err(|error| failed("on incoming gradients for all outputs at once", &error))?;
        for (index, gradient) in gradients.iter().enumerate() {
            let mut expected = vec![0.0; self.variables[index].elements.len()];
            for (jacobians, weights) in jacobians.iter().zip(&weights) {
                jacobians[index].add_rows(weights, &mut expected);
            }
            let found =
                gradient.as_ref().map_or_else(|| Ok(vec![0.0; expected.len()]), components)?;
            self.agree_on_combination(self.variables[index].input, &found, &expected)?;
        }
        Ok(())
    }

    fn agree_on_combination(&self, input: usize, found: &[f64], expected: &[f64]) -> Result<()> {
        let atol = self.options.atol + self.options.nondet_tol;
        let bound = Bound { rtol: self.options.rtol, atol, equal_nan: true };
        let Some(mismatch) = mismatch(found, expected, bound) else { return Ok(()) };
        Err(Error::msg(format!(
            "gradcheck: input {input}: incoming gradients of several sizes and signs, for all outputs at once, give \
             {:?} at element {}, but {:?} according to the Jacobian; backward has to be linear in the incoming gradients",
            found[mismatch.worst],
            place(mismatch.worst, &self.inputs[input].size(), self.inputs[input].f_kind()?),
            expected[mismatch.worst],
        )))
    }
}

fn weights((place, output): (usize, &Tensor)) -> Result<Vec<f64>> {
    let count = output.numel() * parts(output.f_kind()?);
    Ok((0..count).map(|component| WEIGHTS[(place + component) % WEIGHTS.len()]).collect())
}
