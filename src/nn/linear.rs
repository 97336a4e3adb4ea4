//! A linear layer as a module.

use super::Functional;
use crate::ops::{f_linear, f_linear_each, f_linear_parts};
use crate::{Error, Result, check};
use std::borrow::Borrow;
use tch::nn::{Init, LinearConfig, Module, Path};
use tch::{Kind, Tensor};

/// A linear layer that uses [`ops::linear`](crate::ops::linear()). Made by [`linear`].
#[derive(Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub ws: Tensor,
    /// `[out]`.
    pub bs: Option<Tensor>,
    /// A low-rank adapter of the weight, if [`Linear::add_lora`] made one.
    pub lora: Option<Lora>,
}

/// A low-rank adapter (LoRA) of a linear layer, with which the weight W acts as W + s B A.
#[derive(Debug)]
pub struct Lora {
    /// A, `[rank, in]`.
    pub a: Tensor,
    /// B, `[out, rank]`.
    pub b: Tensor,
    /// s, which is usually alpha / rank.
    pub scale: f64,
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
    Linear { ws: vs.var("weight", &[out_dim, in_dim], config.ws_init), bs, lora: None }
}

impl Linear {
    /// Like [`Module::forward`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the input does not fit this layer; see [`f_linear`].
    pub fn f_forward(&self, input: &Tensor) -> Result<Tensor> {
        match &self.lora {
            None => f_linear(input, &self.ws, self.bs.as_ref()),
            Some(lora) => self.adapted(lora, input),
        }
    }

    /// The outputs of three layers for one input.
    pub(super) fn f_forward_each(layers: [&Linear; 3], input: &Tensor) -> Result<[Tensor; 3]> {
        let bases = layers.map(|layer| (&layer.ws, layer.bs.as_ref()));
        if layers.iter().all(|layer| layer.lora.is_none()) {
            return f_linear_each(input, bases);
        }
        let (rows, size) = rows_of(input)?;
        let outputs = f_linear_each(&rows, bases)?;
        add_adapters(&rows, &size, outputs, layers.map(|layer| layer.lora.as_ref()))
    }

    /// Adds an adapter, whose output is zero at first, in place of one that the layer may have:
    ///
    /// ```text
    /// y = x Wᵀ + b + scale (x Aᵀ) Bᵀ
    /// ```
    ///
    /// Its parameters have PEFT's names, `lora_A.weight` and `lora_B.weight`, and initial values: A is
    /// uniform within ±1/√in, and B is zero. The layer computes with both in the kind of x Wᵀ, so that they may
    /// be `Float` next to a frozen weight of a half kind, under autocast or not. The second product is added to
    /// the output in place.
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn::{Module, VarStore}};
    /// use tch_extension::nn::linear;
    ///
    /// let (mut base, adapters) = (VarStore::new(Device::Cpu), VarStore::new(Device::Cpu));
    /// let mut layer = linear(base.root(), 5, 8, Default::default());
    /// base.freeze();
    /// let (rank, alpha) = (2, 4.0);
    /// layer.add_lora(adapters.root(), rank, alpha / rank as f64);
    /// let input = Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu));
    /// layer.forward(&input).sum(Kind::Float).backward(); // only the adapter gets gradients
    ///
    /// let output = layer.forward(&input);
    /// layer.f_merge_lora()?; // W + scale B A
    /// assert!(layer.forward(&input).allclose(&output, 1e-5, 1e-5, false));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// Source: <https://huggingface.co/docs/peft/package_reference/lora>.
    pub fn add_lora<'a, T: Borrow<Path<'a>>>(&mut self, vs: T, rank: i64, scale: f64) {
        let (vs, size) = (vs.borrow(), self.ws.size());
        let bound = 1.0 / (size[1] as f64).sqrt();
        let uniform = Init::Uniform { lo: -bound, up: bound };
        let a = (vs / "lora_A").var("weight", &[rank, size[1]], uniform);
        let b = (vs / "lora_B").var("weight", &[size[0], rank], Init::Const(0.0));
        self.lora = Some(Lora { a, b, scale });
    }

    /// Makes the adapter, if there is one, a part of the weight, which keeps its memory. The sum is computed
    /// in `Float`, or `Double` if the weight is, and rounded once.
    ///
    /// # Errors
    /// If an operation of libtorch fails.
    pub fn f_merge_lora(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        if let Some(Lora { a, b, scale }) = &self.lora {
            let wide = if self.ws.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
            let [a, b, weight] = [a, b, &self.ws].map(|factor| factor.f_to_kind(wide));
            let sum = b?.f_matmul(&a?)?.f_mul_scalar(*scale)?.f_add(&weight?)?;
            self.ws.f_copy_(&sum)?;
        }
        self.lora = None;
        Ok(())
    }

    /// The output with an adapter.
    fn adapted(&self, lora: &Lora, input: &Tensor) -> Result<Tensor> {
        let (rows, size) = rows_of(input)?;
        let output = f_linear(&rows, &self.ws, self.bs.as_ref())?;
        let [output] = add_adapters(&rows, &size, [output], [Some(lora)])?;
        Ok(output)
    }

    /// The output in three parts of these sizes; see [`f_linear_parts`].
    pub(super) fn f_forward_parts(&self, input: &Tensor, sizes: [i64; 3]) -> Result<[Tensor; 3]> {
        let Some(lora) = &self.lora else {
            return f_linear_parts(input, &self.ws, self.bs.as_ref(), sizes);
        };
        // The weight is frozen as a rule, so that its gradient needs no concatenation.
        let parts = self.adapted(lora, input)?.f_split_with_sizes(sizes, -1)?;
        parts.try_into().map_err(|_| Error::msg("nn::Linear: internal error: expected three parts"))
    }
}

impl Functional for Linear {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let lora = self.lora.as_ref().map(|Lora { a, b, scale }| Lora {
            a: replace(a),
            b: replace(b),
            scale: *scale,
        });
        Linear { ws: replace(&self.ws), bs: self.bs.as_ref().map(replace), lora }
    }
}

/// The input as rows, so that what is changed in place is no view, and its size without the features.
fn rows_of(input: &Tensor) -> Result<(Tensor, Vec<i64>)> {
    check!("nn::Linear", input).defined()?;
    let mut size = input.size();
    let features = size.pop().unwrap_or(1);
    Ok((input.f_reshape([-1, features])?, size))
}

/// Adds the adapters of layers of one input to their outputs, in place. The factors A are one, so that the
/// input is read once, and its gradient made once.
fn add_adapters<const N: usize>(
    rows: &Tensor,
    size: &[i64],
    outputs: [Tensor; N],
    adapters: [Option<&Lora>; N],
) -> Result<[Tensor; N]> {
    let all: Vec<&Tensor> = adapters.iter().flatten().map(|lora| &lora.a).collect();
    let ranks = all.iter().map(|a| a.size()[0]).collect::<Vec<_>>();
    // Autocast does not see operations in place.
    let kind = outputs[0].f_kind()?;
    let a = if let [a] = all[..] { a.shallow_clone() } else { Tensor::f_cat(&all, 0)? };
    let low = f_linear(rows, &a.f_to_kind(kind)?, None)?;
    let mut low = low.f_split_with_sizes(&ranks, 1)?.into_iter();
    let sums = outputs.into_iter().zip(adapters).map(|(mut output, lora)| {
        if let Some((lora, low)) = lora.and_then(|lora| Some((lora, low.next()?))) {
            let b = lora.b.f_mul_scalar(lora.scale)?.f_to_kind(kind)?;
            output = output.f_addmm_(&low, &b.f_tr()?)?;
        }
        let size = [size, &[output.size2()?.1]].concat();
        Ok(output.f_view(size.as_slice())?)
    });
    let found = sums.collect::<Result<Vec<_>>>()?;
    found.try_into().map_err(|_| Error::msg("nn::Linear: internal error: a layer is missing"))
}

impl Module for Linear {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.f_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }
}
