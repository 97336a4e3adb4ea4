//! The linear layer's operator.

use super::gemm::{self, Way};
use super::way::forced;
use super::{count_rows, rows};
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use crate::check::Check;
use crate::{Result, check};
use tch::{Kind, Tensor};

mod kernels;
pub(super) mod parts;

pub(super) use kernels::bias_grad;

const OP: &str = "linear";
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// A linear layer: every row of the input times the weight, plus the bias.
///
/// ```text
/// y = x Wᵀ + b
/// dx = dy W        dW = dyᵀ x        db = Σ dy over the rows
/// ```
///
/// * `input`: x, `[..., in]`, with any number of leading dimensions, or none
/// * `weight`: W, `[out, in]`
/// * `bias`: b, `[out]`; `None` for zeros
///
/// Returns y, `[..., out]`. All tensors have the same kind, which is `Float`, `Double`, `Half` or
/// `BFloat16` (libtorch's linear requires the same for matrices), and are on one CPU or CUDA
/// device. Strides and sizes are arbitrary, and tensors may be empty. Under autocast all three are
/// first cast to autocast's kind, as libtorch's linear does. There are first and second derivatives
/// with respect to each tensor; only those that are asked for are computed. On CUDA the operator
/// works on libtorch's current stream and never waits for the GPU. It is as deterministic as
/// libtorch's products are.
///
/// Products follow libtorch's precision switches and have libtorch's accuracy. On CUDA the forward
/// with a bias, in `Float`, `Half` and `BFloat16`, is one call of cuBLASLt, as in libtorch itself;
/// its algorithm is chosen once for each shape and kept for the thread. Small products and products
/// of few rows or columns are instead computed by kernels of this crate. Where rows do not begin at
/// multiples of 16 bytes, cuBLASLt may be called on padded copies. The backward's products, too,
/// use these kernels and padded copies where they are faster. A kernel of this crate computes the
/// bias' gradient: it accumulates `Half` and `BFloat16` in `Float` and rounds once. The order of
/// these sums depends on sizes and, on CUDA, on whether dy allows 16-byte loads. A gradient dy with
/// gaps between its rows is read without a copy. The backward keeps the input if the weight
/// requires grad, and the weight if the input does.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::linear;
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w, b) = (Tensor::randn([2, 5, 4], options), Tensor::randn([3, 4], options), Tensor::randn([3], options));
/// let composite = x.matmul(&w.tr()) + &b;
///
/// let fused = linear(&x, &w, Some(&b));
/// assert!(fused.allclose(&composite, 1e-12, 1e-12, false));
/// ```
///
/// Source: <https://pytorch.org/docs/stable/generated/torch.nn.functional.linear.html>.
///
/// # Panics
/// If [`f_linear`] returns an error.
pub fn linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    super::unwrap(f_linear(input, weight, bias))
}

/// [`linear`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check!(OP, input).defined()?;
    check!(OP, weight).defined()?;
    bias.map(|bias| check!(OP, bias).defined()).transpose()?;
    match autocast_inputs(CastPolicy::LowerPrecision, &[Some(input), Some(weight), bias])? {
        Some(cast) => match &cast[..] {
            [Some(input), Some(weight), bias] => applied(input, weight, bias.as_ref()),
            _ => unreachable!("as many as came"),
        },
        None => applied(input, weight, bias),
    }
}

/// [`linear`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn linear_reference(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    Ok(input.f_linear(weight, bias)?)
}

fn applied(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let function = Linear { way: forced(), ..Default::default() };
    apply(function, &[Some(input), Some(weight), bias])?.single()
}

fn check_arguments(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let input = &check!(OP, input).kind_in(&KINDS)?.supported_device()?;
    let check_like = |argument: Check<'_>| -> Result<()> { argument.like(input).map(|_| ()) };
    check_like(check!(OP, weight))?;
    bias.map(|bias| check_like(check!(OP, bias))).transpose()?;

    let size = input.tensor().size();
    let Some(&features) = size.last() else {
        return Err(input.refuse("shape [..., in]", "a single number, []", "view it as [1]"));
    };
    if count_rows(&size).is_none() {
        return Err(input.refuse(
            "leading sizes whose product fits 64 bits",
            format!("{size:?}"),
            "",
        ));
    }
    check!(OP, weight).dim(2, "[out, in]")?;
    let out = weight.size2()?.0;
    check!(OP, weight).shape("[out, in]", &[out, features])?;
    bias.map(|bias| check!(OP, bias).shape("[out]", &[out])).transpose()?;
    Ok(())
}

#[derive(Default)]
struct Linear {
    way: Way,
    /// Kept here so that the input itself need not be saved for its own gradient.
    input_size: Vec<i64>,
}

/// The positions of the inputs. The first two are also their slots among the saved tensors.
mod place {
    pub const INPUT: usize = 0;
    pub const WEIGHT: usize = 1;
    pub const BIAS: usize = 2;
}

impl Function for Linear {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (input, weight, bias) =
            (inputs.get(place::INPUT)?, inputs.get(place::WEIGHT)?, inputs.optional(place::BIAS));
        let output = forward(input, weight, bias, self.way)?;
        // Each of the two is needed only for the gradient of the other.
        saver.save_optional(Some(input).filter(|_| saver.needs_input_grad(place::WEIGHT)));
        saver.save_optional(Some(weight).filter(|_| saver.needs_input_grad(place::INPUT)));
        if saver.needs_graph() {
            self.input_size = input.size();
        }
        Ok(output.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let needs_bias = ctx.needs_input_grad(place::BIAS);
        let saved = |needed: bool, slot| needed.then(|| ctx.saved(slot)).transpose();
        let factors = Factors {
            input: saved(ctx.needs_input_grad(place::WEIGHT), place::INPUT)?,
            weight: saved(ctx.needs_input_grad(place::INPUT), place::WEIGHT)?,
        };
        let grad = grads.get(0)?;
        let gradients = match ctx.create_graph() {
            true => differentiable_backward(grad, &factors, &self.input_size, needs_bias),
            false => backward(grad, &factors, &self.input_size, needs_bias, self.way),
        };
        Ok(gradients?.into())
    }
}

/// The output. The sizes and kinds of the arguments are checked here.
pub(super) fn forward(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    way: Way,
) -> Result<Tensor> {
    if let Some(output) = gemm::linear(input, weight, bias, way)? {
        return Ok(output);
    }
    // Only here the arguments have to be checked: the other ways accept valid ones only.
    check_arguments(input, weight, bias)?;
    // If the input is not a matrix, its strides decide whether libtorch adds the bias inside the
    // product or after it, with one rounding more.
    if input.dim() == 2 {
        return Ok(input.f_linear(weight, bias)?);
    }
    let output = rows(input)?.f_linear(weight, bias)?;
    let mut size = input.size();
    size.pop();
    size.push(output.size2()?.1);
    reshaped(&output, &size)
}

/// A new contiguous tensor in another size. It is no view: where no graph is recorded, libtorch makes
/// views that cannot be changed in place later.
pub(super) fn reshaped(tensor: &Tensor, size: &[i64]) -> Result<Tensor> {
    Ok(tensor.f_internal_unsafe_view(size)?)
}

/// What the backward pass reads of the arguments. Each is there if the gradient of the other is
/// needed.
struct Factors {
    input: Option<Tensor>,
    weight: Option<Tensor>,
}

/// The gradients of input, weight and bias that are needed.
type Gradients = [Option<Tensor>; 3];

/// The gradients, by the kernels of this crate or by libtorch's.
fn backward(
    grad: &Tensor,
    factors: &Factors,
    input_size: &[i64],
    needs_bias: bool,
    way: Way,
) -> Result<Gradients> {
    let product = |lhs: &Tensor, rhs: &Tensor| match gemm::product(lhs, rhs, way)? {
        Some(product) => Ok(product),
        None => Ok(lhs.f_mm(rhs)?),
    };
    gradients(grad, factors, input_size, needs_bias, product, kernels::bias_grad)
}

/// [`backward`] by operations that libtorch can differentiate.
fn differentiable_backward(
    grad: &Tensor,
    factors: &Factors,
    input_size: &[i64],
    needs_bias: bool,
) -> Result<Gradients> {
    let product = |lhs: &Tensor, rhs: &Tensor| Ok(lhs.f_mm(rhs)?);
    let sum = |grad: &Tensor| -> Result<Tensor> {
        Ok(grad.f_sum_dim_intlist([0_i64].as_slice(), false, grad.f_kind()?)?)
    };
    gradients(grad, factors, input_size, needs_bias, product, sum)
}

/// `dy W`, `dyᵀ x` and `Σ dy` over the rows.
fn gradients(
    grad: &Tensor,
    factors: &Factors,
    input_size: &[i64],
    needs_bias: bool,
    product: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    sum: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Gradients> {
    let grad = &rows(grad)?;
    let of_input =
        |weight: &Tensor| -> Result<Tensor> { Ok(product(grad, weight)?.f_view(input_size)?) };
    let of_weight = |input: &Tensor| product(&grad.f_transpose(0, 1)?, &rows(input)?);
    Ok([
        factors.weight.as_ref().map(of_input).transpose()?,
        factors.input.as_ref().map(of_weight).transpose()?,
        needs_bias.then(|| sum(grad)).transpose()?,
    ])
}
