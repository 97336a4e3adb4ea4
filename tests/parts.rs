//! The two plain functions of each operator that are registered with the dispatcher give what the
//! operator and its graph node give.

use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::library::{Args, NONE, Operator};
use tch_extension::ops::definitions::*;
use tch_extension::ops::*;
use tch_extension::testing::{devices, prove};
use tch_extension::{Result, args};

const KINDS: [Kind; 2] = [Kind::Float, Kind::BFloat16];

/// Random arguments of one kind and device.
struct Arguments {
    options: (Kind, Device),
}

impl Arguments {
    fn randn(&self, size: &[i64]) -> Tensor {
        (Tensor::randn(size, (Kind::Float, self.options.1)) * 0.5).to_kind(self.options.0)
    }

    fn leaves<const N: usize>(&self, sizes: [&[i64]; N]) -> [Tensor; N] {
        sizes.map(|size| self.randn(size).set_requires_grad(true))
    }
}

/// Gradients for outputs of these sizes, and those that the operator's node makes of them.
fn of_node(outputs: &[&Tensor], inputs: &[&Tensor]) -> (Vec<Tensor>, Vec<Tensor>) {
    let incoming: Vec<Tensor> = outputs.iter().map(|output| output.detach().sin() + 0.5).collect();
    let along: Vec<Option<&Tensor>> = incoming.iter().map(Some).collect();
    let options = GradOptions { grad_outputs: &along, ..Default::default() };
    let gradients = grad(outputs, inputs, &options).expect("gradients");
    let gradients = gradients.into_vec().into_iter().map(|gradient| gradient.expect("a gradient"));
    (incoming, gradients.collect())
}

tch_extension::register! {
    namespace parts;
    AddRmsNorm,
    CrossEntropy,
    GeluMlp,
    Gru,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    Lltm,
    LltmCell,
    Lstm,
    MatmulAddRelu,
    Rope,
    SwigluMlp,
}

/// The gradients by the registered operator `NAME_backward`.
fn gradients(name: &str, arguments: Args<'_>) -> Result<Vec<Tensor>> {
    Operator::find(&format!("parts::{name}_backward"))?.call(arguments)
}

/// The outputs and what is kept, by the registered operator `NAME_forward`.
fn forward(name: &str, arguments: Args<'_>) -> Result<Vec<Tensor>> {
    Operator::find(&format!("parts::{name}_forward"))?.call(arguments)
}

/// A tensor that may be absent.
trait AsTensor {
    fn as_tensor(&self) -> Option<&Tensor>;
}

impl AsTensor for Tensor {
    fn as_tensor(&self) -> Option<&Tensor> {
        Some(self)
    }
}

impl AsTensor for Option<Tensor> {
    fn as_tensor(&self) -> Option<&Tensor> {
        self.as_ref()
    }
}

#[track_caller]
fn assert_equal<'a, T: AsTensor + 'a>(
    what: &str,
    found: impl IntoIterator<Item = &'a T>,
    expected: &[Tensor],
) {
    let found: Vec<&Tensor> = found.into_iter().filter_map(T::as_tensor).collect();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        assert_eq!(found.size(), expected.size(), "{what} {place}");
        assert_eq!(found.kind(), expected.kind(), "{what} {place}");
        let tolerance = if found.kind() == Kind::Float { 1e-5 } else { 2e-2 };
        let (found, expected) = (found.to_kind(Kind::Float), expected.to_kind(Kind::Float));
        assert!(found.allclose(&expected, tolerance, tolerance, false), "{what} {place}");
    }
}

/// Runs a test with arguments of each kind and device.
fn for_all(test: impl Fn(&Arguments) -> Result<()>) {
    for device in devices() {
        for kind in KINDS {
            tch::manual_seed(7);
            let arguments = Arguments { options: (kind, device) };
            test(&arguments).unwrap_or_else(|error| panic!("{kind:?} {device:?}: {error}"));
        }
    }
}

#[test]
fn norms() {
    for_all(|arguments| {
        let [x, r, w, b] = arguments.leaves([&[3, 4, 40], &[3, 4, 40], &[40], &[40]]);
        let (shape, eps) = (&[40_i64][..], 1e-5);

        let y = f_layer_norm(&x, shape, Some(&w), Some(&b), eps)?;
        let (incoming, expected) = of_node(&[&y], &[&x, &w, &b]);
        let guard = tch::no_grad_guard();
        let found = forward("layer_norm", args![&x, shape, &w, &b, eps, 0b111])?;
        let [found, mean, rstd] = &found[..] else { unreachable!("three results") };
        assert_equal("layer_norm", [found], &[y]);
        assert_eq!((mean.size(), rstd.size()), (vec![12], vec![12]));
        let found = |needs: i64| {
            let arguments = args![&incoming[0], mean, rstd, &x, shape, &w, &b, eps, needs];
            gradients("layer_norm", arguments)
        };
        assert_equal("layer_norm", &found(0b111)?, &expected);
        let some = found(0b100)?;
        assert_eq!((some[0].size(), some[1].size()), (vec![0], vec![0]));
        assert_equal("layer_norm's bias", &some[2..], &expected[2..]);
        let kept = forward("layer_norm", args![&x, shape, &w, &b, eps, 0b100])?;
        assert_eq!((kept[1].numel(), kept[2].numel()), (0, 0));
        drop(guard);

        let (h, y) = f_add_rms_norm(
            &x,
            &r,
            shape,
            Some(&w),
            &AddRmsNormOptions { eps: Some(eps), dropout: 0.0 },
        )?;
        let (incoming, expected) = of_node(&[&h, &y], &[&x, &r, &w]);
        let _guard = tch::no_grad_guard();
        let found = forward("add_rms_norm", args![&x, &r, shape, &w, eps, 0.0, 0b111])?;
        let [found_h, found_y, rstd, dropped] = &found[..] else { unreachable!("four results") };
        let (of_h, of_y) = (&incoming[0], &incoming[1]);
        let found = |needs: i64| {
            let kept =
                args![of_h, of_y, found_h, rstd, dropped, &x, &r, shape, &w, eps, 0.0, needs];
            gradients("add_rms_norm", kept)
        };
        assert_equal("add_rms_norm", [found_h, found_y], &[h, y]);
        let all = found(0b111)?;
        assert_equal("add_rms_norm", &all, &expected);
        assert!(all[0].data_ptr() != all[1].data_ptr());
        assert_equal("add_rms_norm", &found(0b110)?[1..], &expected[1..]);
        Ok(())
    });
}

#[test]
fn norms_are_what_they_say() {
    for device in devices() {
        let arguments = Arguments { options: (Kind::Double, device) };
        let [x, r, w, b] = arguments.leaves([&[3, 8], &[3, 8], &[8], &[8]]);
        let (shape, eps, dropout) = (vec![8], 1e-5, 0.0);
        for is_affine in [true, false] {
            let [w, b] = [&w, &b].map(|parameter| is_affine.then_some(parameter));
            let (input, residual, weight, bias, normalized_shape) = (&x, &r, w, b, shape.clone());
            let of = LayerNorm { normalized_shape, eps };
            prove(&of, &LayerNormIn { input, weight, bias }).expect("layer_norm");
            let of = AddLayerNorm { normalized_shape: shape.clone(), eps, dropout };
            prove(&of, &AddLayerNormIn { input, residual, weight, bias }).expect("add_layer_norm");
            for eps in [None, Some(eps)] {
                let of = RmsNorm { normalized_shape: shape.clone(), eps };
                prove(&of, &RmsNormIn { input, weight }).expect("rms_norm");
                let of = AddRmsNorm { normalized_shape: shape.clone(), eps, dropout };
                prove(&of, &AddRmsNormIn { input, residual, weight }).expect("add_rms_norm");
            }
        }
    }
}

#[test]
fn layers_are_what_they_say() {
    for device in devices() {
        let arguments = Arguments { options: (Kind::Double, device) };
        let [x, h, c] = arguments.leaves([&[3, 2, 3], &[2, 2], &[2, 2]]);
        for lengths in [None, Some(vec![2, 2]), Some(vec![1, 2])] {
            // Lengths that differ are copied to the GPU, which no graph captures.
            if device.is_cuda() && lengths.as_deref() == Some(&[1, 2]) {
                continue;
            }
            for has_biases in [true, false] {
                let leaves =
                    |rows: i64| arguments.leaves([&[rows, 3], &[rows, 2], &[rows], &[rows]]);
                let [w_ih, w_hh, b_ih, b_hh] = &leaves(8);
                let [b_ih, b_hh] = [b_ih, b_hh].map(|bias| has_biases.then_some(bias));
                let (input, h, c) = (&x, &h, &c);
                let of = LstmIn { input, h, c, w_ih, w_hh, b_ih, b_hh };
                prove(&Lstm { lengths: lengths.clone() }, &of).expect("lstm");
                let [w_ih, w_hh, b_ih, b_hh] = &leaves(6);
                let [b_ih, b_hh] = [b_ih, b_hh].map(|bias| has_biases.then_some(bias));
                let of = GruIn { input, h, w_ih, w_hh, b_ih, b_hh };
                prove(&Gru { lengths: lengths.clone() }, &of).expect("gru");
            }
        }
    }
}

#[test]
fn losses() {
    for_all(|arguments| {
        for (reduction, name) in [(Reduction::Mean, "mean"), (Reduction::None, "none")] {
            let [x, w, b] = arguments.leaves([&[6, 16], &[11, 16], &[11]]);
            let targets = Tensor::from_slice(&[0_i64, 10, 3, -100, 2, 5]).to(arguments.options.1);
            let options = LinearCrossEntropyOptions { reduction, ..Default::default() };
            let loss = f_linear_cross_entropy(&x, &w, &targets, Some(&b), &options)?;
            let (incoming, expected) = of_node(&[&loss], &[&x, &w, &b]);
            tch::no_grad(|| -> Result<()> {
                let (op, grad) = ("linear_cross_entropy", &incoming[0]);
                let all =
                    args![&x, &w, &targets, &b, -100, name, 0.0, NONE, 0.0, NONE, false, 0b1011];
                let found = forward(op, all)?;
                assert_equal(op, &found[..1], &[loss]);
                assert_eq!(found[1].dim() == 2, reduction == Reduction::Mean);
                let (of_x, of_w, of_b) = (&found[1], &found[2], &found[3]);
                let all = args![
                    grad, of_x, of_w, of_b, &x, &w, &targets, &b, -100, name, 0.0, NONE, 0.0, NONE,
                    false, 0b1011,
                ];
                assert_equal(op, &gradients(op, all)?, &expected);
                // The layout of what was kept does not matter, and what was not kept is computed.
                let turned = of_w.transpose(0, 1).contiguous().transpose(0, 1);
                let all = args![
                    grad, NONE, &turned, of_b, &x, &w, &targets, &b, -100, name, 0.0, NONE, 0.0,
                    NONE, false, 0b1011,
                ];
                assert_equal(op, &gradients(op, all)?, &expected);
                let all = args![
                    grad, NONE, &turned, NONE, &x, &w, &targets, &b, -100, name, 0.0, NONE, 0.0,
                    NONE, false, 0b0010,
                ];
                assert_equal(op, &gradients(op, all)?[1..2], &expected[1..2]);
                Ok(())
            })?;
            let [logits] = arguments.leaves([&[6, 11]]);
            let options = CrossEntropyOptions { reduction, ..Default::default() };
            let loss = f_cross_entropy(&logits, &targets, &options)?;
            let (incoming, expected) = of_node(&[&loss], &[&logits]);
            tch::no_grad(|| -> Result<()> {
                let op = "cross_entropy";
                let found = forward(op, args![&logits, &targets, NONE, -100, name, 0.0, 0b1])?;
                assert_equal(op, &found[..1], &[loss]);
                let of = |kept: &Tensor, targets: &Tensor| {
                    let all =
                        args![&incoming[0], kept, &logits, targets, NONE, -100, name, 0.0, 0b1];
                    gradients(op, all)
                };
                assert_equal(op, &of(&found[1], &targets)?, &expected);
                let refused = |found: Result<Vec<Tensor>>, words: &str| {
                    let error = found.expect_err(words).to_string();
                    assert!(error.contains(words), "{error}");
                };
                let (ones, wrong) = (logits.ones_like(), &targets + 100);
                if reduction == Reduction::None {
                    // The rule keeps nothing here, so a tensor in this place is ignored.
                    assert_equal(op, &of(&ones, &targets)?, &expected);
                    if arguments.options.1 == Device::Cpu {
                        refused(of(&ones, &wrong), "cross_entropy: target: expected");
                    }
                } else {
                    // A kernel would read it past its end.
                    refused(of(&ones.narrow(0, 0, 3), &targets), "kept_input: expected");
                }
                Ok(())
            })?;
        }
        Ok(())
    });
}

#[test]
fn a_forward_pass_keeps_what_a_trace_knows() {
    for device in devices() {
        let x = Tensor::ones([3, 8], (Kind::Float, device));
        let call = |dropout: f64| {
            forward("add_rms_norm", args![&x, &x, &[8_i64][..], NONE, 1e-5, dropout, 0b11])
        };
        call(0.0).expect("without dropout");
        let error = call(0.5).expect_err("a mask would be kept").to_string();
        assert!(error.contains("call add_rms_norm"), "{error}");
    }
}

#[test]
fn products_and_mlps() {
    for_all(|arguments| {
        let [x, w, b] = arguments.leaves([&[2, 3, 16], &[24, 16], &[24]]);
        let y = f_linear(&x, &w, Some(&b))?;
        let (incoming, expected) = of_node(&[&y], &[&x, &w, &b]);
        tch::no_grad(|| -> Result<()> {
            let found = gradients("linear", args![&incoming[0], &x, &w, &b, 0b111])?;
            assert_equal("linear", &found, &expected);
            let found = gradients("linear", args![&incoming[0], &x, &w, &b, 0b010])?;
            assert_eq!((found[0].numel(), found[2].numel()), (0, 0));
            assert_equal("linear", &found[1..2], &expected[1..2]);
            Ok(())
        })?;
        let [lhs, rhs, bias] = arguments.leaves([&[2, 8, 16], &[16, 24], &[8, 1]]);
        let y = f_matmul_add_relu(&lhs, &rhs, &bias)?;
        let (incoming, expected) = of_node(&[&y], &[&lhs, &rhs, &bias]);
        tch::no_grad(|| -> Result<()> {
            let arguments = args![&incoming[0], &y, &lhs, &rhs, &bias, 0b111];
            assert_equal("matmul_add_relu", &gradients("matmul_add_relu", arguments)?, &expected);
            Ok(())
        })?;
        // As many dimensions as an operator has in the place of what it did not keep.
        let size = [&[1; 14][..], &[2, 16]].concat();
        let [lhs, rhs, bias] = arguments.leaves([&size, &[16, 24], &[24]]);
        let y = f_matmul_add_relu(&lhs, &rhs, &bias)?;
        let (incoming, expected) = of_node(&[&y], &[&lhs, &rhs, &bias]);
        tch::no_grad(|| -> Result<()> {
            let arguments = args![&incoming[0], &y, &lhs, &rhs, &bias, 0b111];
            assert_equal("matmul_add_relu", &gradients("matmul_add_relu", arguments)?, &expected);
            Ok(())
        })?;
        for save_activations in [true, false] {
            let [w2, b2] = arguments.leaves([&[8, 24], &[8]]);
            let options = GeluMlpOptions { save_activations, ..Default::default() };
            let y = f_gelu_mlp(&x, &w, Some(&b), &w2, Some(&b2), &options)?;
            let (incoming, expected) = of_node(&[&y], &[&x, &w, &b, &w2, &b2]);
            tch::no_grad(|| -> Result<()> {
                let (act, saves) = ("gelu_tanh", save_activations);
                let made = forward("gelu_mlp", args![&x, &w, &b, &w2, &b2, act, saves, 0b11111])?;
                let (found, z, a) = (&made[0], &made[1], &made[2]);
                assert_equal("gelu_mlp", [found], &[y]);
                assert_eq!((z.numel() > 0, a.numel() > 0), (true, saves));
                // Laid out as another caller might.
                let (g, z) = (&incoming[0], &z.tr().contiguous().tr());
                let arguments = args![g, z, a, &x, &w, &b, &w2, &b2, act, saves, 0b11111];
                let found = gradients("gelu_mlp", arguments)?;
                assert_equal("gelu_mlp", &found, &expected);
                Ok(())
            })?;
            let [up] = arguments.leaves([&[24, 16]]);
            let options = SwigluMlpOptions { save_activations };
            let y = f_swiglu_mlp(&x, &w, &up, &w2, &options)?;
            let (incoming, expected) = of_node(&[&y], &[&x, &w, &up, &w2]);
            tch::no_grad(|| -> Result<()> {
                let saves = save_activations;
                let made = forward("swiglu_mlp", args![&x, &w, &up, &w2, saves, 0b1111])?;
                let (found, gate, h) = (&made[0], &made[1], &made[3]);
                assert_equal("swiglu_mlp", [found], &[y]);
                assert_eq!((gate.numel() > 0, h.numel() > 0), (true, saves));
                let arguments =
                    args![&incoming[0], gate, &made[2], h, &x, &w, &up, &w2, saves, 0b1111];
                let found = gradients("swiglu_mlp", arguments)?;
                assert_equal("swiglu_mlp", &found, &expected);
                Ok(())
            })?;
        }
        Ok(())
    });
}

#[test]
fn layers() {
    for_all(|arguments| {
        let [x, h, c] = arguments.leaves([&[5, 4, 16], &[4, 24], &[4, 24]]);
        for lengths in [None, Some(&[2, 3, 1, 3][..]), Some(&[3, 3, 3, 3][..])] {
            let [w_ih, w_hh, b_ih, b_hh] = arguments.leaves([&[96, 16], &[96, 24], &[96], &[96]]);
            let (w, b) = ([&w_ih, &w_hh], [&b_ih, &b_hh]);
            let of = RnnWeights { w_ih: w[0], w_hh: w[1], b_ih: Some(b[0]), b_hh: Some(b[1]) };
            let (y, (h1, c1)) = f_lstm(&x, (&h, &c), &of, &RnnOptions { lengths })?;
            layer("lstm", &[&y, &h1, &c1], &[&x, &h, &c, w[0], w[1], b[0], b[1]], lengths)?;

            let [w_ih, w_hh, b_ih, b_hh] = arguments.leaves([&[72, 16], &[72, 24], &[72], &[72]]);
            let (w, b) = ([&w_ih, &w_hh], [&b_ih, &b_hh]);
            let of = RnnWeights { w_ih: w[0], w_hh: w[1], b_ih: Some(b[0]), b_hh: Some(b[1]) };
            let (y, h1) = f_gru(&x, &h, &of, &RnnOptions { lengths })?;
            layer("gru", &[&y, &h1], &[&x, &h, w[0], w[1], b[0], b[1]], lengths)?;
        }
        Ok(())
    });
}

/// Compares the registered operators of an LSTM or GRU with the outputs that the operator made of these
/// tensors, and with its gradients.
fn layer(
    name: &str,
    outputs: &[&Tensor],
    tensors: &[&Tensor],
    lengths: Option<&[i64]>,
) -> Result<()> {
    fn and<'a>(args: Args<'a>, tensors: &[&'a Tensor]) -> Args<'a> {
        tensors.iter().fold(args, |args, tensor| args.arg(*tensor))
    }
    let (incoming, expected) = of_node(outputs, tensors);
    let guard = tch::no_grad_guard();
    let all = (1_i64 << tensors.len()) - 1;
    let made = forward(name, and(Args::new(), tensors).arg(lengths).arg(all))?;
    let (made, kept) = made.split_at(outputs.len());
    let owned: Vec<Tensor> = outputs.iter().map(|output| output.detach()).collect();
    assert_equal(name, made, &owned);
    // What is kept has the steps of the longest sequence.
    let steps = if lengths.is_some() { 3 } else { 5 };
    assert_eq!(kept[1].size(), [steps, 4, 96], "{name}");
    assert_eq!(
        (kept[0].dim(), kept[0].numel() > 0),
        if name == "lstm" { (3, true) } else { (16, false) }
    );

    let incoming: Vec<&Tensor> = incoming.iter().collect();
    let of_kept = |c: &Tensor, activations: &Tensor, needs: i64| {
        let args = and(and(Args::new(), &incoming), &[&made[0], c, activations]);
        gradients(name, and(args, tensors).arg(lengths).arg(needs))
    };
    assert_equal(name, &of_kept(&kept[0], &kept[1], all)?, &expected);
    let some = of_kept(&kept[0], &kept[1], 0b1000)?;
    assert_eq!((some[0].size(), some[1].size(), some[2].size()), (vec![0], vec![0], vec![0]));
    assert_equal(name, &some[3..4], &expected[3..4]);
    // The gradients are made of what was kept: the forward pass runs once. In half kinds on the CPU, and where
    // our kernels on CUDA would be one for each step, it runs once more.
    let is_half = made[0].kind() == Kind::BFloat16;
    if made[0].device() == Device::Cpu {
        for place in [0, 1].into_iter().filter(|place| kept[*place].numel() > 0) {
            let of = |at: usize| if at == place { kept[at].zeros_like() } else { kept[at].copy() };
            let of_zeros = of_kept(&of(0), &of(1), all)?;
            let is_same = of_zeros[0].equal(&of_kept(&kept[0], &kept[1], all)?[0]);
            assert_eq!(is_same, is_half, "{name} {place}");
        }
    }
    // Without all that was kept, it runs once more.
    let absent = Tensor::empty([0; 16], (made[0].kind(), made[0].device()));
    assert_equal(name, &of_kept(&kept[0], &absent, all)?, &expected);
    assert_equal(name, &of_kept(&absent, &kept[1], all)?, &expected);

    let none = forward(name, and(Args::new(), tensors).arg(lengths).arg(0))?;
    assert!(none[outputs.len()..].iter().all(|kept| kept.dim() == 16), "{name}");
    drop(guard);
    let wrong = of_kept(&kept[0], &kept[1].narrow(0, 0, 2), all)
        .expect_err("a step is missing")
        .to_string();
    assert!(wrong.contains(&format!("{name}_backward: kept_activations: expected")), "{wrong}");
    Ok(())
}

#[test]
fn sequences() {
    for_all(|arguments| {
        let [x, h, c] = arguments.leaves([&[5, 4, 16], &[4, 24], &[4, 24]]);
        for steps in [1, 2, 5] {
            let x = x.detach().narrow(0, 0, steps).copy().set_requires_grad(true);
            let [w, b] = arguments.leaves([&[72, 40], &[72]]);
            let (y, (h1, c1)) = f_lltm(&x, &w, Some(&b), (&h, &c))?;
            let (incoming, expected) = of_node(&[&y, &h1, &c1], &[&x, &w, &b, &h, &c]);
            tch::no_grad(|| -> Result<()> {
                let what = format!("lltm {steps}");
                let made = forward("lltm", args![&x, &w, &b, &h, &c, 0b11111])?;
                assert_equal(&what, &made[..3], &[y.detach(), h1.detach(), c1.detach()]);
                assert_eq!(made[3].size(), [steps, 4, 24], "{what}");
                assert_eq!(made[4].size(), [steps, 4, 72], "{what}");
                let found = |kept: &Tensor, needs: i64| {
                    let (g, y, last_c) = (&incoming, &made[0], &made[2]);
                    let of = args![&g[0], &g[1], &g[2], y, last_c, &made[3], kept];
                    gradients("lltm", of.arg(&x).arg(&w).arg(&b).arg(&h).arg(&c).arg(needs))
                };
                assert_equal(&what, &found(&made[4], 0b11111)?, &expected);
                let of_h = found(&made[4], 0b01000)?;
                assert_eq!((of_h[0].size(), of_h[4].size()), (vec![0], vec![0]), "{what}");
                assert_equal(&what, &of_h[3..4], &expected[3..4]);
                // The forward pass runs once: the gradients are made of what it kept. In half kinds on
                // the CPU it runs once more.
                if x.device().is_cuda() || x.kind() == Kind::Float {
                    let of_zeros = found(&made[4].zeros_like(), 0b11111)?;
                    assert!(!of_zeros[0].equal(&found(&made[4], 0b11111)?[0]), "{what}");
                    let absent = Tensor::empty([0; 16], (x.kind(), x.device()));
                    let error = found(&absent, 0b11111).expect_err("nothing was kept").to_string();
                    assert!(error.contains("lltm_forward"), "{error}");
                }
                Ok(())
            })?;
        }
        let x = x.select(0, 0).detach().set_requires_grad(true);
        let [w] = arguments.leaves([&[72, 40]]);
        let (h1, c1) = f_lltm_cell(&x, &w, None, (&h, &c))?;
        let (incoming, expected) = of_node(&[&h1, &c1], &[&x, &w, &h, &c]);
        tch::no_grad(|| -> Result<()> {
            let made = forward("lltm_cell", args![&x, &w, NONE, &h, &c, 0b11011])?;
            assert_equal("lltm_cell", &made[..2], &[h1.detach(), c1.detach()]);
            assert_eq!(made[2].size(), [4, 72]);
            let of = args![&incoming[0], &incoming[1], &made[1], &made[2], &x, &w, NONE, &h, &c];
            let found = gradients("lltm_cell", of.arg(0b11011))?;
            assert_eq!(found[2].size(), [0]);
            let found = [&found[0], &found[1], &found[3], &found[4]].map(Tensor::shallow_clone);
            assert_equal("lltm_cell", &found, &expected);
            Ok(())
        })
    });
}

/// What every operator proves, in the kind and on the devices of the other proofs.
#[test]
fn cuda_and_cpu_sequences_are_proven() {
    for device in devices() {
        tch::manual_seed(9);
        let arguments = Arguments { options: (Kind::Double, device) };
        for steps in [0, 1, 2, 3] {
            let [x, h, c] = &arguments.leaves([&[steps, 2, 3], &[2, 2], &[2, 2]]);
            let [w, b] = &arguments.leaves([&[6, 5], &[6]]);
            for bias in [Some(b), None] {
                prove(&Lltm {}, &LltmIn { input: x, weight: w, bias, h, c }).expect("lltm");
            }
        }
        let [x, h, c] = &arguments.leaves([&[2, 3], &[2, 2], &[2, 2]]);
        let [w, b] = &arguments.leaves([&[6, 5], &[1, 6]]);
        for bias in [Some(b), None] {
            prove(&LltmCell {}, &LltmCellIn { input: x, weight: w, bias, h, c })
                .expect("lltm_cell");
        }
    }
}

#[test]
fn rotations() {
    for_all(|arguments| {
        let [q, k] = arguments.leaves([&[2, 5, 3, 16], &[2, 5, 1, 16]]);
        let (cos, sin) = rope_tables(9, 8, 10000.0, (Kind::Float, arguments.options.1));
        let options = RopeOptions { offset: 2, interleaved: true, in_place: false };
        let (new_q, new_k) = f_rope(&q, &k, &cos, &sin, &options)?;
        let (incoming, expected) = of_node(&[&new_q, &new_k], &[&q, &k]);
        tch::no_grad(|| -> Result<()> {
            let of = |grad_q, grad_k, needs: i64| {
                let (q, k) = (&q, &k);
                gradients("rope", args![grad_q, grad_k, q, k, &cos, &sin, true, 2, needs])
            };
            let grads = [Some(&incoming[0]), Some(&incoming[1])];
            assert_equal("rope", &of(grads[0], grads[1], 0b11)?, &expected);
            // What is not needed is empty, and an absent gradient is zero.
            let alone = of(grads[0], grads[1], 0b10)?;
            assert_eq!(alone[0].size(), [0]);
            assert_equal("rope of k", &alone[1..], &expected[1..]);
            let of_k = of(None, grads[1], 0b11)?;
            assert_equal("rope of k", &of_k, &[q.zeros_like(), expected[1].shallow_clone()]);
            Ok(())
        })
    });
}
