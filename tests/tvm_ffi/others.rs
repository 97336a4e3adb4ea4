//! Kernels of others against this crate's. `TCH_EXTENSION_TEST_MODULES` names a folder with what
//! docs/kernels-from-elsewhere.md makes: FlashInfer's `libflashinfer_norm.so` and
//! `libflashinfer_rope.so`, `libquack_rmsnorm.so` for bf16 and rows of 1024 values, TileLang's
//! `libtilelang_matmul.so` for fp16 and 1024 × 1024 × 1024 beside `tilelang` and `tvm_ffi` of its packages, and
//! Triton's `triton_add.cubin`, which others.py writes.

use super::loading::alone;
use super::*;
use std::io::Write;
use std::time::Instant;
use tch_extension::cuda::{Event, Graph, Grid, Kernel, Stream, StreamGuard, params, synchronize};
use tch_extension::ops::{
    AddRmsNormOptions, RopeOptions, f_add_rms_norm, f_layer_norm, f_rms_norm, f_rope,
};
use tch_extension::testing::{assert_close, cuda_or_skip};

/// The folder of the modules and the GPU. Skips visibly without them.
fn folder_and_gpu(test: &str) -> Option<(PathBuf, Device)> {
    let device = cuda_or_skip(test)?;
    let Some(folder) = std::env::var_os("TCH_EXTENSION_TEST_MODULES") else {
        let line = format!("SKIPPED {test}: TCH_EXTENSION_TEST_MODULES names no folder\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
        return None;
    };
    Some((folder.into(), device))
}

/// The module of this name and the GPU. Skips visibly without them.
fn ready(test: &str, name: &str) -> Option<(Module, Device)> {
    module(test)?;
    let (folder, device) = folder_and_gpu(test)?;
    Some((Module::load(folder.join(format!("lib{name}.so"))).expect("a module"), device))
}

fn randn(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(size, (kind, device))
}

#[test]
fn cuda_flashinfers_norms_agree_with_ours() {
    let Some((module, device)) = ready("cuda_flashinfers_norms_agree_with_ours", "flashinfer_norm")
    else {
        return;
    };
    let of = |name: &str| module.function(name).expect(name);
    let (rmsnorm, fused, layernorm) = (of("rmsnorm"), of("fused_add_rmsnorm"), of("layernorm"));
    let options = AddRmsNormOptions { eps: Some(1e-6), ..Default::default() };
    for kind in [Kind::Half, Kind::BFloat16] {
        for (rows, columns) in [(1, 64), (7, 1000), (33, 4096), (128, 8192)] {
            let (x, weight) =
                (randn(&[rows, columns], kind, device), randn(&[columns], kind, device));
            let expected = f_rms_norm(&x, &[columns], Some(&weight), Some(1e-6)).unwrap();
            let mut y = x.empty_like();
            call(&rmsnorm, args![out(&mut y), &x, &weight, 1e-6, false]).unwrap();
            assert_close(&y, &expected, 2e-2, 2e-2);
            // Rows of a wider tensor.
            let wide = randn(&[rows, 2 * columns], kind, device).slice(1, 0, columns, 1);
            let expected = f_rms_norm(&wide, &[columns], Some(&weight), Some(1e-6)).unwrap();
            call(&rmsnorm, args![out(&mut y), &wide, &weight, 1e-6, false]).unwrap();
            assert_close(&y, &expected, 2e-2, 2e-2);
            // In place: the sum replaces the residual, and its norm replaces the input.
            let (mut input, mut residual) = (x.copy(), randn(&[rows, columns], kind, device));
            let (sum, normed) =
                f_add_rms_norm(&input, &residual, &[columns], Some(&weight), &options).unwrap();
            let all = args![out(&mut input), out(&mut residual), &weight, 1e-6, false];
            call(&fused, all).unwrap();
            assert_close(&residual, &sum, 2e-2, 2e-2);
            assert_close(&input, &normed, 2e-2, 2e-2);
        }
    }
    // Declared with tensors that the function may keep.
    let x = randn(&[16, 1024], Kind::BFloat16, device);
    let [gamma, beta] = [0, 1].map(|_| randn(&[1024], Kind::Float, device));
    let mut y = x.empty_like();
    call(&layernorm, args![out(&mut y), &x, &gamma, &beta, 1e-6]).unwrap();
    let expected =
        f_layer_norm(&x.to_kind(Kind::Float), &[1024], Some(&gamma), Some(&beta), 1e-6).unwrap();
    assert_close(&y.to_kind(Kind::Float), &expected, 2e-2, 2e-2);
    // What it refuses is an error here.
    refused(
        call(&rmsnorm, args![out(&mut y), &x, &gamma, 1e-6]),
        &rmsnorm,
        &["Expected 5 but got 4"],
    );
}

#[test]
fn cuda_flashinfers_norm_runs_on_a_side_stream_and_in_a_graph() {
    const TEST: &str = "cuda_flashinfers_norm_runs_on_a_side_stream_and_in_a_graph";
    let Some((module, device)) = ready(TEST, "flashinfer_norm") else { return };
    let rmsnorm = module.function("rmsnorm").unwrap();
    let (mut x, weight) =
        (randn(&[64, 4096], Kind::BFloat16, device), randn(&[4096], Kind::BFloat16, device));
    let expected = |x: &Tensor| f_rms_norm(x, &[4096], Some(&weight), Some(1e-6)).unwrap();
    let side = Stream::new(device).unwrap();
    for _ in 0..20 {
        let mut y = x.empty_like();
        side.wait_stream(&Stream::current(device).unwrap()).unwrap();
        {
            let _side = StreamGuard::new(&side).unwrap();
            // The norm must wait for the long product on its stream.
            let busy = randn(&[4096, 4096], Kind::BFloat16, device);
            x.copy_(&(busy.matmul(&busy).slice(0, 0, 64, 1) * 0.01));
            call(&rmsnorm, args![out(&mut y), &x, &weight, 1e-6, false]).unwrap();
        }
        Stream::current(device).unwrap().wait_stream(&side).unwrap();
        assert_close(&y, &expected(&x), 2e-2, 2e-2);
    }
    let mut y = x.empty_like();
    let (graph, ()) =
        Graph::capture(device, || rmsnorm.call::<()>(args![out(&mut y), &x, &weight, 1e-6, false]))
            .unwrap();
    for _ in 0..3 {
        x.copy_(&randn(&[64, 4096], Kind::BFloat16, device));
        graph.replay().unwrap();
        assert_close(&y, &expected(&x), 2e-2, 2e-2);
    }
}

/// The tensors decide on the device, and the current one stays.
#[test]
fn cuda_flashinfers_norm_runs_on_every_gpu() {
    let test = "cuda_flashinfers_norm_runs_on_every_gpu";
    let Some((module, first)) = ready(test, "flashinfer_norm") else { return };
    let rmsnorm = module.function("rmsnorm").unwrap();
    let seen = function!(test, "stream");
    for index in (0..tch::Cuda::device_count() as usize).rev() {
        let device = Device::Cuda(index);
        let (x, weight) =
            (randn(&[64, 4096], Kind::BFloat16, device), randn(&[4096], Kind::BFloat16, device));
        let mut y = x.empty_like();
        call(&rmsnorm, args![out(&mut y), &x, &weight, 1e-6, false]).unwrap();
        let expected = f_rms_norm(&x, &[4096], Some(&weight), Some(1e-6)).unwrap();
        assert_close(&y, &expected, 2e-2, 2e-2);
        let side = Stream::new(device).unwrap();
        let _side = StreamGuard::new(&side).unwrap();
        assert_eq!(seen.call::<i64>(args![&x]).unwrap(), side.as_ptr() as i64);
        assert_eq!(Tensor::zeros([1], (Kind::Float, first)).device(), first);
    }
}

#[test]
fn cuda_flashinfers_rope_agrees_with_ours() {
    let Some((module, device)) = ready("cuda_flashinfers_rope_agrees_with_ours", "flashinfer_rope")
    else {
        return;
    };
    let rope = module.function("apply_rope_pos_ids_cos_sin_cache").unwrap();
    let (tokens, heads, size) = (77, 8, 128);
    let angles = Tensor::arange(tokens, (Kind::Float, device)).unsqueeze(1)
        * Tensor::arange(size / 2, (Kind::Float, device)).multiply_scalar(-0.1).exp();
    let (cos, sin) = (angles.cos(), angles.sin());
    let cache = Tensor::cat(&[&cos, &sin], -1);
    let places = Tensor::arange(tokens, (Kind::Int64, device));
    // Parts of one projection, rotated into other parts of one tensor.
    let packed = randn(&[tokens, 3 * heads, size], Kind::BFloat16, device);
    let rotated = packed.zeros_like();
    let part = |x: &Tensor, index: i64| x.slice(1, index * heads, (index + 1) * heads, 1);
    let (q, k) = (part(&packed, 0), part(&packed, 1));
    let (mut to_q, mut to_k) = (part(&rotated, 0), part(&rotated, 1));
    let all = args![&q, &k, out(&mut to_q), out(&mut to_k), &cache, &places, false];
    call(&rope, all).unwrap();
    let of = |x: &Tensor| x.unsqueeze(0);
    let (q, k) = f_rope(&of(&q), &of(&k), &cos, &sin, &RopeOptions::default()).unwrap();
    assert_close(&of(&to_q), &q, 2e-2, 2e-2);
    assert_close(&of(&to_k), &k, 2e-2, 2e-2);
}

/// The kernel keeps 1 / sqrt(mean(x²) + ε) of each row, too.
#[test]
fn cuda_quacks_norm_agrees_with_ours() {
    let Some((module, device)) = ready("cuda_quacks_norm_agrees_with_ours", "quack_rmsnorm") else {
        return;
    };
    let rmsnorm = module.function("quack_rmsnorm_bf16_1024").unwrap();
    let weight = randn(&[1024], Kind::BFloat16, device);
    let none = tch_extension::library::NONE;
    for rows in [1, 7, 4096] {
        let x = randn(&[rows, 1024], Kind::BFloat16, device);
        let (mut y, mut rstd) = (x.empty_like(), Tensor::empty([rows], (Kind::Float, device)));
        let all = args![&x, &weight, none, none, out(&mut y), none, out(&mut rstd), none, 1e-6];
        call(&rmsnorm, all).unwrap();
        let expected = f_rms_norm(&x, &[1024], Some(&weight), Some(1e-6)).unwrap();
        assert_close(&y, &expected, 2e-2, 2e-2);
        let squares = x.to_kind(Kind::Float).square().mean_dim(-1, false, Kind::Float);
        assert_close(&rstd, &(squares + 1e-6).rsqrt(), 1e-5, 1e-5);
    }
    // It was compiled for rows of 1024 values.
    let x = randn(&[4, 1000], Kind::BFloat16, device);
    let (mut y, mut rstd) = (x.empty_like(), Tensor::empty([4], (Kind::Float, device)));
    let all = args![&x, &weight, none, none, out(&mut y), none, out(&mut rstd), none, 1e-6];
    assert!(call(&rmsnorm, all).is_err());
}

/// Every call returns a tensor, whose memory libtorch's allocator gets again.
#[test]
fn cuda_returned_tensors_do_not_accumulate() {
    const TEST: &str = "cuda_returned_tensors_do_not_accumulate";
    let empty = function!(TEST, "empty_like");
    let Some(device) = cuda_or_skip(TEST) else { return };
    let x = Tensor::zeros([1 << 20], (Kind::Float, device));
    let allocated = || tch_extension::cuda::memory_stats(device).unwrap().allocated;
    let before = allocated();
    for _ in 0..10_000 {
        drop(empty.call::<Tensor>(args![&x]).unwrap());
    }
    // All of them are 40 GB. Other tests run in this process, too.
    assert!(allocated() < before + (1 << 30), "{} bytes after {before}", allocated());
}

/// TileLang's run time needs the version of libtvm_ffi that it pins, hence a process of its own.
#[test]
fn cuda_tilelangs_product_agrees_with_ours() {
    if folder_and_gpu("cuda_tilelangs_product_agrees_with_ours").is_none() {
        return;
    }
    let text = alone("tilelang", &[]);
    assert!(text.contains("the products agree"), "{text}");
}

/// The task of the test above.
pub(super) fn tilelang() {
    let (folder, device) = folder_and_gpu("tilelang").expect("a folder and a GPU");
    let options = LoadOptions { global: true, ..Default::default() };
    // It brings its own libtvm_ffi.
    Library::load_with(folder.join("tilelang/lib/libtvm_runtime.so"), options).expect("a run time");
    let module = Module::load(folder.join("libtilelang_matmul.so")).expect("a module");
    let product = module.function("main").expect("a product");
    let [a, b] = [0, 1].map(|_| randn(&[1024, 1024], Kind::Half, device));
    let mut c = a.zeros_like();
    call(&product, args![&a, &b, out(&mut c)]).expect("a product");
    assert_close(&c, &a.matmul(&b), 1e-2, 1e-1);
    println!("the products agree");
    // A graph, on a stream of its own.
    let (graph, ()) =
        Graph::capture(device, || call(&product, args![&a, &b, out(&mut c)])).expect("a graph");
    let _ = c.zero_();
    graph.replay().expect("a replay");
    assert_close(&c, &a.matmul(&b), 1e-2, 1e-1);
    let wide = randn(&[1024, 512], Kind::Half, device);
    let error = call(&product, args![&a, &wide, out(&mut c)]).expect_err("a wrong shape");
    println!("{error}");
}

/// Recipe 3: a cubin of Triton has two parameters more than its kernel.
#[test]
fn cuda_tritons_cubin_is_launched() {
    let Some((folder, device)) = folder_and_gpu("cuda_tritons_cubin_is_launched") else { return };
    let image = std::fs::read(folder.join("triton_add.cubin")).expect("an image");
    let kernel = Kernel::load(image, "add_kernel").unwrap();
    let n = 100_003;
    let [x, y] = [0, 1].map(|_| randn(&[n], Kind::Float, device));
    let z = x.zeros_like();
    let n = i32::try_from(n).unwrap();
    let grid = Grid::new([n.unsigned_abs().div_ceil(1024), 1, 1], [4 * 32, 1, 1]);
    let none = std::ptr::null_mut::<std::ffi::c_void>();
    let [px, py, pz] = [&x, &y, &z].map(Tensor::data_ptr);
    // SAFETY: x, y, z and n are the parameters of others.py's kernel, and Triton adds two pointers. The
    // tensors are contiguous, of f32, on this device, and have n elements.
    unsafe { kernel.launch(device, grid, params![px, py, pz, n, none, none]).unwrap() };
    assert_eq!(z, &x + &y);
    // SAFETY: no kernel starts with too few parameters.
    let fewer = unsafe { kernel.launch(device, grid, params![px, py]) };
    assert!(fewer.is_err());
}

/// The time on the GPU and the time of a call, in µs: of many calls in a graph, and of calls that the GPU
/// follows at its leisure.
fn times(device: Device, mut call: impl FnMut()) -> (f64, f64) {
    const CALLS: u32 = 200;
    (0..CALLS).for_each(|_| call());
    synchronize(device).unwrap();
    let host = (0..20).map(|_| {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        let time = start.elapsed();
        synchronize(device).unwrap();
        time
    });
    let host = host.min().unwrap();
    let (graph, ()) = Graph::capture(device, || {
        (0..CALLS).for_each(|_| call());
        Ok(())
    })
    .unwrap();
    graph.replay().unwrap();
    let gpu = (0..20).map(|_| {
        let [start, end] = [0, 1].map(|_| Event::new(device).unwrap());
        start.record().unwrap();
        graph.replay().unwrap();
        end.record().unwrap();
        end.synchronize().unwrap();
        start.elapsed(&end).unwrap()
    });
    let each = |time: std::time::Duration| time.as_secs_f64() * 1e6 / f64::from(CALLS);
    (each(gpu.min().unwrap()), each(host))
}

/// others.py prints the same lines for calls from Python. A call must not cost what it saves: both functions
/// take fewer than 10 µs of the host, where torch's own rms_norm takes about as many.
#[test]
fn cuda_calls_of_others_are_cheap() {
    const TEST: &str = "cuda_calls_of_others_are_cheap";
    let Some((flashinfer, device)) = ready(TEST, "flashinfer_norm") else { return };
    let Some((quack, _)) = ready(TEST, "quack_rmsnorm") else { return };
    let flashinfer = flashinfer.function("rmsnorm").unwrap();
    let quack = quack.function("quack_rmsnorm_bf16_1024").unwrap();
    let none = tch_extension::library::NONE;
    for (rows, columns) in [(1, 1024), (64, 1024), (4096, 1024), (16384, 1024), (4096, 4096)] {
        let x = randn(&[rows, columns], Kind::BFloat16, device);
        let weight = randn(&[columns], Kind::BFloat16, device);
        let mut y = x.empty_like();
        let print = |name: &str, (gpu, host): (f64, f64)| {
            eprintln!(
                r#"{{"from": "rust", "function": "{name}", "rows": {rows}, "columns": {columns}, "gpu_us": {gpu:.3}, "host_us": {host:.3}}}"#
            );
            assert!(rows > 64 || host < 10.0, "{name}: {host} µs");
        };
        let run = || call(&flashinfer, args![out(&mut y), &x, &weight, 1e-6, false]).unwrap();
        print("flashinfer", times(device, run));
        if columns == 1024 {
            let mut rstd = Tensor::empty([rows], (Kind::Float, device));
            let run = || {
                let all =
                    args![&x, &weight, none, none, out(&mut y), none, out(&mut rstd), none, 1e-6];
                call(&quack, all).unwrap();
            };
            print("quack", times(device, run));
        }
    }
}

/// The times of our own norm, at the sizes at which tch-extension-open/tests/on_cuda.py calls it from CuPy and JAX.
#[test]
fn cuda_our_norm_takes_less_time_than_its_bytes_twice() {
    let test = "cuda_our_norm_takes_less_time_than_its_bytes_twice";
    let Some(device) = cuda_or_skip(test) else { return };
    let sizes = [(1024, 1024), (4096, 4096), (16384, 4096), (65536, 1024), (4096, 16384)];
    for kind in [Kind::Half, Kind::BFloat16] {
        for (rows, columns) in sizes {
            let x = randn(&[rows, columns], kind, device);
            let weight = randn(&[columns], kind, device);
            let run = || drop(f_rms_norm(&x, &[columns], Some(&weight), Some(1e-6)).unwrap());
            let (gpu, _) = times(device, run);
            eprintln!(
                r#"{{"from": "rust", "kind": "{kind:?}", "rows": {rows}, "columns": {columns}, "gpu_us": {gpu:.3}}}"#
            );
            let copy = times(device, || drop(x.copy())).0;
            assert!(gpu < 2.0 * copy, "{gpu} µs, and a copy {copy}");
        }
    }
}
