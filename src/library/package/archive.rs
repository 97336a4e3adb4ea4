//! The file of a package: a zip archive. Its files are unpacked into a temporary folder, because the
//! dynamic loader, and CUDA's, read them from there.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use zip::ZipArchive;

/// The unpacked files of a model.
pub(super) struct Unpacked {
    /// Removed when it is dropped.
    pub folder: TempDir,
    /// The compiled model.
    pub library: PathBuf,
    /// Constants that are not in the library.
    pub weights: Option<PathBuf>,
    /// What was written about the model when it was compiled.
    pub metadata: BTreeMap<String, String>,
    /// The generated C++; empty if there is none.
    pub source: String,
}

/// Unpacks the files of a model, and checks their checksums.
pub(super) fn unpack(path: &Path, model: &str) -> Result<Unpacked, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let no_package = |error| format!("it is no package, or incomplete: {error}");
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(no_package)?;
    let names: Vec<String> = archive.file_names().map(String::from).collect();
    let parts: Vec<(&str, Part<'_>)> =
        names.iter().filter_map(|name| Some((name.as_str(), Part::of(name)?))).collect();
    let wanted = |part: &Part<'_>| part.model.is_none_or(|found| found == model);
    if !parts.iter().any(|(_, part)| part.model == Some(model)) {
        return Err(no_model(model, parts.iter().filter_map(|(_, part)| part.model).collect()));
    }
    let folder = TempDir::with_prefix("tch_extension_package_")
        .map_err(|error| format!("no temporary folder can be made (TMPDIR says where): {error}"))?;
    let mut files = Vec::new();
    for (name, part) in parts.iter().filter(|(_, part)| wanted(part)) {
        let unpacked = folder.path().join(part.file);
        let broken = |error: &dyn std::fmt::Display| format!("its file {name} is broken: {error}");
        let mut file = archive.by_name(name).map_err(|error| broken(&error))?;
        let mut copy = File::create(&unpacked).map_err(|error| broken(&error))?;
        std::io::copy(&mut file, &mut copy).map_err(|error| broken(&error))?;
        files.push(unpacked);
    }
    files.sort();
    let ends = |path: &Path, end: &str| path.to_string_lossy().ends_with(end);
    let with = |end: &str| files.iter().find(|path| ends(path, end)).cloned();
    let library = with(".so")
        .ok_or("it has no compiled library: compile it without aot_inductor.package_cpp_only")?;
    let source = [with(".wrapper.cpp"), Some(library.with_extension("cpp"))];
    let source = source.into_iter().flatten().find_map(|path| std::fs::read_to_string(path).ok());
    let metadata = metadata(&library)?;
    let weights = with(".blob");
    Ok(Unpacked { folder, library, weights, metadata, source: source.unwrap_or_default() })
}

/// A file that belongs to a model, or to all models.
struct Part<'a> {
    model: Option<&'a str>,
    file: &'a str,
}

impl<'a> Part<'a> {
    /// `archive/data/aotinductor/model/file`, or `archive/data/constants/file`. Archives of older
    /// versions lack the first folder.
    fn of(name: &'a str) -> Option<Part<'a>> {
        let folders: Vec<&str> = name.split('/').collect();
        let part = match folders[..] {
            [_, "data", "aotinductor", model, file] | ["data", "aotinductor", model, file] => {
                Part { model: Some(model), file }
            }
            [_, "data", "constants", file] | ["data", "constants", file] => {
                Part { model: None, file }
            }
            _ => return None,
        };
        let is_name = !part.file.is_empty() && part.file != "." && part.file != "..";
        is_name.then_some(part)
    }
}

fn no_model(model: &str, others: BTreeSet<&str>) -> String {
    if others.is_empty() {
        return "it contains no model that AOTInductor compiled; torch.export.save writes no package, \
                torch._inductor.aoti_compile_and_package does"
            .to_string();
    }
    let others: Vec<&str> = others.into_iter().collect();
    format!("it has no model {model:?}, but {}", others.join(", "))
}

fn metadata(library: &Path) -> Result<BTreeMap<String, String>, String> {
    let path = PathBuf::from(format!("{}_metadata.json", library.with_extension("").display()));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let broken = |error: &dyn std::fmt::Display| format!("its file {name} cannot be read: {error}");
    let text = std::fs::read_to_string(&path).map_err(|error| broken(&error))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| broken(&error))?;
    let object = json.as_object().ok_or_else(|| broken(&"it is no object"))?;
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
    Ok(object.iter().map(|(key, value)| (key.clone(), text(value))).collect())
}
