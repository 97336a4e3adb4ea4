//! Tests of calls from any thread.

use super::*;

#[test]
fn one_handle_in_many_threads() {
    let op = operator("scaled");
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let op = &op;
            scope.spawn(move || {
                for round in 0..200 {
                    let by = f64::from(thread * 1000 + round);
                    let y: Tensor = op.call(args![&doubles(&[1.0, 2.0]), by]).unwrap();
                    assert_eq!(y, doubles(&[by, 2.0 * by]));
                }
            });
        }
    });
}

#[test]
fn grad_mode_and_autocast_are_the_threads_own() {
    let x = leaf(&[1.0]);
    let guard = tch::no_grad_guard();
    assert!(operator("scaled").call::<Tensor>(args![&x, 2.0]).is_ok());
    let other = std::thread::spawn(|| {
        operator("scaled").call::<Tensor>(args![&leaf(&[1.0]), 2.0]).is_err()
    });
    assert!(other.join().unwrap(), "grad mode is on in a new thread");
    drop(guard);
    let (a, b) = (
        Tensor::ones([2, 2], (Kind::Float, Device::Cpu)),
        Tensor::ones([2, 2], (Kind::Float, Device::Cpu)),
    );
    let _autocast = tch_extension::amp::Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
    let product: Tensor = Operator::find("aten::mm").unwrap().call(args![&a, &b]).unwrap();
    assert_eq!(product.kind(), Kind::BFloat16);
}
