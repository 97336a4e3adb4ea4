//! One layer of torch.nn's LSTM or GRU in one direction, as an operator. `functions` has its two
//! plain functions, `cell` what differs between the two.

mod cell;
mod costs;
mod functions;
mod libtorch;
mod over_steps;
mod padded;
pub(in crate::ops) mod parts;
mod plan;
mod products;
mod tf32;

pub(in crate::ops) use cell::{Cell, State, reference};
pub(in crate::ops) use costs::Costs;
pub(crate) use padded::check_lengths;
pub(in crate::ops) use padded::{f_padded, padded_reference};
#[doc(hidden)]
pub use plan::Way;
pub(crate) use plan::with_half_of_the_gpu;

use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::check::Check;
use crate::ops::recurrent::kernels::Outputs;
use crate::{Error, Result, check};
use functions::{Operands, Saved};
use plan::{Choice, Library};
use std::marker::PhantomData;
use std::sync::atomic::AtomicBool;
use tch::{Kind, Tensor};

/// The parameters of one layer in one direction, as torch.nn has them. H is the hidden size, F the
/// number of features, and G the number of gates: 4 for an LSTM, 3 for a GRU.
#[derive(Clone, Copy, Debug)]
pub struct RnnWeights<'a> {
    /// `[G·H, F]`, torch.nn's `weight_ih_l0`
    pub w_ih: &'a Tensor,
    /// `[G·H, H]`, `weight_hh_l0`
    pub w_hh: &'a Tensor,
    /// `[G·H]`, `bias_ih_l0`; `None` for zeros
    pub b_ih: Option<&'a Tensor>,
    /// `[G·H]`, `bias_hh_l0`; `None` for zeros
    pub b_hh: Option<&'a Tensor>,
}

/// The positions of the inputs, which are also their slots among the saved tensors.
mod place {
    pub const INPUT: usize = 0;
    pub const W_IH: usize = 1;
    pub const W_HH: usize = 2;
    pub const B_IH: usize = 3;
    pub const B_HH: usize = 4;
    pub const H: usize = 5;
    pub const C: usize = 6;
    /// Which steps are padding, `[T, B, 1]`; only for a cell with a state of its own.
    pub const PADDING: usize = 7;
    pub const LEN: usize = 8;
}

/// Saved after the inputs: h of all steps, c of all steps (by oneDNN only the last one), and what the
/// cell saves.
const OUTPUT: usize = place::LEN;
const STATES: usize = place::LEN + 1;
const ACTIVATIONS: usize = place::LEN + 2;

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// All steps: (h of all steps, the last h, the last c).
///
/// # Errors
/// See the operators.
pub(in crate::ops) fn f_layer<C: Cell>(
    input: &Tensor,
    weights: &RnnWeights<'_>,
    h: &Tensor,
    c: Option<&Tensor>,
) -> Result<(Tensor, State)> {
    let arguments = arguments_of(input, weights, h, c);
    check_arguments::<C>(&arguments)?;
    apply_layer::<C>(&arguments, None)
}

/// What a caller hands over, in the order of [`place`].
type Arguments<'a> = [Option<&'a Tensor>; place::PADDING];

fn arguments_of<'a>(
    input: &'a Tensor,
    weights: &RnnWeights<'a>,
    h: &'a Tensor,
    c: Option<&'a Tensor>,
) -> Arguments<'a> {
    let RnnWeights { w_ih, w_hh, b_ih, b_hh } = *weights;
    [Some(input), Some(w_ih), Some(w_hh), b_ih, b_hh, Some(h), c]
}

/// Applies the operator to arguments whose sizes have been checked.
fn apply_layer<C: Cell>(
    arguments: &Arguments<'_>,
    padding: Option<&Tensor>,
) -> Result<(Tensor, State)> {
    let cast = autocast_inputs(CastPolicy::LowerPrecision, arguments)?;
    let arguments: Arguments<'_> = match &cast {
        Some(cast) => std::array::from_fn(|place| cast[place].as_ref()),
        None => *arguments,
    };
    check_kinds::<C>(&arguments)?;
    let (choice, library) = (Choice::now(), Library::Ours);
    let layer = Layer::<C> { choice, library, is_spent: false.into(), cell: PhantomData };
    let [input, w_ih, w_hh, b_ih, b_hh, h, c] = arguments;
    let outputs = apply(layer, &[input, w_ih, w_hh, b_ih, b_hh, h, c, padding])?;
    if C::STATE_IS_H {
        let [output, last_h] = outputs.exactly()?;
        return Ok((output, (last_h, None)));
    }
    let [output, last_h, last_c] = outputs.exactly()?;
    Ok((output, (last_h, Some(last_c))))
}

fn check_arguments<C: Cell>(arguments: &Arguments<'_>) -> Result<()> {
    let [Some(input), Some(w_ih), Some(w_hh), b_ih, b_hh, Some(h), c] = *arguments else {
        return Err(Error::msg(format!("internal error: an argument of {} is absent", C::OP)));
    };
    let input =
        check!(C::OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(3, "[T, B, F]")?;
    let like_input = |argument: Check<'_>| -> Result<()> {
        argument.defined()?.same_device_as(&input)?.kind_in(&KINDS).map(|_| ())
    };
    let optional = [("b_ih", b_ih), ("b_hh", b_hh), ("c", c)];
    like_input(check!(C::OP, w_ih))?;
    like_input(check!(C::OP, w_hh))?;
    like_input(check!(C::OP, h))?;
    for (name, tensor) in optional {
        tensor.map(|tensor| like_input(check!(C::OP, name, tensor))).transpose()?;
    }
    let (steps, batch, features) = input.tensor().size3()?;
    let hidden = check!(C::OP, h).dim(2, "[B, H]")?.tensor().size2()?.1;
    check!(C::OP, h).shape("[B, H]", &[batch, hidden])?;
    c.map(|c| check!(C::OP, c).shape("[B, H]", &[batch, hidden])).transpose()?;
    // An input without features may have any number of steps.
    let too_large = || {
        let sizes = format!("T = {steps}, B = {batch}, H = {hidden}");
        input.refuse("sizes whose products fit 64 bits", sizes, "")
    };
    let rows = hidden.checked_mul(C::GATES).ok_or_else(too_large)?;
    let in_all = steps.checked_mul(batch).and_then(|count| count.checked_mul(rows.max(1)));
    in_all.ok_or_else(too_large)?;
    let rows_name = C::ROWS;
    check!(C::OP, w_ih).shape(&format!("[{rows_name}, F]"), &[rows, features])?;
    check!(C::OP, w_hh).shape(&format!("[{rows_name}, H]"), &[rows, hidden])?;
    for (name, bias) in [("b_ih", b_ih), ("b_hh", b_hh)] {
        let Some(bias) = bias else { continue };
        check!(C::OP, name, bias).shape(&format!("[{rows_name}]"), &[rows])?;
    }
    Ok(())
}

/// All arguments have the input's kind, as libtorch demands.
fn check_kinds<C: Cell>(arguments: &Arguments<'_>) -> Result<()> {
    const NAMES: [&str; place::PADDING] = ["input", "w_ih", "w_hh", "b_ih", "b_hh", "h", "c"];
    let kind = arguments[place::INPUT].map_or(Kind::Float, Tensor::kind);
    for (name, tensor) in NAMES.into_iter().zip(arguments) {
        let Some(tensor) = tensor else { continue };
        check!(C::OP, name, tensor).kind_as(kind, "input")?;
    }
    Ok(())
}

struct Layer<C> {
    choice: Choice,
    /// Who computed the forward.
    library: Library,
    /// Whether a backward pass has written into what the forward pass saved.
    is_spent: AtomicBool,
    cell: PhantomData<C>,
}

impl<C: Cell> Function for Layer<C> {
    const NAME: &'static str = C::OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let all: [Option<&Tensor>; place::LEN] =
            std::array::from_fn(|place| inputs.optional(place));
        let operands = Operands {
            input: inputs.get(place::INPUT)?,
            w_ih: inputs.get(place::W_IH)?,
            w_hh: inputs.get(place::W_HH)?,
            b_ih: inputs.optional(place::B_IH),
            b_hh: inputs.optional(place::B_HH),
            h: inputs.get(place::H)?,
            c: inputs.optional(place::C),
            padding: inputs.optional(place::PADDING),
        };
        let Outputs { output, last_h, last_c, c, activations } = functions::forward::<C>(
            &operands,
            &mut self.library,
            self.choice,
            saver.needs_graph(),
        )?;
        all.iter().for_each(|tensor| saver.save_optional(*tensor));
        saver.save_optional(activations.as_ref().map(|_| &output));
        saver.save_optional(c.as_ref());
        saver.save_optional(activations.as_ref());
        // An output without a gradient then costs no tensor of zeros.
        saver.set_materialize_grads(false);
        Ok(match last_c {
            Some(last_c) => [output, last_h, last_c].into(),
            None => [output, last_h].into(),
        })
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs =
                (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, reference_of::<C>);
        }
        let needs: [bool; place::LEN] = std::array::from_fn(|place| ctx.needs_input_grad(place));
        let grads = [
            grads.optional(0),
            grads.optional(1),
            if C::STATE_IS_H { None } else { grads.optional(2) },
        ];
        if grads.iter().all(Option::is_none) {
            // Nothing depends on this call.
            return Ok((0..place::LEN).map(|_| None).collect::<Vec<_>>().into());
        }
        let inputs =
            (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
        let Some(activations) = ctx.saved_optional(ACTIVATIONS)? else {
            return Ok(functions::backward_of_nothing(grads, &inputs, &needs)?.into());
        };
        let saved = Saved {
            inputs: &inputs,
            output: ctx.saved(OUTPUT)?,
            c: ctx.saved_optional(STATES)?,
            activations,
            is_last: ctx.is_last_backward(),
            is_spent: &self.is_spent,
        };
        Ok(functions::backward::<C>(grads, &saved, &needs, (self.library, self.choice))?.into())
    }
}

fn reference_of<C: Cell>(inputs: &[Option<Tensor>]) -> Result<Tensors> {
    let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
    let inputs = Inputs::new(&inputs);
    let weights = RnnWeights {
        w_ih: inputs.get(place::W_IH)?,
        w_hh: inputs.get(place::W_HH)?,
        b_ih: inputs.optional(place::B_IH),
        b_hh: inputs.optional(place::B_HH),
    };
    let state = (
        inputs.get(place::H)?.shallow_clone(),
        inputs.optional(place::C).map(Tensor::shallow_clone),
    );
    let (input, padding) = (inputs.get(place::INPUT)?, inputs.optional(place::PADDING));
    let (output, (last_h, last_c)) = reference::<C>(input, &weights, state, padding)?;
    Ok(match last_c {
        Some(last_c) => [output, last_h, last_c].into(),
        None => [output, last_h].into(),
    })
}
