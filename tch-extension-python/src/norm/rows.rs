//! `layer_norm` and `rms_norm`.

use super::{like, of_rows, or_default};
use crate::meta::{likes, normalized};
use crate::node::{
    ALL, Needs, Pair, below, call, cast, forwarded, gradients, gradients_by, is_eager, kernel,
    needs, returned, traced,
};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::ops::{
    f_layer_norm, f_rms_norm, layer_norm_reference, parts, rms_norm_reference,
};

tch_extension::operators! {
    namespace tch_extension;

    /// `torch.nn.functional.layer_norm`. `normalized_shape` are trailing sizes of `input`, and `weight`
    /// and `bias` have this shape. The result has the shape and kind of `input`.
    fn layer_norm(
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor> = None,
        bias: Option<&Tensor> = None,
        eps: f64 = 1e-5,
    ) -> Tensor {
        cpu, cuda = layer_norm::own,
        fake = |input, shape, weight, bias, _eps| {
            normalized("layer_norm", input, shape, &[("weight", weight), ("bias", bias)])?;
            like(input, input.f_kind()?)
        },
        autograd = layer_norm::autograd,
        key("AutocastCUDA") = layer_norm::autocast,
    }

    /// The output, and for the gradients the mean of each row and the inverse of its standard deviation.
    fn layer_norm_forward(
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = layer_norm::forward,
        fake = |input, shape, weight, bias, _eps| {
            normalized("layer_norm", input, shape, &[("weight", weight), ("bias", bias)])?;
            let moment = || of_rows(input, shape.len(), input.f_kind()?);
            Ok((like(input, input.f_kind()?)?, moment()?, moment()?))
        },
        autograd = |input, shape, weight, bias, eps| {
            let pair = layer_norm::LayerNorm { shape: shape.to_vec(), eps };
            Ok(forwarded::<_, 3>(pair, &[Some(input), weight, bias], ALL)?.into())
        },
    }

    /// The gradients of input, weight and bias.
    fn layer_norm_backward(
        grad: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = layer_norm::backward,
        fake = |_grad, _mean, _rstd, input, _shape, weight, bias, _eps, needs| {
            Ok(likes([Some(input), weight, bias], needs)?.into())
        },
        autograd = layer_norm::backward_autograd,
    }

    /// `torch.nn.functional.rms_norm`. `normalized_shape` are trailing sizes of `input`, and `weight` has
    /// this shape. `eps` is the kind's machine epsilon if it is None.
    fn rms_norm(
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor> = None,
        eps: Option<f64> = None,
    ) -> Tensor {
        cpu, cuda = rms_norm::own,
        fake = |input, shape, weight, _eps| {
            normalized("rms_norm", input, shape, &[("weight", weight)])?;
            like(input, input.f_kind()?)
        },
        autograd = rms_norm::autograd,
    }

    /// The output, and for the gradients the inverse of the root mean square of each row.
    fn rms_norm_forward(
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
    ) -> (Tensor, Tensor) {
        cpu, cuda = rms_norm::forward,
        fake = |input, shape, weight, _eps| {
            normalized("rms_norm", input, shape, &[("weight", weight)])?;
            let kind = input.f_kind()?;
            Ok((like(input, kind)?, of_rows(input, shape.len(), kind)?))
        },
        autograd = |input, shape, weight, eps| {
            let pair = rms_norm::RmsNorm { shape: shape.to_vec(), eps };
            Ok(forwarded::<_, 2>(pair, &[Some(input), weight], ALL)?.into())
        },
    }

    /// The gradients of input and weight.
    fn rms_norm_backward(
        grad: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
        needs: i64,
    ) -> (Tensor, Tensor) {
        cpu, cuda = rms_norm::backward,
        fake = |_grad, _rstd, input, _shape, weight, _eps, needs| {
            Ok(likes([Some(input), weight], needs)?.into())
        },
        autograd = rms_norm::backward_autograd,
    }
}

mod layer_norm {
    use super::*;

    #[derive(Clone)]
    pub struct LayerNorm {
        pub shape: Vec<i64>,
        pub eps: f64,
    }

    impl Pair for LayerNorm {
        const NAME: &'static str = "layer_norm";
        const BACKWARD: &'static str = "layer_norm_backward";
        const INPUTS: usize = 3;
        const OUTPUTS: usize = 1;
        const KEPT: u64 = 0b110;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (weight, bias) = (inputs.optional(1), inputs.optional(2));
            call!("layer_norm", inputs.get(0)?, &self.shape, weight, bias, self.eps)
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            let (weight, bias) = (inputs.optional(1), inputs.optional(2));
            call!("layer_norm_forward", inputs.get(0)?, &self.shape, weight, bias, self.eps)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.optional(1), inputs.optional(2));
            let (grad, mean, rstd) = (grads.get(0)?, kept.get(0)?, kept.get(1)?);
            let (shape, eps) = (&self.shape, self.eps);
            gradients_by!(
                "layer_norm_backward",
                grad,
                mean,
                rstd,
                input,
                shape,
                weight,
                bias,
                eps,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (weight, bias) = (inputs.optional(1), inputs.optional(2));
            let input = inputs.get(0)?;
            Ok(vec![layer_norm_reference(input, &self.shape, weight, bias, self.eps)?])
        }
    }

    pub fn own(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        below(|| f_layer_norm(input, shape, weight, bias, eps))
    }

    pub fn autograd(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let tensors = [Some(input), weight, bias];
        if is_eager(&tensors) {
            return f_layer_norm(input, shape, weight, bias, eps);
        }
        let [output] = traced(LayerNorm { shape: shape.to_vec(), eps }, &tensors)?;
        Ok(output)
    }

    pub fn autocast(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let tensors = [Some(input), weight, bias];
        cast(CastPolicy::Float, &tensors, |tensors| {
            let (input, weight, bias) = (tensors.get(0)?, tensors.optional(1), tensors.optional(2));
            call!("layer_norm", input, shape, weight, bias, eps)
        })
    }

    pub fn forward(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(|| parts::layer_norm_forward(input, shape, weight, bias, eps))
    }

    pub fn backward(
        grad: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        _eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(|| {
            let (moments, needed) = ((mean, rstd), needs(needed));
            let found =
                parts::layer_norm_backward(grad, moments, input, shape, weight, bias, needed)?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let pair = LayerNorm { shape: shape.to_vec(), eps };
        let (kept, inputs) = ([Some(mean), Some(rstd)], [Some(input), weight, bias]);
        Ok(gradients::<_, 3>(pair, &[Some(grad)], &kept, &inputs, needed)?.into())
    }
}

mod rms_norm {
    use super::*;

    #[derive(Clone)]
    pub struct RmsNorm {
        pub shape: Vec<i64>,
        pub eps: f64,
    }

    impl Pair for RmsNorm {
        const NAME: &'static str = "rms_norm";
        const BACKWARD: &'static str = "rms_norm_backward";
        const INPUTS: usize = 2;
        const OUTPUTS: usize = 1;
        const KEPT: u64 = 0b10;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            call!("rms_norm", inputs.get(0)?, &self.shape, inputs.optional(1), Some(self.eps))
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            call!("rms_norm_forward", inputs.get(0)?, &self.shape, inputs.optional(1), self.eps)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (grad, rstd) = (grads.get(0)?, kept.get(0)?);
            let (input, weight) = (inputs.get(0)?, inputs.optional(1));
            let (shape, eps) = (&self.shape, self.eps);
            gradients_by!("rms_norm_backward", grad, rstd, input, shape, weight, eps, needs)
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight) = (inputs.get(0)?, inputs.optional(1));
            Ok(vec![rms_norm_reference(input, &self.shape, weight, Some(self.eps))?])
        }
    }

    pub fn own(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: Option<f64>,
    ) -> Result<Tensor> {
        below(|| f_rms_norm(input, shape, weight, eps))
    }

    pub fn autograd(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: Option<f64>,
    ) -> Result<Tensor> {
        let tensors = [Some(input), weight];
        if is_eager(&tensors) {
            return f_rms_norm(input, shape, weight, eps);
        }
        let kind = input.f_kind()?;
        // The kernels take a weight of the input's kind and, on the CPU, one of `Float`.
        let takes = |weight: &Tensor| -> Result<bool> {
            let of_weight = weight.f_kind()?;
            let is_float = of_weight == Kind::Float && kind != Kind::Double;
            Ok(of_weight == kind || is_float && input.device() == Device::Cpu)
        };
        let eps = or_default(eps, kind);
        if !weight.map_or(Ok(true), takes)? {
            return rms_norm_reference(input, shape, weight, Some(eps));
        }
        let [output] = traced(RmsNorm { shape: shape.to_vec(), eps }, &tensors)?;
        Ok(output)
    }

    pub fn forward(
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        kernel(|| parts::rms_norm_forward(input, shape, weight, eps))
    }

    pub fn backward(
        grad: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        _eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor)> {
        kernel(|| {
            let found = parts::rms_norm_backward(grad, rstd, input, shape, weight, needs(needed))?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor)> {
        let pair = RmsNorm { shape: shape.to_vec(), eps };
        let (grads, kept) = ([Some(grad)], [Some(rstd)]);
        Ok(gradients::<_, 2>(pair, &grads, &kept, &[Some(input), weight], needed)?.into())
    }
}
