//! Runs the compilers: several at once, and only for what changed.

use crate::arch::Arch;
use crate::env_var;
use crate::libtorch::Libtorch;
use crate::probe::Nvcc;
use anyhow::{Context, Result, bail};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

/// One source on its way to an object.
pub struct Unit<'a> {
    pub source: &'a Path,
    pub includes: &'a [PathBuf],
    pub folder: PathBuf,
}

/// One run of a compiler.
pub struct Job {
    program: PathBuf,
    arguments: Vec<String>,
    /// Which libtorch and CUDA. Their headers are no dependencies of the object; there are thousands.
    built_for: String,
    source: PathBuf,
    pub object: PathBuf,
}

impl Unit<'_> {
    /// With the C++ compiler, for one instruction set or for none in particular.
    pub fn with_cxx(
        &self,
        libtorch: &Libtorch,
        nvcc: Option<&Nvcc>,
        isa: Option<(&str, &[&str])>,
    ) -> Result<Job> {
        // Optimised and without cargo's profile: at -O0 an AVX-512 unit exports inline functions full of AVX-512
        // code, which the linker may then use everywhere.
        let mut arguments: Vec<String> = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-Wall", "-Wextra"]
            .into_iter()
            .chain(["-fvisibility=hidden", "-fvisibility-inlines-hidden"])
            .map(String::from)
            .collect();
        arguments.push(format!("-D_GLIBCXX_USE_CXX11_ABI={}", libtorch.cxx11_abi));
        if nvcc.is_some() {
            arguments.push("-DTCH_EXTENSION_CUDA=1".to_string());
        }
        if let Some((isa, flags)) = isa {
            arguments.push(format!("-DCPU_CAPABILITY={isa}"));
            arguments.push(format!("-DCPU_CAPABILITY_{isa}"));
            arguments.extend(flags.iter().map(|flag| flag.to_string()));
        }
        arguments.extend(self.includes.iter().map(|folder| format!("-I{}", folder.display())));
        let system = nvcc.map(|nvcc| nvcc.home().join("include"));
        for folder in libtorch.includes.iter().chain(&system) {
            // As system headers: their warnings are not ours.
            arguments.extend(["-isystem".to_string(), folder.display().to_string()]);
        }
        let command = cxx_command();
        let mut all: Vec<String> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        all.extend(arguments);
        self.job(command.get_program().into(), all, libtorch.identity(nvcc))
    }

    /// With nvcc. Each source alone: two in one call would turn on relocatable device code, which stops
    /// inlining between files.
    pub fn with_nvcc(&self, nvcc: &Nvcc, libtorch: &Libtorch, archs: &[Arch]) -> Result<Job> {
        let mut arguments: Vec<String> = [
            "-O3",
            "-std=c++17",
            "-lineinfo",
            // A seventh of the size: every program that links the kernels carries them.
            "--compress-mode=size",
            "--expt-relaxed-constexpr",
            "-Xcompiler",
            "-fPIC,-Wall,-Wextra",
        ]
        .into_iter()
        .chain(["-Xcompiler", "-fvisibility=hidden", "-DTCH_EXTENSION_CUDA=1"])
        .map(String::from)
        .collect();
        arguments.extend(archs.iter().flat_map(Arch::flags));
        arguments.extend(self.includes.iter().map(|folder| format!("-I{}", folder.display())));
        for folder in &libtorch.includes {
            arguments.extend(["-isystem".to_string(), folder.display().to_string()]);
        }
        if let Some(host) = env_var("NVCC_CCBIN") {
            arguments.push(format!("-ccbin={host}"));
        } else if env_var("CXX").is_some() {
            arguments.push(format!("-ccbin={}", cxx_compiler().display()));
        }
        self.job(nvcc.path.clone(), arguments, libtorch.identity(Some(nvcc)))
    }

    fn job(&self, program: PathBuf, mut arguments: Vec<String>, built_for: String) -> Result<Job> {
        std::fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot create {}", self.folder.display()))?;
        let object = self.folder.join(object_name(self.source));
        arguments.extend(["-MMD", "-MF"].map(String::from));
        arguments.push(object.with_extension("d").display().to_string());
        arguments.extend(["-c".to_string(), self.source.display().to_string(), "-o".to_string()]);
        arguments.push(object.display().to_string());
        Ok(Job { program, arguments, built_for, source: self.source.to_path_buf(), object })
    }
}

/// An archive keeps names only, and every operator has a `cpu.cpp`: the folders go into the name, as a hash.
fn object_name(source: &Path) -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    source.hash(&mut hasher);
    let stem = source.file_name().unwrap_or_default().to_string_lossy();
    format!("{stem}-{:016x}.o", hasher.finish())
}

/// What cc makes of CXX (a wrapper such as ccache and flags included) and CXXFLAGS, in cargo's spellings, too.
fn cxx_command() -> Command {
    // Our own flags follow, and win.
    cc::Build::new().cpp(true).warnings(false).opt_level(3).debug(false).get_compiler().to_command()
}

/// The compiler itself, without a wrapper: what nvcc takes for its host compiler.
fn cxx_compiler() -> PathBuf {
    cc::Build::new().cpp(true).get_compiler().path().to_path_buf()
}

/// Runs all jobs, as many at a time as cargo allows; the first failure is the error.
pub fn run(jobs: &[Job]) -> Result<()> {
    let workers = env_var("NUM_JOBS")
        .and_then(|count| count.parse().ok())
        .unwrap_or(1_usize)
        .clamp(1, jobs.len().max(1));
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = job.run() {
                        failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
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

impl Job {
    fn run(&self) -> Result<()> {
        if !self.is_up_to_date() {
            self.compile()?;
        }
        for path in self.dependencies() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        Ok(())
    }

    fn compile(&self) -> Result<()> {
        let stamp = self.command_file();
        // A build that is killed leaves no stamp, and compiles again.
        let _ = std::fs::remove_file(&stamp);
        let started = SystemTime::now();
        let name = self.program.display();
        let output = Command::new(&self.program).args(&self.arguments).output();
        let output = output.with_context(|| {
            format!("cannot run {name}: a C++17 compiler is needed (Debian: apt install g++; or set CXX)")
        })?;
        let messages = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            bail!(
                "{name} failed on {}:\n{}{}",
                self.source.display(),
                stdout.trim_end(),
                messages.trim_end()
            );
        }
        for line in messages.lines().filter(|line| line.contains("warning")) {
            println!("cargo::warning={line}");
        }
        // The stamp bears the time of the start: a file that was saved while the compiler ran is newer.
        std::fs::write(&stamp, self.command())
            .and_then(|()| std::fs::File::options().write(true).open(&stamp)?.set_modified(started))
            .with_context(|| format!("cannot write {}", stamp.display()))
    }

    /// The same command made the object, and no file it read is newer.
    fn is_up_to_date(&self) -> bool {
        let modified = |path: &Path| -> Option<SystemTime> { path.metadata().ok()?.modified().ok() };
        let Some(made) = modified(&self.command_file()).filter(|_| self.object.exists()) else {
            return false;
        };
        let dependencies = self.dependencies();
        std::fs::read_to_string(self.command_file()).is_ok_and(|command| command == self.command())
            && !dependencies.is_empty()
            && dependencies.iter().all(|path| modified(path).is_some_and(|time| time < made))
    }

    /// The source and the headers it includes, from the compiler's own list (in make's syntax).
    fn dependencies(&self) -> Vec<PathBuf> {
        let Ok(text) = std::fs::read_to_string(self.object.with_extension("d")) else { return Vec::new() };
        let Some((_, list)) = text.split_once(": ") else { return Vec::new() };
        let list = list.replace("\\\n", " ").replace("\\ ", "\0");
        list.split_whitespace().map(|path| PathBuf::from(path.replace('\0', " "))).collect()
    }

    fn command(&self) -> String {
        format!("{} {}\n{}", self.program.display(), self.arguments.join(" "), self.built_for)
    }

    fn command_file(&self) -> PathBuf {
        self.object.with_extension("command")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A compiler that writes object and dependency list, after `meanwhile`.
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
            source,
            object,
        }
    }

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("tch-extension-build-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.cpp"), "").unwrap();
        // File systems count time in steps.
        std::thread::sleep(std::time::Duration::from_millis(20));
        folder
    }

    #[test]
    fn compiles_again_only_what_changed() {
        let folder = scratch("again");
        let mut job = job(&folder, ":");
        assert!(!job.is_up_to_date(), "nothing is there yet");
        job.compile().unwrap();
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
    fn a_source_saved_while_the_compiler_runs_is_compiled_again() {
        let folder = scratch("saved");
        let job = job(&folder, &format!("sleep 0.05; echo changed > '{}'", folder.join("a.cpp").display()));
        job.compile().unwrap();
        assert!(!job.is_up_to_date());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_build_that_failed_or_was_killed_leaves_nothing_that_counts() {
        let folder = scratch("killed");
        job(&folder, ":").compile().unwrap();
        assert!(job(&folder, "kill -9 $$").compile().is_err());
        assert!(!job(&folder, ":").is_up_to_date());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn objects_of_different_sources_have_different_names() {
        let names =
            ["csrc/a/b_c.cpp", "csrc/a_b/c.cpp", "csrc/a/c.cpp"].map(|path| object_name(Path::new(path)));
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2], "{names:?}");
    }
}
