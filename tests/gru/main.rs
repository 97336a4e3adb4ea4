//! Tests of `ops::gru`: against its reference, libtorch's own layer and finite differences, and
//! with bad input.

#[path = "../support/rnn.rs"]
mod rnn;

#[path = "../support/rnn_padded.rs"]
mod rnn_padded;

#[path = "../support/rnn_random.rs"]
mod rnn_random;

#[path = "../support/rnn_tf32.rs"]
mod rnn_tf32;

use rnn::Rnn;
use rnn_padded::some_lengths;
use support::packed::Packed;
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::ops::{RnnOptions, RnnWay, RnnWeights, f_gru, force, gru_reference};

type Gru = fn(&Tensor, &Tensor, &RnnWeights<'_>, &RnnOptions<'_>) -> Result<(Tensor, Tensor)>;

fn call(gru: Gru, arguments: &[Tensor], lengths: Option<&[i64]>) -> Result<Vec<Tensor>> {
    let [x, w_ih, w_hh, biases @ .., h] = arguments else { unreachable!("four at least") };
    let weights = RnnWeights { w_ih, w_hh, b_ih: biases.first(), b_hh: biases.get(1) };
    let (output, h) = gru(x, h, &weights, &RnnOptions { lengths })?;
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
    fused: |arguments| call(f_gru, arguments, None),
    reference: |arguments| call(gru_reference, arguments, None),
    libtorch,
};

rnn::tests!(RNN);
rnn::each_way_tests! {
    RNN,
    with_packed_weights(conformance): |arguments| force(RnnWay::Packed, || call(f_gru, arguments, None)),
    by_steps(conformance): |arguments| force(RnnWay::Step, || call(f_gru, arguments, None)),
}
rnn_random::random_tests!("gru", RNN);
rnn_tf32::tf32_tests!(RNN, Some(1));

fn padded(arguments: &[Tensor], lengths: &[i64]) -> Result<Vec<Tensor>> {
    call(f_gru, arguments, Some(lengths))
}

fn packed_by_libtorch(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let arguments: Vec<Tensor> = arguments.iter().map(Tensor::contiguous).collect();
    let [x, parameters @ .., h] = &arguments[..] else { unreachable!("four at least") };
    let packed = Packed::new(x, &some_lengths(x).expect("lengths"))?;
    let h = packed.sorted(&h.f_unsqueeze(0)?)?;
    let (data, sizes) = (&packed.data, &packed.batch_sizes);
    let has_biases = parameters.len() == 4;
    let (output, h) =
        Tensor::f_gru_data(data, sizes, &h, parameters, has_biases, 1, 0.0, true, false)?;
    Ok(vec![packed.padded(&output)?, packed.unsorted(&h)?.f_squeeze_dim(0)?])
}

const PADDED: Rnn = Rnn {
    fused: |arguments| call(f_gru, arguments, some_lengths(&arguments[0]).as_deref()),
    reference: |arguments| call(gru_reference, arguments, some_lengths(&arguments[0]).as_deref()),
    libtorch: packed_by_libtorch,
    ..RNN
};

rnn_padded::padded_tests!(PADDED, padded);
