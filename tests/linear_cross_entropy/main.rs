//! Tests of `ops::linear_cross_entropy`: against its reference, libtorch's own layer and loss, and
//! finite differences, in one chunk and in many; its memory; and with bad input.

use support::gpu::caching_or_skip;
use support::{Suite, leaves};
use tch::nn::{Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{memory_stats, reset_peak_memory_stats};
use tch_extension::nn::embedding;
use tch_extension::ops::{
    LinearCrossEntropyOptions, f_linear_cross_entropy, linear_cross_entropy_reference,
};
use tch_extension::testing::{Sample, SampleTable, Shape, assert_close, devices};

/// What varies besides sizes and kinds.
#[derive(Clone, Copy, Debug)]
struct Case {
    options: LinearCrossEntropyOptions,
    has_bias: bool,
}

const IGNORED: i64 = -7;

/// Small bounds of memory make many chunks, down to one row each.
fn cases() -> Vec<Case> {
    let plain = LinearCrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
    let of = |reduction| LinearCrossEntropyOptions { reduction, ..plain };
    let (mean, sum, none) = (of(Reduction::Mean), of(Reduction::Sum), of(Reduction::None));
    let smooth = LinearCrossEntropyOptions { label_smoothing: 0.2, ..mean };
    let all = LinearCrossEntropyOptions {
        label_smoothing: 0.1,
        softcap: Some(1.5),
        z_loss: 0.01,
        memory: Some(1),
        ..sum
    };
    let capped = LinearCrossEntropyOptions { softcap: Some(0.7), memory: Some(100), ..none };
    let of_lse = LinearCrossEntropyOptions { z_loss: 0.1, memory: Some(1), ..mean };
    [
        (mean, false),
        (sum, true),
        (none, true),
        (smooth, false),
        (all, true),
        (capped, false),
        (of_lse, false),
    ]
    .map(|(options, has_bias)| Case { options, has_bias })
    .to_vec()
}

/// Every third row is ignored, the first one never. The targets are made on the input's device, because
/// a call may be captured in a CUDA graph.
fn targets_of(input: &Tensor, weight: &Tensor) -> Tensor {
    let rows = Tensor::arange(input.size()[0], (Kind::Int64, input.device()));
    let is_ignored = rows.remainder(3).eq(2);
    (rows * 7 + 3).remainder(weight.size()[0].max(1)).masked_fill(&is_ignored, IGNORED)
}

type Op =
    fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>, &LinearCrossEntropyOptions) -> Result<Tensor>;

impl Case {
    fn call(self, op: Op, inputs: &[Tensor]) -> Result<Tensor> {
        let [input, weight, bias @ ..] = inputs else { panic!("two inputs or three") };
        op(input, weight, &targets_of(input, weight), bias.first(), &self.options)
    }

    /// The suite expects outputs of the inputs' kind.
    fn of_inputs_kind(self, op: Op, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![self.call(op, inputs)?.f_to_kind(inputs[0].kind())?])
    }

    fn samples(self, sizes: &[[i64; 3]], kind: Kind, device: Device) -> Vec<Sample> {
        SampleTable::empty(["N", "D", "V"], |[n, d, v]| {
            let mut shapes = vec![Shape::new([n, d]), Shape::new([v, d])];
            shapes.extend(self.has_bias.then(|| Shape::new([v])));
            shapes
        })
        .with_sizes(sizes)
        .with_layouts([4, 3, 6])
        .samples(kind, device)
        .expect("samples")
    }

    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        let small = [[3, 4, 5], [1, 1, 1], [5, 3, 8], [4, 2, 17]];
        let large = [[9, 16, 1000], [300, 8, 3], [7, 64, 8192], [5, 24, 5001], [6, 8, 70_001]];
        eprintln!("{self:?}");
        test(&Suite {
            fused: &move |inputs| self.of_inputs_kind(f_linear_cross_entropy, inputs),
            reference: &move |inputs| self.of_inputs_kind(linear_cross_entropy_reference, inputs),
            small: &move |kind, device| self.samples(&small, kind, device),
            large: &move |kind, device| self.samples(&large, kind, device),
            terms: &|sample| sample.inputs[1].size().iter().sum(),
        });
    }
}

#[test]
fn forward_agrees_with_the_reference() {
    cases()
        .into_iter()
        .for_each(|case| case.suite(|suite| suite.forward_agrees_with_the_reference()));
}

#[test]
fn gradients_agree_with_the_reference() {
    for case in cases() {
        case.suite(|suite| suite.gradients_agree_with_the_reference());
    }
}

#[test]
fn gradcheck_of_every_small_sample() {
    cases()
        .into_iter()
        .for_each(|case| case.suite(|suite| suite.gradcheck_of_every_small_sample()));
}

#[test]
fn second_derivatives_of_every_small_sample() {
    for case in cases() {
        case.suite(|suite| suite.gradgradcheck_of_every_small_sample());
    }
}

#[test]
fn conformance_in_every_kind() {
    cases().into_iter().for_each(|case| case.suite(|suite| suite.conformance_of(suite.small)));
}

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let (x, w) = ([[0.5_f64, -1.0], [2.0, 0.25]], [[1.0_f64, 0.5], [-0.5, 2.0], [0.0, 1.0]]);
    let (b, targets) = ([0.1, 0.0, -0.3], [2_usize, 0]);
    let (smoothing, softcap, z_loss) = (0.2, 1.5, 0.05);
    let loss = |x: &[f64; 2], target: usize| {
        let z: Vec<f64> = w
            .iter()
            .zip(b)
            .map(|(w, b)| softcap * ((x[0] * w[0] + x[1] * w[1] + b) / softcap).tanh())
            .collect();
        let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
        let all: f64 = z.iter().map(|z| lse - z).sum();
        (1.0 - smoothing) * (lse - z[target]) + smoothing / 3.0 * all + z_loss * lse * lse
    };
    let expected = (loss(&x[0], targets[0]) + loss(&x[1], targets[1])) / 2.0;
    for device in devices() {
        let of =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        let inputs = [of(x.as_flattened(), &[2, 2]), of(w.as_flattened(), &[3, 2]), of(&b, &[3])];
        let targets = Tensor::from_slice(&[2_i64, 0]).to_device(device);
        let options = LinearCrossEntropyOptions {
            label_smoothing: smoothing,
            softcap: Some(softcap),
            z_loss,
            memory: Some(1),
            ..Default::default()
        };
        for op in [f_linear_cross_entropy as Op, linear_cross_entropy_reference] {
            let found = op(&inputs[0], &inputs[1], &targets, Some(&inputs[2]), &options);
            let found = found.expect("a loss").double_value(&[]);
            assert!((found - expected).abs() < 1e-13, "{found} {expected} on {device:?}");
        }
    }
}

/// Loss and gradients of libtorch's own layer and loss, under autocast, too.
#[test]
fn as_libtorch() {
    let libtorch: Op = |input, weight, targets, bias, options| {
        let logits = input.f_linear(weight, bias)?;
        let logits =
            if logits.kind() == Kind::Double { logits } else { logits.to_kind(Kind::Float) };
        Ok(logits.f_cross_entropy_loss::<&Tensor>(
            targets,
            None,
            options.reduction,
            options.ignore_index,
            options.label_smoothing,
        )?)
    };
    for device in devices() {
        for (kind, lower) in [
            (Kind::Double, None),
            (Kind::Float, None),
            (Kind::BFloat16, None),
            (Kind::Float, Some(Kind::BFloat16)),
        ] {
            let _autocast = lower.map(|kind| Autocast::new(device, kind).expect("autocast"));
            for memory in [None, Some(4 * 200 * 20)] {
                for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                    let options = LinearCrossEntropyOptions {
                        reduction,
                        memory,
                        ignore_index: IGNORED,
                        ..Default::default()
                    };
                    let case = Case { options, has_bias: true };
                    let random = |size: &[i64], scale: f64| {
                        (Tensor::randn(size, (Kind::Float, device)) * scale).to_kind(kind)
                    };
                    let inputs =
                        [random(&[70, 64], 1.0), random(&[200, 64], 0.3), random(&[200], 1.0)];
                    let run = |op: Op| {
                        let leaves = leaves(&inputs);
                        let loss = case.call(op, &leaves).expect("a loss");
                        let leaves: Vec<&Tensor> = leaves.iter().collect();
                        let sum = loss.sum(loss.kind());
                        let found = grad(&[&sum], &leaves, &GradOptions::default());
                        let found = found.expect("gradients").into_vec();
                        let mut all = vec![loss.detach()];
                        all.extend(found.into_iter().map(|gradient| gradient.expect("a gradient")));
                        all
                    };
                    let bound = match (kind, lower) {
                        (Kind::Double, _) => 1e-12,
                        (Kind::Float, None) => 1e-4,
                        _ => 3e-2,
                    };
                    for (ours, theirs) in run(f_linear_cross_entropy).iter().zip(&run(libtorch)) {
                        assert_eq!(ours.kind(), theirs.kind(), "{kind:?} {lower:?} {reduction:?}");
                        let largest = theirs.abs().max().double_value(&[]);
                        assert_close(ours, theirs, bound, bound * largest);
                    }
                }
            }
        }
        for rows in [0, 2] {
            let inputs = [
                Tensor::ones([rows, 4], (Kind::Float, device)),
                Tensor::ones([3, 4], (Kind::Float, device)),
            ];
            let targets = Tensor::full([rows], IGNORED, (Kind::Int64, device));
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                let options = LinearCrossEntropyOptions {
                    reduction,
                    ignore_index: IGNORED,
                    ..Default::default()
                };
                let of = |op: Op| {
                    let leaves = leaves(&inputs);
                    let loss =
                        op(&leaves[0], &leaves[1], &targets, None, &options).expect("a loss");
                    let sum = loss.sum(Kind::Float);
                    let found = grad(&[&sum], &[&leaves[0], &leaves[1]], &GradOptions::default());
                    let mut all = found.expect("gradients").into_vec();
                    all.push(Some(loss.detach()));
                    all
                };
                for (ours, theirs) in of(f_linear_cross_entropy).iter().zip(of(libtorch)) {
                    let (ours, theirs) = (ours.as_ref().unwrap(), theirs.unwrap());
                    assert_eq!(ours.size(), theirs.size());
                    assert!(
                        ours.allclose(&theirs, 0.0, 0.0, true),
                        "{rows} {reduction:?} {device:?}"
                    );
                }
            }
        }
    }
}

/// As for `cross_entropy`: an offset that all outputs of the layer share changes no bit.
#[test]
fn an_offset_of_all_logits_changes_nothing() {
    for device in devices() {
        for classes in [2, 1001] {
            let of = |size: &[i64], by: i64| {
                let count = Tensor::arange(size.iter().product::<i64>(), (Kind::Int64, device));
                (count * by).remainder(5).view(size).to_kind(Kind::Float) - 2.0
            };
            let inputs = [of(&[6, 3], 3), of(&[classes, 3], 7), of(&[classes], 4)];
            let options = LinearCrossEntropyOptions {
                label_smoothing: 0.1,
                ignore_index: IGNORED,
                ..Default::default()
            };
            let run = |offset: f64| {
                let mut leaves = leaves(&inputs);
                leaves[2] = (&inputs[2] + offset).set_requires_grad(true);
                let case = Case { options, has_bias: true };
                let loss = case.call(f_linear_cross_entropy, &leaves).expect("a loss");
                let wanted: Vec<&Tensor> = leaves.iter().collect();
                let found = grad(&[&loss], &wanted, &GradOptions::default()).expect("gradients");
                let mut all = vec![loss.detach()];
                all.extend(found.into_vec().into_iter().map(Option::unwrap));
                all
            };
            let expected = run(0.0);
            for offset in [-1e4, 1e6, -4e6] {
                for (found, expected) in run(offset).iter().zip(&expected) {
                    assert!(found.equal(expected), "{classes} {offset}: {found} {expected}");
                }
            }
        }
    }
}

/// Gradients that were computed in the forward pass are multiplied in each backward pass.
#[test]
fn any_incoming_gradient_any_number_of_times() {
    for device in devices() {
        let of = |size: &[i64]| Tensor::randn(size, (Kind::Float, device)).set_requires_grad(true);
        let (input, weight) = (of(&[9, 8]), of(&[40, 8]));
        let options = LinearCrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
        let targets = targets_of(&input, &weight);
        let loss =
            f_linear_cross_entropy(&input, &weight, &targets, None, &options).expect("a loss");
        let of = |factor: f64, retain: bool| -> Vec<Tensor> {
            let factor = Tensor::full([], factor, (Kind::Float, device));
            let options = GradOptions {
                grad_outputs: &[Some(&factor)],
                retain_graph: Some(retain),
                ..Default::default()
            };
            let found = grad(&[&loss], &[&input, &weight], &options).expect("gradients");
            found.into_vec().into_iter().map(Option::unwrap).collect()
        };
        let (one, half, again, last) =
            (of(1.0, true), of(0.5, true), of(1.0, true), of(0.5, false));
        for place in 0..2 {
            assert!(half[place].equal(&(&one[place] * 0.5)));
            assert!(again[place].equal(&one[place]) && last[place].equal(&half[place]));
        }
    }
}

/// The gradients of a mean over many rows are too small for `Half`, unless the loss is scaled first.
#[test]
fn half_gradients_keep_their_scale() {
    for device in devices() {
        let of = |size: &[i64]| Tensor::randn(size, (Kind::Float, device)).to_kind(Kind::Half);
        let inputs = [of(&[512, 16]), of(&[3000, 16]) * 0.25];
        let run = |inputs: &[Tensor]| {
            let leaves = leaves(inputs);
            let options = LinearCrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
            let loss = Case { options, has_bias: false }.call(f_linear_cross_entropy, &leaves);
            let scaled = loss.expect("a loss") * 65536.0;
            let found = grad(&[&scaled], &[&leaves[0], &leaves[1]], &GradOptions::default());
            found.expect("gradients").into_vec().into_iter().map(Option::unwrap).collect::<Vec<_>>()
        };
        let wide: Vec<Tensor> = inputs.iter().map(|input| input.to_kind(Kind::Float)).collect();
        for (ours, exact) in run(&inputs).iter().zip(&run(&wide)) {
            let largest = exact.abs().max().double_value(&[]);
            assert_close(&ours.to_kind(Kind::Float), exact, 1e-2, 2e-3 * largest);
        }
    }
}

/// In many chunks of bf16 the weight's gradient is at most twice as far from the exact one as that of
/// a composite which holds all logits.
#[test]
fn the_weight_s_gradient_is_exact_in_many_chunks() {
    for device in devices() {
        let (rows, features, classes) = (3072_i64, 64, 512);
        let random = |size: &[i64], scale: f64| {
            (Tensor::randn(size, (Kind::Float, device)) * scale).to_kind(Kind::BFloat16)
        };
        let inputs = [random(&[rows, features], 1.0), random(&[classes, features], 0.2)];
        let gradient = |op: Op, inputs: &[Tensor], options: LinearCrossEntropyOptions| {
            let leaves = leaves(inputs);
            let case = Case { options, has_bias: false };
            let loss = case.call(op, &leaves).expect("a loss");
            let found = grad(&[&loss], &[&leaves[1]], &GradOptions::default()).expect("a gradient");
            found.into_vec().remove(0).unwrap().to_kind(Kind::Double)
        };
        let default = LinearCrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
        let of = |chunks: i64, room: i64, accumulate_in_float: bool| {
            let memory = u64::try_from(rows / chunks * classes * 2 + room).ok();
            LinearCrossEntropyOptions { memory, accumulate_in_float, ..default }
        };
        let wide: Vec<Tensor> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        let exact = gradient(linear_cross_entropy_reference, &wide, default);
        let error = |found: &Tensor| (found - &exact).norm().double_value(&[]);
        let composite = error(&gradient(linear_cross_entropy_reference, &inputs, default));
        // With and without room for a sum in float.
        let sum = classes * features * 4;
        for options in
            [default, of(6, 0, false), of(12, sum, false), of(6, sum, true), of(rows, 0, false)]
        {
            let ours = error(&gradient(f_linear_cross_entropy, &inputs, options));
            assert!(ours <= 2.0 * composite, "{ours} {composite} {options:?} on {device:?}");
        }
    }
}

/// A weight in `Float` next to an input of a half kind: the loss and the gradients of the rounded weight, whose
/// own is `Float`. In powers of two, a product rounds in no kind.
#[test]
fn a_weight_in_float_is_rounded_and_has_a_gradient_in_float() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let of = |size: &[i64], scale: f64| Tensor::randn(size, (Kind::Float, device)) * scale;
            let inputs = [
                of(&[600, 40], 1.0).to_kind(kind),
                of(&[333, 40], 0.3),
                of(&[333], 1.0).to_kind(kind),
            ];
            for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                for (memory, accumulate_in_float) in
                    [(None, false), (Some(333 * 2 * 40), false), (None, true), (Some(1), true)]
                {
                    for (factor, retain_graph) in [(1.0, false), (0.25, true), (4.0, false)] {
                        let options = LinearCrossEntropyOptions {
                            reduction,
                            memory,
                            accumulate_in_float,
                            ignore_index: IGNORED,
                            ..Default::default()
                        };
                        let run = |is_cast: bool| {
                            let leaves = leaves(&inputs);
                            let weight = match is_cast {
                                true => leaves[1].to_kind(kind),
                                false => leaves[1].shallow_clone(),
                            };
                            let targets = targets_of(&inputs[0], &inputs[1]);
                            let loss = f_linear_cross_entropy(
                                &leaves[0],
                                &weight,
                                &targets,
                                Some(&leaves[2]),
                                &options,
                            );
                            let loss = loss.expect("a loss").sum(Kind::Float) * factor;
                            let options = GradOptions {
                                retain_graph: Some(retain_graph),
                                ..Default::default()
                            };
                            let wanted: Vec<&Tensor> = leaves.iter().collect();
                            let of = || {
                                let found = grad(&[&loss], &wanted, &options).expect("gradients");
                                found.into_vec().into_iter().map(Option::unwrap).collect::<Vec<_>>()
                            };
                            let found = of();
                            let again = if retain_graph { of() } else { Vec::new() };
                            assert!(found.iter().zip(&again).all(|(a, b)| a.equal(b)));
                            (loss.detach(), found)
                        };
                        let ((loss, found), (expected_loss, expected)) = (run(false), run(true));
                        let case = format!("{options:?} {factor} {kind:?} {device:?}");
                        assert!(loss.equal(&expected_loss), "{case}");
                        assert!(
                            found[0].equal(&expected[0]) && found[2].equal(&expected[2]),
                            "{case}"
                        );
                        assert_eq!(found[1].kind(), Kind::Float);
                        let rounded = found[1].to_kind(kind).to_kind(Kind::Float);
                        // On the CPU, only sums of several products are not rounded.
                        let is_sum = memory.is_some() || device.is_cuda();
                        if accumulate_in_float && is_sum || !accumulate_in_float && !is_sum {
                            assert_eq!(found[1].equal(&rounded), !accumulate_in_float, "{case}");
                        }
                        let smallest = if kind == Kind::Half { 2_f64.powi(-22) } else { 0.0 };
                        assert_close(&rounded, &expected[1], 0.0, smallest);
                    }
                }
            }
        }
    }
}

/// The loss of a model whose output layer is the embedding, and its gradients, under autocast and without.
#[test]
fn a_tied_table_of_a_language_model() {
    for device in devices() {
        for lower in [None, Some(Kind::BFloat16)] {
            let _autocast = lower.map(|kind| Autocast::new(device, kind).expect("autocast"));
            let vs = VarStore::new(device);
            let table = embedding(vs.root(), 700, 24, Default::default());
            let drawn = || Tensor::randint(700, [300], (Kind::Int64, device));
            let (inputs, targets) = (drawn(), drawn());
            // One token is a twentieth of all.
            let _ = inputs.narrow(0, 40, 15).fill_(7_i64);
            let run = |is_tied: bool, retain_graph: bool| {
                let (rows, weight) = match is_tied {
                    true => table.f_forward_tied(&inputs).expect("rows"),
                    false => (table.forward(&inputs), table.ws.shallow_clone()),
                };
                let options = Default::default();
                let loss = f_linear_cross_entropy(&rows.tanh(), &weight, &targets, None, &options);
                let loss = loss.expect("a loss") * 3.0;
                let options =
                    GradOptions { retain_graph: Some(retain_graph), ..Default::default() };
                let of = || grad(&[&loss], &[&table.ws], &options).expect("gradient").single();
                let first = of().expect("one");
                if retain_graph {
                    assert!(of().expect("again").equal(&first));
                }
                (loss.detach(), first)
            };
            let (loss, expected) = run(false, false);
            for retain_graph in [false, true] {
                let (found_loss, found) = run(true, retain_graph);
                assert!(found_loss.equal(&loss) && found.kind() == Kind::Float);
                let largest = expected.abs().max().double_value(&[]);
                assert_close(&found, &expected, 1e-6, 1e-6 * largest);
            }
        }
    }
}

/// A tied table under autocast takes no more memory than the cast of a weight and a lookup of its own.
#[test]
fn cuda_a_tied_table_takes_no_more_memory() {
    let Some(device) = caching_or_skip("cuda_a_tied_table_takes_no_more_memory") else { return };
    let vs = VarStore::new(device);
    let table = embedding(vs.root(), 30_000, 256, Default::default());
    let inputs = Tensor::randint(30_000, [8192], (Kind::Int64, device));
    let peak = |is_tied: bool| {
        let run = || {
            let (rows, weight) = match is_tied {
                true => table.f_forward_tied(&inputs).expect("rows"),
                false => (table.forward(&inputs), table.ws.to_kind(Kind::BFloat16)),
            };
            let rows = rows.to_kind(Kind::BFloat16);
            let loss = f_linear_cross_entropy(&rows, &weight, &inputs, None, &Default::default());
            drop((rows, weight));
            let found = grad(&[&loss.expect("a loss")], &[&table.ws], &GradOptions::default());
            drop(found.expect("gradients"));
        };
        run();
        reset_peak_memory_stats(device).expect("statistics");
        let before = memory_stats(device).expect("statistics").allocated;
        run();
        memory_stats(device).expect("statistics").peak_allocated - before
    };
    let (tied, untied) = (peak(true), peak(false));
    assert!(tied <= untied + (1 << 20), "{tied} bytes, and {untied} untied");
}

/// In half kinds the products on CUDA have a few classes more, which must not show: not even where an
/// ignored row of the input is NaN.
#[test]
fn classes_that_are_no_multiple_of_eight() {
    for device in devices() {
        for (kind, has_bias, classes) in [
            (Kind::BFloat16, false, 1001),
            (Kind::Half, true, 1001),
            (Kind::BFloat16, true, 1),
            (Kind::Half, false, 1),
        ] {
            let of = |size: &[i64], scale: f64| {
                (Tensor::randn(size, (Kind::Float, device)) * scale).to_kind(kind)
            };
            let mut inputs = vec![of(&[300, 24], 1.0), of(&[classes, 24], 0.3)];
            if has_bias {
                inputs.push(of(&[classes], 1.0));
            }
            let ignored = targets_of(&inputs[0], &inputs[1]).eq(IGNORED).unsqueeze(1);
            let with_nan = inputs[0].masked_fill(&ignored, f64::NAN);
            let run = |op: Op, inputs: &[Tensor]| {
                let leaves = leaves(inputs);
                let options =
                    LinearCrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
                let loss = Case { options, has_bias }.call(op, &leaves).expect("a loss") * 256.0;
                let wanted: Vec<&Tensor> = leaves.iter().collect();
                let found = grad(&[&loss], &wanted, &GradOptions::default()).expect("gradients");
                let mut all = vec![loss];
                all.extend(found.into_vec().into_iter().map(Option::unwrap));
                all
            };
            let wide: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(Kind::Double)).collect();
            let expected = run(linear_cross_entropy_reference, &wide);
            let found = run(f_linear_cross_entropy, &inputs);
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.size(), expected.size());
                let largest = expected.abs().max().double_value(&[]);
                assert_close(&found.to_kind(Kind::Double), expected, 2e-2, 8e-3 * largest);
            }
            inputs[0] = with_nan;
            let of_input = &run(f_linear_cross_entropy, &inputs)[1];
            let zeros = of_input.masked_select(&ignored);
            assert!(zeros.eq_tensor(&zeros.zeros_like()).all().int64_value(&[]) == 1);
        }
    }
}

/// The peak above operands and gradients stays within the bound.
#[test]
fn cuda_memory_stays_within_the_bound() {
    let Some(device) = caching_or_skip("cuda_memory_stays_within_the_bound") else { return };
    let (rows, features, classes) = (8192_i64, 256, 30_000);
    let of = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, device)).set_requires_grad(true);
    let (input, weight) = (of(&[rows, features]), of(&[classes, features]));
    let targets = Tensor::arange(rows, (Kind::Int64, device));
    let peak = |memory: Option<u64>, accumulate_in_float: bool| {
        let options =
            LinearCrossEntropyOptions { memory, accumulate_in_float, ..Default::default() };
        let run = || {
            let loss = f_linear_cross_entropy(&input, &weight, &targets, None, &options);
            let found =
                grad(&[&loss.expect("a loss")], &[&input, &weight], &GradOptions::default());
            drop(found.expect("gradients"));
        };
        // The first call makes cuBLAS' workspace.
        run();
        reset_peak_memory_stats(device).expect("statistics");
        let before = memory_stats(device).expect("statistics").allocated;
        run();
        memory_stats(device).expect("statistics").peak_allocated - before
    };
    let gradients = u64::try_from((rows + classes) * features * 2).unwrap();
    let slack = 1 << 20;
    for (memory, in_float) in [(40 << 20, false), (100 << 20, false), (200 << 20, true)] {
        let peak = peak(Some(memory), in_float);
        assert!(peak <= gradients + memory + slack, "{peak} bytes for {memory} and {gradients}");
    }
    let all_logits = u64::try_from(rows * classes * 2).unwrap();
    let peak = peak(None, false);
    assert!(peak <= gradients + all_logits / 5 + slack, "{peak} bytes by default");
}

#[test]
fn bad_input_is_refused_by_name() {
    let default = LinearCrossEntropyOptions::default();
    for device in devices() {
        let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let (x, w, t) = (of(&[3, 4], Kind::Float), of(&[5, 4], Kind::Float), of(&[3], Kind::Int64));
        let op = f_linear_cross_entropy as Op;
        let with = |options: LinearCrossEntropyOptions| op(&x, &w, &t, None, &options);
        for (error, parts) in [
            (op(&of(&[3], Kind::Float), &w, &t, None, &default), ["input", "[N, D]"]),
            (op(&of(&[3, 4], Kind::Int), &w, &t, None, &default), ["input", "Int"]),
            (op(&x, &of(&[5, 3], Kind::Float), &t, None, &default), ["weight", "[V, D]"]),
            (op(&x, &of(&[5, 4], Kind::Half), &t, None, &default), ["weight", "Half"]),
            (op(&x, &w, &t, Some(&of(&[4], Kind::Float)), &default), ["bias", "[V]"]),
            (op(&x, &w, &of(&[2], Kind::Int64), None, &default), ["target", "[N]"]),
            (op(&x, &w, &of(&[3], Kind::Float), None, &default), ["target", "Int64"]),
            (
                with(LinearCrossEntropyOptions { label_smoothing: -0.1, ..default }),
                ["label_smoothing", "-0.1"],
            ),
            (
                with(LinearCrossEntropyOptions { reduction: Reduction::Other(7), ..default }),
                ["reduction", "Other"],
            ),
            (with(LinearCrossEntropyOptions { softcap: Some(0.0), ..default }), ["softcap", "0"]),
            (with(LinearCrossEntropyOptions { softcap: Some(1e-60), ..default }), ["softcap", "0"]),
            (
                with(LinearCrossEntropyOptions { softcap: Some(1e60), ..default }),
                ["softcap", "inf"],
            ),
            (with(LinearCrossEntropyOptions { z_loss: f64::NAN, ..default }), ["z_loss", "NaN"]),
        ] {
            let error = error.expect_err("an error").to_string();
            assert!(
                error.starts_with("linear_cross_entropy: ") && !error.contains('\n'),
                "{error}"
            );
            assert!(parts.iter().all(|part| error.contains(part)), "{error}: {parts:?}");
        }
    }
    let of = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let targets = Tensor::from_slice(&[0_i64, 5, 1]);
    let error = f_linear_cross_entropy(&of(&[3, 4]), &of(&[5, 4]), &targets, None, &default)
        .expect_err("no class")
        .to_string();
    assert!(error.contains("target:") && error.contains("5 at 1"), "{error}");
}
