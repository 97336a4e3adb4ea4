//! Times the kernels written in Rust against others, on the first GPU: `cargo run --release --bin bench`.

use rust_kernel::{matmul_add_relu, prepare, silu};
use std::path::PathBuf;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::{Event, Grid, Kernel, params};
use tch_extension::ops::f_matmul_add_relu;

const DEVICE: Device = Device::Cuda(0);
const ROUNDS: usize = 15;

/// The median time of a call, in microseconds, over rounds of calls that take about 20 ms.
fn time(call: &mut dyn FnMut() -> Result<Tensor>) -> Result<f64> {
    let mut round = |calls: usize| -> Result<f64> {
        let (start, end) = (Event::new(DEVICE)?, Event::new(DEVICE)?);
        start.record()?;
        for _ in 0..calls {
            drop(call()?);
        }
        end.record()?;
        end.synchronize()?;
        Ok(start.elapsed(&end)?.as_secs_f64() * 1e6 / calls as f64)
    };
    round(10)?;
    let once = round(20)?;
    let calls = (20_000.0 / once).clamp(5.0, 2000.0) as usize;
    let mut times = (0..ROUNDS).map(|_| round(calls)).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

type Call<'a> = Box<dyn FnMut() -> Result<Tensor> + 'a>;

/// Prints the times, and how fast the others are in comparison with the first.
fn compare(what: &str, calls: Vec<(&str, Call<'_>)>) -> Result<()> {
    let mut first = None;
    print!("{what:<36}");
    for (name, mut call) in calls {
        match time(&mut *call) {
            Ok(time) => {
                let first = *first.get_or_insert(time);
                print!(" | {name} {time:.1} us, Rust is {:.2} x as fast", time / first);
            }
            Err(error) => print!(" | {name}: {error}"),
        }
    }
    println!();
    Ok(())
}

/// SiLU by nvcc (`benches/silu.cu`), if its cubin is there.
fn nvcc_silu(name: &str) -> Option<Kernel> {
    let folder = std::env::var_os("RUST_KERNEL_IMAGES")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("images"), PathBuf::from);
    let bytes = std::fs::read(folder.join("nvcc_silu_sm_90.cubin")).ok()?;
    Kernel::load(bytes, name).map_err(|error| eprintln!("{error}")).ok()
}

fn silus() -> Result<()> {
    for (kind, name, lanes) in [(Kind::Float, "silu_f32", 4), (Kind::Half, "silu_f16", 8)] {
        prepare(kind, DEVICE)?;
        let nvcc = nvcc_silu(name);
        for n in [1i64 << 16, 1 << 20, 1 << 24, 1 << 27] {
            let x = Tensor::randn([n], (kind, DEVICE));
            let mut calls: Vec<(&str, Call<'_>)> =
                vec![("Rust", Box::new(|| silu(&x))), ("libtorch", Box::new(|| Ok(x.f_silu()?)))];
            if let Some(kernel) = &nvcc {
                calls.push((
                    "nvcc",
                    Box::new(|| {
                        let y = x.f_empty_like()?;
                        let vectors = n / lanes;
                        let blocks = vectors.unsigned_abs().div_ceil(256) as u32;
                        let grid = Grid::new([blocks, 1, 1], [256, 1, 1]);
                        // SAFETY: these are its parameters; n is a multiple of a vector's elements.
                        unsafe {
                            kernel.launch(
                                DEVICE,
                                grid,
                                params![x.data_ptr(), y.data_ptr(), vectors],
                            )?
                        };
                        Ok(y)
                    }),
                ));
            }
            compare(&format!("silu {kind:?} {n}"), calls)?;
        }
    }
    Ok(())
}

fn products() -> Result<()> {
    for kind in [Kind::Half, Kind::BFloat16] {
        prepare(kind, DEVICE)?;
        for [m, k, n] in [
            [1024, 1024, 1024],
            [4096, 4096, 4096],
            [8192, 4096, 4096],
            [8192, 8192, 8192],
            [4095, 4096, 4096],
            [4096, 4095, 4096],
        ] {
            let x = Tensor::randn([m, k], (kind, DEVICE));
            let y = Tensor::randn([k, n], (kind, DEVICE)) * 0.02;
            let bias = Tensor::randn([n], (kind, DEVICE));
            let calls: Vec<(&str, Call<'_>)> = vec![
                ("Rust", Box::new(|| matmul_add_relu(&x, &y, &bias))),
                ("tch-extension", Box::new(|| f_matmul_add_relu(&x, &y, &bias))),
                ("libtorch", Box::new(|| Ok(x.f_matmul(&y)?.f_add(&bias)?.f_relu()?))),
            ];
            compare(&format!("matmul_add_relu {kind:?} {m}x{k}x{n}"), calls)?;
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let _guard = tch::no_grad_guard();
    silus()?;
    products()
}
