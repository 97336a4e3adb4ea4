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

tch_extension::operators! {
    namespace python_ops;

    /// `a · b + c`, element by element.
    fn muladd(a: &Tensor, b: &Tensor, c: f64 = 1.0) -> Tensor {
        cpu = muladd::forward,
        fake = |a, _b, _c| Ok(a.f_contiguous()?.f_empty_like()?),
        autograd = muladd::autograd,
    }

    /// The gradients of a and b.
    fn muladd_backward(grad: &Tensor, a: &Tensor, b: &Tensor) -> (Tensor, Tensor) {
        cpu = muladd::backward,
        fake = |_grad, a, b| Ok((a.f_contiguous()?.f_empty_like()?, b.f_contiguous()?.f_empty_like()?)),
    }

    /// `x · σ(β x)`
    fn swish(x: &Tensor, beta: f64 = 1.0) -> Tensor {
        cpu = swish::forward,
        cuda = swish::forward,
        fake = swish::forward,
        autograd = swish::autograd,
    }

    /// `gelu(gate) · value` of the two halves of x.
    fn geglu(x: &Tensor) -> Tensor {
        composite = geglu::composite,
    }

    /// `average ← decay · average + (1 − decay) · value`
    fn ema_(average: &mut Tensor, value: &Tensor, decay: f64) {
        cpu = ema::update,
        cuda = ema::update,
        fake = |_average, _value, _decay| Ok(()),
    }

    /// `Σ wᵢ xᵢ`
    fn weighted_sum(tensors: &[Tensor], weights: Option<&Tensor> = None) -> Tensor {
        cpu = weighted_sum::forward,
        cuda = weighted_sum::forward,
        fake = weighted_sum::fake,
        autograd = weighted_sum::autograd,
    }
}
