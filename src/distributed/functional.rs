//! Collectives with gradients.
//!
//! A rank's loss depends on what other ranks computed. The gradients here are those of the **sum of
//! all ranks' losses**, as in `torch.distributed.nn.functional`: with one loss that is the same on
//! all ranks, divide it by the number of ranks, or use [`ReduceOp::Avg`] for it.
//!
//! ```
//! use tch::{Kind, Tensor};
//! use tch_extension::distributed::{functional, run_ranks};
//!
//! let gradients = run_ranks(2, |group| {
//!     let x = Tensor::from_slice(&[1.0 + group.rank() as f64]).set_requires_grad(true);
//!     // Every rank sees the values of all ranks: a loss over the whole batch.
//!     let all = functional::all_gather(&group, &x)?;
//!     let loss = (&all * &all).sum(Kind::Double);
//!     loss.backward();
//!     Ok(x.grad().double_value(&[0]))
//! })?;
//! // Two losses, in each of which x² occurs.
//! assert_eq!(gradients, [4.0, 8.0]);
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! The backward passes are collectives, too: every rank must run its backward pass, and in the same
//! order. A rank whose loss does not depend on the output calls nothing, and the others fail after
//! the timeout; add `0 * output` to its loss. A backward pass that fails on one rank should be
//! followed by [`ProcessGroup::poison`].

use super::{ProcessGroup, ReduceOp};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use crate::{Error, Result};
use tch::Tensor;

/// The sum or the mean of all ranks' tensors, on every rank.
///
/// The gradient is the sum (or the mean) of all ranks' gradients.
///
/// Equivalent to: `torch.distributed.nn.functional.all_reduce(x, op)`.
///
/// # Errors
/// For another reduction than [`ReduceOp::Sum`] and [`ReduceOp::Avg`], which have no gradients here,
/// and as for [`ProcessGroup::all_reduce`].
pub fn all_reduce(group: &ProcessGroup, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
    is_linear("functional::all_reduce", op)?;
    apply(AllReduce { group: group.clone(), op }, &[Some(x)])?.single()
}

/// The tensors of all ranks, one after another along the first dimension: `[R, …]` becomes
/// `[N · R, …]` with N ranks.
///
/// The gradient is the sum of all ranks' gradients for this rank's part.
///
/// Equivalent to: `torch.cat(torch.distributed.nn.functional.all_gather(x))`.
///
/// # Errors
/// For a tensor without dimensions, and as for [`ProcessGroup::all_gather_into`].
pub fn all_gather(group: &ProcessGroup, x: &Tensor) -> Result<Tensor> {
    rows("functional::all_gather", x, 1)?;
    apply(AllGather { group: group.clone() }, &[Some(x)])?.single()
}

/// The sum or the mean of all ranks' tensors, of which each rank gets a part along the first
/// dimension: `[N · R, …]` becomes `[R, …]` with N ranks.
///
/// The gradient is that of all ranks' parts, one after another; for the mean, divided by N.
///
/// Equivalent to: `torch.distributed.nn.functional.reduce_scatter`, for the parts of one tensor.
///
/// # Errors
/// For a first dimension that is no multiple of the number of ranks, for another reduction than
/// [`ReduceOp::Sum`] and [`ReduceOp::Avg`], and as for [`ProcessGroup::reduce_scatter_into`].
pub fn reduce_scatter(group: &ProcessGroup, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
    is_linear("functional::reduce_scatter", op)?;
    rows("functional::reduce_scatter", x, group.size())?;
    apply(ReduceScatter { group: group.clone(), op }, &[Some(x)])?.single()
}

/// The tensor of rank `root`, on every rank. The tensors of the others only say the shape and the
/// kind.
///
/// The gradient of rank `root` is the sum of all ranks' gradients; those of the others are zero.
///
/// Equivalent to: `torch.distributed.nn.functional.broadcast(x, root)`.
///
/// # Errors
/// As for [`ProcessGroup::broadcast`].
pub fn broadcast(group: &ProcessGroup, x: &Tensor, root: usize) -> Result<Tensor> {
    group.check_rank("functional::broadcast", "root", root, false)?;
    apply(Broadcast { group: group.clone(), root }, &[Some(x)])?.single()
}

/// Sends the r-th part of the tensor, along its first dimension, to rank r, and returns what the
/// ranks sent to this one, in their order.
///
/// The gradient goes the other way.
///
/// Equivalent to: `torch.distributed.nn.functional.all_to_all_single`.
///
/// # Errors
/// For a first dimension that is no multiple of the number of ranks, and as for
/// [`ProcessGroup::all_to_all`].
pub fn all_to_all(group: &ProcessGroup, x: &Tensor) -> Result<Tensor> {
    rows("functional::all_to_all", x, group.size())?;
    apply(AllToAll { group: group.clone() }, &[Some(x)])?.single()
}

fn is_linear(op: &str, reduce: ReduceOp) -> Result<()> {
    if matches!(reduce, ReduceOp::Sum | ReduceOp::Avg) {
        return Ok(());
    }
    let hint = "detach the tensor and use ProcessGroup's collectives";
    Err(Error::argument(op, "op", "Sum or Avg, which have gradients", format!("{reduce:?}"), hint))
}

/// Checks that the first dimension exists and is a multiple of `parts`.
fn rows(op: &str, x: &Tensor, parts: usize) -> Result<()> {
    let checked = crate::check::Check::new(op, "x", x).defined();
    checked?;
    let fits = x.size().first().is_some_and(|rows| rows % parts as i64 == 0);
    if fits {
        return Ok(());
    }
    let expected = match parts {
        1 => "at least one dimension".to_string(),
        _ => format!("a first dimension that is a multiple of {parts}, the number of ranks"),
    };
    Err(Error::argument(op, "x", expected, format!("shape {:?}", x.size()), ""))
}

/// A new tensor with this number of rows, like another one.
fn like(x: &Tensor, rows: i64) -> Result<Tensor> {
    let mut shape = x.size();
    if let Some(first) = shape.first_mut() {
        *first = rows;
    }
    Ok(Tensor::f_empty(&shape, (x.f_kind()?, x.device()))?)
}

/// A copy with memory of its own.
fn copy(x: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(x.size(), (x.f_kind()?, x.device()))?;
    copy.f_copy_(x)?;
    Ok(copy)
}

struct AllReduce {
    group: ProcessGroup,
    op: ReduceOp,
}

impl Function for AllReduce {
    const NAME: &'static str = "all_reduce";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let y = copy(inputs.get(0)?)?;
        self.group.all_reduce(&y, self.op)?;
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(all_reduce(&self.group, grads.get(0)?, self.op)?.into())
    }
}

struct AllGather {
    group: ProcessGroup,
}

impl Function for AllGather {
    const NAME: &'static str = "all_gather";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        let y = like(x, x.size()[0] * self.group.size() as i64)?;
        self.group.all_gather_into(&y, x)?;
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(reduce_scatter(&self.group, grads.get(0)?, ReduceOp::Sum)?.into())
    }
}

struct ReduceScatter {
    group: ProcessGroup,
    op: ReduceOp,
}

impl Function for ReduceScatter {
    const NAME: &'static str = "reduce_scatter";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        let y = like(x, x.size()[0] / self.group.size() as i64)?;
        self.group.reduce_scatter_into(&y, x, self.op)?;
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let gathered = all_gather(&self.group, grads.get(0)?)?;
        Ok(match self.op {
            ReduceOp::Avg => gathered.f_div_scalar(self.group.size() as f64)?,
            _ => gathered,
        }
        .into())
    }
}

struct Broadcast {
    group: ProcessGroup,
    root: usize,
}

impl Function for Broadcast {
    const NAME: &'static str = "broadcast";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let y = copy(inputs.get(0)?)?;
        self.group.broadcast(&y, self.root)?;
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let reduce = Reduce { group: self.group.clone(), root: self.root };
        Ok(apply(reduce, &[Some(grads.get(0)?)])?.single()?.into())
    }
}

/// The sum of all ranks' tensors on one of them, and zero on the others: what a broadcast's gradient
/// is.
struct Reduce {
    group: ProcessGroup,
    root: usize,
}

impl Function for Reduce {
    const NAME: &'static str = "reduce";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let mut y = copy(inputs.get(0)?)?;
        self.group.reduce(&y, self.root, ReduceOp::Sum)?;
        if self.group.rank() != self.root {
            let _ = y.f_zero_()?;
        }
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(broadcast(&self.group, grads.get(0)?, self.root)?.into())
    }
}

struct AllToAll {
    group: ProcessGroup,
}

impl Function for AllToAll {
    const NAME: &'static str = "all_to_all";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        let y = Tensor::f_empty(x.size(), (x.f_kind()?, x.device()))?;
        self.group.all_to_all(&y, x)?;
        Ok(y.into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(all_to_all(&self.group, grads.get(0)?)?.into())
    }
}
