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
    let beside = |argument: Check<'_>| -> Result<()> { argument.like(input).map(|_| ()) };
    beside(check!(OP, weight))?;
    bias.map(|bias| beside(check!(OP, bias))).transpose()?;

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

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (input, weight, bias) =
            (inputs.get(place::INPUT)?, inputs.get(place::WEIGHT)?, inputs.optional(place::BIAS));
        let output = match gemm::linear(input, weight, bias, self.way)? {
            Some(output) => output,
            // Only here the arguments have to be checked: the other ways accept valid ones only.
            None => {
                check_arguments(input, weight, bias)?;
                product(input, weight, bias)?
            }
        };
        // Each of the two is needed only for the gradient of the other.
        saver.save_optional(Some(input).filter(|_| saver.needs_input_grad(place::WEIGHT)));
        saver.save_optional(Some(weight).filter(|_| saver.needs_input_grad(place::INPUT)));
        if saver.needs_graph() {
            self.input_size = input.size();
        }
        Ok(output.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let grad = rows(grads.get(0)?)?;
        let grad_input = self.input_gradient(ctx, &grad)?;
        let grad_weight = self.weight_gradient(ctx, &grad)?;
        let grad_bias = bias_gradient(ctx, &grad)?;
        Ok([grad_input, grad_weight, grad_bias].into())
    }
}

/// Multiplies the input as a matrix of rows. If the input is not a matrix, its strides decide
/// whether libtorch adds the bias inside the product or after it, with one rounding more.
fn product(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if input.dim() == 2 {
        return Ok(input.f_linear(weight, bias)?);
    }
    let output = rows(input)?.f_linear(weight, bias)?;
    let mut size = input.size();
    size.pop();
    size.push(output.size2()?.1);
    Ok(output.f_view(size.as_slice())?)
}

impl Linear {
    /// The gradient of the input: `dy W`.
    fn input_gradient(&self, ctx: &Context<'_>, grad: &Tensor) -> Result<Option<Tensor>> {
        if !ctx.needs_input_grad(place::INPUT) {
            return Ok(None);
        }
        let product = self.factor_gradient(ctx, grad, &ctx.saved(place::WEIGHT)?)?;
        Ok(Some(product.f_view(self.input_size.as_slice())?))
    }

    /// The gradient of the weight: `dyᵀ x`.
    fn weight_gradient(&self, ctx: &Context<'_>, grad: &Tensor) -> Result<Option<Tensor>> {
        if !ctx.needs_input_grad(place::WEIGHT) {
            return Ok(None);
        }
        let input = rows(&ctx.saved(place::INPUT)?)?;
        Ok(Some(self.factor_gradient(ctx, &grad.f_transpose(0, 1)?, &input)?))
    }

    /// A product for a gradient. If a graph is created, it has to be an operation that libtorch can
    /// differentiate.
    fn factor_gradient(&self, ctx: &Context<'_>, lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
        let own = if ctx.create_graph() { None } else { gemm::product(lhs, rhs, self.way)? };
        match own {
            Some(product) => Ok(product),
            None => Ok(lhs.f_mm(rhs)?),
        }
    }
}

/// The gradient of the bias: `Σ dy` over the rows.
fn bias_gradient(ctx: &Context<'_>, grad: &Tensor) -> Result<Option<Tensor>> {
    if !ctx.needs_input_grad(place::BIAS) {
        return Ok(None);
    }
    // If a graph is created, this has to be an operation that libtorch can differentiate, as the
    // products are.
    if ctx.create_graph() {
        return Ok(Some(grad.f_sum_dim_intlist([0_i64].as_slice(), false, grad.f_kind()?)?));
    }
    kernels::bias_grad(grad).map(Some)
}
