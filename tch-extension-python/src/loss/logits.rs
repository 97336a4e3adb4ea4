//! `cross_entropy`.

use super::{classes, loss, reduction_of};
use crate::meta::{Shapes, likes};
use crate::node::{
    Needs, Pair, below, call, cast, forwarded, gradients, is_eager, is_needed, kernel, present,
    returned, traced,
};
use tch::Tensor;
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::ops::{CrossEntropyOptions, cross_entropy_reference, f_cross_entropy, parts};
use tch_extension::{Error, Result};

const OP: &str = "cross_entropy";

tch_extension::operators! {
    namespace tch_extension;

    /// `torch.nn.functional.cross_entropy` of `input`, `[M, V]`, and classes `target`, `[M]`. `weight` is
    /// `[V]`. The loss has no dimensions or, with `reduction="none"`, those of `target`.
    fn cross_entropy(
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor> = None,
        ignore_index: i64 = -100,
        reduction: &str = "mean",
        label_smoothing: f64 = 0.0,
    ) -> Tensor {
        cpu, cuda = cross_entropy::own,
        fake = |input, target, weight, _ignore_index, reduction, _label_smoothing| {
            check(input, target, weight)?;
            loss(input, target, reduction, input.f_kind()?)
        },
        autograd = cross_entropy::autograd,
        key("AutocastCPU") = cross_entropy::autocast,
        key("AutocastCUDA") = cross_entropy::autocast,
    }

    /// The loss and, if it is needed and the forward computes it, the gradient of `input`.
    fn cross_entropy_forward(
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        needs: i64,
    ) -> (Tensor, Tensor) {
        cpu, cuda = cross_entropy::forward,
        fake = |input, target, weight, _ignore_index, reduction, _label_smoothing, needs| {
            check(input, target, weight)?;
            let is_ahead = parts::cross_entropy_is_ahead(input, reduction_of(OP, reduction)?)?;
            let saves = i64::from(is_ahead && is_needed(needs, 0));
            let [gradient] = likes([Some(input)], saves)?;
            Ok((loss(input, target, reduction, input.f_kind()?)?, gradient))
        },
        autograd = |input, target, weight, ignore_index, reduction, smoothing, needed| {
            check_constant(weight)?;
            let told = cross_entropy::CrossEntropy::new(ignore_index, reduction, smoothing);
            Ok(forwarded::<_, 2>(told, &[Some(input), Some(target), weight], needed)?.into())
        },
    }

    /// The gradient of `input`; `gradient` is what the forward returned.
    fn cross_entropy_backward(
        grad: &Tensor,
        gradient: &Tensor,
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        needs: i64,
    ) -> Tensor {
        cpu, cuda = cross_entropy::backward,
        fake = |_grad, _gradient, input, _target, _weight, _ignore_index, _reduction, _smoothing, needs| {
            let [input] = likes([Some(input)], needs)?;
            Ok(input)
        },
        autograd = cross_entropy::backward_autograd,
    }
}

/// What the fake kernels check.
fn check(input: &Tensor, target: &Tensor, weight: Option<&Tensor>) -> Result<()> {
    classes(OP, target)?;
    Shapes::of(OP, "input", input)?
        .has("input", input, &["M", "V"])?
        .has("target", target, &["M"])?
        .has("weight", weight, &["V"])?;
    Ok(())
}

/// As in libtorch, the weights of the classes have no gradient, so that one which is wanted is an error.
fn check_constant(weight: Option<&Tensor>) -> Result<()> {
    let Some(weight) = weight else { return Ok(()) };
    // With grad mode off, what is made of it requires none.
    if weight.requires_grad() && weight.f_neg()?.requires_grad() {
        let expected = "weights of classes without gradient";
        return Err(Error::argument(OP, "weight", expected, "one that requires grad", "detach it"));
    }
    Ok(())
}

mod cross_entropy {
    use super::*;

    #[derive(Clone)]
    pub struct CrossEntropy {
        ignore_index: i64,
        reduction: String,
        label_smoothing: f64,
    }

    impl CrossEntropy {
        pub fn new(ignore_index: i64, reduction: &str, label_smoothing: f64) -> Self {
            CrossEntropy { ignore_index, reduction: reduction.to_string(), label_smoothing }
        }

        fn options<'a>(&self, weight: Option<&'a Tensor>) -> Result<CrossEntropyOptions<'a>> {
            let CrossEntropy { ignore_index, label_smoothing, .. } = *self;
            let reduction = reduction_of(OP, &self.reduction)?;
            Ok(CrossEntropyOptions {
                weight,
                reduction,
                ignore_index,
                label_smoothing,
                ..Default::default()
            })
        }
    }

    impl Pair for CrossEntropy {
        const NAME: &'static str = OP;
        const BACKWARD: &'static str = "cross_entropy_backward";
        const INPUTS: usize = 3;
        const OUTPUTS: usize = 1;
        const KEPT: u64 = 0b10;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, target, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let CrossEntropy { ignore_index, reduction, label_smoothing } = self;
            call!(
                "cross_entropy",
                input,
                target,
                weight,
                *ignore_index,
                reduction,
                *label_smoothing
            )
        }

        fn forward(&self, inputs: Inputs<'_>, needs: Needs) -> Result<Vec<Tensor>> {
            let (input, target, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let CrossEntropy { ignore_index, reduction, label_smoothing } = self;
            call!(
                "cross_entropy_forward",
                input,
                target,
                weight,
                *ignore_index,
                reduction,
                *label_smoothing,
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
            let (input, target, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let CrossEntropy { ignore_index, reduction, label_smoothing } = self;
            let (grad, gradient) = (grads.get(0)?, kept.get(0)?);
            let found: Tensor = call!(
                "cross_entropy_backward",
                grad,
                gradient,
                input,
                target,
                weight,
                *ignore_index,
                reduction,
                *label_smoothing,
                needs
            )?;
            Ok(vec![Some(found)])
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, target) = (inputs.get(0)?, inputs.get(1)?);
            let options = self.options(inputs.optional(2))?;
            Ok(vec![cross_entropy_reference(input, target, &options)?])
        }
    }

    pub fn own(
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
    ) -> Result<Tensor> {
        let told = CrossEntropy::new(ignore_index, reduction, label_smoothing);
        below(|| f_cross_entropy(input, target, &told.options(weight)?))
    }

    pub fn autograd(
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
    ) -> Result<Tensor> {
        check_constant(weight)?;
        let told = CrossEntropy::new(ignore_index, reduction, label_smoothing);
        let options = told.options(weight)?;
        if is_eager(&[Some(input), Some(target), weight]) {
            return f_cross_entropy(input, target, &options);
        }
        let [loss] = traced(told, &[Some(input), Some(target), weight])?;
        Ok(loss)
    }

    pub fn autocast(
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
    ) -> Result<Tensor> {
        cast(CastPolicy::Float, &[Some(input), weight], |tensors| {
            let (input, weight) = (tensors.get(0)?, tensors.optional(1));
            call!("cross_entropy", input, target, weight, ignore_index, reduction, label_smoothing)
        })
    }

    pub fn forward(
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor)> {
        let told = CrossEntropy::new(ignore_index, reduction, label_smoothing);
        kernel(|| {
            let (options, is_needed) = (told.options(weight)?, is_needed(needed, 0));
            let (loss, gradient) =
                parts::cross_entropy_forward(input, target, &options, is_needed)?;
            let [gradient] = returned(input, [gradient])?;
            Ok((loss, gradient))
        })
    }

    pub fn backward(
        grad: &Tensor,
        gradient: &Tensor,
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        needed: Needs,
    ) -> Result<Tensor> {
        let told = CrossEntropy::new(ignore_index, reduction, label_smoothing);
        kernel(|| {
            let options = told.options(weight)?;
            let is_ahead = parts::cross_entropy_is_ahead(input, options.reduction)?;
            let gradient = present(gradient, is_ahead);
            let found = || parts::cross_entropy_backward(grad, gradient, input, target, &options);
            let [found] = returned(input, [is_needed(needed, 0).then(found).transpose()?])?;
            Ok(found)
        })
    }

    pub fn backward_autograd(
        grad: &Tensor,
        gradient: &Tensor,
        input: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: i64,
        reduction: &str,
        label_smoothing: f64,
        needed: Needs,
    ) -> Result<Tensor> {
        let told = CrossEntropy::new(ignore_index, reduction, label_smoothing);
        let inputs = [Some(input), Some(target), weight];
        let [found] = gradients(told, &[Some(grad)], &[Some(gradient)], &inputs, needed)?;
        Ok(found)
    }
}
