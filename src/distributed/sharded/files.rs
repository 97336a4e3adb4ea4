//! The state as one file for each rank.
//!
//! A folder has `sharded.safetensors`, which names a number that all files of one saving share, and
//! the files of all ranks. It is written last, and its name changes to the new contents at once, so
//! that a folder always has a complete state if it has one at all.

use super::ShardedOptimizer;
use super::layout::overlap;
use super::state::{STEP, Tensors, scalar};
use crate::distributed::agree::{all_succeed, exchange};
use crate::state_dict::{read_tensors, shown, write_tensors};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tch::Tensor;

const INDEX: &str = "sharded.safetensors";
/// `[2]`, `Int64`: the number of the saving, and the number of ranks.
const SAVING: &str = "saving";
/// `place.<name>`, `Int64`: the first value of the piece, one past its last, and then the sizes and
/// the strides of the parameter.
const PLACE: &str = "place";

/// One saving of a state by all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Saving {
    number: i64,
    ranks: usize,
}

impl Saving {
    fn file(self, folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("shard-{:016x}-{rank}-of-{}.safetensors", self.number, self.ranks))
    }

    /// Whether a file is a rank's, of another saving than this.
    fn replaces(self, name: &str) -> bool {
        let number = name.strip_prefix("shard-").and_then(|rest| rest.split_once('-'));
        let is_old = number.is_some_and(|(number, rest)| {
            number.len() == 16
                && i64::from_str_radix(number, 16).is_ok_and(|number| number != self.number)
                && rest.contains("-of-")
        });
        is_old && name.ends_with(".safetensors")
    }

    fn tensor(self) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(&[self.number, self.ranks as i64])?)
    }

    fn of(tensors: &mut Tensors) -> Option<Saving> {
        let numbers = Vec::<i64>::try_from(tensors.remove(SAVING)?).ok()?;
        match numbers[..] {
            [number, ranks] => Some(Saving { number, ranks: usize::try_from(ranks).ok()? }),
            _ => None,
        }
    }
}

impl ShardedOptimizer {
    /// Writes the state to a folder, one file for each rank, so that no rank needs the memory for all
    /// of it. Any number of ranks can [`load_sharded`](Self::load_sharded) it. Every rank must call
    /// it, and all ranks must see the same folder, which is made if there is none. The files of an
    /// earlier state in the folder are removed when all new ones are there; until then, the folder
    /// has the earlier state. Waits for the GPU.
    ///
    /// # Errors
    /// As for [`nn::state_dict::save`](crate::nn::state_dict::save); an error of one rank is one on
    /// every rank. When another rank ended, failed or did not take part until the timeout.
    pub fn save_sharded(&self, folder: impl AsRef<Path>) -> Result<()> {
        let (op, folder) = ("ShardedOptimizer::save_sharded", folder.as_ref());
        let saving = self.new_saving(op)?;
        all_succeed(op, &self.group, self.write_shard(op, folder, saving))?;
        let finished = match self.group.rank() {
            0 => finish(op, folder, saving),
            _ => Ok(()),
        };
        all_succeed(op, &self.group, finished)
    }

    /// A number that no other saving has, the same on all ranks.
    fn new_saving(&self, op: &str) -> Result<Saving> {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mixed = (time.as_nanos() as u64) ^ (u64::from(std::process::id()) << 40);
        let own = (mixed & i64::MAX as u64).to_string();
        let texts = exchange(&self.group, &own)?;
        let number = texts.first().and_then(|text| text.parse().ok());
        let number =
            number.ok_or_else(|| Error::msg(format!("internal error: {op}: no number")))?;
        Ok(Saving { number, ranks: self.group.size() })
    }

    fn write_shard(&self, op: &str, folder: &Path, saving: Saving) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        std::fs::create_dir_all(folder)
            .map_err(|error| Error::msg(format!("{op}: {}: {error}", folder.display())))?;
        let mut tensors = Tensors::from([(SAVING.to_string(), saving.tensor()?)]);
        for (index, piece) in self.pieces.iter().enumerate() {
            let parameter = &self.weights.parameters[piece.parameter];
            let name = &parameter.name;
            let mut place = vec![piece.range.start, piece.range.end];
            place.extend(parameter.tensor.size());
            place.extend(parameter.tensor.stride());
            tensors.insert(format!("{PLACE}.{name}"), Tensor::f_from_slice(&place)?);
            let Some((parts, step)) = self.inner.state_of(index) else {
                tensors.insert(format!("{STEP}.{name}"), scalar(0)?);
                continue;
            };
            for (word, part) in self.inner.state_words().into_iter().zip(parts) {
                tensors.extend(part.map(|part| (format!("{word}.{name}"), part.shallow_clone())));
            }
            tensors.insert(format!("{STEP}.{name}"), step.f_squeeze()?);
        }
        tensors.extend(self.inner.numbers_of_groups()?);
        write_tensors(op, &tensors, &saving.file(folder, self.group.rank()))
    }

    /// Loads a state that [`save_sharded`](Self::save_sharded) wrote, with the same or another number
    /// of ranks. Every rank must call it, and reads the files of all ranks, one after the other. If
    /// something does not fit on one rank, nothing changes on any. Load the weights first: master
    /// weights that the files lack are made from them.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and when the strides of a parameter are others than those of the
    /// one that was saved.
    pub fn load_sharded(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        let (op, folder) = ("ShardedOptimizer::load_sharded", folder.as_ref());
        let _no_grad = tch::no_grad_guard();
        let parts = self.read_shards(op, folder);
        self.load_parts(op, parts, None)
    }

    /// This rank's pieces from the files of all ranks.
    fn read_shards(&self, op: &str, folder: &Path) -> Result<Tensors> {
        let saving = read_index(op, folder)?;
        let mut parts = Assembled::default();
        for rank in 0..saving.ranks {
            let file = saving.file(folder, rank);
            let mut shard = read_tensors(op, &file)?;
            if Saving::of(&mut shard) != Some(saving) {
                return Err(unusable(op, &file, "the number of its saving", "another one"));
            }
            self.take_shard(op, &file, &mut shard, &mut parts)?;
        }
        parts.into_tensors(op, folder)
    }

    /// Takes what overlaps with this rank's pieces.
    fn take_shard(
        &self,
        op: &str,
        file: &Path,
        shard: &mut Tensors,
        parts: &mut Assembled,
    ) -> Result<()> {
        let prefix = format!("{PLACE}.");
        let places: Vec<String> =
            shard.keys().filter_map(|key| Some(key.strip_prefix(&prefix)?.to_string())).collect();
        let words = self.inner.state_words();
        for name in places {
            let place = shard.remove(&format!("{prefix}{name}"));
            let Some(index) = self.names().position(|known| known == name) else {
                // It is found to be unexpected later.
                continue;
            };
            let place = place.map(Vec::<i64>::try_from).transpose()?.unwrap_or_default();
            let saved = self.saved_range(op, &name, index, &place)?;
            let step = shard.remove(&format!("{STEP}.{name}"));
            let piece = self.pieces.iter().find(|piece| piece.parameter == index);
            if let (Some(step), Some(_)) = (step, piece) {
                parts.tensors.insert(format!("{STEP}.{name}"), step);
            }
            for word in words {
                let key = format!("{word}.{name}");
                let (Some(values), Some(piece)) = (shard.remove(&key), piece) else { continue };
                if values.size() != [saved.end - saved.start] {
                    let got = format!("{} of shape {:?}", shown(&key), values.size());
                    let expected = format!("{} values", saved.end - saved.start);
                    return Err(unusable(op, file, &expected, &got));
                }
                parts.add(key, &piece.range, &saved, &values)?;
            }
        }
        // Numbers of groups, the same in all files, and what is unexpected.
        parts.tensors.append(shard);
        Ok(())
    }

    /// The range of a piece that was saved, if it is one of this parameter.
    fn saved_range(&self, op: &str, name: &str, index: usize, place: &[i64]) -> Result<Range<i64>> {
        let tensor = &self.weights.parameters[index].tensor;
        let expected: Vec<i64> = tensor.size().into_iter().chain(tensor.stride()).collect();
        match place {
            [start, end, layout @ ..]
                if *layout == expected
                    && 0 <= *start
                    && start < end
                    && *end <= tensor.numel() as i64 =>
            {
                Ok(*start..*end)
            }
            _ => Err(Error::msg(format!(
                "{op}: {name}: expected a piece of a parameter of shape {:?} with strides {:?}, got \
                 {place:?} (range, shape, strides); nothing was loaded; ShardedOptimizer::save \
                 writes states that fit other strides",
                tensor.size(),
                tensor.stride()
            ))),
        }
    }
}

/// Pieces that come from several files.
#[derive(Default)]
struct Assembled {
    tensors: Tensors,
    /// How many values of a piece are still missing.
    missing: BTreeMap<String, i64>,
}

impl Assembled {
    /// Copies what the saved range and the wanted one have in common.
    fn add(
        &mut self,
        key: String,
        wanted: &Range<i64>,
        saved: &Range<i64>,
        values: &Tensor,
    ) -> Result<()> {
        let Some(both) = overlap(wanted, saved) else { return Ok(()) };
        let (len, whole) = (both.end - both.start, wanted.end - wanted.start);
        let kind = values.f_kind()?;
        let piece = match self.tensors.get(&key) {
            Some(piece) => piece.shallow_clone(),
            None => {
                let new = Tensor::f_zeros([whole], (kind, tch::Device::Cpu))?;
                self.tensors.insert(key.clone(), new.shallow_clone());
                self.missing.insert(key.clone(), whole);
                new
            }
        };
        let from = values.f_narrow(0, both.start - saved.start, len)?;
        piece.f_narrow(0, both.start - wanted.start, len)?.f_copy_(&from)?;
        *self.missing.entry(key).or_default() -= len;
        Ok(())
    }

    fn into_tensors(self, op: &str, folder: &Path) -> Result<Tensors> {
        let incomplete: BTreeSet<_> =
            self.missing.iter().filter(|(_, missing)| **missing != 0).map(|(key, _)| key).collect();
        match incomplete.first() {
            None => Ok(self.tensors),
            Some(key) => {
                Err(unusable(op, folder, &format!("all of {}", shown(key)), "only some of it"))
            }
        }
    }
}

fn unusable(op: &str, file: &Path, expected: &str, got: &str) -> Error {
    let file = file.display();
    Error::msg(format!("{op}: {file}: expected {expected}, got {got}; nothing was loaded"))
}

fn read_index(op: &str, folder: &Path) -> Result<Saving> {
    let file = folder.join(INDEX);
    let saving = Saving::of(&mut read_tensors(op, &file)?);
    saving.ok_or_else(|| unusable(op, &file, "the number of a saving", "none"))
}

/// Lets a saving be the folder's, and removes the files of earlier ones.
fn finish(op: &str, folder: &Path, saving: Saving) -> Result<()> {
    let index = Tensors::from([(SAVING.to_string(), saving.tensor()?)]);
    write_tensors(op, &index, &folder.join(INDEX))?;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if saving.replaces(&entry.file_name().to_string_lossy()) {
            // A file that remains is never read.
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_earlier_savings_are_replaced() {
        let (new, old) = (Saving { number: 17, ranks: 2 }, Saving { number: 5, ranks: 4 });
        let name = |saving: Saving| {
            let file = saving.file(Path::new("x"), 1);
            file.file_name().expect("a name").to_string_lossy().into_owned()
        };
        assert!(new.replaces(&name(old)) && !new.replaces(&name(new)));
        for other in
            [INDEX, "model.safetensors", "shard-1.safetensors", "shard-x-0-of-2.safetensors"]
        {
            assert!(!new.replaces(other), "{other}");
        }
        assert!(!new.replaces("shard-0000000000000005-0-of-2.txt"));
    }

    #[test]
    fn a_piece_is_assembled_from_all_that_overlap() {
        let values = |range: Range<i64>| Tensor::from_slice(&range.collect::<Vec<_>>());
        let mut parts = Assembled::default();
        for saved in [0..4, 4..9, 9..20, 20..30] {
            parts.add("w".to_string(), &(2..21), &saved, &values(saved.clone())).expect("a part");
        }
        let whole = parts.into_tensors("op", Path::new("x")).expect("a whole");
        assert_eq!(whole["w"], values(2..21));

        let mut parts = Assembled::default();
        parts.add("w".to_string(), &(2..21), &(0..4), &values(0..4)).expect("a part");
        let error = parts.into_tensors("op", Path::new("x")).expect_err("values are missing");
        assert!(error.to_string().contains("all of w"), "{error}");
    }
}
