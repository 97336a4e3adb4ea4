//! Calls of the kernels of `csrc/loss` with tensors.

use super::kernels::{Rows, Scale, Scaled, Total};
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::ffi::{checked, kind_code, optional_ptr};
use crate::ops::kinds;
pub(crate) use crate::ops::tch_kinds::compute_kind;
use crate::{Error, Result};
use std::ffi::c_void;
use tch::{Device, Kind, Reduction, Tensor};

/// Whether the forward pass computes the gradients: those of a mean or sum. Those of `Half` would be too
/// small there for its range: the loss scale that keeps them in it arrives in the backward pass.
pub(crate) fn is_ahead(reduction: Reduction, kind: Kind) -> bool {
    reduction != Reduction::None && kind != Kind::Half
}

/// The bytes of an element.
pub(crate) fn size_of(kind: Kind) -> i64 {
    kind.elt_size_in_bytes() as i64
}

/// What the losses of rows depend on.
pub(crate) struct Operands<'a> {
    /// `[M, V]`, row-major. There may be a gap after each row if the gradients take the logits' place.
    pub logits: &'a Tensor,
    /// `[M]`, contiguous, of kind `Int64`; each is a class or `ignore_index`.
    pub targets: &'a Tensor,
    /// `[V]` of [`compute_kind`], contiguous.
    pub weight: Option<&'a Tensor>,
    pub ignore_index: i64,
    pub label_smoothing: f64,
    /// 0 for none.
    pub softcap: f64,
    pub z_loss: f64,
}

/// Where the gradients of the logits are written.
pub(crate) enum Gradients<'a> {
    /// To a tensor like the logits.
    To(&'a mut Tensor),
    /// Over the logits.
    InPlace,
}

/// By what the sum of the rows' losses is multiplied; a tensor is `[1]` of [`compute_kind`].
#[derive(Clone, Copy)]
pub(crate) enum Factor<'a> {
    One,
    Known(&'a Tensor),
    /// For a mean of these rows: the tensor gets 1 / Σ w[t] over rows that are not ignored.
    OfMean(&'a Tensor),
}

impl<'a> Factor<'a> {
    pub(crate) fn tensor(self) -> Option<&'a Tensor> {
        match self {
            Factor::One => None,
            Factor::Known(tensor) | Factor::OfMean(tensor) => Some(tensor),
        }
    }
}

/// What is computed.
pub(crate) struct Wanted<'a> {
    /// `[M]` of [`compute_kind`].
    pub losses: Option<&'a mut Tensor>,
    /// `[]` of the logits' kind or of [`compute_kind`]: the sum of the losses, which must be wanted, too,
    /// times the factor.
    pub total: Option<&'a mut Tensor>,
    pub factor: Factor<'a>,
    /// The incoming gradients, `[M]` or one, of the logits' kind or of [`compute_kind`]; 1 if there are
    /// none.
    pub grads: Option<&'a Tensor>,
    pub gradients: Option<Gradients<'a>>,
}

/// Computes the losses and gradients of rows. On CUDA this is one call, of few kernels.
///
/// # Errors
/// When CUDA fails.
pub(crate) fn rows(operands: &Operands<'_>, wanted: Wanted<'_>) -> Result<()> {
    let (rows, classes) = operands.logits.size2()?;
    let (kind, device) = (operands.logits.f_kind()?, operands.logits.device());
    let (like, compute) = ((kind, device), (compute_kind(kind), device));
    let Wanted { losses, total, factor, grads, gradients } = wanted;
    let Operands { targets, weight, ignore_index, .. } = *operands;
    let of_mean = matches!(factor, Factor::OfMean(_));
    let weight_sum = weight.map(|weight| weight.f_sum(compute.0)).transpose()?;
    let weight_sum = weight_sum.map(|sum| sum.f_view([1])).transpose()?;
    let gradients = gradients.as_ref().map(|gradients| match gradients {
        Gradients::To(tensor) => &**tensor,
        Gradients::InPlace => operands.logits,
    });
    let grads = grads.map(|grads| plain(&grads.f_reshape([-1])?)).transpose()?;
    let grad_count = grads.as_ref().map(Tensor::size1).transpose()?.unwrap_or(1);
    if grad_count != 1 && grad_count != rows {
        return Err(Error::msg("internal error: one incoming gradient, or one for each row"));
    }
    let grad_kind = grads.as_ref().map(Tensor::f_kind).transpose()?.unwrap_or(kind);
    let wide_grads = grad_kind != kind;
    let grad_like = if wide_grads { compute } else { like };
    let total_kind = total.as_deref().map(Tensor::f_kind).transpose()?.unwrap_or(kind);
    let wide_total = total_kind != kind;
    let total_like = if wide_total { compute } else { like };
    let (logits, row_stride) = checked_rows("logits", operands.logits, like)?;
    let params = Rows {
        rows,
        classes,
        row_stride,
        ignore_index,
        grad_stride: i64::from(grad_count == rows && rows != 1),
        label_smoothing: operands.label_smoothing,
        softcap: operands.softcap,
        z_loss: operands.z_loss,
        kind: kind_code(kind)?,
        of_mean: of_mean.into(),
        wide_grads: wide_grads.into(),
        wide_total: wide_total.into(),
        logits,
        targets: checked("targets", targets, &[rows], (Kind::Int64, device))?.cast_const().cast(),
        weight: optional_ptr("weight", weight, &[classes], compute)?,
        weight_sum: optional_ptr("weight_sum", weight_sum.as_ref(), &[1], compute)?,
        losses: optional_ptr("losses", losses.as_deref(), &[rows], compute)?,
        factor: optional_ptr("factor", factor.tensor(), &[1], compute)?,
        grads: optional_ptr("grads", grads.as_ref(), &[grad_count], grad_like)?,
        gradients: match gradients {
            Some(gradients) => match checked_rows("gradients", gradients, like)? {
                (address, stride)
                    if stride == row_stride && gradients.size() == [rows, classes] =>
                {
                    address
                }
                _ => return Err(Error::msg("internal error: gradients unlike the logits")),
            },
            None => std::ptr::null_mut(),
        },
        total: optional_ptr("total", total.as_deref(), &[], total_like)?,
    };
    // SAFETY: all addresses were checked to belong to arrays of the stated sizes and kinds. Those that
    // are written are borrowed exclusively, or were made for this call as the factor, so they overlap no
    // other, except that the gradients may be the logits, which the kernels read before they write
    // there.
    unsafe { params.run(device.into(), kinds::Kind::of(kind)?) }
}

/// The address of a row-major tensor `[M, V]` of this kind and device, and from a row to the next one.
fn checked_rows(name: &str, tensor: &Tensor, like: (Kind, Device)) -> Result<(*mut c_void, i64)> {
    let (rows, classes) = tensor.size2()?;
    let stride = tensor.stride();
    // The stride of a dimension of one element says nothing, nor do strides without elements.
    let is_row_contiguous = classes == 1 || (classes > 1 && stride[1] == 1);
    if !(is_row_contiguous && rows > 1 && stride[0] > classes) {
        return Ok((checked(name, tensor, &[rows, classes], like)?, classes));
    }
    // A view of one row is contiguous, and so is checked as any other tensor.
    Ok((checked(name, &tensor.f_narrow(0, 0, 1)?, &[1, classes], like)?, stride[0]))
}

/// The classes of rows, for the factor of a mean: targets `[M]` and weights `[V]` of the compute kind, both
/// contiguous.
#[derive(Clone, Copy)]
pub(crate) struct Mean<'a> {
    pub targets: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub ignore_index: i64,
}

/// Computes the factor `[1]`, if there is a mean, and the total of losses `[M]`, if there are some; the
/// factor and the losses are of the compute kind.
fn run_totals(
    mean: Option<Mean<'_>>,
    factor: Option<&Tensor>,
    of: Option<(&Tensor, &Tensor)>,
    (kind, device): (Kind, Device),
) -> Result<()> {
    let like = (compute_kind(kind), device);
    let rows = match (mean, of) {
        (Some(mean), _) => mean.targets.size1()?,
        (None, Some((losses, _))) => losses.size1()?,
        (None, None) => return Ok(()),
    };
    let targets = mean.map(|mean| mean.targets);
    let weight = mean.and_then(|mean| mean.weight);
    let classes = weight.map(Tensor::size1).transpose()?.unwrap_or(0);
    let params = Total {
        rows,
        classes,
        ignore_index: mean.map_or(0, |mean| mean.ignore_index),
        kind: kind_code(kind)?,
        of_mean: mean.is_some().into(),
        targets: optional_ptr("targets", targets, &[rows], (Kind::Int64, device))?
            .cast_const()
            .cast(),
        weight: optional_ptr("weight", weight, &[classes], like)?,
        losses: optional_ptr("losses", of.map(|(losses, _)| losses), &[rows], like)?,
        factor: optional_ptr("factor", factor, &[1], like)?,
        total: optional_ptr("total", of.map(|(_, total)| total), &[], (kind, device))?,
    };
    // SAFETY: as in `rows`; the factor and the total were made for this call. A weight is read only for
    // a target that is a class.
    unsafe { params.run(device.into()) }
}

/// 1 / Σ w[t] over rows that are not ignored, `[1]` of this compute kind.
///
/// # Errors
/// When CUDA fails.
pub(crate) fn mean_factor(mean: Mean<'_>, compute: Kind) -> Result<Tensor> {
    let like = (compute, mean.targets.device());
    let factor = empty_of(&[1], like)?;
    run_totals(Some(mean), Some(&factor), None, like)?;
    Ok(factor)
}

/// Computes the total, without dimensions and of the compute kind: the sum of losses `[M]` times a factor
/// `[1]`, or 1, both of the same kind.
///
/// # Errors
/// When CUDA fails.
pub(crate) fn add_up(losses: &Tensor, factor: Option<&Tensor>, total: &mut Tensor) -> Result<()> {
    run_totals(None, factor, Some((losses, total)), (losses.f_kind()?, losses.device()))
}

/// Gradients that were computed ahead, on one device, times the incoming one, a number of any kind, `[]` or
/// `[1]`. The products have the kinds that stand next to the gradients. All kinds are one and its
/// [`compute_kind`], which no gradient has whose product has the other. In place, where the kinds are the
/// same, nothing is read if the number is 1.
///
/// # Errors
/// When CUDA fails.
pub(crate) fn times(
    gradients: &[Option<(Tensor, Kind)>; 3],
    factor: &Tensor,
    in_place: bool,
) -> Result<[Option<Tensor>; 3]> {
    let mut products = [None, None, None];
    let Some((first, _)) = gradients.iter().flatten().next() else { return Ok(products) };
    let (mut kind, device) = (first.f_kind()?, first.device());
    for (from, _) in gradients.iter().flatten() {
        let narrow = from.f_kind()?;
        if narrow != compute_kind(narrow) {
            kind = narrow;
        }
    }
    let compute = compute_kind(kind);
    let factor_kind = if factor.f_kind()? == kind { kind } else { compute };
    let factor = plain(&factor.f_to_kind(factor_kind)?.f_reshape([1])?)?;
    let none = (std::ptr::null(), std::ptr::null_mut());
    let mut arrays = [Scaled { count: 0, wide_from: 0, wide_to: 0, from: none.0, to: none.1 }; 3];
    for ((pair, product), array) in gradients.iter().zip(&mut products).zip(&mut arrays) {
        let Some((from, to_kind)) = pair else { continue };
        let size = from.size();
        let is_wide = |of: Kind| of == compute && of != kind;
        let from_kind = if is_wide(from.f_kind()?) { compute } else { kind };
        let to_kind = if is_wide(*to_kind) || from_kind != kind { compute } else { kind };
        let stays = in_place && from_kind == to_kind;
        let to = if stays { from.shallow_clone() } else { empty_of(&size, (to_kind, device))? };
        *array = Scaled {
            count: size.iter().product(),
            wide_from: (from_kind != kind).into(),
            wide_to: (to_kind != kind).into(),
            from: checked("gradients", from, &size, (from_kind, device))?,
            to: checked("product", &to, &size, (to_kind, device))?,
        };
        *product = Some(to);
    }
    let params = Scale {
        kind: kind_code(kind)?,
        wide_factor: (factor_kind != kind).into(),
        factor: checked("factor", &factor, &[1], (factor_kind, device))?,
        arrays,
    };
    // SAFETY: as in `rows`. A product is the gradients themselves, whose values are each read before they
    // are written, or belongs to this call alone.
    unsafe { params.run(device.into())? };
    Ok(products)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dimension_of_one_element_may_have_any_stride() {
        let like = (Kind::Float, Device::Cpu);
        let wide = Tensor::zeros([6, 8], like);
        let stride = |tensor: &Tensor| checked_rows("logits", tensor, like).map(|(_, by)| by).ok();
        assert_eq!(stride(&wide), Some(8));
        assert_eq!(stride(&wide.narrow(1, 2, 5)), Some(8));
        assert_eq!(stride(&wide.narrow(1, 2, 1)), Some(8));
        assert_eq!(stride(&wide.narrow(1, 2, 0)), Some(0));
        assert_eq!(stride(&wide.narrow(0, 0, 1).narrow(1, 0, 5)), Some(5));
        assert_eq!(stride(&Tensor::zeros([1, 6], like).transpose(0, 1)), Some(1));
        for bad in [wide.transpose(0, 1), wide.narrow(0, 0, 1).expand([6, 8], false)] {
            assert_eq!(stride(&bad), None);
        }
    }
}
