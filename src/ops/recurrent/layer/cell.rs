//! What differs between the layers of torch.nn.

use super::{Costs, RnnWeights};
use crate::Result;
use crate::ops::recurrent::kernels::cpu::CpuCell;
use crate::ops::recurrent::kernels::cuda::CudaCell;
use tch::Tensor;

/// h and, for an LSTM, c.
pub(in crate::ops) type State = (Tensor, Option<Tensor>);

/// A cell of torch.nn: LSTM or GRU.
pub(in crate::ops) trait Cell: Send + Sync + 'static {
    /// The operator's name.
    const OP: &'static str;
    /// The number of gates, and its name in messages: the rows of a weight.
    const GATES: i64;
    const ROWS: &'static str;
    /// Whether the state is h, and there is no c.
    const STATE_IS_H: bool;
    /// How many of the last gates need the product with h, and its bias, by themselves.
    const SEPARATE: i64;
    /// The kernels on the CPU.
    const CPU: CpuCell;
    /// Those on CUDA, if this build has them.
    const CUDA: Option<CudaCell>;
    /// What the latter cost.
    const COSTS: &'static Costs;

    /// One step in plain tch operations. `input_gates` is `x W_ihᵀ + b_ih` and `hidden_gates` is
    /// `h W_hhᵀ + b_hh`, each `[B, G·H]`.
    fn step(input_gates: &Tensor, hidden_gates: &Tensor, state: &State) -> Result<State>;
}

/// All steps in plain tch operations: (h of all steps, the last state).
pub(in crate::ops) fn reference<C: Cell>(
    input: &Tensor,
    weights: &RnnWeights<'_>,
    state: State,
) -> Result<(Tensor, State)> {
    let RnnWeights { w_ih, w_hh, b_ih, b_hh } = *weights;
    if input.size3()?.0 == 0 {
        // `stack` accepts no empty list.
        let (h, c) = &state;
        let copy = |tensor: &Tensor| tensor.f_to_dtype(tensor.f_kind()?, false, true);
        let state = (copy(h)?, c.as_ref().map(copy).transpose()?);
        return Ok((h.f_unsqueeze(0)?.f_narrow(0, 0, 0)?, state));
    }
    let mut state = state;
    let mut steps = Vec::new();
    for input in input.f_unbind(0)? {
        let input_gates = input.f_linear(w_ih, b_ih)?;
        let hidden_gates = state.0.f_linear(w_hh, b_hh)?;
        state = C::step(&input_gates, &hidden_gates, &state)?;
        steps.push(state.0.shallow_clone());
    }
    Ok((Tensor::f_stack(&steps, 0)?, state))
}
