//! An operator with all that a definition can have: an option, a tensor that may be absent, one
//! without a gradient, two outputs, of which the backward pass reads one, and something that is kept.

use tch::{Kind, Tensor};
use tch_extension::operator::*;
use tch_extension::{Error, Result};

tch_extension::signature! {
    /// `y = x / |x| · scale · weight · mask`, for each row of `x`, and the lengths of the rows.
    pub UnitRows: UnitRowsIn -> UnitRowsOut = "unit_rows"(x, weight?, mask!, scale: f64 = 1.0) -> (y, norm)
}

tch_extension::slots! {
    /// `x / |x|`, which the gradients read.
    pub struct Unit { rows? }
}

impl UnitRows {
    fn formula(&self, of: &Args<'_, Self>) -> Result<(Tensor, Tensor, Tensor)> {
        let norm = of.x.f_square()?.f_sum_dim_intlist([1].as_slice(), false, None)?.f_sqrt()?;
        let rows = of.x.f_div(&norm.f_unsqueeze(1)?)?;
        let y = rows.f_mul(&self.factor(of.weight, of.mask)?)?;
        Ok((y, norm, rows))
    }

    fn factor(&self, weight: Option<&Tensor>, mask: &Tensor) -> Result<Tensor> {
        let factor = mask.f_unsqueeze(1)?.f_mul_scalar(self.scale)?;
        Ok(weight.map_or(Ok(factor.shallow_clone()), |weight| factor.f_mul(weight))?)
    }
}

impl Operator for UnitRows {
    type Kept = Unit;
    type Plan = ();

    const READS_OUTPUTS: u64 = 0b10;

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let x = of.x.kind_in(&[Kind::Float, Kind::Double])?.supported_device()?;
        let [rows, columns] = x.dim(2, "[N, D]")?.sizes() else { unreachable!("two dimensions") };
        let weight = of.weight.as_ref().map(|weight| weight.like(x)).transpose()?;
        weight.map(|weight| weight.shape("[D]", std::slice::from_ref(columns))).transpose()?;
        of.mask.like(x)?.shape("[N]", std::slice::from_ref(rows))?;
        Ok(Made {
            outputs: UnitRowsOut { y: x.sized(x.sizes()), norm: x.sized([rows.clone()]) },
            kept: Unit { rows: (needs.x || needs.weight).then(|| x.sized(x.sizes())) },
        })
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let made = call.check()?;
        let (y, norm, rows) = self.formula(&call.of)?;
        let kept = made.kept.rows.map(|_| rows);
        Ok(Made { outputs: UnitRowsOut { y, norm }, kept: Unit { rows: kept } })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let (Some(rows), Some(norm)) = (&again.kept.rows, &again.outputs.norm) else {
            return Err(Error::msg("unit_rows: what was kept is gone"));
        };
        let Some(mask) = &again.of.mask else { return Ok(UnitRowsIn::none()) };
        let along = |rows: &Tensor, grad: &Tensor| -> Result<Tensor> {
            Ok(rows.f_mul(grad)?.f_sum_dim_intlist([1].as_slice(), true, None)?)
        };
        let of_y = |grad: &Tensor| -> Result<Tensor> {
            let grad = grad.f_mul(&self.factor(again.of.weight.as_ref(), mask)?)?;
            let across = grad.f_sub(&rows.f_mul(&along(rows, &grad)?)?)?;
            Ok(across.f_div(&norm.f_unsqueeze(1)?)?)
        };
        let of_norm = |grad: &Tensor| -> Result<Tensor> { Ok(rows.f_mul(&grad.f_unsqueeze(1)?)?) };
        let x = match (&grads.y, &grads.norm) {
            (Some(y), Some(norm)) => Some(of_y(y)?.f_add(&of_norm(norm)?)?),
            (Some(y), None) => Some(of_y(y)?),
            (None, Some(norm)) => Some(of_norm(norm)?),
            (None, None) => None,
        };
        let of_weight = |grad: &Tensor| -> Result<Tensor> {
            let rows = rows.f_mul(&self.factor(None, mask)?)?;
            Ok(rows.f_mul(grad)?.f_sum_dim_intlist([0].as_slice(), false, None)?)
        };
        let grad = grads.y.as_ref().filter(|_| again.needs.weight);
        Ok(UnitRowsIn { x, weight: grad.map(of_weight).transpose()?, mask: None })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let (y, norm, _) = self.formula(of)?;
        Ok(UnitRowsOut { y, norm })
    }
}
