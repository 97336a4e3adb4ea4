//! The outputs and gradients as two plain functions, below autograd.

use super::{
    Forward, GeluMlp, GeluMlpOptions, Needs, Saved, check_arguments, check_defined, keeps,
    needs_dz, place,
};
use crate::autograd::Inputs;
use crate::ffi::tensor::plain;
use crate::ops::way::forced;
use crate::{Error, Result};
use tch::Tensor;

/// The arguments, in the order of the operator's.
type Arguments<'a> = [Option<&'a Tensor>; place::LEN];

fn function(options: &GeluMlpOptions, input_size: Vec<i64>) -> GeluMlp {
    GeluMlp { options: *options, way: forced(), products: forced(), input_size }
}

/// y and, if these gradients need them, z and a, `[M, H]`.
///
/// # Errors
/// As for [`f_gelu_mlp`](crate::ops::f_gelu_mlp).
pub fn gelu_mlp_forward(
    arguments: &Arguments<'_>,
    options: &GeluMlpOptions,
    needs: Needs,
) -> Result<(Tensor, Option<Tensor>, Option<Tensor>)> {
    let [Some(input), Some(w1), b1, Some(w2), b2] = *arguments else {
        return Err(Error::msg("gelu_mlp: input, w1 and w2 are expected to be there"));
    };
    check_defined(input, w1, b1, w2, b2)?;
    check_arguments(input, w1, b1, w2, b2)?;
    let (keeps_z, keeps_a) = keeps(options, needs);
    let Forward { output, z, a } =
        function(options, Vec::new()).run(Inputs::new(arguments), keeps_z)?;
    Ok((output, z, Some(a).filter(|_| keeps_a)))
}

/// Whether z and a are what the forward returns for these gradients.
pub fn gelu_mlp_saves(options: &GeluMlpOptions, needs: Needs) -> (bool, bool) {
    keeps(options, needs)
}

/// The gradients that are needed. z and a are what the forward returned.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn gelu_mlp_backward(
    grad: &Tensor,
    (z, a): (Option<&Tensor>, Option<&Tensor>),
    arguments: &Arguments<'_>,
    options: &GeluMlpOptions,
    needs: Needs,
) -> Result<Vec<Option<Tensor>>> {
    let own =
        |needed: bool, place: usize| arguments[place].filter(|_| needed).map(Tensor::shallow_clone);
    let saved = Saved {
        input: own(needs[place::W1], place::INPUT),
        w1: own(needs[place::INPUT], place::W1),
        w2: own(needs_dz(needs), place::W2),
        z: z.map(plain).transpose()?,
        a: a.map(plain).transpose()?,
    };
    let input_size = arguments[place::INPUT].map(Tensor::size).unwrap_or_default();
    Ok(function(options, input_size).gradients(grad, saved, needs)?.into_vec())
}
