//! The kernels of `csrc/matmul_add_relu`.

use super::plan;
use crate::ffi::tensor::{describe, is_in_memory, plain};
use crate::ffi::{checked, kind_code, optional_ptr, take_message};
use crate::kernels::raw_kernels;
use crate::ops::column_sums::{ColumnSums, is_aligned};
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// The most dimensions that the forward kernel takes. Operands that still have more after adjacent
/// dimensions were merged are copied.
const DIMS: usize = 6;

/// The parameters of the forward kernels.
#[repr(C)]
struct Forward {
    /// The sizes of out, innermost first; 1 for a dimension that out does not have.
    size: [i64; DIMS],
    /// The strides of the product in elements; 0 where it is broadcast.
    product_stride: [i64; DIMS],
    /// The strides of the bias in elements; 0 where it is broadcast.
    bias_stride: [i64; DIMS],
    /// The `TchExtensionKind` of every array.
    kind: i32,
    /// How many of the sizes are in use; at least 1.
    dims: i32,
    /// The product. It may be `out`, if both have the same strides.
    product: *const c_void,
    bias: *const c_void,
    /// The output; contiguous.
    out: *mut c_void,
}

/// The parameters of the backward kernels.
#[repr(C)]
struct Backward {
    /// The sums of M rows and N columns. `sums.sums` is db, `[N]`, or null when nobody needs it.
    sums: ColumnSums,
    /// The `TchExtensionKind` of every array.
    kind: i32,
    reserved: i32,
    /// dout, `[M, N]`.
    grad: *const c_void,
    /// The output of the forward, `[M, N]`.
    out: *const c_void,
    /// dZ, `[M, N]`.
    grad_product: *mut c_void,
}

unsafe extern "C" {
    fn tch_extension_is_intel() -> bool;
    fn tch_extension_small_product(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_matmul_add_relu_backward_finish_cpu(params: *const Backward);
}

raw_kernels! {
    "matmul_add_relu";
    /// Computes `relu(product + bias)`.
    fn run_forward(Forward) =
        tch_extension_matmul_add_relu_forward_cpu, tch_extension_matmul_add_relu_forward_cuda;
    /// Computes the masked gradient and the sums of its columns: all of them on CUDA, those of each
    /// slab on the CPU.
    fn run_backward(Backward) =
        tch_extension_matmul_add_relu_backward_cpu, tch_extension_matmul_add_relu_backward_cuda;
}

/// The product of two matrices on the CPU, without autograd; `None` where libtorch's is faster.
pub(crate) fn small_product(lhs: &Tensor, rhs: &Tensor) -> Result<Option<Tensor>> {
    let (&[rows, inner], &[_, columns]) = (&lhs.size()[..], &rhs.size()[..]) else {
        return Ok(None);
    };
    // SAFETY: the function only asks the CPU for its vendor.
    let is_intel = unsafe { tch_extension_is_intel() };
    if !plan::small_product_is_faster([rows, inner, columns], is_intel) {
        return Ok(None);
    }
    let mut result = std::ptr::null_mut();
    // SAFETY: both handles are borrowed from live tensors. On success we own the result's handle,
    // if any.
    match take_message(unsafe {
        tch_extension_small_product(lhs.as_ptr(), rhs.as_ptr(), &mut result)
    }) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: C++ allocated this handle for us, and nobody else owns it.
        None => Ok((!result.is_null()).then(|| unsafe { Tensor::from_ptr(result) })),
    }
}

/// Writes `relu(product + bias)` to `out`, a contiguous tensor of the shape to which both
/// broadcast. If `product` is `None`, `out` holds the product. All tensors have one kind and one
/// device.
pub(crate) fn forward(product: Option<&Tensor>, bias: &Tensor, out: &mut Tensor) -> Result<()> {
    let size = out.size();
    let like = (out.f_kind()?, out.device());
    let target = checked("out", out, &size, like)?;
    let product = product.map(|product| operand("product", product, &size, like)).transpose()?;
    let bias = operand("bias", bias, &size, like)?;
    // Dimensions without elements cannot be merged, so even a copy could have too many of them.
    if out.numel() == 0 {
        return Ok(());
    }
    let strides = [product.as_ref().unwrap_or(out).stride(), bias.stride()];
    let Some(merged) = merge(&size, &strides) else {
        let product = product.as_ref().map(plain).transpose()?;
        return forward(product.as_ref(), &plain(&bias)?, out);
    };
    let params = Forward {
        size: merged.size,
        product_stride: merged.strides[0],
        bias_stride: merged.strides[1],
        kind: kind_code(like.0)?,
        dims: merged.dims,
        product: product.as_ref().map_or(target, |product| product.data_ptr()).cast_const(),
        bias: bias.data_ptr(),
        out: target,
    };
    // SAFETY: both operands are of this kind and were just expanded to the size of `out`, so that
    // their strides lead only to their own elements. `out` was checked to be contiguous and is
    // borrowed exclusively, so it overlaps neither operand, unless it is itself the product, with
    // the same strides.
    unsafe { run_forward(like.1, &params) }
}

/// The tensor, expanded to this size by strides. It is copied first if its memory does not hold its
/// values.
fn operand(name: &str, tensor: &Tensor, size: &[i64], like: (Kind, Device)) -> Result<Tensor> {
    if (tensor.f_kind()?, tensor.device()) != like {
        return Err(Error::msg(format!(
            "internal error: {name} should be of {like:?}, but is {}",
            describe(tensor)
        )));
    }
    let tensor = if is_in_memory(tensor) { tensor.shallow_clone() } else { plain(tensor)? };
    if tensor.size() == size {
        return Ok(tensor);
    }
    Ok(tensor.f_expand(size, false)?)
}

/// The merged dimensions of a contiguous output, innermost first, and its operands' strides along
/// them.
struct Merged {
    size: [i64; DIMS],
    strides: [[i64; DIMS]; 2],
    dims: i32,
}

/// Merges adjacent dimensions where the strides of both operands allow it, that is, where the outer
/// one continues the inner one. `None` if too many dimensions are left.
fn merge(size: &[i64], strides: &[Vec<i64>; 2]) -> Option<Merged> {
    let mut merged = Merged { size: [1; DIMS], strides: [[0; DIMS]; 2], dims: 0 };
    for dim in (0..size.len()).rev().filter(|&dim| size[dim] != 1) {
        if let Some(inner) = (merged.dims as usize).checked_sub(1) {
            let goes_on = |operand: usize| {
                strides[operand][dim] == merged.strides[operand][inner] * merged.size[inner]
            };
            if goes_on(0) && goes_on(1) {
                merged.size[inner] *= size[dim];
                continue;
            }
        }
        let place = merged.dims as usize;
        *merged.size.get_mut(place)? = size[dim];
        for (of, strides) in merged.strides.iter_mut().zip(strides) {
            of[place] = strides[dim];
        }
        merged.dims += 1;
    }
    merged.dims = merged.dims.max(1);
    Some(merged)
}

/// What [`backward`] reads; both tensors are contiguous.
pub(crate) struct BackwardInputs<'a> {
    pub grad: &'a Tensor,
    pub out: &'a Tensor,
}

/// Computes `grad_product` and, if `column_sums` is given, the sums of its columns. The rows are as
/// long as `column_sums`.
pub(crate) fn backward(
    inputs: &BackwardInputs<'_>,
    grad_product: &mut Tensor,
    column_sums: Option<&mut Tensor>,
) -> Result<()> {
    let size = inputs.out.size();
    let like = (inputs.out.f_kind()?, inputs.out.device());
    let elements = inputs.out.numel() as i64;
    let columns = column_sums.as_ref().map_or(elements, |sums| sums.numel() as i64);
    let rows = elements.checked_div(columns).unwrap_or(0);
    if rows * columns != elements {
        return Err(Error::msg(format!(
            "internal error: there are no {columns} columns in {size:?}"
        )));
    }
    let (sums, _partial) = match column_sums {
        Some(sums) => {
            let all = [inputs.grad, inputs.out, grad_product].map(Tensor::data_ptr);
            ColumnSums::new((rows, columns), is_aligned(&all), sums, like)?
        }
        None => (ColumnSums::none((rows, columns)), None),
    };
    let params = Backward {
        sums,
        kind: kind_code(like.0)?,
        reserved: 0,
        grad: optional_ptr("grad", Some(inputs.grad), &size, like)?,
        out: checked("out", inputs.out, &size, like)?,
        grad_product: checked("grad_product", grad_product, &size, like)?,
    };
    // SAFETY: `checked` made sure that the arrays are contiguous, of these sizes and of this kind.
    // Those that are written are borrowed exclusively, so they overlap no other.
    unsafe { run_backward(like.1, &params)? };
    if like.1 == Device::Cpu && params.sums.slabs > 1 {
        // SAFETY: as above; `run_backward` has written the partial sums.
        unsafe { tch_extension_matmul_add_relu_backward_finish_cpu(&params) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_products_are_of_matrices_of_wide_kinds_on_the_cpu() {
        let ramp = |size: [i64; 2], kind| {
            let values = Tensor::arange(size[0] * size[1], (Kind::Double, Device::Cpu)).sin();
            values.view(size).to_kind(kind)
        };
        for kind in [Kind::Float, Kind::Double] {
            // Partial tiles and whole ones, and more than one of each; any strides on the left,
            // gaps between the rows on the right.
            for [m, k, n] in [[1, 1, 16], [5, 3, 17], [33, 32, 70], [64, 30, 32], [16, 1024, 31]] {
                let (lhs, rhs) = (ramp([m, k], kind), ramp([k, n], kind));
                let turned = ramp([k, m], kind).transpose(0, 1);
                let gaps = ramp([k, n + 3], kind).narrow(1, 2, n);
                for (lhs, rhs) in [(&lhs, &rhs), (&turned, &rhs), (&lhs, &gaps)] {
                    let product = small_product(lhs, rhs).expect("a product");
                    // For larger k it depends on the CPU's vendor whether there is such a product.
                    assert!(product.is_some() || k > 32);
                    let Some(product) = product else { continue };
                    let bound = if kind == Kind::Double { 1e-12 } else { 1e-5 };
                    crate::testing::assert_close(
                        &product,
                        &lhs.matmul(rhs),
                        bound,
                        bound * k as f64,
                    );
                }
            }
            let none =
                |lhs: &Tensor, rhs: &Tensor| small_product(lhs, rhs).expect("no error").is_none();
            let (lhs, rhs) = (ramp([20, 20], kind), ramp([20, 20], kind));
            assert!(!none(&lhs, &rhs));
            assert!(none(&lhs, &rhs.transpose(0, 1)) && none(&lhs, &rhs.narrow(1, 0, 15)));
            assert!(none(&lhs.unsqueeze(0), &rhs) && none(&lhs, &rhs.narrow(0, 0, 0)));
            assert!(none(&lhs.to_kind(Kind::Half), &rhs.to_kind(Kind::Half)));
            assert!(
                none(&lhs, &rhs.to_kind(Kind::BFloat16)) && none(&lhs, &rhs.internal_neg_view())
            );
            assert!(none(&ramp([20, 1025], kind), &ramp([1025, 20], kind)));
            assert!(none(&ramp([50_000, 50], kind), &ramp([50, 50], kind)));
        }
    }

    #[test]
    fn dimensions_are_merged_where_both_operands_go_on() {
        let merged = |size: &[i64], product: &[i64], bias: &[i64]| {
            let merged = merge(size, &[product.to_vec(), bias.to_vec()]).unwrap();
            let dims = merged.dims as usize;
            (
                merged.size[..dims].to_vec(),
                merged.strides[0][..dims].to_vec(),
                merged.strides[1][..dims].to_vec(),
            )
        };
        let full = merged(&[2, 3, 4], &[12, 4, 1], &[12, 4, 1]);
        assert_eq!(full, (vec![24], vec![1], vec![1]));
        let row = merged(&[2, 3, 4], &[12, 4, 1], &[0, 0, 1]);
        assert_eq!(row, (vec![4, 6], vec![1, 4], vec![1, 0]));
        let column = merged(&[2, 3, 4], &[12, 4, 1], &[3, 1, 0]);
        assert_eq!(column, (vec![4, 6], vec![1, 4], vec![0, 1]));
        let scalar = merged(&[2, 1, 4], &[4, 7, 1], &[0, 9, 0]);
        assert_eq!(scalar, (vec![8], vec![1], vec![0]));
        assert_eq!(merged(&[], &[], &[]).0, [1]);
        let alternating: Vec<i64> = (0..7).map(|dim| dim % 2).collect();
        assert!(merge(&[2; 7], &[vec![64, 32, 16, 8, 4, 2, 1], alternating]).is_none());
    }

    #[test]
    fn more_dimensions_than_the_kernel_has() {
        let options = (Kind::Double, Device::Cpu);
        let product = Tensor::randn([2, 1, 2, 1, 2, 1, 2, 1], options);
        let bias = Tensor::randn([2, 1, 2, 1, 2, 1, 2], options);
        let expected = (&product + &bias).relu();
        let mut out = expected.empty_like();
        forward(Some(&product), &bias, &mut out).unwrap();
        assert!(out.equal(&expected));
    }

    #[test]
    fn sums_of_another_length_are_refused() {
        let out = Tensor::zeros([3, 4], (Kind::Double, Device::Cpu));
        let (mut grad_product, mut sums) =
            (out.zeros_like(), Tensor::zeros([5], (Kind::Double, Device::Cpu)));
        let inputs = BackwardInputs { grad: &out, out: &out };
        assert!(backward(&inputs, &mut grad_product, Some(&mut sums)).is_err());
    }
}
