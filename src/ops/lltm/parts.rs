//! The gradients as a plain function, below autograd. What the forward saves depends on the way, so it
//! computes the forward once more.

use super::functions::{self, Operands, Outputs, Saved};
use super::{KINDS, OP, Way, check_the_others, place};
use crate::ops::way::forced;
use crate::{Error, Result, check};
use tch::Tensor;

/// The gradients of input, weight, bias, h and c that are needed, from those for h of all steps, the last
/// h and the last c; an absent one is zero. The arguments have matching kinds.
///
/// # Errors
/// As for [`f_lltm`](crate::ops::f_lltm).
pub fn lltm_backward(
    grads: [Option<&Tensor>; 3],
    arguments: &[Option<&Tensor>; place::LEN],
    needs: [bool; place::LEN],
) -> Result<[Option<Tensor>; place::LEN]> {
    let [Some(input), Some(weight), bias, Some(h), Some(c)] = *arguments else {
        return Err(Error::msg("lltm: all tensors but the bias are expected to be there"));
    };
    let checked =
        check!(OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(3, "[T, B, F]")?;
    let (steps, batch, features) = input.size3()?;
    check_the_others(OP, &checked, (batch, features), weight, bias, (h, c))?;
    for tensor in [weight, h].into_iter().chain(bias) {
        check!(OP, "weight, bias and h", tensor).kind_as(input.f_kind()?, "input")?;
    }
    let output = [steps, batch, h.size2()?.1];
    for (name, grad, size) in [
        ("grad_output", grads[0], &output[..]),
        ("grad_h", grads[1], &output[1..]),
        ("grad_c", grads[2], &output[1..]),
    ] {
        let Some(grad) = grad else { continue };
        check!(OP, name, grad)
            .defined()?
            .same_device_as(&checked)?
            .kind_as(c.f_kind()?, "c")?
            .shape("of the output", size)?;
    }
    if grads.iter().all(Option::is_none) {
        return Ok(Default::default());
    }
    let way: Way = forced();
    let operands = Operands { input, weight, bias, h, c };
    let (outputs, shapes) = functions::forward(&operands, None, way, true)?;
    let Outputs { output, last_c, c: all_c, activations, .. } = outputs;
    let own = |place: usize| arguments[place].map(Tensor::shallow_clone);
    let Some(activations) = activations else {
        let inputs = std::array::from_fn(|place| own(place).filter(|_| needs[place]));
        return functions::backward_of_nothing(grads, inputs);
    };
    let saved = Saved {
        input: own(place::INPUT),
        weight: own(place::WEIGHT),
        h: own(place::H),
        output: all_c.as_ref().map(|_| output),
        c: all_c.unwrap_or(last_c),
        activations,
    };
    functions::backward(grads, saved, &shapes, &needs, way)
}
