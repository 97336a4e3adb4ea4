//! Tests of `view` and `view_mut`: what they show, what they refuse, and that no order of events
//! leaves them dangling.

use std::panic::{AssertUnwindSafe, catch_unwind};
use tch::kind::Element;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply, grad};
use tch_extension::view::{view, view_flat, view_flat_mut, view_mut};

fn matrix() -> Tensor {
    Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape([4, 6])
}

#[track_caller]
fn assert_refused<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("not refused") };
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
    }
}

/// Compares a view with the values that tch copies out.
#[track_caller]
fn assert_shows(tensor: &Tensor) {
    let view = view::<f32, 2>(tensor).unwrap();
    let expected = Vec::<f32>::try_from(tensor.contiguous().reshape([-1])).unwrap();
    assert_eq!(view.shape().map(|size| size as i64).to_vec(), tensor.size());
    assert_eq!(view.strides().map(|stride| stride as i64).to_vec(), tensor.stride());
    assert_eq!((view.len(), view.is_empty()), (expected.len(), expected.is_empty()));
    assert_eq!(view.to_vec(), expected);
    assert_eq!(view.iter().collect::<Vec<_>>(), expected);
    assert_eq!(view.rows().flat_map(|row| row.to_vec()).collect::<Vec<_>>(), expected);
    assert_eq!(view.indices().map(|index| view.at(index)).collect::<Vec<_>>(), expected);
    assert_eq!((view.iter().len(), view.get([view.shape()[0], 0])), (expected.len(), None));
}

#[test]
fn reads_any_strides() {
    let base = matrix();
    for tensor in [
        base.shallow_clone(),
        base.transpose(0, 1),
        base.narrow(1, 1, 3),
        base.narrow(0, 2, 2),
        base.slice(1, 1, 6, 2).transpose(0, 1),
        base.narrow(0, 1, 1).expand([3, 6], false),
        base.as_strided([3, 3], [1, 1], 2),
        base.narrow(0, 4, 0),
        base.narrow(1, 2, 0),
        Tensor::zeros([0, 0], (Kind::Float, Device::Cpu)),
        base.narrow(0, 3, 1).narrow(1, 5, 1),
    ] {
        assert_shows(&tensor);
    }
}

#[test]
fn writes_any_strides_and_nothing_else() {
    let base = matrix();
    let mut part = base.slice(1, 1, 6, 2).transpose(0, 1);
    let mut view = view_mut::<f32, 2>(&mut part).unwrap();
    view.apply(|value| -value);
    view.set([2, 3], 100.0);
    view.row_mut(0).fill(7.0);
    view.row_mut(1).row_mut(2).set([], 9.0);
    assert_eq!((view.at([2, 3]), view.row(0).to_vec()), (100.0, vec![7.0; 4]));
    drop(view);
    let expected = matrix();
    let mut other = expected.slice(1, 1, 6, 2).transpose(0, 1);
    let _ = other.neg_();
    let _ = other.get(0).fill_(7.0);
    let _ = other.get(1).get(2).fill_(9.0);
    let _ = other.get(2).get(3).fill_(100.0);
    assert_eq!(base, expected);
    view_mut::<f32, 2>(&mut part).unwrap().copy_from_slice(&[1.0; 12]);
    assert_eq!(part, Tensor::ones([3, 4], (Kind::Float, Device::Cpu)));
}

#[test]
fn zero_and_three_dimensions() {
    let mut scalar = Tensor::from(2.5);
    assert_eq!(view::<f64, 0>(&scalar).unwrap().to_vec(), [2.5]);
    view_mut::<f64, 0>(&mut scalar).unwrap().set([], 3.5);
    assert_eq!(scalar.double_value(&[]), 3.5);
    let cube = Tensor::arange(24, (Kind::Int64, Device::Cpu)).reshape([2, 3, 4]).permute([2, 0, 1]);
    let view = view::<i64, 3>(&cube).unwrap();
    assert_eq!((view.at([3, 1, 2]), view.row(3).row(1).at([2])), (23, 23));
    assert!(format!("{view:?}").contains("strides: [1, 12, 4]"), "{view:?}");
}

#[test]
fn a_size_of_one_may_have_any_stride() {
    let x = Tensor::arange(3, (Kind::Float, Device::Cpu)).as_strided([3, 1], [1, i64::MAX], 0);
    assert_eq!(view::<f32, 2>(&x).unwrap().iter().collect::<Vec<_>>(), [0.0, 1.0, 2.0]);
}

#[test]
fn huge_sizes_without_elements() {
    let none = Tensor::zeros([1, 1, 0], (Kind::Float, Device::Cpu));
    let x = none.expand([1 << 62, 2, 0], false);
    for (name, x) in [("expanded", &x), ("strided", &x.as_strided([1 << 62, 2, 0], [2, 1, 1], 0))] {
        let view = view::<f32, 3>(x).unwrap();
        assert_eq!((view.len(), view.to_vec(), view.iter().count()), (0, Vec::new(), 0), "{name}");
    }
}

fn roundtrip<T: Element + Copy + PartialEq + std::fmt::Debug>(values: &[T], kind: Kind) {
    let mut tensor = Tensor::zeros([values.len() as i64], (kind, Device::Cpu));
    view_mut::<T, 1>(&mut tensor).unwrap().copy_from_slice(values);
    assert_eq!(view::<T, 1>(&tensor).unwrap().to_vec(), values);
    assert_eq!(view::<T, 1>(&tensor).unwrap().iter().collect::<Vec<_>>(), values);
    assert_eq!(tensor.double_value(&[1]), 1.0);
}

/// Imitates the half crate's type of this name, for which tch also says Half.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(non_camel_case_types)]
struct bf16(u16);

// SAFETY: the type has two bytes, as the kind requires.
unsafe impl Element for bf16 {
    const KIND: Kind = Kind::Half;
    const ZERO: Self = bf16(0);
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Half(u16);

// SAFETY: the type has two bytes, as the kind requires.
unsafe impl Element for Half {
    const KIND: Kind = Kind::Half;
    const ZERO: Self = Half(0);
}

#[test]
fn every_kind_roundtrips() {
    roundtrip::<u8>(&[0, 1, 255], Kind::Uint8);
    roundtrip::<i8>(&[0, 1, -128], Kind::Int8);
    roundtrip::<i16>(&[0, 1, i16::MIN], Kind::Int16);
    roundtrip::<i32>(&[0, 1, i32::MIN], Kind::Int);
    roundtrip::<i64>(&[0, 1, i64::MIN], Kind::Int64);
    roundtrip::<f32>(&[0.0, 1.0, -0.1], Kind::Float);
    roundtrip::<f64>(&[0.0, 1.0, -0.1], Kind::Double);
    roundtrip::<bool>(&[false, true, true], Kind::Bool);
    roundtrip(&[Half(0), Half(0x3c00), Half(1)], Kind::Half);
    roundtrip(&[bf16(0), bf16(0x3f80), bf16(1)], Kind::BFloat16);
}

#[test]
fn any_byte_but_zero_is_true() {
    let bytes = Tensor::from_slice(&[0_u8, 1, 2, 255]).view_dtype(Kind::Bool);
    assert_eq!(view::<bool, 1>(&bytes).unwrap().to_vec(), [false, true, true, true]);
}

#[test]
fn flat_views_have_any_number_of_dimensions() {
    let many = matrix().reshape([1, 2, 1, 2, 1, 2, 1, 3, 1, 1]);
    let scalar = Tensor::from(5_f32);
    let empty = Tensor::zeros([3, 0, 4], (Kind::Float, Device::Cpu));
    // A part of a larger tensor begins elsewhere than its memory.
    let part = matrix().narrow(0, 1, 2);
    for tensor in [matrix(), many, scalar, empty, part] {
        let expected = Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
        let flat = view_flat::<f32>(&tensor).unwrap();
        assert_eq!((flat.shape(), flat.strides()), ([expected.len()], [1]));
        assert_eq!(flat.to_vec(), expected);
        drop(flat);
        let mut copy = tensor.empty_like();
        view_flat_mut::<f32>(&mut copy).unwrap().copy_from_slice(&expected);
        assert_eq!(copy, tensor);
    }
}

#[test]
fn flat_views_refuse_what_has_no_order_in_memory() {
    let turned = matrix().transpose(0, 1);
    let parts = ["view_flat: tensor: expected a contiguous tensor", "[1, 6]", "contiguous"];
    assert_refused(view_flat::<f32>(&turned), &parts);
    assert_refused(view_flat_mut::<f32>(&mut turned.shallow_clone()), &["view_flat_mut", "[1, 6]"]);
    assert_refused(view_flat::<f64>(&matrix()), &["expected kind Double", "got Float"]);
    assert_refused(view_flat::<f32>(&Tensor::new()), &["undefined"]);
    assert_refused(view_flat_mut::<f32>(&mut matrix().set_requires_grad(true)), &["grad"]);
    let reader = matrix();
    let mut writer = reader.shallow_clone();
    let reading = view_flat::<f32>(&reader).unwrap();
    assert_refused(view_flat_mut::<f32>(&mut writer), &["memory without another view"]);
    drop(reading);
    let version = reader.internal_version();
    drop(view_flat_mut::<f32>(&mut writer).unwrap());
    assert!(reader.internal_version() > version);
}

#[test]
fn misfits_are_refused_by_name() {
    let mut x = matrix();
    assert_refused(
        view::<f64, 2>(&x),
        &["view: tensor: expected kind Double, got Float", "to_kind"],
    );
    assert_refused(
        view::<f32, 3>(&x),
        &["view: tensor: expected 3 dimensions [d0, d1, d2], got shape [4, 6]"],
    );
    assert_refused(view_mut::<f32, 1>(&mut x), &["view_mut: tensor: expected 1 dimension [d0]"]);
    assert_refused(
        view::<f32, 2>(&Tensor::new()),
        &["view: tensor: expected a tensor, got an undefined one"],
    );
    assert_refused(
        view_mut::<f32, 2>(&mut Tensor::new()),
        &["view_mut: tensor: expected a tensor"],
    );
    assert_refused(
        view::<f32, 2>(&x.to_sparse(None, None::<&[i64]>, None)),
        &["expected a dense tensor"],
    );
    assert_refused(
        view::<f32, 2>(&x.internal_neg_view()),
        &["a pending negation", "resolve_neg()"],
    );
    let zeros = Tensor::internal_efficientzerotensor([2, 2], (Kind::Float, Device::Cpu));
    assert_refused(view::<f32, 2>(&zeros), &["expected a tensor with memory", "Tensor::zeros"]);
    let clone = x.internal_lazy_clone();
    assert_refused(view::<f32, 2>(&clone), &["a lazy clone", "copy()"]);
    assert_refused(view::<f32, 2>(&x), &["a lazy clone or its original"]);
    if let Some(device) = tch_extension::testing::cuda_or_skip("misfits_are_refused_by_name") {
        assert_refused(
            view::<f32, 2>(&matrix().to_device(device)),
            &["expected a CPU tensor", "to_device"],
        );
    }
}

#[test]
fn overlapping_elements_are_not_written() {
    let overlapping =
        [matrix().narrow(0, 0, 1).expand([4, 6], false), matrix().as_strided([3, 3], [1, 1], 0)];
    // A list of this tensor's elements would not fit in memory.
    let dense = Tensor::zeros([1 << 21], (Kind::Float, Device::Cpu));
    let overlapping =
        overlapping.into_iter().chain([dense.as_strided([1 << 20, 1 << 20], [1, 1], 0)]);
    for mut tensor in overlapping {
        assert_refused(
            view_mut::<f32, 2>(&mut tensor),
            &["do not overlap in memory", "contiguous()"],
        );
    }
    view_mut::<f32, 2>(&mut matrix().as_strided([3, 2], [2, 3], 0)).unwrap();
}

#[test]
fn out_of_bounds_panics() {
    let mut tensor = matrix();
    let panics = |body: &mut dyn FnMut()| {
        let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("should panic");
        panic.downcast_ref::<String>().unwrap().clone()
    };
    assert_eq!(
        panics(&mut || assert_eq!(view::<f32, 2>(&tensor).unwrap().at([4, 0]), 0.0)),
        "index [4, 0] is out of bounds of shape [4, 6]"
    );
    panics(&mut || drop(view::<f32, 2>(&tensor).unwrap().row(4)));
    panics(&mut || view_mut::<f32, 2>(&mut tensor).unwrap().set([0, 6], 1.0));
    panics(&mut || view_mut::<f32, 2>(&mut tensor).unwrap().copy_from_slice(&[1.0; 23]));
    drop(view_mut::<f32, 2>(&mut tensor).unwrap());
}

// Aliasing

#[test]
fn a_writer_is_alone() {
    let mut x = matrix();
    let (mut other, third) = (x.shallow_clone(), x.transpose(0, 1));
    let writer = view_mut::<f32, 2>(&mut x).unwrap();
    assert_refused(
        view::<f32, 2>(&third),
        &["nobody else writes to", "live ViewMut", "drop the ViewMut first"],
    );
    assert_refused(view_mut::<f32, 2>(&mut other), &["view_mut: tensor", "live ViewMut"]);
    let elsewhere = third.shallow_clone();
    std::thread::spawn(move || assert_refused(view::<f32, 2>(&elsewhere), &["live ViewMut"]))
        .join()
        .unwrap();
    drop(writer);
    let readers = [view::<f32, 2>(&x).unwrap(), view::<f32, 2>(&third).unwrap()];
    let version = other.internal_version();
    assert_refused(view_mut::<f32, 2>(&mut other), &["live View", "drop the View first"]);
    assert_eq!(other.internal_version(), version);
    drop(readers);
    let writer = view_mut::<f32, 2>(&mut other).unwrap();
    assert_refused(view::<f32, 0>(&third.get(5).get(3)), &["live ViewMut"]);
    drop(writer);
    let mut last = third.get(5).get(3);
    let _writer = view_mut::<f32, 0>(&mut last).unwrap();
    assert_refused(view::<f32, 0>(&third.get(5).get(3)), &["live ViewMut"]);
    view::<f32, 0>(&third.get(5).get(2)).unwrap();
}

#[test]
fn disjoint_parts_have_a_writer_each() {
    let x = matrix();
    let (mut top, mut bottom) = (x.narrow(0, 0, 2), x.narrow(0, 2, 2));
    let (mut first, mut second) =
        (view_mut::<f32, 2>(&mut top).unwrap(), view_mut::<f32, 2>(&mut bottom).unwrap());
    first.fill(1.0);
    second.fill(2.0);
    drop((first, second));
    assert_eq!(view::<f32, 2>(&x).unwrap().iter().sum::<f32>(), 36.0);
}

#[test]
fn changes_through_other_handles_are_seen() {
    let x = matrix();
    let mut other = x.shallow_clone();
    let view = view::<f32, 2>(&x).unwrap();
    let _ = other.fill_(3.0);
    assert_eq!(view.to_vec(), [3.0; 24]);
}

#[test]
fn a_row_outlives_its_iterator() {
    let x = matrix();
    let view = view::<f32, 2>(&x).unwrap();
    let rows: Vec<_> = view.rows().collect();
    assert_eq!(rows[3].at([5]), 23.0);
}

#[test]
fn memory_that_was_given_up_stays_with_its_view() {
    const LEN: i64 = 1 << 20;
    // The tensor is so large that the allocator would return freed memory to the system, and
    // reading it would be a fault.
    let mut x = Tensor::ones([LEN], (Kind::Float, Device::Cpu));
    let (mut other, fresh) = (x.shallow_clone(), Tensor::zeros([2], (Kind::Float, Device::Cpu)));
    let view = view::<f32, 1>(&x).unwrap();
    let _ = other.resize_([16 * LEN]);
    let _ = other.fill_(5.0);
    assert_eq!((view.len(), view.iter().sum::<f32>()), (LEN as usize, LEN as f32));
    drop(view);

    let mut third = x.shallow_clone();
    let mut writer = view_mut::<f32, 1>(&mut x).unwrap();
    third.set_data(&fresh);
    let _ = other.resize_([64 * LEN]);
    drop((other, third));
    writer.fill(2.0);
    assert_eq!(writer.at([7]), 2.0);
}

#[test]
fn views_of_a_tensors_former_and_present_memory_are_apart() {
    const LEN: i64 = 1 << 20;
    let x = Tensor::ones([LEN], (Kind::Float, Device::Cpu));
    let handle = || x.shallow_clone();
    let (first, second, third) = (handle(), handle(), handle());
    let former = view::<f32, 1>(&first).unwrap();
    let _ = handle().resize_([4 * LEN]).fill_(5.0);
    let present = view::<f32, 1>(&second).unwrap();
    drop(former);
    let _ = handle().resize_([16 * LEN]).fill_(7.0);
    assert!(present.iter().all(|value| value == 5.0));
    assert_eq!(view::<f32, 1>(&third).unwrap().at([9]), 7.0);
}

#[test]
fn memory_is_freed_in_the_end() {
    fn resident_pages() -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    }
    const LEN: i64 = 1 << 22;
    type Use = fn(&Tensor);
    let uses: [(&str, Use); 3] = [
        ("viewed twice at once", |x| {
            drop((view::<f32, 1>(x).unwrap(), view::<f32, 1>(x).unwrap()))
        }),
        ("given up while viewed", |x| {
            let view = view::<f32, 1>(x).unwrap();
            let _ = x.shallow_clone().resize_([LEN + 1]);
            assert_eq!(view.at([5]), 1.0);
        }),
        ("moved to a lazy clone while viewed", |x| {
            let view = view::<f32, 1>(x).unwrap();
            let _clone = x.internal_lazy_clone();
            drop(view);
        }),
    ];
    for (name, view_and_drop) in uses {
        let before = resident_pages();
        for _ in 0..64 {
            view_and_drop(&Tensor::ones([LEN], (Kind::Float, Device::Cpu)));
        }
        // A leak would leave 1 GB, in pages of 4 KB; other tests also hold some memory.
        let after = resident_pages();
        assert!(after < before + (512 << 8), "{name}: {before} pages, then {after}");
    }
}

#[test]
fn memory_that_moves_to_a_lazy_clone_stays_with_its_view() {
    // The tensor is large for the same reason as above.
    let x = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
    let mut other = x.shallow_clone();
    let view_of_x = view::<f32, 1>(&x).unwrap();
    let clone = x.internal_lazy_clone();
    // This tensor gets memory of its own. The clone keeps the view's memory, and then gives it up.
    let _ = other.fill_(5.0);
    drop(clone);
    assert_eq!(view_of_x.iter().sum::<f32>(), (1 << 20) as f32);
    drop(view_of_x);
    assert_eq!(view::<f32, 1>(&x).unwrap().at([9]), 5.0);

    // The clone outlives the view, and is viewed again when its memory is its own.
    let view_of_x = view::<f32, 1>(&x).unwrap();
    let mut clone = x.internal_lazy_clone();
    drop((view_of_x, other));
    drop(x);
    let _ = clone.fill_(6.0);
    assert_eq!(view::<f32, 1>(&clone).unwrap().at([9]), 6.0);
}

#[test]
fn memory_of_others_is_viewed_too() {
    let values = [1_f32, 2.0, 3.0];
    // SAFETY: the array has three floats and outlives the tensor.
    let tensor =
        unsafe { Tensor::from_blob(values.as_ptr().cast(), &[3], &[1], Kind::Float, Device::Cpu) };
    assert_eq!(view::<f32, 1>(&tensor).unwrap().to_vec(), values);
    assert_eq!(view::<f32, 1>(&tensor.slice(0, 0, 3, 2)).unwrap().to_vec(), [1.0, 3.0]);
}

#[test]
fn memory_may_be_misaligned() {
    let mut bytes = [0_u8; 13];
    let begin = bytes.as_mut_ptr().wrapping_add(1).cast();
    // SAFETY: the array has room for three floats after its first byte, outlives the tensor, and is
    // not used meanwhile.
    let mut tensor = unsafe { Tensor::from_blob(begin, &[3], &[1], Kind::Float, Device::Cpu) };
    let mut view = view_mut::<f32, 1>(&mut tensor).unwrap();
    view.copy_from_slice(&[1.0, 2.0, 3.0]);
    assert_eq!((view.at([1]), view.to_vec()), (2.0, vec![1.0, 2.0, 3.0]));
}

#[test]
fn threads_view_one_tensor_at_once() {
    let x = matrix();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let x = x.shallow_clone();
            std::thread::spawn(move || {
                for _ in 0..2000 {
                    assert_eq!(view::<f32, 2>(&x).unwrap().at([3, 5]), 23.0);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn a_writer_is_alone_however_views_come_and_go_elsewhere() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (x, writing) = (matrix(), AtomicBool::new(false));
    let run = |mut x: Tensor| {
        for _ in 0..20_000 {
            if let Ok(writer) = view_mut::<f32, 2>(&mut x) {
                assert!(!writing.swap(true, Ordering::SeqCst), "two writers at once");
                writing.store(false, Ordering::SeqCst);
                drop(writer);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let x = x.shallow_clone();
            scope.spawn(|| run(x));
        }
    });
}

// Autograd

struct Square;

impl Function for Square {
    const NAME: &'static str = "square";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        saver.save(inputs.get(0)?);
        Ok((inputs.get(0)? * inputs.get(0)?).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
    }
}

#[test]
fn a_saved_tensor_that_is_written_fails_the_backward() {
    let mut x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    let mut y = apply(Square, &[Some(&x)]).unwrap().single().unwrap();
    drop(view::<f64, 1>(&x).unwrap());
    assert!(grad(&[&y], &[&x], &Default::default()).is_ok());
    y = apply(Square, &[Some(&x)]).unwrap().single().unwrap();
    tch::no_grad(|| view_mut::<f64, 1>(&mut x).unwrap().set([0], 4.0));
    assert_refused(grad(&[&y], &[&x], &Default::default()), &["modified by an inplace operation"]);

    // The backward is also refused before the writer is dropped.
    y = apply(Square, &[Some(&x)]).unwrap().single().unwrap();
    let mut handle = x.detach();
    let writer = view_mut::<f64, 1>(&mut handle).unwrap();
    assert_refused(grad(&[&y], &[&x], &Default::default()), &["modified by an inplace operation"]);
    drop(writer);

    // Also when it was saved while the view was alive already.
    let mut data = x.detach();
    let mut writer = view_mut::<f64, 1>(&mut data).unwrap();
    y = apply(Square, &[Some(&x)]).unwrap().single().unwrap();
    writer.set([0], 5.0);
    drop(writer);
    assert_refused(grad(&[&y], &[&x], &Default::default()), &["modified by an inplace operation"]);
}

#[test]
fn what_requires_grad_is_written_without_grad_mode_only() {
    let mut leaf = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    let mut inner = &leaf * 2.0;
    for tensor in [&mut leaf, &mut inner] {
        assert_refused(
            view_mut::<f64, 1>(tensor),
            &["view_mut: tensor", "requires grad", "no_grad"],
        );
        tch::no_grad(|| view_mut::<f64, 1>(tensor).unwrap().set([0], 1.0));
    }
    assert_eq!(view::<f64, 1>(&leaf).unwrap().at([0]), 1.0);
}

#[test]
fn the_half_kinds_are_told_apart() {
    let mut x = Tensor::from_slice(&[1.0_f32, -2.5]).to_kind(Kind::BFloat16);
    assert_eq!(view::<half::bf16, 1>(&x).expect("bf16").at([1]).to_f32(), -2.5);
    view_mut::<half::bf16, 1>(&mut x).expect("bf16").set([0], half::bf16::from_f32(0.5));
    assert_eq!(x.to_kind(Kind::Float), Tensor::from_slice(&[0.5_f32, -2.5]));
    assert!(view::<half::f16, 1>(&x).is_err());
    assert_eq!(view::<half::f16, 1>(&x.to_kind(Kind::Half)).expect("f16").at([1]).to_f32(), -2.5);
}
