//! A matrix product, a bias and a ReLU in one operator.

use super::gemm::{self, Way};
use super::linear::bias_grad as column_sums;
use super::rows;
use super::way::forced;
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use crate::ffi::tensor::plain;
use crate::{Result, check};
use tch::{Kind, Tensor};

mod kernels;
pub(super) mod parts;
mod plan;

const OP: &str = "matmul_add_relu";
/// The kinds that the product's operands may have.
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
/// The kinds that a bias may have: whole numbers can be added to a product of any of `KINDS`.
const BIAS_KINDS: [Kind; 10] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
];

/// `relu(lhs @ rhs + bias)`.
///
/// ```text
/// y = relu(z)      z = lhs rhs + bias
/// dz = dy where not y <= 0, otherwise 0
/// dlhs = dz rhsᵀ   drhs = lhsᵀ dz   dbias = dz, each summed over what was broadcast
/// ```
///
/// * `lhs`: `[..., M, K]`, or `[K]`
/// * `rhs`: `[..., K, N]`, or `[K]`
/// * `bias`: any shape that broadcasts with the product's, also if it has more or larger dimensions
///
/// Returns y, of the shape to which the product and the bias broadcast. The product's own shape is
/// that of `matmul`: leading dimensions broadcast, and those that a vector lacks are left out. All
/// tensors are on one CPU or CUDA device, including a bias of one number, which libtorch would
/// fetch from the CPU. Strides and sizes are arbitrary, and tensors may be empty. There are first
/// and second derivatives with respect to each tensor; only those that are asked for are computed.
/// On CUDA the operator works on libtorch's current stream and never waits for the GPU. It is as
/// deterministic as libtorch's products are.
///
/// `lhs` and `rhs` have the same kind, which is `Float`, `Double`, `Half` or `BFloat16` (`matmul`
/// on the CPU also accepts whole numbers, which have no gradients; this operator refuses them). The
/// bias may have another of these kinds, or be of whole numbers. The result has the kind of
/// libtorch's `lhs.matmul(rhs) + bias`: if the kinds differ, the wider one, and `Float` for `Half`
/// with `BFloat16`; a tensor with dimensions outweighs one without. Under autocast `lhs` and `rhs`
/// are first cast to autocast's kind, and the bias is not, as libtorch does for the two operations.
///
/// On CUDA one kernel or a few compute everything if all three tensors have one kind (`Float`,
/// `Half`, `BFloat16`), the bias does not enlarge the product, and the strides need no copy. Such
/// strides include broadcast batches and transposed factors. For small and narrow products they
/// include any broadcast of the bias; for other products the bias is a row, or has rows of its own.
/// The kernel is cuBLASLt's, with bias and ReLU in its epilogue; it is chosen once for each shape
/// and kept for the thread. This crate's kernels compute products so small that tensor cores do not
/// pay, products of few rows or columns, and, on GPUs of compute capability 9.0, large products in
/// the half kinds with a bias of full shape. Where rows do not begin at multiples of 16 bytes,
/// large products in the half kinds and in tf32 use padded copies, in memory of libtorch's
/// allocator. Sums are rounded once, after the ReLU, unless libtorch's switch allows partial sums
/// in a half kind and cuBLASLt makes use of it. libtorch's switches apply (tf32, reduced precision,
/// accumulation in `Half`), and so does its accuracy. The ReLU is a separate pass after the product
/// where cuBLASLt's kernels that keep NaN are slow, or where it was not measured which kernels keep
/// it (it was for compute capability 9.0, with cuBLASLt 13.1).
///
/// Everywhere else the product is libtorch's (for small matrices of `Float` or `Double` on the CPU
/// it is this crate's), and one kernel does the rest. It computes the half kinds in `Float` and
/// rounds once, so that with one kind for all three tensors, none of which requires grad, it gives
/// exactly the composite's values. It works in place and reads the bias by strides, without a copy.
/// The bits are the same whether or not gradients are wanted (those of libtorch's own product may
/// differ).
///
/// In the backward, one kernel computes dz and, for a bias that is a row or of full shape, its
/// gradient. The order of these sums depends on sizes and, on CUDA, on whether dy allows 16-byte
/// loads. The products after it are libtorch's; on CUDA they are this crate's for small, narrow and
/// unaligned matrices. A factor that a batch shares is not copied. NaN propagates as in libtorch's
/// relu (some of cuBLASLt's kernels do not propagate it; they are not used here, while
/// `_addmm_activation` does use them). The backward keeps y, `lhs` if `rhs` requires grad, and
/// `rhs` if `lhs` does.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::matmul_add_relu;
/// # let options = (Kind::Double, Device::Cpu);
/// # let (lhs, rhs) = (Tensor::randn([5, 1, 2, 4], options), Tensor::randn([6, 4, 3], options));
/// # let bias = Tensor::randn([6, 1, 3], options);
/// let composite = (lhs.matmul(&rhs) + &bias).relu();
///
/// let fused = matmul_add_relu(&lhs, &rhs, &bias);
/// assert!(fused.allclose(&composite, 1e-12, 1e-12, false));
/// ```
///
/// Source: <https://burn.dev/books/burn/advanced/backend-extension/custom-cubecl-kernel.html>,
/// there without broadcasting.
///
/// # Panics
/// If [`f_matmul_add_relu`] returns an error.
pub fn matmul_add_relu(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Tensor {
    super::unwrap(f_matmul_add_relu(lhs, rhs, bias))
}

/// [`matmul_add_relu`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_matmul_add_relu(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    check!(OP, lhs).defined()?;
    check!(OP, rhs).defined()?;
    check!(OP, bias).defined()?;
    match autocast_inputs(CastPolicy::LowerPrecision, &[Some(lhs), Some(rhs)])? {
        Some(cast) => match &cast[..] {
            [Some(lhs), Some(rhs)] => applied(lhs, rhs, bias),
            _ => unreachable!("as many as came"),
        },
        None => applied(lhs, rhs, bias),
    }
}

/// [`matmul_add_relu`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn matmul_add_relu_reference(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    Ok(lhs.f_matmul(rhs)?.f_add(bias)?.f_relu()?)
}

fn applied(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    apply(MatmulAddRelu { way: forced(), shapes: None }, &[Some(lhs), Some(rhs), Some(bias)])?
        .single()
}

fn check_arguments(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<()> {
    let lhs = check!(OP, lhs).kind_in(&KINDS)?.supported_device()?;
    let rhs = check!(OP, rhs).like(&lhs)?;
    let bias = check!(OP, bias).kind_in(&BIAS_KINDS)?.same_device_as(&lhs)?;
    let (lhs_size, rhs_size) = (lhs.tensor().size(), rhs.tensor().size());
    for (argument, size) in [(lhs, &lhs_size), (rhs, &rhs_size)] {
        if size.is_empty() {
            return Err(argument.refuse(
                "at least 1 dimension",
                "a single number, []",
                "multiply by it",
            ));
        }
    }
    let inner = lhs_size[lhs_size.len() - 1];
    if rhs_size[rhs_size.len().saturating_sub(2)] != inner {
        let names = if rhs_size.len() == 1 { "[K]" } else { "[..., K, N]" };
        return Err(rhs.refuse(
            format!("shape {names} with K = {inner}, as lhs {lhs_size:?}"),
            format!("{rhs_size:?}"),
            "",
        ));
    }
    let (lhs_batch, rhs_batch) = (batch(&lhs_size), batch(&rhs_size));
    if broadcast(lhs_batch, rhs_batch).is_none() {
        return Err(rhs.refuse(
            format!("leading dimensions that broadcast with lhs' {lhs_batch:?}"),
            format!("{rhs_batch:?}"),
            "",
        ));
    }
    let Some(product) = product_size(&lhs_size, &rhs_size) else { return Ok(()) };
    if broadcast(&product, &bias.tensor().size()).is_none() {
        return Err(bias.refuse(
            format!("a shape that broadcasts with the product's {product:?}"),
            format!("{:?}", bias.tensor().size()),
            "",
        ));
    }
    Ok(())
}

/// The leading dimensions of a factor.
fn batch(size: &[i64]) -> &[i64] {
    &size[..size.len().saturating_sub(2)]
}

/// The size of `matmul`'s result, if the factors fit together.
fn product_size(lhs: &[i64], rhs: &[i64]) -> Option<Vec<i64>> {
    let mut size = broadcast(batch(lhs), batch(rhs))?;
    if lhs.len() > 1 {
        size.push(lhs[lhs.len() - 2]);
    }
    if rhs.len() > 1 {
        size.push(rhs[rhs.len() - 1]);
    }
    Some(size)
}

/// The size to which two sizes broadcast, if they do.
fn broadcast(a: &[i64], b: &[i64]) -> Option<Vec<i64>> {
    let dims = a.len().max(b.len());
    let of = |size: &[i64], dim: usize| {
        (dim + size.len()).checked_sub(dims).map_or(1, |place| size[place])
    };
    (0..dims)
        .map(|dim| match (of(a, dim), of(b, dim)) {
            (a, b) if a == b || b == 1 => Some(a),
            (1, b) => Some(b),
            _ => None,
        })
        .collect()
}

/// The kind of libtorch's `product + bias`, where the product has one of [`KINDS`] and the bias one
/// of [`BIAS_KINDS`]. A tensor without dimensions counts only if the other one has none either, or
/// is of whole numbers.
fn result_kind(product: (Kind, bool), bias: (Kind, bool)) -> Kind {
    let ((product, product_has_dims), (bias, bias_has_dims)) = (product, bias);
    if product == bias || !KINDS.contains(&bias) || (product_has_dims && !bias_has_dims) {
        return product;
    }
    if bias_has_dims && !product_has_dims {
        return bias;
    }
    if product == Kind::Double || bias == Kind::Double { Kind::Double } else { Kind::Float }
}

struct MatmulAddRelu {
    way: Way,
    /// Kept if there can be a backward pass.
    shapes: Option<Shapes>,
}

/// What the backward pass needs to know of the arguments. It is kept so that the backward does not
/// look at the tensors themselves: tensors that were changed in place since the forward then cause
/// no version error.
struct Shapes {
    lhs: Vec<i64>,
    rhs: Vec<i64>,
    /// The kind of `lhs`, `rhs` and their product.
    kind: Kind,
    bias: Vec<i64>,
    bias_kind: Kind,
}

/// The positions of the inputs. The first two are also their slots among the saved tensors.
mod place {
    pub const LHS: usize = 0;
    pub const RHS: usize = 1;
    pub const BIAS: usize = 2;
}

/// Saved after the factors: the output.
const OUT: usize = 2;

impl Function for MatmulAddRelu {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (lhs, rhs, bias) =
            (inputs.get(place::LHS)?, inputs.get(place::RHS)?, inputs.get(place::BIAS)?);
        let out = forward(lhs, rhs, bias, self.way)?;
        if saver.needs_graph() {
            self.shapes = Some(Shapes {
                lhs: lhs.size(),
                rhs: rhs.size(),
                kind: lhs.f_kind()?,
                bias: bias.size(),
                bias_kind: bias.f_kind()?,
            });
        }
        // Each of the two is needed only for the gradient of the other.
        saver.save_optional(Some(lhs).filter(|_| saver.needs_input_grad(place::RHS)));
        saver.save_optional(Some(rhs).filter(|_| saver.needs_input_grad(place::LHS)));
        saver.save(&out);
        Ok(out.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let Some(shapes) = &self.shapes else {
            return Ok(Tensors::from([None, None, None]));
        };
        let needs_bias = ctx.needs_input_grad(place::BIAS);
        let saved = |needed: bool, slot| needed.then(|| ctx.saved(slot)).transpose();
        let mut saved = Saved {
            lhs: saved(ctx.needs_input_grad(place::RHS), place::LHS)?,
            rhs: saved(ctx.needs_input_grad(place::LHS), place::RHS)?,
            out: ctx.saved(OUT)?,
        };
        let grad = grads.get(0)?;
        let gradients = if ctx.create_graph() {
            // y is only compared with 0. As a part of the graph it would get no gradient.
            saved.out = saved.out.f_detach()?;
            gradients(grad, &saved, shapes, needs_bias, None)
        } else {
            backward(grad, &saved, shapes, needs_bias, self.way)
        };
        Ok(gradients?.into())
    }
}

/// The output, which is contiguous. The sizes and kinds of the arguments are checked here.
fn forward(lhs: &Tensor, rhs: &Tensor, bias: &Tensor, way: Way) -> Result<Tensor> {
    if let Some(out) = gemm::matmul_add_relu(lhs, rhs, bias, way)? {
        return Ok(out);
    }
    // Only here the arguments have to be checked: the other ways accept valid ones only.
    check_arguments(lhs, rhs, bias)?;
    add_relu(product(lhs, rhs, way)?, bias)
}

/// What the backward pass reads. Each factor is there if the gradient of the other is needed.
struct Saved {
    lhs: Option<Tensor>,
    rhs: Option<Tensor>,
    out: Tensor,
}

/// The gradients of lhs, rhs and bias that are needed.
type Gradients = [Option<Tensor>; 3];

/// The gradients, by the kernels of this crate or by libtorch's.
fn backward(
    grad: &Tensor,
    saved: &Saved,
    shapes: &Shapes,
    needs_bias: bool,
    way: Way,
) -> Result<Gradients> {
    gradients(grad, saved, shapes, needs_bias, Some(way))
}

/// [`backward`], or, if `way` is `None`, the same by operations that libtorch can differentiate.
fn gradients(
    grad: &Tensor,
    saved: &Saved,
    shapes: &Shapes,
    needs_bias: bool,
    way: Option<Way>,
) -> Result<Gradients> {
    let (grad_z, grad_bias) = mask(grad, &saved.out, shapes, needs_bias, way)?;
    let (lhs, rhs) = (saved.lhs.as_ref(), saved.rhs.as_ref());
    let product = product_size(&shapes.lhs, &shapes.rhs);
    let Some(product) = product.filter(|_| lhs.is_some() || rhs.is_some()) else {
        return Ok([None, None, grad_bias]);
    };
    let grad = grad_z.f_sum_to_size(product.as_slice())?.f_to_kind(shapes.kind)?;
    let grad = grad.f_reshape(as_matrices(&shapes.lhs, &shapes.rhs, &product).as_slice())?;
    let of_lhs = |rhs: &Tensor| lhs_gradient(&grad, rhs, &shapes.lhs, way);
    let of_rhs = |lhs: &Tensor| rhs_gradient(&grad, lhs, &shapes.rhs, way);
    Ok([rhs.map(of_lhs).transpose()?, lhs.map(of_rhs).transpose()?, grad_bias])
}

/// The product of the detached factors. For tensors that require grad, matmul takes another path,
/// even if no graph is recorded: the last bits differ, and a factor that a batch shares costs two
/// transposed copies of the batch.
fn product(lhs: &Tensor, rhs: &Tensor, way: Way) -> Result<Tensor> {
    let own = if way != Way::Composite { kernels::small_product(lhs, rhs)? } else { None };
    if let Some(product) = own {
        return Ok(product);
    }
    if lhs.requires_grad() || rhs.requires_grad() {
        return Ok(lhs.f_detach()?.f_matmul(&rhs.f_detach()?)?);
    }
    Ok(lhs.f_matmul(rhs)?)
}

/// `relu(product + bias)`, in place where the product has the result's shape.
fn add_relu(product: Tensor, bias: &Tensor) -> Result<Tensor> {
    let of = |tensor: &Tensor| -> Result<(Kind, bool)> { Ok((tensor.f_kind()?, tensor.dim() > 0)) };
    let kind = result_kind(of(&product)?, of(bias)?);
    // The kind is compared first, because libtorch's cast costs something even if there is nothing
    // to do.
    let bias = if bias.f_kind()? == kind { bias.shallow_clone() } else { bias.f_to_kind(kind)? };
    let product = if product.f_kind()? == kind { product } else { product.f_to_kind(kind)? };
    let product = plain(&product)?;
    let size = broadcast(&product.size(), &bias.size()).unwrap_or_else(|| product.size());
    if size == product.size() {
        let mut out = product;
        kernels::forward(None, &bias, &mut out)?;
        return Ok(out);
    }
    let mut out = Tensor::f_empty(size.as_slice(), (kind, product.device()))?;
    kernels::forward(Some(&product), &bias, &mut out)?;
    Ok(out)
}

/// `dz`, and `dz` summed to the bias' size if the bias needs a gradient.
fn mask(
    grad: &Tensor,
    out: &Tensor,
    shapes: &Shapes,
    needs_bias: bool,
    way: Option<Way>,
) -> Result<(Tensor, Option<Tensor>)> {
    let size = shapes.bias.as_slice();
    let place = Bias::new(size, &out.size());
    let (grad_z, sums) = match way {
        Some(_) => masked_by_kernel(grad, out, place.columns().filter(|_| needs_bias))?,
        None => (out.f_threshold_backward(grad, 0.0)?, None),
    };
    if !needs_bias {
        return Ok((grad_z, None));
    }
    let grad_bias = match sums {
        Some(sums) => sums.f_reshape(size)?,
        None if place == Bias::Full => grad_z.f_reshape(size)?,
        None => grad_z.f_sum_to_size(size)?,
    };
    Ok((grad_z, Some(grad_bias.f_to_kind(shapes.bias_kind)?)))
}

/// `dz`, and the sums of its columns if their number is given.
fn masked_by_kernel(
    grad: &Tensor,
    out: &Tensor,
    columns: Option<i64>,
) -> Result<(Tensor, Option<Tensor>)> {
    let grad = plain(grad)?;
    let options = (out.f_kind()?, out.device());
    let mut grad_z = Tensor::f_empty_like(out)?;
    let mut sums = columns.map(|columns| Tensor::f_empty([columns], options)).transpose()?;
    kernels::backward(&kernels::BackwardInputs { grad: &grad, out }, &mut grad_z, sums.as_mut())?;
    Ok((grad_z, sums))
}

/// How the bias broadcasts to the output.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bias {
    /// One value for each element.
    Full,
    /// One value for each of this many columns.
    Row(i64),
    Other,
}

impl Bias {
    fn new(bias: &[i64], out: &[i64]) -> Self {
        let ones = bias.iter().take_while(|&&size| size == 1).count();
        let ones_of_out = out.iter().take_while(|&&size| size == 1).count();
        if bias[ones..] == out[ones_of_out..] {
            return Bias::Full;
        }
        match (out.last(), &bias[ones..]) {
            (Some(&columns), &[size]) if size == columns && bias.last() == Some(&columns) => {
                Bias::Row(columns)
            }
            (Some(1), []) => Bias::Row(1),
            _ => Bias::Other,
        }
    }
}

impl Bias {
    /// The number of columns, if each of them has one value.
    fn columns(self) -> Option<i64> {
        match self {
            Bias::Row(columns) => Some(columns),
            _ => None,
        }
    }
}

/// The product's size with both M and N, also if a factor was a vector.
fn as_matrices(lhs: &[i64], rhs: &[i64], product: &[i64]) -> Vec<i64> {
    let mut size = product.to_vec();
    if rhs.len() == 1 {
        size.push(1);
    }
    if lhs.len() == 1 {
        size.insert(size.len() - 1, 1);
    }
    size
}

/// `dz rhsᵀ`, the gradient for an `lhs` of this size.
fn lhs_gradient(grad: &Tensor, rhs: &Tensor, size: &[i64], way: Option<Way>) -> Result<Tensor> {
    let rhs = if rhs.dim() == 1 { rhs.f_unsqueeze(-1)? } else { rhs.shallow_clone() };
    if is_one_matrix(&rhs.size()) {
        return Ok(
            factor_gradient(&rows(grad)?, &matrix(&rhs)?.f_transpose(0, 1)?, way)?.f_view(size)?
        );
    }
    let matrices = if size.len() == 1 { vec![1, size[0]] } else { size.to_vec() };
    let gradient = factor_gradient(grad, &rhs.f_transpose(-2, -1)?, way)?;
    Ok(summed(gradient, &matrices, way)?.f_reshape(size)?)
}

/// `lhsᵀ dz`, the gradient for an `rhs` of this size.
fn rhs_gradient(grad: &Tensor, lhs: &Tensor, size: &[i64], way: Option<Way>) -> Result<Tensor> {
    let lhs = if lhs.dim() == 1 { lhs.f_unsqueeze(0)? } else { lhs.shallow_clone() };
    let matrices = if size.len() == 1 { vec![size[0], 1] } else { size.to_vec() };
    if is_one_matrix(&matrices) {
        // All the rows of the batch are rows of one product.
        return Ok(
            factor_gradient(&rows(&lhs)?.f_transpose(0, 1)?, &rows(grad)?, way)?.f_view(size)?
        );
    }
    let gradient = factor_gradient(&lhs.f_transpose(-2, -1)?, grad, way)?;
    Ok(summed(gradient, &matrices, way)?.f_reshape(size)?)
}

/// The product of two matrices or of batches of them. `way` is `None` if a graph is created.
fn factor_gradient(lhs: &Tensor, rhs: &Tensor, way: Option<Way>) -> Result<Tensor> {
    let Some(way) = way else { return Ok(lhs.f_matmul(rhs)?) };
    match gemm::product(lhs, rhs, way)? {
        Some(product) => Ok(product),
        None => product(lhs, rhs, way),
    }
}

/// Sums a gradient over the dimensions that were broadcast. If each matrix is regarded as a row,
/// the sum over a whole batch is a sum of rows; for small matrices our kernel for that is faster
/// than libtorch's.
fn summed(gradient: Tensor, size: &[i64], way: Option<Way>) -> Result<Tensor> {
    const MOST_COLUMNS: i64 = 1 << 14;
    let columns: i64 = size.iter().product();
    let is_whole_batch =
        is_one_matrix(size) && !is_one_matrix(&gradient.size()) && gradient.numel() > 0;
    if is_whole_batch && columns <= MOST_COLUMNS && way.is_some_and(|way| way != Way::Composite) {
        return column_sums(&gradient.f_reshape([-1, columns])?);
    }
    Ok(gradient.f_sum_to_size(size)?)
}

fn is_one_matrix(size: &[i64]) -> bool {
    batch(size).iter().all(|&size| size == 1)
}

/// The tensor without its leading dimensions, which are 1.
fn matrix(tensor: &Tensor) -> Result<Tensor> {
    let size = tensor.size();
    Ok(tensor.f_view(&size[size.len() - 2..])?)
}
