//! Operators that are wrong on purpose, or fail. `check.py` of `examples/python_ops` loads them next to
//! the right ones.

use std::time::Duration;
use tch::Tensor;
use tch_extension::autograd::Tensors;
use tch_extension::{Error, Result};

tch_extension::operators! {
    namespace python_faults;

    /// x without its last row. The fake kernel says that all rows are there.
    fn wrong_fake(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x.f_slice(0, 0, -1, 1)?.f_mul_scalar(1.0)?),
        fake = |x| Ok(x.f_empty_like()?),
    }

    /// `x + 1`, which the kernel also writes to x, though the schema does not say so.
    fn writes_to_input(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x.shallow_clone().f_add_scalar_(1.0)?.f_mul_scalar(1.0)?),
        fake = |x| Ok(x.f_empty_like()?),
    }

    /// `x + 1`, with nothing for a compiler.
    fn without_fake(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x.f_add_scalar(1.0)?),
    }

    /// `x + 1`, without a backward pass.
    fn without_gradient(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x.f_add_scalar(1.0)?),
        fake = |x| Ok(x.f_empty_like()?),
    }

    /// An error, or a panic.
    fn fails(x: &Tensor, how: &str) -> Tensor {
        cpu = fail,
    }

    /// The same in the backward pass.
    fn fails_backward(x: &Tensor, how: &str) -> Tensor {
        cpu = |x, _how| Ok(x.f_mul_scalar(1.0)?),
        backward = |ctx, grads| fail(grads.get(0)?, &ctx.argument::<String>("how")?).map(Tensors::from),
        save = [],
    }

    /// Takes its time, in seconds.
    fn sleeps(x: &Tensor, seconds: f64) -> Tensor {
        cpu = sleeps,
    }
}

fn fail(_: &Tensor, how: &str) -> Result<Tensor> {
    match how {
        "panic" => panic!("a panic on purpose"),
        _ => Err(Error::msg("an error on purpose")),
    }
}

fn sleeps(x: &Tensor, seconds: f64) -> Result<Tensor> {
    std::thread::sleep(Duration::from_secs_f64(seconds));
    Ok(x.f_mul_scalar(1.0)?)
}
