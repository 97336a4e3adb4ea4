//! A matrix product, a bias and a ReLU in one.

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

const OP: &str = "matmul_add_relu";
/// Of the product's operands.
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
/// Whole numbers add to a product of any of those.
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
/// * `bias`: any shape that broadcasts with the product's, also one with more or larger dimensions
///
/// Returns y, of the shape to which the product and the bias broadcast; the product's own is that
/// of `matmul`: leading dimensions broadcast, and those that a vector lacks are left out. All on
/// one CPU or CUDA device, also a bias of one number, which libtorch would fetch from the CPU; any
/// strides, any sizes, also empty ones. Has first and second derivatives with respect to each
/// tensor, and computes only those asked for. On CUDA it works on libtorch's current stream and
/// never waits for the GPU. Deterministic as far as libtorch's products are.
///
/// `lhs` and `rhs` are of kind `Float`, `Double`, `Half` or `BFloat16`, the same for both (`matmul`
/// on the CPU also takes whole numbers, which have no gradients: refused here). The bias may be of
/// another of these kinds, or of whole numbers; the result's kind is that of libtorch's
/// `lhs.matmul(rhs) + bias`: if they differ, the wider one, `Float` for `Half` with `BFloat16`, and
/// one with dimensions outweighs one without. Under autocast `lhs` and `rhs` are cast to its kind
/// first, and the bias is not, as libtorch does with the two operations.
///
/// On CUDA all of it is one kernel or few where all three have one kind (`Float`, `Half`,
/// `BFloat16`), the bias does not enlarge the product, and strides can be had without a copy:
/// batches that are broadcast, transposed factors, a bias of any broadcast for small and narrow
/// products, otherwise one that is a row or has rows of its own. It is cuBLASLt's, with bias and
/// ReLU in its epilogue, chosen once for each shape and kept for the thread; of products so small
/// that tensor cores do not pay, or of few rows or columns, ours; ours, too, of large products in
/// the half kinds with a bias of full shape on GPUs of compute capability 9.0. Where rows do not
/// begin at multiples of 16 bytes, large products in the half kinds and in tf32 are made of padded
/// copies, in memory of libtorch's allocator. Sums are rounded once, behind the ReLU, unless
/// libtorch's switch allows parts of them in a half kind and cuBLASLt makes use of it. libtorch's
/// switches hold (tf32, reduced precision, accumulation in `Half`), and so does its accuracy. The
/// ReLU is a pass behind the product where cuBLASLt's kernels that keep NaN are slow, or where it
/// was not measured which keep it (it was for compute capability 9.0, with cuBLASLt 13.1).
///
/// Everywhere else the product is libtorch's (of small matrices of `Float` or `Double` on the CPU,
/// ours), and what is behind it is one kernel, computed in `Float` for the half kinds and rounded
/// once, so that with one kind for all three, none requiring grad, it gives the composite's very
/// values. It works in place and reads the bias by strides, without a copy. Whether or not
/// gradients are wanted, the bits are the same (libtorch's own product may differ).
///
/// In the backward one kernel makes dz and, of a bias that is a row or of full shape, its gradient,
/// in an order that sizes decide, and on CUDA whether dy allows 16-byte loads. The products behind
/// it are libtorch's, of small, narrow and uneven matrices on CUDA ours; a factor that a batch
/// shares is not copied. NaN goes through as in libtorch's relu (not all of cuBLASLt's kernels let
/// it: those are not used, and `_addmm_activation` does use them). The backward keeps y, `lhs` if
/// `rhs` requires grad, and the other way round.
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
/// Where [`f_matmul_add_relu`] returns an error.
pub fn matmul_add_relu(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Tensor {
    super::unwrap(f_matmul_add_relu(lhs, rhs, bias))
}

/// [`matmul_add_relu`], with an error instead of a panic.
///
/// # Errors
/// When an argument has another kind, device or shape than stated, naming it; or when libtorch or
/// CUDA fails.
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
/// libtorch's.
pub fn matmul_add_relu_reference(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    Ok(lhs.f_matmul(rhs)?.f_add(bias)?.f_relu()?)
}

fn applied(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let function = MatmulAddRelu { way: forced(), ..Default::default() };
    apply(function, &[Some(lhs), Some(rhs), Some(bias)])?.single()
}

fn check_arguments(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<()> {
    let lhs = check!(OP, lhs).kind_in(&KINDS)?.supported_device()?;
    let rhs = check!(OP, rhs).like(&lhs)?;
    let bias = check!(OP, bias).kind_in(&BIAS_KINDS)?.beside(&lhs)?;
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

/// The size of `matmul`'s result, of factors that fit.
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

/// The size to which two broadcast, if they do.
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

/// Of libtorch's `product + bias`, where the product is of one of [`KINDS`] and the bias of
/// [`BIAS_KINDS`]: a tensor without dimensions counts only if the other has none either, or is of
/// whole numbers.
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

#[derive(Default)]
struct MatmulAddRelu {
    way: Way,
    /// Here, so that the backward need not look at the tensors themselves: nobody is refused for
    /// having changed them.
    lhs: Vec<i64>,
    rhs: Vec<i64>,
    product: Option<(Vec<i64>, Kind)>,
    bias: Option<(Vec<i64>, Kind)>,
}

/// The inputs' places; what is saved of the first two has the same slots.
mod place {
    pub const LHS: usize = 0;
    pub const RHS: usize = 1;
    pub const BIAS: usize = 2;
}

/// Saved behind the factors: the output.
const OUT: usize = 2;

impl Function for MatmulAddRelu {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (lhs, rhs, bias) =
            (inputs.get(place::LHS)?, inputs.get(place::RHS)?, inputs.get(place::BIAS)?);
        let out = match gemm::matmul_add_relu(lhs, rhs, bias, self.way)? {
            Some(out) => {
                if saver.needs_graph() {
                    self.product = Some((out.size(), out.f_kind()?));
                }
                out
            }
            None => self.composite(lhs, rhs, bias)?,
        };
        if saver.needs_graph() {
            (self.lhs, self.rhs) = (lhs.size(), rhs.size());
            self.bias = Some((bias.size(), bias.f_kind()?));
        }
        // Each is a factor of the other's gradient only.
        saver.save_optional(Some(lhs).filter(|_| saver.needs_input_grad(place::RHS)));
        saver.save_optional(Some(rhs).filter(|_| saver.needs_input_grad(place::LHS)));
        saver.save(&out);
        Ok(out.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (Some(product), Some(bias)) = (&self.product, &self.bias) else {
            return Ok(Tensors::from([None, None, None]));
        };
        let (grad_z, grad_bias) = mask(ctx, grads.get(0)?, bias)?;
        let (grad_lhs, grad_rhs) = self.factor_gradients(ctx, &grad_z, product)?;
        Ok([grad_lhs, grad_rhs, grad_bias].into())
    }
}

/// Detached, because matmul goes another way for tensors that require grad, also where no graph is
/// made: it shows in the last bits, and a factor that a batch shares costs two transposed copies of
/// the batch.
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
    // Asked for, because libtorch's cast costs something even where there is nothing to do.
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

/// `dz`, and `dz` summed to the bias' size if that is asked for.
fn mask(
    ctx: &Context<'_>,
    grad: &Tensor,
    bias: &(Vec<i64>, Kind),
) -> Result<(Tensor, Option<Tensor>)> {
    let (size, kind) = bias;
    // y is only compared: as a part of the graph it would lead nowhere.
    let out = ctx.saved(OUT)?.f_detach()?;
    let needs_bias = ctx.needs_input_grad(place::BIAS);
    let place = Bias::new(size, &out.size());
    let (grad_z, sums) = if ctx.create_graph() {
        // With a graph, this has to be an operation that libtorch can differentiate, as the
        // products are.
        (out.f_threshold_backward(grad, 0.0)?, None)
    } else {
        masked_by_kernel(grad, &out, place.columns().filter(|_| needs_bias))?
    };
    if !needs_bias {
        return Ok((grad_z, None));
    }
    let grad_bias = match sums {
        Some(sums) => sums.f_reshape(size.as_slice())?,
        None if place == Bias::Full => grad_z.f_reshape(size.as_slice())?,
        None => grad_z.f_sum_to_size(size.as_slice())?,
    };
    Ok((grad_z, Some(grad_bias.f_to_kind(*kind)?)))
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

/// How the bias lies in the output.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bias {
    /// One for each element.
    Full,
    /// One for each of so many columns.
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
    /// How many columns have one of their own, if that is how it lies.
    fn columns(self) -> Option<i64> {
        match self {
            Bias::Row(columns) => Some(columns),
            _ => None,
        }
    }
}

impl MatmulAddRelu {
    /// libtorch's product, and one kernel for the rest. What is wrong with the arguments is said
    /// here: the other ways are open to good ones only.
    fn composite(&mut self, lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
        check_arguments(lhs, rhs, bias)?;
        let product = product(lhs, rhs, self.way)?;
        self.product = Some((product.size(), product.f_kind()?));
        add_relu(product, bias)
    }

    /// `dz rhsᵀ` and `lhsᵀ dz`, summed over what was broadcast.
    fn factor_gradients(
        &self,
        ctx: &Context<'_>,
        grad_z: &Tensor,
        (size, kind): &(Vec<i64>, Kind),
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (needs_lhs, needs_rhs) =
            (ctx.needs_input_grad(place::LHS), ctx.needs_input_grad(place::RHS));
        if !needs_lhs && !needs_rhs {
            return Ok((None, None));
        }
        let grad = grad_z.f_sum_to_size(size.as_slice())?.f_to_kind(*kind)?;
        let grad = grad.f_reshape(as_matrices(&self.lhs, &self.rhs, size).as_slice())?;
        // With a graph, the products have to be operations that libtorch can differentiate.
        let way = if ctx.create_graph() { None } else { Some(self.way) };
        let grad_lhs = needs_lhs
            .then(|| lhs_gradient(&grad, &ctx.saved(place::RHS)?, &self.lhs, way))
            .transpose()?;
        let grad_rhs = needs_rhs
            .then(|| rhs_gradient(&grad, &ctx.saved(place::LHS)?, &self.rhs, way))
            .transpose()?;
        Ok((grad_lhs, grad_rhs))
    }
}

/// The product's size with M and N, also where a vector was multiplied.
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

/// `dz rhsᵀ`, for an `lhs` of this size.
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

/// `lhsᵀ dz`, for an `rhs` of this size.
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

/// The product of two matrices or batches of them; no way, if it is to have a graph.
fn factor_gradient(lhs: &Tensor, rhs: &Tensor, way: Option<Way>) -> Result<Tensor> {
    let Some(way) = way else { return Ok(lhs.f_matmul(rhs)?) };
    match gemm::product(lhs, rhs, way)? {
        Some(product) => Ok(product),
        None => product(lhs, rhs, way),
    }
}

/// Over what was broadcast. A whole batch's sum is that of its rows, if each matrix is one; of
/// small ones our kernel is faster than libtorch's.
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

/// Without its leading ones.
fn matrix(tensor: &Tensor) -> Result<Tensor> {
    let size = tensor.size();
    Ok(tensor.f_view(&size[size.len() - 2..])?)
}
