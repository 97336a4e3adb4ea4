//! Layer normalisation as a module.

use super::Functional;
use crate::ops::{
    AddLayerNormOptions, add_layer_norm_reference, f_add_layer_norm, f_layer_norm,
    layer_norm_reference,
};
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{Init, Module, Path};

/// How the layer is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LayerNormOp {
    /// With [`layer_norm`](crate::ops::layer_norm()).
    #[default]
    Fused,
    /// With [`layer_norm_reference`], in plain tch operations, for comparison.
    Composite,
}

/// Configuration of a [`LayerNorm`].
#[derive(Clone, Copy, Debug)]
pub struct LayerNormConfig {
    /// The number that is added to the variance.
    pub eps: f64,
    /// Whether the layer has a weight and, if `bias` is true, a bias.
    pub elementwise_affine: bool,
    /// Whether there is a bias in addition to the weight.
    pub bias: bool,
    /// The initial value of the weight.
    pub ws_init: Init,
    /// The initial value of the bias.
    pub bs_init: Init,
    /// How the layer is computed.
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

/// A module that normalises over the trailing dimensions. Made by [`layer_norm`].
#[derive(Debug)]
pub struct LayerNorm {
    /// `[normalized_shape]`; see [`layer_norm`](crate::ops::layer_norm()).
    pub weight: Option<Tensor>,
    /// `[normalized_shape]`.
    pub bias: Option<Tensor>,
    normalized_shape: Vec<i64>,
    config: LayerNormConfig,
}

/// Makes a layer with its parameters in `vs`, under the names that PyTorch and tch use: `weight`
/// and `bias`.
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
/// When the normalised shape has no dimensions or a negative size.
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
    /// The sizes of the dimensions that are normalised over.
    pub fn normalized_shape(&self) -> &[i64] {
        &self.normalized_shape
    }

    /// Like [`Module::forward`], but returns an error instead of panicking.
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

impl LayerNorm {
    /// Adds a branch to a residual stream and normalises the sum: returns the sum and its norm, as
    /// [`add_layer_norm`](crate::ops::add_layer_norm()) does. `dropout` is the probability that a value of
    /// the branch becomes zero; pass 0 in evaluation.
    ///
    /// # Panics
    /// When [`LayerNorm::f_forward_add`] returns an error.
    pub fn forward_add(&self, input: &Tensor, residual: &Tensor, dropout: f64) -> (Tensor, Tensor) {
        self.f_forward_add(input, residual, dropout).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Like [`LayerNorm::forward_add`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When a tensor does not fit this layer; see [`f_add_layer_norm`].
    pub fn f_forward_add(
        &self,
        input: &Tensor,
        residual: &Tensor,
        dropout: f64,
    ) -> crate::Result<(Tensor, Tensor)> {
        let op = match self.config.op {
            LayerNormOp::Fused => f_add_layer_norm,
            LayerNormOp::Composite => add_layer_norm_reference,
        };
        let (shape, weight) = (&self.normalized_shape, self.weight.as_ref());
        let options = AddLayerNormOptions { eps: self.config.eps, dropout };
        op(input, residual, shape, weight, self.bias.as_ref(), &options)
    }
}

impl Functional for LayerNorm {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        LayerNorm {
            weight: self.weight.as_ref().map(&mut *replace),
            bias: self.bias.as_ref().map(&mut *replace),
            normalized_shape: self.normalized_shape.clone(),
            config: self.config,
        }
    }
}

impl Module for LayerNorm {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}
