//! An operator as calls of the registered operators.

use super::differentiable;
use crate::Result;
use crate::autograd::Inputs;
use crate::library::Value;
use crate::operator::signature::Part;
use crate::operator::traced::Needs;
use crate::operator::{Args, Operator, Outputs, Slots};
use tch::Tensor;

/// Calls the registered operators.
pub(in crate::operator) struct Dispatched<'a, O>(pub &'a O);

impl<O: Operator> Dispatched<'_, O> {
    pub const INPUTS: usize = O::In::NAMES.len();
    pub const OUTPUTS: usize = O::Out::NAMES.len();
    pub const KEEPS: bool = !O::Kept::NAMES.is_empty();
    pub const RESULTS: usize = Self::OUTPUTS + O::Kept::NAMES.len();
    /// Which results of [`forward`](Self::forward) the gradients read: one bit for each, the first one
    /// lowest.
    pub const KEPT: u64 = O::READS_OUTPUTS | ((1 << O::Kept::NAMES.len()) - 1) << Self::OUTPUTS;

    /// The outputs.
    pub fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        O::registered().call::<O, _>(Part::Own, self.0.values(&inputs))
    }

    /// The outputs, and after them what is kept for these gradients.
    pub fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
        if !Self::KEEPS {
            return self.call(inputs);
        }
        let mut all = self.0.values(&inputs);
        all.push(needs.into());
        O::registered().call::<O, _>(Part::Forward, all)
    }

    /// A gradient for each of the arguments. Those that are not needed may be absent or empty (`[0]`).
    pub fn backward(
        &self,
        grads: Inputs<'_>,
        kept: Inputs<'_>,
        inputs: Inputs<'_>,
        needs: Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let own = self.0.values(&inputs).into_iter();
        let before = grads.iter().chain(kept.iter()).map(|tensor| Value::from(*tensor));
        let all = before.chain(own).chain([needs.into()]);
        let found: Vec<Tensor> = O::registered().call::<O, _>(Part::Backward, all.collect())?;
        let mut gradients: Vec<Option<Tensor>> = (0..Self::INPUTS).map(|_| None).collect();
        for (place, gradient) in differentiable::<O>().zip(found) {
            gradients[place] = Some(gradient);
        }
        Ok(gradients)
    }
}

/// Calls an operator that is registered by the dispatcher, as its composition does while a program is
/// traced ([`Operator::composed`]).
///
/// # Errors
/// When it is not registered, or an error of the operator.
pub fn dispatched<O: Operator>(operator: &O, of: &Args<'_, O>) -> Result<Outputs<O>> {
    let values = operator.values(O::In::tensors(of).as_ref());
    let outputs: Vec<Tensor> = O::registered().call::<O, _>(Part::Own, values)?;
    let mut outputs = outputs.into_iter();
    O::Out::own(O::NAME, |_| outputs.next())
}
