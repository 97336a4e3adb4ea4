//! How ranks come together: a group of all, and one of some of them.

use super::{GroupOptions, Inner, OnNcclError, ProcessGroup, left_message, lock};
use crate::distributed::{Env, Store, TcpStoreOptions, failed, report};
use crate::ffi::distributed as ffi;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tch::Device;

/// The longest time between two looks at the store.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

impl ProcessGroup {
    /// Joins all ranks that the launcher started, with Gloo for CPU tensors, and NCCL for those on
    /// [`Env::device`] if that is a GPU. The GPU becomes the current one of this thread.
    ///
    /// Equivalent to: `torch.distributed.init_process_group("cpu:gloo,cuda:nccl")`. Ranks in Python
    /// can be part of the group: with backend `gloo` for the CPU alone, and `check` set to false
    /// here.
    ///
    /// # Errors
    /// When not all ranks come until the timeout, when the port is taken, or when NCCL is needed and
    /// missing.
    pub fn init(env: &Env, options: &GroupOptions) -> Result<ProcessGroup> {
        let op = "ProcessGroup::init";
        env.check()?;
        let store = match &env.master {
            None if env.world_size == 1 => Store::hash(options.timeout)?,
            None => {
                let got = format!("none with {} ranks", env.world_size);
                return Err(Error::argument(op, "env.master", "the place of the store", got, ""));
            }
            Some(master) => {
                let tcp = TcpStoreOptions {
                    server: env.rank == 0 && !master.is_launcher,
                    workers: Some(env.world_size),
                    multi_tenant: !master.is_launcher,
                    timeout: options.timeout,
                };
                Store::tcp(&master.host, master.port, &tcp)?
            }
        };
        let device = Some(options.device.unwrap_or_else(|| env.device()));
        let options = GroupOptions { device, ..options.clone() };
        // Python has the same prefix.
        ProcessGroup::join(op, &store.prefix("default_pg")?, env.rank, env.world_size, options)
    }

    /// Joins the ranks that call this with the same store. Returns when all have come.
    ///
    /// # Errors
    /// When the rank is not less than `size`, or not all ranks come until the timeout.
    pub fn with_store(
        store: &Store,
        rank: usize,
        size: usize,
        options: &GroupOptions,
    ) -> Result<ProcessGroup> {
        ProcessGroup::join("ProcessGroup::with_store", store, rank, size, options.clone())
    }

    /// A group of one rank: a program that is written for several ranks then runs alone.
    ///
    /// # Errors
    /// When libtorch reports one.
    pub fn single() -> Result<ProcessGroup> {
        let options = GroupOptions::default();
        ProcessGroup::with_store(&Store::hash(options.timeout)?, 0, 1, &options)
    }

    fn join(
        op: &str,
        store: &Store,
        rank: usize,
        size: usize,
        options: GroupOptions,
    ) -> Result<ProcessGroup> {
        if size == 0 || rank >= size {
            let got = format!("rank {rank} of {size}");
            return Err(Error::argument(op, "rank", "a number less than the size", got, ""));
        }
        if options.timeout.is_zero() {
            return Err(Error::argument(op, "options.timeout", "more than zero", "zero", ""));
        }
        let device = options.device.unwrap_or(Device::Cpu);
        let gpu = gpu_of(op, device)?;
        let own = store.prefix(&format!("{}/", options.name))?;
        agree_on_checks(op, &own, rank, size, &options)?;
        let parts = ffi::Parts {
            rank,
            size,
            timeout: options.timeout,
            name: &options.name,
            loopback: store.is_local,
            check: options.check && size > 1,
            abort_on_error: options.on_nccl_error == OnNcclError::Abort,
            device: gpu,
        };
        let group = ffi::Group::new(store.handle(), &parts).map_err(|reason| {
            // A rank that has joined may fail before this one is connected.
            let cause = left_message(&own).map(|cause| {
                report::consequence(&cause);
                format!("{cause} ({reason})")
            });
            failed(op, format!("rank {rank} of {size}: {}", cause.unwrap_or(reason)))
        })?;
        let inner = Inner {
            abandoned: Mutex::new(Vec::new()),
            group,
            rank,
            size,
            options,
            device,
            signals: own.reconnected()?,
            store: own,
            failed: Mutex::new(None),
            follows: AtomicBool::new(false),
            start: Mutex::new(()),
            subgroups: Mutex::new(Vec::new()),
            asked: AtomicUsize::new(0),
        };
        Ok(ProcessGroup { inner: Arc::new(inner) })
    }

    /// A group of some ranks of this one, in this order: the first becomes rank 0. **All** ranks of
    /// this group must call it with the same list; those that are not in the list get `None`.
    ///
    /// Equivalent to: `torch.distributed.new_group(ranks)`.
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_extension::distributed::{ReduceOp, run_ranks};
    ///
    /// let sums = run_ranks(3, |group| {
    ///     let x = Tensor::from(group.rank() as f64);
    ///     if let Some(ends) = group.subgroup(&[0, 2])? {
    ///         ends.all_reduce(&x, ReduceOp::Sum)?;
    ///     }
    ///     Ok(x.double_value(&[]))
    /// })?;
    /// assert_eq!(sums, [2.0, 1.0, 2.0]);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the list is empty, has a rank twice or one that does not exist, when another rank asks
    /// for other ranks or calls another operation, when a rank gives the group up, or when not all
    /// ranks come until the timeout.
    pub fn subgroup(&self, ranks: &[usize]) -> Result<Option<ProcessGroup>> {
        let op = "subgroup";
        self.compare(op, op)?;
        // A list that is refused counts, too, and is told: other ranks may have another one.
        let number = self.inner.asked.fetch_add(1, Ordering::Relaxed);
        let list = format!("{ranks:?}");
        let key = |rank: usize| format!("tch_extension/subgroup/{number}/{rank}");
        let store = &self.inner.store;
        store.set(&key(self.rank()), list.as_bytes())?;
        let expected = format!("different ranks less than {}", self.size());
        let is_wrong =
            |(at, rank): (usize, &usize)| *rank >= self.size() || ranks[..at].contains(rank);
        if ranks.is_empty() || ranks.iter().enumerate().any(is_wrong) {
            return Err(Error::argument(op, "ranks", expected, list, ""));
        }
        for rank in 0..self.size() {
            let other = self.read_in_time(op, &key(rank))?;
            if other != list {
                let reason = format!("rank {rank} asks for the ranks {other}, this one for {list}");
                return Err(self.error(op, &reason));
            }
        }
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank()) else {
            return Ok(None);
        };
        let name = format!("{}.{number}", self.name());
        let options =
            GroupOptions { name, device: Some(self.inner.device), ..self.inner.options.clone() };
        let group = ProcessGroup::join(op, store, rank, ranks.len(), options)?;
        lock(&self.inner.subgroups).push(Arc::downgrade(&group.inner));
        Ok(Some(group))
    }

    /// The value that another rank sets, as text. It looks at the store again and again, because a
    /// store that waits for a key would not notice that a rank gives the group up.
    pub(super) fn read_in_time(&self, op: &str, key: &str) -> Result<String> {
        let (store, begun) = (&self.inner.store, Instant::now());
        let mut pause = Duration::from_millis(1);
        let is_set = || store.check(key).map_err(|error| self.error(op, &error.to_string()));
        while !is_set()? {
            if self.failure().is_some() || self.others_failed() {
                // A rank that drops the group when it has done its part has set the key before.
                if self.failure().is_none() && is_set()? {
                    break;
                }
                return Err(self.error(op, "it waited for the other ranks"));
            }
            if begun.elapsed() >= self.timeout() {
                let timeout = self.timeout();
                return Err(self.error(op, &format!("Timed out waiting {timeout:?} for all ranks")));
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        let value = store.get(key).map_err(|error| self.error(op, &error.to_string()))?;
        Ok(String::from_utf8_lossy(&value).into_owned())
    }
}

/// The index of a GPU that the group can have; `None` for the CPU.
fn gpu_of(op: &str, device: Device) -> Result<Option<usize>> {
    let argument = "options.device";
    let Device::Cuda(index) = device else {
        return match device {
            Device::Cpu => Ok(None),
            _ => Err(Error::argument(op, argument, "the CPU or a GPU", format!("{device:?}"), "")),
        };
    };
    let hint = "set GroupOptions::device to Device::Cpu for a group without NCCL";
    if let Some(missing) = ffi::no_nccl() {
        let expected = "the CPU, because this build has no NCCL";
        let got = format!("{device:?}; {missing}");
        return Err(Error::argument(op, argument, expected, got, hint));
    }
    let gpus = tch::Cuda::device_count();
    if i64::try_from(index).is_ok_and(|index| index < gpus) {
        return Ok(Some(index));
    }
    let expected = format!("one of the {gpus} GPUs that libtorch sees");
    Err(Error::argument(op, argument, expected, format!("{device:?}"), "start fewer ranks"))
}

/// Makes sure that either all ranks compare their operations or none does.
fn agree_on_checks(
    op: &str,
    store: &Store,
    rank: usize,
    size: usize,
    options: &GroupOptions,
) -> Result<()> {
    if size == 1 {
        return Ok(());
    }
    let key = |rank: usize| format!("tch_extension/check/{rank}");
    store.set(&key(rank), &[u8::from(options.check)])?;
    if !options.check {
        return Ok(());
    }
    for other in 0..size {
        let place = format!("rank {rank} of {size}: rank {other}");
        let theirs = store.wait(&key(other), options.timeout).and_then(|()| store.get(&key(other)));
        match theirs {
            Ok(value) if value == [1] => {}
            Ok(_) => {
                let reason = format!(
                    "{place} does not compare operations; set GroupOptions::check to the same on all ranks"
                );
                return Err(failed(op, reason));
            }
            Err(error) => {
                let reason = format!(
                    "{place} did not come ({error}); if it is in Python, set GroupOptions::check to false"
                );
                return Err(failed(op, reason));
            }
        }
    }
    Ok(())
}
