//! Level 3: forward and backward in C++ on ATen, as one writes them for Python
//! (`csrc/lltm/aten.cpp`). The `Function` around them is Rust.

use super::function::second_derivative;
use std::sync::LazyLock;
use tch::Tensor;
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::library::Operator;
use tch_extension::{Result, args};

static FORWARD: LazyLock<Operator> = LazyLock::new(|| find("lltm_forward"));
static BACKWARD: LazyLock<Operator> = LazyLock::new(|| find("lltm_backward"));

/// Finds the operator that an `m.def` of this name registered.
fn find(name: &str) -> Operator {
    Operator::find(&format!("extension_example::{name}")).expect("csrc/lltm/aten.cpp is linked")
}

/// Computes one step.
pub fn lltm(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    (h, c): (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    let [new_h, new_c] = apply(Step, &[x, w, b, h, c].map(Some))?.exactly()?;
    Ok((new_h, new_c))
}

struct Step;

impl Function for Step {
    const NAME: &'static str = "extension::lltm_aten";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w, b) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        let (h, c) = (inputs.get(3)?, inputs.get(4)?);
        let mut results: Vec<Tensor> = FORWARD.call(args![x, w, b, h, c])?;
        let kept = results.split_off(2);
        for tensor in [x, w, b, h, c, &results[1]].into_iter().chain(&kept) {
            saver.save(tensor);
        }
        Ok(results.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            return second_derivative(ctx, grads);
        }
        let saved = |slot| ctx.saved(slot);
        let gradients: Vec<Tensor> = BACKWARD.call(args![
            grads.get(0)?,
            grads.get(1)?,
            &saved(1)?,
            &saved(5)?,
            &saved(6)?,
            &saved(7)?,
            &saved(8)?,
            &saved(9)?
        ])?;
        Ok(gradients.into())
    }
}
