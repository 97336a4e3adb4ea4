//! One layer of torch.nn's LSTM or GRU in one direction. `operator` is its definition, `padded` its two
//! directions as functions of tensors, also for sequences of different lengths, `functions` computes them with
//! one of the kernels, and `cell` is what differs between LSTM and GRU.

mod autocast;
mod cell;
mod functions;
mod libtorch;
mod operator;
mod over_steps;
mod padded;
mod plan;
mod products;
mod tf32;

pub(in crate::ops) use cell::{Cell, State};
pub(in crate::ops) use functions::input_gates;
pub(in crate::ops) use operator::{
    Layer, backward, cast, forward, operator, plan, reference_of, rule,
};
pub use operator::{Plan, States};
pub(crate) use padded::check_lengths;
pub(in crate::ops) use padded::reference;
#[doc(hidden)]
#[cfg(test)]
pub(in crate::ops) use plan::way_on_h200;
pub(crate) use plan::with_half_of_the_gpu;
pub(in crate::ops) use plan::{Forced, predicted};
pub(in crate::ops) use products::{Cudnn, LAYER};

use crate::Error;
use tch::{Kind, Tensor};

/// The parameters of one layer in one direction, as torch.nn has them. H is the hidden size, F the
/// number of features, and G the number of gates: 4 for an LSTM, 3 for a GRU.
#[derive(Clone, Copy, Debug)]
pub struct RnnWeights<'a> {
    /// `[G·H, F]`, torch.nn's `weight_ih_l0`
    pub w_ih: &'a Tensor,
    /// `[G·H, H]`, `weight_hh_l0`
    pub w_hh: &'a Tensor,
    /// `[G·H]`, `bias_ih_l0`; `None` for zeros
    pub b_ih: Option<&'a Tensor>,
    /// `[G·H]`, `bias_hh_l0`; `None` for zeros
    pub b_hh: Option<&'a Tensor>,
}

/// Options of [`lstm`](crate::ops::lstm()) and [`gru`](crate::ops::gru()).
#[derive(Clone, Copy, Debug, Default)]
pub struct RnnOptions<'a> {
    /// The number of steps of each sequence of the batch, from 1 to T, in any order; `None` if each has T.
    /// The steps after the last one of a sequence are padding.
    pub lengths: Option<&'a [i64]>,
}

/// The positions of the arguments, and of their gradients.
mod place {
    pub const INPUT: usize = 0;
    pub const H: usize = 1;
    /// Absent where the state is h.
    pub const C: usize = 2;
    pub const W_IH: usize = 3;
    pub const W_HH: usize = 4;
    pub const B_IH: usize = 5;
    pub const B_HH: usize = 6;
    pub const LEN: usize = 7;
}

type Arguments<'a> = [Option<&'a Tensor>; place::LEN];
type Gradients = [Option<Tensor>; place::LEN];
/// Which gradients are needed.
pub(in crate::ops) type Needs = [bool; place::LEN];

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

fn absent<C: Cell>() -> Error {
    Error::msg(format!("internal error: an argument of {} is absent", C::OP))
}
