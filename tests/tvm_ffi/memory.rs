//! Memory that a function writes to, keeps or returns.

use super::*;

#[test]
fn a_function_writes_through_strides() {
    let add = function!("a_function_writes_through_strides", "add_one");
    let x = floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let all = floats(&[0.0; 6]);
    call(&add, args![&x.slice(0, 0, 6, 2), out(&mut all.slice(0, 1, 6, 2))]).unwrap();
    assert_eq!(all, floats(&[0.0, 2.0, 0.0, 4.0, 0.0, 6.0]));
}

#[test]
fn memory_that_is_written_is_shared_with_nothing() {
    let add = function!("memory_that_is_written_is_shared_with_nothing", "add_one");
    let all = floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let part = |start: i64, end: i64, step: i64| all.slice(0, start, end, step);
    // Beside one another, and interleaved.
    call(&add, args![&part(0, 3, 1), out(&mut part(3, 6, 1))]).unwrap();
    call(&add, args![&part(0, 6, 2), out(&mut part(1, 6, 2))]).unwrap();
    assert_eq!(all, floats(&[1.0, 2.0, 3.0, 4.0, 3.0, 4.0]));
    let before = all.copy();
    for (from, mut to) in [
        (part(0, 6, 1), part(0, 6, 1)),
        (part(0, 4, 1), part(2, 6, 1)),
        (part(0, 6, 2), part(2, 5, 1)),
    ] {
        let expected = ["argument 1: expected memory of its own", "got memory of argument 0"];
        refused(call(&add, args![&from, out(&mut to)]), &add, &expected);
    }
    let mut expanded = floats(&[0.0]).expand([6], false);
    let expected = "argument 1: expected elements that do not share memory";
    refused(call(&add, args![&all, out(&mut expanded)]), &add, &[expected]);
    assert_eq!(all, before);
    // Two that are only read may be one.
    let Some(module) = module("memory") else { return };
    assert_eq!(module.function("elements").unwrap().call::<i64>(args![&[&all, &all]]).unwrap(), 12);
}

#[test]
fn a_returned_tensor_is_libtorchs() {
    let add = function!("a_returned_tensor_is_libtorchs", "add_one_alloc");
    let y: Tensor = add.call(args![&floats(&[1.0, 2.0])]).unwrap();
    assert_eq!((y.kind(), y.device(), &y), (Kind::Float, Device::Cpu, &floats(&[2.0, 3.0])));
    // It can be changed, resized and put into a graph like any other.
    let y = y.set_requires_grad(true);
    (&y * 2.0).sum(Kind::Float).backward();
    assert_eq!(y.grad(), floats(&[2.0, 2.0]));
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    4096 * text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("pages")
}

#[test]
fn ten_thousand_returned_tensors_leave_nothing() {
    let add = function!("ten_thousand_returned_tensors_leave_nothing", "add_one_alloc");
    let x = Tensor::zeros([1 << 16], (Kind::Float, Device::Cpu));
    let run = |count| (0..count).for_each(|_| drop(add.call::<Tensor>(args![&x]).unwrap()));
    run(100);
    let before = resident();
    run(10_000);
    // They were 2.4 GiB. Other tests load libraries meanwhile.
    let grown = resident().saturating_sub(before);
    assert!(grown < 256 << 20, "{} MiB", grown >> 20);
}

#[test]
fn a_function_may_keep_a_tensor() {
    let Some(module) = module("a_function_may_keep_a_tensor") else { return };
    let [keep, give_back] = ["keep", "give_back"].map(|name| module.function(name).unwrap());
    let _alone = KEPT.lock().unwrap();
    let x = floats(&[1.0, 2.0]);
    call(&keep, args![&x]).unwrap();
    // Its sizes and its memory stay, whatever happens to the caller's tensor.
    let mut resized = x.shallow_clone();
    let error = resized.f_resize_([30, 1]).unwrap_err().to_string();
    assert!(error.contains("not resizable"), "{error}");
    let _ = resized.resize_([1]);
    drop((x, resized));
    let y: Tensor = give_back.call(args![]).unwrap();
    assert_eq!(y, floats(&[1.0, 2.0]));
}

/// Nobody keeps the tensors of a list after the call.
#[test]
fn tensors_of_a_list_can_be_resized_afterwards() {
    let elements = function!("tensors_of_a_list_can_be_resized_afterwards", "elements");
    let mut x = floats(&[1.0, 2.0]);
    assert_eq!(elements.call::<i64>(args![&[&x, &x]]).unwrap(), 4);
    assert_eq!(x.f_resize_([100]).expect("a resizable tensor").size(), [100]);
}

#[test]
fn a_returned_view_has_its_own_strides() {
    let transposed = function!("a_returned_view_has_its_own_strides", "transposed");
    let x = floats(&[0.0, 1.0, 2.0, 3.0]).view([2, 2]);
    assert_eq!(transposed.call::<Tensor>(args![&x]).unwrap(), x.tr());
}

#[test]
fn more_dimensions_than_are_usual() {
    let Some(module) = module("more_dimensions_than_are_usual") else { return };
    let [keep, give_back] = ["keep", "give_back"].map(|name| module.function(name).unwrap());
    let _alone = KEPT.lock().unwrap();
    let size = [1, 2, 1, 3, 1, 2, 1, 1, 2, 1, 1];
    let x = Tensor::arange(24, (Kind::Float, Device::Cpu)).view(&size[..]);
    call(&keep, args![&x.copy()]).unwrap();
    assert_eq!(give_back.call::<Tensor>(args![]).unwrap(), x);
}

/// A lazy copy gets memory of its own before a function sees it.
#[test]
fn a_lazy_copy_is_not_written() {
    let add = function!("a_lazy_copy_is_not_written", "add_one");
    let x = floats(&[1.0, 2.0]);
    let mut copy = x.internal_lazy_clone();
    let view = copy.view([2]);
    let shared = call(&add, args![&view, out(&mut copy)]);
    refused(shared, &add, &["argument 1: expected memory of its own"]);
    call(&add, args![&x, out(&mut copy)]).unwrap();
    assert!(x == floats(&[1.0, 2.0]) && copy == floats(&[2.0, 3.0]));
}

/// `keep` has one place.
pub static KEPT: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn a_tensor_that_comes_back_is_the_same() {
    let same = function!("a_tensor_that_comes_back_is_the_same", "same");
    let x = floats(&[1.0, 2.0]);
    let mut y: Tensor = same.call(args![&x]).unwrap();
    let _ = y.fill_(3.0);
    assert_eq!(x, floats(&[3.0, 3.0]));
}
