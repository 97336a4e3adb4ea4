//! Level 2: a `Function` with a backward of our own, which takes fewer operations than libtorch's
//! own backward pass through ten of them.
//!
//! The elementwise part, which follows the product, is a [`Pointwise`]. Here it consists of tch
//! operations; in level 4 it consists of kernels.

use super::composed;
use std::marker::PhantomData;
use tch::Tensor;
use tch_extension::Result;
use tch_extension::autograd::{
    Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference,
};

/// The elementwise part of one step.
pub trait Pointwise: Send + Sync + 'static {
    /// The name for messages and profiles.
    const NAME: &'static str;

    /// Computes h', c' and the activations `[σ(i)│σ(o)│g]` from the gates and c. The activations
    /// may use the memory of the gates.
    fn forward(gates: Tensor, c: &Tensor) -> Result<[Tensor; 3]>;

    /// Computes the gradients of the gates and of c from those of h' and c'.
    fn backward(
        dh: &Tensor,
        dc: &Tensor,
        activations: &Tensor,
        new_c: &Tensor,
    ) -> Result<[Tensor; 2]>;
}

/// Computes one step that has a backward.
pub fn step<P: Pointwise>(inputs: [&Tensor; 5]) -> Result<(Tensor, Tensor)> {
    let [new_h, new_c] = apply(Step::<P>(PhantomData), &inputs.map(Some))?.exactly()?;
    Ok((new_h, new_c))
}

struct Step<P>(PhantomData<P>);

impl<P: Pointwise> Function for Step<P> {
    const NAME: &'static str = P::NAME;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w, b) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        let (h, c) = (inputs.get(3)?, inputs.get(4)?);
        let [new_h, new_c, activations] = P::forward(composed::gates(x, w, b, h)?, c)?;
        for tensor in [x, w, b, h, c, &new_c, &activations] {
            saver.save(tensor);
        }
        Ok([new_h, new_c].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            return second_derivative(ctx, grads);
        }
        let (x, w, h) = (ctx.saved(0)?, ctx.saved(1)?, ctx.saved(3)?);
        let (new_c, activations) = (ctx.saved(5)?, ctx.saved(6)?);
        let [dgates, dc] = P::backward(grads.get(0)?, grads.get(1)?, &activations, &new_c)?;
        let (hidden, features) = (h.size()[1], x.size()[1]);
        // Compute only the gradients that are needed, because the products are most of the work.
        let needs = |index| ctx.needs_input_grad(index);
        let dhx = (needs(0) || needs(3)).then(|| dgates.f_mm(&w)).transpose()?;
        let columns =
            |from, count| dhx.as_ref().map(|dhx| dhx.f_narrow(1, from, count)).transpose();
        let (dx, dh) = (columns(hidden, features)?, columns(0, hidden)?);
        let dw = needs(1)
            .then(|| dgates.f_transpose(0, 1)?.f_mm(&Tensor::f_cat(&[h, x], 1)?))
            .transpose()?;
        let db =
            needs(2).then(|| dgates.f_sum_dim_intlist([0_i64].as_slice(), false, dgates.kind()));
        Ok([dx, dw, db.transpose()?, dh, Some(dc)].into())
    }
}

/// Differentiates level 1 instead, because its operations have derivatives of any order.
pub(super) fn second_derivative(ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    let inputs = (0..5).map(|slot| ctx.saved(slot).map(Some)).collect::<Result<Vec<_>>>()?;
    differentiate_reference(ctx, &inputs, grads, |inputs| {
        let [Some(x), Some(w), Some(b), Some(h), Some(c)] = inputs else {
            unreachable!("five inputs")
        };
        let (new_h, new_c) = composed::lltm(x, w, b, (h, c))?;
        Ok([new_h, new_c].into())
    })
}

struct TchOperations;

impl Pointwise for TchOperations {
    const NAME: &'static str = "extension::lltm";

    fn forward(gates: Tensor, c: &Tensor) -> Result<[Tensor; 3]> {
        let [i, o, g] = thirds(&gates)?;
        let (i, o) = (i.f_sigmoid()?, o.f_sigmoid()?);
        let new_c = c.f_add(&g.f_elu()?.f_mul(&i)?)?;
        let new_h = new_c.f_tanh()?.f_mul(&o)?;
        Ok([new_h, new_c, Tensor::f_cat(&[i, o, g], 1)?])
    }

    fn backward(
        dh: &Tensor,
        dc: &Tensor,
        activations: &Tensor,
        new_c: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let [i, o, g] = thirds(activations)?;
        let tanh = new_c.f_tanh()?;
        let dc = dc + dh * &o * (1.0 - &tanh * &tanh);
        let di = &dc * g.f_elu()? * &i * (1.0 - &i);
        let d_o = dh * &tanh * &o * (1.0 - &o);
        // The derivative elu'(g) is e^g below zero and 1 above it.
        let dg = &dc * &i * g.f_clamp_max(0.0)?.f_exp()?;
        Ok([Tensor::f_cat(&[di, d_o, dg], 1)?, dc])
    }
}

fn thirds(gates: &Tensor) -> Result<[Tensor; 3]> {
    let hidden = gates.size()[1] / 3;
    let third = |index: i64| gates.f_narrow(1, index * hidden, hidden);
    Ok([third(0)?, third(1)?, third(2)?])
}

/// Computes one step.
pub fn lltm(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    (h, c): (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    step::<TchOperations>([x, w, b, h, c])
}
