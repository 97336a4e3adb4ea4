//! The options of a [`Ddp`](super::Ddp), and communication hooks.

use super::super::{ProcessGroup, Work};
use crate::ffi::distributed::ddp as ffi;
use crate::{Error, Result};
use std::fmt;
use tch::Tensor;

/// How a [`Ddp`](super::Ddp) works. The options must be the same on all ranks.
///
/// ```
/// use tch_extension::distributed::{CommHook, DdpOptions};
///
/// let options = DdpOptions { hook: CommHook::Bf16, ..Default::default() };
/// assert!(options.gradient_as_bucket_view);
/// ```
#[derive(Debug)]
pub struct DdpOptions {
    /// How many MiB of gradients are communicated at once. Small buckets overlap better with the
    /// backward pass, large ones use the network better. Default: 25, as in PyTorch.
    pub bucket_cap_mb: f64,
    /// The same for the bucket that is ready first, which should start soon. Default: 1, as in
    /// PyTorch, which takes `bucket_cap_mb` for it if that is given.
    pub first_bucket_mb: f64,
    /// Search the graph of each forward pass for parameters that it does not use, and do not wait
    /// for their gradients. All tensors that the loss is made of must then be outputs of
    /// [`Ddp::forward`](super::Ddp::forward). Default: false.
    pub find_unused_parameters: bool,
    /// Let each gradient be a view of its bucket, which saves memory and copies. A gradient that is
    /// kept is then overwritten by the next step, and tch's `Tensor::zero_grad` panics, because it
    /// would detach a view: use that of the optimizer. Default: true; false in PyTorch.
    pub gradient_as_bucket_view: bool,
    /// Every pass uses the same parameters in the same way. The first finds out which, so that
    /// nothing is searched for later. Default: false.
    pub static_graph: bool,
    /// Hand the buffers of rank 0 to the other ranks, at the start and before the forward pass after
    /// each synchronised one. Default: true.
    pub broadcast_buffers: bool,
    /// How gradients are communicated.
    pub hook: CommHook,
    /// Some ranks run Python's `DistributedDataParallel`. The parameters are then compared as it does,
    /// which tells their number, shapes and kinds only, and a rank that finds a difference gives the
    /// group up. Parameters must be given in Python's order, and buffers, too. Optimizers are not
    /// compared. Default: false.
    pub with_python: bool,
}

impl Default for DdpOptions {
    fn default() -> Self {
        DdpOptions {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            find_unused_parameters: false,
            gradient_as_bucket_view: true,
            static_graph: false,
            broadcast_buffers: true,
            hook: CommHook::None,
            with_python: false,
        }
    }
}

/// A closure that communicates a bucket.
type Closure = Box<dyn FnMut(&Bucket) -> Result<Option<Work>> + Send>;

/// How the gradients of a bucket become averages of all ranks.
#[derive(Default)]
pub enum CommHook {
    /// Each is divided by the number of ranks, and they are added up.
    #[default]
    None,
    /// The same, but what is sent is rounded to `BFloat16`, which halves it. Gradients keep their
    /// kind. They have errors of up to 2⁻⁸ of their size, the same on all ranks.
    Bf16,
    /// The same with `Half`: errors of up to 2⁻¹¹, but gradients below 6e-8 become 0 and those above
    /// 65504 infinite. Use a [`GradScaler`](crate::amp::GradScaler).
    Fp16,
    /// A closure of your own: see [`CommHook::closure`].
    Closure(Closure),
}

impl CommHook {
    /// A closure that gets each bucket when its gradients are complete on this rank, and must
    /// replace them by what the optimizer is to get: usually their average, so it divides. It can
    /// wait for the result, or return the operation in flight that writes it to the bucket's buffer,
    /// so that the backward pass goes on meanwhile. It runs in the thread of the backward pass. It
    /// must not use the [`Ddp`](super::Ddp).
    ///
    /// An error or a panic becomes an error of the backward pass.
    ///
    /// ```
    /// use tch::nn::{self, Module};
    /// use tch::{Device, Kind, Tensor};
    /// use tch_extension::distributed::{CommHook, Ddp, DdpOptions, ReduceOp, run_ranks};
    ///
    /// run_ranks(2, |group| {
    ///     let vs = nn::VarStore::new(Device::Cpu);
    ///     let model = nn::linear(vs.root(), 3, 1, Default::default());
    ///     let ranks = group.clone();
    ///     let hook = CommHook::closure(move |bucket| {
    ///         let _ = bucket.buffer().shallow_clone().f_div_scalar_(ranks.size() as i64)?;
    ///         ranks.all_reduce_async(bucket.buffer(), ReduceOp::Sum).map(Some)
    ///     });
    ///     let ddp = Ddp::new(&group, &vs, DdpOptions { hook, ..Default::default() })?;
    ///     let x = Tensor::ones([4, 3], (Kind::Float, Device::Cpu)) * (group.rank() as f64 + 1.0);
    ///     let loss = ddp.forward(|| Ok(model.forward(&x).sum(Kind::Float)))?;
    ///     ddp.backward(&loss)?;
    ///     let gradient = model.ws.grad();
    ///     assert_eq!(gradient.double_value(&[0, 0]), 6.0); // (4 + 8) / 2
    ///     Ok(())
    /// })?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn closure<F>(hook: F) -> CommHook
    where
        F: FnMut(&Bucket) -> Result<Option<Work>> + Send + 'static,
    {
        CommHook::Closure(Box::new(hook))
    }

    fn name(&self) -> &'static str {
        match self {
            CommHook::None => "None",
            CommHook::Bf16 => "Bf16",
            CommHook::Fp16 => "Fp16",
            CommHook::Closure(_) => "Closure",
        }
    }
}

impl fmt::Debug for CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Gradients that are communicated at once.
#[derive(Debug)]
pub struct Bucket(ffi::Bucket);

impl Bucket {
    /// The gradients one after the other: 1 dimension, contiguous. Change it in place.
    pub fn buffer(&self) -> &Tensor {
        &self.0.buffer
    }

    /// Each parameter's part of the buffer, with the parameter's shape.
    pub fn gradients(&self) -> &[Tensor] {
        &self.0.gradients
    }

    /// The bucket's number, in the order in which buckets are communicated. In the first pass with
    /// [`static_graph`](DdpOptions::static_graph), all have number 0.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// Whether it is the last bucket of the backward pass.
    pub fn is_last(&self) -> bool {
        self.0.is_last
    }
}

impl DdpOptions {
    /// The options for C++. libtorch's number of a kind is that of `kind.h`.
    pub(super) fn parts(&self, op: &str) -> Result<ffi::Options> {
        Ok(ffi::Options {
            bucket_bytes: bytes(op, "bucket_cap_mb", self.bucket_cap_mb)?,
            first_bucket_bytes: bytes(op, "first_bucket_mb", self.first_bucket_mb)?,
            compress: match self.hook {
                CommHook::Bf16 => 15,
                CommHook::Fp16 => 5,
                CommHook::None | CommHook::Closure(_) => -1,
            },
            find_unused_parameters: self.find_unused_parameters,
            gradient_as_bucket_view: self.gradient_as_bucket_view,
            static_graph: self.static_graph,
            broadcast_buffers: self.broadcast_buffers,
            verify: self.with_python,
        })
    }

    /// What must be the same on all ranks.
    pub(super) fn describe(&self) -> String {
        format!(
            "bucket_cap_mb {}, first_bucket_mb {}, find_unused_parameters {}, static_graph {}, \
             broadcast_buffers {}, hook {}, with_python {}",
            self.bucket_cap_mb,
            self.first_bucket_mb,
            self.find_unused_parameters,
            self.static_graph,
            self.broadcast_buffers,
            self.hook.name(),
            self.with_python
        )
    }
}

/// A size in MiB as Python's `DistributedDataParallel` rounds it.
fn bytes(op: &str, argument: &str, mib: f64) -> Result<i64> {
    let bytes = mib * 1024.0 * 1024.0;
    if (1.0..1e15).contains(&bytes) {
        return Ok(bytes as i64);
    }
    let expected = "a size in MiB of at least one byte";
    Err(Error::argument(op, argument, expected, mib.to_string(), ""))
}

/// The hook that C++ calls, if it is a closure.
pub(super) fn boxed(hook: CommHook, group: &ProcessGroup) -> Option<ffi::Hook> {
    let CommHook::Closure(mut closure) = hook else { return None };
    let rank = group.rank();
    Some(Box::new(move |bucket| {
        let bucket = Bucket(bucket);
        let work = closure(&bucket).map_err(|error| format!("rank {rank}: {error}"))?;
        Ok(work.and_then(Work::into_handle))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_mib() {
        assert_eq!(bytes("Ddp::new", "bucket_cap_mb", 25.0).expect("fits"), 25 << 20);
        let python = bytes("Ddp::new", "bucket_cap_mb", 1200.0 / 1048576.0).expect("fits");
        assert_eq!(python, 1200);
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9] {
            let error = bytes("Ddp::new", "bucket_cap_mb", wrong).expect_err("refused").to_string();
            assert!(error.contains("bucket_cap_mb: expected a size in MiB"), "{error}");
        }
    }
}
