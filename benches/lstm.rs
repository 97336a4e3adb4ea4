//! An LSTM's layer, compared with libtorch's own: cuDNN's on a GPU.

use crate::common::Case;
use crate::draw::Draw;
use crate::rnn::Layer;
use tch::{Device, Kind, Tensor};
use tch_extension::ops::{RnnWeights, f_lstm};
use tch_extension::{Error, Result};

fn fused(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, w_ih, w_hh, b_ih, b_hh, h, c] = inputs else {
        return Err(Error::msg("seven tensors"));
    };
    let weights = RnnWeights { w_ih, w_hh, b_ih: Some(b_ih), b_hh: Some(b_hh) };
    let (output, (h, c)) = f_lstm(x, (h, c), &weights, &Default::default())?;
    Ok(vec![output, h, c])
}

fn libtorch(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, parameters @ .., h, c] = inputs else {
        return Err(Error::msg("seven tensors"));
    };
    let state = [h.f_unsqueeze(0)?, c.f_unsqueeze(0)?];
    // If this were always true, cuDNN would keep what a backward pass needs.
    let train = x.requires_grad();
    let (output, h, c) = x.f_lstm(&state, parameters, true, 1, 0.0, train, false, false)?;
    Ok(vec![output, h.f_squeeze_dim(0)?, c.f_squeeze_dim(0)?])
}

pub const LAYER: Layer = Layer { operator: "lstm", gates: 4, states: 2, fused, libtorch, mode: 2 };

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    LAYER.drawn(draw, kind, device)
}

pub fn cases(device: Device) -> Vec<Case> {
    LAYER.cases(device)
}
