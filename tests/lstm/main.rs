//! Tests of `ops::lstm`: against its reference, libtorch's own layer and finite differences, and
//! with bad input.

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/rnn.rs"]
mod rnn;

use rnn::Rnn;
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{RnnWeights, f_lstm, lstm_reference};

type Lstm = fn(&Tensor, &RnnWeights<'_>, (&Tensor, &Tensor)) -> Result<(Tensor, (Tensor, Tensor))>;

fn call(lstm: Lstm, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, w_ih, w_hh, biases @ .., h, c] = arguments else { unreachable!("five at least") };
    let weights = RnnWeights { w_ih, w_hh, b_ih: biases.first(), b_hh: biases.get(1) };
    let (output, (h, c)) = lstm(x, &weights, (h, c))?;
    Ok(vec![output, h, c])
}

fn libtorch(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    // Its own layers accept no other layout.
    let arguments: Vec<Tensor> = arguments.iter().map(Tensor::contiguous).collect();
    let [x, parameters @ .., h, c] = &arguments[..] else { unreachable!("five at least") };
    let state = [h.f_unsqueeze(0)?, c.f_unsqueeze(0)?];
    let has_biases = parameters.len() == 4;
    let (output, h, c) = x.f_lstm(&state, parameters, has_biases, 1, 0.0, true, false, false)?;
    Ok(vec![output, h.f_squeeze_dim(0)?, c.f_squeeze_dim(0)?])
}

const RNN: Rnn = Rnn {
    gates: 4,
    states: 2,
    fused: |arguments| call(f_lstm, arguments),
    reference: |arguments| call(lstm_reference, arguments),
    libtorch,
};

rnn::tests!(RNN);
