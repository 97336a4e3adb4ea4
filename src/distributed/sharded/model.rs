//! How a sharded optimizer is made of an ordinary one.

use super::ShardedOptimizer;
use super::gradients::{Gradients, hooks};
use super::layout::{Caps, Entry, Layout, Piece};
use super::options::ShardedOptions;
use super::weights::{Weights, device_of};
use crate::distributed::ProcessGroup;
use crate::distributed::agree::Agreement;
use crate::distributed::watch::Replays;
use crate::optim::FusedOptimizer;
use crate::optim::shard::NewPart;
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use tch::{Device, Kind, Tensor};

/// The optimizer that is to be distributed, and its parameters.
pub(super) struct Model {
    optimizer: FusedOptimizer,
    /// The parameters that require grad.
    named: Vec<(String, Tensor)>,
    /// Their places in the optimizer.
    places: Vec<usize>,
    frozen: Vec<(String, Tensor)>,
    device: Device,
    caps: Caps,
}

/// What is made before ranks agree on it.
pub(super) struct Buffers {
    layout: Layout,
    pub weights: Weights,
    gradients: Gradients,
}

impl Model {
    pub fn new(mut optimizer: FusedOptimizer, options: &ShardedOptions) -> Result<Model> {
        let caps = options.caps(super::NEW)?;
        optimizer.join(super::NEW)?;
        if optimizer.is_of_muon() {
            let hint = "a rank would have parts of matrices; use Ddp, whose ranks have them whole";
            return Err(Error::argument(super::NEW, "optimizer", "AdamW or Sgd", "Muon", hint));
        }
        if optimizer.has_state() {
            let hint = "load its state into the sharded optimizer";
            let expected = "an optimizer without steps";
            return Err(Error::argument(super::NEW, "optimizer", expected, "steps", hint));
        }
        let (mut named, mut places, mut frozen) = (Vec::new(), Vec::new(), Vec::new());
        for (place, (name, tensor)) in optimizer.named_parameters().enumerate() {
            let pair = (name.to_string(), tensor.shallow_clone());
            if tensor.requires_grad() {
                named.push(pair);
                places.push(place);
            } else {
                frozen.push(pair);
            }
        }
        let device = device_of(super::NEW, &named)?;
        Ok(Model { optimizer, named, places, frozen, device, caps })
    }

    /// What must be the same on all ranks.
    pub fn lines(&self, options: &ShardedOptions) -> Result<Vec<String>> {
        let device = if self.device == Device::Cpu { "the CPU" } else { "CUDA" };
        let mut lines = vec![
            format!("parameters on {device}"),
            self.optimizer.settings(false),
            format!("{options:?}"),
        ];
        for (place, (name, tensor)) in self.optimizer.named_parameters().enumerate() {
            let role = if tensor.requires_grad() { "" } else { ", which requires no grad" };
            let (size, strides) = (tensor.size(), tensor.stride());
            lines.push(format!(
                "parameter {name:?} of kind {:?} and shape {size:?} with strides {strides:?} in \
                 group {}{role}",
                tensor.f_kind()?,
                self.optimizer.group_of(place)
            ));
        }
        Ok(lines)
    }

    pub fn buffers(&self, group: &ProcessGroup, options: &ShardedOptions) -> Result<Buffers> {
        let entry = |(_, tensor): &(String, Tensor)| {
            Ok(Entry { len: tensor.numel() as i64, kind: tensor.f_kind()? })
        };
        let entries = self.named.iter().map(entry).collect::<Result<Vec<_>>>()?;
        let layout = Layout::new(&entries, group.size() as i64, self.caps);
        let weights = Weights::new(group, &layout, &self.named, self.device)?;
        let gradients = Gradients::new(group, &layout, &self.named, self.device, options)?;
        Ok(Buffers { layout, weights, gradients })
    }

    /// Gives all ranks rank 0's values of what lies in no buffer.
    pub fn broadcast(&self, group: &ProcessGroup) -> Result<()> {
        if group.size() == 1 {
            return Ok(());
        }
        let masters =
            self.places.iter().filter_map(|place| self.optimizer.master_of_caller(*place));
        let frozen = self.frozen.iter().map(|(_, tensor)| tensor);
        for tensor in masters.chain(frozen) {
            group.broadcast(&tensor.f_detach()?, 0)?;
        }
        Ok(())
    }

    /// The optimizer, whose parameters are not yet views of the buffers.
    pub fn into_sharded(self, group: &ProcessGroup, buffers: Buffers) -> Result<ShardedOptimizer> {
        let Model { optimizer, named, places, frozen, device, .. } = self;
        let Buffers { layout, weights, gradients } = buffers;
        let (pieces, batches) = pieces_of(&layout, group);
        let own: Vec<Tensor> = gradients.own().map(Tensor::shallow_clone).collect();
        let part = |whole: &Tensor, piece: &Piece| {
            Ok(whole.f_narrow(0, piece.place, piece.range.end - piece.range.start)?)
        };
        let part_gradients = pieces.iter().map(|piece| part(&own[piece.bucket], piece));
        let part_gradients = part_gradients.collect::<Result<Vec<_>>>()?;
        let new_part = |piece: &Piece| {
            let index = places[piece.parameter];
            let master = match optimizer.master_of_caller(index) {
                Some(master) => Some(in_memory(master)?.f_narrow(
                    0,
                    piece.range.start,
                    piece.range.end - piece.range.start,
                )?),
                None => None,
            };
            Ok(NewPart { index, tensor: part(weights.own(piece.bucket), piece)?, master })
        };
        let parts = pieces.iter().map(new_part).collect::<Result<Vec<_>>>()?;
        let joined = optimizer.joined();
        let inner = optimizer.into_parts(parts)?;
        let gradients = Arc::new(Mutex::new(gradients));
        Ok(ShardedOptimizer {
            _hooks: hooks(&gradients, &named)?,
            group: group.clone(),
            device,
            layout,
            inner,
            pieces,
            batches,
            weights,
            frozen,
            gradients,
            part_gradients,
            totals: Tensor::f_zeros([2], (Kind::Double, device))?,
            has_norm: false,
            joined,
            replays: Replays::default(),
            exempt: BTreeSet::new(),
            agreement: Agreement::default(),
        })
    }
}

/// The pieces of this rank, and those that are updated together: those of a bucket. In a group of
/// one, all of them, in the order of the parameters, as in an ordinary optimizer.
fn pieces_of(layout: &Layout, group: &ProcessGroup) -> (Vec<Piece>, Vec<Range<usize>>) {
    let mut pieces = layout.pieces(group.rank() as i64);
    if group.size() == 1 {
        let all = 0..pieces.len();
        return (pieces, vec![all]);
    }
    pieces.sort_by_key(|piece| (piece.bucket, piece.place));
    let batch = |bucket: usize| {
        pieces.partition_point(|piece| piece.bucket < bucket)
            ..pieces.partition_point(|piece| piece.bucket <= bucket)
    };
    let batches = (0..layout.buckets.len()).map(batch).collect();
    (pieces, batches)
}

/// The values of a dense tensor in the order of addresses, as a vector in the same memory.
pub(super) fn in_memory(tensor: &Tensor) -> Result<Tensor> {
    let detached = tensor.f_detach()?;
    Ok(detached.f_as_strided([tensor.numel() as i64], [1_i64], None)?)
}
