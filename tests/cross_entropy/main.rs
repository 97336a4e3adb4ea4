//! Tests of `ops::cross_entropy`: against its reference, libtorch's own loss and finite differences,
//! and with bad input.

use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, Tensors, grad};
use tch_extension::operator::call;
use tch_extension::ops::definitions::{CrossEntropy, CrossEntropyIn};
use tch_extension::ops::{CrossEntropyOptions, cross_entropy_reference, f_cross_entropy};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_as_accurate, assert_close, cuda_or_skip, devices,
};

/// What varies besides sizes and kinds. The weights are no input of the samples, because they have no
/// gradient.
#[derive(Clone, Copy, Debug)]
struct Case {
    reduction: Reduction,
    label_smoothing: f64,
    is_weighted: bool,
}

const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];
const IGNORED: i64 = -7;

fn cases() -> impl Iterator<Item = Case> {
    REDUCTIONS.into_iter().flat_map(|reduction| {
        [(0.0, false), (0.0, true), (0.1, false), (0.3, true)]
            .map(|(label_smoothing, is_weighted)| Case { reduction, label_smoothing, is_weighted })
    })
}

/// Every third row is ignored, the first one never. The targets are made on the logits' device, because
/// a call may be captured in a CUDA graph.
fn targets_of(logits: &Tensor) -> Tensor {
    let (rows, classes) = logits.size2().expect("two dimensions");
    let rows = Tensor::arange(rows, (Kind::Int64, logits.device()));
    let is_ignored = rows.remainder(3).eq(2);
    (rows * 7 + 3).remainder(classes.max(1)).masked_fill(&is_ignored, IGNORED)
}

fn weight_of(logits: &Tensor) -> Tensor {
    let classes = logits.size()[1];
    let weight = Tensor::arange(classes, (Kind::Double, logits.device())).sin() + 1.5;
    weight.to_kind(logits.kind())
}

type Op = fn(&Tensor, &Tensor, &CrossEntropyOptions<'_>) -> Result<Tensor>;

fn libtorch(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    let CrossEntropyOptions { weight, reduction, ignore_index, label_smoothing, .. } = *options;
    Ok(logits.f_cross_entropy_loss(targets, weight, reduction, ignore_index, label_smoothing)?)
}

impl Case {
    fn call(self, op: Op, logits: &Tensor) -> Result<Tensor> {
        let weight = self.is_weighted.then(|| weight_of(logits));
        let Case { reduction, label_smoothing, .. } = self;
        let weight = weight.as_ref();
        let options = CrossEntropyOptions {
            weight,
            reduction,
            label_smoothing,
            ignore_index: IGNORED,
            ..Default::default()
        };
        op(logits, &targets_of(logits), &options)
    }

    fn samples(self, sizes: &[[i64; 2]], kind: Kind, device: Device) -> Vec<Sample> {
        SampleTable::empty(["M", "V"], |[m, v]| vec![Shape::new([m, v])])
            .with_sizes(sizes)
            .with_layouts([4, 6])
            .samples(kind, device)
            .expect("samples")
    }

    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        let small = [[3, 5], [1, 1], [2, 8], [4, 33]];
        // For the kernels on CUDA: one block for all; many rows of a lane, of a few and of a warp; the
        // longest rows of a warp, with and without whole vectors; rows in shared memory, and longer ones.
        let large = [
            [5, 1000],
            [300, 3],
            [1030, 3],
            [1100, 70],
            [300, 257],
            [40, 1020],
            [40, 1023],
            [2, 8192],
            [3, 16384],
            [2, 40_000],
            [2, 140_000],
            [2, 5001],
        ];
        eprintln!("{self:?}");
        test(&Suite {
            fused: &move |inputs| Ok(vec![self.call(f_cross_entropy, &inputs[0])?]),
            reference: &move |inputs| Ok(vec![self.call(cross_entropy_reference, &inputs[0])?]),
            small: &move |kind, device| self.samples(&small, kind, device),
            large: &move |kind, device| self.samples(&large, kind, device),
            terms: &|sample| sample.inputs[0].size()[1],
        });
    }
}

#[test]
fn forward_agrees_with_the_reference() {
    cases().for_each(|case| case.suite(|suite| suite.forward_agrees_with_the_reference()));
}

#[test]
fn gradients_agree_with_the_reference() {
    cases().for_each(|case| case.suite(|suite| suite.gradients_agree_with_the_reference()));
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    cases().for_each(|case| {
        case.suite(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
    });
}

#[test]
fn gradcheck_of_every_small_sample() {
    cases().for_each(|case| case.suite(|suite| suite.gradcheck_of_every_small_sample()));
}

#[test]
fn second_derivatives_of_every_small_sample() {
    cases().for_each(|case| case.suite(|suite| suite.gradgradcheck_of_every_small_sample()));
}

#[test]
fn conformance_in_every_kind() {
    cases().for_each(|case| case.suite(|suite| suite.conformance_of(suite.small)));
}

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let rows = [[0.5_f64, -1.0, 2.0], [1.0, 1.0, 1.0], [-3.0, 0.25, 4.0]];
    let (targets, weights, smoothing) = ([2_usize, 0, 1], [0.5, 1.0, 2.0], 0.2);
    let loss = |row: &[f64; 3], target: usize| {
        let lse = row.iter().map(|z| z.exp()).sum::<f64>().ln();
        let all: f64 = row.iter().zip(&weights).map(|(z, w)| w * (lse - z)).sum();
        (1.0 - smoothing) * weights[target] * (lse - row[target]) + smoothing / 3.0 * all
    };
    // The last row is ignored.
    let sum: f64 = rows.iter().zip(targets).take(2).map(|(row, target)| loss(row, target)).sum();
    let expected = sum / (weights[targets[0]] + weights[targets[1]]);
    for device in devices() {
        let logits = Tensor::from_slice(rows.as_flattened()).view([3, 3]).to_device(device);
        let targets = Tensor::from_slice(&[2_i64, 0, IGNORED]).to_device(device);
        let weight = Tensor::from_slice(&weights).to_device(device);
        let options = CrossEntropyOptions {
            weight: Some(&weight),
            ignore_index: IGNORED,
            label_smoothing: smoothing,
            ..Default::default()
        };
        for op in [f_cross_entropy as Op, cross_entropy_reference] {
            let found = op(&logits, &targets, &options).expect("a loss").double_value(&[]);
            assert!((found - expected).abs() < 1e-13, "{found} {expected} on {device:?}");
        }
    }
}

/// The loss depends on differences of logits only, which are exact here: with an offset that all logits
/// share, it and its gradient have the same bits. The largest logit is the first one, the last one, or
/// comes again and again.
#[test]
fn an_offset_of_all_logits_changes_nothing() {
    for device in devices() {
        for columns in [2, 3, 1000, 5001, 50_257, 140_000] {
            let order = Tensor::arange(columns, (Kind::Int64, Device::Cpu));
            let rising = (&order * 16).divide_scalar_mode(columns, "floor");
            let rows = [&rising, &rising.flip([0]), &(&order * 7).remainder(13)];
            let values = Tensor::stack(&rows, 0).to_kind(Kind::Float).to_device(device);
            for case in cases().filter(|case| case.reduction == Reduction::None) {
                let run = |op: Op, logits: &Tensor| {
                    let logits = leaves(&[logits.shallow_clone()]).remove(0);
                    let losses = case.call(op, &logits).expect("losses");
                    let sum = losses.sum(Kind::Double);
                    let found = grad(&[&sum], &[&logits], &GradOptions::default());
                    [losses.detach(), found.and_then(Tensors::single).expect("a gradient")]
                };
                let exact = run(cross_entropy_reference, &values.to_kind(Kind::Double));
                let expected = run(f_cross_entropy, &values);
                assert_close(&expected[0], &exact[0].to_kind(Kind::Float), 2e-5, 1e-6);
                for offset in [-1e4, 1e6, -4e6] {
                    let found = run(f_cross_entropy, &(&values + offset));
                    for (found, expected) in found.iter().zip(&expected) {
                        let what = format!("{columns} {offset} {case:?} on {device:?}");
                        assert!(found.equal(expected), "{what}: {found} {expected}");
                    }
                }
            }
        }
    }
}

/// Values and gradients are at least as exact as those of libtorch's own loss, with and without
/// autocast, and have its kinds. Without rows, and if all are ignored, the mean is NaN and the sum 0.
#[test]
fn as_libtorch() {
    for device in devices() {
        for (kind, case) in KINDS.into_iter().flat_map(|kind| cases().map(move |case| (kind, case)))
        {
            for lower in [None, Some(Kind::BFloat16)] {
                let _autocast = lower.map(|kind| Autocast::new(device, kind).expect("autocast"));
                let logits = Tensor::randn([70, 129], (Kind::Float, device)).to_kind(kind);
                let run = |op: Op, logits: &Tensor| {
                    let logits = leaves(&[logits.shallow_clone()]).remove(0);
                    let loss = case.call(op, &logits).expect("a loss");
                    let sum = loss.sum(Kind::Double);
                    let found = grad(&[&sum], &[&logits], &GradOptions::default());
                    let gradient = found.expect("a gradient").into_vec().remove(0);
                    [loss.detach(), gradient.expect("a gradient")]
                };
                let (ours, theirs) = (run(f_cross_entropy, &logits), run(libtorch, &logits));
                let exact = run(cross_entropy_reference, &logits.to_kind(Kind::Double));
                for ((ours, theirs), exact) in ours.iter().zip(&theirs).zip(&exact) {
                    assert_eq!(ours.kind(), theirs.kind(), "{kind:?} {case:?} {lower:?}");
                    match kind {
                        Kind::Double => assert_close(ours, exact, 1e-12, 1e-14),
                        // A single number, or weights that were rounded, say nothing of exactness.
                        _ if exact.numel() == 1 || case.is_weighted => {
                            let bound = if kind == Kind::Float { 1e-5 } else { 2e-2 };
                            assert_close(ours, &exact.to_kind(ours.kind()), bound, bound);
                        }
                        _ => assert_as_accurate(ours, theirs, exact),
                    }
                }
            }
        }
        for rows in [0, 2] {
            let logits = Tensor::ones([rows, 4], (Kind::Float, device));
            let targets = Tensor::full([rows], IGNORED, (Kind::Int64, device));
            for reduction in REDUCTIONS {
                let options =
                    CrossEntropyOptions { reduction, ignore_index: IGNORED, ..Default::default() };
                let of = |op: Op| op(&logits, &targets, &options).expect("a loss");
                let (ours, theirs) = (of(f_cross_entropy), of(libtorch));
                assert_eq!(ours.size(), theirs.size());
                assert!(ours.allclose(&theirs, 0.0, 0.0, true), "{rows} {reduction:?} {device:?}");
            }
        }
    }
}

/// Rows that begin at any address have the loss and the gradients of others, up to the order of sums.
/// The gradients begin at multiples of 16 bytes, and the logits do not.
#[test]
fn rows_may_begin_at_any_address() {
    const CLASSES: [i64; 14] = [1, 2, 3, 7, 8, 9, 15, 17, 33, 65, 129, 257, 1000, 1021];
    for (device, kind) in devices().into_iter().flat_map(|device| KINDS.map(|kind| (device, kind)))
    {
        for (rows, classes) in CLASSES.into_iter().flat_map(|v| [(5, v), (1200, v)]) {
            tch::manual_seed(classes);
            let values = Tensor::randn([rows, classes], (kind, device));
            let targets = Tensor::arange(rows, (Kind::Int64, device)).remainder(classes);
            let _ = targets.get(rows / 2).fill_(IGNORED);
            let of = |offset: i64| {
                let memory = Tensor::zeros([offset + rows * classes], (kind, device));
                let logits = memory.narrow(0, offset, rows * classes).view([rows, classes]);
                logits.shallow_clone().copy_(&values);
                let logits = logits.detach().set_requires_grad(true);
                let options = CrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
                let loss = f_cross_entropy(&logits, &targets, &options).expect("a loss");
                loss.backward();
                [loss.detach(), logits.grad() * rows as f64]
            };
            let expected = of(0);
            for offset in [1, 3, 6] {
                let bound = if kind == Kind::Double { 1e-12 } else { 1e-5 };
                let bound = if matches!(kind, Kind::Half | Kind::BFloat16) { 1e-2 } else { bound };
                for (found, expected) in of(offset).iter().zip(&expected) {
                    assert_close(found, expected, bound, bound);
                }
            }
        }
    }
}

/// Logits of -inf, or of the smallest number, as a mask leaves them, have no part; a NaN or +inf spoils
/// its row alone; large numbers are those of libtorch.
#[test]
fn infinities_and_nan_are_those_of_libtorch() {
    for device in devices() {
        for (kind, columns) in [Kind::Float, Kind::BFloat16, Kind::Half]
            .into_iter()
            .flat_map(|kind| [8, 1000, 5001, 40_000].map(|columns| (kind, columns)))
        {
            let least = if kind == Kind::Half { -65504.0 } else { -3.389e38 };
            let values = Tensor::randn([9, columns], (Kind::Float, device)).to_kind(kind);
            let set = |row: i64, column: i64, value: f64| {
                let _ = values.get(row).narrow(0, column, 1).fill_(value);
            };
            let _ = values.get(0).narrow(0, 4, columns - 4).fill_(f64::NEG_INFINITY);
            let _ = values.get(1).fill_(f64::NEG_INFINITY);
            set(3, 1, f64::NAN);
            set(4, 5, f64::INFINITY);
            let _ = values.get(6).narrow(0, 1, columns - 1).fill_(least);
            let _ = values.get(7).fill_(least);
            let _ = values.get(8).fill_(1000.0);
            let run = |op: Op, values: &Tensor, label_smoothing: f64| {
                let logits = values.copy().set_requires_grad(true);
                let targets = Tensor::zeros([9], (Kind::Int64, device));
                let reduction = Reduction::None;
                let options =
                    CrossEntropyOptions { reduction, label_smoothing, ..Default::default() };
                let losses = op(&logits, &targets, &options).expect("losses");
                let vector = Tensor::ones([9], (values.kind(), device));
                let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                let found = grad(&[&losses], &[&logits], &options).expect("a gradient");
                [losses.detach(), found.into_vec().remove(0).expect("a gradient")]
            };
            let bound = if kind == Kind::Float { (1e-5, 1e-6) } else { (1e-2, 1e-4) };
            for smoothing in [0.0, 0.1] {
                let [losses, _] = run(libtorch, &values.to_kind(Kind::Float), smoothing);
                // In `Float` it adds up what smoothing takes from each class, and loses digits.
                let [_, gradient] = run(libtorch, &values.to_kind(Kind::Double), smoothing);
                let theirs = [losses, gradient.to_kind(Kind::Float)];
                for (ours, theirs) in run(f_cross_entropy, &values, smoothing).iter().zip(&theirs) {
                    let what = format!("{kind:?} {columns} {smoothing} on {device:?}");
                    let ours = ours.to_kind(Kind::Float);
                    let is_alike = ours.allclose(theirs, bound.0, bound.1, true);
                    assert!(is_alike, "{what}: {ours} {theirs}");
                }
            }
        }
    }
}

/// The gradients of a mean over many rows are too small for `Half`, unless the loss is scaled first.
#[test]
fn half_gradients_keep_their_scale() {
    for device in devices() {
        let logits = Tensor::randn([512, 6000], (Kind::Float, device)).to_kind(Kind::Half);
        let targets = Tensor::arange(512, (Kind::Int64, device));
        let run = |logits: &Tensor| {
            let logits = logits.copy().set_requires_grad(true);
            let loss = f_cross_entropy(&logits, &targets, &CrossEntropyOptions::default());
            let scaled = loss.expect("a loss").to_kind(Kind::Float) * 16384.0;
            let found = grad(&[&scaled], &[&logits], &GradOptions::default());
            found.expect("a gradient").into_vec().remove(0).expect("a gradient")
        };
        let (ours, exact) = (run(&logits), run(&logits.to_kind(Kind::Float)));
        assert!(ours.to_kind(Kind::Float).allclose(&exact, 1e-2, 1e-6, false), "{device:?}");
    }
}

/// A gradient that was computed in the forward pass is multiplied in each backward pass.
#[test]
fn any_incoming_gradient_any_number_of_times() {
    for device in devices() {
        let logits = Tensor::randn([9, 40], (Kind::Float, device)).set_requires_grad(true);
        let loss = f_cross_entropy(
            &logits,
            &targets_of(&logits),
            &CrossEntropyOptions { ignore_index: IGNORED, ..Default::default() },
        );
        let loss = loss.expect("a loss");
        let of = |factor: f64, retain: bool| {
            let factor = Tensor::full([], factor, (Kind::Float, device));
            let options = GradOptions {
                grad_outputs: &[Some(&factor)],
                retain_graph: Some(retain),
                ..Default::default()
            };
            grad(&[&loss], &[&logits], &options).expect("a gradient").into_vec().remove(0).unwrap()
        };
        let (one, half) = (of(1.0, true), of(0.5, true));
        assert!(
            half.equal(&(&one * 0.5)) && of(1.0, true).equal(&one) && of(0.5, false).equal(&half)
        );
    }
}

/// With `reuse_logits` the gradient is the same, and lies where the logits were.
#[test]
fn reused_logits_give_the_same_gradient() {
    for device in devices() {
        for (kind, columns, case) in KINDS
            .into_iter()
            .flat_map(|kind| [8, 1000, 5001, 40_000].map(|columns| (kind, columns)))
            .flat_map(|(kind, columns)| cases().map(move |case| (kind, columns, case)))
        {
            let values = Tensor::randn([5, columns], (Kind::Float, device)).to_kind(kind);
            let weight = case.is_weighted.then(|| weight_of(&values));
            let run = |reuse_logits: bool| {
                let leaf = values.copy().set_requires_grad(true);
                let logits = &leaf * 1.0;
                let Case { reduction, label_smoothing, .. } = case;
                let options = CrossEntropyOptions {
                    weight: weight.as_ref(),
                    reduction,
                    label_smoothing,
                    ignore_index: IGNORED,
                    reuse_logits,
                };
                let loss = f_cross_entropy(&logits, &targets_of(&values), &options);
                let loss = loss.expect("a loss");
                let sum = loss.sum(kind);
                let found = grad(&[&sum], &[&logits], &GradOptions::default());
                let gradient = found.expect("a gradient").into_vec().remove(0).expect("a gradient");
                assert_eq!(gradient.data_ptr() == logits.data_ptr(), reuse_logits, "{case:?}");
                [loss.detach(), gradient]
            };
            for (reused, plain) in run(true).iter().zip(&run(false)) {
                assert!(reused.equal(plain), "{kind:?} {columns} {case:?} on {device:?}");
            }
        }
    }
}

/// What else needs the logits says so, instead of reading their gradient.
#[test]
fn reused_logits_are_gone() {
    for device in devices() {
        let leaf = Tensor::randn([3, 8], (Kind::Float, device)).set_requires_grad(true);
        let targets = Tensor::zeros([3], (Kind::Int64, device));
        let options = CrossEntropyOptions { reuse_logits: true, ..Default::default() };
        for logits in [&leaf, &leaf.view([-1, 8])] {
            let error =
                f_cross_entropy(logits, &targets, &options).expect_err("a leaf").to_string();
            assert!(error.contains("logits") && error.contains("leaf"), "{error}");
        }

        let logits = &leaf * 1.0;
        let loss = f_cross_entropy(&logits, &targets, &options).expect("a loss");
        let twice = GradOptions { create_graph: true, ..Default::default() };
        let error = grad(&[&loss], &[&leaf], &twice).expect_err("no logits").to_string();
        assert!(error.contains("reuse_logits"), "{error}");

        let logits = &leaf * 1.0;
        let square = logits.square().sum(Kind::Float);
        let loss = f_cross_entropy(&logits, &targets, &options).expect("a loss") + square;
        let error = grad(&[&loss], &[&leaf], &GradOptions::default()).expect_err("overwritten");
        assert!(error.to_string().contains("modified by an inplace operation"), "{error}");

        // Without a gradient nothing is written.
        let (values, options) = (leaf.detach(), &options);
        let before = values.copy();
        let _ = f_cross_entropy(&values, &targets, options).expect("a loss");
        assert!(values.equal(&before));
    }
}

/// `f_cross_entropy` takes weights that require grad as constants, and the operator refuses them, as
/// libtorch's does.
#[test]
fn weights_have_no_gradient() {
    let of = |size: &[i64]| Tensor::rand(size, (Kind::Float, Device::Cpu));
    let (input, weight) = (of(&[3, 4]), of(&[4]).set_requires_grad(true));
    let target = Tensor::zeros([3], (Kind::Int64, Device::Cpu));
    let options = CrossEntropyOptions { weight: Some(&weight), ..Default::default() };
    let loss = f_cross_entropy(&input, &target, &options).expect("a loss");
    assert!(!loss.requires_grad());
    let operator = CrossEntropy {
        ignore_index: -100,
        reduction: Reduction::Mean,
        label_smoothing: 0.0,
        reuse_logits: false,
    };
    let of = CrossEntropyIn { input: &input, target: &target, weight: Some(&weight) };
    let error = call(operator.clone(), &of).expect_err("a gradient is wanted").to_string();
    let expected = "cross_entropy: weight: expected weights of classes without gradient, got one that requires grad";
    assert!(error.starts_with(expected), "{error}");
    let found = tch::no_grad(|| call(operator, &of)).expect("no gradient is wanted").loss;
    assert!(found.equal(&loss));
}

#[test]
fn bad_input_is_refused_by_name() {
    let options = CrossEntropyOptions::default();
    for device in devices() {
        let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let (logits, targets) = (of(&[3, 4], Kind::Float), of(&[3], Kind::Int64));
        let (short, double) = (of(&[3], Kind::Float), of(&[4], Kind::Double));
        let weighted = |weight| CrossEntropyOptions { weight: Some(weight), ..options };
        let smooth = CrossEntropyOptions { label_smoothing: 1.5, ..options };
        let other = CrossEntropyOptions { reduction: Reduction::Other(7), ..options };
        for (error, parts) in [
            (f_cross_entropy(&of(&[3], Kind::Float), &targets, &options), ["input", "[M, V]"]),
            (f_cross_entropy(&of(&[3, 4], Kind::Int), &targets, &options), ["input", "Int"]),
            (f_cross_entropy(&logits, &of(&[2], Kind::Int64), &options), ["target", "[M]"]),
            (f_cross_entropy(&logits, &of(&[3], Kind::Float), &options), ["target", "Int64"]),
            (f_cross_entropy(&logits, &targets, &weighted(&short)), ["weight", "[V]"]),
            (f_cross_entropy(&logits, &targets, &weighted(&double)), ["weight", "Float"]),
            (f_cross_entropy(&logits, &targets, &smooth), ["label_smoothing", "1.5"]),
            (f_cross_entropy(&logits, &targets, &other), ["reduction", "Other"]),
        ] {
            let error = error.expect_err("an error").to_string();
            assert!(error.starts_with("cross_entropy: ") && !error.contains('\n'), "{error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{error}: {parts:?}");
        }
    }
    let logits = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
    for wrong in [4, -1, i64::MIN, i64::MAX] {
        let targets = Tensor::from_slice(&[0, wrong, 1]);
        let error = f_cross_entropy(&logits, &targets, &options).expect_err("no class").to_string();
        assert!(error.contains("target:") && error.contains(&format!("{wrong} at 1")), "{error}");
    }
}

/// As libtorch's own loss, it fails an assertion on the device, which ends the program: here a child.
#[test]
fn cuda_a_target_that_is_no_class_stops_the_program() {
    const TEST: &str = "cuda_a_target_that_is_no_class_stops_the_program";
    const CHILD: &str = "TCH_EXTENSION_TEST_CHILD";
    let Some(device) = cuda_or_skip(TEST) else { return };
    for columns in [8, 40_000, 40_001] {
        let columns_of_child = std::env::var(CHILD).ok().and_then(|value| value.parse().ok());
        if let Some(columns) = columns_of_child {
            let logits = Tensor::zeros([2, columns], (Kind::Float, device));
            let targets = Tensor::from_slice(&[0, columns]).to_device(device);
            let loss = f_cross_entropy(&logits, &targets, &CrossEntropyOptions::default());
            let value = loss.and_then(|loss| Ok(loss.f_double_value(&[])?));
            panic!("{value:?}");
        }
        let child = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args([TEST, "--exact", "--nocapture"])
            .env(CHILD, columns.to_string())
            .output()
            .expect("a child");
        let text = String::from_utf8_lossy(&child.stderr).into_owned()
            + &String::from_utf8_lossy(&child.stdout);
        assert!(!child.status.success(), "{text}");
        assert!(text.contains("cross_entropy: a target is no class"), "{text}");
    }
}
