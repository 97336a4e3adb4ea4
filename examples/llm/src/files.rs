//! Files that are written completely or not at all, and the files of a folder.

use anyhow::{Context, Result, ensure};
use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The ending of a file that is still being written.
const PARTIAL: &str = ".partial";

/// Writes a file completely or not at all. `write` fills a temporary file in the same folder, which
/// replaces the target only when it is complete and on the disk. If anything fails before, or if the
/// program is killed, the target stays unchanged.
pub fn write_whole(target: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    Whole::write(target, write)?.put()
}

/// A file that is complete and on the disk, under a temporary name. It is removed if it is dropped.
pub struct Whole {
    partial: tempfile::NamedTempFile,
    target: PathBuf,
}

impl Whole {
    /// Writes the file beside its target, which stays unchanged.
    pub fn write(target: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<Whole> {
        let cannot = || cannot_fill(target);
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let partial = temporary(folder_of(target), &name).with_context(cannot)?;
        write(partial.path()).map_err(|error| match is_of_writing(&error) {
            true => error.context(cannot()),
            false => error,
        })?;
        File::open(partial.path()).and_then(|file| file.sync_all()).with_context(cannot)?;
        Ok(Whole { partial, target: target.to_path_buf() })
    }

    /// Where the file is now.
    pub fn path(&self) -> &Path {
        self.partial.path()
    }

    /// Replaces the target.
    pub fn put(self) -> Result<()> {
        let cannot = || cannot_fill(&self.target);
        self.partial.persist(&self.target).with_context(cannot)?;
        // The new name is stored in the folder, which must be synchronised, too.
        File::open(folder_of(&self.target))
            .and_then(|folder| folder.sync_all())
            .with_context(cannot)
    }
}

fn cannot_fill(target: &Path) -> String {
    format!("cannot write {} (is the disk full?)", target.display())
}

/// Whether an error is that of the write itself. Others, such as that of a text that cannot be read,
/// have a context of their own.
fn is_of_writing(error: &anyhow::Error) -> bool {
    error.chain().next().is_some_and(|first| first.is::<std::io::Error>())
}

/// [`write_whole`] of bytes that are there already.
pub fn write_bytes(target: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    write_whole(target, |path| Ok(fs::write(path, bytes)?))
}

/// [`write_bytes`] of a value as JSON.
pub fn write_json(target: &Path, value: &impl serde::Serialize) -> Result<()> {
    write_bytes(target, serde_json::to_string_pretty(value)?)
}

fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary(folder: &Path, name: &str) -> std::io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(PARTIAL)
        // The permissions of an ordinary file, instead of 0600 for a private one. The umask still
        // applies.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
}

fn cannot_write(option: &str, folder: &Path) -> String {
    format!("cannot write to {option} {} (give a folder that you may write to)", folder.display())
}

/// The files in a folder with such names, sorted.
pub fn files_in(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let cannot = || format!("cannot list {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let entry = entry.with_context(cannot)?;
        if is_wanted(&entry.file_name().to_string_lossy()) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// Removes what a killed run was still writing, and checks that files can be written there.
pub fn clean_folder(option: &str, folder: &Path) -> Result<()> {
    let cannot = || cannot_write(option, folder);
    for file in files_in(folder, |name| name.starts_with('.') && name.ends_with(PARTIAL))? {
        fs::remove_file(file).with_context(cannot)?;
    }
    temporary(folder, "probe").with_context(cannot)?;
    Ok(())
}

/// A folder that other processes are kept out of until this is dropped or the process ends, in whatever
/// way. What was made for it goes away again, if nothing was written there.
pub struct Taken {
    lock: PathBuf,
    file: File,
    _made: Made,
}

impl Drop for Taken {
    /// The lock is held until the file is gone. One that is no longer ours, or has a content, stays.
    fn drop(&mut self) {
        let is_empty = self.file.metadata().is_ok_and(|file| file.len() == 0);
        if is_empty && is_at(&self.file, &self.lock) {
            let _ = fs::remove_file(&self.lock);
        }
    }
}

/// Folders that did not exist before, the innermost first.
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        // Those that have files stay.
        self.0.iter().for_each(|folder| drop(fs::remove_dir(folder)));
    }
}

/// Takes the folder that an option names, which is made if need be, and [cleans](clean_folder) it.
pub fn take_folder(option: &str, folder: &Path) -> Result<Taken> {
    // Another process that ends removes its lock, and perhaps the folder, while this one takes it.
    const TRIES: usize = 20;
    let (name, cannot) = (folder.display(), || cannot_write(option, folder));
    ensure!(
        !folder.exists() || folder.is_dir(),
        "{option} {name} is not a folder: give another one"
    );
    let mut taken = try_take(folder);
    for _ in 1..TRIES {
        match &taken {
            Err(error) if error.kind() == ErrorKind::NotFound => taken = try_take(folder),
            _ => break,
        }
    }
    let taken = taken.with_context(cannot)?.with_context(|| {
        format!("{option} {name} is in use by another process: wait for it, or give another folder")
    })?;
    clean_folder(option, folder)?;
    Ok(taken)
}

/// `None` if another process has the folder. It is not found if one has just removed the folder or the lock.
fn try_take(folder: &Path) -> std::io::Result<Option<Taken>> {
    // Without `.` at the end, under which a folder cannot be removed.
    let folder: PathBuf = folder.components().collect();
    let missing = folder.ancestors().take_while(|folder| !folder.exists());
    let missing = missing.filter(|folder| !folder.as_os_str().is_empty());
    let made = Made(missing.map(PathBuf::from).collect());
    fs::create_dir_all(&folder)?;
    let lock = folder.join(".lock");
    let file = File::options().create(true).append(true).open(&lock)?;
    match file.try_lock() {
        Ok(()) if !is_at(&file, &lock) => Err(ErrorKind::NotFound.into()),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        locked => {
            let taken = Taken { lock, file, _made: made };
            locked.map_err(std::io::Error::from)?;
            Ok(Some(taken))
        }
    }
}

/// Whether something has this name, which may be a link that leads nowhere now.
pub fn is_there(path: &Path) -> bool {
    !fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Whether a file that was opened is still the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    let (opened, found) = (file.metadata(), fs::metadata(path));
    opened.is_ok_and(|a| found.is_ok_and(|b| (a.dev(), a.ino()) == (b.dev(), b.ino())))
}

/// The path from the root, or the path itself if there is no current folder.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// Reads a text file. `hint` says which one is expected.
pub fn read_text(file: &Path, hint: &str) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {} ({hint})", file.display()))
}

/// The root of this repository, if the program finds it. Cargo sets the variable for programs that
/// it runs; a bundle's script sets it to the folder with the bundle's copy of the sources.
pub fn repository() -> Option<PathBuf> {
    let from_cargo = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let folders = [from_cargo, Some(env!("CARGO_MANIFEST_DIR").into())];
    let is_root =
        |folder: &&Path| folder.join("csrc").is_dir() && folder.join("src/lib.rs").is_file();
    folders.iter().flatten().find_map(|folder| folder.ancestors().find(is_root).map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_stays_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        write_bytes(&file, "old").unwrap();
        let failed = write_whole(&file, |path| {
            fs::write(path, "half")?;
            anyhow::bail!("stopped")
        });
        assert_eq!(format!("{:#}", failed.unwrap_err()), "stopped");
        let full = write_whole(&file, |_| Err(std::io::Error::other("full").into()));
        assert!(full.unwrap_err().to_string().contains("is the disk full?"));
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_is_taken_once_and_left_as_it_was() {
        let place = tempfile::tempdir().unwrap();
        let take = |name: &str| take_folder("--out", &place.path().join(name));
        let first = take("a/b").unwrap();
        assert!(take("a/b").err().unwrap().to_string().contains("another process"));
        // What opened the lock before it was removed has no lock of the folder.
        let opened = File::open(place.path().join("a/b/.lock")).unwrap();
        drop(first);
        assert!(
            !place.path().join("a").exists() && !is_at(&opened, &place.path().join("a/b/.lock"))
        );

        let again = take("a/b").unwrap();
        fs::write(place.path().join("a/c"), "kept").unwrap();
        drop(again);
        assert_eq!(fs::read_dir(place.path().join("a")).unwrap().count(), 1);
        // A lock of another process, in a folder that was removed and made again, stays.
        let removed = take("d").unwrap();
        fs::remove_dir_all(place.path().join("d")).unwrap();
        let other = take("d").unwrap();
        drop(removed);
        assert!(take("d").is_err() && place.path().join("d/.lock").exists());
        drop(other);
        // So does a file of the user's.
        fs::create_dir(place.path().join("e")).unwrap();
        fs::write(place.path().join("e/.lock"), "mine").unwrap();
        drop(take("e/.").unwrap());
        assert_eq!(fs::read(place.path().join("e/.lock")).unwrap(), b"mine");
        drop(take("f/.").unwrap());
        assert!(!place.path().join("f").exists());
        // A killed process leaves its lock.
        fs::write(place.path().join("a/.lock"), "").unwrap();
        drop(take("a").unwrap());
        assert!(place.path().join("a/c").exists() && !place.path().join("a/.lock").exists());
    }

    #[test]
    fn partial_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".a.x1.partial"), "half").unwrap();
        fs::write(folder.path().join("b"), "whole").unwrap();
        clean_folder("--out", folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
