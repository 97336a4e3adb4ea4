//! An operator as calls of the registered operators.

use super::differentiable;
use crate::Result;
use crate::autograd::Inputs;
use crate::library::Value;
use crate::operator::node::reference;
use crate::operator::signature::Part;
use crate::operator::traced::{Needs, Pair};
use crate::operator::{Args, Operator, Outputs, Slots};
use tch::Tensor;

/// Calls the registered operators.
#[derive(Clone)]
pub(super) struct Dispatched<O>(pub O);

impl<O: Operator> Dispatched<O> {
    pub const KEEPS: bool = !O::Kept::NAMES.is_empty();
    pub const RESULTS: usize = O::Out::NAMES.len() + O::Kept::NAMES.len();
}

fn values<'a>(tensors: &[Option<&'a Tensor>]) -> impl Iterator<Item = Value<'a>> {
    tensors.iter().map(|tensor| Value::from(*tensor))
}

impl<O: Operator> Pair for Dispatched<O> {
    const NAME: &'static str = O::NAME;
    const BACKWARD: &'static str = O::BACKWARD;
    const INPUTS: usize = O::In::NAMES.len();
    const OUTPUTS: usize = O::Out::NAMES.len();
    const KEPT: u64 = O::READS_OUTPUTS | ((1 << O::Kept::NAMES.len()) - 1) << O::Out::NAMES.len();

    fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        O::registered().call::<O, _>(Part::Own, self.0.values(&inputs))
    }

    fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
        if !Self::KEEPS {
            return self.call(inputs);
        }
        let mut all = self.0.values(&inputs);
        all.push(needs.into());
        O::registered().call::<O, _>(Part::Forward, all)
    }

    fn backward(
        &self,
        grads: Inputs<'_>,
        kept: Inputs<'_>,
        inputs: Inputs<'_>,
        needs: Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let own = self.0.values(&inputs).into_iter();
        let all = values(&grads).chain(values(&kept)).chain(own).chain([needs.into()]);
        let found: Vec<Tensor> = O::registered().call::<O, _>(Part::Backward, all.collect())?;
        let mut gradients: Vec<Option<Tensor>> = (0..Self::INPUTS).map(|_| None).collect();
        for (place, gradient) in differentiable::<O>().zip(found) {
            gradients[place] = Some(gradient);
        }
        Ok(gradients)
    }

    fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        Ok(reference(&self.0, &inputs)?.into_iter().flatten().collect())
    }

    fn shared_gradients(&self, inputs: Inputs<'_>) -> Result<&'static [(usize, usize)]> {
        Ok(self.0.shared_gradients(&O::In::borrowed(O::NAME, &inputs)?))
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
