//! Level 2: a `Function` with a backward of our own, which computes only the gradients that are
//! needed.

use tch::Tensor;
use tch_extension::Result;
use tch_extension::autograd::{
    Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference,
};

struct Linear;

impl Function for Linear {
    const NAME: &'static str = "extension::linear";
    /// The second derivative is right, too, because of the first lines of `backward`.
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w, b) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        saver.save(x);
        saver.save(w);
        saver.save(b);
        Ok(super::composed::linear(x, w, b)?.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            return second_derivative(ctx, grads);
        }
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        let dy = grads.get(0)?;
        let needs = |index| ctx.needs_input_grad(index);
        let dx = needs(0).then(|| dy.f_matmul(&w)).transpose()?;
        let dw = needs(1).then(|| dy.f_transpose(0, 1)?.f_matmul(&x)).transpose()?;
        let db = needs(2).then(|| dy.f_sum_dim_intlist([0_i64].as_slice(), false, dy.kind()));
        Ok([dx, dw, db.transpose()?].into())
    }
}

/// Differentiates level 1 instead, because its operations have derivatives of any order.
pub(super) fn second_derivative(ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    let inputs = (0..3).map(|slot| ctx.saved(slot).map(Some)).collect::<Result<Vec<_>>>()?;
    differentiate_reference(ctx, &inputs, grads, |inputs| {
        let [Some(x), Some(w), Some(b)] = inputs else { unreachable!("three inputs") };
        Ok(super::composed::linear(x, w, b)?.into())
    })
}

/// Computes `x Wᵀ + b`.
pub fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Linear, &[Some(x), Some(w), Some(b)])?.single()
}
