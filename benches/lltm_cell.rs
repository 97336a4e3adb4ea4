//! The LLTM cell: fused against the composite of tch operations.

use crate::common;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};
use tch_extension::testing::{assert_close, devices};

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

const PROVIDERS: [(&str, Cell); 2] = [("composite", lltm_cell_reference), ("fused", f_lltm_cell)];

/// (B, F, H).
const SIZES: [(i64, i64, i64); 3] = [(16, 32, 128), (64, 256, 512), (128, 1024, 1024)];

struct Arguments {
    x: Tensor,
    w: Tensor,
    b: Tensor,
    h: Tensor,
    c: Tensor,
}

impl Arguments {
    fn new((batch, features, hidden): (i64, i64, i64), device: Device, requires_grad: bool) -> Self {
        tch::manual_seed(0);
        let make = |rows, columns| {
            Tensor::randn([rows, columns], (Kind::Float, device)).set_requires_grad(requires_grad)
        };
        let scale = 1.0 / (hidden as f64).sqrt();
        let w = (Tensor::randn([3 * hidden, hidden + features], (Kind::Float, device)) * scale)
            .set_requires_grad(requires_grad);
        let b = Tensor::randn([3 * hidden], (Kind::Float, device)).set_requires_grad(requires_grad);
        Arguments { x: make(batch, features), w, b, h: make(batch, hidden), c: make(batch, hidden) }
    }

    fn forward(&self, cell: Cell) -> (Tensor, Tensor) {
        cell(&self.x, &self.w, Some(&self.b), (&self.h, &self.c)).expect("good arguments")
    }

    fn gradients(&self, cell: Cell, vector: &Tensor) -> Vec<Option<Tensor>> {
        let (h, c) = self.forward(cell);
        let inputs = [&self.x, &self.w, &self.b, &self.h, &self.c];
        let vectors = [Some(vector), Some(vector)];
        let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
        grad(&[&h, &c], &inputs, &options).expect("gradients").into_vec()
    }

    /// A bench of something else than the same result would say nothing.
    fn check_that_providers_agree(&self, vector: &Tensor) {
        let [composite, fused] = PROVIDERS.map(|(_, cell)| self.gradients(cell, vector));
        for (fused, composite) in fused.iter().flatten().zip(composite.iter().flatten()) {
            assert_close(fused, composite, 1e-3, 1e-3);
        }
    }
}

fn forward(criterion: &mut Criterion) {
    for device in devices() {
        let mut group = criterion.benchmark_group(format!("lltm_cell/forward/{}", common::name(device)));
        group
            .measurement_time(Duration::from_secs(2))
            .warm_up_time(Duration::from_millis(500))
            .sample_size(20);
        for size in SIZES {
            let arguments = Arguments::new(size, device, false);
            group.throughput(Throughput::Elements((size.0 * size.2) as u64));
            for (provider, cell) in PROVIDERS {
                group.bench_function(BenchmarkId::new(provider, format!("{size:?}")), |bencher| {
                    bencher.iter_custom(|iterations| {
                        common::time(device, iterations, || drop(arguments.forward(cell)))
                    });
                });
            }
        }
    }
}

fn forward_and_backward(criterion: &mut Criterion) {
    for device in devices() {
        let mut group =
            criterion.benchmark_group(format!("lltm_cell/forward+backward/{}", common::name(device)));
        group
            .measurement_time(Duration::from_secs(2))
            .warm_up_time(Duration::from_millis(500))
            .sample_size(20);
        for size in SIZES {
            let arguments = Arguments::new(size, device, true);
            let vector = Tensor::randn([size.0, size.2], (Kind::Float, device));
            arguments.check_that_providers_agree(&vector);
            group.throughput(Throughput::Elements((size.0 * size.2) as u64));
            for (provider, cell) in PROVIDERS {
                group.bench_function(BenchmarkId::new(provider, format!("{size:?}")), |bencher| {
                    bencher.iter_custom(|iterations| {
                        common::time(device, iterations, || drop(arguments.gradients(cell, &vector)))
                    });
                });
            }
        }
    }
}

/// Composite and fused in turn; see [`common::compare`].
pub fn ratios() {
    for device in devices() {
        for size in SIZES {
            let title = |direction| format!("lltm_cell {direction} {size:?} f32 {}", common::name(device));
            let (composite, fused) = (PROVIDERS[0].1, PROVIDERS[1].1);
            let arguments = Arguments::new(size, device, false);
            common::compare(
                device,
                &title("forward"),
                || drop(arguments.forward(composite)),
                || drop(arguments.forward(fused)),
            );
            let arguments = Arguments::new(size, device, true);
            let vector = Tensor::randn([size.0, size.2], (Kind::Float, device));
            arguments.check_that_providers_agree(&vector);
            common::compare(
                device,
                &title("forward + backward"),
                || drop(arguments.gradients(composite, &vector)),
                || drop(arguments.gradients(fused, &vector)),
            );
        }
    }
}

criterion_group!(benches, forward, forward_and_backward);
