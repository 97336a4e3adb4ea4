//! ZeRO-1: an optimizer whose state is distributed over the ranks.

mod files;
mod gradients;
mod layout;
mod model;
mod numbers;
mod options;
mod state;
mod step;
mod weights;

pub use options::{Compression, ShardedOptions};

use crate::autograd::Hook;
use crate::distributed::ProcessGroup;
use crate::distributed::agree::{self, Agreement};
use crate::distributed::watch::Replays;
use crate::optim::FusedOptimizer;
use crate::optim::shard::Joined;
use crate::{Error, Result};
use gradients::Gradients;
use layout::{Layout, Piece};
use model::Model;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use tch::{Device, Tensor};
use weights::Weights;

const NEW: &str = "ShardedOptimizer::new";

/// Data-parallel training with an optimizer whose state is distributed over the ranks: ZeRO-1.
///
/// Each rank computes the gradients of its own batch. Then, in place of all gradients, each rank gets
/// the mean of 1/N of them (`reduce_scatter`), updates these weights with an ordinary
/// [`FusedOptimizer`], and sends them to all others (`all_gather`). That is as much communication as the
/// all-reduce of `Ddp`, but moments and master weights take 1/N of the memory on each of N ranks.
/// Use it in place of `Ddp`, not together with it.
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::distributed::{ShardedOptimizer, ShardedOptions, run_ranks};
/// use tch_extension::optim::{AdamW, OptimizerConfig};
///
/// let losses = run_ranks(2, |group| {
///     let vs = nn::VarStore::new(Device::Cpu);
///     let model = nn::linear(vs.root(), 4, 1, Default::default());
///     let mut optimizer = AdamW::default().build(&vs, 1e-2)?;
///     optimizer.set_clip_norm(Some(1.0))?;
///     let mut optimizer = ShardedOptimizer::new(&group, optimizer, &ShardedOptions::default())?;
///     let mut last = 0.0;
///     for _ in 0..3 {
///         let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)); // a batch of this rank's own
///         let loss = model.forward(&x).square().mean(Kind::Float);
///         loss.backward(); // sends gradients while it computes others
///         optimizer.step()?;
///         last = loss.double_value(&[]);
///     }
///     Ok(last)
/// })?;
/// assert_eq!(losses.len(), 2);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Gradients and communication
///
/// Parameters lie in flat buffers, the *buckets*, and so do their gradients. A hook takes each
/// gradient as soon as it is complete, so that [`grad`](Tensor::grad) of a parameter is undefined
/// after a backward pass, and hooks of yours that need it must be registered before this optimizer is
/// made. When all gradients of a bucket are there, it is reduced while the backward pass goes on. Each
/// bucket consists of N equal parts, one for each rank, whatever the limits of parameters are. While
/// the weights of one bucket are gathered, those of the next are updated.
///
/// - **One backward pass for a step.** Run further ones in [`no_sync`](Self::no_sync). A second
///   one without it is an error.
/// - **Parameters without a gradient** are an error of [`step`](Self::step), unless
///   [`ShardedOptions::allow_unused`] lets their gradients be zero. In a `train::Step` that
///   accumulates, this is noticed of parameters that no batch has ever used; others count as zero.
/// - **Parameters that do not require grad** when the optimizer is made are only broadcast.
/// - **Buffers** of the model, such as the statistics of batch norms, are no parameters: broadcast
///   them yourself.
/// - **Mixed kinds**: each kind has buckets of its own. A gradient has its parameter's kind. Half
///   kinds have master weights as in [`FusedOptimizer`], for the part of this rank.
///
/// # Results
///
/// All ranks have the same weights, bit by bit. Before each step they compare their learning rates and
/// other numbers, by one small all-reduce on the CPU, and before the first step and after each load also
/// the weights: a difference is an error on every rank. In a group of one, they are those of the
/// [`FusedOptimizer`], bit by bit. In larger groups, gradients are divided by N before they are added up,
/// and the squares of the norm are added in another order, so that results differ by rounding.
///
/// # Mixed precision and captured steps
///
/// [`GradScaler::step`](crate::amp::GradScaler::step) takes this optimizer, and skips a step on all
/// ranks if a gradient of one of them is infinite or NaN. `train::Step` takes it, too, and tells it
/// which backward pass is the last of a step. Nothing waits for a GPU.
///
/// # Faults
///
/// An error of a step or a backward pass gives the group up on all ranks
/// ([`ProcessGroup::poison`]): a rank that went on would mix its gradients with those of another
/// step. Then make a new group and load the last checkpoint, or let the launcher restart.
///
/// Source: Rajbhandari and others, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
/// Models*, 2020.
pub struct ShardedOptimizer {
    // Dropped first: hooks use the gradients.
    _hooks: Vec<Hook>,
    group: ProcessGroup,
    device: Device,
    layout: Layout,
    /// The optimizer of this rank's parts, in the order of `pieces`.
    inner: FusedOptimizer,
    pieces: Vec<Piece>,
    /// The pieces of each bucket.
    batches: Vec<Range<usize>>,
    weights: Weights,
    /// Parameters that did not require grad.
    frozen: Vec<(String, Tensor)>,
    gradients: Arc<Mutex<Gradients>>,
    /// The mean gradient of each piece.
    part_gradients: Vec<Tensor>,
    /// `[2]`, `Double`: what the last step that asked found in the gradients of all ranks.
    totals: Tensor,
    /// Whether a step has measured the norm.
    has_norm: bool,
    joined: Joined,
    replays: Replays,
    /// The parameters that were exempted from weight decay since.
    exempt: BTreeSet<String>,
    agreement: Agreement,
}

impl ShardedOptimizer {
    /// Distributes an optimizer that had no step yet over the ranks of a group. It keeps its groups
    /// of parameters, learning rates and other settings. Every rank must call it, with the same
    /// model and settings, which are compared. All parameters get the values of rank 0.
    ///
    /// Each parameter becomes a view of a buffer, in place: tensors that share its memory, such as
    /// the results of `detach` or `view`, no longer do. So do this after parameters were converted
    /// or moved, and before a step is captured.
    ///
    /// Master weights that the caller keeps ([`FusedOptimizer::set_masters`]) are copied: each rank
    /// begins with its part of their values. The tensors themselves are not updated any more; see
    /// [`gather_state_dict`](Self::gather_state_dict).
    ///
    /// # Errors
    /// When the optimizer is [`Muon`](crate::optim::Muon)'s, which needs whole matrices, has had a step,
    /// has no parameter that requires grad, or has parameters on several devices; when ranks have
    /// different parameters or settings, which is an error on every rank; when another rank ended,
    /// failed or did not come until the timeout. Then the parameters are as they were.
    pub fn new(
        group: &ProcessGroup,
        optimizer: FusedOptimizer,
        options: &ShardedOptions,
    ) -> Result<ShardedOptimizer> {
        let prepared = agree::all_succeed(NEW, group, Model::new(optimizer, options))?;
        let how = ("another model or other settings", "build the same");
        agree::all_have(NEW, group, &prepared.lines(options)?, how)?;
        let buffers = agree::all_succeed(NEW, group, prepared.buffers(group, options))?;
        buffers.weights.broadcast(group)?;
        prepared.broadcast(group)?;
        let made = prepared.into_sharded(group, buffers);
        let mut made = agree::all_succeed(NEW, group, made)?;
        made.weights.adopt()?;
        Ok(made)
    }

    /// The group of ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// All parameters that are updated, in the order in which they joined the optimizer.
    pub fn trainable_variables(&self) -> Vec<Tensor> {
        let parameters = self.weights.parameters.iter();
        parameters.map(|parameter| parameter.tensor.shallow_clone()).collect()
    }

    /// The name of each of them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.parameters.iter().map(|parameter| parameter.name.as_str())
    }

    /// The number of bytes of moments and master weights on this rank: about 1/N of those of all.
    pub fn state_bytes(&self) -> usize {
        let states = (0..self.pieces.len()).filter_map(|index| self.inner.state_of(index));
        let tensors = states.flat_map(|(tensors, _)| tensors).flatten();
        tensors.map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }

    /// An error if there are parameters that this optimizer would not update.
    fn check_variables(&self, op: &str) -> Result<()> {
        let hint = "make the sharded optimizer after the model";
        let expected = "the parameters of before";
        if let Some((name, _)) = self.frozen.iter().find(|(_, tensor)| tensor.requires_grad()) {
            let got = "one that requires grad now";
            return Err(Error::argument(op, name, expected, got, hint));
        }
        match self.joined.missing() {
            0 => Ok(()),
            missing => {
                let got = format!("{missing} variables that were added to the store");
                Err(Error::argument(op, "self", expected, got, hint))
            }
        }
    }
}

impl std::fmt::Debug for ShardedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardedOptimizer")
            .field("group", &self.group)
            .field("parameters", &self.weights.parameters.len())
            .field("buckets", &self.layout.buckets.len())
            .finish_non_exhaustive()
    }
}
