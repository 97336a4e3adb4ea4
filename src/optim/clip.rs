//! Limits of gradients: of each value, and of the norm of all.

use super::gradients::{self, Gradients};
use super::kernels::{self, Limit};
use super::optimizer::{FusedOptimizer, refuse_capture};
use super::step::moved;
use crate::{Error, Result};
use tch::{Kind, Tensor};

impl FusedOptimizer {
    /// Computes new gradients of the loss, limits each of their values to `-max..=max`, and updates
    /// the parameters.
    ///
    /// # Errors
    /// As for [`backward_step`](Self::backward_step), and when `max` is negative or NaN.
    pub fn backward_step_clip(&mut self, loss: &Tensor, max: f64) -> Result<()> {
        check_max("FusedOptimizer::backward_step_clip", max)?;
        self.zero_grad()?;
        loss.f_backward()?;
        self.clip_grad_value(max)?;
        self.step()
    }

    /// Computes new gradients of the loss, clips their norm to `max`, and updates the parameters.
    /// Unlike [`set_clip_norm`](Self::set_clip_norm), it rewrites the gradients.
    ///
    /// # Errors
    /// As for [`backward_step_clip`](Self::backward_step_clip).
    pub fn backward_step_clip_norm(&mut self, loss: &Tensor, max: f64) -> Result<()> {
        check_max("FusedOptimizer::backward_step_clip_norm", max)?;
        self.zero_grad()?;
        loss.f_backward()?;
        let _norm = self.clip_grad_norm(max)?;
        self.step()
    }

    /// Limits each value of the gradients to `-max..=max`, in place.
    ///
    /// # Errors
    /// For a gradient that a step would refuse, and when `max` is negative or NaN.
    pub fn clip_grad_value(&self, max: f64) -> Result<()> {
        let op = "FusedOptimizer::clip_grad_value";
        check_max(op, max)?;
        let _no_grad = tch::no_grad_guard();
        let gathered = gradients::gather(op, &self.parameters, Gradients::Accumulated)?;
        for (device, spans) in gathered.in_place(op)? {
            kernels::rewrite(&spans, device, Limit::Value(max))?;
        }
        for gradient in gathered.not_in_place() {
            let _ = gradient.shallow_clone().f_clamp_(-max, max)?;
        }
        gathered.bump_versions_of_gradients()
    }

    /// Scales the gradients, in place, so that their norm is at most `max`:
    /// `torch.nn.utils.clip_grad_norm_`. The norm is that of all gradients as one vector. Memory that
    /// gradients share is scaled once, where torch scales it once for each. The norm is
    /// returned as it was before, on the device of the first gradient: of kind `Double`, with no
    /// dimensions. With [`set_clip_norm`](Self::set_clip_norm) the gradients need not be rewritten,
    /// which is faster.
    ///
    /// # Errors
    /// As for [`clip_grad_value`](Self::clip_grad_value).
    pub fn clip_grad_norm(&self, max: f64) -> Result<Tensor> {
        let op = "FusedOptimizer::clip_grad_norm";
        check_max(op, max)?;
        let _no_grad = tch::no_grad_guard();
        let gathered = gradients::gather(op, &self.parameters, Gradients::Accumulated)?;
        let squares = self.sum_of_squares(&gathered)?;
        for (device, spans) in gathered.in_place(op)? {
            let squares = moved(&squares, device)?;
            kernels::rewrite(&spans, device, Limit::Norm(&squares, max))?;
        }
        let norm = squares.f_sqrt()?;
        for gradient in gathered.not_in_place() {
            let clip =
                norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar(max)?.f_clamp_max(1.0)?;
            let clip = clip.f_to_kind(gradient.f_kind()?)?;
            let _ = gradient.shallow_clone().f_mul_(&moved(&clip, gradient.device())?)?;
        }
        gathered.bump_versions_of_gradients()?;
        Ok(norm)
    }

    /// Lets every step clip the norm of all gradients to `max`, as
    /// [`clip_grad_norm`](Self::clip_grad_norm) does, but while it updates the parameters: the
    /// gradients themselves stay as they are. `None`, the default, ends it. An infinite `max` only
    /// measures the norm. The first call, and `None`, do not reach a graph that was captured before;
    /// another maximum does.
    ///
    /// # Errors
    /// When `max` is negative or NaN; while the current stream is being captured; errors of CUDA.
    pub fn set_clip_norm(&mut self, max: Option<f64>) -> Result<()> {
        let op = "FusedOptimizer::set_clip_norm";
        if let Some(max) = max {
            check_max(op, max)?;
            refuse_capture(op, self.places.iter().map(|place| place.device))?;
            for place in &self.places {
                kernels::store(&[max], &place.max_norm, place.device)?;
            }
        }
        if self.max_norm.is_none() || max.is_none() {
            self.norm_on = None;
        }
        self.max_norm = max;
        Ok(())
    }

    /// The norm of the gradients in the last step that clipped them, before the clipping: of kind
    /// `Double`, with no dimensions, on the device of the first parameter that had a gradient in
    /// that step. It is a copy, made after the work of the current stream so far. `None` for an
    /// optimizer that does not clip, and before its first step.
    ///
    /// # Errors
    /// Errors of CUDA.
    pub fn grad_norm(&self) -> Result<Option<Tensor>> {
        let Some(device) = self.norm_on else { return Ok(None) };
        let _no_grad = tch::no_grad_guard();
        let norm = self.place(device)?.norm.tensor();
        Ok(Some(norm.f_to_device_(device, Kind::Double, true, true)?.f_squeeze()?))
    }
}

fn check_max(op: &str, max: f64) -> Result<()> {
    if max >= 0.0 {
        Ok(())
    } else {
        Err(Error::argument(op, "max", "0 or more", format!("{max}"), ""))
    }
}
