//! RMS normalisation of a residual sum.

use crate::add_norm;
use crate::common::Case;
use tch::Device;
use tch_extension::ops::{AddRmsNormOptions, add_rms_norm_reference, f_add_rms_norm};

const EPS: Option<f64> = Some(1e-5);

pub fn cases(device: Device) -> Vec<Case> {
    let calls: [add_norm::Call; 3] = [
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
    ];
    add_norm::cases("add_rms_norm", false, calls, device)
}
