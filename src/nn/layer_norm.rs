//! Layer normalisation as a layer.

use crate::ops::{f_layer_norm, layer_norm_reference};
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{Init, Module, Path};

/// How the layer is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerNormOp {
    /// By [`layer_norm`](crate::ops::layer_norm()).
    #[default]
    Fused,
    /// By [`layer_norm_reference`], in plain tch operations: for comparisons.
    Composite,
}

/// Configuration of a [`LayerNorm`].
#[derive(Clone, Copy, Debug)]
pub struct LayerNormConfig {
    /// Added to the variance.
    pub eps: f64,
    /// Whether the layer has a weight and a bias at all.
    pub elementwise_affine: bool,
    /// Whether, beside a weight, there is a bias.
    pub bias: bool,
    /// What the weight begins with.
    pub ws_init: Init,
    /// What the bias begins with.
    pub bs_init: Init,
    /// How it is computed.
    pub op: LayerNormOp,
}

impl Default for LayerNormConfig {
    fn default() -> Self {
        LayerNormConfig {
            eps: 1e-5,
            elementwise_affine: true,
            bias: true,
            ws_init: Init::Const(1.0),
            bs_init: Init::Const(0.0),
            op: LayerNormOp::default(),
        }
    }
}

/// Normalises over the trailing dimensions. Made by [`layer_norm`].
#[derive(Debug)]
pub struct LayerNorm {
    /// `[normalized_shape]`; see [`layer_norm`](crate::ops::layer_norm()).
    pub weight: Option<Tensor>,
    /// `[normalized_shape]`.
    pub bias: Option<Tensor>,
    normalized_shape: Vec<i64>,
    config: LayerNormConfig,
}

/// A new layer, with its parameters in `vs` under PyTorch's and tch's names `weight` and `bias`.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{Module, VarStore}};
/// use tch_extension::nn::{LayerNormConfig, layer_norm};
///
/// let vs = VarStore::new(Device::Cpu);
/// let layer = layer_norm(vs.root(), &[8], LayerNormConfig::default());
/// let output = layer.forward(&Tensor::randn([2, 7, 8], (Kind::Float, Device::Cpu)));
/// assert_eq!(output.size(), [2, 7, 8]);
/// assert!(output.mean(Kind::Float).double_value(&[]).abs() < 1e-6);
/// ```
///
/// # Panics
/// On a normalised shape without dimensions or with a negative size.
pub fn layer_norm<'a, T: Borrow<Path<'a>>>(
    vs: T,
    normalized_shape: &[i64],
    config: LayerNormConfig,
) -> LayerNorm {
    assert!(
        !normalized_shape.is_empty() && normalized_shape.iter().all(|&size| size >= 0),
        "nn::layer_norm: normalized_shape: expected one size or more, none negative, got {normalized_shape:?}"
    );
    let vs = vs.borrow();
    let parameter = |name, wanted: bool, init| wanted.then(|| vs.var(name, normalized_shape, init));
    LayerNorm {
        weight: parameter("weight", config.elementwise_affine, config.ws_init),
        bias: parameter("bias", config.elementwise_affine && config.bias, config.bs_init),
        normalized_shape: normalized_shape.to_vec(),
        config,
    }
}

impl LayerNorm {
    /// The sizes that are normalised over.
    pub fn normalized_shape(&self) -> &[i64] {
        &self.normalized_shape
    }

    /// [`Module::forward`], with an error instead of a panic.
    ///
    /// # Errors
    /// When the input does not fit this layer; see [`f_layer_norm`].
    pub fn f_forward(&self, input: &Tensor) -> crate::Result<Tensor> {
        let op = match self.config.op {
            LayerNormOp::Fused => f_layer_norm,
            LayerNormOp::Composite => layer_norm_reference,
        };
        op(input, &self.normalized_shape, self.weight.as_ref(), self.bias.as_ref(), self.config.eps)
    }
}

impl Module for LayerNorm {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}
