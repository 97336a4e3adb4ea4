//! Runs the compilers: several at a time, and only for sources that changed.

use crate::arch::flags_of;
use crate::environment::Environment;
use crate::fewer;
use crate::toolchain::{Cuda, Options, Toolchain, text_of};
use anyhow::{Context, Result, bail};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

/// One source and everything that decides how it is compiled.
pub struct Unit<'a> {
    pub toolchain: &'a Toolchain,
    pub source: &'a Path,
    pub options: &'a Options,
    pub folder: PathBuf,
}

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
    program: PathBuf,
    arguments: Vec<String>,
    /// The compilers and libtorch that are used: [`Toolchain::identity`].
    built_for: String,
    /// An additional argument for a first attempt. It is not part of the command that decides
    /// whether the object is up to date.
    first: Option<String>,
    pub object: Object,
}

impl Unit<'_> {
    /// The job that compiles the source with the C++ compiler: for one CPU instruction set, or for
    /// none in particular.
    pub fn with_cxx(&self, isa: Option<(&str, &str)>) -> Result<Job> {
        let options = self.options;
        let command = self.toolchain.cxx.command();
        let mut arguments: Vec<String> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        arguments.extend(
            ["-O3", "-fPIC"].iter().chain(self.toolchain.cxx.openmp()).map(|flag| flag.to_string()),
        );
        let warnings: &[&str] = if options.warnings { &["-Wall", "-Wextra"] } else { &["-w"] };
        arguments.extend(warnings.iter().map(|flag| flag.to_string()));
        if !options.export_symbols {
            arguments
                .extend(["-fvisibility=hidden", "-fvisibility-inlines-hidden"].map(String::from));
        }
        if let Some((isa, flags)) = isa {
            arguments.push(format!("-DCPU_CAPABILITY={isa}"));
            arguments.push(format!("-DCPU_CAPABILITY_{isa}"));
            arguments.extend(flags.split_whitespace().map(String::from));
        }
        self.add_common(&mut arguments);
        if let Some(cuda) = &self.toolchain.cuda {
            add_system_include(&mut arguments, &cuda.nvcc.home().join("include"));
        }
        arguments.extend(options.cxx_flags.iter().cloned());
        self.job(command.get_program().into(), arguments)
    }

    /// The job that compiles the source with nvcc. Each source is compiled alone: two in one call
    /// would turn on relocatable device code, which prevents inlining between files.
    pub fn with_nvcc(&self, cuda: &Cuda, env: &dyn Environment) -> Result<Job> {
        let options = self.options;
        // Compression makes the kernels a seventh of the size; every program that links them
        // contains them.
        let mut arguments: Vec<String> =
            ["-O3", "-lineinfo", "--compress-mode=size", "--expt-relaxed-constexpr", "-Xcompiler"]
                .map(String::from)
                .to_vec();
        arguments
            .push(if options.warnings { "-fPIC,-Wall,-Wextra" } else { "-fPIC,-w" }.to_string());
        if !options.warnings {
            arguments.push("-w".to_string());
        }
        if !options.export_symbols {
            arguments.extend(["-Xcompiler", "-fvisibility=hidden"].map(String::from));
        }
        // As in PyTorch, a flag that names an architecture replaces the whole list.
        if !options.nvcc_flags.iter().any(|flag| flag.contains("arch") || flag.contains("-gencode"))
        {
            let is_named = options.for_hopper.iter().any(|end| self.source.ends_with(end));
            let for_hopper = is_named || is_for_hopper(self.source);
            arguments.extend(flags_of(&cuda.archs, for_hopper));
        }
        if text_of(self.source).is_ok_and(|text| is_written_for_torch(&text)) {
            arguments.extend(WITHOUT_HALF_OPERATORS.map(|name| format!("-D{name}")));
        }
        self.add_common(&mut arguments);
        if let Some(host) = env.var("NVCC_CCBIN") {
            arguments.push(format!("-ccbin={host}"));
        } else if env.var("CXX").is_some() {
            arguments.push(format!("-ccbin={}", self.toolchain.cxx.path.display()));
        }
        // nvcc reads these variables itself. They are added here to the text that decides whether
        // the object is up to date.
        let read_by_nvcc = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"].map(|name| env.var(name));
        arguments.extend(options.nvcc_flags.iter().cloned());
        let mut job = self.job(cuda.nvcc.path.clone(), arguments)?;
        job.built_for += &format!("\n{read_by_nvcc:?}");
        Ok(job)
    }

    /// Adds the arguments that are the same for both compilers.
    fn add_common(&self, arguments: &mut Vec<String>) {
        let options = self.options;
        let libtorch = &self.toolchain.libtorch;
        arguments.push(format!("-std={}", options.standard));
        arguments.push(format!("-D_GLIBCXX_USE_CXX11_ABI={}", libtorch.cxx11_abi));
        // libtorch itself is built with NDEBUG. Without it, the inline functions of libtorch's
        // headers contain assertions, and the program's copies of these functions replace those in
        // libtorch.
        arguments.push("-DNDEBUG".to_string());
        if self.toolchain.cuda.is_some() {
            arguments.push("-DTCH_EXTENSION_CUDA=1".to_string());
        }
        arguments.extend(options.defines.iter().map(|(name, value)| match value {
            Some(value) => format!("-D{name}={value}"),
            None => format!("-D{name}"),
        }));
        let own = options.includes_for.iter().filter(|(path, _)| self.source.starts_with(path));
        let includes = own.map(|(_, folder)| folder).chain(&options.includes);
        arguments.extend(includes.map(|folder| format!("-I{}", folder.display())));
        for folder in &libtorch.includes {
            add_system_include(arguments, folder);
        }
    }

    fn job(&self, program: PathBuf, mut arguments: Vec<String>) -> Result<Job> {
        std::fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot create {}", self.folder.display()))?;
        let path = self.folder.join(object_name(self.source));
        arguments.extend(["-MMD", "-MF"].map(String::from));
        arguments.push(path.with_extension("d").display().to_string());
        arguments.extend(["-c".to_string(), self.source.display().to_string(), "-o".to_string()]);
        arguments.push(path.display().to_string());
        let object = Object { path, source: self.source.to_path_buf() };
        let first = if self.options.fewer_headers {
            fewer::macro_for(&text_of(self.source)?)
        } else {
            None
        };
        let built_for = self.toolchain.identity();
        Ok(Job {
            program,
            arguments,
            built_for,
            first: first.map(|name| format!("-D{name}")),
            object,
        })
    }
}

/// Whether one of the words of a source's name is `hopper`. Underscores separate the words.
fn is_for_hopper(source: &Path) -> bool {
    let name = source.file_stem().unwrap_or_default().to_string_lossy();
    name.split('_').any(|word| word == "hopper")
}

/// The macros that `torch.utils.cpp_extension` defines for every CUDA source. Without them, CUDA's
/// operators for the half kinds would make those of `at::Half` ambiguous.
const WITHOUT_HALF_OPERATORS: [&str; 4] = [
    "__CUDA_NO_HALF_OPERATORS__",
    "__CUDA_NO_HALF_CONVERSIONS__",
    "__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "__CUDA_NO_HALF2_OPERATORS__",
];

/// Whether a CUDA source uses the half types of libtorch's headers. Kernels that include
/// `tch_extension/launch.h` compute in CUDA's own types.
fn is_written_for_torch(text: &str) -> bool {
    let includes = |folder: &str| {
        text.contains(&format!("<{folder}/")) || text.contains(&format!("\"{folder}/"))
    };
    ["torch", "ATen", "THC"].iter().any(|folder| includes(folder)) && !includes("tch_extension")
}

/// Adds a folder of system headers, in which compilers report no warnings.
fn add_system_include(arguments: &mut Vec<String>, folder: &Path) {
    arguments.extend(["-isystem".to_string(), folder.display().to_string()]);
}

/// The name of a source's object. An archive keeps only file names, and every operator has a
/// `cpu.cpp`, so the name contains a hash of the whole path. It may differ between Rust releases,
/// which costs one build.
fn object_name(source: &Path) -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    source.hash(&mut hasher);
    let stem = source.file_name().unwrap_or_default().to_string_lossy();
    format!("{stem}-{:016x}.o", hasher.finish())
}

/// Runs all jobs, at most `workers` at a time, and returns the first failure.
pub fn run(jobs: &[Job], workers: usize, env: &dyn Environment) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = job.run(env) {
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
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    env.runs(&words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "));
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{failed}: cannot run {name}"))?;
    if !output.status.success() {
        let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        bail!("{failed}; {name} ({}) says:\n{}", output.status, readable(&text, env));
    }
    Ok(output)
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
    } else if text.contains("Python.h: No such file") {
        message +=
            "\nlibtorch is used without Python here: include <torch/torch.h> or <ATen/ATen.h>";
    }
    message
}

impl Object {
    /// The source and the headers that it includes, from the compiler's own list (in make's
    /// syntax). Headers of libtorch and of the system are not listed.
    pub fn dependencies(&self) -> Vec<PathBuf> {
        let Ok(rule) = std::fs::read(self.path.with_extension("d")) else { return Vec::new() };
        prerequisites(&String::from_utf8_lossy(&rule))
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
    fn run(&self, env: &dyn Environment) -> Result<()> {
        if !self.is_up_to_date() {
            self.compile(env)?;
        }
        for path in self.object.dependencies() {
            // A path that is not UTF-8 was read with a replacement character.
            if path.to_string_lossy().contains(char::REPLACEMENT_CHARACTER) && !path.exists() {
                bail!(
                    "the header {} is not UTF-8; rename it, or include a link to it that is",
                    path.display()
                );
            }
            env.reads(&path);
        }
        Ok(())
    }

    fn compile(&self, env: &dyn Environment) -> Result<()> {
        let stamp = self.command_file();
        // Without a stamp, the next build compiles this source again, also when this build is
        // killed.
        let _ = std::fs::remove_file(&stamp);
        let started = SystemTime::now();
        let failed = format!("{} does not compile", self.object.source.display());
        let run = |first: &[String]| {
            run_compiler(
                Command::new(&self.program).args(first).args(&self.arguments),
                &failed,
                env,
            )
        };
        let output = match self.first.as_ref().map(|first| run(std::slice::from_ref(first))) {
            Some(Ok(output)) => output,
            Some(Err(_)) | None => run(&[])?,
        };
        for line in
            String::from_utf8_lossy(&output.stderr).lines().filter(|line| line.contains("warning"))
        {
            env.warns(line);
        }
        // The stamp's time is the start of the compilation, so that a file saved while the compiler
        // ran counts as newer.
        std::fs::write(&stamp, self.command())
            .and_then(|()| std::fs::File::options().write(true).open(&stamp)?.set_modified(started))
            .with_context(|| format!("cannot write {}", stamp.display()))
    }

    /// Whether the same command made the object and no file that it read is newer.
    fn is_up_to_date(&self) -> bool {
        let modified =
            |path: &Path| -> Option<SystemTime> { path.metadata().ok()?.modified().ok() };
        let Some(made) = modified(&self.command_file()).filter(|_| self.object.path.exists())
        else {
            return false;
        };
        let dependencies = self.object.dependencies();
        std::fs::read_to_string(self.command_file()).is_ok_and(|command| command == self.command())
            && !dependencies.is_empty()
            && dependencies.iter().all(|path| modified(path).is_some_and(|time| time < made))
    }

    fn command(&self) -> String {
        format!("{} {}\n{}", self.program.display(), self.arguments.join(" "), self.built_for)
    }

    fn command_file(&self) -> PathBuf {
        self.object.path.with_extension("command")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Process;

    /// A compiler that runs `meanwhile` and then writes the object and its dependency list.
    fn job(folder: &Path, meanwhile: &str) -> Job {
        let (source, object) = (folder.join("a.cpp"), folder.join("a.o"));
        let script = format!(
            "echo '{object}: {source}' > '{depfile}'; {meanwhile}; echo > '{object}'",
            object = object.display(),
            source = source.display(),
            depfile = object.with_extension("d").display(),
        );
        Job {
            program: "sh".into(),
            arguments: vec!["-c".into(), script],
            built_for: "1".into(),
            first: None,
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
        std::thread::sleep(std::time::Duration::from_millis(20));
        folder
    }

    #[test]
    fn compiles_again_only_what_changed() {
        let folder = scratch("again");
        let mut job = job(&folder, ":");
        assert!(!job.is_up_to_date(), "nothing is there yet");
        job.compile(&Process).unwrap();
        assert!(job.is_up_to_date());
        job.built_for = "2".into();
        assert!(!job.is_up_to_date(), "another libtorch");
        job.built_for = "1".into();
        job.arguments.push("-DX".into());
        assert!(!job.is_up_to_date(), "another flag");
        job.arguments.pop();
        std::fs::remove_file(folder.join("a.cpp")).unwrap();
        assert!(!job.is_up_to_date(), "a header that is gone");
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
        let job = job(
            &folder,
            &format!("sleep 0.05; echo changed > '{}'", folder.join("a.cpp").display()),
        );
        job.compile(&Process).unwrap();
        assert!(!job.is_up_to_date());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_build_that_failed_or_was_killed_leaves_nothing_that_counts() {
        let folder = scratch("killed");
        job(&folder, ":").compile(&Process).unwrap();
        assert!(job(&folder, "kill -9 $$").compile(&Process).is_err());
        assert!(!job(&folder, ":").is_up_to_date());
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
    }

    #[test]
    fn dependencies_have_the_names_that_the_files_have() {
        let folder = scratch("escaped");
        let path = folder.join("a.o");
        std::fs::write(path.with_extension("d"), "a.o: /x\\ y/a.cpp \\\n /x\\#y/b.h /x$$y/c.h\n")
            .unwrap();
        let object = Object { path, source: "/x y/a.cpp".into() };
        assert_eq!(
            object.dependencies(),
            ["/x y/a.cpp", "/x#y/b.h", "/x$y/c.h"].map(PathBuf::from)
        );
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn sources_of_torch_s_kinds_are_told_from_others() {
        for text in
            ["#include <torch/extension.h>", "#include \"ATen/ATen.h\"", "#include <THC/THC.h>"]
        {
            assert!(is_written_for_torch(text), "{text}");
            let mixed = format!("{text}\n#include <tch_extension/launch.h>\n");
            assert!(!is_written_for_torch(&mixed), "{mixed}");
        }
        assert!(!is_written_for_torch("#include <cuda_fp16.h>\n// torch/extension.h"));
    }

    #[test]
    fn the_word_hopper_in_a_name_asks_for_9_0a() {
        let is = |path: &str| is_for_hopper(Path::new(path));
        for path in ["hopper.cu", "csrc/a/hopper_forward.cu", "a_hopper.cu", "a/a_hopper_b.cu"] {
            assert!(is(path), "{path}");
        }
        for path in ["hopper/a.cu", "csrc/a/cuda.cu", "grasshopper.cu", "a_hoppers.cu", "Hopper.cu"]
        {
            assert!(!is(path), "{path}");
        }
    }

    #[test]
    fn objects_of_different_sources_have_different_names() {
        let names = ["csrc/a/b_c.cpp", "csrc/a_b/c.cpp", "csrc/a/c.cpp"]
            .map(|path| object_name(Path::new(path)));
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2], "{names:?}");
    }
}
