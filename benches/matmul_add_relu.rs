//! `relu(lhs @ rhs + bias)`: fused against the composite of three operations, and against libtorch's fused one where
//! it has one: forward, of matrices and a row.

use crate::common;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_matmul_add_relu, matmul_add_relu_reference};
use tch_extension::testing::{assert_close, devices};

type Operator = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

const PROVIDERS: [(&str, Operator); 2] =
    [("composite", matmul_add_relu_reference), ("fused", f_matmul_add_relu)];

/// The sizes of lhs, rhs and bias.
type Size = (&'static [i64], &'static [i64], &'static [i64]);

const SIZES: [Size; 6] = [
    (&[16, 32], &[32, 128], &[128]),
    (&[512, 256], &[256, 512], &[512]),
    (&[1024, 1024], &[1024, 1024], &[1024]),
    (&[4096, 64], &[64, 1024], &[1024]),
    // Burn's example.
    (&[1, 32, 32], &[32, 32, 32], &[32, 32, 32]),
    (&[16, 256, 256], &[256, 256], &[16, 256, 256]),
];

fn libtorch(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    // torch-sys 0.24 hands `use_gelu` on as the factor of the bias: true is 1, and the activation stays ReLU.
    Ok(bias.f_internal_addmm_activation(lhs, rhs, true)?)
}

fn has_fused_rival((lhs, rhs, bias): Size) -> bool {
    (lhs.len(), rhs.len(), bias.len()) == (2, 2, 1)
}

struct Arguments {
    inputs: [Tensor; 3],
    vector: Tensor,
}

impl Arguments {
    fn new((lhs, rhs, bias): Size, device: Device, requires_grad: bool) -> Self {
        tch::manual_seed(0);
        let scale = 1.0 / (lhs[lhs.len() - 1] as f64).sqrt();
        let inputs = [(lhs, 1.0), (rhs, scale), (bias, 1.0)].map(|(size, scale)| {
            (Tensor::randn(size, (Kind::Float, device)) * scale).set_requires_grad(requires_grad)
        });
        let [lhs, rhs, bias] = &inputs;
        let output = f_matmul_add_relu(lhs, rhs, bias).expect("good arguments");
        let vector = Tensor::randn(output.size(), (Kind::Float, device));
        Arguments { inputs, vector }
    }

    fn forward(&self, operator: Operator) -> Tensor {
        let [lhs, rhs, bias] = &self.inputs;
        operator(lhs, rhs, bias).expect("good arguments")
    }

    fn backward(&self, output: &Tensor) -> Vec<Option<Tensor>> {
        let vectors = [Some(&self.vector)];
        let options = GradOptions { grad_outputs: &vectors, retain_graph: Some(true), ..Default::default() };
        grad(&[output], &self.inputs.each_ref(), &options).expect("gradients").into_vec()
    }

    fn flops(&self) -> u64 {
        let [lhs, ..] = &self.inputs;
        2 * self.vector.numel() as u64 * lhs.size().last().copied().unwrap_or(1) as u64
    }

    /// A bench of something else than the same result would say nothing.
    fn check_that_providers_agree(&self, size: Size) {
        let [composite, fused] = PROVIDERS.map(|(_, operator)| {
            let output = self.forward(operator);
            let gradients = self.backward(&output);
            [Some(output.detach())].into_iter().chain(gradients).flatten().collect::<Vec<_>>()
        });
        for (fused, composite) in fused.iter().zip(&composite) {
            assert_close(fused, composite, 1e-3, 1e-3);
        }
        if has_fused_rival(size) {
            let rival = tch::no_grad(|| self.forward(libtorch));
            assert_close(&fused[0], &rival, 1e-3, 1e-3);
        }
    }
}

/// One group, of all sizes and providers.
fn group(
    criterion: &mut Criterion,
    direction: &str,
    requires_grad: bool,
    run: impl Fn(&Arguments, Operator, u64, Device) -> Duration,
) {
    for device in devices() {
        let mut group =
            criterion.benchmark_group(format!("matmul_add_relu/{direction}/{}", common::name(device)));
        group
            .measurement_time(Duration::from_secs(2))
            .warm_up_time(Duration::from_millis(500))
            .sample_size(20);
        for size in SIZES {
            let arguments = Arguments::new(size, device, requires_grad);
            if requires_grad {
                arguments.check_that_providers_agree(size);
            }
            group.throughput(Throughput::Elements(arguments.flops()));
            let mut providers = PROVIDERS.to_vec();
            if !requires_grad && has_fused_rival(size) {
                providers.push(("libtorch", libtorch));
            }
            for (provider, operator) in providers {
                group.bench_function(BenchmarkId::new(provider, format!("{size:?}")), |bencher| {
                    bencher.iter_custom(|iterations| run(&arguments, operator, iterations, device));
                });
            }
        }
    }
}

fn forward(criterion: &mut Criterion) {
    group(criterion, "forward", false, |arguments, operator, iterations, device| {
        common::time(device, iterations, || drop(arguments.forward(operator)))
    });
}

fn backward(criterion: &mut Criterion) {
    group(criterion, "backward", true, |arguments, operator, iterations, device| {
        let output = arguments.forward(operator);
        common::time(device, iterations, || drop(arguments.backward(&output)))
    });
}

fn forward_and_backward(criterion: &mut Criterion) {
    group(criterion, "forward+backward", true, |arguments, operator, iterations, device| {
        common::time(device, iterations, || drop(arguments.backward(&arguments.forward(operator))))
    });
}

/// Composite and fused in turn; see [`common::compare`].
pub fn ratios() {
    for device in devices() {
        for size in SIZES {
            let title =
                |direction| format!("matmul_add_relu {direction} {size:?} f32 {}", common::name(device));
            let (composite, fused) = (PROVIDERS[0].1, PROVIDERS[1].1);
            let arguments = Arguments::new(size, device, false);
            common::compare(
                device,
                &title("forward"),
                || drop(arguments.forward(composite)),
                || drop(arguments.forward(fused)),
            );
            let arguments = Arguments::new(size, device, true);
            arguments.check_that_providers_agree(size);
            let outputs = [arguments.forward(composite), arguments.forward(fused)];
            common::compare(
                device,
                &title("backward"),
                || drop(arguments.backward(&outputs[0])),
                || drop(arguments.backward(&outputs[1])),
            );
            common::compare(
                device,
                &title("forward + backward"),
                || drop(arguments.backward(&arguments.forward(composite))),
                || drop(arguments.backward(&arguments.forward(fused))),
            );
        }
    }
}

criterion_group!(benches, forward, backward, forward_and_backward);
