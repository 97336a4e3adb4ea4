//! A layer by libtorch's own layers: cuDNN's on CUDA, oneDNN's on the CPU.

use super::functions::{Operands, Saved, without_first_dimension};
use super::{Arguments, Gradients, Needs, place};
use crate::ffi::tensor::plain;
use crate::ops::recurrent::kernels::Outputs;
use crate::ops::recurrent::kernels::cudnn::{self, CudnnOperands};
use crate::ops::recurrent::kernels::onednn::{self, OnednnOperands, OnednnSaved};
use crate::ops::recurrent::operands::copied;
use crate::{Error, Result};
use tch::Tensor;

/// The parameters in cuDNN's order. It has both biases or none, so an absent one becomes zeros.
fn parameters_of_cudnn(
    [w_ih, w_hh]: [&Tensor; 2],
    biases: [Option<&Tensor>; 2],
) -> Result<Vec<Tensor>> {
    let mut all = vec![plain(w_ih)?, plain(w_hh)?];
    if biases.iter().any(Option::is_some) {
        all.extend(with_zeros(biases, w_ih)?);
    }
    Ok(all)
}

/// The biases, with zeros for one that is absent.
fn with_zeros(biases: [Option<&Tensor>; 2], w_ih: &Tensor) -> Result<[Tensor; 2]> {
    let or_zeros = |bias: Option<&Tensor>| match bias {
        Some(bias) => plain(bias),
        None => Ok(w_ih.f_new_zeros([w_ih.size()[0]], (w_ih.kind(), w_ih.device()))?),
    };
    Ok([or_zeros(biases[0])?, or_zeros(biases[1])?])
}

/// Whether cuDNN takes the parameters as they are.
pub(super) fn are_flat_for_cudnn(arguments: &Arguments<'_>) -> Result<bool> {
    let [_, _, _, Some(w_ih), Some(w_hh), b_ih, b_hh] = *arguments else { return Ok(false) };
    match (b_ih, b_hh) {
        (None, None) => cudnn::are_flat(&[w_ih, w_hh]),
        (Some(b_ih), Some(b_hh)) => cudnn::are_flat(&[w_ih, w_hh, b_ih, b_hh]),
        _ => Ok(false),
    }
}

pub(super) fn forward_by_cudnn(operands: &Operands<'_>, keep: bool) -> Result<Outputs> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, .. } = *operands;
    let parameters = parameters_of_cudnn([w_ih, w_hh], [b_ih, b_hh])?;
    let c = c.map(|c| plain(&c.f_unsqueeze(0)?)).transpose()?;
    let (output, last_h, last_c, reserve) = cudnn::forward(
        &CudnnOperands {
            input: &plain(input)?,
            parameters: &parameters.iter().collect::<Vec<_>>(),
            h: &plain(&h.f_unsqueeze(0)?)?,
            c: c.as_ref(),
        },
        keep,
    )?;
    Ok(Outputs {
        output,
        last_h: without_first_dimension(last_h)?,
        last_c: last_c.map(without_first_dimension).transpose()?,
        c: None,
        activations: reserve,
    })
}

pub(super) fn backward_by_cudnn(
    grads: [Option<&Tensor>; 3],
    saved: &Saved<'_>,
    needs: &Needs,
) -> Result<Gradients> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, .. } = *saved.operands;
    let parameters = parameters_of_cudnn([w_ih, w_hh], [b_ih, b_hh])?;
    let c = c.map(|c| plain(&c.f_unsqueeze(0)?)).transpose()?;
    let [grad_output, grad_h, grad_c] = grads;
    let of_layer =
        |grad: Option<&Tensor>| grad.map(|grad| plain(&grad.f_unsqueeze(0)?)).transpose();
    let (grad_output, grad_h, grad_c) =
        (grad_output.map(plain).transpose()?, of_layer(grad_h)?, of_layer(grad_c)?);
    // cuDNN writes into what it reads here, which another backward pass may need.
    let reserve = match (saved.may_overwrite)()? {
        true => saved.activations.shallow_clone(),
        false => copied(saved.activations)?,
    };
    let of_parameters = [place::W_IH, place::W_HH, place::B_IH, place::B_HH];
    let made = cudnn::backward(
        &CudnnOperands {
            input: &plain(input)?,
            parameters: &parameters.iter().collect::<Vec<_>>(),
            h: &plain(&h.f_unsqueeze(0)?)?,
            c: c.as_ref(),
        },
        (saved.output, &reserve),
        [grad_output.as_ref(), grad_h.as_ref(), grad_c.as_ref()],
        [
            needs[place::INPUT],
            needs[place::H],
            needs[place::C],
            of_parameters.iter().any(|&place| needs[place]),
        ],
    )?;
    let [input, h, c, w_ih, w_hh, b_ih, b_hh] = made;
    // Those of the parameters are parts of one piece of memory, as they are in libtorch's layer.
    let of_one_layer = |grad: Option<Tensor>| grad.map(|grad| grad.f_squeeze_dim(0)).transpose();
    let all = [input, of_one_layer(h)?, of_one_layer(c)?, w_ih, w_hh, b_ih, b_hh];
    Ok(needed(all, needs))
}

/// A layer's tensors as oneDNN reads them.
struct ForOnednn {
    input: Tensor,
    weights: [Tensor; 2],
    biases: [Tensor; 2],
    h: Tensor,
    c: Tensor,
}

impl ForOnednn {
    fn new(
        [input, w_ih, w_hh, h, c]: [&Tensor; 5],
        biases: [Option<&Tensor>; 2],
    ) -> Result<ForOnednn> {
        Ok(ForOnednn {
            input: plain(input)?,
            weights: [plain(w_ih)?, plain(w_hh)?],
            biases: with_zeros(biases, w_ih)?,
            h: plain(h)?,
            c: plain(c)?,
        })
    }

    fn operands(&self) -> OnednnOperands<'_> {
        let ([w_ih, w_hh], [b_ih, b_hh]) = (&self.weights, &self.biases);
        let parameters = [w_ih, w_hh, b_ih, b_hh];
        OnednnOperands { input: &self.input, parameters, h: &self.h, c: &self.c }
    }
}

fn without_c() -> Error {
    Error::msg("internal error: an LSTM without c")
}

pub(super) fn forward_by_onednn(operands: &Operands<'_>, keep: bool) -> Result<Outputs> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, .. } = *operands;
    let c = c.ok_or_else(without_c)?;
    let given = ForOnednn::new([input, w_ih, w_hh, h, c], [b_ih, b_hh])?;
    let (output, last_h, last_c, workspace) = onednn::forward(&given.operands(), keep)?;
    Ok(Outputs {
        output,
        last_h,
        // The backward pass reads it, and its owner may change the other one.
        c: keep.then(|| copied(&last_c)).transpose()?,
        last_c: Some(last_c),
        activations: workspace,
    })
}

pub(super) fn backward_by_onednn(
    grads: [Option<&Tensor>; 3],
    saved: &Saved<'_>,
    needs: &Needs,
) -> Result<Gradients> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, .. } = *saved.operands;
    let (c, last_c) = c.zip(saved.c).ok_or_else(without_c)?;
    let given = ForOnednn::new([input, w_ih, w_hh, h, c], [b_ih, b_hh])?;
    let grads = grads.map(|grad| grad.map(plain).transpose());
    let [grad_output, grad_h, grad_c] = grads;
    let (grad_output, grad_h, grad_c) = (grad_output?, grad_h?, grad_c?);
    // oneDNN writes into what it reads here, which another thread's backward pass may be reading.
    let workspace = match (saved.may_overwrite)()? {
        true => saved.activations.shallow_clone(),
        false => copied(saved.activations)?,
    };
    let made = onednn::backward(
        &given.operands(),
        &OnednnSaved { output: saved.output, last_c, workspace: &workspace },
        [grad_output.as_ref(), grad_h.as_ref(), grad_c.as_ref()],
    )?;
    let [input, w_ih, w_hh, b_ih, b_hh, h, c] = made.map(Some);
    Ok(needed([input, h, c, w_ih, w_hh, b_ih, b_hh], needs))
}

/// The gradients without those that are not needed.
fn needed(mut gradients: Gradients, needs: &Needs) -> Gradients {
    for (gradient, is_needed) in gradients.iter_mut().zip(needs) {
        gradient.take_if(|_| !is_needed);
    }
    gradients
}
