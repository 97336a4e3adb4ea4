//! Drop-in replacements for tch's `nn::lstm` and `nn::gru`.

use super::side_stream::OnSideStream;
use crate::ops::{
    RnnOptions, RnnWeights, check_lengths, f_gru, f_lstm, flatten_for_cudnn, with_half_of_the_gpu,
};
use crate::{Result, check};
use std::borrow::Borrow;
use tch::nn::{GRUState, Init, LSTMState, Path, RNN, RNNConfig};
use tch::{Device, Kind, Tensor};

/// Layers of one kind: the parameters, and what both kinds do with them.
#[derive(Debug)]
struct Layers {
    op: &'static str,
    /// For each layer and direction W_ih, W_hh and, if there are any, b_ih and b_hh.
    parameters: Vec<Tensor>,
    hidden_dim: i64,
    config: RNNConfig,
}

/// One layer in one direction: (x, lengths, parameters, h, c) → (output, h, c).
type Call =
    fn(&Tensor, Option<&[i64]>, &RnnWeights<'_>, &Tensor, Option<&Tensor>) -> Result<Results>;
type Results = (Tensor, Tensor, Option<Tensor>);

impl Layers {
    fn new(
        op: &'static str,
        vs: &Path<'_>,
        [in_dim, hidden_dim, gates]: [i64; 3],
        config: RNNConfig,
    ) -> Layers {
        let RNNConfig { num_layers, dropout, .. } = config;
        assert!(hidden_dim >= 1, "{op}: hidden_dim: expected at least 1, got {hidden_dim}");
        assert!(in_dim >= 0, "{op}: in_dim: expected at least 0, got {in_dim}");
        assert!(num_layers >= 1, "{op}: num_layers: expected at least 1, got {num_layers}");
        assert!(
            (0.0..=1.0).contains(&dropout),
            "{op}: dropout: expected a probability, got {dropout}"
        );
        let directions = if config.bidirectional { 2 } else { 1 };
        let rows = gates * hidden_dim;
        let mut parameters = Vec::new();
        for layer in 0..num_layers {
            let features = if layer == 0 { in_dim } else { hidden_dim * directions };
            for suffix in ["", "_reverse"].iter().take(directions as usize) {
                let name = |what: &str| format!("{what}_l{layer}{suffix}");
                // The usual distributions have no width without features.
                let w_ih_init = if features == 0 { Init::Const(0.0) } else { config.w_ih_init };
                parameters.push(vs.var(&name("weight_ih"), &[rows, features], w_ih_init));
                parameters.push(vs.var(&name("weight_hh"), &[rows, hidden_dim], config.w_hh_init));
                if !config.has_biases {
                    continue;
                }
                for (what, init) in [("bias_ih", config.b_ih_init), ("bias_hh", config.b_hh_init)] {
                    let init = init.unwrap_or(Init::Const(0.0));
                    parameters.push(vs.var(&name(what), &[rows], init));
                }
            }
        }
        let layers = Layers { op, parameters, hidden_dim, config };
        // Without it the layers compute the same.
        let _ = layers.flatten_parameters();
        layers
    }

    /// Moves the parameters of each layer and direction into one piece of memory on CUDA.
    fn flatten_parameters(&self) -> Result<()> {
        let of_one = if self.config.has_biases { 4 } else { 2 };
        for parameters in self.parameters.chunks(of_one) {
            flatten_for_cudnn(parameters)?;
        }
        Ok(())
    }

    fn directions(&self) -> i64 {
        if self.config.bidirectional { 2 } else { 1 }
    }

    fn zeros(&self, batch: i64) -> Tensor {
        let size = [self.config.num_layers * self.directions(), batch, self.hidden_dim];
        let options = self
            .parameters
            .first()
            .map_or((Kind::Float, Device::Cpu), |weight| (weight.kind(), weight.device()));
        Tensor::zeros(size, options)
    }

    /// The parameters of a layer in a direction, both counted together.
    fn weights(&self, index: usize) -> RnnWeights<'_> {
        let of_one = if self.config.has_biases { 4 } else { 2 };
        let at = |place: usize| &self.parameters[index * of_one + place];
        let bias = |place: usize| self.config.has_biases.then(|| at(place));
        RnnWeights { w_ih: at(0), w_hh: at(1), b_ih: bias(2), b_hh: bias(3) }
    }

    /// The batch size of an input, or 0 if it has no such dimension, which is refused later.
    fn batch_of(&self, input: &Tensor) -> i64 {
        let place = if self.config.batch_first { 0 } else { 1 };
        input.size().get(place).copied().unwrap_or(0)
    }

    fn check_state(&self, name: &str, state: &Tensor, batch: i64) -> Result<()> {
        let size = [self.config.num_layers * self.directions(), batch, self.hidden_dim];
        let names = "[num_layers * directions, B, H]";
        check!(self.op, name, state).defined()?.dim(3, names)?.shape(names, &size).map(|_| ())
    }

    fn run(
        &self,
        call: Call,
        (input, lengths): (&Tensor, Option<&[i64]>),
        h: &Tensor,
        c: Option<&Tensor>,
    ) -> Result<Results> {
        let names = if self.config.batch_first { "[B, T, F]" } else { "[T, B, F]" };
        let (first, second, _) =
            check!(self.op, input).defined()?.dim(3, names)?.tensor().size3()?;
        let features = self.weights(0).w_ih.size2()?.1;
        check!(self.op, input).shape(names, &[first, second, features])?;
        let turned = |tensor: &Tensor| -> Result<Tensor> {
            Ok(match self.config.batch_first {
                true => tensor.f_transpose(0, 1)?,
                false => tensor.shallow_clone(),
            })
        };
        let mut input = turned(input)?;
        let (steps, batch, _) = input.size3()?;
        lengths.map(|lengths| check_lengths(self.op, lengths, steps, batch)).transpose()?;
        self.check_state("h", h, batch)?;
        c.map(|c| self.check_state("c", c, batch)).transpose()?;
        let (mut last_h, mut last_c) = (Vec::new(), Vec::new());
        for layer in 0..self.config.num_layers {
            let mut outputs = Vec::new();
            let states = [Some(h), c];
            for (output, h, c) in self.run_directions(call, (&input, lengths), layer, states)? {
                outputs.push(output);
                last_h.push(h);
                last_c.extend(c);
            }
            input = match &outputs[..] {
                [output] => output.shallow_clone(),
                outputs => Tensor::f_cat(outputs, 2)?,
            };
            let is_last = layer + 1 == self.config.num_layers;
            if !is_last && self.config.train && self.config.dropout > 0.0 {
                input = input.f_dropout(self.config.dropout, true)?;
            }
        }
        let c = if last_c.is_empty() { None } else { Some(Tensor::f_stack(&last_c, 0)?) };
        Ok((turned(&input)?, Tensor::f_stack(&last_h, 0)?, c))
    }

    /// A layer's directions. Two of them run at the same time where a GPU has room for both.
    fn run_directions(
        &self,
        call: Call,
        (input, lengths): (&Tensor, Option<&[i64]>),
        layer: i64,
        states: [Option<&Tensor>; 2],
    ) -> Result<Vec<Results>> {
        /// For fewer steps, the host takes longer than the GPU.
        const STEPS: i64 = 16;
        let run = |direction: i64| -> Result<Results> {
            let index = layer * self.directions() + direction;
            let of = |state: Option<&Tensor>| state.map(|of| of.f_select(0, index)).transpose();
            let [h, c] = [of(states[0])?, of(states[1])?];
            let h = h.ok_or_else(|| crate::Error::msg("internal error: a layer without h"))?;
            let weights = self.weights(index as usize);
            if direction == 0 {
                return call(input, lengths, &weights, &h, c.as_ref());
            }
            let input = reversed(input, lengths)?;
            let (output, h, c) = call(&input, lengths, &weights, &h, c.as_ref())?;
            Ok((reversed(&output, lengths)?, h, c))
        };
        if self.directions() == 1 {
            return Ok(vec![run(0)?]);
        }
        // Lengths are copied to the GPU in between, for which the host waits.
        if !input.device().is_cuda() || input.size3()?.0 < STEPS || lengths.is_some() {
            return Ok(vec![run(0)?, run(1)?]);
        }
        let RnnWeights { w_ih, w_hh, b_ih, b_hh } = self.weights((layer * 2 + 1) as usize);
        let optional = [b_ih, b_hh, states[0], states[1]];
        let reads: Vec<&Tensor> =
            [input, w_ih, w_hh].into_iter().chain(optional.into_iter().flatten()).collect();
        let half = |direction| with_half_of_the_gpu(|| run(direction));
        let (started, reverse) = OnSideStream::start(input.device(), &reads, || half(1))?;
        let forward = half(0)?;
        let (output, h, c) = &reverse;
        let results: Vec<&Tensor> = [output, h].into_iter().chain(c).collect();
        started.end(&results)?;
        Ok(vec![forward, reverse])
    }
}

/// The steps of each sequence from its last to its first, of `[T, B, …]`. Padding stays in its place.
fn reversed(tensor: &Tensor, lengths: Option<&[i64]>) -> Result<Tensor> {
    let Some(lengths) = lengths else { return Ok(tensor.f_flip([0])?) };
    let (steps, batch, columns) = tensor.size3()?;
    let mut rows = Vec::new();
    for step in 0..steps {
        rows.extend(lengths.iter().zip(0..).map(|(&length, sequence)| {
            let from = if step < length { length - 1 - step } else { step };
            from * batch + sequence
        }));
    }
    let rows = Tensor::f_from_slice(&rows)?.f_to_device(tensor.device())?;
    let reversed = tensor.f_reshape([steps * batch, columns])?.f_index_select(0, &rows)?;
    Ok(reversed.f_view([steps, batch, columns])?)
}

/// LSTM layers. [`ops::lstm`](crate::ops::lstm) computes each layer for all steps at once. Made by
/// [`lstm`](lstm()).
#[derive(Debug)]
pub struct Lstm(Layers);

/// Makes LSTM layers, as tch's [`nn::lstm`](tch::nn::lstm) does: with the same configuration, the
/// same names of parameters, which are torch.nn's, and the same trait. Changing one `use` line
/// changes results by rounding only, except that dropout draws other numbers, and that with
/// `batch_first: false` `seq` and `step` take the batch where the layout has it, as tch's do not.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{RNN, RNNConfig, VarStore}};
/// use tch_extension::nn::lstm;
///
/// let vs = VarStore::new(Device::Cpu);
/// let config = RNNConfig { num_layers: 2, bidirectional: true, ..Default::default() };
/// let layers = lstm(vs.root(), 5, 8, config);
/// let input = Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu)); // [B, T, F]
/// let (output, state) = layers.seq(&input);
/// assert_eq!((output.size(), state.h().size()), (vec![2, 7, 16], vec![4, 2, 8]));
/// ```
///
/// # Panics
/// When the input size is negative, the hidden size or the number of layers is below 1, or the
/// dropout is not a probability.
pub fn lstm<'a, T: Borrow<Path<'a>>>(
    vs: T,
    in_dim: i64,
    hidden_dim: i64,
    config: RNNConfig,
) -> Lstm {
    Lstm(Layers::new("nn::Lstm", vs.borrow(), [in_dim, hidden_dim, 4], config))
}

impl Lstm {
    /// Switches dropout on (for training) or off.
    pub fn set_train(&mut self, train: bool) {
        self.0.config.train = train;
    }

    /// Moves the parameters of each layer and direction into one piece of memory, from which cuDNN
    /// takes them without a copy in each call; elsewhere it does nothing. [`lstm`](lstm()) has done
    /// so, and it is worth repeating after `VarStore::set_kind` or `set_device`. Not all sizes are
    /// computed by cuDNN.
    ///
    /// # Errors
    /// When CUDA fails.
    pub fn flatten_parameters(&self) -> Result<()> {
        self.0.flatten_parameters()
    }

    /// Like [`RNN::seq_init`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the input or the state does not fit these layers; see [`f_lstm`].
    pub fn f_seq_init(&self, input: &Tensor, state: &LSTMState) -> Result<(Tensor, LSTMState)> {
        self.run((input, None), state)
    }

    /// Sequences of different lengths, as torch.nn computes a `PackedSequence`. Sequence b has
    /// `lengths[b]` steps, from 1 to T, in any order; the rest of its steps are padding, which is
    /// never used, even if it is NaN. There the output and the gradient for the input are zero. The
    /// state is the one after each sequence's own last step, and the reverse direction starts there.
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn::{RNN, RNNConfig, VarStore}};
    /// use tch_extension::nn::lstm;
    ///
    /// let vs = VarStore::new(Device::Cpu);
    /// let config = RNNConfig { bidirectional: true, ..Default::default() };
    /// let layers = lstm(vs.root(), 5, 8, config);
    /// let input = Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu)); // [B, T, F]
    /// let (output, _) = layers.seq_padded(&input, &[3, 7], &layers.zero_state(2));
    /// assert_eq!(output.select(0, 0).narrow(0, 3, 4).count_nonzero(None).int64_value(&[]), 0);
    /// ```
    ///
    /// # Panics
    /// If [`f_seq_padded`](Self::f_seq_padded) returns an error.
    pub fn seq_padded(
        &self,
        input: &Tensor,
        lengths: &[i64],
        state: &LSTMState,
    ) -> (Tensor, LSTMState) {
        self.f_seq_padded(input, lengths, state).unwrap_or_else(|error| panic!("{error}"))
    }

    /// [`seq_padded`](Self::seq_padded), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_seq_init`](Self::f_seq_init); and if there is not one length for each sequence,
    /// from 1 to T.
    pub fn f_seq_padded(
        &self,
        input: &Tensor,
        lengths: &[i64],
        state: &LSTMState,
    ) -> Result<(Tensor, LSTMState)> {
        self.run((input, Some(lengths)), state)
    }

    fn run(
        &self,
        input: (&Tensor, Option<&[i64]>),
        LSTMState((h, c)): &LSTMState,
    ) -> Result<(Tensor, LSTMState)> {
        let call: Call = |input, lengths, weights, h, c| {
            let c = c.ok_or_else(|| crate::Error::msg("internal error: an LSTM without c"))?;
            let (output, (h, c)) = f_lstm(input, (h, c), weights, &RnnOptions { lengths })?;
            Ok((output, h, Some(c)))
        };
        let (output, h, c) = self.0.run(call, input, h, Some(c))?;
        let c = c.ok_or_else(|| crate::Error::msg("internal error: an LSTM without c"))?;
        Ok((output, LSTMState((h, c))))
    }
}

impl RNN for Lstm {
    type State = LSTMState;

    fn zero_state(&self, batch_dim: i64) -> LSTMState {
        LSTMState((self.0.zeros(batch_dim), self.0.zeros(batch_dim)))
    }

    // tch's takes the first dimension for the batch in either layout.
    fn seq(&self, input: &Tensor) -> (Tensor, LSTMState) {
        self.seq_init(input, &self.zero_state(self.0.batch_of(input)))
    }

    fn step(&self, input: &Tensor, state: &LSTMState) -> LSTMState {
        let time = if self.0.config.batch_first { 1 } else { 0 };
        self.seq_init(&input.unsqueeze(time), state).1
    }

    fn seq_init(&self, input: &Tensor, state: &LSTMState) -> (Tensor, LSTMState) {
        self.f_seq_init(input, state).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// GRU layers. [`ops::gru`](crate::ops::gru) computes each layer for all steps at once. Made by
/// [`gru`](gru()).
#[derive(Debug)]
pub struct Gru(Layers);

/// Makes GRU layers, as tch's [`nn::gru`](tch::nn::gru) does; see [`lstm`](lstm()).
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{RNN, VarStore}};
/// use tch_extension::nn::gru;
///
/// let vs = VarStore::new(Device::Cpu);
/// let layers = gru(vs.root(), 5, 8, Default::default());
/// let input = Tensor::randn([2, 7, 5], (Kind::Float, Device::Cpu)); // [B, T, F]
/// let (output, state) = layers.seq(&input);
/// assert_eq!(output.select(1, 6), state.value().select(0, 0));
/// ```
///
/// # Panics
/// As for [`lstm`](lstm()).
pub fn gru<'a, T: Borrow<Path<'a>>>(vs: T, in_dim: i64, hidden_dim: i64, config: RNNConfig) -> Gru {
    Gru(Layers::new("nn::Gru", vs.borrow(), [in_dim, hidden_dim, 3], config))
}

impl Gru {
    /// Switches dropout on (for training) or off.
    pub fn set_train(&mut self, train: bool) {
        self.0.config.train = train;
    }

    /// See [`Lstm::flatten_parameters`].
    ///
    /// # Errors
    /// When CUDA fails.
    pub fn flatten_parameters(&self) -> Result<()> {
        self.0.flatten_parameters()
    }

    /// Like [`RNN::seq_init`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// When the input or the state does not fit these layers; see [`f_gru`].
    pub fn f_seq_init(&self, input: &Tensor, state: &GRUState) -> Result<(Tensor, GRUState)> {
        self.run((input, None), state)
    }

    /// Sequences of different lengths; see [`Lstm::seq_padded`].
    ///
    /// # Panics
    /// If [`f_seq_padded`](Self::f_seq_padded) returns an error.
    pub fn seq_padded(
        &self,
        input: &Tensor,
        lengths: &[i64],
        state: &GRUState,
    ) -> (Tensor, GRUState) {
        self.f_seq_padded(input, lengths, state).unwrap_or_else(|error| panic!("{error}"))
    }

    /// [`seq_padded`](Self::seq_padded), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_seq_init`](Self::f_seq_init); and if there is not one length for each sequence,
    /// from 1 to T.
    pub fn f_seq_padded(
        &self,
        input: &Tensor,
        lengths: &[i64],
        state: &GRUState,
    ) -> Result<(Tensor, GRUState)> {
        self.run((input, Some(lengths)), state)
    }

    fn run(
        &self,
        input: (&Tensor, Option<&[i64]>),
        GRUState(h): &GRUState,
    ) -> Result<(Tensor, GRUState)> {
        let call: Call = |input, lengths, weights, h, _| {
            let (output, h) = f_gru(input, h, weights, &RnnOptions { lengths })?;
            Ok((output, h, None))
        };
        let (output, h, _) = self.0.run(call, input, h, None)?;
        Ok((output, GRUState(h)))
    }
}

impl RNN for Gru {
    type State = GRUState;

    fn zero_state(&self, batch_dim: i64) -> GRUState {
        GRUState(self.0.zeros(batch_dim))
    }

    fn seq(&self, input: &Tensor) -> (Tensor, GRUState) {
        self.seq_init(input, &self.zero_state(self.0.batch_of(input)))
    }

    fn step(&self, input: &Tensor, state: &GRUState) -> GRUState {
        let time = if self.0.config.batch_first { 1 } else { 0 };
        self.seq_init(&input.unsqueeze(time), state).1
    }

    fn seq_init(&self, input: &Tensor, state: &GRUState) -> (Tensor, GRUState) {
        self.f_seq_init(input, state).unwrap_or_else(|error| panic!("{error}"))
    }
}
