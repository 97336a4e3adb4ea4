//! Tests of the autograd bridge. For each promise of `autograd::Function`, there is a test here
//! that fails without it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::*;
use tch_extension::cuda::{memory_stats, reset_peak_memory_stats};
use tch_extension::{Error, Result};

mod anomaly;
mod arguments;
mod backward;
mod checkpoint;
mod constants;
mod derivatives;
mod engine;
mod failures;
mod hooks;
mod in_place;
mod lifetime;
mod outputs;
mod post_accumulate;
mod profiler;
mod saved_hooks;
mod saving;
mod second_derivatives;

/// Lets only one test run at a time, because tests count live nodes.
fn alone() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let lock = SERIAL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // A backward that failed leaves tasks in a queue of its thread. libtorch frees them when the
    // thread ends, which is after the previous test released the lock.
    let deadline = Instant::now() + Duration::from_secs(10);
    while live_nodes() > 0 {
        assert!(Instant::now() < deadline, "the test before left {} nodes", live_nodes());
        std::thread::sleep(Duration::from_millis(1));
    }
    lock
}

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().contiguous().view(-1)).expect("a double tensor")
}

fn gradient_of(output: &Tensor, input: &Tensor) -> Result<Tensor> {
    grad(&[&output.sum(Kind::Double)], &[input], &GradOptions::default())?.single()
}

fn run<F: Function>(function: F, x: &Tensor) -> Tensor {
    apply(function, &[Some(x)]).and_then(Tensors::single).expect("one output")
}

/// Options that keep the graph for another backward.
fn keep() -> GradOptions<'static> {
    GradOptions { retain_graph: Some(true), ..Default::default() }
}

/// Options that make the gradient differentiable.
fn create() -> GradOptions<'static> {
    GradOptions { create_graph: true, ..Default::default() }
}

/// An operator made of two closures.
struct Op<F, B> {
    forward: F,
    backward: B,
}

impl<F, B> Function for Op<F, B>
where
    F: Fn(&mut Saver<'_>, Inputs<'_>) -> Result<Tensors> + Send + Sync + 'static,
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    const NAME: &'static str = "op";
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        (self.forward)(saver, inputs)
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        (self.backward)(ctx, grads)
    }
}

fn op<F, B>(forward: F, backward: B) -> Op<F, B>
where
    F: Fn(&mut Saver<'_>, Inputs<'_>) -> Result<Tensors>,
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors>,
{
    Op { forward, backward }
}

/// x², which saves its input. `DOUBLE` says whether its backward may be differentiated.
struct Square<const DOUBLE: bool>;

impl<const DOUBLE: bool> Function for Square<DOUBLE> {
    const NAME: &'static str = "square";
    const DOUBLE_BACKWARD: bool = DOUBLE;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * x).into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
    }
}

fn square(x: &Tensor) -> Tensor {
    run(Square::<false>, x)
}

/// exp, which saves its output.
struct Exp;

impl Function for Exp {
    const NAME: &'static str = "exp";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let y = inputs.get(0)?.exp();
        saver.save(&y);
        Ok(y.into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)?).into())
    }
}

fn exp(x: &Tensor) -> Tensor {
    run(Exp, x)
}

/// Increments a counter when it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// x ↦ 2x, whose state contains a [`Counted`]. Its forward first calls `misuse` with the saver.
fn counted(drops: &Arc<AtomicUsize>, misuse: fn(&mut Saver<'_>)) -> impl Function + use<> {
    let state = Counted(Arc::clone(drops));
    op(
        move |saver, inputs| {
            misuse(saver);
            Ok((inputs.get(0)? * 2.0).into())
        },
        move |_, grads| {
            let _held = &state;
            Ok((grads.get(0)? * 2.0).into())
        },
    )
}
