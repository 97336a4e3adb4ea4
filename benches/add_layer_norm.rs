//! Layer normalisation of a residual sum.

use crate::add_norm;
use crate::common::Case;
use tch::Device;
use tch_extension::ops::{AddLayerNormOptions, add_layer_norm_reference, f_add_layer_norm};

const EPS: f64 = 1e-5;

pub fn cases(device: Device) -> Vec<Case> {
    let calls: [add_norm::Call; 3] = [
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
    ];
    add_norm::cases("add_layer_norm", true, calls, device)
}
