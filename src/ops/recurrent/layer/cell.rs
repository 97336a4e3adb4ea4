//! What differs between the layers of torch.nn.

use super::RnnWeights;
use super::products::Cudnn;
use crate::Result;
use crate::ops::costs::Place;
use crate::ops::recurrent::kernels::cpu::CpuCell;
use crate::ops::recurrent::kernels::cuda::CudaCell;
use crate::ops::recurrent::plan::Costs;
use tch::Tensor;

/// h and, for an LSTM, c.
pub(in crate::ops) type State = (Tensor, Option<Tensor>);

/// A cell of torch.nn: LSTM or GRU.
pub(in crate::ops) trait Cell: Send + Sync + 'static {
    /// The operator's name.
    const OP: &'static str;
    /// The number of gates.
    const GATES: i64;
    /// The shapes of w_ih, w_hh and a bias, for messages.
    const PARAMETERS: [&'static str; 3];
    /// Whether the state is h, and there is no c.
    const STATE_IS_H: bool;
    /// How many of the last gates need the product with h, and its bias, by themselves.
    const SEPARATE: i64;
    /// Gates by which a step keeps a state that is not h, and their values before the activation:
    /// infinities that close the gate of what is new and open the gate of what was there.
    const KEEPS_STATE: &'static [(i64, f64)];
    /// The kernels on the CPU.
    const CPU: CpuCell;
    /// Those on CUDA, if this build has them.
    const CUDA: Option<CudaCell>;

    /// What the latter cost.
    const COSTS: &'static Place<Costs>;
    /// What cuDNN's layer costs.
    const CUDNN: &'static Place<Cudnn>;

    /// One step in plain tch operations. `input_gates` is `x W_ihᵀ + b_ih` and `hidden_gates` is
    /// `h W_hhᵀ + b_hh`, each `[B, G·H]`.
    fn step(input_gates: &Tensor, hidden_gates: &Tensor, state: &State) -> Result<State>;
}

/// All steps in plain tch operations: (h of all steps, the last state). A step that is padding, as
/// `[T, B, 1]` says, ignores its input, puts out zeros and keeps the state.
pub(super) fn reference<C: Cell>(
    input: &Tensor,
    weights: &RnnWeights<'_>,
    state: State,
    padding: Option<&Tensor>,
) -> Result<(Tensor, State)> {
    let RnnWeights { w_ih, w_hh, b_ih, b_hh } = *weights;
    if input.size3()?.0 == 0 {
        // `stack` accepts no empty list.
        let (h, c) = &state;
        let copy = |tensor: &Tensor| tensor.f_to_dtype(tensor.f_kind()?, false, true);
        let state = (copy(h)?, c.as_ref().map(copy).transpose()?);
        return Ok((h.f_unsqueeze(0)?.f_narrow(0, 0, 0)?, state));
    }
    let zeros_at = |tensor: &Tensor, padding: Option<&Tensor>| match padding {
        Some(padding) => tensor.f_masked_fill(padding, 0.0),
        None => Ok(tensor.shallow_clone()),
    };
    let mut state = state;
    let mut steps = Vec::new();
    for (step, input) in (0_i64..).zip(zeros_at(input, padding)?.f_unbind(0)?) {
        let padding = padding.map(|padding| padding.f_select(0, step)).transpose()?;
        let input_gates = input.f_linear(w_ih, b_ih)?;
        let hidden_gates = state.0.f_linear(w_hh, b_hh)?;
        let next = C::step(&input_gates, &hidden_gates, &state)?;
        state = match &padding {
            Some(padding) => kept_where(padding, &state, &next)?,
            None => next,
        };
        steps.push(zeros_at(&state.0, padding.as_ref())?);
    }
    Ok((Tensor::f_stack(&steps, 0)?, state))
}

/// The state before a step where the step is padding, and the one after it elsewhere.
fn kept_where(padding: &Tensor, before: &State, after: &State) -> Result<State> {
    let choose = |before: &Tensor, after: &Tensor| before.f_where_self(padding, after);
    let c = before.1.as_ref().zip(after.1.as_ref());
    Ok((choose(&before.0, &after.0)?, c.map(|(before, after)| choose(before, after)).transpose()?))
}
