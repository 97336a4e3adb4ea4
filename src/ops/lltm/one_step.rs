//! A sequence of one step, as in sampling. The cell's kernels compute it, and write h' a second
//! time, as the output.

use super::super::lltm_cell::{LltmCell, is_ordinary, of_one_step, place};
use super::{OP, Way};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, differentiate_reference};
use crate::ffi::facts::facts;
use crate::{Error, Result};
use tch::Tensor;

pub(super) struct OneStep(LltmCell);

impl OneStep {
    /// For arguments that have already been checked.
    pub fn new() -> Self {
        OneStep(LltmCell::of_one_step(None))
    }

    /// `None` unless all checks would pass and one step of these arguments is the cell's. That is
    /// the common case; it is known from the arguments' facts, without further queries of each
    /// tensor.
    pub fn of_ordinary(
        way: Way,
        arguments: &[Option<&Tensor>; place::LEN],
    ) -> Result<Option<Self>> {
        if way != Way::Automatic {
            return Ok(None);
        }
        let mut known = facts(*arguments)?;
        let input = &mut known[place::INPUT];
        if !matches!(input.sizes(), Some([1, _, _])) {
            return Ok(None);
        }
        *input = input.of_one_step();
        let (Some(kind), Some(device)) = (input.kind(), input.device()) else { return Ok(None) };
        let is_the_cell_s = way.is_one_step_of_the_cell(1, (kind, kind), device);
        let takes = is_the_cell_s && is_ordinary(&known, arguments[place::BIAS].is_some());
        Ok(takes.then(|| OneStep(LltmCell::of_one_step(Some(known)))))
    }
}

impl Function for OneStep {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let made = self.0.compute(saver, inputs)?;
        let output =
            made.output.ok_or_else(|| Error::msg("internal error: the cell made no output"))?;
        Ok([output, made.new_h, made.new_c].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs =
                (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, super::reference);
        }
        let sum = match (grads.optional(0), grads.optional(1)) {
            (Some(output), Some(h)) => Some(of_one_step(output)?.f_add(h)?),
            _ => None,
        };
        let grad_new_h = sum.as_ref().or(grads.optional(0)).or(grads.optional(1));
        self.0.gradients(ctx, [grad_new_h, grads.optional(2)])
    }
}
