//! Gradient clipping.

use super::reference::Reference;
use super::updates::{KINDS, assert_agree, build, rules};
use super::*;
use tch_extension::testing::{assert_close, devices};

#[test]
fn the_norm_is_that_of_all_gradients() {
    let _alone = serially();
    tch::manual_seed(11);
    for device in devices() {
        for kind in KINDS {
            let leaves = leaves(&SIZES, kind, device);
            accumulate(&leaves, 0.3);
            let before = copies(&gradients(&leaves));
            let expected = Reference::norm(&before);
            let optimizer = build(rules()[0], &leaves, 0.1);
            let norm = optimizer.clip_grad_norm(f64::INFINITY).expect("clip_grad_norm");
            assert_eq!((norm.kind(), norm.size(), norm.device()), (Kind::Double, vec![], device));
            let rtol = if kind == Kind::Double { 1e-14 } else { 1e-6 };
            assert!((norm.double_value(&[]) / expected - 1.0).abs() < rtol, "{kind:?}");
            assert_eq!(bits(&gradients(&leaves)), bits(&before), "nothing to clip");

            for max in [2.0 * expected, 0.25 * expected, 0.0] {
                let unclipped = copies(&gradients(&leaves));
                let clip = (max / (Reference::norm(&unclipped) + 1e-6)).min(1.0);
                let _norm = optimizer.clip_grad_norm(max).expect("clip_grad_norm");
                for (now, before) in gradients(&leaves).iter().zip(&unclipped) {
                    let (rtol, atol) = tch_extension::testing::tolerance(kind);
                    let expected = before.to_kind(Kind::Double) * clip;
                    assert_close(&now.to_kind(Kind::Double), &expected, rtol, atol);
                }
            }
        }
    }
}

#[test]
fn a_step_that_clips_is_clipping_and_a_step() {
    let _alone = serially();
    tch::manual_seed(12);
    for device in devices() {
        for kind in KINDS {
            for rule in rules() {
                for max in [1e9, 2.0] {
                    let leaves = leaves(&SIZES, kind, device);
                    let mut reference = Reference::new(rule, 0.01, &leaves);
                    let mut optimizer = build(rule, &leaves, 0.01);
                    assert!(optimizer.grad_norm().expect("grad_norm").is_none());
                    optimizer.set_clip_norm(Some(max)).expect("set_clip_norm");
                    for _ in 0..4 {
                        accumulate(&leaves, 1.0);
                        let before = copies(&gradients(&leaves));
                        let norm = Reference::norm(&before);
                        reference.step(&before, Some(max));
                        optimizer.step().expect("step");
                        let ours = optimizer
                            .grad_norm()
                            .expect("grad_norm")
                            .expect("a norm")
                            .double_value(&[]);
                        assert!((ours / norm - 1.0).abs() < 1e-6, "{kind:?}: {ours} and {norm}");
                        assert_eq!(bits(&gradients(&leaves)), bits(&before), "not rewritten");
                    }
                    assert_agree(&leaves, &reference, kind);
                }
            }
        }
    }
}

#[test]
fn both_ways_of_clipping_have_the_same_bits() {
    let _alone = serially();
    for device in devices() {
        for kind in [Kind::Float, Kind::Double] {
            let run = |rewrites: bool| {
                tch::manual_seed(13);
                let leaves = leaves(&SIZES, kind, device);
                let mut optimizer = build(rules()[0], &leaves, 0.01);
                optimizer.set_clip_norm((!rewrites).then_some(1.0)).expect("set_clip_norm");
                for _ in 0..3 {
                    accumulate(&leaves, 1.0);
                    if rewrites {
                        let _norm = optimizer.clip_grad_norm(1.0).expect("clip_grad_norm");
                    }
                    optimizer.step().expect("step");
                }
                bits(&leaves)
            };
            assert_eq!(run(true), run(false), "{kind:?} on {device:?}");
        }
    }
}

#[test]
fn values_are_clamped_and_nan_stays() {
    let _alone = serially();
    tch::manual_seed(14);
    for device in devices() {
        for kind in KINDS {
            let leaves = leaves(&SIZES, kind, device);
            accumulate(&leaves, 1.0);
            let with_nan = leaves[6].grad();
            let _ = with_nan.get(3).get(4).fill_(f64::NAN);
            let _ = with_nan.get(5).get(6).fill_(f64::INFINITY);
            let expected: Vec<Tensor> =
                gradients(&leaves).iter().map(|g| g.clamp(-0.5, 0.5)).collect();
            build(rules()[0], &leaves, 0.1).clip_grad_value(0.5).expect("no error");
            // libtorch's kernel for CUDA changes the bits of a NaN of kind Half.
            let alike = |tensors: &[Tensor]| -> Vec<Tensor> {
                tensors.iter().map(|g| g.masked_fill(&g.isnan(), f64::NAN)).collect()
            };
            let found = alike(&gradients(&leaves));
            assert_eq!(bits(&found), bits(&alike(&expected)), "{kind:?} on {device:?}");
        }
    }
}

#[test]
fn gradients_in_another_order_are_clipped_where_they_are() {
    let _alone = serially();
    tch::manual_seed(15);
    for device in devices() {
        let leaf = normal(&[4, 6], Kind::Float, device).set_requires_grad(true);
        let other = normal(&[3], Kind::Float, device).set_requires_grad(true);
        let leaves = [leaf, other];
        accumulate(&leaves, 1.0);
        // Autograd gives a gradient the strides of its leaf; a user may not.
        leaves[0].grad().set_data(&normal(&[6, 4], Kind::Float, device).tr());
        assert_ne!(leaves[0].grad().stride(), leaves[0].stride());
        let before = copies(&gradients(&leaves));
        let optimizer = build(rules()[0], &leaves, 0.1);
        let norm = optimizer.clip_grad_norm(0.1).expect("clip_grad_norm").double_value(&[]);
        for (now, before) in gradients(&leaves).iter().zip(&before) {
            assert_close(now, &(before * (0.1 / norm)), 1e-5, 1e-7);
        }
        optimizer.clip_grad_value(0.01).expect("clip_grad_value");
        for (now, before) in gradients(&leaves).iter().zip(&before) {
            assert_close(now, &(before * (0.1 / norm)).clamp(-0.01, 0.01), 1e-5, 1e-7);
        }
    }
}

/// Autograd gives parameters that were only reshaped and added the same gradient, or parts of it.
#[test]
fn gradients_that_share_memory_are_clipped_once() {
    let _alone = serially();
    tch::manual_seed(16);
    for device in devices() {
        let weights = leaves(&[&[6000], &[3, 2000], &[4000], &[2000]], Kind::Float, device);
        let x = normal(&[2, 3000], Kind::Float, device);
        let backward = |optimizer: &mut FusedOptimizer| {
            optimizer.zero_grad().expect("zero_grad");
            let parts = Tensor::cat(&weights[2..], 0).view([2, 3000]);
            let sum = weights[0].view([2, 3000]) + weights[1].view([2, 3000]) + parts;
            (sum * &x).sum(Kind::Float).backward();
            let addresses: Vec<usize> =
                gradients(&weights).iter().map(|g| g.data_ptr().addr()).collect();
            assert!(addresses[0] == addresses[1] && addresses[0] == addresses[2]);
            assert_eq!(addresses[3], addresses[0] + 16_000);
        };
        let mut optimizer = build(rules()[0], &weights, 0.1);
        let flat = x.view([6000]);
        let expected =
            [&flat, &x.view([3, 2000]), &flat.narrow(0, 0, 4000), &flat.narrow(0, 4000, 2000)];
        backward(&mut optimizer);
        let norm = optimizer.clip_grad_norm(1.0).expect("clip_grad_norm").double_value(&[]);
        let of_x = Reference::norm(&[x.shallow_clone()]);
        assert!((norm / (3.0_f64.sqrt() * of_x) - 1.0).abs() < 1e-6, "{norm} of {of_x}");
        for (gradient, x) in gradients(&weights).iter().zip(expected) {
            assert_close(gradient, &(x * (1.0 / (norm + 1e-6))), 1e-5, 1e-9);
        }
        backward(&mut optimizer);
        optimizer.clip_grad_value(0.5).expect("clip_grad_value");
        for (gradient, x) in gradients(&weights).iter().zip(expected) {
            assert!(bits(&[gradient.shallow_clone()]) == bits(&[x.clamp(-0.5, 0.5)]));
        }
    }
}

#[test]
fn infinite_gradients_spoil_the_step_as_in_torch() {
    let _alone = serially();
    for device in devices() {
        for bad in [f64::NAN, f64::INFINITY] {
            let leaves = leaves(&[&[5], &[2000]], Kind::Float, device);
            accumulate(&leaves, 1.0);
            let _ = leaves[1].grad().get(1234).fill_(bad);
            let mut optimizer = build(rules()[2], &leaves, 0.1);
            let norm = optimizer.clip_grad_norm(1.0).expect("clip_grad_norm").double_value(&[]);
            assert!(norm.is_nan() == bad.is_nan() && !norm.is_finite());
            // torch multiplies by NaN, or by 0.
            let first: f64 = leaves[0].grad().double_value(&[0]);
            assert!(if bad.is_nan() { first.is_nan() } else { first == 0.0 });
            optimizer.step().expect("step");
            assert!(leaves[1].double_value(&[1234]).is_nan());
        }
    }
}

/// An infinite maximum only measures, also if the norm is infinite.
#[test]
fn an_infinite_maximum_changes_nothing() {
    let _alone = serially();
    for device in devices() {
        let run = |max: Option<f64>| {
            tch::manual_seed(17);
            let leaves = leaves(&[&[5], &[7]], Kind::Float, device);
            let mut optimizer = build(rules()[0], &leaves, 0.01);
            optimizer.set_clip_norm(max).expect("set_clip_norm");
            accumulate(&leaves, 1.0);
            let _ = leaves[1].grad().get(3).fill_(f64::INFINITY);
            optimizer.step().expect("step");
            bits(&leaves)
        };
        assert_eq!(run(Some(f64::INFINITY)), run(None), "{device:?}");
    }
}

#[test]
fn there_is_no_norm_before_a_step_that_measures_it() {
    let _alone = serially();
    let leaves = leaves(&[&[5]], Kind::Float, CPU);
    let mut optimizer = build(rules()[0], &leaves, 0.01);
    let step = |optimizer: &mut FusedOptimizer| {
        accumulate(&leaves, 1.0);
        optimizer.step().expect("step");
    };
    step(&mut optimizer);
    optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
    assert!(optimizer.grad_norm().expect("grad_norm").is_none());
    step(&mut optimizer);
    assert!(optimizer.grad_norm().expect("grad_norm").is_some());
    optimizer.set_clip_norm(None).expect("set_clip_norm");
    optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
    assert!(optimizer.grad_norm().expect("grad_norm").is_none());
}

#[test]
fn a_wrong_maximum_leaves_the_gradients() {
    let _alone = serially();
    let leaves = leaves(&[&[5]], Kind::Float, CPU);
    let mut optimizer = build(rules()[0], &leaves, 0.01);
    accumulate(&leaves, 1.0);
    let before = bits(&gradients(&leaves));
    let loss = leaves[0].sum(Kind::Float);
    text(optimizer.backward_step_clip(&loss, -1.0));
    text(optimizer.backward_step_clip_norm(&loss, f64::NAN));
    assert_eq!(bits(&gradients(&leaves)), before);
}
