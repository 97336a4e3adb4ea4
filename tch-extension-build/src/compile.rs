//! Runs the compilers: several at a time, and only for sources that changed.

use crate::environment::Environment;
use crate::fewer;
use crate::objects::{self, Entry, Found, Inputs, Objects};
use crate::search::Search;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

/// An object that a compiler made.
#[derive(Clone, Debug)]
pub struct Object {
    /// The object file.
    pub path: PathBuf,
    /// The source that it was compiled from.
    pub source: PathBuf,
}

/// One run of a compiler on one source.
pub struct Job {
    pub language: Language,
    pub program: PathBuf,
    /// The compiler itself if the program is a wrapper.
    pub compiler: PathBuf,
    /// All arguments but those that name the source and the files that are made.
    pub arguments: Vec<String>,
    /// The folders of headers whose places make no difference.
    pub roots: Vec<(&'static str, PathBuf)>,
    /// The compilers and libtorch that are used: [`Toolchain::identity`].
    pub built_for: String,
    /// Additional arguments for a first attempt, if there are any.
    pub first: Vec<String>,
    pub object: Object,
}

/// Which of the compilers is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    Cxx,
    Cuda,
}

/// Runs all jobs, at most `workers` at a time, and returns the first failure.
pub fn run(jobs: &[Job], workers: usize, objects: &Objects, env: &dyn Environment) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = job.run(objects, env) {
                        failure
                            .lock()
                            .unwrap_or_else(|poisoned| poisoned.into_inner())
                            .get_or_insert(error);
                        next.store(jobs.len(), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    match failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Runs a compiler or linker. When it fails, the error contains its message.
pub fn run_compiler(command: &mut Command, failed: &str, env: &dyn Environment) -> Result<Output> {
    let output = try_compiler(command, failed, env)?;
    if !output.status.success() {
        let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        let name = command.get_program().to_string_lossy();
        bail!("{failed}; {name} ({}) says:\n{}", output.status, readable(&text, env));
    }
    Ok(output)
}

/// Runs a compiler, which may fail.
fn try_compiler(command: &mut Command, failed: &str, env: &dyn Environment) -> Result<Output> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    env.runs(&words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "));
    let name = command.get_program().to_string_lossy().into_owned();
    command.output().with_context(|| format!("{failed}: cannot run {name}"))
}

/// The largest number of lines that are shown of a compiler's message. A mismatch in one of
/// libtorch's templates produces hundreds of lines, and the cause comes first.
const MOST_LINES: usize = 60;

/// Shortens the message, names the file that has all of it, and adds a solution to some messages
/// that name none.
fn readable(text: &str, env: &dyn Environment) -> String {
    let mut lines: Vec<_> = text.lines().collect();
    if lines.len() > MOST_LINES {
        // Start at the first error, so that warnings do not displace it. The line before it names
        // the function.
        let says = |line: &&str| line.contains("error:") || line.contains("undefined reference");
        let first = lines.iter().position(says).unwrap_or(0);
        lines.drain(..first.saturating_sub(1));
    }
    let mut message = lines[..lines.len().min(MOST_LINES)].join("\n");
    if lines.len() > MOST_LINES {
        message += &format!("\n… and {} more lines", lines.len() - MOST_LINES);
    }
    if text.lines().count() > MOST_LINES
        && let Some(file) = env.keeps(text)
    {
        message += &format!("\nthe whole message is in {}", file.display());
    }
    if text.contains("unsupported GNU version") || text.contains("unsupported clang version") {
        message += "\nnvcc's host compiler is too new for it: set NVCC_CCBIN to an older one, such as g++-12";
    } else if let Some(source) = source_of_parameters(text) {
        message += &format!("\nbuild.rs has no .params(\"{source}\"), which makes this header");
    } else if text.contains("Python.h: No such file") {
        message +=
            "\nlibtorch is used without Python here: include <torch/torch.h> or <ATen/ATen.h>";
    }
    message
}

/// The Rust file whose header was not found: those that `Extension::params` makes end with `.rs.h`.
fn source_of_parameters(text: &str) -> Option<&str> {
    let (before, _) = text.split_once(".rs.h: No such file")?;
    let start = before.rfind(' ').map_or(0, |space| space + 1);
    text.get(start..before.len() + ".rs".len())
}

impl Object {
    /// The source and the headers that it includes. Headers of libtorch, CUDA and the system are not
    /// listed.
    pub fn dependencies(&self) -> Vec<PathBuf> {
        let own = Record::of(self).map(|record| record.own);
        own.unwrap_or_default().into_iter().map(PathBuf::from).collect()
    }
}

/// What an object in the folder of objects was made from. It is in a file next to it, which is
/// written last.
struct Record {
    /// The first key of the compile cache.
    key: String,
    inputs: Inputs,
    /// The files that are neither libtorch's nor CUDA's nor the system's.
    own: Vec<String>,
}

impl Record {
    fn path(object: &Object) -> PathBuf {
        object.path.with_extension("inputs")
    }

    fn of(object: &Object) -> Option<Self> {
        let text = std::fs::read_to_string(Record::path(object)).ok()?;
        let (keys, rest) = text.split_once("\n\n")?;
        let (key, content) = keys.split_once('\n')?;
        let (own, files) = rest.split_once("\n\n")?;
        let inputs = Inputs { files: objects::lines(files), key: content.to_string() };
        let own = own.lines().map(str::to_string).collect();
        Some(Record { key: key.to_string(), inputs, own })
    }

    fn write(
        object: &Object,
        key: &str,
        inputs: &Inputs,
        search: &Search,
        objects: &Objects,
    ) -> Result<()> {
        let own = search.own(&inputs.files, objects);
        let record = Record { key: key.to_string(), inputs: inputs.clone(), own };
        record.keep(object)
    }

    /// Only the files that were read.
    fn once(object: &Object, read: &[PathBuf], env: &dyn Environment) -> Result<()> {
        read.iter().for_each(|path| env.reads(path));
        let own = read.iter().map(|path| path.display().to_string()).collect();
        let none = "none".to_string();
        let inputs = Inputs { files: Vec::new(), key: none.clone() };
        Record { key: none, inputs, own }.keep(object)
    }

    fn keep(&self, object: &Object) -> Result<()> {
        let Record { key, inputs, own } = self;
        let files = inputs.files.join("\n");
        let text = format!("{key}\n{}\n\n{}\n\n{files}", inputs.key, own.join("\n"));
        let path = Record::path(object);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The prerequisites of a rule in make's syntax.
fn prerequisites(rule: &str) -> Vec<PathBuf> {
    let Some((_, list)) = rule.split_once(": ") else { return Vec::new() };
    let list =
        list.replace("\\\n", " ").replace("\\ ", "\0").replace("\\#", "#").replace("$$", "$");
    list.split_whitespace().map(|path| PathBuf::from(path.replace('\0', " "))).collect()
}

impl Job {
    /// Makes this job, whose source is a header, precompile it.
    pub fn of_header(mut self) -> Self {
        self.object.path.set_extension("gch");
        self.first.clear();
        let language = ["-x", "c++-header"].map(String::from);
        self.arguments.extend(language.into_iter().chain([fewer::argument(fewer::AUTOGRAD)]));
        self
    }

    fn run(&self, objects: &Objects, env: &dyn Environment) -> Result<()> {
        if objects.is_once {
            // Without the system's headers.
            let (read, _) = self.call_compiler("-MMD", env)?;
            return Record::once(&self.object, &read, env);
        }
        let compiler = objects.compiler(self);
        let search = &compiler.search;
        let key = objects.key(self, &compiler);
        if self.is_up_to_date(&key, search, objects) {
            objects.count_current();
        } else {
            // Without a record, the next build compiles this source again, also when this build is
            // killed.
            let _ = std::fs::remove_file(Record::path(&self.object));
            let entry = objects.entry(self, &compiler, &key);
            let find = || entry.as_ref().and_then(|entry| entry.find(search));
            let mut lock = None;
            let found = find().or_else(|| {
                // Who had the lock before may have compiled it.
                lock = entry.as_ref().and_then(Entry::lock);
                find()
            });
            match found {
                Some(found) => self.install(&found, &key, search, objects, env)?,
                None => self.compile(&key, search, entry.as_ref(), objects, env)?,
            }
            drop(lock);
        }
        self.object.dependencies().iter().for_each(|path| env.reads(path));
        Ok(())
    }

    /// Writes an object that the cache has.
    fn install(
        &self,
        found: &Found,
        key: &str,
        search: &Search,
        objects: &Objects,
        env: &dyn Environment,
    ) -> Result<()> {
        let path = &self.object.path;
        std::fs::write(path, &found.object)
            .with_context(|| format!("cannot write {}", path.display()))?;
        found.warnings.lines().for_each(|line| env.warns(line));
        Record::write(&self.object, key, &found.inputs, search, objects)
    }

    fn compile(
        &self,
        key: &str,
        search: &Search,
        entry: Option<&Entry>,
        objects: &Objects,
        env: &dyn Environment,
    ) -> Result<()> {
        objects.count_compiled();
        let began = SystemTime::now();
        let (read, warnings) = self.call_compiler("-MD", env)?;
        if read.is_empty() {
            return Ok(());
        }
        let (inputs, is_kept) = objects.inputs(self, search, &read, began);
        if let Some(entry) = entry.filter(|_| is_kept) {
            entry.keep(&inputs, &warnings, &self.object.path);
        }
        Record::write(&self.object, key, &inputs, search, objects)
    }

    /// Runs the compiler, which lists the files that it reads as this flag says. Returns the list and
    /// the warnings.
    fn call_compiler(
        &self,
        list_flag: &str,
        env: &dyn Environment,
    ) -> Result<(Vec<PathBuf>, String)> {
        let failed = format!("{} does not compile", self.object.source.display());
        let list = self.object.path.with_extension("d");
        let command = |first: &[String]| {
            let mut command = Command::new(&self.program);
            // If the program is a wrapper, the compiler's name comes before all flags.
            let words = self.arguments.iter().take_while(|word| !word.starts_with('-')).count();
            let (words, flags) = self.arguments.split_at(words);
            command.args(words).args(first).args(flags).arg(list_flag).arg("-MF").arg(&list);
            command.arg("-c").arg(&self.object.source).arg("-o").arg(&self.object.path);
            command
        };
        // Nobody reads what a first attempt says.
        let first = (!self.first.is_empty())
            .then(|| try_compiler(&mut command(&self.first), &failed, env))
            .transpose()?
            .filter(|output| output.status.success());
        let output = match first {
            Some(output) => output,
            None => run_compiler(&mut command(&[]), &failed, env)?,
        };
        let text = String::from_utf8_lossy(&output.stderr);
        let warnings: String = text
            .lines()
            .filter(|line| line.contains("warning"))
            .map(|line| format!("{line}\n"))
            .collect();
        warnings.lines().for_each(|line| env.warns(line));

        let rule = std::fs::read(&list).unwrap_or_default();
        let _ = std::fs::remove_file(&list);
        let read = prerequisites(&String::from_utf8_lossy(&rule));
        for path in &read {
            // A path that is not UTF-8 was read with a replacement character.
            if path.to_string_lossy().contains(char::REPLACEMENT_CHARACTER) && !path.exists() {
                bail!(
                    "the header {} is not UTF-8; rename it, or include a link to it that is",
                    path.display()
                );
            }
        }
        Ok((read, warnings))
    }

    /// Whether the same command made the object from files that say what they say now.
    fn is_up_to_date(&self, key: &str, search: &Search, objects: &Objects) -> bool {
        let record = Record::of(&self.object).filter(|record| record.key == key);
        record.is_some_and(|record| {
            self.object.path.exists()
                && search.key(&record.inputs.files, objects).as_ref() == Some(&record.inputs.key)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Process;
    use crate::toolchain::Reuse;
    use std::path::Path;

    /// A compiler that runs `meanwhile` and then writes the object and its list of headers.
    fn job(folder: &Path, meanwhile: &str) -> Job {
        let (source, object) = (folder.join("a.cpp"), folder.join("a.o"));
        // The arguments after the script are `-MD -MF LIST -c SOURCE -o OBJECT`, or others that ask
        // what the compiler is.
        let script =
            format!("[ $0 = -MD ] || exit; echo \"$6: $4\" > \"$2\"; {meanwhile}; echo > \"$6\"");
        Job {
            language: Language::Cxx,
            program: "sh".into(),
            compiler: "sh".into(),
            arguments: vec!["-c".into(), script],
            roots: Vec::new(),
            built_for: "1".into(),
            first: Vec::new(),
            object: Object { path: object, source },
        }
    }

    fn scratch(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("tch-extension-build-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.cpp"), "").unwrap();
        // File systems round times, so wait until the next write gets a later one.
        std::thread::sleep(std::time::Duration::from_millis(30));
        folder
    }

    /// How many compilers run.
    fn runs(job: &Job) -> Result<bool> {
        struct Counter(AtomicUsize);
        impl Environment for Counter {
            fn runs(&self, _command: &str) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let counter = Counter(AtomicUsize::new(0));
        let objects = Objects::open(&Reuse::Folder, &counter);
        job.run(&objects, &counter)?;
        Ok(counter.0.load(Ordering::Relaxed) == 1)
    }

    #[test]
    fn compiles_again_only_what_changed() {
        let folder = scratch("again");
        let mut job = job(&folder, ":");
        assert!(runs(&job).unwrap(), "nothing is there yet");
        assert!(!runs(&job).unwrap());
        job.built_for = "2".into();
        assert!(runs(&job).unwrap(), "another libtorch");
        job.arguments[1] += "; true";
        assert!(runs(&job).unwrap(), "another flag");
        assert!(!runs(&job).unwrap());
        std::fs::write(folder.join("a.cpp"), "changed").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(runs(&job).unwrap(), "another text");
        std::fs::remove_file(&job.object.path).unwrap();
        assert!(runs(&job).unwrap(), "an object that is gone");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn names_are_read_as_make_writes_them() {
        let rule = "/o/a\\ b.o: \\\n csrc/a\\ b.cpp csrc/we\\#ird.h \\\n csrc/$$x.h\n";
        assert_eq!(
            prerequisites(rule),
            ["csrc/a b.cpp", "csrc/we#ird.h", "csrc/$x.h"].map(PathBuf::from)
        );
        assert!(prerequisites("").is_empty());
    }

    #[test]
    fn a_source_saved_while_the_compiler_runs_is_compiled_again() {
        let folder = scratch("saved");
        let saved = job(&folder, "sleep 0.05; echo changed > \"$4\"");
        assert!(runs(&saved).unwrap());
        assert_eq!(saved.object.dependencies(), [folder.join("a.cpp")]);
        assert!(runs(&saved).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_build_that_failed_or_was_killed_leaves_nothing_that_counts() {
        let folder = scratch("killed");
        assert!(runs(&job(&folder, ":")).unwrap());
        assert!(runs(&job(&folder, "kill -9 $$")).is_err());
        assert!(runs(&job(&folder, ":")).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_long_message_is_cut_and_a_known_one_explained() {
        let long = readable(&"error\n".repeat(1000), &Process);
        assert!(long.lines().count() < 100 && long.contains("and 940 more lines"), "{long}");
        let crowded = format!(
            "{}a.cpp: In function 'f':\na.cpp:9:9: error: no\n",
            "warning: unused\n".repeat(1000)
        );
        let crowded = readable(&crowded, &Process);
        assert!(crowded.starts_with("a.cpp: In function 'f':\na.cpp:9:9: error: no"), "{crowded}");
        let too_new = readable(
            "#error -- unsupported GNU version! gcc versions later than 15 are not supported!",
            &Process,
        );
        assert!(too_new.contains("set NVCC_CCBIN"), "{too_new}");
        assert_eq!(readable("a.cpp:1:2: error: no", &Process), "a.cpp:1:2: error: no");
        let header = "a.cpp:1:10: fatal error: src/softcap/kernels.rs.h: No such file or directory";
        let advice =
            "\nbuild.rs has no .params(\"src/softcap/kernels.rs\"), which makes this header";
        assert_eq!(readable(header, &Process), format!("{header}{advice}"));
    }
}
