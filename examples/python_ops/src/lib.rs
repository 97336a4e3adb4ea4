//! Five operators in Rust, which Python finds as `torch.ops.python_ops`.
//!
//! | operator | how it is written |
//! |---|---|
//! | `muladd` | kernels in plain Rust, and another operator of kernels for the backward pass |
//! | `swish` | tch operations, with a backward pass of tch operations |
//! | `geglu` | a composite, which PyTorch takes apart and differentiates itself |
//! | `ema_` | writes to its first argument |
//! | `weighted_sum` | takes a list of tensors and an optional one |

mod ema;
mod geglu;
mod muladd;
mod swish;
mod weighted_sum;

use tch::Tensor;
use tch_extension::library::{new_empty, sizes};

tch_extension::operators! {
    namespace python_ops;

    /// `a · b + c`, element by element.
    fn muladd(a: &Tensor, b: &Tensor, c: f64 = 1.0) -> Tensor {
        cpu = muladd::forward,
        fake = |a, _b, _c| new_empty(a, &sizes(a)),
        backward = muladd::gradients,
        save = [a, b],
        double_backward = true,
    }

    /// The gradients of a and b.
    fn muladd_backward(grad: &Tensor, a: &Tensor, b: &Tensor) -> (Tensor, Tensor) {
        cpu = muladd::backward,
        fake = |_grad, a, b| Ok((new_empty(a, &sizes(a))?, new_empty(b, &sizes(b))?)),
    }

    /// `x · σ(β x)`
    fn swish(x: &Tensor, beta: f64 = 1.0) -> Tensor {
        cpu, cuda = swish::forward,
        fake = swish::forward,
        backward = swish::gradient,
        save = [x],
        double_backward = true,
    }

    /// `gelu(gate) · value` of the two halves of x.
    fn geglu(x: &Tensor) -> Tensor {
        composite = geglu::composite,
    }

    /// `average ← decay · average + (1 − decay) · value`
    fn ema_(average: &mut Tensor, value: &Tensor, decay: f64) {
        cpu, cuda = ema::update,
        fake = |_average, _value, _decay| Ok(()),
    }

    /// `Σ wᵢ xᵢ`
    fn weighted_sum(tensors: &[Tensor], weights: Option<&Tensor> = None) -> Tensor {
        cpu, cuda = weighted_sum::forward,
        fake = weighted_sum::fake,
        backward = weighted_sum::gradients,
        save = [weights, tensors],
    }
}
