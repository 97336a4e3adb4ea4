//! `lltm` and `lltm_cell`.
//!
//! What an LLTM over a sequence saves for its gradients depends on the kernels that compute it, so a trace
//! cannot know it. The operator `lltm_backward` therefore computes the forward pass once more.

use crate::meta::{Shapes, contiguous, likes};
use crate::node::{
    ALL, Needs, Pair, below, call, cast, forwarded, gradients, gradients_by, is_eager, kernel,
    needs, returned, traced,
};
use tch::{Kind, Tensor};
use tch_extension::amp::CastPolicy;
use tch_extension::autograd::Inputs;
use tch_extension::library::{SymInt, sizes};
use tch_extension::ops::{f_lltm, f_lltm_cell, lltm_cell_reference, lltm_reference, parts};
use tch_extension::{Error, Result};

tch_extension::operators! {
    namespace tch_extension;

    /// A step of an LSTM without a forget gate and with ELU, as PyTorch's extension tutorial has it:
    /// `input` is `[B, F]`, `weight` `[3H, H + F]`, `bias` `[3H]` or `[1, 3H]`, and `h` and `c` are
    /// `[B, H]`. Returns the new h and c.
    fn lltm_cell(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> (Tensor, Tensor) {
        cpu, cuda = lltm_cell::own,
        fake = |input, weight, bias, h, c| {
            check("lltm_cell", &["B", "F"], input, (weight, bias), (h, c))?;
            let kind = lltm_kinds(input, h, c)?.1;
            Ok((contiguous(&sizes(h), kind, h)?, contiguous(&sizes(c), kind, c)?))
        },
        autograd = lltm_cell::autograd,
        key("AutocastCPU") = lltm_cell::autocast,
        key("AutocastCUDA") = lltm_cell::autocast,
    }

    /// The new h and c, and the gates after their activations, `[B, 3H]`.
    fn lltm_cell_forward(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = lltm_cell::forward,
        fake = |input, weight, bias, h, c| {
            check("lltm_cell", &["B", "F"], input, (weight, bias), (h, c))?;
            let kind = lltm_kinds(input, h, c)?.1;
            let gates: Vec<SymInt> =
                sizes(h).into_iter().take(1).chain(sizes(weight).into_iter().take(1)).collect();
            let state = |like: &Tensor| contiguous(&sizes(like), kind, like);
            Ok((state(h)?, state(c)?, contiguous(&gates, kind, h)?))
        },
        autograd = |input, weight, bias, h, c| {
            let inputs = [Some(input), Some(weight), bias, Some(h), Some(c)];
            Ok(forwarded::<_, 3>(lltm_cell::LltmCell, &inputs, ALL)?.into())
        },
    }

    /// The gradients of input, weight, bias, h and c. Incoming ones that are absent are zero.
    fn lltm_cell_backward(
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        new_c: &Tensor,
        gates: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = lltm_cell::backward,
        fake = |_grad_h, _grad_c, _new_c, _gates, input, weight, bias, h, c, needs| {
            Ok(likes([Some(input), Some(weight), bias, Some(h), Some(c)], needs)?.into())
        },
        autograd = lltm_cell::backward_autograd,
    }

    /// A sequence of steps of `lltm_cell`: `input` is `[T, B, F]`. Returns h of all steps, `[T, B, H]`, and
    /// the last h and c.
    fn lltm(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> (Tensor, Tensor, Tensor) {
        cpu, cuda = sequence::own,
        fake = |input, weight, bias, h, c| {
            check("lltm", &["T", "B", "F"], input, (weight, bias), (h, c))?;
            let kind = lltm_kinds(input, h, c)?.1;
            Ok((output(input, h, kind)?, contiguous(&sizes(h), kind, h)?, contiguous(&sizes(c), kind, c)?))
        },
        autograd = sequence::autograd,
        key("AutocastCPU") = sequence::autocast,
        key("AutocastCUDA") = sequence::autocast,
    }

    /// The gradients of input, weight, bias, h and c. Incoming ones that are absent are zero.
    fn lltm_backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
        needs: i64,
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor) {
        cpu, cuda = sequence::backward,
        fake = |_output, _grad_h, _grad_c, input, weight, bias, h, c, needs| {
            Ok(likes([Some(input), Some(weight), bias, Some(h), Some(c)], needs)?.into())
        },
        autograd = sequence::backward_autograd,
    }
}

/// The kind to which libtorch promotes two of the kinds that the operators take.
fn promote(a: Kind, b: Kind) -> Kind {
    match (a, b) {
        (a, b) if a == b => a,
        (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
        _ => Kind::Float,
    }
}

/// The kind of an LLTM's products, and that of its state.
fn lltm_kinds(input: &Tensor, h: &Tensor, c: &Tensor) -> Result<(Kind, Kind)> {
    let product = promote(input.f_kind()?, h.f_kind()?);
    Ok((product, promote(product, c.f_kind()?)))
}

/// An LLTM's tensors in matching kinds.
fn in_matching_kinds(input: &Tensor, h: &Tensor, c: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (product, state) = lltm_kinds(input, h, c)?;
    Ok((input.f_to_kind(product)?, h.f_to_kind(product)?, c.f_to_kind(state)?))
}

/// A fake h of all steps.
fn output(input: &Tensor, h: &Tensor, kind: Kind) -> Result<Tensor> {
    let size: Vec<SymInt> = sizes(input).into_iter().take(1).chain(sizes(h)).collect();
    contiguous(&size, kind, input)
}

/// Three results as an operator returns them.
fn flat((output, (h, c)): (Tensor, (Tensor, Tensor))) -> (Tensor, Tensor, Tensor) {
    (output, h, c)
}

/// What the fake kernels check. H + F, the columns of the weight, is no multiple of one size.
fn check(
    op: &'static str,
    names: &[&'static str],
    input: &Tensor,
    (weight, bias): (&Tensor, Option<&Tensor>),
    (h, c): (&Tensor, &Tensor),
) -> Result<()> {
    let is_row = bias.is_some_and(|bias| bias.dim() == 2);
    let bias_names: &[&str] = if is_row { &["1", "3H"] } else { &["3H"] };
    let shapes = Shapes::of(op, "input", input)?
        .has("input", input, names)?
        .has("h", h, &["B", "H"])?
        .has("c", c, &["B", "H"])?
        .has("weight", weight, &["3H", "columns"])?
        .has("bias", bias, bias_names)?;
    let [hidden, features, columns] = ["H", "F", "columns"].map(|name| shapes.known(name));
    match (hidden, features, columns) {
        (Some(h), Some(f), Some(columns)) if h + f != columns => {
            let expected = format!("shape [3H, H + F] with H = {h}, F = {f}");
            Err(Error::argument(op, "weight", expected, format!("{:?}", sizes(weight)), ""))
        }
        _ => Ok(()),
    }
}

mod lltm_cell {
    use super::*;

    #[derive(Clone)]
    pub struct LltmCell;

    impl Pair for LltmCell {
        const NAME: &'static str = "lltm_cell";
        const BACKWARD: &'static str = "lltm_cell_backward";
        const INPUTS: usize = 5;
        const OUTPUTS: usize = 2;
        const KEPT: u64 = 0b110;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            call!("lltm_cell", input, weight, bias, h, c)
        }

        fn forward(&self, inputs: Inputs<'_>, _needs: Needs) -> Result<Vec<Tensor>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            call!("lltm_cell_forward", input, weight, bias, h, c)
        }

        fn backward(
            &self,
            grads: Inputs<'_>,
            kept: Inputs<'_>,
            inputs: Inputs<'_>,
            needs: Needs,
        ) -> Result<Vec<Option<Tensor>>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            let (new_c, gates) = (kept.get(0)?, kept.get(1)?);
            let (grad_h, grad_c) = (grads.optional(0), grads.optional(1));
            gradients_by!(
                "lltm_cell_backward",
                grad_h,
                grad_c,
                new_c,
                gates,
                input,
                weight,
                bias,
                h,
                c,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            let (new_h, new_c) = lltm_cell_reference(input, weight, bias, (h, c))?;
            Ok(vec![new_h, new_c])
        }
    }

    pub fn own(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        below(|| f_lltm_cell(input, weight, bias, (h, c)))
    }

    pub fn autograd(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let tensors = [Some(input), Some(weight), bias, Some(h), Some(c)];
        if is_eager(&tensors) {
            return f_lltm_cell(input, weight, bias, (h, c));
        }
        let (input, h, c) = &in_matching_kinds(input, h, c)?;
        Ok(traced::<_, 2>(LltmCell, &[Some(input), Some(weight), bias, Some(h), Some(c)])?.into())
    }

    pub fn autocast(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        // As in the composite, nothing after the product is cast.
        let operands = [Some(input), Some(weight), bias, Some(h)];
        cast(CastPolicy::LowerPrecision, &operands, |tensors| {
            let (input, weight, bias) = (tensors.get(0)?, tensors.get(1)?, tensors.optional(2));
            call!("lltm_cell", input, weight, bias, tensors.get(3)?, c)
        })
    }

    pub fn forward(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        kernel(|| parts::lltm_cell_forward(&[Some(input), Some(weight), bias, Some(h), Some(c)]))
    }

    pub fn backward(
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        new_c: &Tensor,
        gates: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| {
            let tensors = [Some(input), Some(weight), bias, Some(h), Some(c)];
            let found = parts::lltm_cell_backward(
                [grad_h, grad_c],
                (new_c, gates),
                &tensors,
                needs(needed),
            )?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        new_c: &Tensor,
        gates: &Tensor,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let inputs = [Some(input), Some(weight), bias, Some(h), Some(c)];
        Ok(gradients::<_, 5>(
            LltmCell,
            &[grad_h, grad_c],
            &[Some(new_c), Some(gates)],
            &inputs,
            needed,
        )?
        .into())
    }
}

mod sequence {
    use super::*;

    #[derive(Clone)]
    pub struct Lltm;

    impl Pair for Lltm {
        const NAME: &'static str = "lltm";
        const BACKWARD: &'static str = "lltm_backward";
        const INPUTS: usize = 5;
        const OUTPUTS: usize = 3;
        const KEPT: u64 = 0;

        fn call(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            call!("lltm", input, weight, bias, h, c)
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
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            let (grad_output, grad_h, grad_c) =
                (grads.optional(0), grads.optional(1), grads.optional(2));
            gradients_by!(
                "lltm_backward",
                grad_output,
                grad_h,
                grad_c,
                input,
                weight,
                bias,
                h,
                c,
                needs
            )
        }

        fn reference(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>> {
            let (input, weight, bias) = (inputs.get(0)?, inputs.get(1)?, inputs.optional(2));
            let (h, c) = (inputs.get(3)?, inputs.get(4)?);
            let (output, (h, c)) = lltm_reference(input, weight, bias, (h, c))?;
            Ok(vec![output, h, c])
        }
    }

    pub fn own(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        below(|| Ok(flat(f_lltm(input, weight, bias, (h, c))?)))
    }

    pub fn autograd(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let tensors = [Some(input), Some(weight), bias, Some(h), Some(c)];
        if is_eager(&tensors) {
            return Ok(flat(f_lltm(input, weight, bias, (h, c))?));
        }
        let (input, h, c) = &in_matching_kinds(input, h, c)?;
        Ok(traced::<_, 3>(Lltm, &[Some(input), Some(weight), bias, Some(h), Some(c)])?.into())
    }

    pub fn autocast(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        if is_eager(&[Some(input), Some(weight), bias, Some(h), Some(c)]) {
            return Ok(flat(f_lltm(input, weight, bias, (h, c))?));
        }
        let operands = [Some(input), Some(weight), bias, Some(h)];
        cast(CastPolicy::LowerPrecision, &operands, |tensors| {
            let (input, weight, bias) = (tensors.get(0)?, tensors.get(1)?, tensors.optional(2));
            let h = tensors.get(3)?;
            // Without autocast, which has been traced then, c has the kind of the products. Where it is a
            // wider one, the products are in that.
            let state = lltm_kinds(input, h, c)?.1;
            let bias = bias.map(|bias| bias.f_to_kind(state)).transpose()?;
            let [input, weight, h, c] = [input, weight, h, c].map(|tensor| tensor.f_to_kind(state));
            call!("lltm", &input?, &weight?, bias.as_ref(), &h?, &c?)
        })
    }

    pub fn backward(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor)> {
        kernel(|| {
            let tensors = [Some(input), Some(weight), bias, Some(h), Some(c)];
            let found =
                parts::lltm_backward([grad_output, grad_h, grad_c], &tensors, needs(needed))?;
            Ok(returned(input, found)?.into())
        })
    }

    pub fn backward_autograd(
        grad_output: Option<&Tensor>,
        grad_h: Option<&Tensor>,
        grad_c: Option<&Tensor>,
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        h: &Tensor,
        c: &Tensor,
        needed: Needs,
    ) -> Result<(Tensor, Tensor, Tensor, Tensor, Tensor)> {
        let inputs = [Some(input), Some(weight), bias, Some(h), Some(c)];
        Ok(gradients::<_, 5>(Lltm, &[grad_output, grad_h, grad_c], &[], &inputs, needed)?.into())
    }
}
