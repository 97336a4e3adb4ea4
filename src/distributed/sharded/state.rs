//! The state of all ranks in one: gathered for a file, and distributed again.

use super::ShardedOptimizer;
use super::layout::Piece;
use super::model::in_memory;
use crate::distributed::ReduceOp;
use crate::distributed::agree::{all_have, all_succeed, checksums};
use crate::ffi::gradients::snapshot;
use crate::optim::shard::PARTS;
use crate::state_dict::{read_tensors, shown, write_tensors};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Named tensors of a state.
pub(super) type Tensors = BTreeMap<String, Tensor>;

/// The word of the count of steps, as in PyTorch.
pub(super) const STEP: &str = "step";

/// What a tensor of a state belongs to.
struct Key<'a> {
    word: &'a str,
    parameter: &'a str,
}

impl ShardedOptimizer {
    /// The state of all ranks as named tensors on the CPU, on rank 0; `None` on the others. Every
    /// rank must call it. The names and shapes are those of
    /// [`FusedOptimizer::state_dict`](crate::optim::FusedOptimizer::state_dict), so that an optimizer of whole
    /// parameters loads it, too. Rank 0 needs host memory for the whole state.
    ///
    /// # Errors
    /// When another rank ended, failed or did not take part until the timeout; when memory is
    /// exhausted.
    pub fn gather_state_dict(&self) -> Result<Option<Tensors>> {
        let _no_grad = tch::no_grad_guard();
        let words = self.inner.state_words();
        let (has_part, steps) = self.presence()?;
        let mut gathered = Tensors::new();
        for bucket in 0..self.layout.buckets.len() {
            for (place, word) in words.into_iter().enumerate() {
                let slots = &self.layout.buckets[bucket].slots;
                let is_there = |parameter: usize| has_part[parameter][place];
                if !slots.iter().any(|slot| is_there(slot.parameter)) {
                    continue;
                }
                let whole = self.gather_bucket(bucket, place)?;
                if self.group.rank() > 0 {
                    continue;
                }
                for slot in slots.iter().filter(|slot| is_there(slot.parameter)) {
                    let parameter = &self.weights.parameters[slot.parameter];
                    let view =
                        super::gradients::view_of(&whole, slot.range.start, &parameter.tensor)?;
                    let kind = parameter.tensor.f_kind()?;
                    let kinds = self.inner.state_kinds(kind, has_part[slot.parameter]);
                    let copy = Tensor::f_empty(view.size(), (kinds[place], Device::Cpu))?;
                    copy.shallow_clone().f_copy_(&view)?;
                    gathered.insert(format!("{word}.{}", parameter.name), copy);
                }
            }
        }
        if self.group.rank() > 0 {
            return Ok(None);
        }
        let trained = self.names().zip(steps);
        for (name, steps) in trained.chain(self.frozen.iter().map(|(name, _)| (name.as_str(), 0))) {
            gathered.insert(format!("{STEP}.{name}"), scalar(steps)?);
        }
        gathered.extend(self.inner.numbers_of_groups()?);
        Ok(Some(gathered))
    }

    /// For each parameter, which parts of a state there are, and the number of steps.
    fn presence(&self) -> Result<(Vec<[bool; PARTS]>, Vec<i64>)> {
        const ROW: usize = PARTS + 1;
        let mut flat = vec![0_i64; ROW * self.weights.parameters.len()];
        for (index, piece) in self.pieces.iter().enumerate() {
            let Some((tensors, step)) = self.inner.state_of(index) else { continue };
            let row = &mut flat[ROW * piece.parameter..ROW * (piece.parameter + 1)];
            for (value, tensor) in row.iter_mut().zip(tensors) {
                *value = i64::from(tensor.is_some());
            }
            row[PARTS] = step.f_int64_value(&[0])?;
        }
        let all = Tensor::f_from_slice(&flat)?;
        if self.group.size() > 1 {
            self.group.all_reduce(&all, ReduceOp::Max)?;
        }
        let all = Vec::<i64>::try_from(&all)?;
        let rows = all.chunks_exact(ROW);
        let has_part = rows.clone().map(|row| std::array::from_fn(|part| row[part] > 0));
        Ok((has_part.collect(), rows.map(|row| row[PARTS]).collect()))
    }

    /// One part of the state of all parameters of a bucket, flat.
    fn gather_bucket(&self, bucket: usize, place: usize) -> Result<Tensor> {
        let layout = &self.layout.buckets[bucket];
        let kind = if layout.kind == Kind::Double { Kind::Double } else { Kind::Float };
        let own = Tensor::f_zeros([layout.part], (kind, self.device))?;
        for (index, piece) in self.pieces.iter().enumerate() {
            let state = self.inner.state_of(index).filter(|_| piece.bucket == bucket);
            let Some(tensor) = state.and_then(|(tensors, _)| tensors[place]) else { continue };
            let len = piece.range.end - piece.range.start;
            own.f_narrow(0, piece.place, len)?.f_copy_(tensor)?;
        }
        if self.group.size() == 1 || layout.part == 0 {
            return Ok(own);
        }
        let len = layout.part * self.group.size() as i64;
        let whole = Tensor::f_empty([len], (kind, self.device))?;
        self.group.all_gather_into(&whole, &own)?;
        Ok(whole)
    }

    /// Writes the state of all ranks to one file, on rank 0, as
    /// [`FusedOptimizer::save`](crate::optim::FusedOptimizer::save) does: any number of ranks can
    /// [`load`](Self::load) it, and so can an [`FusedOptimizer`](crate::optim::FusedOptimizer). Every rank must
    /// call it. Waits for the GPU.
    ///
    /// # Errors
    /// As for [`gather_state_dict`](Self::gather_state_dict) and
    /// [`nn::state_dict::save`](crate::nn::state_dict::save); an error of rank 0 is one on every
    /// rank.
    pub fn save(&self, file: impl AsRef<Path>) -> Result<()> {
        let op = "ShardedOptimizer::save";
        let written = self.gather_state_dict().and_then(|gathered| match gathered {
            Some(tensors) => write_tensors(op, &tensors, file.as_ref()),
            None => Ok(()),
        });
        all_succeed(op, &self.group, written)
    }

    /// Loads a state of whole parameters that [`save`](Self::save) or
    /// [`FusedOptimizer::save`](crate::optim::FusedOptimizer::save) wrote, with any number of ranks. Every rank
    /// must call it, and reads the file. If names, sizes or kinds do not fit on one rank, nothing
    /// changes on any. Load the weights first: master weights that the file lacks are made from them.
    ///
    /// # Errors
    /// As for [`FusedOptimizer::load`](crate::optim::FusedOptimizer::load), on every rank; when another rank
    /// ended, failed or did not take part until the timeout.
    pub fn load(&mut self, file: impl AsRef<Path>) -> Result<()> {
        let op = "ShardedOptimizer::load";
        let tensors = read_tensors(op, file.as_ref());
        self.load_whole(op, tensors, None)
    }

    /// Loads what [`gather_state_dict`](Self::gather_state_dict) returned, or
    /// [`FusedOptimizer::state_dict`](crate::optim::FusedOptimizer::state_dict), as [`load`](Self::load) does.
    /// Every rank must have it.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_state_dict(&mut self, tensors: &Tensors) -> Result<()> {
        let tensors = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        self.load_whole("ShardedOptimizer::load_state_dict", Ok(tensors.collect()), None)
    }

    /// Loads the state of a `torch.optim.AdamW` or `torch.optim.SGD`, as
    /// [`FusedOptimizer::load_torch`](crate::optim::FusedOptimizer::load_torch) does, of whole parameters.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and when a parameter is not among the names.
    pub fn load_torch(&mut self, file: impl AsRef<Path>, names: &[&str]) -> Result<()> {
        let op = "ShardedOptimizer::load_torch";
        let tensors = read_tensors(op, file.as_ref());
        self.load_whole(op, tensors, Some(names))
    }

    fn load_whole(
        &mut self,
        op: &str,
        tensors: Result<Tensors>,
        torch: Option<&[&str]>,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let tensors = all_succeed(op, &self.group, tensors)?;
        if self.group.size() > 1 {
            let lines = checksums(tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)));
            let lines = all_succeed(op, &self.group, lines)?;
            all_have(op, &self.group, &lines, ("another state", "load the same"))?;
        }
        self.load_parts(op, self.parts_of(op, &tensors, torch), torch)
    }

    /// Loads the state of this rank's pieces, if all ranks can load theirs.
    pub(super) fn load_parts(
        &mut self,
        op: &str,
        parts: Result<Tensors>,
        torch: Option<&[&str]>,
    ) -> Result<()> {
        let (mut is_agreed, group) = (false, &self.group);
        let inner = &mut self.inner;
        let outcome = parts.and_then(|parts| {
            inner.load_parts(op, &parts, torch, || {
                is_agreed = true;
                all_succeed(op, group, Ok(()))
            })
        });
        if is_agreed { outcome } else { all_succeed(op, group, outcome) }
    }

    /// The pieces of this rank of a state of whole parameters. What belongs to no parameter is kept,
    /// so that it is found to be unexpected.
    fn parts_of(&self, op: &str, tensors: &Tensors, torch: Option<&[&str]>) -> Result<Tensors> {
        let mut parts = Tensors::new();
        for (name, tensor) in tensors {
            let Some(Key { word, parameter }) = self.key_of(name, torch) else {
                parts.insert(name.clone(), tensor.shallow_clone());
                continue;
            };
            let Some(index) = self.names().position(|known| known == parameter) else {
                // A parameter that requires no grad has no state.
                continue;
            };
            let like = &self.weights.parameters[index].tensor;
            if word != STEP && tensor.size() != like.size() {
                let got = format!("{} of shape {:?}", shown(name), tensor.size());
                return Err(Error::msg(format!(
                    "{op}: expected the state of this optimizer's parameters, of shape {:?}, got \
                     {got}; nothing was loaded",
                    like.size()
                )));
            }
            let Some(piece) = self.pieces.iter().find(|piece| piece.parameter == index) else {
                continue;
            };
            let part =
                if word == STEP { tensor.shallow_clone() } else { part_of(tensor, like, piece)? };
            parts.insert(name.clone(), part);
        }
        Ok(parts)
    }

    /// The parameter and the part of its state that a name in a file means.
    fn key_of<'a>(&self, name: &'a str, torch: Option<&[&'a str]>) -> Option<Key<'a>> {
        let key = match torch {
            None => {
                let (word, parameter) = name.split_once('.')?;
                Key { word, parameter }
            }
            Some(names) => {
                let (index, word) = name.strip_prefix("state.")?.split_once('.')?;
                let parameter = names.get(index.parse::<usize>().ok()?)?;
                Key { word, parameter }
            }
        };
        let is_word = key.word == STEP || self.inner.state_words().contains(&key.word);
        let mut known = self.names().chain(self.frozen.iter().map(|(name, _)| name.as_str()));
        (is_word && known.any(|known| known == key.parameter)).then_some(key)
    }
}

/// A piece of a whole tensor, whose values lie in memory as those of `like`.
fn part_of(tensor: &Tensor, like: &Tensor, piece: &Piece) -> Result<Tensor> {
    let options = (tensor.f_kind()?, tensor.device());
    let mut same = Tensor::f_empty_strided(like.size(), like.stride(), options)?;
    same.f_copy_(tensor)?;
    let len = piece.range.end - piece.range.start;
    // A copy, so that the rest is freed.
    snapshot(&in_memory(&same)?.f_narrow(0, piece.range.start, len)?)
}

/// A number as a tensor without dimensions.
pub(super) fn scalar(value: i64) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(&[value])?.f_squeeze()?)
}
