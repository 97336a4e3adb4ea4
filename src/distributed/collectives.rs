//! The collective operations of a group.

use super::checks::check_reduction;
use super::{ProcessGroup, Work, failed};
use crate::ffi::distributed::{Call, Op};
use crate::{Error, Result};
use std::time::Duration;
use tch::{Device, Tensor};

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum ReduceOp {
    /// The sum. Not for booleans.
    Sum = 0,
    /// The mean. For floating-point kinds.
    Avg = 1,
    /// The product. Not for booleans.
    Product = 2,
    /// The smallest value; for booleans whether all are true.
    Min = 3,
    /// The largest value; for booleans whether any is true.
    Max = 4,
    /// Bitwise and. For integers and booleans on the CPU.
    BitAnd = 5,
    /// Bitwise or. For integers and booleans on the CPU.
    BitOr = 6,
    /// Bitwise exclusive or. For integers and booleans on the CPU.
    BitXor = 7,
}

/// The number of bytes of a message of [`ProcessGroup::broadcast_coalesced`], as in PyTorch.
const COALESCED_BYTES: usize = 250 << 20;

fn call(op: Op) -> Call {
    Call { op, reduce: 0, rank: 0, tag: 0, timeout: -1 }
}

impl ProcessGroup {
    /// Replaces the tensor of every rank by the reduction over all ranks. Shapes and kinds must be
    /// the same on all ranks.
    ///
    /// Equivalent to: `torch.distributed.all_reduce(tensor, op)`.
    ///
    /// # Errors
    /// For a tensor that cannot be sent, a reduction that its kind lacks, or when another rank ended,
    /// failed or did not take part until the timeout.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.all_reduce_async(tensor, op)?.wait()
    }

    /// [`ProcessGroup::all_reduce`], which returns before the result is there.
    ///
    /// # Errors
    /// For a tensor that cannot be sent, or a reduction that its kind lacks.
    pub fn all_reduce_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        let name = "all_reduce";
        self.check(name, "tensor", tensor, true)?;
        check_reduction(name, tensor, op)?;
        let call = Call { reduce: op as i32, ..call(Op::AllReduce) };
        self.start(name, call, Some(tensor), None, (&[], &[]))
    }

    /// Copies the tensor of rank `root` to all ranks, in place. Shapes and kinds must be the same on
    /// all ranks.
    ///
    /// Equivalent to: `torch.distributed.broadcast(tensor, root)`.
    ///
    /// # Errors
    /// For a tensor that cannot be sent, or when another rank ended, failed or did not take part
    /// until the timeout.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.broadcast_async(tensor, root)?.wait()
    }

    /// [`ProcessGroup::broadcast`], which returns before the result is there.
    ///
    /// # Errors
    /// For a tensor that cannot be sent.
    pub fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        let name = "broadcast";
        let rank = self.check_rank(name, "root", root, false)?;
        self.check(name, "tensor", tensor, self.rank() != root)?;
        self.start(name, Call { rank, ..call(Op::Broadcast) }, Some(tensor), None, (&[], &[]))
    }

    /// Copies tensors of rank `root` to all ranks, in few messages. Their number, shapes and kinds
    /// must be the same on all ranks.
    ///
    /// # Errors
    /// As for [`ProcessGroup::broadcast`].
    pub fn broadcast_coalesced(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
        let name = "broadcast_coalesced";
        let rank = self.check_rank(name, "root", root, false)?;
        for tensor in tensors {
            self.check(name, "tensors", tensor, self.rank() != root)?;
        }
        let _start = self.starting(name)?;
        if tensors.is_empty() {
            return Ok(());
        }
        self.handle()
            .broadcast_coalesced(tensors, COALESCED_BYTES, rank)
            .map_err(|reason| self.error(name, &reason))
    }

    /// Replaces the tensor of rank `root` by the reduction over all ranks. The tensors of the other
    /// ranks stay as they are.
    ///
    /// Equivalent to: `torch.distributed.reduce(tensor, root, op)`.
    ///
    /// # Errors
    /// As for [`ProcessGroup::all_reduce`].
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<()> {
        let name = "reduce";
        let rank = self.check_rank(name, "root", root, false)?;
        self.check(name, "tensor", tensor, self.rank() == root)?;
        check_reduction(name, tensor, op)?;
        let call = Call { reduce: op as i32, rank, ..call(Op::Reduce) };
        self.start(name, call, Some(tensor), None, (&[], &[]))?.wait()
    }

    /// The tensors of all ranks, in the order of ranks. Shapes and kinds must be the same on all
    /// ranks.
    ///
    /// Equivalent to: `torch.distributed.all_gather(tensors, tensor)`.
    ///
    /// # Errors
    /// As for [`ProcessGroup::broadcast`].
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        self.check("all_gather", "tensor", tensor, false)?;
        let mut shape = tensor.size();
        shape.insert(0, self.size() as i64);
        let output = Tensor::f_empty(&shape, (tensor.f_kind()?, tensor.device()))?;
        self.all_gather_into(&output, tensor)?;
        (0..self.size() as i64).map(|rank| Ok(output.f_get(rank)?)).collect()
    }

    /// Writes the elements of all ranks' `input` to `output`, in the order of ranks: `output` has
    /// `size` times as many elements, in any shape.
    ///
    /// Equivalent to: `torch.distributed.all_gather_into_tensor(output, input)`.
    ///
    /// # Errors
    /// When the sizes do not fit, and as for [`ProcessGroup::broadcast`].
    pub fn all_gather_into(&self, output: &Tensor, input: &Tensor) -> Result<()> {
        self.all_gather_into_async(output, input)?.wait()
    }

    /// [`ProcessGroup::all_gather_into`], which returns before the result is there.
    ///
    /// # Errors
    /// For tensors that cannot be sent or do not fit.
    pub fn all_gather_into_async(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        let name = "all_gather_into";
        self.check_pair(name, output, input)?;
        self.check_times(name, ("output", output), ("input", input))?;
        self.start(name, call(Op::AllGather), Some(output), Some(input), (&[], &[]))
    }

    /// Reduces `input` over all ranks, and writes this rank's part of the result to `output`: with N
    /// ranks, rank r gets the r-th Nth of the elements.
    ///
    /// Equivalent to: `torch.distributed.reduce_scatter_tensor(output, input, op)`.
    ///
    /// # Errors
    /// When the sizes do not fit, and as for [`ProcessGroup::all_reduce`].
    pub fn reduce_scatter_into(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<()> {
        self.reduce_scatter_into_async(output, input, op)?.wait()
    }

    /// [`ProcessGroup::reduce_scatter_into`], which returns before the result is there.
    ///
    /// # Errors
    /// For tensors that cannot be sent or do not fit.
    pub fn reduce_scatter_into_async(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<Work> {
        let name = "reduce_scatter_into";
        self.check_pair(name, output, input)?;
        check_reduction(name, input, op)?;
        self.check_times(name, ("input", input), ("output", output))?;
        let call = Call { reduce: op as i32, ..call(Op::ReduceScatter) };
        self.start(name, call, Some(output), Some(input), (&[], &[]))
    }

    /// Sends the r-th part of `input`, along its first dimension, to rank r, and writes what comes
    /// from rank r to the r-th part of `output`. All parts have one size.
    ///
    /// Equivalent to: `torch.distributed.all_to_all_single(output, input)`.
    ///
    /// # Errors
    /// When the sizes do not fit, and as for [`ProcessGroup::broadcast`].
    pub fn all_to_all(&self, output: &Tensor, input: &Tensor) -> Result<()> {
        let name = "all_to_all";
        self.check_pair(name, output, input)?;
        if input.numel() != output.numel() {
            let expected = format!("{} elements, as many as the input", input.numel());
            return Err(Error::argument(name, "output", expected, output.numel().to_string(), ""));
        }
        for (argument, tensor) in [("output", output), ("input", input)] {
            let rows = tensor.size().first().copied().unwrap_or(0);
            if rows % self.size() as i64 != 0 || tensor.dim() == 0 {
                let expected = format!("a first dimension that is a multiple of {}", self.size());
                let hint = "pass sizes with all_to_all_sizes";
                return Err(Error::argument(name, argument, expected, rows.to_string(), hint));
            }
        }
        self.start(name, call(Op::AllToAll), Some(output), Some(input), (&[], &[]))?.wait()
    }

    /// [`ProcessGroup::all_to_all`] with parts of different sizes: `input_sizes[r]` rows go to rank r,
    /// and `output_sizes[r]` rows come from it.
    ///
    /// # Errors
    /// When the sizes do not fit, and as for [`ProcessGroup::broadcast`].
    pub fn all_to_all_sizes(
        &self,
        output: &Tensor,
        output_sizes: &[i64],
        input: &Tensor,
        input_sizes: &[i64],
    ) -> Result<()> {
        let name = "all_to_all_sizes";
        self.check_pair(name, output, input)?;
        for (argument, tensor, sizes) in
            [("output_sizes", output, output_sizes), ("input_sizes", input, input_sizes)]
        {
            let rows = tensor.size().first().copied().unwrap_or(0);
            let sum = sizes.iter().try_fold(0_i64, |sum, &size| sum.checked_add(size));
            let fits = sizes.len() == self.size()
                && sizes.iter().all(|&size| size >= 0)
                && sum == Some(rows)
                && tensor.dim() > 0;
            if !fits {
                let expected = format!(
                    "{} sizes, none negative, whose sum is the first dimension ({rows})",
                    self.size()
                );
                return Err(Error::argument(name, argument, expected, format!("{sizes:?}"), ""));
            }
        }
        if output.size().get(1..) != input.size().get(1..) {
            let expected = format!("rows of shape {:?}, as the input's", &input.size()[1..]);
            let got = format!("{:?}", &output.size()[1..]);
            return Err(Error::argument(name, "output", expected, got, ""));
        }
        let sizes = (output_sizes, input_sizes);
        self.start(name, call(Op::AllToAll), Some(output), Some(input), sizes)?.wait()
    }

    /// Sends a tensor to another rank, which calls [`ProcessGroup::recv`] with the same tag.
    ///
    /// # Errors
    /// As for [`ProcessGroup::broadcast`].
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u16) -> Result<()> {
        self.send_async(tensor, to, tag)?.wait()
    }

    /// [`ProcessGroup::send`], which returns before the tensor has been sent.
    ///
    /// # Errors
    /// For a tensor that cannot be sent.
    pub fn send_async(&self, tensor: &Tensor, to: usize, tag: u16) -> Result<Work> {
        let rank = self.check_rank("send", "to", to, true)?;
        self.check("send", "tensor", tensor, false)?;
        let call = Call { rank, tag: i32::from(tag), ..call(Op::Send) };
        self.start("send", call, None, Some(tensor), (&[], &[]))
    }

    /// Receives a tensor from another rank, which sends one of the same size and kind.
    ///
    /// # Errors
    /// As for [`ProcessGroup::broadcast`].
    pub fn recv(&self, tensor: &Tensor, from: usize, tag: u16) -> Result<()> {
        self.recv_async(tensor, from, tag)?.wait()
    }

    /// [`ProcessGroup::recv`], which returns before the tensor is there.
    ///
    /// # Errors
    /// For a tensor that cannot be received.
    pub fn recv_async(&self, tensor: &Tensor, from: usize, tag: u16) -> Result<Work> {
        let rank = self.check_rank("recv", "from", from, true)?;
        self.check("recv", "tensor", tensor, true)?;
        let call = Call { rank, tag: i32::from(tag), ..call(Op::Recv) };
        self.start("recv", call, Some(tensor), None, (&[], &[]))
    }

    /// Waits until all ranks have called this. It waits on the CPU and for no GPU, whose work may
    /// still be running.
    ///
    /// # Errors
    /// When another rank ended, failed or did not come until the timeout.
    pub fn barrier(&self) -> Result<()> {
        self.start("barrier", call(Op::Barrier), None, None, (&[], &[]))?.wait()
    }

    /// Waits until all ranks have called this, and names those that do not come in time.
    ///
    /// # Errors
    /// When another rank ended, failed or did not come in time. Rank 0 names the ranks.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let name = "monitored_barrier";
        if timeout.is_zero() {
            return Err(failed(name, "a timeout of zero; pass more"));
        }
        let _start = self.starting(name)?;
        self.handle().monitored_barrier(timeout).map_err(|reason| self.error(name, &reason))
    }

    fn start(
        &self,
        name: &'static str,
        call: Call,
        output: Option<&Tensor>,
        input: Option<&Tensor>,
        sizes: (&[i64], &[i64]),
    ) -> Result<Work> {
        let _start = self.starting(name)?;
        let work = self
            .handle()
            .start(call, output, input, sizes)
            .map_err(|reason| self.error(name, &reason))?;
        let is_cuda = output.or(input).is_some_and(|tensor| tensor.device() != Device::Cpu);
        Ok(Work::new(name, work, self, is_cuda))
    }

    fn check_pair(&self, name: &'static str, output: &Tensor, input: &Tensor) -> Result<()> {
        self.check(name, "input", input, false)?;
        self.check(name, "output", output, true)?;
        self.check_alike(name, ("output", output), ("input", input))
    }

    /// Checks that one tensor has as many elements as the group has ranks times those of another.
    fn check_times(
        &self,
        name: &'static str,
        (whole_name, whole): (&'static str, &Tensor),
        (part_name, part): (&'static str, &Tensor),
    ) -> Result<()> {
        if part.numel().checked_mul(self.size()) == Some(whole.numel()) {
            return Ok(());
        }
        let expected =
            format!("{} times the {} elements of {part_name}", self.size(), part.numel());
        Err(Error::argument(name, whole_name, expected, whole.numel().to_string(), ""))
    }
}
