//! The linear layer: fused against libtorch's own, and against the composite of product and sum.

use crate::common;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_linear, linear_reference};
use tch_extension::testing::{assert_close, devices};

type Linear = fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;

const PROVIDERS: [(&str, Linear); 3] =
    [("composite", composite), ("libtorch", linear_reference), ("fused", f_linear)];

/// (M, K, N).
const SIZES: [(i64, i64, i64); 4] = [(16, 32, 128), (512, 256, 512), (1024, 1024, 1024), (4096, 64, 1024)];

fn composite(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let product = input.f_matmul(&weight.f_transpose(0, 1)?)?;
    Ok(bias.map_or_else(|| Ok(product.shallow_clone()), |bias| product.f_add(bias))?)
}

struct Arguments {
    x: Tensor,
    w: Tensor,
    b: Tensor,
    vector: Tensor,
}

impl Arguments {
    fn new((m, k, n): (i64, i64, i64), device: Device, requires_grad: bool) -> Self {
        tch::manual_seed(0);
        let make = |size: &[i64], scale: f64| {
            (Tensor::randn(size, (Kind::Float, device)) * scale).set_requires_grad(requires_grad)
        };
        let w = make(&[n, k], 1.0 / (k as f64).sqrt());
        let vector = Tensor::randn([m, n], (Kind::Float, device));
        Arguments { x: make(&[m, k], 1.0), w, b: make(&[n], 1.0), vector }
    }

    fn forward(&self, linear: Linear) -> Tensor {
        linear(&self.x, &self.w, Some(&self.b)).expect("good arguments")
    }

    fn backward(&self, output: &Tensor) -> Vec<Option<Tensor>> {
        let vectors = [Some(&self.vector)];
        let options = GradOptions { grad_outputs: &vectors, retain_graph: Some(true), ..Default::default() };
        grad(&[output], &[&self.x, &self.w, &self.b], &options).expect("gradients").into_vec()
    }

    /// A bench of something else than the same result would say nothing.
    fn check_that_providers_agree(&self) {
        let of = |linear| {
            let output = self.forward(linear);
            let gradients = self.backward(&output);
            [Some(output.detach())].into_iter().chain(gradients).flatten().collect::<Vec<_>>()
        };
        let [composite, libtorch, fused] = PROVIDERS.map(|(_, linear)| of(linear));
        for rival in [composite, libtorch] {
            for (fused, rival) in fused.iter().zip(&rival) {
                assert_close(fused, rival, 1e-3, 1e-3);
            }
        }
    }
}

/// One group, of all sizes and providers.
fn group(
    criterion: &mut Criterion,
    direction: &str,
    requires_grad: bool,
    run: impl Fn(&Arguments, Linear, u64, Device) -> Duration,
) {
    for device in devices() {
        let mut group = criterion.benchmark_group(format!("linear/{direction}/{}", common::name(device)));
        group
            .measurement_time(Duration::from_secs(2))
            .warm_up_time(Duration::from_millis(500))
            .sample_size(20);
        for size in SIZES {
            let arguments = Arguments::new(size, device, requires_grad);
            if requires_grad {
                arguments.check_that_providers_agree();
            }
            group.throughput(Throughput::Elements((2 * size.0 * size.1 * size.2) as u64));
            for (provider, linear) in PROVIDERS {
                group.bench_function(BenchmarkId::new(provider, format!("{size:?}")), |bencher| {
                    bencher.iter_custom(|iterations| run(&arguments, linear, iterations, device));
                });
            }
        }
    }
}

fn forward(criterion: &mut Criterion) {
    group(criterion, "forward", false, |arguments, linear, iterations, device| {
        common::time(device, iterations, || drop(arguments.forward(linear)))
    });
}

fn backward(criterion: &mut Criterion) {
    group(criterion, "backward", true, |arguments, linear, iterations, device| {
        let output = arguments.forward(linear);
        common::time(device, iterations, || drop(arguments.backward(&output)))
    });
}

fn forward_and_backward(criterion: &mut Criterion) {
    group(criterion, "forward+backward", true, |arguments, linear, iterations, device| {
        common::time(device, iterations, || drop(arguments.backward(&arguments.forward(linear))))
    });
}

/// libtorch's own linear and the fused one in turn; see [`common::compare`].
pub fn ratios() {
    for device in devices() {
        for size in SIZES {
            let title = |direction| format!("linear {direction} {size:?} f32 {}", common::name(device));
            let (libtorch, fused) = (linear_reference as Linear, f_linear as Linear);
            let arguments = Arguments::new(size, device, false);
            common::compare(
                device,
                &title("forward"),
                || drop(arguments.forward(libtorch)),
                || drop(arguments.forward(fused)),
            );
            let arguments = Arguments::new(size, device, true);
            arguments.check_that_providers_agree();
            let outputs = [arguments.forward(libtorch), arguments.forward(fused)];
            common::compare(
                device,
                &title("backward"),
                || drop(arguments.backward(&outputs[0])),
                || drop(arguments.backward(&outputs[1])),
            );
            common::compare(
                device,
                &title("forward + backward"),
                || drop(arguments.backward(&arguments.forward(libtorch))),
                || drop(arguments.backward(&arguments.forward(fused))),
            );
        }
    }
}

criterion_group!(benches, forward, backward, forward_and_backward);
