//! `bench host`: forward and backward passes where the GPU waits for the host, against libtorch's operators:
//! wall time in a steady loop, of tensors so small that kernels are over before the next is launched.

use crate::clock::{self, median};
use crate::common::{Case, Direction};
use crate::{cross_entropy, layer_norm, linear, machine};
use tch::{Cuda, Device, Kind};

const ROUNDS: usize = 15;

/// Rows and columns.
const ROWS: [(i64, i64); 10] = [
    (1, 64),
    (8, 768),
    (32, 1000),
    (64, 256),
    (128, 768),
    (256, 10),
    (16, 4096),
    (512, 128),
    (100, 100),
    (4, 8192),
];

/// (M, K, N).
const PRODUCTS: [(i64, i64, i64); 10] = [
    (1, 64, 64),
    (8, 768, 768),
    (32, 100, 10),
    (64, 256, 1024),
    (128, 128, 128),
    (256, 64, 256),
    (16, 1000, 30),
    (4, 512, 2048),
    (100, 100, 100),
    (32, 1024, 512),
];

/// Prints the times of both providers and, for each operator, the geometric mean and the least of the ratios.
pub fn run() {
    println!("{}", machine::describe());
    let device = if Cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
    let kind = Kind::Float;
    let operators: [Vec<Case>; 3] = [
        ROWS.map(|size| layer_norm::of_size(size, kind, device)).into(),
        ROWS.map(|size| cross_entropy::of_size(size, kind, device)).into(),
        PRODUCTS.map(|size| linear::of_size(size, kind, device)).into(),
    ];
    println!(
        "µs of both passes, libtorch's and ours, medians of {ROUNDS} interleaved rounds; the ratio"
    );
    for cases in &operators {
        let ratios: Vec<f64> = cases.iter().map(ratio).collect();
        let mean = ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64;
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        println!("{}: mean {:.3}, least {least:.3}", cases[0].operator, mean.exp());
    }
}

/// libtorch's time over ours.
fn ratio(case: &Case) -> f64 {
    let direction = Direction::Both;
    let runners = case.unchecked_runners(direction, 0);
    let of = |name| runners.iter().find(|runner| runner.name() == name).expect("both are measured");
    let both = ["libtorch", "fused"].map(of);
    let calls =
        both.map(|runner| clock::iterations_for(case.device, &mut || runner.run(direction)));
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        // Whoever comes first in a round is not always the same one.
        for place in [round % 2, 1 - round % 2] {
            let mut call = || both[place].run(direction);
            times[place].push(clock::per_call(case.device, calls[place], &mut call));
        }
    }
    let [rival, ours] = times.map(median);
    println!("  {}: {rival:.1} {ours:.1} {:.3}", case.title(direction), rival / ours);
    rival / ours
}
