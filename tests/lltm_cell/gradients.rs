//! Tests of the gradients.

use super::*;

#[test]
fn gradients_agree_with_the_reference() {
    suite().gradients_agree_with_the_reference();
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    suite().with_and_without_a_graph_the_bits_are_the_same();
}

#[test]
fn gradcheck_of_every_small_sample() {
    suite().gradcheck_of_every_small_sample();
}

#[test]
fn an_optimiser_may_change_the_bias_before_the_backward() {
    for device in devices() {
        let table = SampleTable::empty(DIMS, with_row).with_sizes(&[[2, 3, 4]]);
        let leaves = leaves(&table.samples(Kind::Double, device).expect("samples")[0].inputs);
        let outputs = call(f_lltm_cell, &leaves).expect("outputs");
        let _ = tch::no_grad(|| leaves[2].shallow_clone().fill_(5.0));
        let gradient =
            grad(&[&outputs[0].sum(Kind::Double)], &[&leaves[2]], &GradOptions::default());
        assert_eq!(
            gradient.expect("not refused, as the composite does not").get(0).expect("one").size(),
            [1, 12]
        );
    }
}
