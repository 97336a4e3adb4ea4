//! How tokens know their places.

use crate::config::ModelConfig;
use crate::family::{Llama, Member};
use anyhow::Result;
use tch::nn::Path;
use tch::{Kind, Tensor};
use tch_extension::nn::{Functional, Packed, RmsNorm, RmsNormConfig, rms_norm};
use tch_extension::ops::{RopeOptions, f_rope, f_scaled_rope_tables};

/// Queries and keys are rotated.
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
    /// What normalises them before that, in each layer. Empty unless it is Qwen 3.
    pub norms: Vec<[RmsNorm; 2]>,
}

impl Rotary {
    pub fn new(root: &Path, config: &ModelConfig, llama: &Llama) -> Result<Rotary> {
        let tables = (Kind::Float, root.device());
        let scaling = llama.scaling.of_tables();
        let (cos, sin) =
            f_scaled_rope_tables(config.context, llama.head_dim, llama.theta, scaling, tables)?;
        let norms = (0..config.layers).filter(|_| llama.member == Member::Qwen3).map(|layer| {
            let attention = root / "layers" / layer / "self_attn";
            let eps = RmsNormConfig { eps: Some(llama.eps), ..Default::default() };
            ["q_norm", "k_norm"].map(|name| rms_norm(&attention / name, &[llama.head_dim], eps))
        });
        Ok(Rotary { cos, sin, norms: norms.collect() })
    }

    /// Queries and keys of a layer, the first of which are at this place, or whose tokens have rows of the
    /// tables of their own.
    pub fn rotated(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        offset: i64,
        rows: Option<&[Tensor; 2]>,
    ) -> tch_extension::Result<(Tensor, Tensor)> {
        let (q, k) = match self.norms.get(layer) {
            Some([of_q, of_k]) => (of_q.f_forward(q)?, of_k.f_forward(k)?),
            None => (q.shallow_clone(), k.shallow_clone()),
        };
        let ([cos, sin], offset) = match rows {
            Some([cos, sin]) => ([cos, sin], 0),
            None => ([&self.cos, &self.sin], offset),
        };
        f_rope(&q, &k, cos, sin, &RopeOptions { offset, ..Default::default() })
    }

    /// What rotates queries and keys of one layer, as its first.
    pub fn of_layer(&self, layer: usize) -> Rotary {
        let mut one = self.with_tensors(&mut |tensor| tensor.shallow_clone());
        one.norms = one.norms.into_iter().skip(layer).take(1).collect();
        one
    }

    /// The tables' rows at positions `[B, T]`.
    pub fn rows(&self, positions: &Tensor) -> tch_extension::Result<[Tensor; 2]> {
        let (b, t) = positions.size2()?;
        let rows = |table: &Tensor| -> tch_extension::Result<Tensor> {
            let rows = table.f_index_select(0, &positions.f_view([-1])?)?;
            Ok(rows.f_view([b, t, -1])?)
        };
        Ok([rows(&self.cos)?, rows(&self.sin)?])
    }
}

impl Functional for Rotary {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let (cos, sin) = (replace(&self.cos), replace(&self.sin));
        let pairs = self.norms.iter();
        let norms = pairs.map(|pair| pair.each_ref().map(|norm| norm.with_tensors(replace)));
        Rotary { cos, sin, norms: norms.collect() }
    }
}

/// Where tokens are in their sequences.
#[derive(Clone, Copy)]
pub enum At<'a> {
    /// The first is there, in each row.
    Start(i64),
    /// One token of each row, `[B]`, on the device.
    Places(&'a Tensor),
    /// Rows have several sequences.
    Packed(&'a Packed),
}
