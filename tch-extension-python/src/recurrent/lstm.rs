//! `lstm` and `lstm_padded`.

use super::{check, check_lengths, flat, output};
use crate::meta::{contiguous, likes};
use crate::node::{
    Needs, Pair, below, call, cast, gradients, gradients_by, is_eager, kernel, needs, returned,
    traced,
};
use tch::Tensor;
use tch_extension::Result;
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::library::sizes;
use tch_extension::ops::{
    RnnWeights, f_lstm, f_lstm_padded, lstm_padded_reference, lstm_reference, parts,
};

tch_extension::operators! {
    namespace tch_extension;

    /// One layer of `torch.nn.LSTM` in one direction: `input` is `[T, B, F]`, `h` and `c` are `[B, H]`,
    /// `w_ih` is `[4H, F]`, `w_hh` `[4H, H]`, and the biases are `[4H]`. Returns h of all steps,
    /// `[T, B, H]`, and the last h and c.
    fn lstm(
        input: &Tensor,
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor> = None,
        b_hh: Option<&Tensor> = None,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = sequence::own,
        fake = |input, h, c, w_ih, w_hh, b_ih, b_hh| {
            check("lstm", "4H", input, (h, Some(c)), [w_ih, w_hh], [b_ih, b_hh])?;
            let kind = input.f_kind()?;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?, contiguous(&sizes(c), kind, c)?))
        },
        autograd = sequence::autograd,
        key("AutocastCPU") = sequence::autocast,
        key("AutocastCUDA") = sequence::autocast,
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
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = sequence::backward,
        fake = |_output, _h, _c, input, h, c, w_ih, w_hh, b_ih, b_hh, needs| {
            let inputs = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = sequence::backward_autograd,
    }

    /// `lstm` of sequences of different lengths, from 1 to T, one for each row of the batch. Outputs after
    /// the end of a sequence are zero, and its last state is that of its last step.
    fn lstm_padded(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor> = None,
        b_hh: Option<&Tensor> = None,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = lstm_padded::own,
        fake = |input, lengths, h, c, w_ih, w_hh, b_ih, b_hh| {
            let shapes =
                check("lstm_padded", "4H", input, (h, Some(c)), [w_ih, w_hh], [b_ih, b_hh])?;
            check_lengths("lstm_padded", lengths, &shapes)?;
            let kind = input.f_kind()?;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?, contiguous(&sizes(c), kind, c)?))
        },
        autograd = lstm_padded::autograd,
        key("AutocastCPU") = lstm_padded::autocast,
        key("AutocastCUDA") = lstm_padded::autocast,
    }

    /// As `lstm_backward`.
    fn lstm_padded_backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = lstm_padded::backward,
        fake = |_output, _h, _c, input, _lengths, h, c, w_ih, w_hh, b_ih, b_hh, needs| {
            let inputs = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = lstm_padded::backward_autograd,
    }
}

mod sequence {
    use super::*;

    #[derive(Clone)]
    pub struct Lstm;

    impl Pair for Lstm {
        const NAME: &'static str = "lstm";
        const BACKWARD: &'static str = "lstm_backward";
        const INPUTS: usize = 7;
        const OUTPUTS: usize = 3;
        const KEPT: &'static [usize] = &[];

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let c = inputs.get(2)?;
            let w_ih = inputs.get(3)?;
            let w_hh = inputs.get(4)?;
            let b_ih = inputs.optional(5);
            let b_hh = inputs.optional(6);
            call!("lstm", input, h, c, w_ih, w_hh, b_ih, b_hh)
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
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let c = inputs.get(2)?;
            let w_ih = inputs.get(3)?;
            let w_hh = inputs.get(4)?;
            let b_ih = inputs.optional(5);
            let b_hh = inputs.optional(6);
            gradients_by!(
                "lstm_backward",
                grads.optional(0),
                grads.optional(1),
                grads.optional(2),
                input,
                h,
                c,
                w_ih,
                w_hh,
                b_ih,
                b_hh,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let c = inputs.get(2)?;
            let w_ih = inputs.get(3)?;
            let w_hh = inputs.get(4)?;
            let b_ih = inputs.optional(5);
            let b_hh = inputs.optional(6);
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let (output, (h, c)) = lstm_reference(input, &weights, (h, c))?;
            Ok(vec![output, h, c])
        }
    }

    pub fn own(
        input: &Tensor,
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
        below(|| Ok(flat(f_lstm(input, &weights, (h, c))?)))
    }

    pub fn autograd(
        input: &Tensor,
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let tensors = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
        if is_eager(&tensors) {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            return Ok(flat(f_lstm(input, &weights, (h, c))?));
        }
        let pair = Lstm;
        Ok(traced::<_, 3>(pair, &tensors)?.into())
    }

    pub fn autocast(
        input: &Tensor,
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        cast(
            CastPolicy::LowerPrecision,
            &[Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh],
            |inputs| {
                let input = inputs.get(0)?;
                let h = inputs.get(1)?;
                let c = inputs.get(2)?;
                let w_ih = inputs.get(3)?;
                let w_hh = inputs.get(4)?;
                let b_ih = inputs.optional(5);
                let b_hh = inputs.optional(6);
                call!("lstm", input, h, c, w_ih, w_hh, b_ih, b_hh)
            },
        )
    }

    pub fn backward(
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
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(input, || {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let needed = {
                let [input, h, c, w_ih, w_hh, b_ih, b_hh] = needs(needed);
                [input, w_ih, w_hh, b_ih, b_hh, h, c]
            };
            let grads = [grad_output, grad_h, grad_c];
            let [input, w_ih, w_hh, b_ih, b_hh, h, c] =
                parts::lstm_backward(grads, input, &weights, (h, c), needed)?;
            let gradients = [input, h, c, w_ih, w_hh, b_ih, b_hh];
            Ok(returned(weights.w_ih, gradients)?.into())
        })
    }

    pub fn backward_autograd(
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
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let pair = Lstm;
        let (grads, inputs) = (
            [grad_output, grad_h, grad_c],
            [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh],
        );
        Ok(gradients::<_, 7>(pair, &grads, &[], &inputs, needed)?.into())
    }
}

mod lstm_padded {
    use super::*;

    #[derive(Clone)]
    pub struct LstmPadded {
        lengths: Vec<i64>,
    }

    impl Pair for LstmPadded {
        const NAME: &'static str = "lstm_padded";
        const BACKWARD: &'static str = "lstm_padded_backward";
        const INPUTS: usize = 7;
        const OUTPUTS: usize = 3;
        const KEPT: &'static [usize] = &[];

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let c = inputs.get(2)?;
            let w_ih = inputs.get(3)?;
            let w_hh = inputs.get(4)?;
            let b_ih = inputs.optional(5);
            let b_hh = inputs.optional(6);
            call!("lstm_padded", input, &self.lengths, h, c, w_ih, w_hh, b_ih, b_hh)
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
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let c = inputs.get(2)?;
            let w_ih = inputs.get(3)?;
            let w_hh = inputs.get(4)?;
            let b_ih = inputs.optional(5);
            let b_hh = inputs.optional(6);
            gradients_by!(
                "lstm_padded_backward",
                grads.optional(0),
                grads.optional(1),
                grads.optional(2),
                input,
                &self.lengths,
                h,
                c,
                w_ih,
                w_hh,
                b_ih,
                b_hh,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let c = inputs.get(2)?;
            let w_ih = inputs.get(3)?;
            let w_hh = inputs.get(4)?;
            let b_ih = inputs.optional(5);
            let b_hh = inputs.optional(6);
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let (output, (h, c)) = lstm_padded_reference(input, &self.lengths, &weights, (h, c))?;
            Ok(vec![output, h, c])
        }
    }

    pub fn own(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
        below(|| Ok(flat(f_lstm_padded(input, lengths, &weights, (h, c))?)))
    }

    pub fn autograd(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let tensors = [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh];
        if is_eager(&tensors) {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            return Ok(flat(f_lstm_padded(input, lengths, &weights, (h, c))?));
        }
        let pair = LstmPadded { lengths: lengths.to_vec() };
        Ok(traced::<_, 3>(pair, &tensors)?.into())
    }

    pub fn autocast(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        cast(
            CastPolicy::LowerPrecision,
            &[Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh],
            |inputs| {
                let input = inputs.get(0)?;
                let h = inputs.get(1)?;
                let c = inputs.get(2)?;
                let w_ih = inputs.get(3)?;
                let w_hh = inputs.get(4)?;
                let b_ih = inputs.optional(5);
                let b_hh = inputs.optional(6);
                call!("lstm_padded", input, lengths, h, c, w_ih, w_hh, b_ih, b_hh)
            },
        )
    }

    pub fn backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(input, || {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let needed = {
                let [input, h, c, w_ih, w_hh, b_ih, b_hh] = needs(needed);
                [input, w_ih, w_hh, b_ih, b_hh, h, c]
            };
            let grads = [grad_output, grad_h, grad_c];
            let [input, w_ih, w_hh, b_ih, b_hh, h, c] =
                parts::lstm_padded_backward(grads, input, lengths, &weights, (h, c), needed)?;
            let gradients = [input, h, c, w_ih, w_hh, b_ih, b_hh];
            Ok(returned(weights.w_ih, gradients)?.into())
        })
    }

    pub fn backward_autograd(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        c: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let pair = LstmPadded { lengths: lengths.to_vec() };
        let (grads, inputs) = (
            [grad_output, grad_h, grad_c],
            [Some(input), Some(h), Some(c), Some(w_ih), Some(w_hh), b_ih, b_hh],
        );
        Ok(gradients::<_, 7>(pair, &grads, &[], &inputs, needed)?.into())
    }
}
