//! Tests of `autograd::checkpoint` under autocast.

use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tch_extension::autograd::{GradOptions, Tensors, checkpoint, grad, register_hook};
use tch_extension::testing::{assert_close, cuda_or_skip};

fn two(inputs: &[Option<Tensor>]) -> (&Tensor, &Tensor) {
    inputs[0].as_ref().zip(inputs[1].as_ref()).expect("two inputs")
}

fn gradients(y: &Tensor, inputs: [&Tensor; 2], create_graph: bool) -> Vec<Tensor> {
    let options = GradOptions { create_graph, ..Default::default() };
    let gradients = grad(&[&y.sum(Kind::Float)], &inputs, &options).expect("gradients");
    gradients.into_vec().into_iter().map(|gradient| gradient.expect("of each")).collect()
}

fn the_second_run_has_the_kinds_of_the_first(device: Device, kind: Kind) {
    let (x, w) = (weight(&[3, 4], device), weight(&[4, 2], device));
    let plain = {
        let _autocast = Autocast::new(device, kind).expect("autocast");
        x.matmul(&w).tanh()
    };
    let expected = gradients(&plain, [&x, &w], false);
    for create_graph in [false, true] {
        let kinds = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&kinds);
        let block = move |inputs: &[Option<Tensor>]| {
            let (x, w) = two(inputs);
            let y = x.matmul(w).tanh();
            log.lock().expect("unpoisoned").push(y.kind());
            Ok(y.into())
        };
        let y = {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            checkpoint(block, &[Some(&x), Some(&w)]).and_then(Tensors::single).expect("checkpoint")
        };
        assert!(y.equal(&plain));
        // The backward runs outside the region, in a region with autocast disabled.
        let _other = Autocast::disabled(device).expect("autocast");
        let found = gradients(&y, [&x, &w], create_graph);
        assert_eq!(*kinds.lock().expect("unpoisoned"), [kind, kind]);
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.kind(), Kind::Float);
            assert_close(&found.detach(), expected, 0.0, 0.0);
        }
        assert_eq!(Autocast::kind(device), None, "as before the backward");
    }
}

fn no_weight_stays_cast_without_its_graph(device: Device, kind: Kind) {
    let (x, w) = (weight(&[3, 4], device), weight(&[4, 2], device));
    let block = |inputs: &[Option<Tensor>]| {
        let (x, w) = two(inputs);
        Ok(x.matmul(w).into())
    };
    let expected = gradients(&x.matmul(&w), [&x, &w], false);
    let _autocast = Autocast::new(device, kind).expect("autocast");
    let y = checkpoint(block, &[Some(&x), Some(&w)]).and_then(Tensors::single).expect("checkpoint");
    let next = x.matmul(&w);
    assert!(next.requires_grad());
    for y in [next, y] {
        for (found, expected) in gradients(&y, [&x, &w], false).iter().zip(&expected) {
            assert_close(found, expected, 0.02, 0.05);
        }
    }
}

/// The second run works on copies of the inputs. If their casts were cached, they would stay alive
/// until a region ends.
fn no_copy_stays(device: Device, kind: Kind) {
    let (x, w) = (weight(&[3, 4], device), weight(&[4, 2], device));
    let copy = Arc::new(());
    let (held, again) = (Arc::clone(&copy), AtomicBool::new(false));
    let block = move |inputs: &[Option<Tensor>]| {
        let (x, w) = two(inputs);
        if again.swap(true, Ordering::SeqCst) {
            let held = Arc::clone(&held);
            register_hook(w, move |_| {
                let _held = &held;
                Ok(None)
            })?
            .forget();
        }
        Ok(x.matmul(w).into())
    };
    let y = {
        let _autocast = Autocast::new(device, kind).expect("autocast");
        checkpoint(block, &[Some(&x), Some(&w)]).and_then(Tensors::single).expect("checkpoint")
    };
    assert_eq!(gradients(&y, [&x, &w], false).len(), 2);
    drop(y);
    assert_eq!(Arc::strong_count(&copy), 1, "the copy of w is gone, and its hook");
}

#[test]
fn the_second_run_has_the_kinds_and_the_gradients_of_the_first() {
    let _alone = alone();
    for kind in [Kind::BFloat16, Kind::Half] {
        the_second_run_has_the_kinds_of_the_first(Device::Cpu, kind);
    }
}

#[test]
fn no_weight_is_left_cast_without_its_graph() {
    let _alone = alone();
    no_weight_stays_cast_without_its_graph(Device::Cpu, Kind::BFloat16);
    no_copy_stays(Device::Cpu, Kind::BFloat16);
}

#[test]
fn cuda_checkpoint_keeps_the_region() {
    let _alone = alone();
    let Some(device) = cuda_or_skip("cuda_checkpoint_keeps_the_region") else { return };
    for kind in [Kind::BFloat16, Kind::Half] {
        the_second_run_has_the_kinds_of_the_first(device, kind);
        no_weight_stays_cast_without_its_graph(device, kind);
        no_copy_stays(device, kind);
    }
}
