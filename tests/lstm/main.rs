//! Tests of `ops::lstm`: against its reference, libtorch's own layer and finite differences, and
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
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, apply_with, grad};
use tch_extension::ops::{RnnOptions, RnnWay, RnnWeights, f_lstm, force, lstm_reference};

type State<'a> = (&'a Tensor, &'a Tensor);
type Lstm =
    fn(&Tensor, State<'_>, &RnnWeights<'_>, &RnnOptions<'_>) -> Result<(Tensor, (Tensor, Tensor))>;

fn call(lstm: Lstm, arguments: &[Tensor], lengths: Option<&[i64]>) -> Result<Vec<Tensor>> {
    let [x, w_ih, w_hh, biases @ .., h, c] = arguments else { unreachable!("five at least") };
    let weights = RnnWeights { w_ih, w_hh, b_ih: biases.first(), b_hh: biases.get(1) };
    let (output, (h, c)) = lstm(x, (h, c), &weights, &RnnOptions { lengths })?;
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
    fused: |arguments| call(f_lstm, arguments, None),
    reference: |arguments| call(lstm_reference, arguments, None),
    libtorch,
};

rnn::tests!(RNN);
rnn::each_way_tests! {
    RNN,
    with_packed_weights(conformance): |arguments| force(RnnWay::Packed, || call(f_lstm, arguments, None)),
    by_steps(conformance): |arguments| force(RnnWay::Step, || call(f_lstm, arguments, None)),
    by_onednn: |arguments| force(RnnWay::Onednn, || call(f_lstm, arguments, None)),
}
rnn_random::random_tests!("lstm", RNN);
rnn_tf32::tf32_tests!(RNN, None);

fn padded(arguments: &[Tensor], lengths: &[i64]) -> Result<Vec<Tensor>> {
    call(f_lstm, arguments, Some(lengths))
}

fn packed_by_libtorch(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let arguments: Vec<Tensor> = arguments.iter().map(Tensor::contiguous).collect();
    let [x, parameters @ .., h, c] = &arguments[..] else { unreachable!("five at least") };
    let packed = Packed::new(x, &some_lengths(x).expect("lengths"))?;
    let state = [packed.sorted(&h.f_unsqueeze(0)?)?, packed.sorted(&c.f_unsqueeze(0)?)?];
    let (data, sizes) = (&packed.data, &packed.batch_sizes);
    let has_biases = parameters.len() == 4;
    let parameters: Vec<Tensor> = parameters.iter().map(Tensor::shallow_clone).collect();
    let (output, h, c) =
        Tensor::f_lstm_data(data, sizes, &state, &parameters, has_biases, 1, 0.0, true, false)?;
    let of_layer = |state: &Tensor| Result::Ok(packed.unsorted(state)?.f_squeeze_dim(0)?);
    Ok(vec![packed.padded(&output)?, of_layer(&h)?, of_layer(&c)?])
}

const PADDED: Rnn = Rnn {
    fused: |arguments| call(f_lstm, arguments, some_lengths(&arguments[0]).as_deref()),
    reference: |arguments| call(lstm_reference, arguments, some_lengths(&arguments[0]).as_deref()),
    libtorch: packed_by_libtorch,
    ..RNN
};

rnn_padded::padded_tests!(PADDED, padded);

/// oneDNN's LSTM inside the operator has libtorch's numbers bit by bit, and gradients that do not
/// change if the backward pass is repeated or the last c is changed.
#[test]
fn onednn_inside_the_operator_is_libtorchs() {
    if !RnnWay::Onednn.is_on(Device::Cpu).expect("an answer") {
        return;
    }
    for sizes in [[12, 16, 32, 128], [3, 2, 5, 33], [1, 1, 1, 1]] {
        let inputs = RNN.inputs(sizes, Kind::Float, Device::Cpu);
        let leaves = support::leaves(&inputs);
        let ours = force(RnnWay::Onednn, || call(f_lstm, &leaves, None)).expect("outputs");
        let theirs = libtorch(&leaves).expect("outputs");
        let expected = gradients_of(&theirs, &leaves);
        assert!(ours.iter().zip(&theirs).all(|(ours, theirs)| ours.equal(theirs)), "{sizes:?}");
        let vectors = gradients_of(&ours, &leaves);
        assert_eq!((vectors.len(), expected.len()), (7, 7));
        let _ = tch::no_grad(|| ours[2].detach().fill_(0.5));
        let changed = gradients_of(&[ours[0].shallow_clone()], &leaves);
        let alone = gradients_of(&[theirs[0].shallow_clone()], &leaves);
        for (ours, theirs) in vectors.iter().chain(&changed).zip(expected.iter().chain(&alone)) {
            assert!(ours.equal(theirs), "{sizes:?}");
        }
    }
}

/// The gradients of the leaves, from incoming ones that follow from the outputs.
fn gradients_of(outputs: &[Tensor], leaves: &[Tensor]) -> Vec<Tensor> {
    let vectors: Vec<Tensor> = outputs.iter().map(|output| output.detach().cos()).collect();
    let vectors: Vec<_> = vectors.iter().map(Some).collect();
    let options =
        GradOptions { grad_outputs: &vectors, retain_graph: Some(true), ..Default::default() };
    let (of, at): (Vec<_>, Vec<_>) = (outputs.iter().collect(), leaves.iter().collect());
    let found = grad(&of, &at, &options).expect("gradients").into_vec();
    found.into_iter().flatten().collect()
}

/// oneDNN writes into what its forward pass kept.
#[test]
fn two_threads_through_one_graph_by_onednn() {
    let inputs = RNN.inputs([12, 16, 32, 256], Kind::Float, Device::Cpu);
    let leaves = support::leaves(&inputs);
    let outputs = force(RnnWay::Onednn, || call(f_lstm, &leaves, None)).expect("outputs");
    let own = |of: &[Tensor]| of.iter().map(Tensor::shallow_clone).collect::<Vec<Tensor>>();
    let of = |outputs: Vec<Tensor>, leaves: Vec<Tensor>| gradients_of(&outputs[..1], &leaves);
    let expected = of(own(&outputs), own(&leaves));
    for _ in 0..10 {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (outputs, leaves) = (own(&outputs), own(&leaves));
                std::thread::spawn(move || of(outputs, leaves))
            })
            .collect();
        for thread in threads {
            let found = thread.join().expect("gradients");
            assert!(found.iter().zip(&expected).all(|(found, expected)| found.equal(expected)));
        }
    }
}

/// `set_data` is not seen by autograd: what a backward pass reads is checked again.
#[test]
fn what_the_backward_reads_is_checked() {
    for way in [RnnWay::Onednn, RnnWay::Packed, RnnWay::Step] {
        let leaves = support::leaves(&RNN.inputs([6, 16, 8, 256], Kind::Float, Device::Cpu));
        let outputs = force(way, || call(f_lstm, &leaves, None)).expect("outputs");
        let mut w_hh = leaves[2].shallow_clone();
        w_hh.set_data(&Tensor::zeros([4, 1], (Kind::Float, Device::Cpu)));
        let at: Vec<&Tensor> = leaves.iter().collect();
        let sum = outputs[0].sum(Kind::Float);
        let error = grad(&[&sum], &at, &GradOptions::default()).expect_err("another size");
        assert!(error.to_string().contains("lstm"), "{way:?}: {error}");
    }
}

/// A node runs even if no gradient reaches it.
#[test]
fn no_gradient_at_all() {
    for way in [RnnWay::Onednn, RnnWay::Packed, RnnWay::Step] {
        let leaves = support::leaves(&RNN.inputs([4, 8, 8, 256], Kind::Float, Device::Cpu));
        let outputs = force(way, || call(f_lstm, &leaves, None)).expect("outputs");
        let y = apply_with(
            "none",
            &[Some(&outputs[0])],
            |_, inputs| Ok(inputs.get(0)?.f_sin()?.into()),
            |_, _| Ok(vec![None].into()),
        );
        let y = y.expect("an output").single().expect("one").sum(Kind::Float);
        let at: Vec<&Tensor> = leaves.iter().collect();
        let options = GradOptions { allow_unused: true, ..Default::default() };
        let found = grad(&[&y], &at, &options).expect("no error");
        let is_zero = |found: &Tensor| found.abs().sum(Kind::Double).double_value(&[]) == 0.0;
        assert!(found.iter().flatten().all(is_zero), "{way:?}");
    }
}
