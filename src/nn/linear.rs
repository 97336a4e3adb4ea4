//! A linear layer as a module.

use crate::ops::{f_linear, f_linear_parts};
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{Init, LinearConfig, Module, Path};

/// A linear layer that uses [`ops::linear`](crate::ops::linear()). Made by [`linear`].
#[derive(Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub ws: Tensor,
    /// `[out]`.
    pub bs: Option<Tensor>,
}

/// Makes a layer that equals [`tch::nn::linear`] except for its operator. Its configuration,
/// parameter names (`weight` and `bias`) and initial values are tch's, so the weights of either can
/// be loaded into the other.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{Module, VarStore}};
/// use tch_extension::nn::linear;
///
/// let vs = VarStore::new(Device::Cpu);
/// let layer = linear(vs.root(), 5, 8, Default::default());
/// let output = layer.forward(&Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu)));
/// assert_eq!(output.size(), [2, 7, 8]);
/// ```
pub fn linear<'a, T: Borrow<Path<'a>>>(
    vs: T,
    in_dim: i64,
    out_dim: i64,
    config: LinearConfig,
) -> Linear {
    let vs = vs.borrow();
    let bias_init = || {
        let bound = 1.0 / (in_dim as f64).sqrt();
        config.bs_init.unwrap_or(Init::Uniform { lo: -bound, up: bound })
    };
    // The parameters are made in tch's order, so that the same seed gives the same numbers.
    let bs = config.bias.then(|| vs.var("bias", &[out_dim], bias_init()));
    Linear { ws: vs.var("weight", &[out_dim, in_dim], config.ws_init), bs }
}

impl Linear {
    /// Like [`Module::forward`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the input does not fit this layer; see [`f_linear`].
    pub fn f_forward(&self, input: &Tensor) -> crate::Result<Tensor> {
        f_linear(input, &self.ws, self.bs.as_ref())
    }

    /// The output in three parts of these sizes; see [`f_linear_parts`].
    pub(super) fn f_forward_parts(
        &self,
        input: &Tensor,
        sizes: [i64; 3],
    ) -> crate::Result<[Tensor; 3]> {
        f_linear_parts(input, &self.ws, self.bs.as_ref(), sizes)
    }
}

impl Module for Linear {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}
