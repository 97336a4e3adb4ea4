//! Stacked LLTM layers that run whole sequences.

use super::LltmState;
use crate::check::Check;
use crate::ops::f_lltm;
use crate::{Result, check};
use std::borrow::Borrow;
use tch::nn::{Init, Path, RNN};
use tch::{Device, Kind, Tensor};

const OP: &str = "nn::LltmLayer";

/// Configuration of an [`LltmLayer`], like tch's [`RNNConfig`](tch::nn::RNNConfig).
#[derive(Clone, Copy, Debug)]
pub struct LltmLayerConfig {
    /// The number of stacked layers. The default is 1.
    pub num_layers: i64,
    /// The probability with which a value between two layers is set to zero in training. The
    /// default is 0.
    pub dropout: f64,
    /// Whether this is training. The default is true. [`LltmLayer::set_train`] changes it.
    pub train: bool,
    /// Whether input and output are `[B, T, …]` (the default) or `[T, B, …]`, which saves a copy.
    pub batch_first: bool,
}

impl Default for LltmLayerConfig {
    fn default() -> Self {
        LltmLayerConfig { num_layers: 1, dropout: 0.0, train: true, batch_first: true }
    }
}

/// Stacked LLTM layers. [`lltm`](crate::ops::lltm) computes each layer for all steps at once. Made
/// by [`lltm_layer`].
#[derive(Debug)]
pub struct LltmLayer {
    /// For each layer, `[3H, H + F]`. F is the number of the layer's input features: those of the
    /// input for the first layer, H for the others.
    pub weights: Vec<Tensor>,
    /// For each layer, `[3H]`.
    pub biases: Vec<Tensor>,
    hidden_dim: i64,
    config: LltmLayerConfig,
}

/// Makes layers with their parameters in `vs`, drawn uniformly from ±1/√H. The first layer's
/// parameters are called `weights` and `bias`, as those of [`lltm`](super::lltm()), so that files
/// of either can be loaded into the other. Those of the next layers are `weights_l1`, `bias_l1`,
/// and so on.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{RNN, VarStore}};
/// use tch_extension::nn::{LltmLayerConfig, lltm_layer};
///
/// let vs = VarStore::new(Device::Cpu);
/// let config = LltmLayerConfig { num_layers: 2, dropout: 0.1, ..Default::default() };
/// let layers = lltm_layer(vs.root(), 5, 8, config);
/// let input = Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu)); // [B, T, F]
/// let (output, state) = layers.seq(&input);
/// assert_eq!((output.size(), state.h().size()), (vec![2, 7, 8], vec![2, 2, 8]));
/// assert_eq!(output.select(1, 6), state.h().select(0, 1));
/// ```
///
/// # Panics
/// When the input size is negative, the hidden size or the number of layers is below 1, or the
/// dropout is not a probability.
pub fn lltm_layer<'a, T: Borrow<Path<'a>>>(
    vs: T,
    in_dim: i64,
    hidden_dim: i64,
    config: LltmLayerConfig,
) -> LltmLayer {
    let LltmLayerConfig { num_layers, dropout, .. } = config;
    assert!(hidden_dim >= 1, "{OP}: hidden_dim: expected at least 1, got {hidden_dim}");
    assert!(in_dim >= 0, "{OP}: in_dim: expected at least 0, got {in_dim}");
    assert!(num_layers >= 1, "{OP}: num_layers: expected at least 1, got {num_layers}");
    assert!((0.0..=1.0).contains(&dropout), "{OP}: dropout: expected a probability, got {dropout}");
    let vs = vs.borrow();
    let bound = 1.0 / (hidden_dim as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let parameters = |layer: i64| {
        let (suffix, features) =
            if layer == 0 { (String::new(), in_dim) } else { (format!("_l{layer}"), hidden_dim) };
        let weights =
            vs.var(&format!("weights{suffix}"), &[3 * hidden_dim, hidden_dim + features], init);
        (weights, vs.var(&format!("bias{suffix}"), &[3 * hidden_dim], init))
    };
    let (weights, biases) = (0..num_layers).map(parameters).unzip();
    LltmLayer { weights, biases, hidden_dim, config }
}

impl LltmLayer {
    /// The hidden size H.
    pub fn hidden_dim(&self) -> i64 {
        self.hidden_dim
    }

    /// Switches dropout on (for training) or off.
    pub fn set_train(&mut self, train: bool) {
        self.config.train = train;
    }

    /// Like [`RNN::step`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// As for [`LltmLayer::f_seq_init`]. The input is `[B, F]`.
    pub fn f_step(&self, input: &Tensor, state: &LltmState) -> Result<LltmState> {
        check!(OP, input).defined()?.dim(2, "[B, F]")?;
        let time = if self.config.batch_first { 1 } else { 0 };
        self.f_seq_init(&input.f_unsqueeze(time)?, state).map(|(_, state)| state)
    }

    /// Like [`RNN::seq_init`], but returns an error instead of panicking. It returns the last
    /// layer's output for all steps and the state of each layer after the last step; both tensors
    /// of the state are `[num_layers, B, H]`.
    ///
    /// # Errors
    /// When the input or the state does not fit these layers; see [`f_lltm`].
    pub fn f_seq_init(&self, input: &Tensor, state: &LltmState) -> Result<(Tensor, LltmState)> {
        self.check_sequence(input, state)?;
        let time_first = |tensor: &Tensor| -> Result<Tensor> {
            let tensor = tensor.shallow_clone();
            Ok(if self.config.batch_first { tensor.f_transpose(0, 1)? } else { tensor })
        };
        let mut values = time_first(input)?;
        let (mut last_h, mut last_c) = (Vec::new(), Vec::new());
        for (layer, (weight, bias)) in self.weights.iter().zip(&self.biases).enumerate() {
            if layer > 0 && self.config.train && self.config.dropout > 0.0 {
                values = values.f_dropout(self.config.dropout, true)?;
            }
            let (h, c) = (state.0.0.f_get(layer as i64)?, state.0.1.f_get(layer as i64)?);
            let (output, last) = f_lltm(&values, weight, Some(bias), (&h, &c))?;
            values = output;
            last_h.push(last.0);
            last_c.push(last.1);
        }
        let stack = |states: &[Tensor]| Tensor::f_stack(states, 0);
        Ok((time_first(&values)?, LltmState((stack(&last_h)?, stack(&last_c)?))))
    }

    fn check_sequence(&self, input: &Tensor, state: &LltmState) -> Result<()> {
        let weights = &check!(OP, "weights", self.weights[0]);
        let names = if self.config.batch_first { "[B, T, F]" } else { "[T, B, F]" };
        check!(OP, input).defined()?.dim(3, names)?;
        let batch = self.batch_of(input);
        let mut size = input.size();
        size[2] = self.weights[0].size2()?.1 - self.hidden_dim;
        check!(OP, input).shape(names, &size)?;
        for (name, tensor) in [("h", &state.0.0), ("c", &state.0.1)] {
            let check = Check::new(OP, name, tensor).defined()?.same_device_as(weights)?;
            check.shape("[num_layers, B, H]", &[self.config.num_layers, batch, self.hidden_dim])?;
        }
        Ok(())
    }

    fn batch_of(&self, input: &Tensor) -> i64 {
        let place = if self.config.batch_first { 0 } else { 1 };
        input.size().get(place).copied().unwrap_or(0)
    }

    fn options(&self) -> (Kind, Device) {
        (self.weights[0].kind(), self.weights[0].device())
    }
}

impl RNN for LltmLayer {
    type State = LltmState;

    fn zero_state(&self, batch_dim: i64) -> LltmState {
        let zeros =
            || Tensor::zeros([self.config.num_layers, batch_dim, self.hidden_dim], self.options());
        LltmState((zeros(), zeros()))
    }

    fn step(&self, input: &Tensor, state: &LltmState) -> LltmState {
        self.f_step(input, state).unwrap_or_else(|error| panic!("{error}"))
    }

    // tch's own `seq` takes the first dimension for the batch.
    fn seq(&self, input: &Tensor) -> (Tensor, LltmState) {
        self.seq_init(input, &self.zero_state(self.batch_of(input)))
    }

    fn seq_init(&self, input: &Tensor, state: &LltmState) -> (Tensor, LltmState) {
        self.f_seq_init(input, state).unwrap_or_else(|error| panic!("{error}"))
    }
}
