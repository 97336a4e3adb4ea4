//! Tests of the gradients.

use super::*;

#[test]
fn gradients_agree_with_the_reference() {
    for case in CASES.into_iter().chain(all_ways()) {
        case.suite(|suite| suite.gradients_agree_with_the_reference());
    }
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    for case in CASES.into_iter().chain(all_ways()) {
        case.suite(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
    }
}

#[test]
fn gradcheck_of_every_small_sample() {
    for case in CASES.into_iter().chain(all_ways()) {
        case.suite(|suite| suite.gradcheck_of_every_small_sample());
    }
}

/// The gradients of every subset of the inputs, because kernels omit the gradients that are not
/// needed.
#[test]
fn every_subset_of_gradients() {
    for case in std::iter::once(AFFINE).chain(all_ways()) {
        for device in devices() {
            for sizes in [[70, 17], [9, 600], [3, 9000]] {
                let sample = case.samples(&[sizes], Kind::Double, device).remove(0);
                let all = of_subset(case, &sample, usize::MAX);
                for subset in 1..1 << sample.inputs.len() {
                    let some = of_subset(case, &sample, subset);
                    for (index, all) in all.iter().enumerate() {
                        let wanted = subset >> index & 1 == 1;
                        assert_eq!(some[index].is_some(), wanted, "{index} of {subset:b}");
                        if let (Some(some), Some(all)) = (&some[index], all) {
                            assert_close(some, all, 1e-12, 1e-12);
                        }
                    }
                }
            }
        }
    }
}

fn of_subset(case: Case, sample: &Sample, subset: usize) -> Vec<Option<Tensor>> {
    let needs = |index: usize| subset >> index & 1 == 1;
    let inputs: Vec<Tensor> = sample
        .inputs
        .iter()
        .enumerate()
        .map(|(index, input)| input.detach().set_requires_grad(needs(index)))
        .collect();
    let output = case.fused(&inputs).expect("output").remove(0);
    let vector = support::incoming(&output);
    let wanted: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let mut found = grad(&[&output], &wanted, &options).expect("gradients").into_vec().into_iter();
    (0..inputs.len()).map(|index| needs(index).then(|| found.next().flatten()).flatten()).collect()
}

#[test]
fn what_the_backward_does_not_read_may_change_before_it() {
    for device in devices() {
        let sample = AFFINE.samples(&[[3, 5]], Kind::Double, device).remove(0);
        let leaves = leaves(&sample.inputs);
        let output = AFFINE.fused(&leaves).expect("output").remove(0).sum(Kind::Double);
        let of = |index: usize, keep: bool| {
            let options = GradOptions { retain_graph: Some(keep), ..Default::default() };
            grad(&[&output], &[&leaves[index]], &options)
        };
        let change = |index: usize| drop(tch::no_grad(|| leaves[index].shallow_clone().fill_(5.0)));
        change(2);
        of(1, true).expect("the bias is not read");
        change(0);
        of(2, true).expect("the input is not read for the bias");
        let error = of(0, false).expect_err("the input is read").to_string();
        assert!(error.contains("layer_norm") && error.contains("modified"), "{error}");
    }
}
