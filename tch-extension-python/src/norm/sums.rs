//! `add_layer_norm` and `add_rms_norm`.

use super::{like, of_rows, or_default};
use crate::meta::{likes, normalized, same_shape};
use crate::node::{
    ALL, Needs, Pair, below, call, forwarded, gradients, is_eager, is_needed, kernel, needs,
    returned, traced,
};
use tch::Tensor;
use tch_extension::autograd::Inputs;
use tch_extension::library::without_key;
use tch_extension::ops::{
    add_layer_norm_reference, add_rms_norm_reference, f_add_layer_norm, f_add_rms_norm, parts,
};
use tch_extension::{Error, Result};

tch_extension::operators! {
    namespace tch_extension;

    /// h = dropout(input) + residual, and layer_norm(h), both of the shape of `input`. h has the kind of
    /// `residual`, which is that of `input` or, for half kinds, float32.
    #[tag(nondeterministic_seeded)]
    fn add_layer_norm(
        input: &Tensor,
        residual: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor> = None,
        bias: Option<&Tensor> = None,
        eps: f64 = 1e-5,
        dropout: f64 = 0.0,
    ) -> (Tensor, Tensor) {
        cpu, cuda = add_layer_norm::own,
        fake = |input, residual, shape, weight, bias, _eps, _dropout| {
            check("add_layer_norm", (input, residual), shape, &[("weight", weight), ("bias", bias)])?;
            Ok((like(input, residual.f_kind()?)?, like(input, input.f_kind()?)?))
        },
        autograd = add_layer_norm::autograd,
        key("FuncTorchVmapMode") = |input, residual, shape, weight, bias, eps, dropout| {
            let input = &dropped("add_layer_norm", input, dropout)?;
            without_key("FuncTorchVmapMode", || {
                call!("add_layer_norm", input, residual, shape, weight, bias, eps, 0.0)
            })
        },
    }

    /// h and its norm without dropout, and for the gradients the mean of each row of h and the inverse of
    /// its standard deviation.
    fn add_layer_norm_forward(
        input: &Tensor,
        residual: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> (Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = add_layer_norm::forward,
        fake = |input, residual, shape, weight, bias, _eps| {
            check("add_layer_norm", (input, residual), shape, &[("weight", weight), ("bias", bias)])?;
            let (kind, stream) = (input.f_kind()?, residual.f_kind()?);
            let moment = || of_rows(input, shape.len(), stream);
            Ok((like(input, stream)?, like(input, kind)?, moment()?, moment()?))
        },
        autograd = |input, residual, shape, weight, bias, eps| {
            let pair = add_layer_norm::AddLayerNorm { shape: shape.to_vec(), eps };
            Ok(forwarded::<_, 4>(pair, &[Some(input), Some(residual), weight, bias], ALL)?.into())
        },
    }

    /// The gradients of input, residual, weight and bias, from those of h, if there is one, and of its
    /// norm. If input and residual have one kind, theirs is one, in the place of the latter.
    fn add_layer_norm_backward(
        grad_sum: Option<&Tensor>,
        grad: &Tensor,
        sum: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        residual: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = add_layer_norm::backward,
        fake = |_grad_sum, _grad, _sum, _mean, _rstd, input, residual, _shape, weight, bias, _eps, needs| {
            let needs = needs_of_sum(input, residual, needs)?;
            Ok(likes([Some(input), Some(residual), weight, bias], needs)?.into())
        },
        autograd = add_layer_norm::backward_autograd,
    }

    /// h = dropout(input) + residual, and rms_norm(h); see `add_layer_norm`.
    #[tag(nondeterministic_seeded)]
    fn add_rms_norm(
        input: &Tensor,
        residual: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor> = None,
        eps: Option<f64> = None,
        dropout: f64 = 0.0,
    ) -> (Tensor, Tensor) {
        cpu, cuda = add_rms_norm::own,
        fake = |input, residual, shape, weight, _eps, _dropout| {
            check("add_rms_norm", (input, residual), shape, &[("weight", weight)])?;
            Ok((like(input, residual.f_kind()?)?, like(input, input.f_kind()?)?))
        },
        autograd = add_rms_norm::autograd,
        key("FuncTorchVmapMode") = |input, residual, shape, weight, eps, dropout| {
            let input = &dropped("add_rms_norm", input, dropout)?;
            without_key("FuncTorchVmapMode", || {
                call!("add_rms_norm", input, residual, shape, weight, eps, 0.0)
            })
        },
    }

    /// h and its norm without dropout, and for the gradients the inverse of the root mean square of each
    /// row of h.
    fn add_rms_norm_forward(
        input: &Tensor,
        residual: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = add_rms_norm::forward,
        fake = |input, residual, shape, weight, _eps| {
            check("add_rms_norm", (input, residual), shape, &[("weight", weight)])?;
            let (kind, stream) = (input.f_kind()?, residual.f_kind()?);
            Ok((like(input, stream)?, like(input, kind)?, of_rows(input, shape.len(), stream)?))
        },
        autograd = |input, residual, shape, weight, eps| {
            let pair = add_rms_norm::AddRmsNorm { shape: shape.to_vec(), eps };
            Ok(forwarded::<_, 3>(pair, &[Some(input), Some(residual), weight], ALL)?.into())
        },
    }

    /// The gradients of input, residual and weight; see `add_layer_norm_backward`.
    fn add_rms_norm_backward(
        grad_sum: Option<&Tensor>,
        grad: &Tensor,
        sum: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        residual: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = add_rms_norm::backward,
        fake = |_grad_sum, _grad, _sum, _rstd, input, residual, _shape, weight, _eps, needs| {
            let needs = needs_of_sum(input, residual, needs)?;
            Ok(likes([Some(input), Some(residual), weight], needs)?.into())
        },
        autograd = add_rms_norm::backward_autograd,
    }
}

/// The bits for an operator that returns the gradients of a sum of these two: where they have one kind,
/// theirs are one tensor, which it returns as the latter's.
fn needs_of_sum(input: &Tensor, residual: &Tensor, needed: Needs) -> Result<Needs> {
    Ok(match input.f_kind()? == residual.f_kind()? {
        true => needed & !0b11 | i64::from(needed & 0b11 != 0) << 1,
        false => needed,
    })
}

/// The gradients from y's, which `find` asks the operator for, given its bits.
fn gradients_of_sum(
    input: &Tensor,
    residual: &Tensor,
    needed: Needs,
    find: impl FnOnce(Needs) -> Result<Vec<Tensor>>,
) -> Result<Vec<Option<Tensor>>> {
    let asked = needs_of_sum(input, residual, needed)?;
    let mut found: Vec<Option<Tensor>> = find(asked)?.into_iter().map(Some).collect();
    if asked != needed && is_needed(needed, 0) {
        found[0] = found[1].as_ref().map(Tensor::shallow_clone);
    }
    Ok(found)
}

/// The gradients if y has none: that of h for input and residual.
fn gradients_of_sum_alone(
    grad_sum: Option<&Tensor>,
    input: &Tensor,
    inputs: usize,
) -> Result<Vec<Option<Tensor>>> {
    let kind = input.f_kind()?;
    let mut gradients: Vec<Option<Tensor>> = (0..inputs).map(|_| None).collect();
    gradients[0] = grad_sum.map(|grad| grad.f_to_kind(kind)).transpose()?;
    gradients[1] = grad_sum.map(Tensor::shallow_clone);
    Ok(gradients)
}

/// Dropout by libtorch, which a trace knows, and which does within vmap what its `randomness` says.
fn dropped(op: &str, input: &Tensor, dropout: f64) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&dropout) {
        let (expected, got) = ("a probability from 0 to 1", dropout.to_string());
        return Err(Error::argument(op, "dropout", expected, got, ""));
    }
    match dropout == 0.0 {
        true => Ok(input.shallow_clone()),
        false => Ok(input.f_dropout(dropout, true)?),
    }
}

/// What the fake kernels check.
fn check(
    op: &'static str,
    (input, residual): (&Tensor, &Tensor),
    shape: &[i64],
    parameters: &[(&str, Option<&Tensor>)],
) -> Result<()> {
    normalized(op, input, shape, parameters)?;
    same_shape(op, ("residual", residual), ("input", input))
}

mod add_layer_norm {
    use super::*;

    #[derive(Clone)]
    pub struct AddLayerNorm {
        pub shape: Vec<i64>,
        pub eps: f64,
    }

    impl Pair for AddLayerNorm {
        const NAME: &'static str = "add_layer_norm";
        const BACKWARD: &'static str = "add_layer_norm_backward";
        const INPUTS: usize = 4;
        const OUTPUTS: usize = 2;
        const KEPT: u64 = 0b1101;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, residual) = (inputs.get(0)?, inputs.get(1)?);
            let (weight, bias) = (inputs.optional(2), inputs.optional(3));
            let (shape, eps) = (&self.shape, self.eps);
            call!("add_layer_norm", input, residual, shape, weight, bias, eps, 0.0)
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            let (input, residual) = (inputs.get(0)?, inputs.get(1)?);
            let (weight, bias) = (inputs.optional(2), inputs.optional(3));
            let (shape, eps) = (&self.shape, self.eps);
            call!("add_layer_norm_forward", input, residual, shape, weight, bias, eps)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (input, residual) = (inputs.get(0)?, inputs.get(1)?);
            let (weight, bias) = (inputs.optional(2), inputs.optional(3));
            let grad_sum = grads.optional(0);
            let Some(grad) = grads.optional(1) else {
                return gradients_of_sum_alone(grad_sum, input, Self::INPUTS);
            };
            let (sum, mean, rstd) = (kept.get(0)?, kept.get(1)?, kept.get(2)?);
            let (shape, eps) = (&self.shape, self.eps);
            gradients_of_sum(input, residual, needs, |needs| {
                call!(
                    "add_layer_norm_backward",
                    grad_sum,
                    grad,
                    sum,
                    mean,
                    rstd,
                    input,
                    residual,
                    shape,
                    weight,
                    bias,
                    eps,
                    needs
                )
            })
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, residual) = (inputs.get(0)?, inputs.get(1)?);
            let (weight, bias) = (inputs.optional(2), inputs.optional(3));
            let (shape, eps) = (&self.shape, self.eps);
            let (sum, output) =
                add_layer_norm_reference(input, residual, shape, weight, bias, eps, 0.0)?;
            Ok(vec![sum, output])
        }
    }

    pub fn own(
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        dropout: f64,
    ) -> Result<(Tensor, Tensor)> {
        below(|| f_add_layer_norm(input, residual, shape, weight, bias, eps, dropout))
    }

    pub fn autograd(
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        dropout: f64,
    ) -> Result<(Tensor, Tensor)> {
        if is_eager(&[Some(input), Some(residual), weight, bias]) {
            return f_add_layer_norm(input, residual, shape, weight, bias, eps, dropout);
        }
        let input = &dropped("add_layer_norm", input, dropout)?;
        let pair = AddLayerNorm { shape: shape.to_vec(), eps };
        Ok(traced::<_, 2>(pair, &[Some(input), Some(residual), weight, bias])?.into())
    }

    pub fn forward(
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| parts::add_layer_norm_forward(input, residual, shape, weight, bias, eps))
    }

    pub fn backward(
        grad_sum: Option<&Tensor>,
        grad: &Tensor,
        sum: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        _eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| {
            let (grads, kept) = ((grad_sum, grad), (sum, mean, rstd));
            let needed = needs(needs_of_sum(input, residual, needed)?);
            let found =
                parts::add_layer_norm_backward(grads, kept, input, shape, weight, bias, needed)?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad_sum: Option<&Tensor>,
        grad: &Tensor,
        sum: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
        let pair = AddLayerNorm { shape: shape.to_vec(), eps };
        let kept = [Some(sum), Some(mean), Some(rstd)];
        let inputs = [Some(input), Some(residual), weight, bias];
        let needed = needs_of_sum(input, residual, needed)?;
        Ok(gradients::<_, 4>(pair, &[grad_sum, Some(grad)], &kept, &inputs, needed)?.into())
    }
}

mod add_rms_norm {
    use super::*;

    #[derive(Clone)]
    pub struct AddRmsNorm {
        pub shape: Vec<i64>,
        pub eps: f64,
    }

    impl Pair for AddRmsNorm {
        const NAME: &'static str = "add_rms_norm";
        const BACKWARD: &'static str = "add_rms_norm_backward";
        const INPUTS: usize = 3;
        const OUTPUTS: usize = 2;
        const KEPT: u64 = 0b101;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, residual, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            call!("add_rms_norm", input, residual, &self.shape, weight, Some(self.eps), 0.0)
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            let (input, residual, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            call!("add_rms_norm_forward", input, residual, &self.shape, weight, self.eps)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (input, residual, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let grad_sum = grads.optional(0);
            let Some(grad) = grads.optional(1) else {
                return gradients_of_sum_alone(grad_sum, input, Self::INPUTS);
            };
            let (sum, rstd) = (kept.get(0)?, kept.get(1)?);
            let (shape, eps) = (&self.shape, self.eps);
            gradients_of_sum(input, residual, needs, |needs| {
                call!(
                    "add_rms_norm_backward",
                    grad_sum,
                    grad,
                    sum,
                    rstd,
                    input,
                    residual,
                    shape,
                    weight,
                    eps,
                    needs
                )
            })
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, residual, weight) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (shape, eps) = (&self.shape, Some(self.eps));
            let (sum, output) = add_rms_norm_reference(input, residual, shape, weight, eps, 0.0)?;
            Ok(vec![sum, output])
        }
    }

    pub fn own(
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: Option<f64>,
        dropout: f64,
    ) -> Result<(Tensor, Tensor)> {
        below(|| f_add_rms_norm(input, residual, shape, weight, eps, dropout))
    }

    pub fn autograd(
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: Option<f64>,
        dropout: f64,
    ) -> Result<(Tensor, Tensor)> {
        if is_eager(&[Some(input), Some(residual), weight]) {
            return f_add_rms_norm(input, residual, shape, weight, eps, dropout);
        }
        let input = &dropped("add_rms_norm", input, dropout)?;
        let pair = AddRmsNorm { shape: shape.to_vec(), eps: or_default(eps, residual.f_kind()?) };
        Ok(traced::<_, 2>(pair, &[Some(input), Some(residual), weight])?.into())
    }

    pub fn forward(
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(|| parts::add_rms_norm_forward(input, residual, shape, weight, eps))
    }

    pub fn backward(
        grad_sum: Option<&Tensor>,
        grad: &Tensor,
        sum: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        _eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(|| {
            let (grads, kept) = ((grad_sum, grad), (sum, rstd));
            let needed = needs(needs_of_sum(input, residual, needed)?);
            let found = parts::add_rms_norm_backward(grads, kept, input, shape, weight, needed)?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad_sum: Option<&Tensor>,
        grad: &Tensor,
        sum: &Tensor,
        rstd: &Tensor,
        input: &Tensor,
        residual: &Tensor,
        shape: &[i64],
        weight: Option<&Tensor>,
        eps: f64,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let pair = AddRmsNorm { shape: shape.to_vec(), eps };
        let (grads, kept) = ([grad_sum, Some(grad)], [Some(sum), Some(rstd)]);
        let inputs = [Some(input), Some(residual), weight];
        let needed = needs_of_sum(input, residual, needed)?;
        Ok(gradients::<_, 3>(pair, &grads, &kept, &inputs, needed)?.into())
    }
}
