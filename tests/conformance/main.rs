//! Tests that `testing::conformance` accepts operators that keep the rules, and names the rule that
//! another operator breaks.

mod accepted;
mod forward;
mod gradients;
mod in_place;
mod surroundings;

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::ThreadId;
use tch::{Device, Kind, Tensor};
use tch_extension::amp::Autocast;
use tch_extension::autograd::{
    Context, Function, GradOptions, Inputs, Saver, Tensors, apply, checkpoint,
    differentiate_reference, grad,
};
use tch_extension::cuda::{Stream, StreamGuard};
use tch_extension::testing::{ConformanceOptions, conformance, cuda_or_skip, devices};
use tch_extension::{Error, Result};

fn leaf(size: &[i64], device: Device) -> Tensor {
    let values = Tensor::randn(size, (Kind::Double, Device::Cpu));
    values.to_device(device).set_requires_grad(true)
}

fn defaults() -> ConformanceOptions<'static> {
    ConformanceOptions::default()
}

/// The names of the rules that the operator breaks, and the whole report.
fn broken<O: Into<Tensors>>(
    operator: impl Fn(&[Tensor]) -> Result<O> + Sync,
    device: Device,
    options: &ConformanceOptions<'_>,
) -> (Vec<String>, String) {
    let inputs = [leaf(&[4, 6], device), leaf(&[4, 6], device)];
    let Err(error) = conformance(operator, &[&inputs[0], &inputs[1]], options) else {
        return (Vec::new(), String::new());
    };
    let report = error.to_string();
    let name = |line: &str| {
        let rest = line.strip_prefix("conformance: ").unwrap_or_else(|| panic!("{report}"));
        rest.split(':').next().unwrap_or_default().to_string()
    };
    (report.lines().map(name).collect(), report)
}

#[track_caller]
fn assert_breaks<O: Into<Tensors>>(
    operator: impl Fn(&[Tensor]) -> Result<O> + Sync,
    expected: &[&str],
    says: &str,
) {
    for device in devices() {
        let (names, report) = broken(&operator, device, &defaults());
        assert_eq!(names, expected, "{device:?}: {report}");
        assert!(report.contains(says), "{says:?} is not in: {report}");
    }
}

/// x·w, in which one part can be replaced by a wrong one: the function that computes the output
/// from the inputs, or the one that computes the gradients from the inputs and the incoming
/// gradient.
struct Product<F, B> {
    forward: F,
    backward: B,
}

type Gradient = fn(&Context<'_>, [&Tensor; 2], &Tensor) -> Result<Tensors>;
type Value = fn(&Tensor, &Tensor) -> Result<Tensor>;

fn value(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    Ok(x * w)
}

fn gradient(_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor) -> Result<Tensors> {
    Ok([grad * w, grad * x].into())
}

impl Function for Product<Value, Gradient> {
    const NAME: &'static str = "product";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(w);
        Ok((self.forward)(x, w)?.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        (self.backward)(ctx, [&x, &w], grads.get(0)?)
    }
}

fn product(forward: Value, backward: Gradient) -> impl Fn(&[Tensor]) -> Result<Tensors> + Sync {
    move |inputs| apply(Product { forward, backward }, &[Some(&inputs[0]), Some(&inputs[1])])
}

/// The tensor's memory, read as if the tensor were contiguous.
fn taken_for_contiguous(tensor: &Tensor) -> Tensor {
    let columns = tensor.size()[1];
    tensor.as_strided(tensor.size(), [columns, 1], None)
}
