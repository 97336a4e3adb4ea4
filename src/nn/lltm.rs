//! The LLTM as a recurrent layer that runs step by step.

use crate::check::Check;
use crate::ops::{f_lltm_cell, lltm_cell_reference};
use std::borrow::Borrow;
use tch::nn::{Init, Path, RNN};
use tch::{Device, Kind, Tensor};

/// How the cell is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LltmOp {
    /// With [`lltm_cell`](crate::ops::lltm_cell).
    #[default]
    Fused,
    /// With [`lltm_cell_reference`], in plain tch operations, for comparison.
    Composite,
}

/// Configuration of an [`Lltm`].
#[derive(Clone, Copy, Debug, Default)]
pub struct LltmConfig {
    /// How the cell is computed.
    pub op: LltmOp,
}

/// The state (h, c); each tensor is `[B, H]`.
#[derive(Debug)]
pub struct LltmState(pub (Tensor, Tensor));

impl LltmState {
    /// The hidden state, which is also the layer's output.
    pub fn h(&self) -> Tensor {
        self.0.0.shallow_clone()
    }

    /// The cell state.
    pub fn c(&self) -> Tensor {
        self.0.1.shallow_clone()
    }

    /// The same values, detached from the graph. Use it between the pieces of a long sequence
    /// (truncated backpropagation through time).
    #[must_use]
    pub fn detach(&self) -> LltmState {
        LltmState((self.0.0.detach(), self.0.1.detach()))
    }
}

/// A recurrent layer of LLTM cells that share their parameters. Made by [`lltm`].
#[derive(Debug)]
pub struct Lltm {
    /// `[3H, H + F]`; see [`lltm_cell`](crate::ops::lltm_cell).
    pub weights: Tensor,
    /// `[3H]`.
    pub bias: Tensor,
    hidden_dim: i64,
    config: LltmConfig,
}

/// Makes a layer with its parameters in `vs`, under the names of PyTorch's tutorial: `weights` and
/// `bias`. They are drawn uniformly from ±1/√H.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{RNN, VarStore}};
/// use tch_extension::nn::{LltmConfig, lltm};
///
/// let vs = VarStore::new(Device::Cpu);
/// let layer = lltm(vs.root(), 5, 8, LltmConfig::default());
/// let input = Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu)); // [B, T, F]
/// let (output, state) = layer.seq(&input);
/// assert_eq!(output.size(), [2, 7, 8]);
/// assert_eq!(output.select(1, 6), state.h());
/// ```
///
/// # Panics
/// When the input size is negative or the hidden size is below 1.
pub fn lltm<'a, T: Borrow<Path<'a>>>(
    vs: T,
    in_dim: i64,
    hidden_dim: i64,
    config: LltmConfig,
) -> Lltm {
    assert!(hidden_dim >= 1, "nn::lltm: hidden_dim: expected at least 1, got {hidden_dim}");
    assert!(in_dim >= 0, "nn::lltm: in_dim: expected at least 0, got {in_dim}");
    let vs = vs.borrow();
    let bound = 1.0 / (hidden_dim as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    Lltm {
        weights: vs.var("weights", &[3 * hidden_dim, hidden_dim + in_dim], init),
        bias: vs.var("bias", &[3 * hidden_dim], init),
        hidden_dim,
        config,
    }
}

impl Lltm {
    /// The hidden size H.
    pub fn hidden_dim(&self) -> i64 {
        self.hidden_dim
    }

    /// Like [`RNN::step`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the input or the state does not fit this layer; see [`f_lltm_cell`].
    pub fn f_step(&self, input: &Tensor, state: &LltmState) -> crate::Result<LltmState> {
        let cell = match self.config.op {
            LltmOp::Fused => f_lltm_cell,
            LltmOp::Composite => lltm_cell_reference,
        };
        let (h, c) = &state.0;
        cell(input, &self.weights, Some(&self.bias), (h, c)).map(LltmState)
    }

    /// Like [`RNN::seq_init`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// As for [`Lltm::f_step`], and when the input is not `[B, T, F]`.
    pub fn f_seq_init(
        &self,
        input: &Tensor,
        state: &LltmState,
    ) -> crate::Result<(Tensor, LltmState)> {
        let batch = self.check_sequence(input, state)?;
        let mut state = LltmState((state.h(), state.c()));
        let mut outputs = Vec::new();
        for step in input.f_unbind(1)? {
            state = self.f_step(&step, &state)?;
            outputs.push(state.h());
        }
        let output = if outputs.is_empty() {
            // `stack` accepts no empty list. The output of a sequence without steps has no steps.
            Tensor::f_zeros([batch, 0, self.hidden_dim], self.options())?
        } else {
            Tensor::f_stack(&outputs, 1)?
        };
        Ok((output, state))
    }

    /// Checks the whole sequence and returns the batch size. Each step checks its own input, but
    /// there may be no step.
    fn check_sequence(&self, input: &Tensor, state: &LltmState) -> crate::Result<i64> {
        let weights = &crate::check!("nn::Lltm", "weights", self.weights);
        crate::check!("nn::Lltm", input).defined()?.dim(3, "[B, T, F]")?.like(weights)?;
        let (batch, steps, _) = input.size3()?;
        let features = self.weights.size2()?.1 - self.hidden_dim;
        crate::check!("nn::Lltm", input).shape("[B, T, F]", &[batch, steps, features])?;
        for (name, tensor) in [("h", &state.0.0), ("c", &state.0.1)] {
            let check = Check::new("nn::Lltm", name, tensor).defined()?.like(weights)?;
            check.shape("[B, H]", &[batch, self.hidden_dim])?;
        }
        Ok(batch)
    }

    fn options(&self) -> (Kind, Device) {
        (self.weights.kind(), self.weights.device())
    }
}

impl RNN for Lltm {
    type State = LltmState;

    fn zero_state(&self, batch_dim: i64) -> LltmState {
        let zeros = || Tensor::zeros([batch_dim, self.hidden_dim], self.options());
        LltmState((zeros(), zeros()))
    }

    fn step(&self, input: &Tensor, state: &LltmState) -> LltmState {
        self.f_step(input, state).unwrap_or_else(|error| panic!("{error}"))
    }

    fn seq_init(&self, input: &Tensor, state: &LltmState) -> (Tensor, LltmState) {
        self.f_seq_init(input, state).unwrap_or_else(|error| panic!("{error}"))
    }
}
