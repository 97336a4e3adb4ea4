//! Rotary position embedding as a layer.

use crate::ops::{RopeOptions, RopeScaling, f_rope, f_scaled_rope_tables, rope_reference};
use crate::{Result, check};
use tch::{Device, Kind, Tensor};

/// How the layer is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RopeOp {
    /// With [`rope`](crate::ops::rope()).
    #[default]
    Fused,
    /// With [`rope_reference`], in plain tch operations, for comparison.
    Composite,
}

/// Configuration of a [`Rope`].
#[derive(Clone, Copy, Debug)]
pub struct RopeConfig {
    /// How many positions the tables have.
    pub positions: i64,
    /// The base of the angles; see [`rope_tables`](crate::ops::rope_tables()).
    pub base: f64,
    /// How the angles are changed for longer sequences.
    pub scaling: RopeScaling,
    /// Whether pairs are interleaved; see [`RopeOptions`].
    pub interleaved: bool,
    /// The kind of the tables: `Float` suits q and k of half kinds, too.
    pub kind: Kind,
    /// How the layer is computed.
    pub op: RopeOp,
}

impl Default for RopeConfig {
    fn default() -> Self {
        RopeConfig {
            positions: 4096,
            base: 10000.0,
            scaling: RopeScaling::None,
            interleaved: false,
            kind: Kind::Float,
            op: RopeOp::default(),
        }
    }
}

/// A layer that rotates q and k. Made by [`rope`].
#[derive(Debug)]
pub struct Rope {
    /// `[positions, dim / 2]`; see [`rope_tables`](crate::ops::rope_tables()).
    pub cos: Tensor,
    /// `[positions, dim / 2]`
    pub sin: Tensor,
    config: RopeConfig,
}

/// Makes a layer that rotates the first `dim` values of each head, mostly all of them. Its tables are no
/// parameters: they are not trained, and not part of a `VarStore` or its file.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::nn::{RopeConfig, rope};
///
/// let layer = rope(64, Device::Cpu, RopeConfig::default());
/// let random = |heads| Tensor::randn([2, 7, heads, 64], (Kind::Float, Device::Cpu));
/// let (q, k) = layer.forward(&random(8), &random(2), 0);
/// assert_eq!((q.size(), k.size()), (vec![2, 7, 8, 64], vec![2, 7, 2, 64]));
/// ```
///
/// # Panics
/// When the tables cannot be made; see [`f_scaled_rope_tables`].
pub fn rope(dim: i64, device: Device, config: RopeConfig) -> Rope {
    let RopeConfig { positions, base, scaling, kind, .. } = config;
    let tables = f_scaled_rope_tables(positions, dim, base, scaling, (kind, device));
    let (cos, sin) = tables.unwrap_or_else(|error| panic!("nn::rope: {error}"));
    Rope { cos, sin, config }
}

impl Rope {
    /// The layer for tokens at positions `[B, T]`, of kind `Int64` and on its device, for example
    /// [`Packed::f_positions`](crate::nn::Packed::f_positions): its tables have a row for each token, and its
    /// offset is 0. Make it once for all layers of a model. A position that the tables do not have is an error
    /// on the CPU, and ends the process' use of CUDA.
    ///
    /// # Errors
    /// When the positions have another kind, device or shape than stated, and if libtorch fails.
    pub fn f_at(&self, positions: &Tensor) -> Result<Rope> {
        let of = check!("nn::Rope", positions).defined()?.kind_in(&[Kind::Int64])?;
        of.dim(2, "[B, T]")?.same_device_as(&check!("nn::Rope", "cos", self.cos))?;
        let (b, t) = positions.size2()?;
        let positions = positions.f_reshape([-1])?;
        let rows = |table: &Tensor| -> Result<Tensor> {
            Ok(table.f_index_select(0, &positions)?.f_view([b, t, -1])?)
        };
        Ok(Rope { cos: rows(&self.cos)?, sin: rows(&self.sin)?, config: self.config })
    }

    /// Rotates `q` `[B, T, H, D]` and `k` `[B, T, Hk, D]`, whose first token has position `offset`.
    ///
    /// # Panics
    /// If [`Rope::f_forward`] returns an error.
    pub fn forward(&self, q: &Tensor, k: &Tensor, offset: i64) -> (Tensor, Tensor) {
        self.f_forward(q, k, offset).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Like [`Rope::forward`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the arguments do not fit this layer; see [`f_rope`].
    pub fn f_forward(&self, q: &Tensor, k: &Tensor, offset: i64) -> Result<(Tensor, Tensor)> {
        let op = match self.config.op {
            RopeOp::Fused => f_rope,
            RopeOp::Composite => rope_reference,
        };
        let options =
            RopeOptions { interleaved: self.config.interleaved, offset, ..Default::default() };
        op(q, k, &self.cos, &self.sin, &options)
    }
}
