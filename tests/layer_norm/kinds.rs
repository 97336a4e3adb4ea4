//! Tests of the kinds that layer_norm accepts, compared with libtorch's own operator on the same
//! device.

use super::*;
use tch_extension::amp::Autocast;

const PARAMETER_KINDS: [Option<Kind>; 5] =
    [None, Some(Kind::Float), Some(Kind::Double), Some(Kind::Half), Some(Kind::BFloat16)];

fn for_each_mixture(mut test: impl FnMut(Device, Kind, Case, &[Tensor])) {
    for device in devices() {
        for kind in KINDS {
            for weight in PARAMETER_KINDS {
                for bias in PARAMETER_KINDS {
                    let case = Case { weight: weight.is_some(), bias: bias.is_some(), ..AFFINE };
                    let mut sample = case.samples(&[[3, 8]], Kind::Double, device).remove(0);
                    let kinds = [Some(kind), weight, bias].into_iter().flatten();
                    for (input, kind) in sample.inputs.iter_mut().zip(kinds) {
                        *input = input.to_kind(kind).set_requires_grad(true);
                    }
                    test(device, kind, case, &sample.inputs);
                }
            }
        }
    }
}

/// Checks that the result has the same kind as libtorch's and is as accurate, or that both refuse.
/// Returns whether they accept.
fn like_libtorch(device: Device, kind: Kind, case: Case, inputs: &[Tensor]) -> bool {
    let kinds: Vec<Kind> = inputs.iter().map(Tensor::kind).collect();
    let context = format!("{kinds:?} {case:?} on {device:?}");
    let (ours, theirs) = (case.fused(inputs), case.libtorch(inputs));
    assert_eq!(ours.is_ok(), theirs.is_ok(), "{context}: {ours:?} {theirs:?}");
    let (Ok(ours), Ok(theirs)) = (ours, theirs) else { return false };
    assert_eq!(ours[0].kind(), theirs[0].kind(), "{context}");
    assert!(Autocast::kind(device).is_some() || ours[0].kind() == kind, "{context}");
    let exact: Vec<Tensor> =
        inputs.iter().map(|input| input.detach().to_kind(Kind::Double)).collect();
    let exact = case.reference(&exact).expect("exact");
    assert_as_accurate(&ours[0].detach(), &theirs[0].detach(), &exact[0]);

    let gradients = |output: &Tensor| {
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        grad(&[&output.sum(Kind::Double)], &inputs, &GradOptions::default())
    };
    let ours = gradients(&ours[0]).expect("gradients");
    for (gradient, input) in ours.iter().zip(inputs) {
        let gradient = gradient.as_ref().expect("a gradient");
        assert_eq!((gradient.kind(), gradient.size()), (input.kind(), input.size()), "{context}");
    }
    true
}

#[test]
fn kinds_are_taken_and_refused_as_by_libtorch() {
    let mut taken = [0, 0];
    for_each_mixture(|device, kind, case, inputs| {
        taken[usize::from(device.is_cuda())] +=
            usize::from(like_libtorch(device, kind, case, inputs));
    });
    // Each kind is accepted with any combination of parameters; on the CPU, half inputs also accept
    // Float parameters.
    assert_eq!(taken[0], 4 * 4 + 2 * 3);
    assert!(taken[1] == 0 || taken[1] == 4 * 4, "{taken:?}");
}

#[test]
fn under_autocast_as_by_libtorch() {
    for_each_mixture(|device, kind, case, inputs| {
        for lower in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, lower).expect("autocast");
            let taken = like_libtorch(device, kind, case, inputs);
            if taken && device.is_cuda() && kind != Kind::Double {
                let output = case.fused(inputs).expect("output").remove(0);
                assert_eq!(output.kind(), Kind::Float, "{kind:?} {case:?}");
            }
        }
    });
}

/// With half inputs, the gradients of Float weights are computed and returned in Float.
#[test]
fn float_parameters_beside_half_inputs_have_float_gradients() {
    for kind in [Kind::Half, Kind::BFloat16] {
        let mut sample = AFFINE.samples(&[[300, 40]], Kind::Float, Device::Cpu).remove(0);
        sample.inputs[0] = sample.inputs[0].to_kind(kind);
        let run = |inputs: &[Tensor]| {
            let leaves = leaves(inputs);
            let output = AFFINE.fused(&leaves).expect("output").remove(0);
            // The incoming gradients are ones, which add no rounding error.
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            grad(&[&output.sum(Kind::Double)], &inputs, &GradOptions::default())
                .expect("gradients")
                .into_vec()
        };
        let mixed = run(&sample.inputs);
        let exact: Vec<Tensor> =
            sample.inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        for (mixed, exact) in mixed.iter().zip(&run(&exact)).skip(1) {
            let (mixed, exact) =
                (mixed.as_ref().expect("present"), exact.as_ref().expect("present"));
            assert_eq!(mixed.kind(), Kind::Float);
            assert_close(mixed, &exact.to_kind(Kind::Float), 1e-5, 1e-4);
        }
    }
}
