//! Tests of `ops::add_layer_norm`: against its reference, libtorch's own operators and finite
//! differences, with dropout and with bad input.

#[path = "../support/add_norm.rs"]
mod add_norm;

#[path = "../support/add_norm_dropout.rs"]
mod add_norm_dropout;

use add_norm::Op;
use tch_extension::ops::{AddLayerNormOptions, add_layer_norm_reference, f_add_layer_norm};

const EPS: f64 = 1e-5;

const OP: Op = Op {
    name: "add_layer_norm",
    has_bias: true,
    fused: |x, residual, shape, [weight, bias], dropout| {
        f_add_layer_norm(
            x,
            residual,
            shape,
            weight,
            bias,
            &AddLayerNormOptions { eps: EPS, dropout },
        )
    },
    reference: |x, residual, shape, [weight, bias], dropout| {
        add_layer_norm_reference(
            x,
            residual,
            shape,
            weight,
            bias,
            &AddLayerNormOptions { eps: EPS, dropout },
        )
    },
    libtorch: |sum, shape, [weight, bias]| Ok(sum.f_layer_norm(shape, weight, bias, EPS, false)?),
};

add_norm::tests!(OP);
