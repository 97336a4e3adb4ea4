//! Tests of `ops::gru`: against its reference, libtorch's own layer and finite differences, and
//! with bad input.

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/rnn.rs"]
mod rnn;

use rnn::Rnn;
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{RnnWeights, f_gru, gru_reference};

type Gru = fn(&Tensor, &RnnWeights<'_>, &Tensor) -> Result<(Tensor, Tensor)>;

fn call(gru: Gru, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, w_ih, w_hh, biases @ .., h] = arguments else { unreachable!("four at least") };
    let weights = RnnWeights { w_ih, w_hh, b_ih: biases.first(), b_hh: biases.get(1) };
    let (output, h) = gru(x, &weights, h)?;
    Ok(vec![output, h])
}

fn libtorch(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    // Its own layers accept no other layout.
    let arguments: Vec<Tensor> = arguments.iter().map(Tensor::contiguous).collect();
    let [x, parameters @ .., h] = &arguments[..] else { unreachable!("four at least") };
    let has_biases = parameters.len() == 4;
    let (output, h) =
        x.f_gru(&h.f_unsqueeze(0)?, parameters, has_biases, 1, 0.0, true, false, false)?;
    Ok(vec![output, h.f_squeeze_dim(0)?])
}

const RNN: Rnn = Rnn {
    gates: 3,
    states: 1,
    fused: |arguments| call(f_gru, arguments),
    reference: |arguments| call(gru_reference, arguments),
    libtorch,
};

rnn::tests!(RNN);
