//! Three linear layers of one input: values and gradients of `linear`.

use support::gpu::caching_or_skip;
use support::leaves;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::Graph;
use tch_extension::ops::{f_linear, f_linear_each};
use tch_extension::testing::{
    assert_close, conformance, cuda_or_skip, devices, gradcheck, gradgradcheck,
};

type Op = fn(&[Tensor]) -> Result<[Tensor; 3]>;

/// Of an input, three weights and three biases, or none.
fn together(of: &[Tensor]) -> Result<[Tensor; 3]> {
    f_linear_each(&of[0], [1, 2, 3].map(|place| (&of[place], of.get(place + 3))))
}

fn apart(of: &[Tensor]) -> Result<[Tensor; 3]> {
    let [first, second, third] =
        [1, 2, 3].map(|place| f_linear(&of[0], &of[place], of.get(place + 3)));
    Ok([first?, second?, third?])
}

fn case(input: &[i64], outputs: [i64; 3], like: (Kind, Device)) -> Vec<Tensor> {
    let features = input[input.len() - 1];
    let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, like.1)).to_kind(like.0);
    let mut all = vec![random(input)];
    let scale = (features.max(1) as f64).sqrt().recip();
    all.extend(outputs.map(|out| random(&[out, features]) * scale));
    all.extend(outputs.map(|out| random(&[out])));
    all
}

/// The outputs, and the gradients of all arguments for those of the outputs that are wanted.
fn run(op: Op, arguments: &[Tensor], wanted: [bool; 3]) -> Vec<Option<Tensor>> {
    let leaves = leaves(arguments);
    let outputs = op(&leaves).expect("outputs");
    let there = outputs.iter().zip(wanted).filter_map(|(output, is)| is.then_some(output));
    let there: Vec<&Tensor> = there.collect();
    let grads: Vec<Tensor> = there.iter().map(|output| output.cos()).collect();
    let grads: Vec<_> = grads.iter().map(Some).collect();
    let options = GradOptions { grad_outputs: &grads, allow_unused: true, ..Default::default() };
    let of: Vec<&Tensor> = leaves.iter().collect();
    let found = grad(&there, &of, &options).expect("gradients").into_vec();
    outputs.iter().map(|output| Some(output.detach())).chain(found).collect()
}

fn assert_alike(found: &[Option<Tensor>], expected: &[Option<Tensor>], bound: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        match (found, expected) {
            (Some(found), Some(expected)) => assert_close(found, expected, bound, bound),
            // What no output needs has no gradient, or one of zeros.
            (found, expected) => {
                let one = found.as_ref().or(expected.as_ref());
                assert!(one.is_none_or(|one| !one.any().int64_value(&[]).is_positive()));
            }
        }
    }
}

const WANTED: [[bool; 3]; 4] =
    [[true; 3], [true, false, true], [false, true, false], [false, false, true]];

#[test]
fn each_agrees_with_linear() {
    for device in devices() {
        for (kind, bound) in
            [(Kind::Float, 1e-5), (Kind::Double, 1e-12), (Kind::Half, 5e-3), (Kind::BFloat16, 4e-2)]
        {
            for (input, outputs) in [
                (&[6, 8][..], [16, 16, 16]),
                (&[2, 5, 7], [24, 1, 3]),
                (&[3, 4], [8, 0, 4]),
                (&[0, 4], [8, 8, 8]),
                (&[9], [5, 7, 2]),
                (&[2, 300, 16], [64, 32, 32]),
            ] {
                let mut arguments = case(input, outputs, (kind, device));
                for count in [7, 4] {
                    arguments.truncate(count);
                    for wanted in WANTED {
                        let expected = run(apart, &arguments, wanted);
                        assert_alike(&run(together, &arguments, wanted), &expected, bound);
                    }
                }
            }
        }
    }
}

#[test]
fn each_has_second_derivatives_and_conforms() {
    for device in devices() {
        let arguments = leaves(&case(&[2, 3, 4], [3, 2, 2], (Kind::Double, device)));
        let inputs: Vec<&Tensor> = arguments.iter().collect();
        let op = |inputs: &[Tensor]| {
            let [q, k, v] = together(inputs)?;
            Ok([&q * &q, k.tanh(), v])
        };
        gradcheck(op, &inputs, &Default::default()).expect("first");
        gradgradcheck(op, &inputs, &Default::default()).expect("second");
        conformance(together, &inputs, &Default::default())
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn each_follows_autocast_and_names_what_does_not_fit() {
    for device in devices() {
        let arguments = case(&[6, 8], [16, 8, 8], (Kind::Float, device));
        {
            let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
            let expected = run(apart, &arguments, [true; 3]);
            assert_eq!(expected[0].as_ref().map(Tensor::kind), Some(Kind::BFloat16));
            assert_alike(&run(together, &arguments, [true; 3]), &expected, 4e-2);
        }
        let mut wrong = case(&[6, 8], [16, 8, 8], (Kind::Float, device));
        wrong[2] = wrong[2].narrow(1, 0, 7);
        let error = together(&wrong).unwrap_err().to_string();
        assert!(error.starts_with("linear: second: expected "), "{error}");
    }
}

/// Few rows of half kinds are one kernel, also of lengths that fill no tile.
#[test]
fn cuda_each_is_one_kernel_for_few_rows() {
    let name = "cuda_each_is_one_kernel_for_few_rows";
    let Some(device) = caching_or_skip(name) else { return };
    let _no_grad = tch::no_grad_guard();
    for kind in [Kind::Half, Kind::BFloat16] {
        for (features, outputs) in
            [(2048, [2048, 512, 512]), (1024, [4100, 17, 9]), (4096, [4096, 1024, 1025])]
        {
            for rows in [1, 2, 5, 8] {
                let mut arguments = case(&[rows, 1, features], outputs, (kind, device));
                for count in [7, 4] {
                    arguments.truncate(count);
                    let expected = apart(&arguments).unwrap().map(Some);
                    let (graph, found) =
                        Graph::capture(device, || together(&arguments)).expect("a graph");
                    graph.replay().expect("a replay");
                    assert_alike(&found.map(Some), &expected, 2e-2);
                    assert_eq!(graph.kernels(), 1, "{kind:?} {rows} {features} {outputs:?}");
                }
            }
        }
    }
}

/// More rows, other kinds and weights in other layouts take the ways of `linear`.
#[test]
fn cuda_each_takes_what_one_kernel_does_not() {
    let Some(device) = cuda_or_skip("cuda_each_takes_what_one_kernel_does_not") else { return };
    let _no_grad = tch::no_grad_guard();
    let compare = |arguments: &[Tensor], bound: f64| {
        let expected = apart(arguments).unwrap().map(Some);
        assert_alike(&together(arguments).unwrap().map(Some), &expected, bound);
    };
    for kind in [Kind::Float, Kind::Double] {
        compare(&case(&[2, 1024], [2048, 512, 512], (kind, device)), 1e-2);
    }
    for rows in [9, 16, 300] {
        compare(&case(&[rows, 1024], [2048, 512, 512], (Kind::BFloat16, device)), 4e-2);
    }
    let mut arguments = case(&[4, 1024], [2048, 512, 512], (Kind::BFloat16, device));
    arguments[2] = arguments[2].tr().contiguous().tr();
    compare(&arguments, 4e-2);
    // Weights that begin at any address.
    let all = case(&[4, 1024], [2048, 512, 512], (Kind::BFloat16, device));
    let moved = all.iter().map(|tensor| {
        let flat =
            Tensor::cat(&[&tensor.zeros_like().view([-1]).narrow(0, 0, 1), &tensor.view([-1])], 0);
        flat.narrow(0, 1, tensor.numel() as i64).view(tensor.size().as_slice())
    });
    compare(&moved.collect::<Vec<_>>(), 4e-2);
}
