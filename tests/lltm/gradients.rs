//! Tests of the gradients.

use super::*;
use tch_extension::autograd::{Tensors, checkpoint};

#[test]
fn gradients_agree_with_the_reference() {
    suites().iter().for_each(Suite::gradients_agree_with_the_reference);
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    suites().iter().for_each(Suite::with_and_without_a_graph_the_bits_are_the_same);
}

#[test]
fn gradcheck_of_every_small_sample() {
    suites().iter().for_each(Suite::gradcheck_of_every_small_sample);
}

#[test]
fn an_optimiser_may_change_the_bias_before_the_backward() {
    for device in devices() {
        let table = SampleTable::empty(DIMS, with_row).with_sizes(&[[3, 2, 3, 4]]);
        let leaves = leaves(&table.samples(Kind::Double, device).expect("samples")[0].inputs);
        let outputs = call(f_lltm, &leaves).expect("outputs");
        let _ = tch::no_grad(|| leaves[2].shallow_clone().fill_(5.0));
        let gradient =
            grad(&[&outputs[0].sum(Kind::Double)], &[&leaves[2]], &GradOptions::default());
        assert_eq!(
            gradient.expect("not refused, as the composite does not").get(0).expect("one").size(),
            [1, 12]
        );
    }
}

#[test]
fn an_output_that_was_changed_is_an_error_and_no_wrong_gradient() {
    for device in devices() {
        let leaves = leaves(&one([3, 2, 3, 4], Kind::Double, device).inputs);
        let outputs = whole(&leaves).expect("outputs");
        let loss = outputs[1].sum(Kind::Double);
        let _ = tch::no_grad(|| outputs[0].shallow_clone().fill_(5.0));
        let error = grad(&[&loss], &[&leaves[1]], &GradOptions::default())
            .expect_err("changed")
            .to_string();
        assert!(error.contains("in-place") || error.contains("inplace"), "{error}");
    }
}

/// What a backward pass does not read may be changed before it, as the composite allows: the last c of several
/// steps, as where the state of finished episodes is cleared; the output of one step, or with a frozen weight;
/// and the weight of one step without gradients for input and h.
#[test]
fn what_is_not_read_may_be_changed() {
    const ALL: usize = 0b11111;
    const WITHOUT_WEIGHT: usize = ALL & !0b10;
    for device in devices() {
        // (T, which arguments need a gradient, the output that changes or None for the weight)
        for (steps, needed, output) in
            [(3, ALL, Some(2)), (1, ALL, Some(0)), (3, WITHOUT_WEIGHT, Some(0)), (1, 0b10110, None)]
        {
            let sample = one([steps, 2, 3, 4], Kind::Float, device);
            let run = |changes: bool| {
                let inputs: Vec<Tensor> = sample
                    .inputs
                    .iter()
                    .enumerate()
                    .map(|(place, input)| {
                        input.detach().copy().set_requires_grad(needed >> place & 1 == 1)
                    })
                    .collect();
                let outputs = fused(&inputs).expect("outputs");
                let changed = output.map_or(&inputs[1], |output| &outputs[output]);
                if changes {
                    let _ = tch::no_grad(|| changed.shallow_clone().fill_(5.0));
                }
                let others = (0..3).filter(|place| Some(*place) != output);
                let of: Vec<&Tensor> = others.map(|place| &outputs[place]).collect();
                let vectors: Vec<Tensor> = of.iter().map(|of| support::incoming(of)).collect();
                let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
                let wanted: Vec<&Tensor> =
                    inputs.iter().filter(|input| input.requires_grad()).collect();
                let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
                grad(&of, &wanted, &options).expect("what was changed is not read").into_vec()
            };
            for (found, expected) in run(true).iter().zip(&run(false)) {
                let (found, expected) =
                    (found.as_ref().expect("one"), expected.as_ref().expect("one"));
                assert!(found.equal(expected), "{steps} steps, {needed:b}");
            }
        }
    }
}

/// Requests every subset of the gradients; only these must be computed.
#[test]
fn every_choice_of_gradients() {
    for device in devices() {
        let sample = one([4, 3, 2, 5], Kind::Double, device);
        let all = support::gradients(&fused, &leaves(&sample.inputs), &[0, 1, 2]);
        for choice in 1..32_usize {
            let inputs: Vec<Tensor> = (0..5)
                .map(|index| {
                    sample.inputs[index].detach().set_requires_grad(choice >> index & 1 == 1)
                })
                .collect();
            let outputs = fused(&inputs).expect("outputs");
            let vectors: Vec<Tensor> = outputs.iter().map(support::incoming).collect();
            let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
            let wanted: Vec<&Tensor> =
                inputs.iter().filter(|input| input.requires_grad()).collect();
            let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
            let found =
                grad(&outputs.iter().collect::<Vec<_>>(), &wanted, &options).expect("gradients");
            let expected = (0..5).filter(|index| choice >> index & 1 == 1).map(|index| &all[index]);
            for (found, expected) in found.into_vec().iter().zip(expected) {
                let (found, expected) =
                    (found.as_ref().expect("one"), expected.as_ref().expect("one"));
                assert!(found.equal(expected), "{choice:05b} on {device:?}");
            }
        }
    }
}

/// Splits a long sequence into pieces and keeps only the states between them.
#[test]
fn checkpoint_over_pieces_gives_the_same_bits() {
    fn piece(inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let inputs: Vec<Tensor> = inputs.iter().flatten().map(Tensor::shallow_clone).collect();
        fused(&inputs).map(Tensors::from)
    }
    for device in devices() {
        let sample = one([12, 3, 4, 17], Kind::Double, device);
        let run = |checkpoints: bool| {
            let leaves = leaves(&sample.inputs);
            let (mut h, mut c) = (leaves[3].shallow_clone(), leaves[4].shallow_clone());
            let mut loss = Tensor::zeros([], (Kind::Double, device));
            for start in [0, 4, 8] {
                let x = leaves[0].narrow(0, start, 4);
                let inputs = [Some(&x), Some(&leaves[1]), Some(&leaves[2]), Some(&h), Some(&c)];
                let outputs = if checkpoints {
                    checkpoint(piece, &inputs).expect("checkpoint")
                } else {
                    piece(&inputs.map(|input| input.map(Tensor::shallow_clone))).expect("piece")
                };
                let [output, last_h, last_c] = outputs.exactly().expect("three");
                loss += output.sin().sum(Kind::Double);
                (h, c) = (last_h, last_c);
            }
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            grad(&[&loss], &inputs, &GradOptions::default()).expect("gradients").into_vec()
        };
        for (with, without) in run(true).iter().flatten().zip(run(false).iter().flatten()) {
            assert!(with.equal(without), "on {device:?}");
        }
    }
}
