//! The cost of the autograd bridge itself, measured with operators that compute nothing.

use crate::common::{Case, Provider, Work};
use criterion::{Criterion, criterion_group};
use std::hint::black_box;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{
    Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad,
};
use tch_extension::testing::cpp_identity;

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

/// An operator that computes nothing, with as many tensors as lltm_cell. Its time can be subtracted
/// from that of lltm_cell's forward and backward pass.
struct Empty;

impl Function for Empty {
    const NAME: &'static str = "empty";
    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        Ok([inputs.get(3)?.detach(), inputs.get(4)?.detach()].into())
    }
    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let state = |index| grads.optional(index).map(Tensor::shallow_clone);
        // All inputs of this benchmark have the state's size, so a gradient of the state fits each
        // of them.
        Ok([state(0), state(0), state(0), state(0), state(1)].into())
    }
}

/// A provider that calls an operator `length` times, each time on the previous output.
fn chain(
    name: &'static str,
    length: usize,
    link: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> Provider {
    let call = move |inputs: &[Tensor]| {
        let mut value = link(&inputs[0])?;
        for _ in 1..length {
            value = link(&value)?;
        }
        Ok(vec![value])
    };
    Provider::new(name, call)
}

/// Compares the bridge with the same operator in C++ and with libtorch's own cheapest
/// differentiable operation. Without a graph, the forward itself only calls `detach`; the rest of
/// its time is what `apply` adds.
pub fn cases(device: Device) -> Vec<Case> {
    let case = |point: String, inputs: Vec<(Vec<i64>, f64)>, providers| Case {
        operator: "autograd",
        point,
        kind: Kind::Float,
        device,
        inputs,
        tf32: false,
        work: [Work::default(); 2],
        providers,
    };
    let chains = [1, 64].map(|length| {
        let providers = vec![
            chain("detach", length, |x| Ok(x.f_detach()?)).without_backward(),
            chain("view_as", length, |x| Ok(x.f_view_as(x)?)),
            chain("C++", length, cpp_identity),
            chain("ours", length, |x| apply(Identity, &[Some(x)])?.single()),
        ];
        case(format!("chain of {length}"), vec![(vec![16], 1.0)], providers)
    });
    let empty = Provider::new("ours", |inputs| {
        let inputs: [Option<&Tensor>; 5] = std::array::from_fn(|place| inputs.get(place));
        Ok(apply(Empty, &inputs)?.exactly::<2>()?.into())
    });
    chains
        .into_iter()
        .chain([case("empty".to_string(), vec![(vec![16, 128], 1.0); 5], vec![empty])])
        .collect()
}

fn bridge(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("autograd/cpu");
    let constant = Tensor::from_slice(&[1.0]);
    let leaf = Tensor::from_slice(&[1.0]).set_requires_grad(true);
    // The difference between these two is the time that `apply` adds when no graph is needed.
    group.bench_function("the forward alone", |bencher| {
        bencher.iter(|| black_box(&constant).detach())
    });
    group.bench_function("apply without a graph", |bencher| {
        bencher.iter(|| identity(black_box(&constant)))
    });
    group.bench_function("apply with a graph", |bencher| {
        bencher.iter(|| identity(black_box(&leaf)))
    });
    group.bench_function("apply and backward", |bencher| {
        bencher.iter(|| {
            grad(&[&identity(black_box(&leaf))], &[&leaf], &GradOptions::default())
                .expect("gradient")
        });
    });
    // This is libtorch's own cheapest differentiable operation, for comparison.
    group.bench_function("view_as and backward", |bencher| {
        bencher.iter(|| {
            grad(&[&black_box(&leaf).view_as(&leaf)], &[&leaf], &GradOptions::default())
                .expect("gradient")
        });
    });
    group.finish();
}

criterion_group!(benches, bridge);
