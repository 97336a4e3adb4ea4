//! Tests of `Strided` and `StridedMut`: what they refuse, and what autograd is told. What kernels
//! see through them is tested in tests/downstream/tests/headers.rs.

use std::mem::size_of;
use tch::{Device, Kind, Tensor};
use tch_extension::strided::{Strided, StridedMut};

fn matrix() -> Tensor {
    Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape([4, 6])
}

#[track_caller]
fn assert_refused<T>(result: tch_extension::Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("not refused") };
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn sizes_and_strides_are_the_tensors() {
    let mut part = matrix().slice(1, 1, 6, 2).transpose(0, 1);
    let strided = Strided::<2>::new(&part).unwrap();
    assert_eq!((strided.sizes(), strided.strides()), ([3, 4], [2, 6]));
    let strided = StridedMut::<2>::new(&mut part).unwrap();
    assert_eq!((strided.sizes(), strided.strides()), ([3, 4], [2, 6]));
    // A pointer, two arrays and a number, as in the C struct.
    assert_eq!((size_of::<Strided<'_, 2>>(), size_of::<StridedMut<'_, 3>>()), (56, 72));
}

#[test]
fn what_a_kernel_cannot_read_is_refused() {
    assert_refused(Strided::<1>::new(&matrix()), &["Strided::new", "[d0]", "[4, 6]"]);
    assert_refused(Strided::<1>::new(&Tensor::new()), &["Strided::new", "an undefined one"]);
    assert_refused(Strided::<2>::new(&matrix().to_sparse(None, None::<i64>, None)), &["dense"]);
    assert_refused(
        Strided::<2>::new(&matrix().internal_neg_view()),
        &["in memory", "strided::contiguous"],
    );
    assert_refused(
        Strided::<1>::new(&Tensor::internal_efficientzerotensor([3], (Kind::Float, Device::Cpu))),
        &["memory"],
    );
}

#[test]
fn what_a_kernel_must_not_write_is_refused() {
    let mut expanded = matrix().narrow(0, 0, 1).expand([3, 6], false);
    assert_refused(StridedMut::<2>::new(&mut expanded), &["overlap", "[0, 1]"]);
    let mut leaf = matrix().set_requires_grad(true);
    assert_refused(StridedMut::<2>::new(&mut leaf), &["requires grad", "no_grad"]);
    let _guard = tch::no_grad_guard();
    StridedMut::<2>::new(&mut leaf).expect("grad mode is off");
}

#[test]
fn a_saved_tensor_that_is_written_is_noticed() {
    let mut factor = matrix();
    let x = matrix().set_requires_grad(true);
    let loss = (&x * &factor).sum(Kind::Float);
    Strided::<2>::new(&factor).unwrap();
    StridedMut::<2>::new(&mut factor).unwrap();
    let error = loss.f_backward().expect_err("the factor may have changed").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}
