//! Tests of `ops::add_rms_norm`: against its reference, libtorch's own operators and finite
//! differences, with dropout and with bad input.

#[path = "../support/add_norm.rs"]
mod add_norm;

#[path = "../support/add_norm_dropout.rs"]
mod add_norm_dropout;

use add_norm::Op;
use tch_extension::ops::{AddRmsNormOptions, add_rms_norm_reference, f_add_rms_norm};

const EPS: Option<f64> = Some(1e-5);

const OP: Op = Op {
    name: "add_rms_norm",
    has_bias: false,
    fused: |x, residual, shape, [weight, _], dropout| {
        f_add_rms_norm(x, residual, shape, weight, &AddRmsNormOptions { eps: EPS, dropout })
    },
    reference: |x, residual, shape, [weight, _], dropout| {
        add_rms_norm_reference(x, residual, shape, weight, &AddRmsNormOptions { eps: EPS, dropout })
    },
    libtorch: |sum, shape, [weight, _]| Ok(sum.f_rms_norm(shape, weight, EPS)?),
};

add_norm::tests!(OP);
