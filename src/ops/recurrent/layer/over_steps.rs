//! The gradients of the input and of the parameters, which are products and sums over all steps.

use super::tf32::Tf32;
use crate::Result;
use crate::ops::recurrent::columns;
use crate::ops::recurrent::kernels::{product, tf32_product};
use tch::{Kind, Tensor};

fn multiply(lhs: &Tensor, rhs: &Tensor, is_tf32: bool) -> Result<Tensor> {
    if is_tf32 { tf32_product(lhs, rhs, None) } else { product(lhs, rhs, None) }
}

/// What these gradients are made of. All tensors are contiguous.
pub(super) struct OverSteps<'a> {
    /// `[T·B, G·H]`: the gradients for what the product with h is added to.
    pub gates: Tensor,
    /// `[T·B, S·H]`: for the input's part of the separate gates, if there are any.
    pub separate: Option<Tensor>,
    /// `[T, B, F]`
    pub input: &'a Tensor,
    /// `[B, H]`
    pub h0: &'a Tensor,
    /// `[T, B, H]`
    pub output: &'a Tensor,
    /// Which products are in tf32.
    pub tf32: Tf32,
}

impl OverSteps<'_> {
    fn is_on_cuda(&self) -> bool {
        self.gates.device().is_cuda()
    }

    /// The gradients for the input's part of all gates, in parts that stand next to each other; the
    /// last one is the smaller.
    fn parts_of_input(&self) -> Result<Vec<Tensor>> {
        let Some(separate) = &self.separate else { return Ok(vec![self.gates.shallow_clone()]) };
        let summed = self.gates.size2()?.1 - separate.size2()?.1;
        let parts = vec![self.gates.f_narrow(1, 0, summed)?, separate.shallow_clone()];
        // On CUDA two products are faster than a copy of all gradients.
        if self.is_on_cuda() { Ok(parts) } else { Ok(vec![Tensor::f_cat(&parts, 1)?]) }
    }

    pub fn of_input(&self, w_ih: &Tensor) -> Result<Tensor> {
        let (steps, batch, features) = self.input.size3()?;
        // cuBLAS' products in tf32 are faster if the terms of a sum are adjacent in memory.
        let is_tf32 = self.tf32.input;
        let w_ih = match is_tf32 {
            true => w_ih.f_transpose(0, 1)?.f_contiguous()?.f_transpose(0, 1)?,
            false => w_ih.shallow_clone(),
        };
        let (mut gradient, mut end) = (None, w_ih.size2()?.0);
        for part in self.parts_of_input()?.iter().rev() {
            let columns = part.size2()?.1;
            end -= columns;
            let weight = w_ih.f_narrow(0, end, columns)?;
            match &gradient {
                None => gradient = Some(multiply(part, &weight, is_tf32)?),
                Some(gradient) if is_tf32 => {
                    let _ = tf32_product(part, &weight, Some(gradient))?;
                }
                Some(gradient) => {
                    let _ = gradient.shallow_clone().f_addmm_(part, &weight)?;
                }
            }
        }
        let gradient = gradient.ok_or_else(|| crate::Error::msg("internal error: no gates"))?;
        Ok(gradient.f_view([steps, batch, features])?)
    }

    /// Those of W_ih and W_hh, as far as they are needed.
    pub fn of_weights(&self, [ih, hh]: [bool; 2]) -> Result<[Option<Tensor>; 2]> {
        let (steps, batch, features) = self.input.size3()?;
        if !ih && !hh {
            return Ok([None, None]);
        }
        let is_tf32 = self.tf32.weights;
        let columns = match is_tf32 {
            // Here, too, adjacent terms are faster, by more than this copy takes.
            true => Some(columns([self.h0, self.output, self.input])?),
            false => None,
        };
        let hidden = self.h0.size2()?.1;
        let of_columns = |columns: &Tensor, first, count| -> Result<Tensor> {
            Ok(columns.f_narrow(0, first, count)?.f_transpose(0, 1)?)
        };
        let input = || match &columns {
            Some(columns) => of_columns(columns, hidden, features),
            None => Ok(self.input.f_view([steps * batch, features])?),
        };
        let of_ih = || -> Result<Tensor> {
            let input = input()?;
            let product = |part: &Tensor| multiply(&part.f_transpose(0, 1)?, &input, is_tf32);
            let mut parts =
                self.parts_of_input()?.iter().map(product).collect::<Result<Vec<_>>>()?;
            if parts.len() == 1 { Ok(parts.remove(0)) } else { Ok(Tensor::f_cat(&parts, 0)?) }
        };
        let of_hh = || match &columns {
            Some(columns) => {
                let before = of_columns(columns, 0, hidden)?;
                multiply(&self.gates.f_transpose(0, 1)?, &before, is_tf32)
            }
            None => self.of_hidden_weight(),
        };
        Ok([ih.then(of_ih).transpose()?, hh.then(of_hh).transpose()?])
    }

    /// The gradient of W_hh where nothing is in tf32, a product with h0 and all h but the last.
    fn of_hidden_weight(&self) -> Result<Tensor> {
        let (steps, batch, hidden) = self.output.size3()?;
        let (first, rows) = (batch, (steps - 1) * batch);
        if !self.is_on_cuda() {
            let h0 = self.h0.f_unsqueeze(0)?;
            let before = Tensor::f_cat(&[&h0, &self.output.f_narrow(0, 0, steps - 1)?], 0)?;
            let before = before.f_view([steps * batch, hidden])?;
            return product(&self.gates.f_transpose(0, 1)?, &before, None);
        }
        // Two products are faster than the copy.
        let gates = |first, rows| self.gates.f_narrow(0, first, rows)?.f_transpose(0, 1);
        let gradient = product(&gates(0, first)?, self.h0, None)?;
        if rows > 0 {
            let before = self.output.f_view([steps * batch, hidden])?.f_narrow(0, 0, rows)?;
            let _ = gradient.shallow_clone().f_addmm_(&gates(first, rows)?, &before)?;
        }
        Ok(gradient)
    }

    /// Those of the two biases, as far as they are needed. They are equal, except for the rows of
    /// separate gates.
    pub fn of_biases(&self, [ih, hh]: [bool; 2]) -> Result<[Option<Tensor>; 2]> {
        if !ih && !hh {
            return Ok([None, None]);
        }
        let sum = |of: &Tensor| -> Result<Tensor> {
            let kind: Kind = of.f_kind()?;
            Ok(of.f_sum_dim_intlist([0_i64].as_slice(), false, kind)?)
        };
        let of_hh = sum(&self.gates)?;
        let of_ih = || match &self.separate {
            Some(separate) => {
                let separate = sum(separate)?;
                let summed = of_hh.size1()? - separate.size1()?;
                Ok::<_, crate::Error>(Tensor::f_cat(
                    &[&of_hh.f_narrow(0, 0, summed)?, &separate],
                    0,
                )?)
            }
            // Each gradient has memory of its own.
            None if hh => Ok(of_hh.f_to_dtype(of_hh.f_kind()?, false, true)?),
            None => Ok(of_hh.shallow_clone()),
        };
        let of_ih = ih.then(of_ih).transpose()?;
        Ok([of_ih, hh.then_some(of_hh)])
    }
}
