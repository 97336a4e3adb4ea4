//! Layer normalisation of a residual sum.

use crate::add_norm::Norm;
use crate::common::Case;
use crate::draw::Draw;
use tch::{Device, Kind};
use tch_extension::ops::{AddLayerNormOptions, add_layer_norm_reference, f_add_layer_norm};

const EPS: f64 = 1e-5;

const NORM: Norm = Norm {
    operator: "add_layer_norm",
    has_bias: true,
    calls: [
        |x, residual, weight, bias| {
            add_layer_norm_reference(
                x,
                residual,
                &weight.size(),
                Some(weight),
                bias,
                &AddLayerNormOptions { eps: EPS, dropout: 0.0 },
            )
        },
        |x, residual, weight, bias| {
            let sum = x.f_add(residual)?;
            let output = sum.f_layer_norm(weight.size(), Some(weight), bias, EPS, false)?;
            Ok((sum, output))
        },
        |x, residual, weight, bias| {
            f_add_layer_norm(
                x,
                residual,
                &weight.size(),
                Some(weight),
                bias,
                &AddLayerNormOptions { eps: EPS, dropout: 0.0 },
            )
        },
    ],
};

/// A case with drawn sizes.
pub fn drawn(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    NORM.drawn(draw, kind, device)
}

pub fn cases(device: Device) -> Vec<Case> {
    NORM.cases(device)
}
