//! Linear's output in three parts: values and gradients of `linear` and a split, bit by bit.

use support::gpu::caching_or_skip;
use support::leaves;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::Graph;
use tch_extension::ops::{f_linear, f_linear_parts};
use tch_extension::testing::{
    assert_close, conformance, cuda_or_skip, devices, gradcheck, gradgradcheck,
};

type Op = fn(&Tensor, &Tensor, Option<&Tensor>, [i64; 3]) -> Result<[Tensor; 3]>;

fn split(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: [i64; 3],
) -> Result<[Tensor; 3]> {
    let all = f_linear(input, weight, bias)?;
    let parts: [Tensor; 3] = all.f_split_with_sizes(sizes, -1)?.try_into().expect("three parts");
    Ok(parts)
}

/// The parts, and the gradients of the arguments for these of the parts.
fn run(op: Op, arguments: &[Tensor], sizes: [i64; 3], grads: &[Option<Tensor>; 3]) -> Vec<Tensor> {
    let leaves = leaves(arguments);
    let parts = op(&leaves[0], &leaves[1], leaves.get(2), sizes).expect("parts");
    let there = parts.iter().zip(grads).filter_map(|(part, grad)| Some((part, grad.as_ref()?)));
    let (outputs, grads): (Vec<&Tensor>, Vec<_>) = there.map(|(part, of)| (part, Some(of))).unzip();
    let options = GradOptions { grad_outputs: &grads, ..Default::default() };
    let wanted: Vec<&Tensor> = leaves.iter().collect();
    let found = grad(&outputs, &wanted, &options).expect("gradients").into_vec();
    let gradients = found.into_iter().map(|gradient| gradient.expect("one"));
    parts.iter().map(Tensor::detach).chain(gradients).collect()
}

/// Arguments with `sizes.sum()` outputs, `rows` rows in two leading dimensions, and gradients of the parts.
fn case(
    [rows, features]: [i64; 2],
    sizes: [i64; 3],
    kind: Kind,
    device: Device,
) -> (Vec<Tensor>, [Option<Tensor>; 3]) {
    let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, device)).to_kind(kind);
    let out = sizes.iter().sum();
    let arguments = vec![random(&[2, rows, features]), random(&[out, features]), random(&[out])];
    (arguments, sizes.map(|size| Some(random(&[2, rows, size]))))
}

fn assert_same_bits(found: &[Tensor], expected: &[Tensor], case: &str) {
    assert_eq!(found.len(), expected.len());
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()), "{case}");
        assert!(found.equal(expected), "{place} of {case}");
    }
}

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Parts of whole and of odd rows, of one size and of others, none, and more rows than one slab has.
const CASES: [([i64; 2], [i64; 3]); 7] = [
    ([6, 8], [16, 16, 16]),
    ([5, 7], [24, 8, 16]),
    ([9, 3], [5, 1, 2]),
    ([3, 4], [8, 0, 4]),
    ([0, 4], [8, 8, 8]),
    ([700, 16], [64, 32, 32]),
    ([2100, 8], [8, 24, 8]),
];

fn agrees_with_a_split(device: Device) {
    for kind in KINDS {
        for (input, sizes) in CASES {
            let (mut arguments, grads) = case(input, sizes, kind, device);
            for has_bias in [true, false] {
                arguments.truncate(if has_bias { 3 } else { 2 });
                // With gaps, and missing ones, whose place zeros take.
                let with_gaps = grads.each_ref().map(|grad| {
                    let grad = grad.as_ref().expect("one");
                    Some(Tensor::cat(&[grad, grad], -1).narrow(-1, 0, grad.size()[2]))
                });
                let [first, second, third] =
                    grads.each_ref().map(|grad| grad.as_ref().map(Tensor::shallow_clone));
                let some = [first, None, third];
                let one = [None, second, None];
                for (which, grads) in [&grads, &with_gaps, &some, &one].into_iter().enumerate() {
                    let case =
                        format!("{input:?} {sizes:?} {kind:?} {has_bias} {which} {device:?}");
                    let found = run(f_linear_parts, &arguments, sizes, grads);
                    let expected = run(split, &arguments, sizes, grads);
                    assert_same_bits(&found, &expected, &case);
                }
            }
        }
    }
}

#[test]
fn parts_have_the_bits_of_a_split() {
    agrees_with_a_split(Device::Cpu);
}

#[test]
fn cuda_parts_have_the_bits_of_a_split() {
    let Some(device) = cuda_or_skip("cuda_parts_have_the_bits_of_a_split") else { return };
    agrees_with_a_split(device);
    // GPT-2's, and sums of many slabs.
    for (input, sizes) in [([8192, 64], [768, 768, 768]), ([30_000, 8], [8, 8, 8])] {
        let (arguments, grads) = case(input, sizes, Kind::BFloat16, device);
        let found = run(f_linear_parts, &arguments, sizes, &grads);
        assert_same_bits(&found, &run(split, &arguments, sizes, &grads), "large");
    }
}

/// No kernel of libtorch's concatenation is left, and a replay has the same bits.
#[test]
fn cuda_parts_are_concatenated_by_the_sums_of_the_bias() {
    let name = "cuda_parts_are_concatenated_by_the_sums_of_the_bias";
    let Some(device) = caching_or_skip(name) else { return };
    let sizes = [64, 32, 32];
    let (arguments, grads) = case([500, 64], sizes, Kind::BFloat16, device);
    let expected = run(split, &arguments, sizes, &grads);
    let concatenations = |op: Op| {
        let _ = run(op, &arguments, sizes, &grads);
        let leaves = leaves(&arguments);
        let (graph, found) = Graph::capture(device, || {
            let parts = op(&leaves[0], &leaves[1], leaves.get(2), sizes)?;
            let outputs: Vec<&Tensor> = parts.iter().collect();
            let grads: Vec<_> = grads.iter().map(Option::as_ref).collect();
            let options = GradOptions { grad_outputs: &grads, ..Default::default() };
            let wanted: Vec<&Tensor> = leaves.iter().collect();
            Ok(grad(&outputs, &wanted, &options)?.into_vec())
        })
        .expect("a graph");
        graph.replay().expect("a replay");
        let found: Vec<Tensor> = found.into_iter().map(Option::unwrap).collect();
        assert_same_bits(&found, &expected[3..], "captured");
        let names = graph.kernel_names().expect("names");
        names.iter().filter(|(name, _)| name.contains("CatArray")).count()
    };
    assert_eq!((concatenations(split), concatenations(f_linear_parts)), (1, 0));
}

#[test]
fn parts_under_autocast_are_those_of_a_split() {
    for device in devices() {
        let (arguments, grads) = case([6, 8], [16, 8, 8], Kind::Float, device);
        let grads = grads.map(|grad| grad.map(|grad| grad.to_kind(Kind::BFloat16)));
        let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
        let of = |op: Op| run(op, &arguments, [16, 8, 8], &grads);
        assert_same_bits(&of(f_linear_parts), &of(split), "autocast");
    }
}

#[test]
fn parts_have_second_derivatives_conform_and_may_be_changed_in_place() {
    for device in devices() {
        let inputs = [&[3, 4][..], &[7, 4], &[7]];
        let inputs =
            inputs.map(|size| Tensor::randn(size, (Kind::Double, device)).set_requires_grad(true));
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let op = |inputs: &[Tensor]| {
            let [q, k, v] = f_linear_parts(&inputs[0], &inputs[1], Some(&inputs[2]), [3, 2, 2])?;
            Ok([&q * &q, k.tanh(), v])
        };
        gradcheck(op, &inputs, &Default::default()).expect("first");
        gradgradcheck(op, &inputs, &Default::default()).expect("second");
        let apart = |inputs: &[Tensor]| {
            let parts = f_linear_parts(&inputs[0], &inputs[1], Some(&inputs[2]), [3, 2, 2])?;
            Ok(parts.map(|part| part * 1.0))
        };
        conformance(apart, &inputs, &Default::default()).unwrap_or_else(|error| panic!("{error}"));
        let of = |is_in_place: bool| {
            let parts = f_linear_parts(inputs[0], inputs[1], Some(inputs[2]), [3, 2, 2]);
            let [q, k, v] = parts.expect("parts");
            let q = if is_in_place {
                q.shallow_clone().f_mul_scalar_(2.0)
            } else {
                q.f_mul_scalar(2.0)
            };
            let q = q.expect("twice");
            let loss = (&q * &q).sum(Kind::Double) + k.sum(Kind::Double) + v.sum(Kind::Double);
            let found = grad(&[&loss], &inputs, &Default::default()).expect("gradients");
            found.into_vec().into_iter().map(Option::unwrap).collect::<Vec<_>>()
        };
        for (found, expected) in of(true).iter().zip(&of(false)) {
            assert_close(found, expected, 1e-12, 1e-12);
        }
        let error = f_linear_parts(inputs[0], inputs[1], None, [3, 2, 1]).unwrap_err().to_string();
        assert!(error.contains("linear: weight") && error.contains("[3, 2, 1]"), "{error}");
    }
}
