//! What is checked of the arguments before anything is sent.

use super::{ProcessGroup, ReduceOp};
use crate::{Error, Result, check};
use tch::{Device, Kind, Tensor};

/// The kinds that every backend sends.
const KINDS: [Kind; 9] = [
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::Int8,
    Kind::Uint8,
    Kind::Int,
    Kind::Int64,
    Kind::Bool,
];

impl ProcessGroup {
    /// Checks a tensor that an operation reads or, if `written`, writes.
    pub(super) fn check(
        &self,
        op: &'static str,
        name: &'static str,
        tensor: &Tensor,
        written: bool,
    ) -> Result<()> {
        check!(op, name, tensor).defined()?.kind_in(&KINDS)?;
        let device = tensor.device();
        if device != Device::Cpu && device != self.device() {
            let (expected, hint) = match self.device() {
                Device::Cpu => (
                    "a tensor on the CPU, because this group has no NCCL".to_string(),
                    "make the group with GroupOptions::device, or move the tensor to the CPU",
                ),
                own => (
                    format!("a tensor on the CPU or on {own:?}, this rank's GPU"),
                    "move the tensor with to_device(group.device())",
                ),
            };
            return Err(Error::argument(op, name, expected, format!("{device:?}"), hint));
        }
        if written && tensor.requires_grad() && !tensor.is_leaf() {
            let hint = "use distributed::functional, whose operations have gradients, or detach it";
            return Err(Error::argument(
                op,
                name,
                "a tensor without a graph, because it is written in place",
                "a result of operations that autograd records",
                hint,
            ));
        }
        Ok(())
    }

    /// Checks that two tensors of an operation have one kind and device.
    pub(super) fn check_alike(
        &self,
        op: &'static str,
        (name, tensor): (&'static str, &Tensor),
        (other_name, other): (&'static str, &Tensor),
    ) -> Result<()> {
        let other = check!(op, other_name, other);
        check!(op, name, tensor).like(&other).map(drop)
    }

    /// Checks the number of a rank of this group, which is not to be this one if `peer`.
    pub(super) fn check_rank(
        &self,
        op: &'static str,
        name: &'static str,
        rank: usize,
        peer: bool,
    ) -> Result<i32> {
        let refuse = |expected: String, got: String| Error::argument(op, name, expected, got, "");
        if rank >= self.size() {
            return Err(refuse(format!("a rank less than {}", self.size()), rank.to_string()));
        }
        if peer && rank == self.rank() {
            return Err(refuse("another rank".to_string(), format!("{rank}, which is this one")));
        }
        i32::try_from(rank).map_err(|_| refuse("a rank".to_string(), rank.to_string()))
    }
}

/// Checks that the reduction exists for the kind.
pub(super) fn check_reduction(op: &'static str, tensor: &Tensor, reduce: ReduceOp) -> Result<()> {
    let kind = tensor.f_kind()?;
    let is_float = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    let (fits, hint) = match reduce {
        ReduceOp::Avg => {
            (is_float, "use ReduceOp::Sum and divide, or cast with to_kind(Kind::Float)")
        }
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => (
            !is_float && tensor.device() == Device::Cpu,
            "these are for integers and booleans on the CPU; NCCL has none",
        ),
        // Booleans would be added as bytes, and 2 is no boolean.
        ReduceOp::Sum | ReduceOp::Product => (
            kind != Kind::Bool,
            "use ReduceOp::Max for \"any\" or ReduceOp::Min for \"all\", or cast with to_kind(Kind::Int64)",
        ),
        ReduceOp::Min | ReduceOp::Max => (true, ""),
    };
    if fits {
        return Ok(());
    }
    let expected = format!("a reduction that exists for {kind:?}");
    Err(Error::argument(op, "op", expected, format!("{reduce:?}"), hint))
}
