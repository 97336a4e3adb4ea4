//! Level 1: tch operations.

use tch::Tensor;
use tch_extension::{Error, Result};

/// Computes one step.
pub fn lltm(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    (h, c): (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    let gates = gates(x, w, b, h)?;
    let [i, o, g] = &gates.f_chunk(3, 1)?[..] else {
        return Err(Error::msg("lltm: W needs 3H rows"));
    };
    let new_c = c.f_add(&g.f_elu()?.f_mul(&i.f_sigmoid()?)?)?;
    let new_h = new_c.f_tanh()?.f_mul(&o.f_sigmoid()?)?;
    Ok((new_h, new_c))
}

/// Computes the gates: `[h, x] Wᵀ + b`.
pub fn gates(x: &Tensor, w: &Tensor, b: &Tensor, h: &Tensor) -> Result<Tensor> {
    Ok(b.f_addmm(&Tensor::f_cat(&[h, x], 1)?, &w.f_transpose(0, 1)?)?)
}
