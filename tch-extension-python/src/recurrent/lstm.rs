//! `lstm`.

use super::{check, check_lengths, flat, output};
use crate::meta::{contiguous, likes};
use crate::node::{
    Needs, Pair, below, call, gradients, gradients_by, is_eager, kernel, needs, returned, traced,
    with_casts,
};
use tch::Tensor;
use tch_extension::Result;
use tch_extension::autograd::Inputs;
use tch_extension::library::sizes;
use tch_extension::ops::{
    RnnWeights, f_lstm, f_lstm_padded, lstm_padded_reference, lstm_reference, parts,
};

tch_extension::operators! {
    namespace tch_extension;

    /// One layer of `torch.nn.LSTM` in one direction: `input` is `[T, B, F]`, `h` and `c` are `[B, H]`,
    /// `w_ih` is `[4H, F]`, `w_hh` `[4H, H]`, and the biases are `[4H]`. Returns h of all steps,
    /// `[T, B, H]`, and the last h and c. With `lengths`, one from 1 to T for each row of the batch,
    /// outputs after the end of a sequence are zero, and its last state is that of its last step.
    fn lstm(
        input: &Tensor,
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor> = None,
        b_hh: Option<&Tensor> = None,
        lengths: Option<&[i64]> = None,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = own,
        fake = |input, h, c, w_ih, w_hh, b_ih, b_hh, lengths| {
            let shapes = check("lstm", "4H", input, (h, Some(c)), [w_ih, w_hh], [b_ih, b_hh])?;
            check_lengths("lstm", lengths, &shapes)?;
            let kind = input.f_kind()?;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?, contiguous(&sizes(c), kind, c)?))
        },
        autograd = autograd,
        key("AutocastCPU") = autocast,
        key("AutocastCUDA") = autocast,
    }

    /// The gradients of input, h, c, w_ih, w_hh, b_ih and b_hh. Incoming ones that are absent are zero.
    fn lstm_backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        lengths: Option<&[i64]>,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = backward,
        fake = |_output, _h, _c, input, h, c, w_ih, w_hh, b_ih, b_hh, _lengths, needs| {
            let inputs = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = backward_autograd,
    }
}

#[derive(Clone)]
struct Lstm {
    lengths: Option<Vec<i64>>,
}

impl Lstm {
    fn new(lengths: Option<&[i64]>) -> Lstm {
        Lstm { lengths: lengths.map(<[i64]>::to_vec) }
    }
}

impl Pair for Lstm {
    const NAME: &'static str = "lstm";
    const BACKWARD: &'static str = "lstm_backward";
    const INPUTS: usize = 7;
    const OUTPUTS: usize = 3;
    const KEPT: u64 = 0;

    fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        let (input, (h, c), w) = arguments(inputs)?;
        let lengths = self.lengths.as_deref();
        call!("lstm", input, h, c, w.w_ih, w.w_hh, w.b_ih, w.b_hh, lengths)
    }

    fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
        self.call(inputs)
    }

    fn backward(
        &self,
        grads: Inputs<'_>,
        _kept: Inputs<'_>,
        inputs: Inputs<'_>,
        needs: Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let [output, last_h, last_c] = [0, 1, 2].map(|place| grads.optional(place));
        let (input, (h, c), w) = arguments(inputs)?;
        let lengths = self.lengths.as_deref();
        gradients_by!(
            "lstm_backward",
            output,
            last_h,
            last_c,
            input,
            h,
            c,
            w.w_ih,
            w.w_hh,
            w.b_ih,
            w.b_hh,
            lengths,
            needs
        )
    }

    fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        let (input, state, weights) = arguments(inputs)?;
        let (output, (h, c)) = match &self.lengths {
            None => lstm_reference(input, &weights, state)?,
            Some(lengths) => lstm_padded_reference(input, lengths, &weights, state)?,
        };
        Ok(vec![output, h, c])
    }
}

/// The input, h and c, and the weights.
fn arguments<'a>(
    inputs: Inputs<'a>,
) -> Result<(&'a Tensor, (&'a Tensor, &'a Tensor), RnnWeights<'a>)> {
    let (w_ih, w_hh) = (inputs.get(3)?, inputs.get(4)?);
    let weights = RnnWeights { w_ih, w_hh, b_ih: inputs.optional(5), b_hh: inputs.optional(6) };
    Ok((inputs.get(0)?, (inputs.get(1)?, inputs.get(2)?), weights))
}

fn run(
    input: &Tensor,
    state: (&Tensor, &Tensor),
    weights: &RnnWeights<'_>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor, Tensor)> {
    Ok(flat(match lengths {
        None => f_lstm(input, weights, state)?,
        Some(lengths) => f_lstm_padded(input, lengths, weights, state)?,
    }))
}

fn own(
    input: &Tensor,
    h: &Tensor,
    c: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor, Tensor)> {
    below(|| run(input, (h, c), &RnnWeights { w_ih, w_hh, b_ih, b_hh }, lengths))
}

fn autograd(
    input: &Tensor,
    h: &Tensor,
    c: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let tensors = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
    if is_eager(&tensors) {
        return run(input, (h, c), &RnnWeights { w_ih, w_hh, b_ih, b_hh }, lengths);
    }
    Ok(traced::<_, 3>(Lstm::new(lengths), &tensors)?.into())
}

fn autocast(
    input: &Tensor,
    h: &Tensor,
    c: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let tensors = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
    let cast = parts::cast_layer(&tensors, 1..3, lengths.is_some())?;
    with_casts(&tensors, cast, |inputs| {
        let (input, (h, c), w) = arguments(inputs)?;
        call!("lstm", input, h, c, w.w_ih, w.w_hh, w.b_ih, w.b_hh, lengths)
    })
}

fn backward(
    grad_output: Option<&Tensor>,
    grad_h: Option<&Tensor>,
    grad_c: Option<&Tensor>,
    input: &Tensor,
    h: &Tensor,
    c: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
    needed: Needs,
) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
    kernel(|| {
        let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
        let needed = {
            let [input, h, c, w_ih, w_hh, b_ih, b_hh] = needs(needed);
            [input, w_ih, w_hh, b_ih, b_hh, h, c]
        };
        let grads = [grad_output, grad_h, grad_c];
        let [input, w_ih, w_hh, b_ih, b_hh, h, c] = match lengths {
            None => parts::lstm_backward(grads, input, &weights, (h, c), needed)?,
            Some(lengths) => {
                parts::lstm_padded_backward(grads, input, lengths, &weights, (h, c), needed)?
            }
        };
        let gradients = [input, h, c, w_ih, w_hh, b_ih, b_hh];
        Ok(returned(weights.w_ih, gradients)?.into())
    })
}

fn backward_autograd(
    grad_output: Option<&Tensor>,
    grad_h: Option<&Tensor>,
    grad_c: Option<&Tensor>,
    input: &Tensor,
    h: &Tensor,
    c: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
    needed: Needs,
) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
    let grads = [grad_output, grad_h, grad_c];
    let inputs = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
    Ok(gradients::<_, 7>(Lstm::new(lengths), &grads, &[], &inputs, needed)?.into())
}
