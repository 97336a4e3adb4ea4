//! The outputs and gradients as two plain functions, below autograd.

use super::{
    Forward, Needs, Saved, SwigluMlp, SwigluMlpOptions, check_arguments, keeps, needs_gates, place,
};
use crate::autograd::Inputs;
use crate::ffi::tensor::plain;
use crate::ops::way::forced;
use crate::{Error, Result};
use tch::Tensor;

/// g and u.
type Gates = (Tensor, Tensor);
/// The arguments, in the order of the operator's.
type Arguments<'a> = [Option<&'a Tensor>; place::LEN];

fn function(options: &SwigluMlpOptions, input_size: Vec<i64>) -> SwigluMlp {
    SwigluMlp { options: *options, products: forced(), input_size }
}

/// y and, if these gradients need them, g and u, and h, `[M, H]`.
///
/// # Errors
/// As for [`f_swiglu_mlp`](crate::ops::f_swiglu_mlp).
pub fn swiglu_mlp_forward(
    arguments: &Arguments<'_>,
    options: &SwigluMlpOptions,
    needs: Needs,
) -> Result<(Tensor, Option<Gates>, Option<Tensor>)> {
    let [Some(input), Some(w_gate), Some(w_up), Some(w_down)] = *arguments else {
        return Err(Error::msg("swiglu_mlp: all tensors are expected to be there"));
    };
    check_arguments(input, w_gate, w_up, w_down)?;
    let (keeps_gates, keeps_h) = keeps(options, needs);
    let Forward { output, gates, h } =
        function(options, Vec::new()).run(Inputs::new(arguments), keeps_gates)?;
    Ok((output, gates, Some(h).filter(|_| keeps_h)))
}

/// Whether g and u, and h are what the forward returns for these gradients.
pub fn swiglu_mlp_saves(options: &SwigluMlpOptions, needs: Needs) -> (bool, bool) {
    keeps(options, needs)
}

/// The gradients that are needed. g, u and h are what the forward returned.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn swiglu_mlp_backward(
    grad: &Tensor,
    (gates, h): (Option<(&Tensor, &Tensor)>, Option<&Tensor>),
    arguments: &Arguments<'_>,
    options: &SwigluMlpOptions,
    needs: Needs,
) -> Result<Vec<Option<Tensor>>> {
    let own =
        |needed: bool, place: usize| arguments[place].filter(|_| needed).map(Tensor::shallow_clone);
    let gates = gates.map(|(g, u)| Ok::<_, Error>((plain(g)?, plain(u)?))).transpose()?;
    let saved = Saved {
        input: own(needs[place::GATE] || needs[place::UP], place::INPUT),
        w_gate: own(needs[place::INPUT], place::GATE),
        w_up: own(needs[place::INPUT], place::UP),
        w_down: own(needs_gates(needs), place::DOWN),
        gates,
        h: h.map(plain).transpose()?,
    };
    let input_size = arguments[place::INPUT].map(Tensor::size).unwrap_or_default();
    Ok(function(options, input_size).gradients(grad, saved, needs)?.into_vec())
}
