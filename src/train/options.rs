//! The options of a step, what it counts, and what its closure returns.

use crate::{Error, Result};
use tch::Tensor;

/// The options of a [`Step`](super::Step).
///
/// ```
/// use tch_extension::train::StepOptions;
///
/// let options = StepOptions { accumulate: 4, ..Default::default() };
/// assert!(options.capture);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepOptions {
    /// Capture CUDA graphs and replay them. If false, and always on the CPU, each call just runs.
    /// The default is true.
    pub capture: bool,
    /// How many calls for the shapes of a batch run without a graph before the capture; with
    /// [`accumulate`](Self::accumulate), those that only accumulate and those that step are counted
    /// apart. They are ordinary steps. It must be at least 1, because state that is made in the
    /// first step must not be made anew in each replay. PyTorch's `DistributedDataParallel` needs
    /// 11. The default is 3.
    pub warm_up: usize,
    /// How many batches make one step of the optimizer. The loss of each is divided by this number,
    /// and the gradients are added up. The default is 1.
    pub accumulate: usize,
    /// For how many different shapes of a batch graphs are captured. Batches of further shapes run
    /// without a graph. The default is 8.
    pub max_shapes: usize,
}

impl Default for StepOptions {
    fn default() -> Self {
        StepOptions { capture: true, warm_up: 3, accumulate: 1, max_shapes: 8 }
    }
}

impl StepOptions {
    pub(super) fn check(&self, op: &str) -> Result<()> {
        for (argument, value) in [("warm_up", self.warm_up), ("accumulate", self.accumulate)] {
            if value == 0 {
                return Err(Error::argument(op, argument, "1 or more", "0", ""));
            }
        }
        Ok(())
    }
}

/// What the closure of a [`Step`](super::Step) returns, and a call of it. A loss alone, and a loss
/// with a list of tensors, can be converted to it.
#[derive(Debug)]
pub struct StepOutput {
    /// The loss, with one element. In the result of a step it is 0-dimensional, has no history, and
    /// is neither divided for accumulation nor scaled by a scaler.
    pub loss: Tensor,
    /// Any further tensors, such as a state or a number of correct answers. In the result of a step
    /// they are copies without a history.
    pub extra: Vec<Tensor>,
}

impl From<Tensor> for StepOutput {
    fn from(loss: Tensor) -> Self {
        StepOutput { loss, extra: Vec::new() }
    }
}

impl From<(Tensor, Vec<Tensor>)> for StepOutput {
    fn from((loss, extra): (Tensor, Vec<Tensor>)) -> Self {
        StepOutput { loss, extra }
    }
}

/// What a [`Step`](super::Step) has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepStats {
    /// Steps of the optimizer, with those that a scaler skipped.
    pub steps: u64,
    /// Calls that ran without a graph, the warm-up included.
    pub eager_calls: u64,
    /// Calls that replayed a graph.
    pub replays: u64,
    /// The graphs that are there now.
    pub graphs: usize,
    /// The number of kernels of the graph that was replayed last.
    pub kernels: usize,
    /// The number of its other nodes, which are copies and fills.
    pub other_nodes: usize,
    /// Whether the last call replayed a graph.
    pub captured: bool,
}
