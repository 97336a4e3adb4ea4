//! The cache: one folder for each request, with the library that answers it.
//!
//! An entry holds `lock`, `manifest`, the library, inline sources, a `log` with one line for each
//! build, and `compiler.log`, the message of a compiler that failed at length. A process that loads
//! from an entry holds the lock shared, and a process that builds in it holds the lock exclusively.
//! It is a lock of the kernel, so it ends with the process that holds it, however the process ends.
//! A builder works in a folder of its own; if the builder is killed, the next one removes that
//! folder. The builder writes the manifest last, by renaming it.

use super::Facts;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Error, Result, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tch_extension_build::content::{digest, is_changed_since, resolve};
use tch_extension_build::place::{create, lock_alone, open_lock, unique};

/// What a build depends on, so that the next load can check whether it is still up to date.
pub(super) struct Built {
    /// In the scratch folder that the builder was given.
    pub library: PathBuf,
    /// Sources, headers and compilers.
    pub files: Vec<PathBuf>,
    /// Programs that were run by name.
    pub programs: Vec<String>,
    /// Every environment variable that was read.
    pub variables: BTreeMap<String, Option<String>>,
}

/// Holds the lock, so that the library is not replaced while it is loaded.
pub(super) struct Locked {
    pub library: PathBuf,
    _lock: File,
}

/// The folder of one request.
pub(super) struct Entry {
    folder: PathBuf,
    request: String,
}

impl Entry {
    /// `request` contains everything that is known without running a compiler.
    pub fn new(root: &Path, name: &str, request: String) -> Self {
        let folder = root.join(format!("{name}-{}", digest([request.as_bytes()])));
        Entry { folder, request }
    }

    /// Returns the library. If none is up to date, `build` makes it. `build` gets the entry's
    /// folder, for sources, and a new folder for objects.
    pub fn library(
        &self,
        build: impl Fn(&Path, &Path) -> crate::Result<Built>,
    ) -> crate::Result<Locked> {
        let io = |error: Error| self.error(&error);
        let lock = open_lock(&self.folder).map_err(io)?;
        lock.lock_shared().map_err(io)?;
        if let Some(library) = self.current() {
            return Ok(Locked { library, _lock: lock });
        }
        // The shared lock is released and not upgraded: two processes that both wait for an upgrade
        // would wait forever.
        lock.unlock().map_err(io)?;
        let lock = lock_alone(&self.folder, lock).map_err(io)?;
        if let Some(library) = self.current() {
            return Ok(Locked { library, _lock: lock });
        }
        self.clean();
        Ok(Locked { library: self.build(build)?, _lock: lock })
    }

    /// The files that went into the library, without waiting for a lock.
    pub fn files(&self) -> Option<Vec<PathBuf>> {
        let manifest = Manifest::read(&self.folder.join(MANIFEST))?;
        let files = manifest.facts.iter().filter(|[kind, ..]| kind == "file");
        Some(files.map(|[_, path, _]| path.into()).collect())
    }

    /// Returns the library if it is up to date, without waiting for a lock.
    pub fn current(&self) -> Option<PathBuf> {
        let manifest = Manifest::read(&self.folder.join(MANIFEST))?;
        (manifest.request == self.request && manifest.holds())
            .then(|| self.folder.join(&manifest.library))
            .filter(|library| library.is_file())
    }

    /// Builds. If a file changed meanwhile, nobody knows which content was compiled, so it builds a
    /// second time, for which the contents are known in advance. The contents decide, because times
    /// may change without them (for example by a hard link that somebody makes).
    fn build(
        &self,
        build: impl Fn(&Path, &Path) -> crate::Result<Built>,
    ) -> crate::Result<PathBuf> {
        let mut before = Known::default();
        loop {
            let scratch = Scratch::new(&self.folder).map_err(|error| self.error(&error))?;
            let started = SystemTime::now();
            let built = build(&self.folder, &scratch.0)?;
            let (compiled, is_all) = compiled(&built.files, &before, started);
            if is_all || !before.is_empty() {
                return self
                    .publish(&built, &compiled, started)
                    .map_err(|error| self.error(&error));
            }
            before = built.files.into_iter().map(|path| (path.clone(), contents(&path))).collect();
        }
    }

    fn publish(&self, built: &Built, compiled: &Known, started: SystemTime) -> Result<PathBuf> {
        // Each library gets a new name, because the dynamic loader takes a path that it knows for
        // the file that it knows.
        let extension = built.library.extension().unwrap_or_default();
        let library = unique(&self.folder, LIBRARY).with_extension(extension);
        std::fs::rename(&built.library, &library)?;
        let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let manifest = Manifest::new(name, self.request.clone(), built, compiled);
        let partial = unique(&self.folder, "manifest-part");
        std::fs::write(&partial, manifest.text())?;
        std::fs::rename(&partial, self.folder.join(MANIFEST))?;
        let seconds = started.elapsed().unwrap_or_default().as_secs_f64();
        let mut log = OpenOptions::new().append(true).create(true).open(self.folder.join("log"))?;
        log.write_all(
            format!("process {} built it in {seconds:.1} s\n", std::process::id()).as_bytes(),
        )?;
        Ok(library)
    }

    /// Removes what killed builders and earlier builds left behind. Nobody loads or builds now,
    /// because this process holds the lock exclusively.
    fn clean(&self) {
        let _ = std::fs::remove_file(self.folder.join(MANIFEST));
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let _ = if name.starts_with(SCRATCH) {
                std::fs::remove_dir_all(entry.path())
            } else if name.starts_with("manifest-part") || name.starts_with(LIBRARY) {
                std::fs::remove_file(entry.path())
            } else {
                Ok(())
            };
        }
    }

    fn error(&self, error: &Error) -> crate::Error {
        crate::Error::msg(format!(
            "jit: cannot use the cache {}: {error}; set TCH_EXTENSION_CACHE to a folder that can be written",
            self.folder.display()
        ))
    }
}

const MANIFEST: &str = "manifest";
const SCRATCH: &str = "build";
const LIBRARY: &str = "lib";

/// Identifies the contents of a source or header. The modification time would not do: archives,
/// container images and fresh clones set it back or round it, so that changed files look the same
/// and unchanged files look changed.
fn contents(path: &Path) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    Some(digest([&bytes[..]]))
}

/// Files and their contents. The contents are `None` for a file that does not exist or that may
/// have been compiled with other contents.
type Known = BTreeMap<PathBuf, Option<String>>;

/// The contents that a build that began at `started` has read, as far as they can be known, and
/// whether all of them are known.
fn compiled(files: &[PathBuf], before: &Known, started: SystemTime) -> (Known, bool) {
    let state = |path: &PathBuf| {
        let now = contents(path);
        let is_known = !is_changed_since(path, started) || before.get(path) == Some(&now);
        now.filter(|_| is_known)
    };
    let compiled: Known = files.iter().map(|path| (path.clone(), state(path))).collect();
    let is_all = compiled.values().all(Option::is_some);
    (compiled, is_all)
}

/// The folder of one build, which is removed afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(folder: &Path) -> Result<Self> {
        let scratch = unique(folder, SCRATCH);
        create(&scratch)?;
        Ok(Scratch(scratch))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The size of a program and the time of its last modification.
fn stamp(path: &Path) -> Option<String> {
    let metadata = path.metadata().ok()?;
    Some(format!("{} {}.{:09}", metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
}

/// The identity of a program: its path with links resolved, and its stamp.
fn identity(program: &str) -> Option<String> {
    let path = resolve(Path::new(program))?.canonicalize().ok()?;
    Some(format!("{} {}", path.display(), stamp(&path)?))
}

/// What a library was built from. As text, each field ends with a zero byte, which no path and no
/// variable contains.
struct Manifest {
    library: String,
    request: String,
    /// The kind, name and state of each thing that must not have changed.
    facts: Vec<[String; 3]>,
}

impl Manifest {
    fn new(library: String, request: String, built: &Built, compiled: &Known) -> Self {
        let mut facts = Vec::new();
        for (path, state) in compiled {
            facts.push([
                "file".into(),
                path.display().to_string(),
                state.clone().unwrap_or_default(),
            ]);
        }
        for program in &built.programs {
            facts.push(["program".into(), program.clone(), identity(program).unwrap_or_default()]);
        }
        for (name, value) in &built.variables {
            facts.push(["variable".into(), name.clone(), format!("{value:?}")]);
        }
        Manifest { library, request, facts }
    }

    fn holds(&self) -> bool {
        self.facts.iter().all(|[kind, name, state]| match kind.as_str() {
            "file" => contents(Path::new(name)).as_ref() == Some(state),
            "program" => identity(name).as_ref() == Some(state),
            "variable" => format!("{:?}", Facts::variable(name)) == *state,
            _ => false,
        })
    }

    fn text(&self) -> String {
        let fields = [&self.library, &self.request].into_iter().chain(self.facts.iter().flatten());
        fields.map(|field| format!("{field}\0")).collect()
    }

    fn read(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut fields = text.strip_suffix('\0')?.split('\0').map(String::from);
        let (library, request) = (fields.next()?, fields.next()?);
        let mut facts = Vec::new();
        while let Some(kind) = fields.next() {
            facts.push([kind, fields.next()?, fields.next()?]);
        }
        Some(Manifest { library, request, facts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_lock_whose_folder_was_deleted_is_taken_anew() {
        let root = tempfile::tempdir().unwrap();
        let entry = Entry::new(root.path(), "deleted", String::new());
        let before = open_lock(&entry.folder).unwrap();
        std::fs::remove_dir_all(&entry.folder).unwrap();
        let _held = lock_alone(&entry.folder, before).unwrap();
        assert!(open_lock(&entry.folder).unwrap().try_lock().is_err(), "the next one waits");
    }

    /// Builds from a header while `meanwhile` changes it as the compiler runs.
    struct Disturbed {
        root: tempfile::TempDir,
        entry: Entry,
        builds: Cell<usize>,
    }

    impl Disturbed {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            std::fs::write(root.path().join("a.h"), "0").unwrap();
            let entry = Entry::new(root.path(), "disturbed", String::new());
            Disturbed { root, entry, builds: Cell::new(0) }
        }

        /// How many builds a load takes, and from which content the last library was built.
        fn load(&self, meanwhile: impl Fn(&Path, usize)) -> (usize, String) {
            self.builds.set(0);
            let header = self.root.path().join("a.h");
            let library = self.entry.library(|_, scratch| {
                self.builds.set(self.builds.get() + 1);
                // File systems record time in coarse steps.
                std::thread::sleep(std::time::Duration::from_millis(20));
                let library = scratch.join("library");
                std::fs::copy(&header, &library).unwrap();
                meanwhile(&header, self.builds.get());
                let (programs, variables) = (Vec::new(), BTreeMap::new());
                Ok(Built { library, files: vec![header.clone()], programs, variables })
            });
            let text = std::fs::read_to_string(library.unwrap().library).unwrap();
            (self.builds.get(), text)
        }
    }

    #[test]
    fn a_header_saved_during_the_build_is_compiled_again() {
        let scene = Disturbed::new();
        let saved_once = |header: &Path, build: usize| {
            if build == 1 {
                std::fs::write(header, "1").unwrap();
            }
        };
        assert_eq!(scene.load(saved_once), (2, "1".to_string()));
        assert_eq!(scene.load(|_, _| unreachable!("it is up to date")), (0, "1".to_string()));
    }

    #[test]
    fn a_header_that_is_saved_all_the_time_is_never_up_to_date() {
        let scene = Disturbed::new();
        let saved =
            |header: &Path, build: usize| std::fs::write(header, build.to_string()).unwrap();
        assert_eq!(scene.load(saved).0, 2, "there is an end to it");
        assert!(scene.entry.current().is_none(), "nobody knows which text was compiled");
        assert_eq!(scene.load(|_, _| ()), (1, "2".to_string()));
        assert!(scene.entry.current().is_some());
    }

    /// Only the change time moves.
    #[test]
    fn a_header_that_is_linked_elsewhere_during_each_build_is_the_same() {
        let scene = Disturbed::new();
        let linked = |header: &Path, build: usize| {
            std::fs::hard_link(header, header.with_extension(build.to_string())).unwrap();
        };
        assert_eq!(scene.load(linked), (2, "0".to_string()));
        assert_eq!(scene.load(|_, _| unreachable!("it is up to date")), (0, "0".to_string()));
    }
}
