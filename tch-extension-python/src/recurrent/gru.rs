//! `gru` and `gru_padded`.

use super::{check, check_lengths, output};
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
    ) -> (Tensor, Tensor) {
        cpu, cuda = sequence::own,
        fake = |input, h, w_ih, w_hh, b_ih, b_hh| {
            check("gru", "3H", input, (h, None), [w_ih, w_hh], [b_ih, b_hh])?;
            let kind = input.f_kind()?;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?))
        },
        autograd = sequence::autograd,
        key("AutocastCPU") = sequence::autocast,
        key("AutocastCUDA") = sequence::autocast,
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
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = sequence::backward,
        fake = |_output, _h, input, h, w_ih, w_hh, b_ih, b_hh, needs| {
            let inputs = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = sequence::backward_autograd,
    }

    /// `gru` of sequences of different lengths; see `lstm_padded`.
    fn gru_padded(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor> = None,
        b_hh: Option<&Tensor> = None,
    ) -> (Tensor, Tensor) {
        cpu, cuda = gru_padded::own,
        fake = |input, lengths, h, w_ih, w_hh, b_ih, b_hh| {
            let shapes = check("gru_padded", "3H", input, (h, None), [w_ih, w_hh], [b_ih, b_hh])?;
            check_lengths("gru_padded", lengths, &shapes)?;
            let kind = input.f_kind()?;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?))
        },
        autograd = gru_padded::autograd,
        key("AutocastCPU") = gru_padded::autocast,
        key("AutocastCUDA") = gru_padded::autocast,
    }

    /// As `gru_backward`.
    fn gru_padded_backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = gru_padded::backward,
        fake = |_output, _h, input, _lengths, h, w_ih, w_hh, b_ih, b_hh, needs| {
            let inputs = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
            Ok(likes(inputs, needs)?.into())
        },
        autograd = gru_padded::backward_autograd,
    }
}

mod sequence {
    use super::*;

    #[derive(Clone)]
    pub struct Gru;

    impl Pair for Gru {
        const NAME: &'static str = "gru";
        const BACKWARD: &'static str = "gru_backward";
        const INPUTS: usize = 6;
        const OUTPUTS: usize = 2;
        const KEPT: &'static [usize] = &[];

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let w_ih = inputs.get(2)?;
            let w_hh = inputs.get(3)?;
            let b_ih = inputs.optional(4);
            let b_hh = inputs.optional(5);
            call!("gru", input, h, w_ih, w_hh, b_ih, b_hh)
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
            let w_ih = inputs.get(2)?;
            let w_hh = inputs.get(3)?;
            let b_ih = inputs.optional(4);
            let b_hh = inputs.optional(5);
            gradients_by!(
                "gru_backward",
                grads.optional(0),
                grads.optional(1),
                input,
                h,
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
            let w_ih = inputs.get(2)?;
            let w_hh = inputs.get(3)?;
            let b_ih = inputs.optional(4);
            let b_hh = inputs.optional(5);
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let (output, h) = gru_reference(input, &weights, h)?;
            Ok(vec![output, h])
        }
    }

    pub fn own(
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
        below(|| f_gru(input, &weights, h))
    }

    pub fn autograd(
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let tensors = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
        if is_eager(&tensors) {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            return f_gru(input, &weights, h);
        }
        let pair = Gru;
        Ok(traced::<_, 2>(pair, &tensors)?.into())
    }

    pub fn autocast(
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        cast(
            CastPolicy::LowerPrecision,
            &[Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh],
            |inputs| {
                let input = inputs.get(0)?;
                let h = inputs.get(1)?;
                let w_ih = inputs.get(2)?;
                let w_hh = inputs.get(3)?;
                let b_ih = inputs.optional(4);
                let b_hh = inputs.optional(5);
                call!("gru", input, h, w_ih, w_hh, b_ih, b_hh)
            },
        )
    }

    pub fn backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(input, || {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let needed = {
                let [input, h, w_ih, w_hh, b_ih, b_hh] = needs(needed);
                [input, w_ih, w_hh, b_ih, b_hh, h, false]
            };
            let grads = [grad_output, grad_h];
            let [input, w_ih, w_hh, b_ih, b_hh, h, _] =
                parts::gru_backward(grads, input, &weights, h, needed)?;
            let gradients = [input, h, w_ih, w_hh, b_ih, b_hh];
            Ok(returned(weights.w_ih, gradients)?.into())
        })
    }

    pub fn backward_autograd(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        input: &Tensor,
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let pair = Gru;
        let (grads, inputs) =
            ([grad_output, grad_h], [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh]);
        Ok(gradients::<_, 6>(pair, &grads, &[], &inputs, needed)?.into())
    }
}

mod gru_padded {
    use super::*;

    #[derive(Clone)]
    pub struct GruPadded {
        lengths: Vec<i64>,
    }

    impl Pair for GruPadded {
        const NAME: &'static str = "gru_padded";
        const BACKWARD: &'static str = "gru_padded_backward";
        const INPUTS: usize = 6;
        const OUTPUTS: usize = 2;
        const KEPT: &'static [usize] = &[];

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let input = inputs.get(0)?;
            let h = inputs.get(1)?;
            let w_ih = inputs.get(2)?;
            let w_hh = inputs.get(3)?;
            let b_ih = inputs.optional(4);
            let b_hh = inputs.optional(5);
            call!("gru_padded", input, &self.lengths, h, w_ih, w_hh, b_ih, b_hh)
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
            let w_ih = inputs.get(2)?;
            let w_hh = inputs.get(3)?;
            let b_ih = inputs.optional(4);
            let b_hh = inputs.optional(5);
            gradients_by!(
                "gru_padded_backward",
                grads.optional(0),
                grads.optional(1),
                input,
                &self.lengths,
                h,
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
            let w_ih = inputs.get(2)?;
            let w_hh = inputs.get(3)?;
            let b_ih = inputs.optional(4);
            let b_hh = inputs.optional(5);
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let (output, h) = gru_padded_reference(input, &self.lengths, &weights, h)?;
            Ok(vec![output, h])
        }
    }

    pub fn own(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
        below(|| f_gru_padded(input, lengths, &weights, h))
    }

    pub fn autograd(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let tensors = [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh];
        if is_eager(&tensors) {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            return f_gru_padded(input, lengths, &weights, h);
        }
        let pair = GruPadded { lengths: lengths.to_vec() };
        Ok(traced::<_, 2>(pair, &tensors)?.into())
    }

    pub fn autocast(
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        cast(
            CastPolicy::LowerPrecision,
            &[Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh],
            |inputs| {
                let input = inputs.get(0)?;
                let h = inputs.get(1)?;
                let w_ih = inputs.get(2)?;
                let w_hh = inputs.get(3)?;
                let b_ih = inputs.optional(4);
                let b_hh = inputs.optional(5);
                call!("gru_padded", input, lengths, h, w_ih, w_hh, b_ih, b_hh)
            },
        )
    }

    pub fn backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(input, || {
            let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
            let needed = {
                let [input, h, w_ih, w_hh, b_ih, b_hh] = needs(needed);
                [input, w_ih, w_hh, b_ih, b_hh, h, false]
            };
            let grads = [grad_output, grad_h];
            let [input, w_ih, w_hh, b_ih, b_hh, h, _] =
                parts::gru_padded_backward(grads, input, lengths, &weights, h, needed)?;
            let gradients = [input, h, w_ih, w_hh, b_ih, b_hh];
            Ok(returned(weights.w_ih, gradients)?.into())
        })
    }

    pub fn backward_autograd(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        input: &Tensor,
        lengths: &[i64],
        h: &Tensor,
        w_ih: &Tensor,
        w_hh: &Tensor,
        b_ih: Option<&Tensor>,
        b_hh: Option<&Tensor>,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let pair = GruPadded { lengths: lengths.to_vec() };
        let (grads, inputs) =
            ([grad_output, grad_h], [Some(input), Some(h), Some(w_ih), Some(w_hh), b_ih, b_hh]);
        Ok(gradients::<_, 6>(pair, &grads, &[], &inputs, needed)?.into())
    }
}
