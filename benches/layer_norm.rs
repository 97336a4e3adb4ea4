//! Layer normalisation: fused against the composite of tch operations and against libtorch's own operator.

use crate::common;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_layer_norm, layer_norm_reference};
use tch_extension::testing::{assert_close, devices};

type Op = fn(&Tensor, &[i64], Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;

const PROVIDERS: [(&str, Op); 3] =
    [("composite", layer_norm_reference), ("libtorch", libtorch), ("fused", f_layer_norm)];

/// (M, N). The last is beyond the L2 cache, and on CUDA only.
const SIZES: [(i64, i64); 4] = [(256, 1024), (8192, 1024), (4096, 4096), (32768, 8192)];

const EPS: f64 = 1e-5;

fn libtorch(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Ok(input.f_layer_norm(normalized_shape, weight, bias, eps, true)?)
}

fn sizes(device: Device) -> &'static [(i64, i64)] {
    if device.is_cuda() { &SIZES } else { &SIZES[..2] }
}

fn kinds(device: Device) -> &'static [Kind] {
    if device.is_cuda() { &[Kind::Float, Kind::BFloat16] } else { &[Kind::Float] }
}

struct Arguments {
    x: Tensor,
    w: Tensor,
    b: Tensor,
    vector: Tensor,
}

impl Arguments {
    fn new((rows, columns): (i64, i64), kind: Kind, device: Device, requires_grad: bool) -> Self {
        tch::manual_seed(0);
        let make = |size: &[i64]| Tensor::randn(size, (kind, device)).set_requires_grad(requires_grad);
        let vector = Tensor::randn([rows, columns], (kind, device));
        Arguments { x: make(&[rows, columns]), w: make(&[columns]), b: make(&[columns]), vector }
    }

    fn forward(&self, op: Op) -> Tensor {
        let columns = self.w.size()[0];
        op(&self.x, &[columns], Some(&self.w), Some(&self.b), EPS).expect("good arguments")
    }

    fn gradients(&self, op: Op) -> Vec<Option<Tensor>> {
        let y = self.forward(op);
        let options = GradOptions { grad_outputs: &[Some(&self.vector)], ..Default::default() };
        grad(&[&y], &[&self.x, &self.w, &self.b], &options).expect("gradients").into_vec()
    }

    /// A bench of something else than the same result would say nothing.
    fn check_that_providers_agree(&self) {
        let [composite, libtorch, fused] = PROVIDERS.map(|(_, op)| self.gradients(op));
        let (rtol, atol) = if self.x.kind() == Kind::Float { (1e-3, 1e-2) } else { (5e-2, 2.0) };
        for others in [composite, libtorch] {
            for (fused, other) in fused.iter().flatten().zip(others.iter().flatten()) {
                assert_close(fused, other, rtol, atol);
            }
        }
    }
}

fn group(
    criterion: &mut Criterion,
    direction: &str,
    requires_grad: bool,
    run: impl Fn(&Arguments, Op) + Copy,
) {
    for device in devices() {
        let mut group = criterion.benchmark_group(format!("layer_norm/{direction}/{}", common::name(device)));
        group
            .measurement_time(Duration::from_secs(2))
            .warm_up_time(Duration::from_millis(500))
            .sample_size(20);
        for &kind in kinds(device) {
            for &size in sizes(device) {
                let arguments = Arguments::new(size, kind, device, requires_grad);
                if requires_grad {
                    arguments.check_that_providers_agree();
                }
                group.throughput(Throughput::Elements((size.0 * size.1) as u64));
                for (provider, op) in PROVIDERS {
                    let id = BenchmarkId::new(provider, format!("{size:?} {kind:?}"));
                    group.bench_function(id, |bencher| {
                        bencher.iter_custom(|iterations| {
                            common::time(device, iterations, || run(&arguments, op))
                        });
                    });
                }
            }
        }
    }
}

fn forward(criterion: &mut Criterion) {
    group(criterion, "forward", false, |arguments, op| drop(arguments.forward(op)));
}

fn forward_and_backward(criterion: &mut Criterion) {
    group(criterion, "forward+backward", true, |arguments, op| drop(arguments.gradients(op)));
}

/// Composite and fused, then libtorch's own and fused, in turn; see [`common::compare`].
pub fn ratios() {
    for device in devices() {
        for &kind in kinds(device) {
            for &size in sizes(device) {
                for (direction, requires_grad) in [("forward", false), ("forward + backward", true)] {
                    let arguments = Arguments::new(size, kind, device, requires_grad);
                    if requires_grad {
                        arguments.check_that_providers_agree();
                    }
                    let run = |op| {
                        if requires_grad {
                            drop(arguments.gradients(op));
                        } else {
                            drop(arguments.forward(op));
                        }
                    };
                    for (rival, op) in &PROVIDERS[..2] {
                        let place = common::name(device);
                        let title = format!("layer_norm {direction} {size:?} {kind:?} {place}, {rival}");
                        common::compare(device, &title, || run(*op), || run(f_layer_norm));
                    }
                }
            }
        }
    }
}

criterion_group!(benches, forward, forward_and_backward);
