//! The recurrent layers that `--op` can choose, all behind one trait.

use crate::options::{Family, Op};
use tch::Tensor;
use tch::nn::{self, GRUState, LSTMState, Path, RNN};
use tch_extension::nn as ours;
use tch_extension::nn::{LltmConfig, LltmOp, LltmState};

/// What a layer carries from one chunk of text to the next: h, and c if it has one.
pub type State = Vec<Tensor>;

/// A recurrent layer whose kind is chosen at run time.
pub trait Layer {
    fn zero_state(&self, rows: i64) -> State;
    /// Reads `input[rows, count, features]`.
    fn sequence(&self, input: &Tensor, state: &[Tensor]) -> (Tensor, State);
}

impl<L: RNN> Layer for L
where
    L::State: Tensors,
{
    fn zero_state(&self, rows: i64) -> State {
        RNN::zero_state(self, rows).into_tensors()
    }

    fn sequence(&self, input: &Tensor, state: &[Tensor]) -> (Tensor, State) {
        let (output, state) = self.seq_init(input, &Tensors::from_tensors(state));
        (output, state.into_tensors())
    }
}

/// A layer's own type of state, which is made of tensors.
trait Tensors {
    fn into_tensors(self) -> State;
    fn from_tensors(state: &[Tensor]) -> Self;
}

impl Tensors for LltmState {
    fn into_tensors(self) -> State {
        vec![self.0.0, self.0.1]
    }

    fn from_tensors(state: &[Tensor]) -> LltmState {
        LltmState((state[0].shallow_clone(), state[1].shallow_clone()))
    }
}

impl Tensors for LSTMState {
    fn into_tensors(self) -> State {
        vec![self.0.0, self.0.1]
    }

    fn from_tensors(state: &[Tensor]) -> LSTMState {
        LSTMState((state[0].shallow_clone(), state[1].shallow_clone()))
    }
}

impl Tensors for GRUState {
    fn into_tensors(self) -> State {
        vec![self.0]
    }

    fn from_tensors(state: &[Tensor]) -> GRUState {
        GRUState(state[0].shallow_clone())
    }
}

/// Makes the layer of `op`. Its variables are those of [`shapes`].
pub fn new(op: Op, path: Path<'_>, features: i64, hidden: i64) -> Box<dyn Layer> {
    let steps = |op| Box::new(ours::lltm(&path, features, hidden, LltmConfig { op }));
    match op {
        Op::Sequence => Box::new(ours::lltm_layer(&path, features, hidden, Default::default())),
        Op::Fused => steps(LltmOp::Fused),
        Op::Composite => steps(LltmOp::Composite),
        Op::Lstm => Box::new(ours::lstm(&path, features, hidden, Default::default())),
        Op::TchLstm => Box::new(nn::lstm(&path, features, hidden, Default::default())),
        Op::Gru => Box::new(ours::gru(&path, features, hidden, Default::default())),
        Op::TchGru => Box::new(nn::gru(&path, features, hidden, Default::default())),
    }
}

/// The name and shape of every variable of a layer. All layers of a family have the same.
pub fn shapes(family: Family, features: i64, hidden: i64) -> Vec<(&'static str, Vec<i64>)> {
    let torch_nn = |gates: i64| {
        vec![
            ("weight_ih_l0", vec![gates * hidden, features]),
            ("weight_hh_l0", vec![gates * hidden, hidden]),
            ("bias_ih_l0", vec![gates * hidden]),
            ("bias_hh_l0", vec![gates * hidden]),
        ]
    };
    match family {
        Family::Lltm => {
            vec![("weights", vec![3 * hidden, hidden + features]), ("bias", vec![3 * hidden])]
        }
        Family::Lstm => torch_nn(4),
        Family::Gru => torch_nn(3),
    }
}
