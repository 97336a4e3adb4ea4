//! Checkpoints: everything that the next step depends on, in one file that is complete or absent.
//!
//! A checkpoint is a safetensors file. Its tensors are the model's and the optimizer's. Its metadata
//! have the settings, the step, which also decides the place in the data and the random numbers, and
//! the checksum of each tensor.

use crate::files::{files_in, is_there, write_whole};
use crate::ranks::Ranks;
use crate::settings::Settings;
use anyhow::{Context, Result, anyhow, bail, ensure};
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors, TensorView, serialize_to_file};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

/// The folder of a run's checkpoints.
pub const FOLDER: &str = "checkpoints";
/// So many checkpoints are kept.
const KEPT: usize = 2;
const PREFIX: &str = "step-";
const ENDING: &str = ".safetensors";
/// The entry of the metadata: a checksum in hexadecimal digits, a space, and the state as JSON. There
/// is only one, so that equal checkpoints are equal files: safetensors writes entries in any order.
const STATE: &str = "state";

/// What a checkpoint knows besides its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// How many steps are done.
    pub step: i64,
    pub settings: Settings,
    /// The checksum of each tensor's bytes.
    checksums: BTreeMap<String, u32>,
}

/// A checkpoint in memory, whose checksums were right.
pub struct Checkpoint {
    pub path: PathBuf,
    pub state: State,
    tensors: BTreeMap<String, Tensor>,
}

/// Writes a checkpoint of these tensors and removes all but the last two.
pub fn save(
    folder: &Path,
    step: i64,
    settings: &Settings,
    tensors: &[(String, Tensor)],
) -> Result<PathBuf> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let stored = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), Stored::new(name, tensor)?)))
        .collect::<Result<Vec<_>>>()?;
    let checksums = stored
        .iter()
        .map(|(name, stored)| (name.clone(), crc32fast::hash(&stored.bytes)))
        .collect();
    let state = State { step, settings: settings.clone(), checksums };
    let state = serde_json::to_string(&state)?;
    let checksum = crc32fast::hash(state.as_bytes());
    let metadata = HashMap::from([(STATE.to_string(), format!("{checksum:08x} {state}"))]);
    let path = folder.join(format!("{PREFIX}{step:010}{ENDING}"));
    write_whole(&path, |partial| {
        let views = stored
            .iter()
            .map(|(name, stored)| Ok((name, stored.view()?)))
            .collect::<Result<Vec<_>>>()?;
        serialize_to_file(views, &Some(metadata), partial).map_err(|error| match error {
            SafeTensorError::IoError(error) => error.into(),
            error => anyhow!("cannot write the checkpoint {}: {error}", path.display()),
        })
    })?;
    // Newer ones were damaged: the run resumed before them.
    let (newer, mut others) = found(folder)?.into_iter().partition::<Vec<_>, _>(|old| *old > path);
    remove(newer.into_iter().chain(others.drain(KEPT.min(others.len())..)))?;
    Ok(path)
}

/// A tensor's bytes.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn new(name: &str, tensor: &Tensor) -> Result<Stored> {
        let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        let dtype = Dtype::try_from(tensor.f_kind()?)
            .with_context(|| format!("{name} cannot be written to a checkpoint"))?;
        let mut bytes = vec![0; tensor.numel() * dtype.size()];
        tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        Ok(Stored {
            dtype,
            shape: tensor.size().iter().map(|&size| size as usize).collect(),
            bytes,
        })
    }

    fn view(&self) -> Result<TensorView<'_>> {
        TensorView::new(self.dtype, self.shape.clone(), &self.bytes)
            .map_err(|error| anyhow!("{error}"))
    }
}

/// The checkpoints of a folder, the newest first.
fn found(folder: &Path) -> Result<Vec<PathBuf>> {
    if !is_there(folder) {
        return Ok(vec![]);
    }
    let is_checkpoint = |name: &str| name.starts_with(PREFIX) && name.ends_with(ENDING);
    let mut files = files_in(folder, is_checkpoint)?;
    files.reverse();
    Ok(files)
}

/// Whether a folder has checkpoints.
pub fn any(folder: &Path) -> Result<bool> {
    Ok(!found(folder)?.is_empty())
}

/// Removes all checkpoints of a folder.
pub fn remove_all(folder: &Path) -> Result<()> {
    remove(found(folder)?)
}

fn remove(files: impl IntoIterator<Item = PathBuf>) -> Result<()> {
    for file in files {
        std::fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    Ok(())
}

/// Reads the newest checkpoint that is whole, and calls `warn` for each newer one that is not.
/// `None` if there is no checkpoint.
pub fn newest(folder: &Path, warn: impl Fn(String)) -> Result<Option<Checkpoint>> {
    let files = found(folder)?;
    for path in &files {
        match Checkpoint::read(path) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(error) => warn(format!("the checkpoint {} is damaged: {error:#}", path.display())),
        }
    }
    match files.is_empty() {
        true => Ok(None),
        false => bail!(
            "no checkpoint in {} is whole: start again with --overwrite, or give another --out",
            folder.display()
        ),
    }
}

/// The newest whole checkpoint of a run, which must have one.
pub fn of_run(option: &str, run: &Path, warn: impl Fn(String)) -> Result<Checkpoint> {
    newest(&run.join(FOLDER), warn)?.with_context(|| {
        format!(
            "{option} {} has no checkpoint: give the folder of a run, the --out of `train`",
            run.display()
        )
    })
}

impl Checkpoint {
    pub fn read(path: &Path) -> Result<Checkpoint> {
        Checkpoint::from_bytes(path, &std::fs::read(path).context("it cannot be read")?)
    }

    /// The checkpoint of a rank whose machine need not have the file.
    pub fn on_all_ranks(own: Option<Checkpoint>, ranks: &Ranks) -> Result<Option<Checkpoint>> {
        if ranks.size() == 1 {
            return Ok(own);
        }
        let Some(path) = ranks.share(&own.as_ref().map(|own| own.path.clone()))? else {
            return Ok(None);
        };
        let cannot = || format!("cannot read {}", path.display());
        let bytes = ranks.on_main(|| std::fs::read(&path).with_context(cannot))?;
        let bytes = ranks.share_bytes(bytes.unwrap_or_default())?;
        match own {
            Some(own) => Ok(Some(own)),
            None => Checkpoint::from_bytes(&path, &bytes).map(Some),
        }
    }

    fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Checkpoint> {
        let unsafe_header = |error| anyhow!("it is no whole safetensors file ({error:?})");
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(unsafe_header)?;
        let file = SafeTensors::deserialize(bytes).map_err(unsafe_header)?;
        let state = state(header.metadata().as_ref())?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            let checksum =
                state.checksums.get(&name).with_context(|| format!("{name} is unknown"))?;
            ensure!(crc32fast::hash(view.data()) == *checksum, "the checksum of {name} is wrong");
            let size: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
            let kind = Kind::try_from(view.dtype())?;
            tensors.insert(name, Tensor::f_from_data_size(view.data(), &size, kind)?);
        }
        if let Some(name) = state.checksums.keys().find(|name| !tensors.contains_key(*name)) {
            bail!("it lacks {name}");
        }
        Ok(Checkpoint { path: path.to_path_buf(), state, tensors })
    }

    /// The tensors whose names begin with a prefix, by the rest of their names.
    pub fn with_prefix(&self, prefix: &str) -> BTreeMap<String, Tensor> {
        let named = self.tensors.iter();
        named
            .filter_map(|(name, tensor)| {
                Some((name.strip_prefix(prefix)?.to_string(), tensor.shallow_clone()))
            })
            .collect()
    }

    /// Copies the checkpoint's tensors into those that are in use.
    pub fn copy_into(&self, targets: &[(String, Tensor)]) -> Result<()> {
        copy(&self.path, &self.tensors, targets)
    }

    /// The checksum of all tensors whose names begin with a prefix.
    pub fn checksum(&self, prefix: &str) -> String {
        let mut hasher = crc32fast::Hasher::new();
        for (name, checksum) in &self.state.checksums {
            if name.starts_with(prefix) {
                hasher.update(format!("{name} {checksum:08x}\n").as_bytes());
            }
        }
        format!("{:08x}", hasher.finalize())
    }
}

const FLOATING: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Copies the tensors of a file into those that are in use, whose values may be wider or narrower. All
/// names, shapes and kinds are compared before the first is changed.
pub fn copy(
    path: &Path,
    tensors: &BTreeMap<String, Tensor>,
    targets: &[(String, Tensor)],
) -> Result<()> {
    let path = path.display();
    let mut pairs = Vec::new();
    for (name, target) in targets {
        let saved = tensors.get(name).with_context(|| format!("{path} lacks {name}"))?;
        let (from, to) = (saved.f_kind()?, target.f_kind()?);
        let both_float = [from, to].iter().all(|kind| FLOATING.contains(kind));
        ensure!(
            saved.size() == target.size() && (from == to || both_float),
            "{path}: {name} is {:?} of {:?}, but {:?} of {:?} here",
            saved.size(),
            from,
            target.size(),
            to
        );
        pairs.push((saved, target));
    }
    let _no_grad = tch::no_grad_guard();
    for (saved, target) in pairs {
        target.shallow_clone().f_copy_(saved)?;
    }
    Ok(())
}

fn state(metadata: Option<&HashMap<String, String>>) -> Result<State> {
    let entry = metadata.and_then(|entries| entries.get(STATE)?.split_once(' '));
    let (checksum, state) = entry.context("it is no checkpoint of this program")?;
    ensure!(
        format!("{:08x}", crc32fast::hash(state.as_bytes())) == checksum,
        "the checksum of its settings is wrong"
    );
    serde_json::from_str(state).context("its settings are those of another version")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::settings;
    use std::cell::RefCell;

    fn tensors(value: i64) -> Vec<(String, Tensor)> {
        vec![
            ("a".to_string(), Tensor::full([2, 3], value as f64, (Kind::Float, Device::Cpu))),
            ("b".to_string(), Tensor::from_slice(&[value])),
        ]
    }

    fn copied(checkpoint: &Checkpoint) -> Vec<(String, Tensor)> {
        let targets = tensors(-1);
        checkpoint.copy_into(&targets).unwrap();
        targets
    }

    #[test]
    fn a_link_that_leads_nowhere_is_no_folder_without_checkpoints() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("link");
        assert!(!any(&link).unwrap());
        std::os::unix::fs::symlink(place.path().join("away"), &link).unwrap();
        assert!(any(&link).unwrap_err().to_string().starts_with("cannot list"));
        assert!(newest(&link, |_| ()).is_err());
    }

    #[test]
    fn the_last_two_are_kept_and_the_newest_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        for step in [9, 10, 11] {
            save(folder.path(), step, &settings(), &tensors(step)).unwrap();
        }
        assert_eq!(found(folder.path()).unwrap().len(), 2);
        let newest = newest(folder.path(), |warning| panic!("{warning}")).unwrap().unwrap();
        assert_eq!((newest.state.step, &newest.state.settings), (11, &settings()));
        assert_eq!(copied(&newest), tensors(11));
    }

    #[test]
    fn every_damage_is_noticed_and_the_one_before_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 1, &settings(), &tensors(1)).unwrap();
        let path = save(folder.path(), 2, &settings(), &tensors(2)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let warnings = RefCell::new(0);
        let check = |damaged: &[u8], what: &str| {
            std::fs::write(&path, damaged).unwrap();
            let found = newest(folder.path(), |_| *warnings.borrow_mut() += 1).unwrap().unwrap();
            assert_eq!(found.state.step, 1, "{what}");
        };
        for length in 0..whole.len() {
            check(&whole[..length], &format!("cut at {length}"));
        }
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 0x04;
            std::fs::write(&path, &damaged).unwrap();
            let found = newest(folder.path(), |_| *warnings.borrow_mut() += 1).unwrap().unwrap();
            // A change of the padding after the header, or of an unused bit, is no damage.
            let same = found.state.step == 2 && copied(&found) == tensors(2);
            assert!(found.state.step == 1 || same, "byte {byte}");
        }
        assert!(*warnings.borrow() > whole.len());
    }

    #[test]
    fn nothing_is_copied_if_something_does_not_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = save(folder.path(), 1, &settings(), &tensors(1)).unwrap();
        let checkpoint = Checkpoint::read(&path).unwrap();
        let mut targets = tensors(0);
        targets.push(("c".to_string(), Tensor::from(0.0)));
        assert!(checkpoint.copy_into(&targets).unwrap_err().to_string().contains("lacks c"));
        targets[2] = ("b".to_string(), Tensor::from_slice(&[0_i64, 0]));
        assert!(checkpoint.copy_into(&targets).unwrap_err().to_string().contains("[1]"));
        assert_eq!(targets[..2], tensors(0));
    }

    #[test]
    fn only_damaged_ones_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(newest(folder.path(), |_| ()).unwrap().is_none());
        let path = save(folder.path(), 1, &settings(), &tensors(1)).unwrap();
        std::fs::write(&path, "x").unwrap();
        assert!(newest(folder.path(), |_| ()).err().unwrap().to_string().contains("--overwrite"));
    }
}
