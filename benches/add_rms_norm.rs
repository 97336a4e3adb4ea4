//! RMS normalisation of a residual sum.

use crate::add_norm::Norm;
use crate::common::Case;
use crate::draw::Draw;
use tch::{Device, Kind};
use tch_extension::ops::{AddRmsNormOptions, add_rms_norm_reference, f_add_rms_norm};

const EPS: Option<f64> = Some(1e-5);

const NORM: Norm = Norm {
    operator: "add_rms_norm",
    has_bias: false,
    calls: [
        |x, residual, weight, _| {
            add_rms_norm_reference(
                x,
                residual,
                &weight.size(),
                Some(weight),
                &AddRmsNormOptions { eps: EPS, dropout: 0.0 },
            )
        },
        |x, residual, weight, _| {
            let sum = x.f_add(residual)?;
            let output = sum.f_rms_norm(weight.size(), Some(weight), EPS)?;
            Ok((sum, output))
        },
        |x, residual, weight, _| {
            f_add_rms_norm(
                x,
                residual,
                &weight.size(),
                Some(weight),
                &AddRmsNormOptions { eps: EPS, dropout: 0.0 },
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
