//! Models that are split into several files, in folders as Hugging Face lays them out.

use super::{
    SAVE, StateDictOptions, Stored, Variable, failed, read, save_variables, shown, sync_folder,
    twice, variables, write_whole,
};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use tch::nn::VarStore;

/// The file of a model that is one.
const WHOLE: &str = "model.safetensors";
/// The file that says in which files the tensors are.
const INDEX: &str = "model.safetensors.index.json";

/// The safetensors files of a model in a folder as Hugging Face lays it out, for
/// [`load`](super::load): `model.safetensors`, or else those that `model.safetensors.index.json` names.
///
/// ```no_run
/// use tch_extension::nn::state_dict::{files, load};
/// # let vs = tch::nn::VarStore::new(tch::Device::Cpu);
/// load(&vs, &files("Llama-3.2-1B")?, &Default::default())?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When the folder has neither, when the index cannot be read, or when a file that it names is missing
/// or not in the folder itself.
pub fn files<P: AsRef<Path>>(folder: P) -> Result<Vec<PathBuf>> {
    let folder = folder.as_ref();
    let whole = folder.join(WHOLE);
    if whole.exists() {
        return Ok(vec![whole]);
    }
    let index = folder.join(INDEX);
    if !index.exists() {
        let expected = format!("expected {WHOLE} or {INDEX}, got neither");
        return Err(failed(FILES, folder, &expected));
    }
    let bytes = read(FILES, &index)?;
    let names = names_of(&bytes).map_err(|what| failed(FILES, &index, &what))?;
    let files: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
    match files.iter().find(|file| !file.is_file()) {
        Some(missing) => {
            Err(failed(FILES, missing, &format!("expected the file that {INDEX} names, got none")))
        }
        None => Ok(files),
    }
}

const FILES: &str = "state_dict::files";
const ENDING: &str = ".safetensors";

/// The names of files in an index.
fn names_of(index: &[u8]) -> std::result::Result<BTreeSet<String>, String> {
    let value: Value = serde_json::from_slice(index).map_err(|error| error.to_string())?;
    let Some(map) = value["weight_map"].as_object().filter(|map| !map.is_empty()) else {
        return Err("expected \"weight_map\" with the file of each tensor, got none".to_string());
    };
    let name = |(tensor, file): (&String, &Value)| match file.as_str() {
        // A file elsewhere is none of this model's.
        Some(name) if is_in_folder(name) && name.ends_with(ENDING) => Ok(name.to_string()),
        _ => Err(format!(
            "expected the name of a {ENDING} in the same folder for {}, got {}",
            shown(tensor),
            shown(&file.to_string())
        )),
    };
    map.iter().map(name).collect()
}

fn is_in_folder(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Writes the variables of a model to a folder as Hugging Face lays it out: to `model.safetensors`, or if
/// they have more than `most` bytes, to files of at most so many bytes, or of a single tensor, and an
/// index. What the folder had of another model is removed at the end. Until then that model is whole: the
/// new one takes its place when its last file gets its name. If the process is killed, files of either may
/// be left, which no index names. A symbolic link is replaced, and not the file that it leads to.
///
/// ```
/// use tch::{Device, nn::{VarStore, linear}};
/// use tch_extension::nn::state_dict::{files, load, save_sharded};
///
/// let folder = std::env::temp_dir().join(format!("sharded-{}", std::process::id()));
/// std::fs::create_dir_all(&folder)?;
/// let vs = VarStore::new(Device::Cpu);
/// let layer = linear(vs.root() / "out", 4, 3, Default::default());
/// save_sharded(&vs, &folder, 40, &Default::default())?;
/// assert_eq!(files(&folder)?.len(), 2);
/// load(&vs, &files(&folder)?, &Default::default())?;
/// # let _ = layer;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As for [`save`](super::save), and when a file of the other model cannot be removed.
pub fn save_sharded<P: AsRef<Path>>(
    vs: &VarStore,
    folder: P,
    most: u64,
    options: &StateDictOptions<'_>,
) -> Result<()> {
    let folder = folder.as_ref();
    let before = files_of_model(folder);
    let parts = parts(variables(SAVE, vs, options)?, most)?;
    let kept = match &parts.files[..] {
        [] | [_] => {
            let all = parts.files.into_iter().next().unwrap_or_default();
            save_variables(SAVE, &all, &folder.join(WHOLE))?;
            vec![WHOLE.to_string()]
        }
        several => {
            let names = unused_names(folder, several.len());
            let written = names
                .iter()
                .zip(several)
                .try_for_each(|(name, part)| save_variables(SAVE, part, &folder.join(name)))
                .and_then(|()| write_index(&folder.join(INDEX), &names, &parts));
            if let Err(error) = written {
                // They are no model's, and take room.
                names.iter().for_each(|name| _ = std::fs::remove_file(folder.join(name)));
                return Err(error);
            }
            names.into_iter().chain([INDEX.to_string()]).collect()
        }
    };
    for name in before.iter().filter(|name| !kept.contains(name)) {
        let file = folder.join(name);
        std::fs::remove_file(&file).map_err(|error| failed(SAVE, &file, &error))?;
    }
    // After a power cut, a single file that is back would be the model.
    let synced = File::open(folder).and_then(|folder| sync_folder(&folder));
    synced.map_err(|error| failed(SAVE, folder, &error))
}

struct Parts {
    files: Vec<Vec<Variable>>,
    bytes: usize,
}

/// The variables in the order of their names, in parts of `most` bytes or of a single variable.
fn parts(variables: Vec<Variable>, most: u64) -> Result<Parts> {
    let mut parts = Parts { files: vec![], bytes: 0 };
    let mut left = 0;
    let mut names = BTreeSet::new();
    for variable in variables {
        if !names.insert(variable.name_in_file.clone()) {
            // Two files would have it.
            return Err(twice(SAVE, &variable.name_in_file));
        }
        let bytes = Stored::new(SAVE, &variable, &RefCell::new(None))?.len;
        parts.bytes = parts.bytes.saturating_add(bytes);
        match parts.files.last_mut() {
            Some(part) if bytes as u64 <= left => {
                left -= bytes as u64;
                part.push(variable);
            }
            _ => {
                left = most.saturating_sub(bytes as u64);
                parts.files.push(vec![variable]);
            }
        }
    }
    Ok(parts)
}

/// The files of the model that is in a folder.
fn files_of_model(folder: &Path) -> Vec<String> {
    let index = std::fs::read(folder.join(INDEX)).unwrap_or_default();
    let parts = names_of(&index).unwrap_or_default();
    // The single file first, which readers prefer to an index, and then the index.
    let all = [WHOLE.to_string(), INDEX.to_string()].into_iter().chain(parts);
    all.filter(|name| folder.join(name).symlink_metadata().is_ok()).collect()
}

/// The names of so many files, none of which is there yet.
fn unused_names(folder: &Path, count: usize) -> Vec<String> {
    let names = |beginning: &str| -> Vec<String> {
        (1..=count).map(|n| format!("{beginning}-{n:05}-of-{count:05}.safetensors")).collect()
    };
    let others = (2..).map(|number| format!("model-{number}"));
    let mut all = std::iter::once("model".to_string()).chain(others).map(|part| names(&part));
    let is_unused = |names: &Vec<String>| {
        names.iter().all(|name| folder.join(name).symlink_metadata().is_err())
    };
    all.find(is_unused).unwrap_or_default()
}

fn write_index(index: &Path, names: &[String], parts: &Parts) -> Result<()> {
    let of_part = |(name, part): (&String, &Vec<Variable>)| {
        let entry = |variable: &Variable| (variable.name_in_file.clone(), json!(name));
        part.iter().map(entry).collect::<Vec<_>>()
    };
    let map: Map<String, Value> = names.iter().zip(&parts.files).flat_map(of_part).collect();
    let text = json!({"metadata": {"total_size": parts.bytes}, "weight_map": map}).to_string();
    let write = |partial: &Path| {
        std::fs::write(partial, text).map_err(|error| Error::msg(error.to_string()))
    };
    write_whole(index, write).map_err(|error| failed(SAVE, index, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_names_files_of_its_folder_only() {
        let index =
            |file: Value| names_of(json!({"weight_map": {"a": file}}).to_string().as_bytes());
        assert_eq!(index(json!("x.safetensors")).unwrap(), ["x.safetensors".to_string()].into());
        for bad in
            ["../x", "/x", "a/x", "./x", "../..", "x/"].map(|name| json!(name.to_owned() + ENDING))
        {
            assert!(index(bad.clone()).unwrap_err().contains("in the same folder"), "{bad}");
        }
        for bad in [json!(""), json!(".."), json!(7), json!("README.md"), Value::Null] {
            assert!(index(bad.clone()).is_err(), "{bad}");
        }
        assert!(names_of(b"{").is_err() && names_of(b"{\"weight_map\": {}}").is_err());
    }
}
