//! The linear layer's operator.

use super::gemm::{self, Way};
use super::way::forced;
use super::{reshaped, rows};
use crate::Result;
use crate::amp::CastPolicy;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Slots, call,
};
use tch::{Kind, Tensor};

mod each;
#[cfg(all(feature = "norm", feature = "mlp"))]
mod few_rows;
mod kernels;
mod parts;

use each::Layer;
pub use each::f_linear_each;
#[cfg(all(feature = "norm", feature = "mlp"))]
pub(crate) use few_rows::{InputNorm, linear_add, normed_gate, normed_linear_each};
pub(super) use kernels::bias_grad;
pub use parts::f_linear_parts;

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
    Ok(call(Linear {}, &LinearIn { input, weight, bias })?.output)
}

/// [`linear`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn linear_reference(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    Ok(input.f_linear(weight, bias)?)
}

crate::signature! {
    /// `input @ weight.T + bias`, as torch.nn.functional.linear, with a deterministic gradient of the bias.
    ///
    /// input `[..., in]`, weight `[out, in]`, bias `[out]`; returns `[..., out]`.
    pub Linear: LinearIn -> LinearOut = "linear"(input, weight, bias?) -> (output)
}

impl Operator for Linear {
    type Kept = ();
    type Plan = Way;

    const AUTOCAST: [Option<CastPolicy>; 2] = [Some(CastPolicy::LowerPrecision); 2];
    const SECOND: Second = Second::Itself;

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<Way> {
        Ok(forced())
    }

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        let input = of.input.kind_in(&KINDS)?.supported_device()?;
        let weight = of.weight.like(input)?;
        let bias = of.bias.as_ref().map(|bias| bias.like(input)).transpose()?;
        let (_, features) = split(input, "[..., in]")?;
        let out = weight.dim(2, "[out, in]")?.sizes()[0].clone();
        weight.shape("[out, in]", &[out.clone(), features.clone()])?;
        bias.map(|bias| bias.shape("[out]", std::slice::from_ref(&out))).transpose()?;
        Ok(Made::only(LinearOut { output: input.clone().with_last(out) }))
    }

    /// Each of the two is needed only for the gradient of the other.
    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        LinearIn { input: needs.weight, weight: needs.input, bias: false }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let LinearIn { input, weight, bias } = call.of;
        let output = match gemm::linear(input, weight, bias, call.plan)? {
            Some(output) => output,
            // Only here the arguments have to be checked: the other ways accept valid ones only.
            None => {
                call.check()?;
                composite(input, weight, bias)?
            }
        };
        Ok(Made::only(LinearOut { output }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let size = again.metas()?.input.sizes().to_vec();
        let Some(grad) = grads.output else { return Ok(LinearIn::none()) };
        let grad = rows(&grad)?;
        let (needs_bias, is_recorded) = (again.needs.bias, again.is_recorded);
        let mut found = gradients(&grad, &again.of, &size, (!is_recorded).then_some(again.plan))?;
        found.bias = needs_bias.then(|| bias_gradient(&grad, is_recorded)).transpose()?;
        Ok(found)
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        Ok(LinearOut { output: linear_reference(of.input, of.weight, of.bias)? })
    }
}

/// The output for arguments that fit, by libtorch's operator.
fn composite(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
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

/// The number of rows of an input, and their size. `names` says what its sizes are.
pub(super) fn split<'a, D: Dim>(input: &'a Meta<D>, names: &str) -> Result<(D, &'a D)> {
    let Some((features, leading)) = input.sizes().split_last() else {
        let expected = format!("shape {names}");
        return Err(input.refuse(expected, "a single number, []", "view it as [1]"));
    };
    match D::product(leading) {
        Some(rows) => Ok((rows, features)),
        None => {
            let expected = "leading sizes whose product fits 64 bits";
            Err(input.refuse(expected, format!("{:?}", input.sizes()), ""))
        }
    }
}

/// `Σ dy` over the rows, by operations that libtorch can differentiate if they are recorded.
fn bias_gradient(grad: &Tensor, is_recorded: bool) -> Result<Tensor> {
    match is_recorded {
        true => Ok(grad.f_sum_dim_intlist([0_i64].as_slice(), false, grad.f_kind()?)?),
        false => kernels::bias_grad(grad),
    }
}

/// `dy W` and `dyᵀ x`, in this way, or by operations that libtorch can differentiate. dy is a matrix. Each factor
/// is there if the gradient of the other is needed.
fn gradients(
    grad: &Tensor,
    factors: &Gradients<Linear>,
    input_size: &[i64],
    way: Option<Way>,
) -> Result<Gradients<Linear>> {
    let product = |lhs: &Tensor, rhs: &Tensor| match way {
        Some(way) => gemm::mm(lhs, rhs, way),
        None => Ok(lhs.f_mm(rhs)?),
    };
    let of_input =
        |weight: &Tensor| -> Result<Tensor> { Ok(product(grad, weight)?.f_view(input_size)?) };
    let of_weight = |input: &Tensor| product(&grad.f_transpose(0, 1)?, &rows(input)?);
    Ok(LinearIn {
        input: factors.weight.as_ref().map(of_input).transpose()?,
        weight: factors.input.as_ref().map(of_weight).transpose()?,
        bias: None,
    })
}
