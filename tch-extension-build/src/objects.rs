//! The compile cache: objects that this user has compiled before, found by what they are made from.
//!
//! It takes two steps. The first key is everything that is known before a compiler runs: the
//! command without the places of its files, the compiler, the variables that compilers read and the
//! source's text. The entry of that key has objects, each with the list of the files that its
//! compiler read. The second key is what these files say now (see [`Search::key`]), and the object
//! of that key is the one that the compiler would make.
//!
//! An entry is a folder with a `lock` and one file for each second key: the list, the compiler's
//! warnings and the object, after a digest of all three. Files appear by being renamed, so they are
//! whole or missing, and one that is damaged does not have its digest. Who compiles holds the
//! lock. What goes wrong with the cache is said once, and the compiler runs.

use crate::compile::{Job, Language};
use crate::content::{Asks, digest, is_changed_since, mentions_cuda};
use crate::environment::Environment;
use crate::identity::{asked, flags_of_compiler, identity};
use crate::search::{Known, Search, Text};
use crate::toolchain::Reuse;
use crate::{place, trusted};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The bytes after which the lines of the log become one.
const MOST_LOG: u64 = 1 << 20;

/// The objects of one source and command that are kept: a header that is changed to and fro.
const MOST_OBJECTS: usize = 8;

/// The variables that compilers read besides their command.
const VARIABLES: [&str; 7] = [
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "SOURCE_DATE_EPOCH",
    "CCC_OVERRIDE_OPTIONS",
];

/// The variables whose flags nvcc adds to its own.
const NVCC_VARIABLES: [&str; 2] = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"];

/// The beginnings of flags by which a compiler reads or writes files that are not in its list of
/// headers.
const UNKEPT_FLAGS: [&str; 27] = [
    "@",
    "-B",
    "-M",
    "-Xpreprocessor",
    "-coverage",
    "--coverage",
    "-fauto-profile",
    "-fbranch-probabilities",
    "-fcallgraph-info",
    "-fdump",
    "-fmodule",
    "-fplugin",
    "-fprofile",
    "-fsanitize-",
    "-fsave",
    "-fstack-usage",
    "-ftest-coverage",
    "-gsplit",
    "-imacros",
    "-include",
    "--include",
    "-pre-include",
    "--pre-include",
    "-save-temps",
    "--save-temps",
    "-specs",
    "-wrapper",
];

/// The same of nvcc alone.
const UNKEPT_NVCC_FLAGS: [&str; 6] =
    ["-keep", "--keep", "-optf", "--options-file", "-time", "--time"];

/// The objects of one call of `Toolchain::compile`.
pub(crate) struct Objects<'a> {
    env: &'a dyn Environment,
    /// Whether nothing is ever compiled again.
    pub is_once: bool,
    /// The folder of the entries, unless there is none that can be used.
    store: Option<PathBuf>,
    compilers: Mutex<Compilers>,
    texts: Mutex<Texts>,
    is_trouble_told: AtomicBool,
    is_new: AtomicBool,
    current: AtomicUsize,
    found: AtomicUsize,
    compiled: AtomicUsize,
}

/// What is known of compilers.
#[derive(Default)]
struct Compilers {
    /// By program and all flags.
    by_command: HashMap<String, Arc<Compiler>>,
    /// The identities, by program and the flags that choose them.
    identities: HashMap<String, Option<String>>,
    /// Commands that search the same folders share what is known of these.
    searches: Vec<Arc<Search>>,
}

/// A compiler with its flags.
pub(crate) struct Compiler {
    /// `None` if it does not answer as g++, clang and nvcc do.
    identity: Option<String>,
    pub search: Arc<Search>,
}

/// Files that were read, by path, and whether it is one of the system's headers.
type Texts = HashMap<(PathBuf, bool), Option<Arc<Text>>>;

/// What an object is made from.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    /// The files that the compiler read, sorted. The names of [`Search::roots`] stand for folders.
    pub files: Vec<String>,
    /// The second key.
    pub key: String,
}

/// What the cache has.
pub(crate) struct Found {
    pub inputs: Inputs,
    pub warnings: String,
    pub object: Vec<u8>,
}

impl<'a> Objects<'a> {
    pub fn open(reuse: &Reuse, env: &'a dyn Environment) -> Self {
        let objects = Objects {
            env,
            is_once: *reuse == Reuse::Never,
            store: None,
            compilers: Mutex::default(),
            texts: Mutex::default(),
            is_trouble_told: AtomicBool::new(false),
            is_new: AtomicBool::new(false),
            current: AtomicUsize::new(0),
            found: AtomicUsize::new(0),
            compiled: AtomicUsize::new(0),
        };
        let open = |cache: &Path| {
            let store = place::root(Some(cache))?.join(place::OBJECTS);
            place::create(&store)?;
            trusted::check(&store)?;
            Ok(store)
        };
        let store = match reuse {
            Reuse::Cache(cache) => objects.usable(open(cache)),
            Reuse::Never | Reuse::Folder => None,
        };
        Objects { store, ..objects }
    }

    /// The value, or a warning that the cache is of no use. One is enough.
    fn usable<T>(&self, result: Result<T>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        if !self.is_trouble_told.swap(true, Ordering::Relaxed) {
            self.env.warns(&format!(
                "the compile cache cannot be used, so more is compiled: {error}; set TCH_EXTENSION_CACHE to a folder \
                 of yours that can be written, or {}=0",
                place::SWITCH
            ));
        }
        None
    }

    pub fn count_current(&self) {
        self.current.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count_compiled(&self) {
        self.compiled.fetch_add(1, Ordering::Relaxed);
    }

    /// What is known of the job's compiler.
    pub fn compiler(&self, job: &Job) -> Arc<Compiler> {
        let mut compilers = lock(&self.compilers);
        let command = format!("{}\0{}", job.program.display(), job.arguments.join("\0"));
        let command = format!("{command}\0{:?}", job.roots);
        if let Some(compiler) = compilers.by_command.get(&command) {
            return compiler.clone();
        }
        let flags = flags_of_compiler(&job.arguments);
        let identity = compilers
            .identities
            .entry(format!("{}\0{}", job.program.display(), flags.join("\0")))
            .or_insert_with(|| identity(job, &flags))
            .clone();
        let report = identity.as_ref().and_then(|_| asked(job, &job.arguments));
        let identity = identity.filter(|_| report.is_some());
        let search = Search::new(job, &report.unwrap_or_default());
        let same = compilers.searches.iter().find(|known| known.is_like(&search)).cloned();
        let search = same.unwrap_or_else(|| {
            let search = Arc::new(search);
            compilers.searches.push(search.clone());
            search
        });
        let compiler = Arc::new(Compiler { identity, search });
        compilers.by_command.insert(command, compiler.clone());
        compiler
    }

    /// The first key.
    pub fn key(&self, job: &Job, compiler: &Compiler) -> String {
        let search = &compiler.search;
        let mut parts = vec!["2".to_string(), format!("{:?}", job.language)];
        parts.extend(kept_arguments(job));
        parts.push(format!("{:?}", (!job.first.is_empty()).then(|| job.first.join(" "))));
        parts.push(compiler.identity.clone().unwrap_or_else(|| job.built_for.clone()));
        let read_by_nvcc = NVCC_VARIABLES.iter().filter(|_| job.language == Language::Cuda);
        let variables = VARIABLES.iter().chain(read_by_nvcc);
        parts.extend(variables.map(|name| format!("{name}={:?}", self.env.var(name))));
        parts.push(search.name(&job.object.source));
        let source = self.text(&job.object.source, false);
        parts.extend(source.map(|source| source.digest.clone()));
        if job.arguments.iter().any(|flag| is_for_debuggers(flag)) {
            parts.push(format!("{:?} {:?}", std::env::current_dir().ok(), job.roots));
        }
        digest(parts.iter().map(String::as_bytes))
    }

    /// The cache's entry for this key, if the job's object may be kept.
    pub fn entry(&self, job: &Job, compiler: &Compiler, key: &str) -> Option<Entry<'_, 'a>> {
        let is_kept = |flag: &str| {
            let flags = flag.split([',', ' ', '\'', '"']);
            let mut flags = flags.map(|flag| flag.trim_start_matches("-Xcompiler="));
            !flags.any(|flag| is_unkept(flag, job.language))
        };
        let variables = match job.language {
            Language::Cxx => Vec::new(),
            Language::Cuda => NVCC_VARIABLES.iter().filter_map(|name| self.env.var(name)).collect(),
        };
        let mut flags = job.arguments.iter().chain(&variables);
        if compiler.identity.is_none() || !flags.all(|flag| is_kept(flag)) {
            return None;
        }
        let folder = self.store.as_ref()?.join(key);
        Some(Entry { objects: self, folder })
    }

    /// The files that the compiler has read, by its own list, and their key; and whether the object
    /// may be kept.
    pub fn inputs(
        &self,
        job: &Job,
        search: &Search,
        read: &[PathBuf],
        began: SystemTime,
    ) -> (Inputs, bool) {
        let mut files: Vec<String> = read.iter().map(|path| search.name(path)).collect();
        files.sort();
        files.dedup();
        match self.key_after(job, search, &files, began) {
            Some((key, is_kept)) => (Inputs { files, key }, is_kept && !are_odd(read)),
            None => (Inputs { files, key: "unknown".to_string() }, false),
        }
    }

    /// The second key after a compilation, and whether the object may be kept. `None` if a file has
    /// changed since the compiler began, so that nobody knows what it read.
    fn key_after(
        &self,
        job: &Job,
        search: &Search,
        files: &[String],
        began: SystemTime,
    ) -> Option<(String, bool)> {
        // The kernel's clock for files is behind by up to a tick.
        const TICK: Duration = Duration::from_millis(10);
        let began = began - TICK;
        let key = search.key(files, self)?;
        let mut is_kept = true;
        let mut next_to: Option<HashSet<PathBuf>> = None;
        for file in files {
            let known = search.known(file, self)?;
            let path = &known.path;
            if is_changed_since(path, began.min(known.text.read - TICK)) {
                return None;
            }
            let asks = &known.text.asks;
            // So for the files whose being there counts: those that are there may be new, and
            // others may have come or gone since.
            let is_new = known.others.iter().any(|other| is_changed_since(other, began));
            let may_differ = !known.is_system || !asks.has.is_empty();
            let is_same = |now: Known| now.key == known.key;
            if is_new || may_differ && !search.learn(file, self).is_some_and(is_same) {
                return None;
            }
            is_kept &= !asks.hidden && (known.is_system || !asks.computed);
            if *path != job.object.source && search.places(path).next().is_none() {
                // It must have been found next to a file that asks for it.
                let next_to = next_to.get_or_insert_with(|| self.next_to(files, search));
                is_kept &= next_to.contains(path);
            }
        }
        Some((key, is_kept))
    }

    /// The paths that the files' names in quotes have next to these files.
    fn next_to(&self, files: &[String], search: &Search) -> HashSet<PathBuf> {
        let mut paths = HashSet::new();
        for file in files {
            if let Some(known) = search.known(file, self) {
                let quoted = &known.text.asks.quoted;
                paths.extend(quoted.iter().map(|name| known.path.with_file_name(name)));
            }
        }
        paths
    }

    pub fn text(&self, path: &Path, is_system: bool) -> Option<Arc<Text>> {
        let key = (path.to_path_buf(), is_system);
        if let Some(text) = lock(&self.texts).get(&key) {
            return text.clone();
        }
        let read = SystemTime::now();
        let text = std::fs::read(path).ok().map(|bytes| {
            let asks = Asks::of(&String::from_utf8_lossy(&bytes), is_system);
            Arc::new(Text { digest: digest([&bytes[..]]), asks, read })
        });
        lock(&self.texts).entry(key).or_insert(text).clone()
    }

    /// Writes the build's line into the log, and makes room.
    pub fn finish(&self, name: &str) {
        let Some(store) = &self.store else { return };
        let [current, found, compiled] =
            [&self.current, &self.found, &self.compiled].map(|count| count.load(Ordering::Relaxed));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let line = format!("{now} {name}: current={current} found={found} compiled={compiled}\n");
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600);
        let log = trusted::open(&store.join(place::LOG), &mut options);
        let written = log.and_then(|mut log| {
            log.write_all(line.as_bytes())?;
            log.metadata()
        });
        if written.as_ref().is_ok_and(|log| log.len() > MOST_LOG) {
            place::shorten_log(store);
        }
        // The log alone is no reason for a warning: a cache that can only be read is useful, too.
        if written.is_ok() && self.is_new.load(Ordering::Relaxed) {
            make_room(store, place::MOST_BYTES);
        }
    }
}

/// Whether a path is one that a list of headers in make's syntax does not show for sure.
fn are_odd(read: &[PathBuf]) -> bool {
    read.iter()
        .any(|path| path.to_string_lossy().contains(['\\', '\n', char::REPLACEMENT_CHARACTER]))
}

/// The folder of a first key.
pub(crate) struct Entry<'o, 'a> {
    objects: &'o Objects<'a>,
    folder: PathBuf,
}

const HEAD: &str = "object 2";

impl Entry<'_, '_> {
    /// Locks the entry until the value is dropped. Where the file system has no locks, two builds may
    /// compile the same source, and both publish the same.
    pub fn lock(&self) -> Option<File> {
        let lock = self.objects.usable(place::open_lock(&self.folder))?;
        place::lock_alone(&self.folder, lock).ok()
    }

    /// The object of what the files say now.
    pub fn find(&self, search: &Search) -> Option<Found> {
        trusted::check(&self.folder).ok()?;
        let names = std::fs::read_dir(&self.folder).ok()?.flatten().map(|file| file.file_name());
        let mut keys = names.filter_map(|name| name.into_string().ok()).filter(|name| is_key(name));
        let found = keys.find_map(|key| self.open(&key, search))?;
        self.objects.found.fetch_add(1, Ordering::Relaxed);
        Some(found)
    }

    fn open(&self, key: &str, search: &Search) -> Option<Found> {
        let path = self.folder.join(key);
        let mut file = trusted::open(&path, OpenOptions::new().read(true)).ok()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let Some((files, warnings, object)) = unpack(key, &bytes) else {
            let _ = std::fs::remove_file(path);
            return None;
        };
        if search.key(&files, self.objects).as_deref() != Some(key) {
            return None;
        }
        // The time of the last use, for who makes room.
        let used = OpenOptions::new().append(true).open(&path);
        let _ = used.and_then(|file| file.set_modified(SystemTime::now()));
        let object = object.to_vec();
        Some(Found { inputs: Inputs { files, key: key.to_string() }, warnings, object })
    }

    /// Keeps an object.
    pub fn keep(&self, inputs: &Inputs, warnings: &str, object: &Path) {
        let written = std::fs::read(object).and_then(|object| {
            let bytes = pack(inputs, warnings, &object);
            // Somebody may have emptied the cache.
            let publish = || place::publish(&self.folder, &inputs.key, &bytes);
            publish().or_else(|_| publish())
        });
        if self.objects.usable(written).is_some() {
            self.objects.is_new.store(true, Ordering::Relaxed);
            self.forget();
        }
    }

    /// Removes the objects that were used longest ago, and what killed builds have left.
    fn forget(&self) {
        let mut files = place::stored_in(&self.folder);
        files.sort_by_key(|file| file.used);
        let surplus = files.len().saturating_sub(MOST_OBJECTS);
        for file in &files[..surplus] {
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

/// Whether a file's name is a second key.
fn is_key(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The text of a file in an entry.
fn pack(inputs: &Inputs, warnings: &str, object: &[u8]) -> Vec<u8> {
    let files = inputs.files.join("\n");
    let parts = [inputs.key.as_bytes(), files.as_bytes(), warnings.as_bytes(), object];
    let head = format!("{HEAD} {} {} {}\n", digest(parts), files.len(), warnings.len());
    [head.as_bytes(), files.as_bytes(), warnings.as_bytes(), object].concat()
}

/// The files, the warnings and the object, if they are what was packed.
fn unpack<'b>(key: &str, bytes: &'b [u8]) -> Option<(Vec<String>, String, &'b [u8])> {
    let end = bytes.iter().take(200).position(|byte| *byte == b'\n')?;
    let head = std::str::from_utf8(&bytes[..end]).ok()?.strip_prefix(HEAD)?;
    let mut words = head.split_whitespace();
    let (stated, files, warnings) = (words.next()?, words.next()?, words.next()?);
    let (files, rest) = bytes[end + 1..].split_at_checked(files.parse().ok()?)?;
    let (warnings, object) = rest.split_at_checked(warnings.parse().ok()?)?;
    if digest([key.as_bytes(), files, warnings, object]) != stated {
        return None;
    }
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(str::to_string);
    Some((lines(&text(files)?), text(warnings)?, object))
}

/// The names in a list that has one a line.
pub(crate) fn lines(list: &str) -> Vec<String> {
    list.lines().map(str::to_string).collect()
}

/// The names of the roots: libtorch's headers, CUDA's toolkit, and the folders of headers that the
/// command names by their whole paths.
pub(crate) const LIBTORCH: &str = "{libtorch}";
pub(crate) const TOOLKIT: &str = "{cuda}";
pub(crate) const FOLDERS: [&str; 8] = ["{0}", "{1}", "{2}", "{3}", "{4}", "{5}", "{6}", "{7}"];

/// The macro that says that CUDA is compiled.
pub(crate) const CUDA_MACRO: &str = "-DTCH_EXTENSION_CUDA=1";

/// The flag by which objects contain a header's name as it is included, and not its place.
pub(crate) fn without_place(root: &Path) -> String {
    format!("-ffile-prefix-map={}/=", root.display())
}

/// Whether a flag asks for what debuggers need, among it the places of sources.
pub(crate) fn is_for_debuggers(flag: &str) -> bool {
    flag.split(',').any(|flag| {
        let is_debug = flag.starts_with("-g") && !flag.starts_with("-gencode");
        is_debug || ["-G", "--debug", "--device-debug"].contains(&flag)
    })
}

/// The arguments of the first key. Folders of headers are left out where only what is found in them
/// counts; so is the macro of CUDA in C++, which counts only in files that have it.
fn kept_arguments(job: &Job) -> Vec<String> {
    let is_cxx = job.language == Language::Cxx;
    let roots = |flag: &str| {
        let places = job.roots.iter().map(|(name, root)| (root.display().to_string(), name));
        let mut places: Vec<_> = places.collect();
        places.sort_by_key(|(root, _)| std::cmp::Reverse(root.len()));
        places.iter().fold(flag.to_string(), |flag, (root, name)| flag.replace(root, name))
    };
    let has_macro = |flag: &String| flag != CUDA_MACRO && mentions_cuda(flag);
    let keeps_macro = !is_cxx || job.arguments.iter().any(has_macro);
    let is_map = |flag: &String| job.roots.iter().any(|(_, root)| *flag == without_place(root));
    let mut kept = Vec::new();
    let mut flags = job.arguments.iter();
    while let Some(flag) = flags.next() {
        if flag == "-isystem" {
            let folder = flags.next().map(|folder| roots(folder)).unwrap_or_default();
            if ![LIBTORCH, TOOLKIT].iter().any(|root| folder.starts_with(root)) {
                kept.extend([flag.clone(), folder]);
            }
        } else if (flag != CUDA_MACRO || keeps_macro) && !is_map(flag) {
            kept.push(roots(flag));
        }
    }
    kept
}

fn is_unkept(flag: &str, language: Language) -> bool {
    let starts = |beginnings: &[&str]| beginnings.iter().any(|start| flag.starts_with(start));
    // The GPUs of this machine.
    let is_native = flag == "native" || (flag.ends_with("arch=native") && flag != "-march=native");
    let of_nvcc = language == Language::Cuda && (is_native || starts(&UNKEPT_NVCC_FLAGS));
    of_nvcc || flag == "-Wp" || starts(&UNKEPT_FLAGS)
}

/// Removes the objects that were used longest ago, until they take less than `most` bytes.
fn make_room(store: &Path, most: u64) {
    let mut files = place::stored(store);
    let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
    if bytes <= most {
        return;
    }
    files.sort_by_key(|file| file.used);
    for file in files {
        // More than needed, so that not every build has to make room.
        if bytes <= most / 4 * 3 {
            break;
        }
        if std::fs::remove_file(&file.path).is_ok() {
            bytes -= file.bytes;
        }
        place::remove_empty(file.path.parent().unwrap_or(store));
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::{scratch, write};

    #[test]
    fn flags_that_read_other_files_are_known() {
        for flag in ["-fplugin=a.so", "-include", "@flags", "-Wp,-MD,a", "-specs=a", "-save-temps"]
        {
            let mut flags = flag.split(',');
            assert!(flags.any(|flag| is_unkept(flag, Language::Cxx)), "{flag}");
        }
        for flag in ["-O3", "-fopenmp", "-march=native", "-Wpedantic", "-isystem", "-m64"] {
            assert!(!is_unkept(flag, Language::Cxx), "{flag}");
        }
        for flag in ["-arch=native", "native", "--keep", "-optf"] {
            assert!(is_unkept(flag, Language::Cuda), "{flag}");
        }
        for flag in ["-march=native", "--threads=2", "--use_fast_math", "-Xcicc"] {
            assert!(!is_unkept(flag, Language::Cuda), "{flag}");
        }
    }

    #[test]
    fn room_is_made_where_it_was_used_longest_ago() {
        let folder = scratch("room");
        let object = |name: &str, seconds: u64| {
            let path = write(&folder.join(name), &"x".repeat(100));
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            path
        };
        let files = [("a/1", 5), ("b/1", 1), ("b/lock", 0), ("c/1", 3), ("c/2", 9), ("log", 0)];
        let files = files.map(|(name, seconds)| object(name, seconds));
        make_room(&folder, 400);
        assert!(files.iter().all(|file| file.exists()), "there is room");
        make_room(&folder, 399);
        assert!(!files[1].exists() && !folder.join("b").exists(), "with its lock");
        let left = [0, 3, 4, 5].map(|index| files[index].exists());
        assert_eq!(left, [true, false, true, true], "a little more than needed");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_log_becomes_short_and_keeps_its_sums() {
        let folder = scratch("log");
        let log = folder.join(place::LOG);
        std::fs::write(
            &log,
            "1 a: current=3 found=2 compiled=5\n2 b: current=0 found=7 compiled=0\n",
        )
        .unwrap();
        assert_eq!(place::served(&folder), (9, 5));
        place::shorten_log(&folder);
        assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 1);
        assert_eq!(place::served(&folder), (9, 5));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
