//! Values that go in and come out.

use super::*;
use tch_extension::library::NONE;

#[test]
fn numbers_texts_and_lists() {
    let Some(module) = module("numbers_texts_and_lists") else { return };
    let of = |name: &str| module.function(name).expect(name);
    assert_eq!(of("scalars").call::<f64>(args![1, 2.5, true]).unwrap(), 103.5);
    for text in ["", "abc", "seven b", "a text of more than seven bytes", "ü"] {
        assert_eq!(of("twice").call::<String>(args![text]).unwrap(), text.repeat(2));
    }
    assert_eq!(of("sum").call::<i64>(args![&[1, 2, 3]]).unwrap(), 6);
    assert_eq!(of("sum").call::<i64>(args![Vec::<i64>::new()]).unwrap(), 0);
    let (a, b) = (floats(&[1.0, 2.0]), floats(&[3.0]));
    assert_eq!(of("elements").call::<i64>(args![&[&a, &b]]).unwrap(), 3);
    assert!(of("is_absent").call::<bool>(args![NONE]).unwrap());
    assert!(!of("is_absent").call::<bool>(args![Some(&a)]).unwrap());
    for kind in
        [Kind::Float, Kind::Half, Kind::BFloat16, Kind::Bool, Kind::Int64, Kind::Float8e4m3fn]
    {
        assert_eq!(of("dtype").call::<Kind>(args![kind]).unwrap(), kind);
    }
    assert_eq!(of("device").call::<Device>(args![Device::Cpu]).unwrap(), Device::Cpu);
}

#[test]
fn results_are_read_as_what_is_asked_for() {
    let Some(module) = module("results_are_read_as_what_is_asked_for") else { return };
    let of = |name: &str| module.function(name).expect(name);
    let x = floats(&[1.0, 2.0]);
    let (same, (len, text)): (Tensor, (i64, String)) = of("nested").call(args![&x]).unwrap();
    assert_eq!((len, text.as_str()), (2, "a text of more than seven bytes"));
    assert_eq!(same.data_ptr(), x.data_ptr());
    let _alone = memory::KEPT.lock().unwrap();
    let sizes: Vec<i64> = of("shape").call(args![&x.view([2, 1])]).unwrap();
    assert_eq!(sizes, [2, 1]);
    let nothing: Option<Tensor> = of("keep").call(args![&x]).unwrap();
    assert!(nothing.is_none());
    let kept: Option<Tensor> = of("give_back").call(args![]).unwrap();
    assert_eq!(kept, Some(x.shallow_clone()));
    let nested = of("nested");
    refused(nested.call::<i64>(args![&x]).map(drop), &nested, &["i64 was asked for"]);
    refused(nested.call::<()>(args![&x]), &nested, &["1 results, and 0 were asked for"]);
    let function = of("function");
    refused(function.call::<i64>(args![]).map(drop), &function, &["which cannot be read in Rust"]);
}

/// Every kind that DLPack and libtorch share, in any strides.
#[test]
fn tensors_are_seen_as_they_are() {
    let describe = function!("tensors_are_seen_as_they_are", "describe");
    let said = |x: &Tensor| describe.call::<String>(args![x]).unwrap();
    for (kind, name) in [
        (Kind::Uint8, "uint8"),
        (Kind::Int8, "int8"),
        (Kind::Int16, "int16"),
        (Kind::Int, "int32"),
        (Kind::Int64, "int64"),
        (Kind::Half, "float16"),
        (Kind::Float, "float32"),
        (Kind::Double, "float64"),
        (Kind::BFloat16, "bfloat16"),
        (Kind::Bool, "bool"),
        (Kind::Float8e4m3fn, "float8_e4m3fn"),
        (Kind::Float8e5m2, "float8_e5m2"),
    ] {
        let text = said(&Tensor::zeros([2, 3], (kind, Device::Cpu)));
        assert_eq!(text, format!("{name} on 1, sizes 2 3, strides 3 1"));
    }
    let x = Tensor::zeros([4, 6], (Kind::Float, Device::Cpu));
    let strides = |x: &Tensor| said(x).split_once("sizes").unwrap().1.to_string();
    assert_eq!(strides(&x.tr()), " 6 4, strides 1 6");
    assert_eq!(strides(&x.slice(1, 1, 6, 2)), " 4 3, strides 6 2");
    assert_eq!(strides(&x.select(0, 1).view([1, 6]).tr()), " 6 1, strides 1 1");
    assert_eq!(strides(&x.slice(0, 0, 1, 1)), " 1 6, strides 1 1");
    assert_eq!(
        strides(&Tensor::zeros([3], (Kind::Float, Device::Cpu)).expand([2, 3], false)),
        " 2 3, strides 0 1"
    );
    assert_eq!(strides(&Tensor::from(1.0)), ", strides");
    assert_eq!(strides(&Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))), " 0 3, strides 1 1");
}

#[test]
fn what_dlpack_cannot_hold_is_refused() {
    let describe = function!("what_dlpack_cannot_hold_is_refused", "describe");
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    let dense = Tensor::eye(2, (Kind::Float, Device::Cpu));
    let quantized = dense.quantize_per_tensor(0.1, 0, Kind::QInt8);
    for (x, expected) in [
        (complex.conj(), "call resolve_conj()"),
        (complex.conj().imag(), "call resolve_neg()"),
        (dense.to_sparse(None, None::<i64>, None::<i64>), "not dense"),
        (Tensor::new(), "undefined"),
        (quantized, "DLPack lacks"),
        (Tensor::internal_efficientzerotensor([2], (Kind::Float, Device::Cpu)), "zeros"),
    ] {
        refused(describe.call::<String>(args![&x]).map(drop), &describe, &["argument 0", expected]);
    }
    let lists = function!("what_dlpack_cannot_hold_is_refused", "elements");
    refused(lists.call::<i64>(args![&[&complex.conj()]]).map(drop), &lists, &["resolve_conj()"]);
    let memory = tch_extension::library::MemoryFormat::Contiguous;
    refused(lists.call::<i64>(args![memory]).map(drop), &lists, &["MemoryFormat", "TVM FFI"]);
    let device = function!("what_dlpack_cannot_hold_is_refused", "device");
    let far = device.call::<Device>(args![Device::Cuda(256)]).map(drop);
    refused(far, &device, &["argument 0", "too high an index"]);
    refused(lists.call::<i64>(args![x = 1]).map(drop), &lists, &["x: expected", "by position"]);
}

#[test]
fn errors_of_a_function_are_one_line() {
    let Some(module) = module("errors_of_a_function_are_one_line") else { return };
    let add = module.function("add_one").unwrap();
    let (x, mut y) = (floats(&[1.0, 2.0]), floats(&[0.0; 3]));
    let expected = "ValueError: x has 2 elements, and y has 3";
    refused(call(&add, args![&x, out(&mut y)]), &add, &[expected]);
    refused(call(&add, args![&x]), &add, &["TypeError", "Expected 2 but got 1"]);
    refused(call(&add, args![&x, 1]), &add, &["TypeError", "argument #1"]);
    refused(call(&add, args![&x, NONE]), &add, &["TypeError", "argument #1"]);
    let throws = module.function("throws").unwrap();
    refused(call(&throws, args![]), &throws, &["a std::runtime_error of two lines"]);
    // Errors belong to a thread, and leave nothing behind.
    let threads: Vec<_> =
        (0..4).map(|_| std::thread::spawn(move || throws_and_adds(module))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn throws_and_adds(module: &Module) {
    let (throws, add) = (module.function("throws").unwrap(), module.function("add_one").unwrap());
    for _ in 0..50 {
        refused(call(&throws, args![]), &throws, &["a std::runtime_error"]);
        let (x, mut y) = (floats(&[1.0, 2.0]), floats(&[0.0; 2]));
        call(&add, args![&x, out(&mut y)]).unwrap();
        assert_eq!(y, floats(&[2.0, 3.0]));
    }
}
