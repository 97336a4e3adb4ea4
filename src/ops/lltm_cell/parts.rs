//! The outputs and gradients as two plain functions, below autograd.

use super::KINDS;
use super::functions::{self, Saved, Shapes};
use super::{OP, Operands, Outputs, check_the_others, in_matching_kinds, is_ordinary, place};
use crate::ffi::facts::facts;
use crate::ops::way::forced;
use crate::{Error, Result, check};
use tch::Tensor;

/// The arguments: input, weight, bias, h and c.
type Arguments<'a> = [Option<&'a Tensor>; place::LEN];

fn absent() -> Error {
    Error::msg("lltm_cell: all tensors but the bias are expected to be there")
}

/// h', c', and σ(i), σ(o) and g, `[B, 3H]`.
///
/// # Errors
/// As for [`f_lltm_cell`](crate::ops::f_lltm_cell).
pub fn lltm_cell_forward(arguments: &Arguments<'_>) -> Result<(Tensor, Tensor, Tensor)> {
    let [Some(input), Some(weight), bias, Some(h), Some(c)] = *arguments else {
        return Err(absent());
    };
    if is_ordinary(&facts(*arguments)?, bias.is_some()) {
        return forward(arguments);
    }
    let checked =
        check!(OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(2, "[B, F]")?;
    check_the_others(OP, &checked, input.size2()?, weight, bias, (h, c))?;
    match in_matching_kinds(OP, arguments)? {
        None => forward(arguments),
        Some(matched) => forward(&std::array::from_fn(|place| matched.tensors[place].as_ref())),
    }
}

fn forward(arguments: &Arguments<'_>) -> Result<(Tensor, Tensor, Tensor)> {
    let [Some(input), Some(weight), bias, Some(h), Some(c)] = *arguments else {
        return Err(absent());
    };
    let known = facts(*arguments)?;
    let shapes = Shapes::of(&known, bias.is_some(), false)?;
    let operands = Operands { input, weight, bias, h, c };
    let Outputs { new_h, new_c, activations, .. } =
        functions::forward(&operands, &known, &shapes, forced(), true)?;
    Ok((new_h, new_c, activations.ok_or_else(absent)?))
}

/// The gradients that are needed, from those for h' and c'; an absent one is zero. The arguments have
/// matching kinds.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn lltm_cell_backward(
    grads: [Option<&Tensor>; 2],
    (new_c, activations): (&Tensor, &Tensor),
    arguments: &Arguments<'_>,
    needs: [bool; place::LEN],
) -> Result<[Option<Tensor>; place::LEN]> {
    let [Some(input), Some(weight), bias, Some(h), Some(_)] = *arguments else {
        return Err(absent());
    };
    let shapes = Shapes::of(&facts(*arguments)?, bias.is_some(), false)?;
    let saved = Saved {
        input: Some(input.shallow_clone()),
        weight: Some(weight.shallow_clone()),
        h: Some(h.shallow_clone()),
        new_c: new_c.shallow_clone(),
        activations: activations.shallow_clone(),
    };
    functions::backward(grads, &saved, &shapes, &needs, forced())
}
