// E0080: operators!: `save` takes tensors
// A number is kept anyway, and found by its name.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;

    fn scale(x: &Tensor, factor: f64) -> Tensor {
        cpu = |x, factor| Ok(x * factor),
        backward = |ctx, grads| Ok((grads.get(0)? * ctx.argument::<f64>("factor")?).into()),
        save = [factor],
    }
}

fn main() {}
