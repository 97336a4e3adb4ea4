//! How Muon brings the singular values of directions near to 1.
//!
//! Each iteration multiplies X by a symmetric matrix: X ← Z X with Z = aI + bG + cG² and G = X Xᵀ. So G ← Z² G
//! follows without X, and several iterations are one product with X, by the product of their Z (the Gram
//! form). The roundings of G then grow with each iteration, until it is computed anew from X: after a
//! segment of one or two iterations. All of these matrices commute, so their products are symmetric, too.
//! For X with more rows than columns, G is Xᵀ X, and X ← X Z.

use super::kernels::half::{self, Terms};
use super::{Muon, plan};
use crate::Result;
use tch::{Device, Kind, Tensor};

/// X is multiplied by this in `Half`, so that small values of X and G are far above the least numbers of that
/// kind. A power of 2, by which nothing is rounded.
const SCALE: f64 = 16.0;

impl Muon {
    /// Directions `[matrices, rows, columns]` of kind `kind`, which may be overwritten: orthogonalised, and times
    /// `ratio`. In the kind of the moments, `kind`, or in `Half`.
    pub(super) fn orthogonalised(
        &self,
        directions: Tensor,
        kind: Kind,
        ratio: f64,
    ) -> Result<Tensor> {
        if self.is_in_half(directions.device(), kind, ratio) {
            return self.orthogonalised_in_half(directions, ratio);
        }
        let mut x = self.orthogonalised_in_bfloat16(directions)?.f_to_kind(kind)?;
        Ok(x.f_mul_scalar_(ratio)?)
    }

    /// Whether matrices with moments of this kind are orthogonalised in `Half`. A direction whose norm is
    /// far below ε would not be in its range.
    pub(super) fn is_in_half(&self, device: Device, kind: Kind, ratio: f64) -> bool {
        const MOST_EPS: f64 = 1e-6;
        let fits = || plan::fits_half(self.ns_coefficients, self.ns_steps, ratio);
        device.is_cuda() && kind == Kind::Float && self.eps <= MOST_EPS && fits()
    }

    /// The norms of matrices, rounded to `BFloat16`, as torch's are: a vector whose norm is exactly 1 would
    /// repeat one rounding.
    fn norms(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_norm_scalaropt_dim(2.0, [1_i64, 2].as_slice(), true)?.f_clamp_min(self.eps)?)
    }

    /// As torch does it.
    fn orthogonalised_in_bfloat16(&self, directions: Tensor) -> Result<Tensor> {
        let (a, b, c) = self.ns_coefficients;
        let (_, rows, columns) = directions.size3()?;
        let mut x = directions.f_to_kind(Kind::BFloat16)?;
        drop(directions);
        let _ = x.f_div_(&self.norms(&x)?)?;
        let is_tall = rows > columns;
        for _ in 0..self.ns_steps {
            let transposed = x.f_transpose(1, 2)?;
            let gram = if is_tall { transposed.f_bmm(&x)? } else { x.f_bmm(&transposed)? };
            let polynomial = gram.f_baddbmm(&gram, &gram, b, c)?;
            x = match is_tall {
                true => x.f_baddbmm(&x, &polynomial, a, 1.0)?,
                false => x.f_baddbmm(&polynomial, &x, a, 1.0)?,
            };
        }
        Ok(x)
    }

    fn orthogonalised_in_half(&self, directions: Tensor, ratio: f64) -> Result<Tensor> {
        let (matrices, rows, columns) = directions.size3()?;
        let is_tall = rows > columns;
        let has_kernel = plan::has_symmetric_kernel(matrices, rows.min(columns));
        let segments = plan::segments(self.ns_steps, rows, columns, has_kernel);
        let scale = if segments.is_empty() { ratio } else { SCALE };
        let mut x = half::normalize(&directions, &self.norms(&directions)?, scale)?;
        drop(directions);
        for (index, steps) in segments.iter().enumerate() {
            let is_last = index + 1 == segments.len();
            let factor = if is_last { ratio / scale } else { 1.0 };
            let z = self.multiplier(&x, *steps, scale, factor, has_kernel)?;
            x = if is_tall { x.f_bmm(&z)? } else { z.f_bmm(&x)? };
        }
        Ok(x)
    }

    /// What so many iterations multiply X by, times `factor`. `x` is X times `scale`.
    fn multiplier(
        &self,
        x: &Tensor,
        steps: usize,
        scale: f64,
        factor: f64,
        has_kernel: bool,
    ) -> Result<Tensor> {
        let (a, b, c) = self.ns_coefficients;
        let (_, rows, columns) = x.size3()?;
        let product = |lhs: &Tensor, rhs: &Tensor, factor| {
            let terms = Terms { alpha: factor, addend: None, diagonal: 0.0 };
            symmetric(lhs, rhs, false, terms, has_kernel)
        };
        let polynomial = |gram: &Tensor, factor: f64| {
            let terms = Terms {
                alpha: factor * c / scale.powi(4),
                addend: Some((factor * b / scale.powi(2), gram)),
                diagonal: factor * a,
            };
            symmetric(gram, gram, false, terms, has_kernel)
        };
        let plain = Terms { alpha: 1.0, addend: None, diagonal: 0.0 };
        let mut gram = symmetric(x, x, rows > columns, plain, has_kernel)?;
        let mut z = polynomial(&gram, if steps == 1 { factor } else { 1.0 })?;
        let mut all = z.shallow_clone();
        for step in 1..steps {
            let once = product(&z, &gram, 1.0)?;
            gram = product(&z, &once, 1.0)?;
            drop(once);
            z = polynomial(&gram, 1.0)?;
            all = product(&z, &all, if step + 1 == steps { factor } else { 1.0 })?;
        }
        Ok(all)
    }
}

/// `terms` of `lhs rhsᵀ`, or of `lhsᵀ rhs` if `is_across`, of matrices in `Half` whose product is symmetric.
fn symmetric(
    lhs: &Tensor,
    rhs: &Tensor,
    is_across: bool,
    terms: Terms<'_>,
    has_kernel: bool,
) -> Result<Tensor> {
    let ours = if has_kernel { half::symmetric(lhs, rhs, is_across, terms)? } else { None };
    if let Some(out) = ours {
        return Ok(out);
    }
    let turned =
        |x: &Tensor, turns: bool| if turns { x.f_transpose(1, 2) } else { Ok(x.shallow_clone()) };
    let (lhs, rhs) = (turned(lhs, is_across)?, turned(rhs, !is_across)?);
    let mut out = match terms.addend {
        Some((beta, addend)) => addend.f_baddbmm(&lhs, &rhs, beta, terms.alpha)?,
        None => lhs.f_bmm(&rhs)?,
    };
    if terms.addend.is_none() && terms.alpha != 1.0 {
        let _ = out.f_mul_scalar_(terms.alpha)?;
    }
    if terms.diagonal != 0.0 {
        let _ = out.f_diagonal(0, 1, 2)?.f_add_scalar_(terms.diagonal)?;
    }
    Ok(out)
}

/// The kernel for symmetric products, for its tests: `alpha · lhs rhsᵀ + beta · addend + diagonal · I`, or
/// with `lhsᵀ rhs` if `is_across`. `None` where there is no kernel.
#[doc(hidden)]
pub fn symmetric_product(
    lhs: &Tensor,
    rhs: &Tensor,
    is_across: bool,
    alpha: f64,
    addend: Option<(f64, &Tensor)>,
    diagonal: f64,
) -> Result<Option<Tensor>> {
    half::symmetric(lhs, rhs, is_across, Terms { alpha, addend, diagonal })
}
