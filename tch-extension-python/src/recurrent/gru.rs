//! `gru`.

use super::{check, check_lengths, output};
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
    RnnWeights, f_gru, f_gru_padded, gru_padded_reference, gru_reference, parts,
};

tch_extension::operators! {
    namespace tch_extension;

    /// One layer of `torch.nn.GRU` in one direction: as `lstm`, with weights and biases of 3H rows, and
    /// without c.
    fn gru(
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor> = None,
        b_hh: Option<&Tensor> = None,
        lengths: Option<&[i64]> = None,
    ) -> (Tensor, Tensor) {
        cpu, cuda = own,
        fake = |input, h, w_ih, w_hh, b_ih, b_hh, lengths| {
            let shapes = check("gru", "3H", input, (h, None), [w_ih, w_hh], [b_ih, b_hh])?;
            check_lengths("gru", lengths, &shapes)?;
            let kind = input.f_kind()?;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?))
        },
        autograd = autograd,
        key("AutocastCPU") = autocast,
        key("AutocastCUDA") = autocast,
    }

    /// The gradients of input, h, w_ih, w_hh, b_ih and b_hh. Incoming ones that are absent are zero.
    fn gru_backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        lengths: Option<&[i64]>,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = backward,
        fake = |_output, _h, input, h, w_ih, w_hh, b_ih, b_hh, _lengths, needs| {
            let inputs = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = backward_autograd,
    }
}

#[derive(Clone)]
struct Gru {
    lengths: Option<Vec<i64>>,
}

impl Gru {
    fn new(lengths: Option<&[i64]>) -> Gru {
        Gru { lengths: lengths.map(<[i64]>::to_vec) }
    }
}

impl Pair for Gru {
    const NAME: &'static str = "gru";
    const BACKWARD: &'static str = "gru_backward";
    const INPUTS: usize = 6;
    const OUTPUTS: usize = 2;
    const KEPT: u64 = 0;

    fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        let (input, h, w) = arguments(inputs)?;
        let lengths = self.lengths.as_deref();
        call!("gru", input, h, w.w_ih, w.w_hh, w.b_ih, w.b_hh, lengths)
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
        let [output, last_h] = [0, 1].map(|place| grads.optional(place));
        let (input, h, w) = arguments(inputs)?;
        let lengths = self.lengths.as_deref();
        gradients_by!(
            "gru_backward",
            output,
            last_h,
            input,
            h,
            w.w_ih,
            w.w_hh,
            w.b_ih,
            w.b_hh,
            lengths,
            needs
        )
    }

    fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
        let (input, h, weights) = arguments(inputs)?;
        let (output, h) = match &self.lengths {
            None => gru_reference(input, &weights, h)?,
            Some(lengths) => gru_padded_reference(input, lengths, &weights, h)?,
        };
        Ok(vec![output, h])
    }
}

/// The input, h and the weights.
fn arguments<'a>(inputs: Inputs<'a>) -> Result<(&'a Tensor, &'a Tensor, RnnWeights<'a>)> {
    let (w_ih, w_hh) = (inputs.get(2)?, inputs.get(3)?);
    let weights = RnnWeights { w_ih, w_hh, b_ih: inputs.optional(4), b_hh: inputs.optional(5) };
    Ok((inputs.get(0)?, inputs.get(1)?, weights))
}

fn run(
    input: &Tensor,
    h: &Tensor,
    weights: &RnnWeights<'_>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor)> {
    match lengths {
        None => f_gru(input, weights, h),
        Some(lengths) => f_gru_padded(input, lengths, weights, h),
    }
}

fn own(
    input: &Tensor,
    h: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor)> {
    below(|| run(input, h, &RnnWeights { w_ih, w_hh, b_ih, b_hh }, lengths))
}

fn autograd(
    input: &Tensor,
    h: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor)> {
    let tensors = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
    if is_eager(&tensors) {
        return run(input, h, &RnnWeights { w_ih, w_hh, b_ih, b_hh }, lengths);
    }
    Ok(traced::<_, 2>(Gru::new(lengths), &tensors)?.into())
}

fn autocast(
    input: &Tensor,
    h: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
) -> Result<(Tensor, Tensor)> {
    let tensors = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
    let cast = parts::cast_layer(&tensors, 1..2, lengths.is_some())?;
    with_casts(&tensors, cast, |inputs| {
        let (input, h, w) = arguments(inputs)?;
        call!("gru", input, h, w.w_ih, w.w_hh, w.b_ih, w.b_hh, lengths)
    })
}

fn backward(
    grad_output: Option<&Tensor>,
    grad_h: Option<&Tensor>,
    input: &Tensor,
    h: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
    needed: Needs,
) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
    kernel(|| {
        let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
        let needed = {
            let [input, h, w_ih, w_hh, b_ih, b_hh] = needs(needed);
            [input, w_ih, w_hh, b_ih, b_hh, h, false]
        };
        let grads = [grad_output, grad_h];
        let [input, w_ih, w_hh, b_ih, b_hh, h, _] = match lengths {
            None => parts::gru_backward(grads, input, &weights, h, needed)?,
            Some(lengths) => {
                parts::gru_padded_backward(grads, input, lengths, &weights, h, needed)?
            }
        };
        let gradients = [input, h, w_ih, w_hh, b_ih, b_hh];
        Ok(returned(weights.w_ih, gradients)?.into())
    })
}

fn backward_autograd(
    grad_output: Option<&Tensor>,
    grad_h: Option<&Tensor>,
    input: &Tensor,
    h: &Tensor,
    w_ih: &Tensor,
    w_hh: &Tensor,
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    lengths: Option<&[i64]>,
    needed: Needs,
) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
    let grads = [grad_output, grad_h];
    let inputs = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
    Ok(gradients::<_, 6>(Gru::new(lengths), &grads, &[], &inputs, needed)?.into())
}
