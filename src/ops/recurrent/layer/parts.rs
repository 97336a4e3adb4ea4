//! The gradients of LSTM and GRU as plain functions, below autograd. What the forward saves depends on
//! the way, so they compute the forward once more.

pub use super::autocast::cast as cast_layer;
use super::functions::{self, Operands, Saved};
pub use super::padded::check_lengths;
use super::padded::{last_rows, padding};
use super::plan::{Choice, Library};
use super::{
    Arguments, Cell, KINDS, RnnWeights, arguments_of, check_arguments, check_kinds, place,
};
use crate::ops::gru::Gru;
use crate::ops::lstm::Lstm;
use crate::ops::recurrent::kernels::Outputs;
use crate::{Error, Result, check};
use std::sync::atomic::AtomicBool;
use tch::Tensor;

/// The incoming gradients: of h of all steps, of the last h and of the last c.
type Grads<'a> = [Option<&'a Tensor>; 3];
/// Which gradients of input, w_ih, w_hh, b_ih, b_hh, h and c are needed, and those gradients.
type Needs = [bool; place::PADDING];
type Gradients = [Option<Tensor>; place::PADDING];

/// The gradients of an LSTM that are needed, in the order of `Needs`; absent incoming gradients are zero.
///
/// # Errors
/// As for [`f_lstm`](crate::ops::f_lstm).
pub fn lstm_backward(
    grads: Grads<'_>,
    input: &Tensor,
    weights: &RnnWeights<'_>,
    (h, c): (&Tensor, &Tensor),
    needs: Needs,
) -> Result<Gradients> {
    again::<Lstm>(grads, &arguments_of(input, weights, h, Some(c)), needs)
}

/// The gradients of a GRU that are needed; the last one is absent.
///
/// # Errors
/// As for [`f_gru`](crate::ops::f_gru).
pub fn gru_backward(
    [output, h]: [Option<&Tensor>; 2],
    input: &Tensor,
    weights: &RnnWeights<'_>,
    first_h: &Tensor,
    needs: Needs,
) -> Result<Gradients> {
    again::<Gru>([output, h, None], &arguments_of(input, weights, first_h, None), needs)
}

/// As [`lstm_backward`], of an LSTM over sequences of different lengths.
///
/// # Errors
/// As for [`f_lstm_padded`](crate::ops::f_lstm_padded).
pub fn lstm_padded_backward(
    grads: Grads<'_>,
    input: &Tensor,
    lengths: &[i64],
    weights: &RnnWeights<'_>,
    (h, c): (&Tensor, &Tensor),
    needs: Needs,
) -> Result<Gradients> {
    padded_again::<Lstm>(grads, lengths, &arguments_of(input, weights, h, Some(c)), needs)
}

/// As [`gru_backward`], of a GRU over sequences of different lengths.
///
/// # Errors
/// As for [`f_gru_padded`](crate::ops::f_gru_padded).
pub fn gru_padded_backward(
    [output, h]: [Option<&Tensor>; 2],
    input: &Tensor,
    lengths: &[i64],
    weights: &RnnWeights<'_>,
    first_h: &Tensor,
    needs: Needs,
) -> Result<Gradients> {
    let arguments = arguments_of(input, weights, first_h, None);
    padded_again::<Gru>([output, h, None], lengths, &arguments, needs)
}

fn again<C: Cell>(grads: Grads<'_>, arguments: &Arguments<'_>, needs: Needs) -> Result<Gradients> {
    check_arguments::<C>(arguments)?;
    check_kinds::<C>(arguments)?;
    check_grads::<C>(grads, arguments)?;
    of_steps::<C>(grads, arguments, None, needs)
}

/// Checks the incoming gradients, whose sizes the kernels rely on.
fn check_grads<C: Cell>(grads: Grads<'_>, arguments: &Arguments<'_>) -> Result<()> {
    let [input, h] = [place::INPUT, place::H].map(|place| arguments[place]);
    let (Some(input), Some(h)) = (input, h) else { return Err(absent()) };
    let (steps, (batch, hidden)) = (input.size3()?.0, h.size2()?);
    let output = [steps, batch, hidden];
    for (name, grad, size) in [
        ("grad_output", grads[0], &output[..]),
        ("grad_h", grads[1], &output[1..]),
        ("grad_c", grads[2], &output[1..]),
    ] {
        let Some(grad) = grad else { continue };
        let grad = check!(C::OP, name, grad).defined()?.same_device_as(&check!(C::OP, input))?;
        grad.kind_in(&KINDS)?.shape("of the output", size)?;
    }
    Ok(())
}

fn absent() -> Error {
    Error::msg("internal error: an argument of a layer is absent")
}

/// The gradients of all steps, of which `padding`, `[T, B, 1]`, says which keep the state.
fn of_steps<C: Cell>(
    grads: Grads<'_>,
    arguments: &Arguments<'_>,
    padding: Option<&Tensor>,
    needs: Needs,
) -> Result<Gradients> {
    if grads.iter().all(Option::is_none) {
        return Ok(Default::default());
    }
    let [Some(input), Some(w_ih), Some(w_hh), b_ih, b_hh, Some(h), c] = *arguments else {
        return Err(absent());
    };
    let operands = Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, padding };
    let (choice, mut library) = (Choice::now(), Library::Ours);
    let Outputs { output, c, activations, .. } =
        functions::forward::<C>(&operands, &mut library, choice, true)?;
    let inputs: [Option<Tensor>; place::LEN] = std::array::from_fn(|place| match place {
        place::PADDING => padding.map(Tensor::shallow_clone),
        place => arguments[place].map(Tensor::shallow_clone),
    });
    let needs: [bool; place::LEN] =
        std::array::from_fn(|place| place != place::PADDING && needs[place]);
    let gradients = match activations {
        None => functions::backward_of_nothing(grads, &inputs, &needs)?,
        Some(activations) => {
            let is_spent = &AtomicBool::new(false);
            let inputs = &inputs;
            let saved = Saved { inputs, output, c, activations, is_last: true, is_spent };
            functions::backward::<C>(grads, &saved, &needs, (library, choice))?
        }
    };
    let mut gradients = gradients.into_iter();
    Ok(std::array::from_fn(|_| gradients.next().flatten()))
}

fn padded_again<C: Cell>(
    grads: Grads<'_>,
    lengths: &[i64],
    arguments: &Arguments<'_>,
    needs: Needs,
) -> Result<Gradients> {
    check_arguments::<C>(arguments)?;
    check_kinds::<C>(arguments)?;
    check_grads::<C>(grads, arguments)?;
    let (Some(input), Some(h)) = (arguments[place::INPUT], arguments[place::H]) else {
        return Err(absent());
    };
    let (steps, batch, _) = input.size3()?;
    check_lengths(C::OP, lengths, steps, batch)?;
    let longest = lengths.iter().copied().max().unwrap_or(steps);
    let input = input.f_narrow(0, 0, longest)?;
    let [grad_output, grad_h, grad_c] = grads;
    let grad_output = grad_output.map(|grad| grad.f_narrow(0, 0, longest)).transpose()?;
    let mut arguments = *arguments;
    arguments[place::INPUT] = Some(&input);
    let mut gradients = if lengths.iter().all(|&length| length == longest) {
        of_steps::<C>([grad_output.as_ref(), grad_h, grad_c], &arguments, None, needs)?
    } else {
        if input.device().is_cuda() && C::CUDA.is_none() {
            let hint = "use a build with CUDA, or torch's own layer";
            return Err(check!(C::OP, input).refuse("device Cpu", "a CUDA device", hint));
        }
        let padding = padding(lengths, longest, input.device())?;
        let zeroed = input.f_masked_fill(&padding, 0.0)?;
        arguments[place::INPUT] = Some(&zeroed);
        let size = [longest, batch, h.size2()?.1];
        let of_output = match &grad_output {
            Some(grad) => Some(grad.f_masked_fill(&padding, 0.0)?),
            None => None,
        };
        // The last h of a sequence is the output of its last step.
        let of_output = match grad_h {
            None => of_output,
            Some(grad_h) => {
                let like = (grad_h.f_kind()?, grad_h.device());
                let sum = of_output.map_or_else(|| Tensor::f_zeros(size, like), Ok)?;
                let rows = sum.f_reshape([longest * batch, size[2]])?;
                let last = last_rows(lengths, batch, input.device())?;
                Some(rows.f_index_add(0, &last, grad_h)?.f_reshape(size)?)
            }
        };
        let of_cell = Some(&padding).filter(|_| !C::KEEPS_STATE.is_empty());
        let grads = [of_output.as_ref(), None, grad_c];
        let mut gradients = of_steps::<C>(grads, &arguments, of_cell, needs)?;
        let of_input = gradients[place::INPUT].take();
        gradients[place::INPUT] =
            of_input.map(|grad| grad.f_masked_fill(&padding, 0.0)).transpose()?;
        gradients
    };
    if longest < steps {
        let of_input = gradients[place::INPUT].take();
        let pad = |grad: Tensor| grad.f_constant_pad_nd([0, 0, 0, 0, 0, steps - longest]);
        gradients[place::INPUT] = of_input.map(pad).transpose()?;
    }
    Ok(gradients)
}
