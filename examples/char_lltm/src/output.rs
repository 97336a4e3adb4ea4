//! The output folder, and files that are written completely or not at all.

use crate::options::Op;
use crate::report::{Run, csv};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The ending of a file that is still being written.
const PARTIAL: &str = ".partial";
const CURVES: &str = "loss.csv";

/// The folder for all results.
pub struct OutputFolder {
    folder: PathBuf,
    names: Vec<String>,
}

impl OutputFolder {
    /// Creates the folder and checks that every file of the run can be written, before minutes are
    /// spent on training.
    pub fn prepare(folder: &Path, ops: &[Op]) -> Result<OutputFolder> {
        let name = folder.display();
        ensure!(
            !folder.exists() || folder.is_dir(),
            "--out {name} is not a folder: give another one"
        );
        let cannot =
            || format!("cannot write to --out {name} (give a folder that you may write to)");
        fs::create_dir_all(folder).with_context(cannot)?;
        let mut names: Vec<String> = ops.iter().map(|op| weights_name(*op)).collect();
        names.push(CURVES.to_string());
        for file in names.iter().map(|name| folder.join(name)) {
            let replaceable = !file.exists() || file.is_file();
            ensure!(
                replaceable,
                "{} is in the way: move it, or give another --out",
                file.display()
            );
        }
        remove_partials(folder, &names).with_context(cannot)?;
        temporary(folder, "probe").with_context(cannot)?;
        Ok(OutputFolder { folder: folder.to_path_buf(), names })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn file_names(&self) -> &[String] {
        &self.names
    }

    /// The path of the weights of `op`.
    pub fn weights(&self, op: Op) -> PathBuf {
        self.folder.join(weights_name(op))
    }

    /// Writes the losses of the runs.
    pub fn write_curves(&self, runs: &[Run], unigram: f64) -> Result<()> {
        let table = csv(runs, unigram);
        write_whole(&self.folder.join(CURVES), |path| Ok(fs::write(path, table)?))
    }
}

fn weights_name(op: Op) -> String {
    format!("{}.safetensors", op.name())
}

/// Writes a file completely or not at all. `write` fills a temporary file in the same folder, which
/// replaces the target only when it is complete and on the disk. If anything fails before, the
/// target stays unchanged.
pub fn write_whole(target: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let cannot = || format!("cannot write {} (is the disk full?)", target.display());
    let folder = target.parent().unwrap_or(Path::new("."));
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let partial = temporary(folder, &name).with_context(cannot)?;
    write(partial.path()).with_context(cannot)?;
    partial.as_file().sync_all().with_context(cannot)?;
    partial.persist(target).with_context(cannot)?;
    // The new name is stored in the folder, which must be synchronised, too.
    File::open(folder).and_then(|folder| folder.sync_all()).with_context(cannot)
}

fn temporary(folder: &Path, name: &str) -> std::io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new()
        .prefix(&partial_prefix(name))
        .suffix(PARTIAL)
        // The permissions of an ordinary file, instead of 0600 for a private one. The umask still
        // applies.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
}

fn partial_prefix(name: &str) -> String {
    format!(".{name}.")
}

/// Removes the files that a killed run was still writing.
fn remove_partials(folder: &Path, names: &[String]) -> std::io::Result<()> {
    let prefixes: Vec<String> = names.iter().map(|name| partial_prefix(name)).collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.ends_with(PARTIAL) && prefixes.iter().any(|prefix| name.starts_with(prefix)) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
