//! RMS normalisation as a module.

use super::Functional;
use crate::ops::{
    AddRmsNormOptions, add_rms_norm_reference, f_add_rms_norm, f_rms_norm, rms_norm_reference,
};
#[cfg(feature = "mlp")]
use crate::ops::{InputNorm, rms_norm::default_eps};
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{Init, Module, Path};

/// How the layer is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RmsNormOp {
    /// With [`rms_norm`](crate::ops::rms_norm()).
    #[default]
    Fused,
    /// With [`rms_norm_reference`], in plain tch operations, for comparison.
    Composite,
}

/// Configuration of a [`RmsNorm`].
#[derive(Clone, Copy, Debug)]
pub struct RmsNormConfig {
    /// The number that is added to the mean square; see [`rms_norm`](crate::ops::rms_norm()).
    pub eps: Option<f64>,
    /// Whether the layer has a weight.
    pub elementwise_affine: bool,
    /// The initial value of the weight.
    pub ws_init: Init,
    /// How the layer is computed.
    pub op: RmsNormOp,
}

impl Default for RmsNormConfig {
    fn default() -> Self {
        RmsNormConfig {
            eps: None,
            elementwise_affine: true,
            ws_init: Init::Const(1.0),
            op: RmsNormOp::default(),
        }
    }
}

/// A module that normalises over the trailing dimensions. Made by [`rms_norm`].
#[derive(Debug)]
pub struct RmsNorm {
    /// `[normalized_shape]`; see [`rms_norm`](crate::ops::rms_norm()).
    pub weight: Option<Tensor>,
    normalized_shape: Vec<i64>,
    config: RmsNormConfig,
}

/// Makes a layer with its parameter in `vs`, under the name that PyTorch uses: `weight`. The defaults
/// are those of torch.nn.RMSNorm.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{Module, VarStore}};
/// use tch_extension::nn::{RmsNormConfig, rms_norm};
///
/// let vs = VarStore::new(Device::Cpu);
/// let layer = rms_norm(vs.root(), &[8], RmsNormConfig::default());
/// let output = layer.forward(&Tensor::randn([2, 7, 8], (Kind::Float, Device::Cpu)));
/// assert_eq!(output.size(), [2, 7, 8]);
/// let mean_square = output.square().mean(Kind::Float).double_value(&[]);
/// assert!((mean_square - 1.0).abs() < 1e-5);
/// ```
///
/// # Panics
/// When the normalised shape has no dimensions or a negative size.
pub fn rms_norm<'a, T: Borrow<Path<'a>>>(
    vs: T,
    normalized_shape: &[i64],
    config: RmsNormConfig,
) -> RmsNorm {
    assert!(
        !normalized_shape.is_empty() && normalized_shape.iter().all(|&size| size >= 0),
        "nn::rms_norm: normalized_shape: expected one size or more, none negative, got {normalized_shape:?}"
    );
    let weight = || vs.borrow().var("weight", normalized_shape, config.ws_init);
    RmsNorm {
        weight: config.elementwise_affine.then(weight),
        normalized_shape: normalized_shape.to_vec(),
        config,
    }
}

impl RmsNorm {
    /// As a part of the product that follows it, if it is one of rows with a weight.
    #[cfg(feature = "mlp")]
    pub(super) fn as_input_norm(&self) -> Option<InputNorm<'_>> {
        let is_known = self.config.op == RmsNormOp::Fused && self.normalized_shape.len() == 1;
        let weight = self.weight.as_ref().filter(|_| is_known)?;
        let eps = self.config.eps.unwrap_or(default_eps(weight.kind()));
        Some(InputNorm { weight, eps })
    }

    /// The sizes of the dimensions that are normalised over.
    pub fn normalized_shape(&self) -> &[i64] {
        &self.normalized_shape
    }

    /// Like [`Module::forward`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the input does not fit this layer; see [`f_rms_norm`].
    pub fn f_forward(&self, input: &Tensor) -> crate::Result<Tensor> {
        let op = match self.config.op {
            RmsNormOp::Fused => f_rms_norm,
            RmsNormOp::Composite => rms_norm_reference,
        };
        op(input, &self.normalized_shape, self.weight.as_ref(), self.config.eps)
    }
}

impl RmsNorm {
    /// Adds a branch to a residual stream and normalises the sum: returns the sum and its norm, as
    /// [`add_rms_norm`](crate::ops::add_rms_norm()) does. `dropout` is the probability that a value of
    /// the branch becomes zero; pass 0 in evaluation.
    ///
    /// # Panics
    /// When [`RmsNorm::f_forward_add`] returns an error.
    pub fn forward_add(&self, input: &Tensor, residual: &Tensor, dropout: f64) -> (Tensor, Tensor) {
        self.f_forward_add(input, residual, dropout).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Like [`RmsNorm::forward_add`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When a tensor does not fit this layer; see [`f_add_rms_norm`].
    pub fn f_forward_add(
        &self,
        input: &Tensor,
        residual: &Tensor,
        dropout: f64,
    ) -> crate::Result<(Tensor, Tensor)> {
        let op = match self.config.op {
            RmsNormOp::Fused => f_add_rms_norm,
            RmsNormOp::Composite => add_rms_norm_reference,
        };
        let (shape, weight) = (&self.normalized_shape, self.weight.as_ref());
        let options = AddRmsNormOptions { eps: self.config.eps, dropout };
        op(input, residual, shape, weight, &options)
    }
}

impl Functional for RmsNorm {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        RmsNorm {
            weight: self.weight.as_ref().map(&mut *replace),
            normalized_shape: self.normalized_shape.clone(),
            config: self.config,
        }
    }
}

impl Module for RmsNorm {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}
