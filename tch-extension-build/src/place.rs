//! The user's cache: where it is, and how much of it the compile cache takes. Uses only `std` and
//! [`super::trusted`], so that every crate can include this file.

use super::trusted;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The folder of the cache with the compiled objects.
pub const OBJECTS: &str = "objects";

/// The file in it that has one line for each build.
pub const LOG: &str = "log";

/// The bytes that all objects together may take. The kernels and the C++ of tch-extension take 50
/// MB.
pub const MOST_BYTES: u64 = 2 << 30;

/// The folder of the cache with the kernel libraries that programs load, and of a build script's
/// output with the last one.
pub const KERNELS: &str = "kernels";

/// How the name of a kernel library begins.
pub const LIBRARY_PREFIX: &str = "libtch_extension_kernels-";

/// The file next to a library, where it was built, with the arguments of its link, one a line.
pub const LINK: &str = "link";

/// The libraries that the cache keeps however old they are.
pub const MOST_LIBRARIES: usize = 16;

/// The days after its last build for which the cache keeps a library in any case.
pub const LIBRARY_DAYS: u64 = 90;

/// The variable that switches the compile cache off.
pub const SWITCH: &str = "TCH_EXTENSION_COMPILE_CACHE";

/// The folder of the cache, which need not exist: the chosen one, or `$TCH_EXTENSION_CACHE`, or
/// `tch_extension` in `$XDG_CACHE_HOME` or `~/.cache`.
///
/// # Errors
/// When there is no home folder, and when the path is not UTF-8: compilers write the list of files
/// that they read as text.
pub fn folder(chosen: Option<&Path>) -> Result<PathBuf> {
    let variable =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("XDG_CACHE_HOME").filter(|home| home.is_absolute());
    let folder = chosen
        .map(Path::to_path_buf)
        .or_else(|| variable("TCH_EXTENSION_CACHE"))
        .or_else(|| Some(home()?.join("tch_extension")))
        .or_else(|| Some(variable("HOME")?.join(".cache/tch_extension")))
        .ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no HOME"))?;
    let folder = std::path::absolute(folder)?;
    check_text(&folder)?;
    Ok(folder)
}

/// The same folder without links, created if needed. Only the user can access it, because it holds
/// code that programs will run. What others could have put there is refused.
///
/// # Errors
/// As for [`folder`] and [`trusted::root`], and when the folder cannot be created.
pub fn root(chosen: Option<&Path>) -> Result<PathBuf> {
    let folder = folder(chosen)?;
    create(&folder)?;
    let folder = trusted::root(&folder)?;
    check_text(&folder)?;
    Ok(folder)
}

fn check_text(folder: &Path) -> Result<()> {
    match folder.to_str() {
        Some(_) => Ok(()),
        None => {
            let text = format!("the cache {folder:?} is not UTF-8");
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}

/// Creates a folder that only the user can access, and those above it.
///
/// # Errors
/// When it cannot be created. The message names it.
pub fn create(folder: &Path) -> Result<()> {
    let named = |error: Error| {
        Error::new(error.kind(), format!("cannot create {}: {error}", folder.display()))
    };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(named)
}

/// A path that nobody else uses, neither this process nor another one. Such folders and files are
/// renamed to their final place or moved aside, so nothing removes them when a value is dropped, as
/// `tempfile` would.
pub fn unique(folder: &Path, stem: &str) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    folder.join(format!("{stem}-{now:x}-{}-{count}", std::process::id()))
}

/// Opens the lock of an entry, whose folder is made if there is none. Nothing is written before the
/// folder is known to be trusted.
///
/// # Errors
/// When the folder is not trusted, or the lock cannot be opened.
pub fn open_lock(entry: &Path) -> Result<File> {
    create(entry)?;
    trusted::check(entry)?;
    let path = entry.join(LOCK);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    // A cache of root's may at least be read.
    trusted::open(&path, &mut options)
        .or_else(|error| trusted::open(&path, OpenOptions::new().read(true)).map_err(|_| error))
}

/// Takes the exclusive lock of an entry. If somebody deleted the folder to make room after the lock
/// file was opened, the lock belongs to a file that nobody else uses, so the new lock file is locked
/// instead. It is a lock of the kernel, so it ends with the process that holds it, however the
/// process ends.
///
/// # Errors
/// As for [`open_lock`], and where the file system has no locks.
pub fn lock_alone(entry: &Path, mut lock: File) -> Result<File> {
    let path = entry.join(LOCK);
    loop {
        lock.lock()?;
        let now = path.metadata().ok().map(|file| (file.dev(), file.ino()));
        let ours = lock.metadata()?;
        if now == Some((ours.dev(), ours.ino())) {
            return Ok(lock);
        }
        lock = open_lock(entry)?;
    }
}

const LOCK: &str = "lock";

/// Writes a file of the cache, which appears as a whole. Its folder is created and checked.
///
/// # Errors
/// When the folder is not the user's own, and when the file cannot be written.
pub fn publish(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    create(folder)?;
    trusted::check(folder)?;
    let partial = unique(folder, "part");
    let mut options = OpenOptions::new();
    let opened = options.write(true).create_new(true).mode(0o600).open(&partial);
    let written = opened
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| std::fs::rename(&partial, folder.join(name)));
    if written.is_err() {
        let _ = std::fs::remove_file(partial);
    }
    written
}

/// A file of the compile cache that holds an object.
pub struct Stored {
    /// Its path.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// When it was last used, in seconds and nanoseconds since 1970.
    pub used: (i64, i64),
}

/// The objects in the folder of the compile cache.
pub fn stored(objects: &Path) -> Vec<Stored> {
    inside(objects).iter().flat_map(|entry| stored_in(entry)).collect()
}

/// The objects in an entry of the compile cache.
pub fn stored_in(entry: &Path) -> Vec<Stored> {
    let object = |path: PathBuf| {
        let name = path.file_name()?;
        let file = path.symlink_metadata().ok().filter(|file| file.is_file() && name != LOCK)?;
        let used = (file.mtime(), file.mtime_nsec());
        Some(Stored { path, bytes: file.len(), used })
    };
    inside(entry).into_iter().filter_map(object).collect()
}

fn inside(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Removes an entry that has no more than its lock. Whoever waits for the lock makes a new one.
pub fn remove_empty(entry: &Path) {
    if inside(entry).iter().all(|path| path.file_name().is_some_and(|name| name == LOCK)) {
        let _ = std::fs::remove_file(entry.join(LOCK));
        let _ = std::fs::remove_dir(entry);
    }
}

/// How many objects the builds of the log found in the cache, and how many they compiled.
pub fn served(objects: &Path) -> (u64, u64) {
    let log = std::fs::read_to_string(objects.join(LOG)).unwrap_or_default();
    let number = |line: &str, key: &str| {
        let word = line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
    };
    let sum = |key: &str| log.lines().map(|line| number(line, key)).sum();
    (sum("found"), sum("compiled"))
}

/// Replaces the lines of the log by one.
pub fn shorten_log(objects: &Path) {
    let (found, compiled) = served(objects);
    let partial = unique(objects, LOG);
    let text = format!("earlier builds: found={found} compiled={compiled}\n");
    let written =
        std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, objects.join(LOG)));
    if written.is_err() {
        let _ = std::fs::remove_file(partial);
    }
}
