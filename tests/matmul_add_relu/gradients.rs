//! Tests of the gradients.

use super::*;
use patterns::noise;
use tch_extension::ops::{ProductWay, f_matmul_add_relu, force};
use tch_extension::testing::{assert_as_accurate, gradcheck};

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

/// Sizes with several slabs of rows: on the CPU, on CUDA with whole vectors, and on CUDA without.
#[test]
fn gradcheck_of_every_way_to_sum() {
    let patterns: [Pattern; 3] =
        [(&[1030, 1], &[1, 2], &[2]), (&[257, 1], &[1, 34], &[34]), (&[257, 1], &[1, 33], &[33])];
    for device in devices() {
        for sample in samples(&patterns, Kind::Double, device) {
            let leaves = leaves(&sample.inputs);
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            gradcheck(fused, &inputs, &Default::default())
                .unwrap_or_else(|error| panic!("{} on {device:?}: {error}", sample.name));
        }
    }
}

/// Each element of dz counts once in its row's and its column's sum. The numbers are integers,
/// whose sums are exact.
#[test]
fn every_element_counts_once() {
    for device in devices() {
        for kind in [Kind::Double, Kind::Float] {
            for rows in [0, 1, 2, 31, 33, 255, 256, 1024, 1025, 2049] {
                for columns in [1, 2, 3, 4, 8, 15, 63, 64, 65, 127, 130] {
                    let options = (kind, device);
                    let numbers =
                        Tensor::arange(rows * columns, (Kind::Int64, device)).view([rows, columns]);
                    // The ReLU cuts off every third element.
                    let lhs = (numbers.remainder(3) - 1).to_kind(kind).sign();
                    let rhs = Tensor::eye(columns, options);
                    let vector = (numbers.remainder(11) + 1).to_kind(kind);
                    let expected = &vector * lhs.gt(-0.5).to_kind(kind);
                    let bias = Tensor::full([columns], 0.5, options);
                    let inputs = leaves(&[lhs, rhs, bias]);
                    let found = results(f_matmul_add_relu, &inputs, |_| vector.shallow_clone());
                    let context = format!("{rows} × {columns} {kind:?} {device:?}");
                    assert!(found[1].equal(&expected), "dz of {context}");
                    let sums = expected.sum_dim_intlist([0_i64].as_slice(), false, kind);
                    assert!(found[3].equal(&sums), "dbias of {context}");
                }
            }
        }
    }
}

#[test]
fn long_sums_are_as_accurate_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            for (rows, columns) in [(20_000, 70), (100_000, 3)] {
                let options = (kind, device);
                let (lhs, rhs) =
                    (Tensor::zeros([rows, 1], options), Tensor::zeros([1, columns], options));
                let bias = Tensor::ones([columns], options).set_requires_grad(true);
                let vector =
                    (noise(&[rows, columns], 5) * 0.1 + 0.01).to_kind(kind).to_device(device);
                let exact =
                    vector.to_kind(Kind::Double).sum_dim_intlist([0_i64].as_slice(), false, None);
                let [found, expected] = OPERATORS.map(|operator| {
                    let inputs = [lhs.shallow_clone(), rhs.shallow_clone(), bias.shallow_clone()];
                    results(operator, &inputs, |_| vector.shallow_clone()).remove(1)
                });
                assert_as_accurate(&found, &expected, &exact);
            }
        }
    }
}

#[test]
fn any_set_of_inputs_may_need_gradients() {
    for device in devices() {
        for sample in
            samples(&[SMALL[0], SMALL[2], SMALL[3], SMALL[8], SMALL[50]], Kind::Double, device)
        {
            for set in 1..8 {
                let input = |(index, input): (usize, &Tensor)| {
                    input.detach().set_requires_grad(set & (1 << index) != 0)
                };
                let inputs: Vec<Tensor> = sample.inputs.iter().enumerate().map(input).collect();
                let [found, expected] =
                    OPERATORS.map(|operator| results(operator, &inputs, support::incoming));
                assert_eq!(
                    (found.len(), found.len()),
                    (expected.len(), 1 + (set as u32).count_ones() as usize)
                );
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, 1e-13, 1e-13);
                }
            }
        }
    }
}

/// A tensor that the backward does not need may be changed before it; a tensor that it needs may
/// not.
#[test]
fn only_what_a_gradient_needs_is_kept() {
    const OUTPUT: usize = 3;
    for device in devices() {
        for (needs, changed, refused) in [
            (0, 0, false),
            (0, 1, true),
            (0, 2, false),
            (0, OUTPUT, true),
            (1, 0, true),
            (1, 1, false),
            (1, 2, false),
            (2, 0, false),
            (2, 1, false),
            (2, 2, false),
            (2, OUTPUT, true),
        ] {
            let sample = sample(SMALL[0], [Layout::Contiguous; 3], Kind::Double, device);
            let inputs: Vec<Tensor> = sample.inputs.iter().map(Tensor::copy).collect();
            let inputs: Vec<Tensor> = inputs
                .into_iter()
                .enumerate()
                .map(|(index, input)| input.set_requires_grad(index == needs))
                .collect();
            for operator in OPERATORS {
                let output = call(operator, &inputs).expect("output");
                let target = inputs.get(changed).unwrap_or(&output);
                tch::no_grad(|| drop(target.shallow_clone().fill_(2.0)));
                let found =
                    grad(&[&output.sum(Kind::Double)], &[&inputs[needs]], &GradOptions::default());
                assert_eq!(found.is_err(), refused, "gradient of {needs}, changed {changed}");
            }
        }
    }
}

/// Both ways to multiply on the CPU, in both directions: with partial tiles, whole tiles, and
/// transposed factors.
#[test]
fn gradcheck_of_own_products_and_libtorchs_on_the_cpu() {
    let patterns: [Pattern; 3] =
        [(&[2, 3], &[3, 17], &[17]), (&[9, 5], &[5, 16], &[16]), (&[2, 3, 2], &[2, 33], &[3, 33])];
    for way in [ProductWay::Automatic, ProductWay::Composite] {
        let by = |arguments: &[Tensor]| {
            Ok(vec![force(way, || f_matmul_add_relu(&arguments[0], &arguments[1], &arguments[2]))?])
        };
        for sample in samples(&patterns, Kind::Double, Device::Cpu) {
            let leaves = leaves(&sample.inputs);
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            gradcheck(by, &inputs, &Default::default())
                .unwrap_or_else(|error| panic!("{} by {way:?}: {error}", sample.name));
        }
    }
}

/// With the composite way, the products of the backward are libtorch's, too.
#[test]
fn the_composite_s_products_are_libtorchs_on_the_cpu() {
    let options = (Kind::Float, Device::Cpu);
    let [lhs, rhs] =
        [[300, 32], [32, 48]].map(|size: [i64; 2]| noise(&size, 0).to_kind(Kind::Float));
    // With this bias, the ReLU cuts nothing off.
    let bias = Tensor::full([48], 1e3, options);
    let vector = noise(&[300, 48], 3).to_kind(Kind::Float);
    let inputs = leaves(&[lhs, rhs, bias]);
    let output =
        force(ProductWay::Composite, || f_matmul_add_relu(&inputs[0], &inputs[1], &inputs[2]));
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let gradients =
        grad(&[&output.expect("output")], &[&inputs[1]], &options).expect("gradients").into_vec();
    let expected = inputs[0].detach().transpose(0, 1).mm(&vector);
    assert!(gradients[0].as_ref().expect("a gradient").equal(&expected));
}
