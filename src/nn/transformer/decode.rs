//! A block for one token of each of few rows: the step of a generation.

use super::{FeedForward, Norm, Residual, TransformerBlock};
use crate::Result;
use crate::nn::{AttentionCall, Linear, MlpOp, RmsNorm, SwiGlu};
use crate::ops::{linear_add, normed_gate, normed_linear_each};

/// The layers of a block whose parts have kernels that compute several of them.
struct Parts<'a> {
    norms: [&'a RmsNorm; 2],
    projections: [&'a Linear; 3],
    out: &'a Linear,
    feed_forward: &'a SwiGlu,
}

impl TransformerBlock {
    /// The block in five launches, for tokens whose places are on the device: norms are computed with the
    /// products after them, sums with the products before them, and positions with attention. `None` for
    /// other calls, and where there is no kernel for these rows.
    pub(super) fn f_decode(
        &self,
        stream: &Residual,
        call: &mut AttentionCall<'_>,
    ) -> Result<Option<Residual>> {
        let Some(Parts { norms, projections, out, feed_forward }) = self.parts(call) else {
            return Ok(None);
        };
        // What has a branch comes from a block without these kernels, which the next ones will hardly have.
        let sum = &stream.sum;
        if stream.branch.is_some() || sum.dim() != 3 {
            return Ok(None);
        }
        self.attention.check_call(call, sum.size()[1])?;
        let [first, second] = norms.map(RmsNorm::as_input_norm);
        let (Some(first), Some(second)) = (first, second) else { return Ok(None) };
        let layers = projections.map(|layer| (&layer.ws, layer.bs.as_ref()));
        let Some(projected) = normed_linear_each(sum, first, layers)? else { return Ok(None) };
        let attended = self.attention.attended(projected, std::mem::take(call))?;
        let sum = linear_add(&attended, &out.ws, sum)?;
        let SwiGlu { gate, up, down, .. } = feed_forward;
        let sum = match normed_gate(&sum, second, [&gate.ws, &up.ws])? {
            Some(hidden) => linear_add(&hidden, &down.ws, &sum)?,
            None => feed_forward.f_forward(&norms[1].f_forward(&sum)?)?.f_add(&sum)?,
        };
        Ok(Some(Residual::new(sum)))
    }

    fn parts(&self, call: &AttentionCall<'_>) -> Option<Parts<'_>> {
        if call.places.is_none() || (call.train && self.dropout > 0.0) {
            return None;
        }
        let (Norm::Rms(first), Norm::Rms(second)) = (&self.norms[0], &self.norms[1]) else {
            return None;
        };
        let FeedForward::SwiGlu(feed_forward) = &self.feed_forward else { return None };
        let (projections, out) = self.attention.layers()?;
        let SwiGlu { gate, up, down, .. } = feed_forward;
        let has_plain_layers =
            projections.into_iter().chain([out, gate, up, down]).all(|layer| layer.lora.is_none());
        let is_known = has_plain_layers && out.bs.is_none() && feed_forward.op() == MlpOp::Fused;
        is_known.then_some(Parts { norms: [first, second], projections, out, feed_forward })
    }
}
