//! The feed-forward parts of transformers as modules.

use super::{Functional, Linear, linear};
use crate::ops::{
    GeluMlpOptions, SwigluMlpOptions, f_gelu_mlp, f_swiglu_mlp, gelu_mlp_reference,
    swiglu_mlp_reference,
};
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{LinearConfig, Module, Path};

/// How a [`Mlp`] or a [`SwiGlu`] is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MlpOp {
    /// With [`gelu_mlp`](crate::ops::gelu_mlp()) or [`swiglu_mlp`](crate::ops::swiglu_mlp()).
    #[default]
    Fused,
    /// In plain tch operations, for comparison.
    Composite,
}

/// Configuration of a [`Mlp`].
#[derive(Clone, Copy, Debug)]
pub struct MlpConfig {
    /// Whether the layers have biases, and the initial values.
    pub linear: LinearConfig,
    /// The activation, and what is kept for the backward pass.
    pub options: GeluMlpOptions,
    /// The names of the two layers.
    pub names: [&'static str; 2],
    /// How the module is computed.
    pub op: MlpOp,
}

impl Default for MlpConfig {
    fn default() -> Self {
        MlpConfig {
            linear: LinearConfig::default(),
            options: GeluMlpOptions::default(),
            names: ["c_fc", "c_proj"],
            op: MlpOp::default(),
        }
    }
}

/// Two linear layers with an activation between them. Made by [`mlp`].
#[derive(Debug)]
pub struct Mlp {
    /// From the features to the hidden ones.
    pub fc: Linear,
    /// From the hidden features back.
    pub proj: Linear,
    config: MlpConfig,
}

/// Makes the feed-forward part of a transformer, which uses [`ops::gelu_mlp`](crate::ops::gelu_mlp()):
/// from `dim` features to `hidden_dim` and back. Its layers are named as in GPT-2, `c_fc` and `c_proj`,
/// unless [`MlpConfig::names`] says otherwise, with weights as torch.nn.Linear has them. Their initial
/// values are those of [`linear`].
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{Module, VarStore}};
/// use tch_extension::nn::mlp;
///
/// let vs = VarStore::new(Device::Cpu);
/// let layer = mlp(vs.root() / "mlp", 8, 32, Default::default());
/// let output = layer.forward(&Tensor::randn([2, 7, 8], (Kind::Float, Device::Cpu)));
/// assert_eq!(output.size(), [2, 7, 8]);
/// assert!(vs.variables().contains_key("mlp.c_fc.weight"));
/// ```
pub fn mlp<'a, T: Borrow<Path<'a>>>(vs: T, dim: i64, hidden_dim: i64, config: MlpConfig) -> Mlp {
    let [fc, proj] = config.names.map(|name| vs.borrow() / name);
    Mlp {
        fc: linear(fc, dim, hidden_dim, config.linear),
        proj: linear(proj, hidden_dim, dim, config.linear),
        config,
    }
}

impl Mlp {
    /// The linear layers with their names, for example for [`Linear::add_lora`].
    pub fn linears_mut(&mut self) -> [(&'static str, &mut Linear); 2] {
        let [fc, proj] = self.config.names;
        [(fc, &mut self.fc), (proj, &mut self.proj)]
    }

    /// Like [`Module::forward`], but returns an error instead of panicking. With an adapter
    /// ([`Linear::add_lora`]), the layers are computed one by one.
    ///
    /// # Errors
    /// When the input does not fit this module; see [`f_gelu_mlp`].
    pub fn f_forward(&self, input: &Tensor) -> crate::Result<Tensor> {
        if self.fc.lora.is_some() || self.proj.lora.is_some() {
            let activation = self.config.options.activation;
            return self.proj.f_forward(&activation.f_apply(&self.fc.f_forward(input)?)?);
        }
        let op = match self.config.op {
            MlpOp::Fused => f_gelu_mlp,
            MlpOp::Composite => gelu_mlp_reference,
        };
        let (fc, proj) = (&self.fc, &self.proj);
        op(input, &fc.ws, fc.bs.as_ref(), &proj.ws, proj.bs.as_ref(), &self.config.options)
    }
}

impl Functional for Mlp {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let [fc, proj] = [&self.fc, &self.proj].map(|layer| layer.with_tensors(replace));
        Mlp { fc, proj, ..*self }
    }
}

impl Module for Mlp {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Configuration of a [`SwiGlu`].
#[derive(Clone, Copy, Debug)]
pub struct SwiGluConfig {
    /// The initial values of the weights. There are no biases.
    pub linear: LinearConfig,
    /// What is kept for the backward pass.
    pub options: SwigluMlpOptions,
    /// The names of the three layers.
    pub names: [&'static str; 3],
    /// How the module is computed.
    pub op: MlpOp,
}

impl Default for SwiGluConfig {
    fn default() -> Self {
        SwiGluConfig {
            linear: LinearConfig::default(),
            options: SwigluMlpOptions::default(),
            names: ["gate_proj", "up_proj", "down_proj"],
            op: MlpOp::default(),
        }
    }
}

/// Two linear layers, the product of one and the SiLU of the other, and a third layer. Made by
/// [`swiglu`].
#[derive(Debug)]
pub struct SwiGlu {
    /// From the features to the hidden ones; its output goes through SiLU.
    pub gate: Linear,
    /// From the features to the hidden ones.
    pub up: Linear,
    /// From the hidden features back.
    pub down: Linear,
    config: SwiGluConfig,
}

/// Makes the feed-forward part of Llama, which uses [`ops::swiglu_mlp`](crate::ops::swiglu_mlp()): from
/// `dim` features to `hidden_dim` and back. Its layers are named as in Hugging Face's models,
/// `gate_proj`, `up_proj` and `down_proj`, unless [`SwiGluConfig::names`] says otherwise. Their initial
/// values are those of [`linear`].
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{Module, VarStore}};
/// use tch_extension::nn::swiglu;
///
/// let vs = VarStore::new(Device::Cpu);
/// let layer = swiglu(vs.root() / "mlp", 8, 32, Default::default());
/// let output = layer.forward(&Tensor::randn([2, 7, 8], (Kind::Float, Device::Cpu)));
/// assert_eq!(output.size(), [2, 7, 8]);
/// assert!(vs.variables().contains_key("mlp.gate_proj.weight"));
/// ```
pub fn swiglu<'a, T: Borrow<Path<'a>>>(
    vs: T,
    dim: i64,
    hidden_dim: i64,
    config: SwiGluConfig,
) -> SwiGlu {
    let layer = |name: &'static str, in_dim: i64, out_dim: i64| {
        let config = LinearConfig { bias: false, ..config.linear };
        linear(vs.borrow() / name, in_dim, out_dim, config)
    };
    let [gate, up, down] = config.names;
    SwiGlu {
        gate: layer(gate, dim, hidden_dim),
        up: layer(up, dim, hidden_dim),
        down: layer(down, hidden_dim, dim),
        config,
    }
}

impl SwiGlu {
    /// How the module is computed.
    #[cfg(feature = "norm")]
    pub(super) fn op(&self) -> MlpOp {
        self.config.op
    }

    /// The linear layers with their names, for example for [`Linear::add_lora`].
    pub fn linears_mut(&mut self) -> [(&'static str, &mut Linear); 3] {
        let [gate, up, down] = self.config.names;
        [(gate, &mut self.gate), (up, &mut self.up), (down, &mut self.down)]
    }

    /// Like [`Module::forward`], but returns an error instead of panicking. With an adapter
    /// ([`Linear::add_lora`]), the layers are computed one by one.
    ///
    /// # Errors
    /// When the input does not fit this module; see [`f_swiglu_mlp`].
    pub fn f_forward(&self, input: &Tensor) -> crate::Result<Tensor> {
        let SwiGlu { gate, up, down, config } = self;
        if [gate, up, down].iter().any(|layer| layer.lora.is_some()) {
            let hidden = gate.f_forward(input)?.f_silu()?.f_mul(&up.f_forward(input)?)?;
            return down.f_forward(&hidden);
        }
        let [gate, up, down] = [&gate.ws, &up.ws, &down.ws];
        match config.op {
            MlpOp::Fused => f_swiglu_mlp(input, gate, up, down, &config.options),
            MlpOp::Composite => swiglu_mlp_reference(input, gate, up, down),
        }
    }
}

impl Functional for SwiGlu {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let layers = [&self.gate, &self.up, &self.down];
        let [gate, up, down] = layers.map(|layer| layer.with_tensors(replace));
        SwiGlu { gate, up, down, ..*self }
    }
}

impl Module for SwiGlu {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}
