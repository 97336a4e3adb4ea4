//! Tests of `Autocast`.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};
use tch_extension::testing::{assert_close, cuda_or_skip};

const CPU: Device = Device::Cpu;
const KINDS: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// The kind in which a matrix product runs.
fn product_kind(device: Device) -> Kind {
    let x = random(&[2, 2], device);
    x.matmul(&x).kind()
}

fn products_run_in_the_half_kind_inside_only(device: Device) {
    for kind in KINDS {
        {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            assert_eq!((product_kind(device), Autocast::kind(device)), (kind, Some(kind)));
            let x = random(&[4, 4], device);
            let loss = x.matmul(&x).mse_loss(&x.matmul(&x), tch::Reduction::Mean);
            assert_eq!(loss.kind(), Kind::Float, "on the list of those that need precision");
        }
        assert_eq!((product_kind(device), Autocast::kind(device)), (Kind::Float, None));
    }
}

#[test]
fn products_run_in_the_half_kind_inside_the_region_only() {
    let _alone = alone();
    products_run_in_the_half_kind_inside_only(CPU);
}

#[test]
fn cuda_products_run_in_the_half_kind_inside_the_region_only() {
    let _alone = alone();
    let Some(device) = cuda_or_skip("cuda_products_run_in_the_half_kind_inside_the_region_only")
    else {
        return;
    };
    products_run_in_the_half_kind_inside_only(device);
    // Each type of device has an autocast setting of its own.
    let _autocast = Autocast::new(device, Kind::Half).expect("autocast");
    assert_eq!((product_kind(CPU), Autocast::kind(CPU)), (Kind::Float, None));
    let inner = Autocast::new(CPU, Kind::BFloat16).expect("autocast");
    assert_eq!((product_kind(CPU), product_kind(device)), (Kind::BFloat16, Kind::Half));
    let _off = Autocast::disabled(device).expect("autocast");
    assert_eq!((product_kind(CPU), product_kind(device)), (Kind::BFloat16, Kind::Float));
    drop(inner);
    assert_eq!((product_kind(CPU), product_kind(device)), (Kind::Float, Kind::Float));
}

fn regions_nest(device: Device) {
    let outer = Autocast::new(device, Kind::BFloat16).expect("outer");
    {
        let _off = Autocast::disabled(device).expect("off");
        assert_eq!(product_kind(device), Kind::Float);
        {
            let _inner = Autocast::new(device, Kind::Half).expect("inner");
            assert_eq!(product_kind(device), Kind::Half);
            let _same = Autocast::new(device, Kind::Half).expect("the same once more");
            assert_eq!(product_kind(device), Kind::Half);
        }
        assert_eq!((product_kind(device), Autocast::kind(device)), (Kind::Float, None));
    }
    assert_eq!(product_kind(device), Kind::BFloat16);
    drop(outer);
    // Autocast can be disabled where it is off already.
    drop(Autocast::disabled(device).expect("off"));
    assert_eq!(product_kind(device), Kind::Float);
}

#[test]
fn regions_nest_and_end_as_they_began() {
    let _alone = alone();
    regions_nest(CPU);
}

#[test]
fn cuda_regions_nest_and_end_as_they_began() {
    let _alone = alone();
    if let Some(device) = cuda_or_skip("cuda_regions_nest_and_end_as_they_began") {
        regions_nest(device);
    }
}

#[test]
fn a_panic_ends_the_region() {
    let _alone = alone();
    let panicking = || {
        let _outer = Autocast::with_cache(CPU, Kind::BFloat16, false).expect("outer");
        let _inner = Autocast::new(CPU, Kind::Half).expect("inner");
        assert_eq!(product_kind(CPU), Kind::Half);
        panic!("in the region");
    };
    assert!(catch_unwind(AssertUnwindSafe(panicking)).is_err());
    assert_eq!(product_kind(CPU), Kind::Float);
    assert!(
        keeps_a_cast_weight(|| Autocast::new(CPU, Kind::BFloat16), CPU),
        "the cache, too, is as before"
    );
}

#[test]
fn out_of_order_the_youngest_guard_alive_decides() {
    let _alone = alone();
    let first = Autocast::new(CPU, Kind::BFloat16).expect("first");
    let second = Autocast::with_cache(CPU, Kind::Half, false).expect("second");
    let third = Autocast::disabled(CPU).expect("third");
    drop(first);
    assert_eq!(product_kind(CPU), Kind::Float, "the third");
    drop(third);
    assert_eq!(product_kind(CPU), Kind::Half, "the second");
    let fourth = Autocast::new(CPU, Kind::BFloat16).expect("fourth");
    drop(second);
    assert_eq!(product_kind(CPU), Kind::BFloat16, "the fourth");
    drop(fourth);
    assert_eq!(
        (product_kind(CPU), Autocast::kind(CPU)),
        (Kind::Float, None),
        "as before the first"
    );

    let bf16 = || Autocast::new(CPU, Kind::BFloat16);
    assert!(keeps_a_cast_weight(bf16, CPU));
    let first = Autocast::new(CPU, Kind::BFloat16).expect("first");
    let uncached = Autocast::with_cache(CPU, Kind::BFloat16, false).expect("uncached");
    drop(first);
    assert!(!keeps_a_cast_weight(bf16, CPU), "the younger one decides about the cache, too");
    drop(uncached);
    assert!(keeps_a_cast_weight(bf16, CPU));
}

#[test]
fn other_threads_have_their_own() {
    let _alone = alone();
    let _autocast = Autocast::new(CPU, Kind::BFloat16).expect("autocast");
    let elsewhere = std::thread::spawn(|| {
        let before = product_kind(CPU);
        let _half = Autocast::new(CPU, Kind::Half).expect("autocast");
        (before, product_kind(CPU))
    });
    assert_eq!(elsewhere.join().expect("no panic"), (Kind::Float, Kind::Half));
    assert_eq!(product_kind(CPU), Kind::BFloat16);
}

/// Whether a region keeps the cast copy of a weight: true if, after the weight was doubled inside
/// the region, a product there still uses the old values.
fn keeps_a_cast_weight(enter: impl Fn() -> Result<Autocast>, device: Device) -> bool {
    let (x, w) = (random(&[3, 4], device), weight(&[4, 2], device));
    let _autocast = enter().expect("autocast");
    let before = x.matmul(&w);
    // An inner region that ends does not clear the cache.
    drop(Autocast::disabled(device).expect("inner"));
    double(&w);
    x.matmul(&w).equal(&before)
}

fn double(weight: &Tensor) {
    let _ = tch::no_grad(|| weight.shallow_clone().f_mul_scalar_(2.0)).expect("doubled");
}

fn cast_weights_are_kept_until_the_outermost_region_ends(device: Device, kind: Kind) {
    assert!(keeps_a_cast_weight(|| Autocast::new(device, kind), device));
    assert!(!keeps_a_cast_weight(|| Autocast::with_cache(device, kind, false), device));
    assert!(keeps_a_cast_weight(|| Autocast::with_cache(device, kind, true), device));

    // The setting also applies to the regions inside.
    let uncached = Autocast::with_cache(device, kind, false).expect("uncached");
    assert!(!keeps_a_cast_weight(|| Autocast::new(device, kind), device));
    assert!(keeps_a_cast_weight(|| Autocast::with_cache(device, kind, true), device));
    drop(uncached);

    let (x, w) = (random(&[3, 4], device), weight(&[4, 2], device));
    let product = || {
        let _autocast = Autocast::new(device, kind).expect("autocast");
        x.matmul(&w)
    };
    let before = product();
    double(&w);
    assert!(product().equal(&(before * 2.0)), "the next region casts again");
}

#[test]
fn cast_weights_are_kept_until_the_end() {
    let _alone = alone();
    cast_weights_are_kept_until_the_outermost_region_ends(CPU, Kind::BFloat16);
}

#[test]
fn cuda_cast_weights_are_kept_until_the_end() {
    let _alone = alone();
    let Some(device) = cuda_or_skip("cuda_cast_weights_are_kept_until_the_end") else { return };
    for kind in KINDS {
        cast_weights_are_kept_until_the_outermost_region_ends(device, kind);
    }
}

#[test]
fn what_libtorch_would_take_for_something_else_is_an_error() {
    let _alone = alone();
    let error = |result: Result<Autocast>| result.map(drop).expect_err("refused").to_string();
    assert_eq!(
        error(Autocast::new(CPU, Kind::Float)),
        "Autocast::new: kind: expected Half or BFloat16, got Float; Autocast::disabled switches it off"
    );
    let text = error(Autocast::with_cache(CPU, Kind::Double, true));
    assert!(
        text.starts_with("Autocast::with_cache: kind: expected Half or BFloat16, got Double"),
        "{text}"
    );
    assert_eq!(
        error(Autocast::new(Device::Mps, Kind::Half)),
        "Autocast::new: device: expected the CPU or a CUDA device, got Mps"
    );
    let count = usize::try_from(tch::Cuda::device_count()).expect("a count");
    let missing = Autocast::disabled(Device::Cuda(count));
    assert!(matches!(missing, Err(Error::Cuda { .. })));
    let text = error(missing);
    let expected = if count == 0 {
        "Autocast::disabled: libtorch has no CUDA here".to_string()
    } else {
        format!("Autocast::disabled: there is no CUDA device {count}; libtorch sees {count}")
    };
    assert!(text.starts_with(&expected), "{text}");
    assert_eq!(
        (Autocast::kind(CPU), Autocast::kind(Device::Cuda(0)), Autocast::kind(Device::Mps)),
        (None, None, None)
    );
    assert_eq!(product_kind(CPU), Kind::Float, "nothing has changed");
}

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

fn the_cell_agrees_with_its_reference(device: Device, kind: Kind) {
    tch::manual_seed(1);
    let shapes: [&[i64]; 5] = [&[5, 7], &[18, 13], &[18], &[5, 6], &[5, 6]];
    let leaves = shapes.map(|shape| weight(shape, device));
    let [x, w, b, h, c] = &leaves;
    let run = |cell: Cell, kind: Option<Kind>| {
        let (new_h, new_c) = {
            let _autocast = kind.map(|kind| Autocast::new(device, kind).expect("autocast"));
            cell(x, w, Some(b), (h, c)).expect("a cell")
        };
        let loss = (&new_h * &new_h + &new_c).sum(Kind::Float);
        let gradients = Tensor::run_backward(&[loss], &leaves, false, false);
        [new_h, new_c].into_iter().chain(gradients).collect::<Vec<_>>()
    };
    let (found, expected) = (run(f_lltm_cell, Some(kind)), run(lltm_cell_reference, Some(kind)));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.kind(), Kind::Float);
        assert_close(found, &expected.to_kind(Kind::Float), 0.03, 0.06);
    }
    let exact = run(f_lltm_cell, None);
    assert!(!found[0].equal(&exact[0]), "the product ran in {kind:?}");
}

#[test]
fn lltm_cell_agrees_with_its_reference() {
    let _alone = alone();
    for kind in KINDS {
        the_cell_agrees_with_its_reference(CPU, kind);
    }
}

#[test]
fn cuda_lltm_cell_agrees_with_its_reference() {
    let _alone = alone();
    let Some(device) = cuda_or_skip("cuda_lltm_cell_agrees_with_its_reference") else { return };
    for kind in KINDS {
        the_cell_agrees_with_its_reference(device, kind);
    }
}

#[test]
fn a_guard_is_not_taken_for_another() {
    let _alone = alone();
    let _first = Autocast::new(CPU, Kind::BFloat16).expect("first");
    let second = Autocast::new(CPU, Kind::BFloat16).expect("second");
    let third = Autocast::new(CPU, Kind::Half).expect("third");
    drop(second);
    let fourth = Autocast::new(CPU, Kind::BFloat16).expect("fourth");
    drop(fourth);
    assert_eq!(product_kind(CPU), Kind::Half, "the third");
    drop(third);
    assert_eq!(product_kind(CPU), Kind::BFloat16);
}

#[test]
fn cuda_inputs_are_cast_where_their_own_device_is_autocast() {
    let _alone = alone();
    let name = "cuda_inputs_are_cast_where_their_own_device_is_autocast";
    let Some(device) = cuda_or_skip(name) else { return };
    let x = random(&[2], device);
    let cast = || autocast_inputs(CastPolicy::LowerPrecision, &[Some(&x)]).expect("inputs");
    let on_cpu = Autocast::new(CPU, Kind::BFloat16).expect("autocast");
    assert!(cast().is_none());
    drop(on_cpu);
    let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
    assert_eq!(cast().expect("cast")[0].as_ref().expect("one").kind(), Kind::BFloat16);
}
