//! The flat buffers of gradients: the backward pass fills them, and each bucket is reduced as soon
//! as it is complete, in the same order on every rank.

use super::Compression;
use super::layout::Layout;
use crate::autograd::{Hook, register_post_accumulate_grad_hook};
use crate::distributed::{ProcessGroup, ReduceOp, Work};
use crate::ffi::gradients::zero;
use crate::ffi::sharded::take_gradient;
use crate::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};

/// The buffers of all gradients, which the hooks of the parameters share with the optimizer.
pub(super) struct Gradients {
    group: ProcessGroup,
    layout: Layout,
    names: Vec<String>,
    buckets: Vec<Bucket>,
    parameters: Vec<Parameter>,
    allow_unused: bool,
    compression: Compression,
    /// The first bucket that is not yet being reduced.
    next: usize,
    /// Whether the backward pass of now is the last of the step.
    is_last: bool,
    /// Whether the buffers are zero at the beginning of a step, so that all gradients are added.
    /// A graph of one backward pass can then be replayed for each of several.
    adds: bool,
    /// Why the gradients are not to be used.
    failed: Option<String>,
}

struct Bucket {
    /// The gradients of this rank, of all parameters of the bucket.
    whole: Tensor,
    /// This rank's part of the mean over all ranks. It is `whole` itself in a group of one.
    own: Tensor,
    /// How many gradients the last backward pass has not brought.
    missing: usize,
    reduction: Option<Reduction>,
}

/// A reduction in flight.
struct Reduction {
    work: Work,
    /// The rounded gradients, and this rank's part of their sum.
    rounded: Option<(Tensor, Tensor)>,
}

struct Parameter {
    /// Its place in the bucket's `whole`, with its sizes and strides.
    view: Tensor,
    /// The number of backward passes since the last step that brought a gradient.
    count: usize,
    /// Whether the last backward pass of the step has brought one.
    has_arrived: bool,
    /// Whether any backward pass has ever brought one. Graphs bring some without being counted.
    is_used: bool,
}

/// A part of a flat buffer with the sizes and strides of a parameter.
pub(super) fn view_of(whole: &Tensor, begin: i64, like: &Tensor) -> Result<Tensor> {
    // The buffers are whole storages, so that the offset is the place in the buffer.
    Ok(whole.f_as_strided(like.size(), like.stride(), begin)?)
}

const OP: &str = "ShardedOptimizer";

impl Gradients {
    pub fn new(
        group: &ProcessGroup,
        layout: &Layout,
        named: &[(String, Tensor)],
        device: Device,
        options: &super::ShardedOptions,
    ) -> Result<Gradients> {
        let ranks = group.size() as i64;
        let bucket = |bucket: &super::layout::Bucket| {
            let like = (bucket.kind, device);
            let whole = Tensor::f_zeros([ranks * bucket.part], like)?;
            let own = match ranks {
                1 => whole.shallow_clone(),
                _ => Tensor::f_zeros([bucket.part], like)?,
            };
            Ok(Bucket { whole, own, missing: 0, reduction: None })
        };
        let buckets = layout.buckets.iter().map(bucket).collect::<Result<Vec<_>>>()?;
        let parameter = |(index, (_, tensor)): (usize, &(String, Tensor))| {
            let whole = &buckets[layout.places[index].0].whole;
            let view = view_of(whole, layout.slot(index).range.start, tensor)?;
            Ok(Parameter { view, count: 0, has_arrived: false, is_used: false })
        };
        let parameters = named.iter().enumerate().map(parameter).collect::<Result<Vec<_>>>()?;
        let mut gradients = Gradients {
            group: group.clone(),
            layout: layout.clone(),
            names: named.iter().map(|(name, _)| name.clone()).collect(),
            buckets,
            parameters,
            allow_unused: options.allow_unused,
            compression: options.compression,
            next: 0,
            is_last: true,
            adds: false,
            failed: None,
        };
        gradients.forget();
        Ok(gradients)
    }

    /// The parts of the mean gradients that belong to this rank, bucket by bucket.
    pub fn own(&self) -> impl Iterator<Item = &Tensor> {
        self.buckets.iter().map(|bucket| &bucket.own)
    }

    /// Whether gradients are zeroed and added, which a graph repeats.
    pub fn adds(&self) -> bool {
        self.adds
    }

    /// Begins a step anew.
    fn forget(&mut self) {
        for parameter in &mut self.parameters {
            (parameter.count, parameter.has_arrived) = (0, false);
        }
        for (bucket, slots) in self.buckets.iter_mut().zip(&self.layout.buckets) {
            // libtorch computes no gradient of parameters without values in some cases.
            bucket.missing = slots.slots.iter().filter(|slot| !slot.range.is_empty()).count();
            bucket.reduction = None;
        }
        self.next = 0;
    }

    /// Says whether the backward passes from now on are the last of their steps, and returns what
    /// was said before.
    pub fn set_last(&mut self, is_last: bool) -> bool {
        std::mem::replace(&mut self.is_last, is_last)
    }

    /// Prepares buffers to which all gradients are added, for graphs of several backward passes.
    pub fn begin_to_add(&mut self) -> Result<()> {
        if !self.adds {
            let unset = self.parameters.iter().filter(|parameter| parameter.count == 0);
            zero(&unset.map(|parameter| parameter.view.shallow_clone()).collect::<Vec<_>>())?;
            self.adds = true;
        }
        Ok(())
    }

    /// Gives up the gradients of a step that ends before it, unless other ranks have got some.
    pub fn give_up(&mut self, op: &str) -> Result<()> {
        self.check(op)?;
        let is_alone = self.group.size() == 1;
        if self.next > 0 && !is_alone {
            let reason = "the gradients of a backward pass are being reduced; expected a step after \
                          it, got the beginning of another; use no_sync for all backward passes of \
                          a step but the last";
            return Err(self.fail(op, reason.to_string()));
        }
        let is_begun = self.parameters.iter().any(|parameter| parameter.count > 0);
        self.forget();
        if self.adds && is_begun {
            let wholes: Vec<_> = self.buckets.iter().map(|b| b.whole.shallow_clone()).collect();
            zero(&wholes)?;
        }
        Ok(())
    }

    /// An error if the gradients are not to be used.
    fn check(&self, op: &str) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(reason) => Err(failure(op, format!("an earlier call failed: {reason}"))),
        }
    }

    /// Makes all later calls fail, here and on other ranks.
    pub fn fail(&mut self, op: &str, reason: String) -> Error {
        self.group.poison(&format!("{op}: {reason}"));
        self.failed.get_or_insert_with(|| reason.clone());
        failure(op, reason)
    }

    /// Takes the gradient that a backward pass has just completed.
    fn take(&mut self, index: usize, leaf: &Tensor) -> Result<()> {
        self.check(OP)?;
        let (name, bucket) = (&self.names[index], self.layout.places[index].0);
        let is_empty = self.layout.slot(index).range.is_empty();
        let parameter = &mut self.parameters[index];
        // What is being reduced must not change, also not by a pass in `no_sync`.
        if !is_empty && (self.is_last && parameter.has_arrived || bucket < self.next) {
            return Err(failure(
                OP,
                format!(
                    "{name}: expected a step after a backward pass, got another backward pass; use \
                     no_sync for all but the last"
                ),
            ));
        }
        let factor = 1.0 / self.group.size() as f64;
        let adds = self.adds || parameter.count > 0;
        take_gradient(leaf, &parameter.view, factor, adds)
            .map_err(|error| failure(OP, format!("{name}: {error}")))?;
        parameter.count += 1;
        parameter.is_used = true;
        if !self.is_last {
            return Ok(());
        }
        parameter.has_arrived = true;
        if is_empty {
            return Ok(());
        }
        self.buckets[bucket].missing -= 1;
        if !self.allow_unused {
            self.reduce_complete()?;
        }
        Ok(())
    }

    /// Begins to reduce all buckets that are complete, up to the first that is not.
    fn reduce_complete(&mut self) -> Result<()> {
        while self.buckets.get(self.next).is_some_and(|bucket| bucket.missing == 0) {
            self.reduce(self.next)?;
            self.next += 1;
        }
        Ok(())
    }

    fn reduce(&mut self, index: usize) -> Result<()> {
        let Bucket { whole, own, reduction, .. } = &mut self.buckets[index];
        // Parameters without values may have a bucket of their own.
        if self.group.size() == 1 || own.numel() == 0 {
            return Ok(());
        }
        let rounds = self.compression == Compression::BFloat16 && whole.f_kind()? == Kind::Float;
        let sum = ReduceOp::Sum;
        *reduction = Some(match rounds {
            false => {
                let work = self.group.reduce_scatter_into_async(own, whole, sum)?;
                Reduction { work, rounded: None }
            }
            true => {
                let _no_grad = tch::no_grad_guard();
                let from = whole.f_to_kind(Kind::BFloat16)?;
                let to = Tensor::f_empty(own.size(), (Kind::BFloat16, own.device()))?;
                let work = self.group.reduce_scatter_into_async(&to, &from, sum)?;
                Reduction { work, rounded: Some((from, to)) }
            }
        });
        Ok(())
    }

    /// Reduces what the backward pass has left, and waits until all parts of this rank are there;
    /// on CUDA, the current stream waits.
    pub fn finish(&mut self, op: &str) -> Result<()> {
        self.check(op)?;
        self.fill_missing(op)?;
        while self.next < self.buckets.len() {
            self.reduce(self.next)?;
            self.next += 1;
        }
        let _no_grad = tch::no_grad_guard();
        for Bucket { own, reduction, .. } in &mut self.buckets {
            let Some(Reduction { work, rounded }) = reduction.take() else { continue };
            work.wait()?;
            if let Some((_, rounded)) = rounded {
                own.f_copy_(&rounded)?;
            }
        }
        Ok(())
    }

    /// Gradients that are allowed to be missing are zero.
    fn fill_missing(&mut self, op: &str) -> Result<()> {
        let is_missing = |index: &usize| {
            let parameter = &self.parameters[*index];
            let is_absent = if self.adds { !parameter.is_used } else { parameter.count == 0 };
            is_absent && !self.layout.slot(*index).range.is_empty()
        };
        let missing: Vec<usize> = (0..self.parameters.len()).filter(is_missing).collect();
        if let Some(first) = missing.first().filter(|_| !self.allow_unused) {
            let (name, len) = (&self.names[*first], missing.len());
            return Err(failure(
                op,
                format!(
                    "{name}: expected a gradient, got none, as for {len} of {} parameters; did the \
                     backward pass reach it? ShardedOptions::allow_unused takes it as zero",
                    self.parameters.len()
                ),
            ));
        }
        if self.adds {
            // The buffers were zero.
            return Ok(());
        }
        let views = missing.iter().map(|index| self.parameters[*index].view.shallow_clone());
        zero(&views.collect::<Vec<_>>())
    }

    /// After a step.
    pub fn end(&mut self) -> Result<()> {
        self.forget();
        if self.adds {
            let wholes: Vec<_> = self.buckets.iter().map(|b| b.whole.shallow_clone()).collect();
            zero(&wholes)?;
        }
        Ok(())
    }
}

pub(super) fn failure(op: &str, reason: String) -> Error {
    crate::distributed::failed(op, reason)
}

/// What hooks and the optimizer share. A panic elsewhere leaves nothing half done that
/// `Gradients::check` would not find.
pub(super) fn lock(gradients: &Mutex<Gradients>) -> MutexGuard<'_, Gradients> {
    gradients.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets backward passes fill the buffers.
pub(super) fn hooks(
    gradients: &Arc<Mutex<Gradients>>,
    named: &[(String, Tensor)],
) -> Result<Vec<Hook>> {
    let hook = |(index, (_, tensor)): (usize, &(String, Tensor))| {
        let gradients = Arc::clone(gradients);
        register_post_accumulate_grad_hook(tensor, move |leaf| {
            let mut gradients = lock(&gradients);
            gradients.take(index, leaf).map_err(|error| {
                let text = error.to_string();
                gradients.fail(OP, text.trim_start_matches("ShardedOptimizer: ").to_string())
            })
        })
    };
    named.iter().enumerate().map(hook).collect()
}
