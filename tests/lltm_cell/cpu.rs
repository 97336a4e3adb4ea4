//! Tests of both ways of computing the cell on the CPU, at all sizes: with our own products and
//! with libtorch's.

use super::*;
use tch_extension::ops::{LltmCellWay, f_lltm_cell, force};

fn by(way: LltmCellWay, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let (x, w, b, h, c) = match arguments {
        [x, w, b, h, c] => (x, w, Some(b), h, c),
        [x, w, h, c] => (x, w, None, h, c),
        _ => unreachable!("four or five arguments"),
    };
    let (new_h, new_c) = force(way, || f_lltm_cell(x, w, b, (h, c)))?;
    Ok(vec![new_h, new_c])
}

fn only_on_cpu(samples: fn(Kind, Device) -> Vec<Sample>) -> impl Fn(Kind, Device) -> Vec<Sample> {
    move |kind, device| if device == Device::Cpu { samples(kind, device) } else { Vec::new() }
}

/// Whole tiles of each size and parts of them, for every instruction set.
fn ragged(kind: Kind, device: Device) -> Vec<Sample> {
    // One vector of rows, two, and a third one; whole blocks of hidden columns and parts; no
    // features; the widest weight that our products support, and one that is too wide.
    let sizes = [[8, 16, 32], [17, 9, 35], [70, 5, 16], [2, 0, 31], [33, 24, 1000], [4, 25, 1000]];
    let tables = [
        SampleTable::empty(DIMS, with_row).with_sizes(&sizes).samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&sizes[..2]).samples(kind, device),
    ];
    let ragged = tables.into_iter().flat_map(|samples| samples.expect("samples"));
    large(kind, device).into_iter().chain(ragged).collect()
}

fn on_each_way(body: impl Fn(&Suite<'_>)) {
    for way in [LltmCellWay::Product, LltmCellWay::Fused] {
        let fused = |arguments: &[Tensor]| by(way, arguments);
        let (small, large) = (only_on_cpu(small), only_on_cpu(ragged));
        body(&Suite { fused: &fused, small: &small, large: &large, ..suite() });
    }
}

#[test]
fn each_path_s_outputs_agree_with_the_reference() {
    on_each_way(|suite| suite.forward_agrees_with_the_reference());
}

#[test]
fn each_path_s_gradients_agree_with_the_reference() {
    on_each_way(|suite| suite.gradients_agree_with_the_reference());
}

#[test]
fn each_path_has_the_same_bits_with_and_without_a_graph() {
    on_each_way(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
}

#[test]
fn gradcheck_of_each_way() {
    on_each_way(|suite| suite.gradcheck_of_every_small_sample());
}

/// Each sum is computed by one thread, however the work is divided.
#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let sample = one([33, 40, 100], Kind::Float, Device::Cpu);
    let results = |threads| {
        tch::set_num_threads(threads);
        let leaves = leaves(&sample.inputs);
        let outputs = by(LltmCellWay::Fused, &leaves).expect("outputs");
        let vectors = [Some(&sample.inputs[3]), Some(&sample.inputs[4])];
        let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let gradients = grad(&[&outputs[0], &outputs[1]], &inputs, &options).expect("gradients");
        outputs.into_iter().chain(gradients.into_vec().into_iter().flatten()).collect::<Vec<_>>()
    };
    let threads = tch::get_num_threads();
    let one = results(1);
    // Fewer threads than pieces, more threads, and a number that divides none.
    let others = [2, 5, 7, 16].map(results);
    tch::set_num_threads(threads);
    assert_eq!(one.len(), 7);
    for other in others {
        assert!(one.iter().zip(&other).all(|(one, other)| one.equal(other)));
    }
}

/// Our own formulas replace Sleef's functions. They must be accurate over the whole range and at
/// its ends.
#[test]
fn the_activations_are_as_precise_as_libtorchs() {
    let magnitudes = Tensor::logspace(-30, 2, 4001, 10.0, (Kind::Double, Device::Cpu));
    let ends = Tensor::from_slice(&[0.0, f64::INFINITY, f64::NAN, 1e-40]);
    let values = Tensor::cat(&[&magnitudes, &-&magnitudes, &ends, &-&ends], 0).to_kind(Kind::Float);
    let n = values.numel() as i64;
    let zeros = |columns| Tensor::zeros([n, columns], (Kind::Float, Device::Cpu));
    let open = 100.0_f32;
    // The gates consist of the bias alone. i and o are open, so c' is elu(g) or c, and h' is its
    // tanh.
    let bias_of = |g: &Tensor| {
        let gates = Tensor::full([2], f64::from(open), (Kind::Float, Device::Cpu));
        Tensor::cat(&[&gates, &g.reshape([1])], 0)
    };
    let weight = Tensor::zeros([3, 1], (Kind::Float, Device::Cpu));
    let none = Tensor::zeros([n, 0], (Kind::Float, Device::Cpu));
    let closed = bias_of(&Tensor::from(0.0_f32));
    for way in [LltmCellWay::Product, LltmCellWay::Fused] {
        let (new_h, new_c) = force(way, || {
            f_lltm_cell(&none, &weight, Some(&closed), (&zeros(1), &values.reshape([n, 1])))
        })
        .expect("a step");
        assert!(new_c.reshape([-1]).allclose(&values, 0.0, 0.0, true));
        precise(&new_h.reshape([-1]), &values.to_kind(Kind::Double).tanh());
        // g is x itself, because x is the only feature and its weight is 1.
        let one = Tensor::from_slice(&[0.0_f32, 0.0, 0.0, 0.0, 0.0, 1.0]).reshape([3, 2]);
        let (_, new_c) = force(way, || {
            f_lltm_cell(&values.reshape([n, 1]), &one, Some(&closed), (&zeros(1), &zeros(1)))
        })
        .expect("a step");
        // A sum that contains 0 times infinity, or NaN, is NaN, so only finite values are compared.
        let finite = values.isfinite();
        let elu = values.to_kind(Kind::Double).elu();
        precise(&new_c.reshape([-1]).masked_select(&finite), &elu.masked_select(&finite));
    }
}

/// Checks that the values are equal within three units in the last place.
fn precise(found: &Tensor, expected: &Tensor) {
    let rounded = expected.to_kind(Kind::Float).to_kind(Kind::Double);
    assert!(found.to_kind(Kind::Double).allclose(&rounded, 3.6e-7, 2e-45, true), "{found:?}");
}
