//! `linear_cross_entropy`.

use super::{classes, loss, reduction_of};
use crate::meta::{Shapes, compute_kind, likes};
use crate::node::{
    Needs, Pair, below, call, cast, forwarded, gradients, gradients_by, is_eager, kernel, needs,
    returned, traced,
};
use tch::Tensor;
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::ops::parts::{self, LinearCrossEntropyArguments};
use tch_extension::ops::{
    LinearCrossEntropyOptions, f_linear_cross_entropy, linear_cross_entropy_reference,
};
use tch_extension::{Error, Result};

const OP: &str = "linear_cross_entropy";

/// The pair, from arguments of these names.
macro_rules! told {
    ($ignore_index:ident, $reduction:ident, $label_smoothing:ident, $softcap:ident, $z_loss:ident, $memory:ident,
     $accumulate_in_float:ident) => {
        linear_cross_entropy::LinearCrossEntropy {
            ignore_index: $ignore_index,
            reduction: $reduction.to_string(),
            label_smoothing: $label_smoothing,
            softcap: $softcap,
            z_loss: $z_loss,
            memory: $memory,
            accumulate_in_float: $accumulate_in_float,
        }
    };
}

tch_extension::operators! {
    namespace tch_extension;

    /// The cross-entropy of `input @ weight.T + bias`, and classes `target`, without all logits in memory.
    /// `input` is `[N, D]`, `weight` `[V, D]`, `target` `[N]` and `bias` `[V]`. With `softcap` s, logits y
    /// become s tanh(y / s). `z_loss` times the square of each row's logsumexp is added to its loss.
    /// `memory` bounds the bytes of a chunk of logits. The loss is float64 for float64, otherwise float32.
    fn linear_cross_entropy(
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor> = None,
        ignore_index: i64 = -100,
        reduction: &str = "mean",
        label_smoothing: f64 = 0.0,
        softcap: Option<f64> = None,
        z_loss: f64 = 0.0,
        memory: Option<i64> = None,
        accumulate_in_float: bool = false,
    ) -> Tensor {
        cpu, cuda = linear_cross_entropy::own,
        fake = |input, weight, target, bias, _ignore, reduction, _smoothing, _cap, _z, _memory, _float| {
            check(input, weight, target, bias)?;
            loss(input, target, reduction, compute_kind(input.f_kind()?))
        },
        autograd = linear_cross_entropy::autograd,
        key("AutocastCPU") = linear_cross_entropy::autocast,
        key("AutocastCUDA") = linear_cross_entropy::autocast,
    }

    /// The loss and those gradients of input, weight and bias that are needed and that the forward
    /// computes.
    fn linear_cross_entropy_forward(
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        accumulate_in_float: bool,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = linear_cross_entropy::forward,
        fake = |input, weight, target, bias, _ignore, reduction, _smoothing, _cap, _z, _memory, _float, needs| {
            check(input, weight, target, bias)?;
            let is_ahead =
                parts::linear_cross_entropy_is_ahead(input, reduction_of(OP, reduction)?)?;
            let saves = if is_ahead { needs } else { 0 };
            let loss = loss(input, target, reduction, compute_kind(input.f_kind()?))?;
            let [input, weight, bias] =
                likes([Some(input), Some(weight), bias], saves)?;
            Ok((loss, input, weight, bias))
        },
        autograd = |input, weight, target, bias, ignore, reduction, smoothing, cap, z, memory, float, needs| {
            let told = told!(ignore, reduction, smoothing, cap, z, memory, float);
            let inputs = [Some(input), Some(weight), bias, Some(target)];
            Ok(forwarded::<_, 4>(told, &inputs, needs)?.into())
        },
    }

    /// The gradients of input, weight and bias; the first three after `grad` are what the forward returned.
    fn linear_cross_entropy_backward(
        grad: &Tensor,
        of_input: &Tensor,
        of_weight: &Tensor,
        of_bias: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        accumulate_in_float: bool,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = linear_cross_entropy::backward,
        fake = |_grad, _of_input, _of_weight, _of_bias, input, weight, _target, bias, _ignore, _reduction, _smoothing,
                _cap, _z, _memory, _float, needs| {
            Ok(likes([Some(input), Some(weight), bias], needs)?.into())
        },
        autograd = linear_cross_entropy::backward_autograd,
    }
}

/// What the fake kernels check.
fn check(input: &Tensor, weight: &Tensor, target: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    classes(OP, target)?;
    Shapes::of(OP, "input", input)?
        .has("input", input, &["N", "D"])?
        .has("weight", weight, &["V", "D"])?
        .has("target", target, &["N"])?
        .has("bias", bias, &["V"])?;
    Ok(())
}

mod linear_cross_entropy {
    use super::*;

    /// What the operator is told besides its tensors.
    #[derive(Clone)]
    pub struct LinearCrossEntropy {
        pub ignore_index: i64,
        pub reduction: String,
        pub label_smoothing: f64,
        pub softcap: Option<f64>,
        pub z_loss: f64,
        pub memory: Option<i64>,
        pub accumulate_in_float: bool,
    }

    impl LinearCrossEntropy {
        fn options(&self) -> Result<LinearCrossEntropyOptions> {
            let memory = self.memory.map(|memory| {
                let expected = "a number of bytes that is not negative";
                let wrong = |_| Error::argument(OP, "memory", expected, memory.to_string(), "");
                u64::try_from(memory).map_err(wrong)
            });
            Ok(LinearCrossEntropyOptions {
                reduction: reduction_of(OP, &self.reduction)?,
                ignore_index: self.ignore_index,
                label_smoothing: self.label_smoothing,
                softcap: self.softcap,
                z_loss: self.z_loss,
                memory: memory.transpose()?,
                accumulate_in_float: self.accumulate_in_float,
            })
        }
    }

    impl Pair for LinearCrossEntropy {
        const NAME: &'static str = OP;
        const BACKWARD: &'static str = "linear_cross_entropy_backward";
        /// Input, weight, bias and target: those that have gradients come first.
        const INPUTS: usize = 4;
        const OUTPUTS: usize = 1;
        const KEPT: u64 = 0b1110;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight) = (inputs.get(0)?, inputs.get(1)?);
            let (bias, target) = (inputs.optional(2), inputs.get(3)?);
            let LinearCrossEntropy { reduction, .. } = self;
            let LinearCrossEntropy {
                ignore_index, label_smoothing, softcap, z_loss, memory, ..
            } = *self;
            call!(
                "linear_cross_entropy",
                input,
                weight,
                target,
                bias,
                ignore_index,
                reduction,
                label_smoothing,
                softcap,
                z_loss,
                memory,
                self.accumulate_in_float
            )
        }

        fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
            let (input, weight) = (inputs.get(0)?, inputs.get(1)?);
            let (bias, target) = (inputs.optional(2), inputs.get(3)?);
            let LinearCrossEntropy { reduction, .. } = self;
            let LinearCrossEntropy {
                ignore_index, label_smoothing, softcap, z_loss, memory, ..
            } = *self;
            call!(
                "linear_cross_entropy_forward",
                input,
                weight,
                target,
                bias,
                ignore_index,
                reduction,
                label_smoothing,
                softcap,
                z_loss,
                memory,
                self.accumulate_in_float,
                needs
            )
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (input, weight) = (inputs.get(0)?, inputs.get(1)?);
            let (bias, target) = (inputs.optional(2), inputs.get(3)?);
            let grad = grads.get(0)?;
            let (of_input, of_weight, of_bias) = (kept.get(0)?, kept.get(1)?, kept.get(2)?);
            let LinearCrossEntropy { reduction, .. } = self;
            let LinearCrossEntropy {
                ignore_index, label_smoothing, softcap, z_loss, memory, ..
            } = *self;
            gradients_by!(
                "linear_cross_entropy_backward",
                grad,
                of_input,
                of_weight,
                of_bias,
                input,
                weight,
                target,
                bias,
                ignore_index,
                reduction,
                label_smoothing,
                softcap,
                z_loss,
                memory,
                self.accumulate_in_float,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight) = (inputs.get(0)?, inputs.get(1)?);
            let (bias, target) = (inputs.optional(2), inputs.get(3)?);
            let options = self.options()?;
            Ok(vec![linear_cross_entropy_reference(input, weight, bias, target, &options)?])
        }
    }

    pub fn own(
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore: i64,
        reduction: &str,
        smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        in_float: bool,
    ) -> Result<Tensor> {
        let told = told!(ignore, reduction, smoothing, softcap, z_loss, memory, in_float);
        below(|| f_linear_cross_entropy(input, weight, bias, target, &told.options()?))
    }

    pub fn autograd(
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore: i64,
        reduction: &str,
        smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        in_float: bool,
    ) -> Result<Tensor> {
        let told = told!(ignore, reduction, smoothing, softcap, z_loss, memory, in_float);
        let options = told.options()?;
        let tensors = [Some(input), Some(weight), bias, Some(target)];
        if is_eager(&tensors) {
            return f_linear_cross_entropy(input, weight, bias, target, &options);
        }
        let [loss] = traced(told, &tensors)?;
        Ok(loss)
    }

    pub fn autocast(
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore: i64,
        reduction: &str,
        smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        in_float: bool,
    ) -> Result<Tensor> {
        cast(CastPolicy::LowerPrecision, &[Some(input), Some(weight), bias], |tensors| {
            let (input, weight, bias) = (tensors.get(0)?, tensors.get(1)?, tensors.optional(2));
            call!(
                "linear_cross_entropy",
                input,
                weight,
                target,
                bias,
                ignore,
                reduction,
                smoothing,
                softcap,
                z_loss,
                memory,
                in_float
            )
        })
    }

    pub fn forward(
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore: i64,
        reduction: &str,
        smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        in_float: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        let told = told!(ignore, reduction, smoothing, softcap, z_loss, memory, in_float);
        let arguments = LinearCrossEntropyArguments { input, weight, bias, targets: target };
        kernel(|| {
            let options = told.options()?;
            let (loss, saved) =
                parts::linear_cross_entropy_forward(&arguments, &options, needs(needed))?;
            let [input, weight, bias] = returned(input, saved)?;
            Ok((loss, input, weight, bias))
        })
    }

    pub fn backward(
        grad: &Tensor,
        of_input: &Tensor,
        of_weight: &Tensor,
        of_bias: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore: i64,
        reduction: &str,
        smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        in_float: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let told = told!(ignore, reduction, smoothing, softcap, z_loss, memory, in_float);
        let arguments = LinearCrossEntropyArguments { input, weight, bias, targets: target };
        kernel(|| {
            let (options, needed) = (told.options()?, needs(needed));
            let saved = [Some(of_input), Some(of_weight), Some(of_bias)];
            let found =
                parts::linear_cross_entropy_backward(grad, saved, &arguments, &options, needed)?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        of_input: &Tensor,
        of_weight: &Tensor,
        of_bias: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        target: &Tensor,
        bias: Option<&Tensor>,
        ignore: i64,
        reduction: &str,
        smoothing: f64,
        softcap: Option<f64>,
        z_loss: f64,
        memory: Option<i64>,
        in_float: bool,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let told = told!(ignore, reduction, smoothing, softcap, z_loss, memory, in_float);
        let kept = [Some(of_input), Some(of_weight), Some(of_bias)];
        let inputs = [Some(input), Some(weight), bias, Some(target)];
        Ok(gradients::<_, 3>(told, &[Some(grad)], &kept, &inputs, needed)?.into())
    }
}
