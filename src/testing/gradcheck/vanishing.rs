//! Checks incoming gradients that are zero or undefined.

use super::{Gradcheck, Variable, failed};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use crate::testing::compare::{Bound, components, mismatch, place};
use crate::{Error, Result};
use tch::Tensor;

impl Gradcheck<'_> {
    pub(super) fn check_zero_grad(&self, differentiable: &[usize]) -> Result<()> {
        let outputs = self.differentiable_outputs(differentiable)?;
        let zeros = zeros_like(&outputs)?;
        let gradients = self
            .gradients(&references(&outputs), &present(&zeros))
            .map_err(|error| failed("on incoming gradients of zero", &error))?;
        for (variable, gradient) in self.variables.iter().zip(gradients.iter()) {
            if let Some(gradient) = gradient {
                self.check_likeness(variable, gradient)?;
                self.check_zero(variable, gradient, "every incoming gradient is zero")?;
            }
        }
        Ok(())
    }

    fn check_likeness(&self, variable: &Variable, gradient: &Tensor) -> Result<()> {
        let input = &self.inputs[variable.input];
        let likeness = |tensor: &Tensor| -> Result<_> {
            Ok((tensor.size(), tensor.f_kind()?, tensor.device()))
        };
        let (found, wanted) = (likeness(gradient)?, likeness(input)?);
        if found == wanted {
            return Ok(());
        }
        Err(Error::msg(format!(
            "gradcheck: input {}: its gradient has shape, kind and device {found:?}, the input {wanted:?}",
            variable.input
        )))
    }

    fn check_zero(&self, variable: &Variable, gradient: &Tensor, reason: &str) -> Result<()> {
        let found = components(gradient)?;
        // `== 0.0` is false for NaN, so NaN is found, too.
        let Some(wrong) = found.iter().position(|&value| !(value == 0.0)) else { return Ok(()) };
        Err(Error::msg(format!(
            "gradcheck: input {}: the gradient is {:?} at element {}, although {reason}; backward has to \
             multiply by the incoming gradient",
            variable.input,
            found[wrong],
            place(wrong, &gradient.size(), gradient.f_kind()?),
        )))
    }

    pub(super) fn check_undefined_grad(&self, differentiable: &[usize]) -> Result<()> {
        self.check_all_undefined(differentiable)?;
        if differentiable.len() > 1 {
            for place in 0..differentiable.len() {
                self.check_one_undefined(differentiable, place)?;
            }
        }
        Ok(())
    }

    fn check_all_undefined(&self, differentiable: &[usize]) -> Result<()> {
        let outputs = self.differentiable_outputs(differentiable)?;
        let outputs = outputs.iter().map(cut_gradient).collect::<Result<Vec<_>>>()?;
        let zeros = zeros_like(&outputs)?;
        let gradients = self
            .gradients(&references(&outputs), &present(&zeros))
            .map_err(|error| undefined_failed("every output", &error))?;
        for (variable, gradient) in self.variables.iter().zip(gradients.iter()) {
            if let Some(gradient) = gradient {
                self.check_zero(variable, gradient, "every incoming gradient is undefined")?;
            }
        }
        Ok(())
    }

    /// Checks one undefined incoming gradient while the other outputs get ones, because a backward
    /// pass that gives up as soon as one gradient is undefined should not pass.
    fn check_one_undefined(&self, differentiable: &[usize], place: usize) -> Result<()> {
        let mut outputs = self.differentiable_outputs(differentiable)?;
        let mut vectors =
            outputs.iter().map(Tensor::f_ones_like).collect::<std::result::Result<Vec<_>, _>>()?;
        vectors[place] = outputs[place].f_zeros_like()?;
        let with_zeros = self.gradients(&references(&outputs), &present(&vectors))?;

        outputs[place] = cut_gradient(&outputs[place])?;
        let undefined = differentiable[place];
        let without = self
            .gradients(&references(&outputs), &present(&vectors))
            .map_err(|error| undefined_failed(&format!("output {undefined}"), &error))?;
        for (variable, (found, wanted)) in
            self.variables.iter().zip(without.iter().zip(with_zeros.iter()))
        {
            self.check_undefined_as_zeros(undefined, variable, found.as_ref(), wanted.as_ref())?;
        }
        Ok(())
    }

    fn check_undefined_as_zeros(
        &self,
        undefined: usize,
        variable: &Variable,
        found: Option<&Tensor>,
        wanted: Option<&Tensor>,
    ) -> Result<()> {
        let values = |gradient: Option<&Tensor>| {
            gradient.map_or(Ok(vec![0.0; variable.elements.len()]), components)
        };
        let (found, wanted) = (values(found)?, values(wanted)?);
        let bound = Bound { rtol: self.options.rtol, atol: self.options.atol, equal_nan: true };
        let Some(mismatch) = mismatch(&found, &wanted, bound) else { return Ok(()) };
        let input = &self.inputs[variable.input];
        Err(Error::msg(format!(
            "gradcheck: input {}: when the incoming gradient of output {undefined} is undefined, the gradient \
             is {:?} at element {}, but {:?} when it is zero (those of the other outputs are one)",
            variable.input,
            found[mismatch.worst],
            place(mismatch.worst, &input.size(), input.f_kind()?),
            wanted[mismatch.worst],
        )))
    }

    /// Outputs with a new graph, through which no backward pass has run.
    pub(super) fn differentiable_outputs(&self, differentiable: &[usize]) -> Result<Vec<Tensor>> {
        let outputs = self.call()?;
        differentiable.iter().map(|&index| Ok(outputs.get(index)?.shallow_clone())).collect()
    }
}

fn zeros_like(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(|tensor| Ok(tensor.f_zeros_like()?)).collect()
}

fn references(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}

fn present(tensors: &[Tensor]) -> Vec<Option<&Tensor>> {
    tensors.iter().map(Some).collect()
}

fn undefined_failed(which: &str, error: &Error) -> Error {
    Error::msg(format!(
        "gradcheck: backward failed when the incoming gradient of {which} is undefined: {error}; treat an \
         absent gradient as zero, or leave Saver::set_materialize_grads on"
    ))
}

/// Returns the same values but passes no gradient back. Whatever made `output` gets an undefined
/// gradient, as it does when a loss does not depend on it.
fn cut_gradient(output: &Tensor) -> Result<Tensor> {
    apply(UndefinedGrad, &[Some(output)])?.single()
}

struct UndefinedGrad;

impl Function for UndefinedGrad {
    const NAME: &'static str = "undefined_grad";

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        Ok(inputs.get(0)?.shallow_clone().into())
    }

    fn backward(&self, _: &Context<'_>, _: &Tensors) -> Result<Tensors> {
        Ok(None.into())
    }
}
