//! `ops::lltm_cell` against its reference, against finite differences, and against bad input.

mod support;

#[cfg(tch_extension_cuda)]
use std::io::Write;
use tch::{Device, IndexOp, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_lltm_cell, lltm_cell, lltm_cell_reference};
use tch_extension::testing::{GradcheckOptions, assert_close, devices, gradcheck, tolerance};

const KINDS: [Kind; 2] = [Kind::Float, Kind::Double];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bias {
    None,
    Flat,
    Row,
}

/// How the arguments lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    Contiguous,
    /// The transpose of a contiguous tensor.
    Transposed,
    /// Every second column of a wider tensor.
    Sliced,
    /// Contiguous, but starting one element into its storage: not on a 16-byte boundary.
    Offset,
    /// One row repeated without a copy.
    Expanded,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    batch: i64,
    features: i64,
    hidden: i64,
    bias: Bias,
    layout: Layout,
}

const fn sample(batch: i64, features: i64, hidden: i64, bias: Bias, layout: Layout) -> Sample {
    Sample { batch, features, hidden, bias, layout }
}

/// Small enough for a whole Jacobian; each is there for a reason.
const SMALL: &[Sample] = &[
    sample(3, 4, 5, Bias::Flat, Layout::Contiguous), // no multiple of any vector
    sample(2, 3, 8, Bias::None, Layout::Contiguous), // whole vectors on CPU (f32, f64) and GPU
    sample(1, 1, 1, Bias::Row, Layout::Contiguous),  // one of everything
    sample(2, 3, 4, Bias::Flat, Layout::Offset),     // whole vectors, but misaligned
    sample(2, 3, 6, Bias::Row, Layout::Sliced),
    sample(3, 2, 4, Bias::Flat, Layout::Transposed),
    sample(0, 3, 4, Bias::Flat, Layout::Contiguous), // no rows
    sample(2, 0, 3, Bias::Flat, Layout::Contiguous), // no features
    sample(2, 3, 0, Bias::Flat, Layout::Contiguous), // no state
];

/// Too large for a Jacobian.
const LARGE: &[Sample] = &[
    sample(16, 32, 128, Bias::Flat, Layout::Contiguous), // the tutorial's
    sample(64, 7, 17, Bias::Flat, Layout::Contiguous),   // one column behind two vectors
    sample(5, 3, 1029, Bias::None, Layout::Contiguous),  // a second, short piece of a row on CPU
    sample(2, 3, 2051, Bias::Row, Layout::Offset),
    sample(33, 20, 64, Bias::Flat, Layout::Transposed),
    sample(33, 20, 64, Bias::Flat, Layout::Expanded),
    sample(300, 8, 40, Bias::Flat, Layout::Sliced), // several threads on CPU
];

/// x, W, b?, h, c: what the operator takes.
struct Arguments(Vec<Tensor>);

/// A tensor of this layout with these values (drawn in f64 on the CPU, so that every kind and device
/// sees the same numbers).
fn lay_out(values: &Tensor, layout: Layout, kind: Kind, device: Device) -> Tensor {
    let (rows, columns) = values.size2().expect("a matrix");
    let zeros = |size: &[i64]| Tensor::zeros(size, (kind, device));
    let place = match layout {
        Layout::Contiguous => zeros(&[rows, columns]),
        Layout::Transposed => zeros(&[columns, rows]).transpose(0, 1),
        Layout::Sliced => zeros(&[rows, 2 * columns + 1]).slice(1, 1, 2 * columns + 1, 2),
        Layout::Offset => zeros(&[rows * columns + 1]).slice(0, 1, None, 1).view([rows, columns]),
        Layout::Expanded => {
            return values.narrow(0, 0, 1).to_kind(kind).to_device(device).expand([rows, columns], false);
        }
    };
    place.shallow_clone().copy_(values);
    place
}

impl Sample {
    fn arguments(&self, kind: Kind, device: Device) -> Arguments {
        tch::manual_seed(7);
        let Sample { batch, features, hidden, bias, layout } = *self;
        let make = |rows, columns| {
            let values = Tensor::randn([rows, columns], (Kind::Double, Device::Cpu));
            lay_out(&values, layout, kind, device)
        };
        let input = make(batch, features);
        let weight = make(3 * hidden, hidden + features) / ((hidden + features) as f64).sqrt();
        let bias = match bias {
            Bias::None => None,
            Bias::Flat => Some(make(1, 3 * hidden).reshape([3 * hidden])),
            Bias::Row => Some(make(1, 3 * hidden)),
        };
        let state = [make(batch, hidden), make(batch, hidden)];
        Arguments([input, weight].into_iter().chain(bias).chain(state).collect())
    }
}

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

fn call(cell: Cell, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let (new_h, new_c) = match arguments {
        [x, w, b, h, c] => cell(x, w, Some(b), (h, c)),
        [x, w, h, c] => cell(x, w, None, (h, c)),
        _ => unreachable!("four or five arguments"),
    }?;
    Ok(vec![new_h, new_c])
}

impl Arguments {
    /// The same values and layouts as leaves that require grad.
    fn leaves(&self) -> Vec<Tensor> {
        self.0.iter().map(|tensor| tensor.detach().set_requires_grad(true)).collect()
    }
}

/// A fixed, non-uniform, non-contiguous incoming gradient.
fn incoming(output: &Tensor) -> Tensor {
    let (rows, columns) = output.size2().expect("[B, H]");
    let values = Tensor::arange(rows * columns, (Kind::Double, Device::Cpu)).sin() + 0.3;
    values.view([columns, rows]).transpose(0, 1).to_kind(output.kind()).to_device(output.device())
}

fn gradients(cell: Cell, leaves: &[Tensor], used: &[usize]) -> Vec<Option<Tensor>> {
    let outputs = call(cell, leaves).expect("outputs");
    let outputs: Vec<&Tensor> = used.iter().map(|&index| &outputs[index]).collect();
    let vectors: Vec<Tensor> = outputs.iter().map(|output| incoming(output)).collect();
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let options = GradOptions { grad_outputs: &vectors, allow_unused: true, ..Default::default() };
    grad(&outputs, &inputs, &options).expect("gradients").into_vec()
}

fn for_each(samples: &[&[Sample]], mut test: impl FnMut(Sample, Kind, Device)) {
    for device in devices() {
        for kind in KINDS {
            for sample in samples.iter().copied().flatten() {
                test(*sample, kind, device);
            }
        }
    }
}

/// How far sums of this many products may drift apart when they are added in another order.
fn bounds(sample: Sample, kind: Kind) -> (f64, f64) {
    let terms = (sample.hidden + sample.features).max(sample.batch).max(1) as f64;
    let (rtol, atol) = match kind {
        Kind::Double => (1e-13, 1e-13),
        _ => tolerance(kind),
    };
    (rtol * terms.sqrt(), atol * terms.sqrt())
}

#[test]
fn forward_agrees_with_the_reference() {
    for_each(&[SMALL, LARGE], |sample, kind, device| {
        let arguments = sample.arguments(kind, device).0;
        let before: Vec<Tensor> = arguments.iter().map(Tensor::copy).collect();
        let fused = call(f_lltm_cell, &arguments).expect("fused");
        let expected = call(lltm_cell_reference, &arguments).expect("reference");
        let (rtol, atol) = bounds(sample, kind);
        for (fused, expected) in fused.iter().zip(&expected) {
            assert_eq!(
                (fused.device(), fused.size()),
                (device, vec![sample.batch, sample.hidden]),
                "{sample:?}"
            );
            assert!(fused.is_contiguous() && !fused.requires_grad());
            assert_close(fused, expected, rtol, atol);
        }
        for (now, then) in arguments.iter().zip(&before) {
            assert!(now.equal(then), "{sample:?}: an argument was changed");
        }
    });
}

#[test]
fn gradients_agree_with_the_reference() {
    for_each(&[SMALL, LARGE], |sample, kind, device| {
        // From both outputs, and from each alone: then the other's gradient is undefined.
        for used in [&[0, 1][..], &[0], &[1]] {
            let arguments = sample.arguments(kind, device);
            let fused = gradients(f_lltm_cell, &arguments.leaves(), used);
            let expected = gradients(lltm_cell_reference, &arguments.leaves(), used);
            let (rtol, atol) = bounds(sample, kind);
            for (index, (fused, expected)) in fused.iter().zip(&expected).enumerate() {
                let fused = fused.as_ref().unwrap_or_else(|| panic!("{sample:?}: no gradient for {index}"));
                // The reference finds no path from c' to the output gate; ours says zero.
                let zeros = fused.zeros_like();
                assert_close(fused, expected.as_ref().unwrap_or(&zeros), 10.0 * rtol, 10.0 * atol);
            }
        }
    });
}

#[test]
fn with_and_without_a_graph_the_outputs_are_the_same_bits() {
    for_each(&[SMALL, LARGE], |sample, kind, device| {
        let arguments = sample.arguments(kind, device);
        let without = call(f_lltm_cell, &arguments.0).expect("without");
        let with = call(f_lltm_cell, &arguments.leaves()).expect("with");
        let again = call(f_lltm_cell, &arguments.leaves()).expect("again");
        for ((without, with), again) in without.iter().zip(&with).zip(&again) {
            assert!(without.equal(with) && with.equal(again), "{sample:?} {kind:?} {device:?}");
        }
        let all = [0, 1];
        let first = gradients(f_lltm_cell, &arguments.leaves(), &all);
        let second = gradients(f_lltm_cell, &arguments.leaves(), &all);
        for (first, second) in first.iter().flatten().zip(second.iter().flatten()) {
            assert!(first.equal(second), "{sample:?} {kind:?} {device:?}: gradients differ between runs");
        }
    });
}

#[test]
fn only_the_gradients_that_are_asked_for() {
    for device in devices() {
        let arguments = sample(3, 4, 5, Bias::Flat, Layout::Contiguous).arguments(Kind::Double, device);
        let all = gradients(f_lltm_cell, &arguments.leaves(), &[0, 1]);
        for subset in 1..(1 << arguments.0.len()) {
            let leaves: Vec<Tensor> = (0..arguments.0.len())
                .map(|index| arguments.0[index].detach().set_requires_grad(subset >> index & 1 == 1))
                .collect();
            let outputs = call(f_lltm_cell, &leaves).expect("outputs");
            let wanted: Vec<usize> = (0..leaves.len()).filter(|index| subset >> index & 1 == 1).collect();
            let inputs: Vec<&Tensor> = wanted.iter().map(|&index| &leaves[index]).collect();
            let vectors = [incoming(&outputs[0]), incoming(&outputs[1])];
            let vectors = [Some(&vectors[0]), Some(&vectors[1])];
            let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
            let found = grad(&[&outputs[0], &outputs[1]], &inputs, &options).expect("gradients");
            for (&index, found) in wanted.iter().zip(found.iter()) {
                let (found, expected) =
                    (found.as_ref().expect("asked for"), all[index].as_ref().expect("present"));
                assert_close(found, expected, 1e-12, 1e-12);
            }
        }
    }
}

#[test]
fn gradcheck_of_every_small_sample() {
    for device in devices() {
        for sample in SMALL {
            let leaves = sample.arguments(Kind::Double, device).leaves();
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            gradcheck(|inputs| call(f_lltm_cell, inputs), &inputs, &GradcheckOptions::default())
                .unwrap_or_else(|error| panic!("{sample:?} on {device:?}: {error}"));
        }
    }
}

#[test]
fn gradcheck_of_the_gradient() {
    for device in devices() {
        for sample in &SMALL[..4] {
            let leaves = sample.arguments(Kind::Double, device).leaves();
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            let gradient = |inputs: &[Tensor]| {
                let outputs = call(f_lltm_cell, inputs)?;
                let vectors = [incoming(&outputs[0]), incoming(&outputs[1])];
                let vectors = [Some(&vectors[0]), Some(&vectors[1])];
                let options =
                    GradOptions { grad_outputs: &vectors, create_graph: true, ..Default::default() };
                let found = grad(&[&outputs[0], &outputs[1]], &inputs.iter().collect::<Vec<_>>(), &options)?;
                Ok(found.into_vec().into_iter().flatten().collect::<Vec<_>>())
            };
            gradcheck(gradient, &inputs, &GradcheckOptions::default())
                .unwrap_or_else(|error| panic!("{sample:?} on {device:?}: {error}"));
        }
    }
}

/// Three steps that share their weight, the last fed with what depends on the first: total derivatives with
/// respect to the inputs would differ from the partial ones here, and gradgradcheck on leaves would not notice.
fn three_steps(cell: Cell, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, c] = leaves else { unreachable!("with bias") };
    let (mut h, mut c) = (h.shallow_clone(), c.shallow_clone());
    for step in 0..3 {
        let input = if step == 2 { x * h.sum(Kind::Double) } else { x.shallow_clone() };
        (h, c) = cell(&input, w, Some(b), (&h, &c)).expect("step");
    }
    (h.square() + c.sin()).sum(Kind::Double)
}

/// One input is a function of another: c = h·h.
fn dependent_inputs(cell: Cell, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, _] = leaves else { unreachable!("with bias") };
    let (new_h, new_c) = cell(x, w, Some(b), (h, &(h * h))).expect("step");
    (new_h.square() + new_c.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    type Program = fn(Cell, &[Tensor]) -> Tensor;
    let programs: [(&str, Program); 2] = [("three steps", three_steps), ("c = h·h", dependent_inputs)];
    for device in devices() {
        for (name, program) in programs {
            let arguments = sample(3, 4, 5, Bias::Flat, Layout::Contiguous).arguments(Kind::Double, device);
            let (fused, fused_second) = first_and_second(program, f_lltm_cell, &arguments);
            let (expected, expected_second) = first_and_second(program, lltm_cell_reference, &arguments);
            let leaves = arguments.leaves();
            let plain = program(f_lltm_cell, &leaves);
            let options = GradOptions { allow_unused: true, ..Default::default() };
            let plain = grad(&[&plain], &leaves.iter().collect::<Vec<_>>(), &options).expect(name).into_vec();
            for index in 0..leaves.len() {
                let Some(expected) = &expected[index] else { continue };
                let fused = fused[index].as_ref().expect(name);
                assert_close(fused, expected, 1e-10, 1e-10);
                // The kernel's gradient and the one with a graph are the same function.
                assert_close(plain[index].as_ref().expect(name), fused, 1e-10, 1e-10);
                let second = fused_second[index].as_ref().expect(name);
                assert_close(second, expected_second[index].as_ref().expect(name), 1e-9, 1e-9);
            }
        }
    }
}

type Gradients = Vec<Option<Tensor>>;

fn first_and_second(
    program: fn(Cell, &[Tensor]) -> Tensor,
    cell: Cell,
    arguments: &Arguments,
) -> (Gradients, Gradients) {
    let leaves = arguments.leaves();
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let loss = program(cell, &leaves);
    let options = GradOptions { create_graph: true, allow_unused: true, ..Default::default() };
    let first = grad(&[&loss], &inputs, &options).expect("first").into_vec();
    let norm =
        first.iter().flatten().map(|gradient| gradient.square().sum(Kind::Double)).reduce(|a, b| a + b);
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let second = grad(&[&norm.expect("gradients")], &inputs, &options).expect("second").into_vec();
    (first, second)
}

#[test]
fn extreme_values_stay_as_exact_as_the_reference() {
    for device in devices() {
        for kind in KINDS {
            let options = (kind, device);
            let gates =
                [-1e4, -100.0, -20.0, -1e-3, 0.0, 1e-30, 1e-3, 20.0, 100.0, 1e4, f64::INFINITY, f64::NAN];
            let hidden = gates.len() as i64;
            let bias = Tensor::from_slice(&gates)
                .repeat([3])
                .to_kind(kind)
                .to_device(device)
                .set_requires_grad(true);
            let weight = Tensor::zeros([3 * hidden, hidden + 1], options);
            let (x, state) = (Tensor::zeros([1, 1], options), Tensor::ones([1, hidden], options));
            let run = |cell: Cell| {
                let (h, c) = cell(&x, &weight, Some(&bias), (&state, &state)).expect("cell");
                let gradient =
                    grad(&[&(&h + &c).sum(kind)], &[&bias], &GradOptions::default()).expect("gradient");
                (h, c, gradient.single().expect("one"))
            };
            let (fused, expected) = (run(f_lltm_cell), run(lltm_cell_reference));
            let (rtol, atol) = tolerance(kind);
            assert_close(&fused.0, &expected.0, rtol, atol);
            assert_close(&fused.1, &expected.1, rtol, atol);
            assert_close(&fused.2, &expected.2, 10.0 * rtol, atol);
        }
    }
}

/// Values that are not what lies in memory: libtorch negates lazily, and has zeros without memory.
#[test]
fn lazily_negated_tensors_and_zeros_without_memory() {
    for device in devices() {
        for kind in KINDS {
            let arguments = sample(2, 3, 4, Bias::Flat, Layout::Contiguous).arguments(kind, device).0;
            let zeros = Tensor::internal_efficientzerotensor([2, 4], (kind, device));
            let (rtol, atol) = tolerance(kind);
            for index in 0..arguments.len() {
                let mut lazy = arguments.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
                lazy[index] = lazy[index].internal_neg_view();
                for (fused, expected) in call(f_lltm_cell, &lazy)
                    .expect("fused")
                    .iter()
                    .zip(&call(lltm_cell_reference, &lazy).expect("reference"))
                {
                    assert_close(fused, expected, rtol, atol);
                }
            }
            let mut lazy = arguments.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
            lazy[4] = zeros.shallow_clone();
            let fused = call(f_lltm_cell, &lazy).expect("fused");
            assert_close(&fused[1], &call(lltm_cell_reference, &lazy).expect("reference")[1], rtol, atol);

            let leaves: Vec<Tensor> =
                arguments.iter().map(|tensor| tensor.detach().set_requires_grad(true)).collect();
            for vector in [Tensor::ones([2, 4], (kind, device)).internal_neg_view(), zeros] {
                let of = |cell| {
                    let outputs = call(cell, &leaves).expect("outputs");
                    let options =
                        GradOptions { grad_outputs: &[Some(&vector), Some(&vector)], ..Default::default() };
                    let inputs: Vec<&Tensor> = leaves.iter().collect();
                    grad(&[&outputs[0], &outputs[1]], &inputs, &options).expect("gradients").into_vec()
                };
                for (fused, expected) in of(f_lltm_cell).iter().zip(&of(lltm_cell_reference)) {
                    let (fused, expected) =
                        (fused.as_ref().expect("present"), expected.as_ref().expect("present"));
                    assert_close(fused, expected, 10.0 * rtol, 10.0 * atol);
                }
            }
        }
    }
}

#[test]
fn an_optimiser_may_change_the_bias_before_the_backward() {
    for device in devices() {
        let arguments = sample(2, 3, 4, Bias::Row, Layout::Contiguous).arguments(Kind::Double, device);
        let leaves = arguments.leaves();
        let outputs = call(f_lltm_cell, &leaves).expect("outputs");
        let _ = tch::no_grad(|| leaves[2].shallow_clone().fill_(5.0));
        let gradient = grad(&[&outputs[0].sum(Kind::Double)], &[&leaves[2]], &GradOptions::default());
        assert_eq!(
            gradient.expect("not refused, as the composite does not").get(0).expect("one").size(),
            [1, 12]
        );
    }
}

#[test]
fn bad_arguments_are_named() {
    let cpu = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let float = |size: &[i64]| cpu(size, Kind::Float);
    let good = || [float(&[2, 4]), float(&[9, 7]), float(&[9]), float(&[2, 3]), float(&[2, 3])];
    let names = ["input", "weight", "bias", "h", "c"];
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, float(&[2, 4, 1]), &["2 dimensions [B, F]", "[2, 4, 1]"]),
        (0, float(&[]), &["2 dimensions"]),
        (0, cpu(&[2, 4], Kind::Int64), &["kind Float or Double", "Int64", "to_kind"]),
        (0, cpu(&[2, 4], Kind::Half), &["kind Float or Double", "Half"]),
        (0, cpu(&[2, 4], Kind::ComplexFloat), &["kind Float or Double", "ComplexFloat"]),
        (0, Tensor::new(), &["a tensor", "undefined"]),
        (0, float(&[2, 4]).to_sparse_sparse_dim(2), &["dense", "to_dense"]),
        (0, float(&[2, 4]).to_mkldnn(), &["dense", "to_dense"]),
        (1, float(&[9, 6]), &["[3H, H + F] = [9, 7]", "[9, 6]"]),
        (1, float(&[12, 7]), &["[3H, H + F] = [9, 7]", "[12, 7]"]),
        (1, float(&[63]), &["[3H, H + F]", "[63]"]),
        (1, cpu(&[9, 7], Kind::Double), &["kind Float, as input", "Double", "to_kind"]),
        (1, Tensor::new(), &["a tensor", "undefined"]),
        (2, float(&[8]), &["[3H]", "[8]"]),
        (2, float(&[2, 9]), &["[3H]", "[2, 9]"]),
        (2, float(&[9, 1]), &["[3H]", "[9, 1]"]),
        (2, Tensor::new(), &["a tensor", "undefined"]),
        (3, float(&[3]), &["2 dimensions [B, H]", "[3]"]),
        (3, float(&[1, 3]), &["[B, H] = [2, 3]", "[1, 3]"]),
        (3, Tensor::new(), &["a tensor", "undefined"]),
        (4, float(&[2, 4]), &["[B, H] = [2, 3]", "[2, 4]"]),
        (4, cpu(&[2, 3], Kind::Double), &["kind Float, as input"]),
        (1, float(&[9, 7]).to_sparse_csr(None), &["dense", "to_dense"]),
    ];
    for (index, bad, expected) in cases {
        let mut arguments = good();
        arguments[index] = bad;
        let error = call(f_lltm_cell, &arguments).expect_err("bad argument").to_string();
        assert!(error.starts_with(&format!("lltm_cell: {}: expected ", names[index])), "{error}");
        assert!(expected.iter().all(|text| error.contains(text)), "{error}: {expected:?}");
        assert!(!error.contains('\n'), "one line: {error}");
        let panic = std::panic::catch_unwind(|| {
            let [x, w, b, h, c] = &arguments;
            lltm_cell(x, w, Some(b), (h, c))
        });
        let panic = *panic.expect_err("the form without f_ panics").downcast::<String>().expect("a text");
        assert_eq!(panic, error);
    }
    call(f_lltm_cell, &good()).expect("good arguments");

    // Sizes whose sums overflow.
    let mut arguments = good();
    let huge = float(&[1, 1]).expand([1, i64::MAX / 2], false);
    (arguments[0], arguments[3], arguments[4]) = (float(&[1, 4]), huge.shallow_clone(), huge);
    let error = call(f_lltm_cell, &arguments).expect_err("too large").to_string();
    assert!(error.starts_with("lltm_cell: h: expected sizes whose sums fit 64 bits"), "{error}");
}

#[test]
fn cuda_under_autocast_only_the_product_loses_precision() {
    let Some(device) = tch_extension::testing::cuda_or_skip("cuda_under_autocast") else { return };
    let arguments = sample(16, 32, 128, Bias::Flat, Layout::Contiguous).arguments(Kind::Float, device);
    let (rtol, atol) = tolerance(Kind::Half);
    let exact = call(f_lltm_cell, &arguments.0).expect("without autocast");
    let half = tch::autocast(true, || call(f_lltm_cell, &arguments.0)).expect("with autocast");
    for (half, exact) in half.iter().zip(&exact) {
        assert_eq!(half.kind(), Kind::Float);
        assert!(!half.equal(exact), "the product ran in half precision");
        assert_close(half, exact, 10.0 * rtol, 1e3 * atol);
    }
    let gradients = tch::autocast(true, || gradients(f_lltm_cell, &arguments.leaves(), &[0, 1]));
    assert!(gradients.iter().flatten().all(|gradient| gradient.kind() == Kind::Float));
}

/// Kernels on another stream than the current one, such as the default stream, would not be in the recording,
/// and a replay would leave the outputs as they were.
#[test]
#[cfg(tch_extension_cuda)]
fn cuda_the_work_is_the_product_and_two_kernels_on_the_current_stream() {
    let test = "cuda_the_work_is_the_product_and_two_kernels_on_the_current_stream";
    let Some(device) = tch_extension::testing::cuda_or_skip(test) else { return };
    if std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some() {
        // As under memcheck: a replay cannot write to memory that is really freed.
        let _ = std::io::stderr().write_all(format!("SKIPPED {test}: no caching allocator\n").as_bytes());
        return;
    }
    for size in [(16, 32, 128), (64, 256, 512), (3, 4, 5)] {
        let sample = sample(size.0, size.1, size.2, Bias::Flat, Layout::Contiguous);
        let arguments = sample.arguments(Kind::Float, device);
        let [x, w, b, h, _] = &arguments.0[..] else { unreachable!("with bias") };
        let hx = Tensor::cat(&[h, x], 1);
        let product = support::record(|| b.addmm(&hx, &w.transpose(0, 1)));
        let leaves = arguments.leaves();
        for (name, inputs) in [("without a graph", &arguments.0), ("with a graph", &leaves)] {
            let expected = call(f_lltm_cell, inputs).expect("outputs");
            let recording = support::record(|| call(f_lltm_cell, inputs).expect("outputs"));
            assert!(
                recording.kernels <= product.kernels + 2 && recording.others == product.others,
                "{size:?} {name}: {} kernels and {} other nodes, of which the product is {} and {}",
                recording.kernels,
                recording.others,
                product.kernels,
                product.others
            );
            for output in &recording.result {
                let _ = output.detach().fill_(f64::NAN);
            }
            tch::Cuda::synchronize(0);
            recording.replay();
            for (output, expected) in recording.result.iter().zip(&expected) {
                assert_close(output, expected, 1e-5, 1e-5);
            }
        }
    }
}

#[test]
fn cuda_mixed_devices_are_named() {
    let Some(device) = tch_extension::testing::cuda_or_skip("cuda_mixed_devices_are_named") else { return };
    let names = ["weight", "bias", "h", "c"];
    for (index, name) in names.iter().enumerate() {
        let mut arguments = sample(2, 4, 3, Bias::Flat, Layout::Contiguous).arguments(Kind::Float, device).0;
        arguments[index + 1] = arguments[index + 1].to_device(Device::Cpu);
        let error = call(f_lltm_cell, &arguments).expect_err("mixed devices").to_string();
        assert!(
            error.starts_with(&format!("lltm_cell: {name}: expected device Cuda(0), as input, got Cpu")),
            "{error}"
        );
    }
}

/// Every kernel path on the GPU, forward and backward; the test that the sanitizers run.
#[test]
fn cuda_agrees_with_the_cpu() {
    let Some(device) = tch_extension::testing::cuda_or_skip("cuda_agrees_with_the_cpu") else { return };
    for sample in SMALL.iter().chain(LARGE).filter(|sample| sample.layout != Layout::Expanded) {
        for kind in KINDS {
            let (rtol, atol) = bounds(*sample, kind);
            let on = |device| {
                let arguments = sample.arguments(kind, device);
                let outputs = call(f_lltm_cell, &arguments.0).expect("outputs");
                let gradients = gradients(f_lltm_cell, &arguments.leaves(), &[0, 1]);
                outputs.into_iter().chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
            };
            for (gpu, cpu) in on(device).iter().zip(&on(Device::Cpu)) {
                assert_close(&gpu.to_device(Device::Cpu), cpu, 100.0 * rtol, 100.0 * atol);
            }
        }
    }
}

#[test]
fn the_last_element_counts() {
    // A kernel that skipped its tail would leave these untouched.
    for device in devices() {
        for hidden in [1, 3, 15, 17, 1023, 1025] {
            let arguments =
                sample(2, 1, hidden, Bias::Flat, Layout::Contiguous).arguments(Kind::Float, device).0;
            let outputs = call(f_lltm_cell, &arguments).expect("outputs");
            let expected = call(lltm_cell_reference, &arguments).expect("reference");
            for (output, expected) in outputs.iter().zip(&expected) {
                assert_close(&output.i((1, hidden - 1)), &expected.i((1, hidden - 1)), 1e-4, 1e-5);
            }
        }
    }
}

#[test]
fn the_formula_by_hand() {
    // The reference could be wrong in the same way as the kernel; these numbers are from the formula.
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let elu = |x: f64| if x > 0.0 { x } else { x.exp_m1() };
    for device in devices() {
        let tensor = |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        // Columns: h, x. Rows: i, o, g.
        let weight = tensor(&[0.1, 0.2, 0.3, -0.4, 0.5, 0.6], &[3, 2]);
        let bias = tensor(&[0.7, -0.8, -0.9], &[3]);
        for (x, h, c) in [(2.0, 3.0, 0.25), (-2.0, 1.0, -0.5)] {
            let (i, o, g): (f64, f64, f64) =
                (0.1 * h + 0.2 * x + 0.7, 0.3 * h - 0.4 * x - 0.8, 0.5 * h + 0.6 * x - 0.9);
            let new_c = c + elu(g) * sigmoid(i);
            let new_h = new_c.tanh() * sigmoid(o);
            let [x, h, c] = [x, h, c].map(|value| tensor(&[value], &[1, 1]));
            for cell in [f_lltm_cell, lltm_cell_reference] as [Cell; 2] {
                let (found_h, found_c) = cell(&x, &weight, Some(&bias), (&h, &c)).expect("cell");
                assert!((found_h.double_value(&[0, 0]) - new_h).abs() < 1e-14, "h' on {device:?}");
                assert!((found_c.double_value(&[0, 0]) - new_c).abs() < 1e-14, "c' on {device:?}");
            }
        }
    }
}

#[test]
fn small_values_keep_their_digits() {
    // With c = 0 nothing large hides a lost digit: expm1, not exp - 1; sigmoid(x), not 1 - sigmoid(-x); the
    // derivative of elu from exp(g), not from elu(g) + 1.
    for device in devices() {
        for kind in KINDS {
            let options = (kind, device);
            let gates = [-80.0, -30.0, -20.0, -10.0, -1.0, -1e-3, -1e-6, -1e-12, 1e-12, 1e-6, 1e-3];
            let hidden = gates.len() as i64;
            // Each gate in turn is one of these, and the others are moderate.
            for place in 0..3 {
                let mut rows = vec![vec![0.5; gates.len()]; 3];
                rows[place] = gates.to_vec();
                let bias = Tensor::from_slice(&rows.concat()).to_kind(kind).to_device(device);
                let bias = bias.set_requires_grad(true);
                let weight = Tensor::zeros([3 * hidden, hidden + 1], options);
                let (x, state) = (Tensor::zeros([1, 1], options), Tensor::zeros([1, hidden], options));
                let run = |cell: Cell| {
                    let (h, c) = cell(&x, &weight, Some(&bias), (&state, &state)).expect("cell");
                    let gradient =
                        grad(&[&(&h + &c).sum(kind)], &[&bias], &GradOptions::default()).expect("gradient");
                    [h, c, gradient.single().expect("one")]
                };
                let rtol = if kind == Kind::Double { 1e-13 } else { 2e-6 };
                for (fused, expected) in run(f_lltm_cell).iter().zip(&run(lltm_cell_reference)) {
                    assert_close(fused, expected, rtol, 0.0);
                }
            }
        }
    }
}
