//! A matrix product, a bias and a ReLU in one operator.

use super::gemm::{self, Way};
use super::linear::bias_grad as column_sums;
use super::rows;
use super::way::forced;
use crate::Result;
use crate::amp::{CastPolicy, autocast_inputs};
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Slots, call,
};
use tch::{Kind, Tensor};

mod kernels;
mod plan;

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
    Ok(call(MatmulAddRelu {}, &MatmulAddReluIn { lhs, rhs, bias })?.output)
}

/// [`matmul_add_relu`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn matmul_add_relu_reference(lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    Ok(lhs.f_matmul(rhs)?.f_add(bias)?.f_relu()?)
}

crate::signature! {
    /// `relu(lhs @ rhs + bias)`, batched; all three are broadcast as `@` and `+` do it.
    pub MatmulAddRelu: MatmulAddReluIn -> MatmulAddReluOut = "matmul_add_relu"(lhs, rhs, bias) -> (output)
}

impl Operator for MatmulAddRelu {
    type Kept = ();
    type Plan = Way;

    const SECOND: Second = Second::Itself;
    const READS_OUTPUTS: u64 = 0b1;

    /// As libtorch does for the two operations, the bias is left as it is.
    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        let factors = [Some(of.lhs), Some(of.rhs)];
        let cast = autocast_inputs(CastPolicy::LowerPrecision, &factors)?;
        Ok(cast.map(|mut cast| {
            cast.push(Some(of.bias.shallow_clone()));
            cast
        }))
    }

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<Way> {
        Ok(forced())
    }

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        let lhs = of.lhs.kind_in(&KINDS)?.supported_device()?;
        let rhs = of.rhs.like(lhs)?;
        let bias = of.bias.kind_in(&BIAS_KINDS)?.same_device_as(lhs)?;
        for factor in [lhs, rhs] {
            if factor.sizes().is_empty() {
                let (expected, got) = ("at least 1 dimension", "a single number, []");
                return Err(factor.refuse(expected, got, "multiply by it"));
            }
        }
        let (lhs_size, rhs_size) = (lhs.sizes(), rhs.sizes());
        let inner = &lhs_size[lhs_size.len() - 1];
        if rhs_size[rhs_size.len().saturating_sub(2)].differs(inner) {
            let names = if rhs_size.len() == 1 { "[K]" } else { "[..., K, N]" };
            let expected = format!("shape {names} with K = {inner:?}, as lhs {lhs_size:?}");
            return Err(rhs.refuse(expected, format!("{rhs_size:?}"), ""));
        }
        let Some(product) = product_size(lhs_size, rhs_size) else {
            let expected =
                format!("leading dimensions that broadcast with lhs' {:?}", batch(lhs_size));
            return Err(rhs.refuse(expected, format!("{:?}", batch(rhs_size)), ""));
        };
        let Some(size) = broadcast(&product, bias.sizes()) else {
            let expected = format!("a shape that broadcasts with the product's {product:?}");
            return Err(bias.refuse(expected, format!("{:?}", bias.sizes()), ""));
        };
        let kind =
            result_kind((lhs.kind(), !product.is_empty()), (bias.kind(), !bias.sizes().is_empty()));
        Ok(Made::only(MatmulAddReluOut { output: lhs.sized(size).of_kind(kind) }))
    }

    /// Each factor is needed only for the gradient of the other.
    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        MatmulAddReluIn { lhs: needs.rhs, rhs: needs.lhs, bias: false }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let MatmulAddReluIn { lhs, rhs, bias } = call.of;
        let output = match gemm::matmul_add_relu(lhs, rhs, bias, call.plan)? {
            Some(output) => output,
            // Only here the arguments have to be checked: the other ways accept valid ones only.
            None => {
                call.check()?;
                add_relu(product(lhs, rhs, call.plan)?, bias)?
            }
        };
        Ok(Made::only(MatmulAddReluOut { output }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let metas = again.metas()?;
        let (Some(grad), Some(out)) = (grads.output, &again.outputs.output) else {
            return Ok(MatmulAddReluIn::none());
        };
        // y is only compared with 0. As a part of the graph it would get no gradient.
        let out = if again.is_recorded { out.f_detach()? } else { out.shallow_clone() };
        let way = (!again.is_recorded).then_some(again.plan);
        gradients(&grad, &again.of, &out, &metas, again.needs.bias, way)
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        Ok(MatmulAddReluOut { output: matmul_add_relu_reference(of.lhs, of.rhs, of.bias)? })
    }
}

/// The leading dimensions of a factor.
fn batch<D>(size: &[D]) -> &[D] {
    &size[..size.len().saturating_sub(2)]
}

/// The size of `matmul`'s result, if the factors fit together.
fn product_size<D: Dim>(lhs: &[D], rhs: &[D]) -> Option<Vec<D>> {
    let mut size = broadcast(batch(lhs), batch(rhs))?;
    if lhs.len() > 1 {
        size.push(lhs[lhs.len() - 2].clone());
    }
    if let [_, .., columns] = rhs {
        size.push(columns.clone());
    }
    Some(size)
}

/// The size to which two sizes broadcast, if they do.
fn broadcast<D: Dim>(a: &[D], b: &[D]) -> Option<Vec<D>> {
    let dims = a.len().max(b.len());
    let of = |size: &[D], dim: usize| {
        (dim + size.len()).checked_sub(dims).map_or(D::from(1), |place| size[place].clone())
    };
    (0..dims)
        .map(|dim| match (of(a, dim), of(b, dim)) {
            (a, b) if b.number() == Some(1) => Some(a),
            (a, b) if a.number() == Some(1) => Some(b),
            // What is traced holds where these are equal.
            (a, b) if a == b => Some(a),
            (a, b) if b == D::from(1) => Some(a),
            (a, b) if a == D::from(1) => Some(b),
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

/// The gradients, by the kernels of this crate or by libtorch's; or, if `way` is `None`, by operations
/// that libtorch can differentiate.
fn gradients(
    grad: &Tensor,
    factors: &Gradients<MatmulAddRelu>,
    out: &Tensor,
    metas: &Metas<MatmulAddRelu, i64>,
    needs_bias: bool,
    way: Option<Way>,
) -> Result<Gradients<MatmulAddRelu>> {
    let (grad_z, bias) = mask(grad, out, &metas.bias, needs_bias, way)?;
    let (lhs, rhs) = (factors.lhs.as_ref(), factors.rhs.as_ref());
    let (lhs_size, rhs_size) = (metas.lhs.sizes(), metas.rhs.sizes());
    let product = product_size(lhs_size, rhs_size);
    let Some(product) = product.filter(|_| lhs.is_some() || rhs.is_some()) else {
        return Ok(MatmulAddReluIn { lhs: None, rhs: None, bias });
    };
    let grad = grad_z.f_sum_to_size(product.as_slice())?.f_to_kind(metas.lhs.kind())?;
    let grad = grad.f_reshape(as_matrices(lhs_size, rhs_size, &product).as_slice())?;
    let of_lhs = |rhs: &Tensor| lhs_gradient(&grad, rhs, lhs_size, way);
    let of_rhs = |lhs: &Tensor| rhs_gradient(&grad, lhs, rhs_size, way);
    Ok(MatmulAddReluIn {
        lhs: rhs.map(of_lhs).transpose()?,
        rhs: lhs.map(of_rhs).transpose()?,
        bias,
    })
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
    let mut out = empty_of(size.as_slice(), (kind, product.device()))?;
    kernels::forward(Some(&product), &bias, &mut out)?;
    Ok(out)
}

/// `dz`, and `dz` summed to the bias' size if the bias needs a gradient.
fn mask(
    grad: &Tensor,
    out: &Tensor,
    bias: &Meta<i64>,
    needs_bias: bool,
    way: Option<Way>,
) -> Result<(Tensor, Option<Tensor>)> {
    let size = bias.sizes();
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
    Ok((grad_z, Some(grad_bias.f_to_kind(bias.kind())?)))
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
    let mut sums = columns.map(|columns| empty_of(&[columns], options)).transpose()?;
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
