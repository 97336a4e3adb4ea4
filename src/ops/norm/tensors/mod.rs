//! Calls of the kernels of `csrc/norm` with tensors.

pub(in crate::ops) mod add;

use super::kernels::{Backward, Forward, Kernels, On};
use super::plan::Way;
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::ffi::{flat, optional_ptr};
use crate::operator::{Borrowed, Each, Meta};
use crate::ops::kinds;
pub(crate) use crate::ops::tch_kinds::compute_kind;
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// The numbers of rows and columns, and the way to compute them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub rows: i64,
    pub columns: i64,
    pub way: Way,
}

impl Shape {
    /// Of rows whose size has so many dimensions at the end of these sizes.
    pub fn new(sizes: &[i64], dims: usize, way: Way) -> Self {
        let (leading, columns) = sizes.split_at(sizes.len().saturating_sub(dims));
        let product = |sizes: &[i64]| sizes.iter().copied().fold(1, i64::saturating_mul);
        Shape { rows: product(leading), columns: product(columns), way }
    }
}

/// The tensors that the forward reads, of the shapes that [`Forward`] states.
pub(crate) struct Operands<'a> {
    pub input: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

/// What the backward reads.
pub(crate) struct Saved<'a> {
    /// Absent, as are the others, if only the bias' gradient is wanted.
    pub input: Option<&'a Tensor>,
    pub weight: Option<&'a Tensor>,
    pub moments: Moments<Borrowed<'a>>,
}

crate::slots! {
    /// What the forward computes of each row for the backward, `[M]` each, of [`compute_kind`]: the mean, if
    /// the statistic has one, and 1/√(variance + eps) or 1/√(mean square + eps).
    pub struct Moments { mean?, rstd? }
}

impl Moments<Each<Option<Tensor>>> {
    pub fn borrowed(&self) -> Moments<Borrowed<'_>> {
        Moments { mean: self.mean.as_ref(), rstd: self.rstd.as_ref() }
    }
}

impl Kernels {
    /// Computes `output` ([M, N]) and, where there is room for them, the moments of each row.
    pub fn forward(
        &self,
        shape: Shape,
        operands: &Operands<'_>,
        eps: f64,
        output: &mut Tensor,
        moments: &Moments<Borrowed<'_>>,
    ) -> Result<()> {
        let Shape { rows, columns, way } = shape;
        let values = plain(operands.input)?;
        let weight = operands.weight.map(plain).transpose()?;
        let bias = operands.bias.map(plain).transpose()?;
        let like = (values.f_kind()?, values.device());
        let parameter = weight.as_ref().or(bias.as_ref()).unwrap_or(&values);
        let parameters = (parameter.f_kind()?, like.1);
        let elements = rows * columns;
        let compute = (compute_kind(like.0), like.1);
        let params = Forward {
            input: flat("input", Some(&values), elements, like)?,
            weight: flat("weight", weight.as_ref(), columns, parameters)?,
            bias: flat("bias", bias.as_ref(), columns, parameters)?,
            output: flat("output", Some(output), elements, like)?,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            ..Forward::new([rows, columns], eps)
        };
        // SAFETY: `flat` and `optional_ptr` checked that the arrays are contiguous, of these sizes and
        // kinds, and on this device. Those that are written are borrowed exclusively, or were made for
        // this call, so they overlap no other.
        unsafe { self.run_forward(on(way, like, parameters.0)?, params) }
    }

    /// The gradients of input, weight and bias that are wanted, each described by its argument.
    pub fn backward(
        &self,
        shape: Shape,
        grad_output: &Tensor,
        saved: &Saved<'_>,
        wanted: [Option<&Meta<i64>>; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let Shape { rows, columns, way } = shape;
        let grad_output = plain(grad_output)?;
        // The bias' gradient is a sum of `grad_output` alone.
        let values = saved.input.map_or_else(|| Ok(grad_output.shallow_clone()), plain)?;
        let weight = saved.weight.map(plain).transpose()?;
        let moments = match saved.input {
            Some(_) => saved.moments.clone(),
            None => Moments { mean: None, rstd: None },
        };
        if wanted[0].or(wanted[1]).is_some() {
            self.check_moments(&moments)?;
        }
        let [of_input, of_weight, of_bias] =
            wanted.map(|like| like.map(Meta::allocate).transpose());
        let gradients = [of_input?, of_weight?, of_bias?];
        let [of_input, of_weight, of_bias] = gradients.each_ref().map(Option::as_ref);
        let like = (values.f_kind()?, values.device());
        let parameter = of_weight.or(of_bias).or(weight.as_ref()).unwrap_or(&values);
        let parameters = (parameter.f_kind()?, like.1);
        let elements = rows * columns;
        let compute = (compute_kind(like.0), like.1);
        let on = on(way, like, parameters.0)?;
        let mut params = Backward {
            grad_output: flat("grad_output", Some(&grad_output), elements, like)?,
            input: flat("input", Some(&values), elements, like)?,
            weight: flat("weight", weight.as_ref(), columns, parameters)?,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            grad_input: flat("grad_input", of_input, elements, like)?,
            grad_weight: flat("grad_weight", of_weight, columns, parameters)?,
            grad_bias: flat("grad_bias", of_bias, columns, parameters)?,
            ..Backward::new([rows, columns])
        };
        self.plan_backward(on, &mut params)?;
        let size = [params.rows_of_scratch(), columns];
        let scratch = |gradient: Option<&Tensor>| {
            let gradient = gradient.filter(|_| size[0] > 0);
            gradient.map(|_| empty_of(&size, compute)).transpose()
        };
        let (weight_parts, bias_parts) = (scratch(of_weight)?, scratch(of_bias)?);
        params.weight_parts = optional_ptr("weight_parts", weight_parts.as_ref(), &size, compute)?;
        params.bias_parts = optional_ptr("bias_parts", bias_parts.as_ref(), &size, compute)?;
        // SAFETY: as in `forward`; the scratch tensors live until both kernels have been launched.
        unsafe { self.run_backward(on.device, &params)? };
        Ok(gradients)
    }

    /// Checks that the moments are there.
    fn check_moments(&self, moments: &Moments<Borrowed<'_>>) -> Result<()> {
        if moments.rstd.is_some() && (moments.mean.is_some() || !self.is_centred) {
            return Ok(());
        }
        Err(Error::msg(format!("internal error: {}'s backward has no moments", self.op)))
    }
}

fn on(way: Way, (kind, device): (Kind, tch::Device), parameters: Kind) -> Result<On> {
    let (kind, parameters) = (kinds::Kind::of(kind)?, kinds::Kind::of(parameters)?);
    Ok(On { device: device.into(), way, kind, parameters })
}
