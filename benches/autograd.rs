//! What the bridge itself costs: an operator that does nothing.

use criterion::{Criterion, criterion_group};
use std::hint::black_box;
use tch::Tensor;
use tch_extension::Result;
use tch_extension::autograd::{Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad};

struct Identity;

impl Function for Identity {
    const NAME: &'static str = "identity";
    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        Ok(inputs.get(0)?.detach().into())
    }
    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(grads.get(0)?.shallow_clone().into())
    }
}

fn identity(x: &Tensor) -> Tensor {
    apply(Identity, &[Some(x)]).and_then(Tensors::single).expect("one output")
}

fn bridge(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("autograd/cpu");
    let constant = Tensor::from_slice(&[1.0]);
    let leaf = Tensor::from_slice(&[1.0]).set_requires_grad(true);
    // The difference of these two is what `apply` adds where no graph is needed.
    group.bench_function("the forward alone", |bencher| bencher.iter(|| black_box(&constant).detach()));
    group.bench_function("apply without a graph", |bencher| bencher.iter(|| identity(black_box(&constant))));
    group.bench_function("apply with a graph", |bencher| bencher.iter(|| identity(black_box(&leaf))));
    group.bench_function("apply and backward", |bencher| {
        bencher.iter(|| {
            grad(&[&identity(black_box(&leaf))], &[&leaf], &GradOptions::default()).expect("gradient")
        });
    });
    // libtorch's own cheapest differentiable operation, for comparison.
    group.bench_function("view_as and backward", |bencher| {
        bencher.iter(|| {
            grad(&[&black_box(&leaf).view_as(&leaf)], &[&leaf], &GradOptions::default()).expect("gradient")
        });
    });
    group.finish();
}

criterion_group!(benches, bridge);
