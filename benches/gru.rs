//! A GRU's layer, compared with libtorch's own: cuDNN's on a GPU.

use crate::common::Case;
use crate::draw::Draw;
use crate::rnn::Layer;
use tch::{Device, Kind, Tensor};
use tch_extension::ops::{RnnWeights, f_gru};
use tch_extension::{Error, Result};

fn fused(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, w_ih, w_hh, b_ih, b_hh, h] = inputs else {
        return Err(Error::msg("six tensors"));
    };
    let weights = RnnWeights { w_ih, w_hh, b_ih: Some(b_ih), b_hh: Some(b_hh) };
    let (output, h) = f_gru(x, h, &weights, &Default::default())?;
    Ok(vec![output, h])
}

fn libtorch(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, parameters @ .., h] = inputs else {
        return Err(Error::msg("six tensors"));
    };
    // If this were always true, cuDNN would keep what a backward pass needs.
    let train = x.requires_grad();
    let (output, h) = x.f_gru(&h.f_unsqueeze(0)?, parameters, true, 1, 0.0, train, false, false)?;
    Ok(vec![output, h.f_squeeze_dim(0)?])
}

pub const LAYER: Layer = Layer { operator: "gru", gates: 3, states: 1, fused, libtorch, mode: 3 };

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    LAYER.drawn(draw, kind, device)
}

pub fn cases(device: Device) -> Vec<Case> {
    LAYER.cases(device)
}
