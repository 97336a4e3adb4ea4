//! `cargo xtask wheel`: tch-extension-python as a wheel that `pip install` takes, tested in an
//! environment that has nothing but torch.
//!
//! The wheel has one library, for every Python, and contains nothing of torch: the library finds
//! what `import torch` has loaded. The platform in the file's name is what auditwheel says.

use crate::cuda::Cuda;
use crate::libtorch::{Libtorch, Rule};
use crate::repo::{Repo, files_below};
use crate::report::{self, say};
use crate::setup::{self, Changes};
use crate::{
    cargo, compiler, crossing, glibc, old_systems, pip, place, programs, versions, wheels,
};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const PACKAGE: &str = "tch-extension-python";
/// What cargo calls its library.
const CRATE: &str = "tch_extension_python";
/// The library in the wheel.
const LIBRARY: &str = "libtch_extension_python.so";
/// The folder of the Python package, relative to the repository.
const PYTHON: &str = "tch-extension-python/python";
/// The programs that run after the wheel was installed: its test, and its benchmarks at tiny sizes.
const TESTS: [(&str, &[&str]); 3] = [
    ("tests/wheel.py", &[]),
    ("benches/lstm.py", &["--device", "cpu", "--rounds", "1", "--dtype", "float32"]),
    ("benches/gpt.py", &["--device", "cpu", "--rounds", "1", "--backend", "aot_eager"]),
];
/// The function that the library exports besides those of TVM FFI.
const EXPORTED: &str = "tch_extension_registration_error";
/// How the names of the latter begin.
const OPEN: &str = "__tvm_ffi_";

/// The libraries that every torch has loaded or can load.
const OF_TORCH: [&str; 9] = [
    "libc10.so",
    "libc10_cuda.so",
    "libcublas.so.*",
    "libcublasLt.so.*",
    "libcudart.so.*",
    "libgomp.so.1",
    "libtorch.so",
    "libtorch_cpu.so",
    "libtorch_cuda.so",
];

/// The libraries that every Linux system with glibc has.
const OF_THE_SYSTEM: [&str; 8] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
];

/// The largest wheels, in bytes, without and with CUDA.
const LARGEST: [u64; 2] = [5_000_000, 40_000_000];

/// Where and with what a wheel is built.
struct Build<'a> {
    repo: &'a Repo,
    /// The workspace in which cargo runs: the repository, or the one with another tch.
    workspace: Repo,
    changes: Changes,
    torch: Torch,
}

/// The torch that a wheel is for.
#[derive(Debug, PartialEq, Eq)]
struct Torch {
    /// Such as `2.11`.
    version: String,
    /// The version of CUDA if the wheel has kernels for it, such as `13.0`.
    cuda: Option<String>,
    /// The folder with the packages `torch` and `nvidia`.
    site: PathBuf,
}

/// Builds a wheel and tests it.
pub fn run(repo: &Repo, other_tch: Option<&str>) -> Result<ExitCode> {
    let ready = setup::run(repo)?;
    if !setup::python(repo, &ready)? {
        bail!(
            "a wheel is built with this repository's own libtorch, and tested with its Python; unset LIBTORCH and \
             LIBTORCH_USE_PYTORCH, and put a `python3` of version {} first in PATH",
            pip::PYTHON_VERSION
        );
    }
    let has_cuda = matches!(ready.cuda, Cuda::On(_));
    let (workspace, mut changes) = match other_tch {
        None => (repo.clone(), ready.changes),
        Some(version) => versions::workspace(repo, version)?,
    };
    // It may be published.
    changes.push((setup::FULL.to_string(), Some("1".into())));
    build_and_test(repo, workspace, changes, has_cuda)?;
    Ok(ExitCode::SUCCESS)
}

/// Builds a wheel in a workspace, which may be the repository itself, and tests it.
pub fn build_and_test(
    repo: &Repo,
    workspace: Repo,
    changes: Changes,
    has_cuda: bool,
) -> Result<PathBuf> {
    let build = Build::new(repo, workspace, changes, has_cuda)?;
    let (wheel, kernels) = build.wheel()?;
    build.test(&wheel, kernels.as_deref())?;
    let size = std::fs::metadata(&wheel)?.len();
    report::print(&format!("{} ({:.1} MB)\n", wheel.display(), size as f64 / 1e6));
    Ok(wheel)
}

/// The kernel library that the wheel of this repository's libtorch has. `None` without CUDA.
pub fn kernels(repo: &Repo, changes: Changes, has_cuda: bool) -> Result<Option<PathBuf>> {
    let build = Build::new(repo, repo.clone(), changes, has_cuda)?;
    // Not the wheel's package, which this would compile for other flags of the linker.
    let library = ["build", "-p", "tests", "--lib", "--features", cargo::ALL_FEATURES];
    let crates = cargo::messages(&mut cargo::command(&build.workspace, &build.changes, &library))?;
    build.kernels(&crates, &OldSystems::prepare(repo, &build.workspace)?)
}

impl Torch {
    fn of(libtorch: &Libtorch, has_cuda: bool) -> Result<Torch> {
        let root = libtorch.lib.parent().and_then(|root| root.canonicalize().ok());
        let root = root.with_context(|| format!("{} is no torch", libtorch.lib.display()))?;
        let file = root.join("version.py");
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let site = root.parent().context("a torch without a folder")?.to_path_buf();
        Torch::parse(&text, has_cuda, site).with_context(|| format!("in {}", file.display()))
    }

    /// Reads the lines `__version__ = '2.11.0+cu130'` and `cuda: Optional[str] = '13.0'`.
    fn parse(text: &str, has_cuda: bool, site: PathBuf) -> Result<Torch> {
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once('=')?.1.trim().trim_matches('\'').to_string())
        };
        let version = value("__version__").context("no version")?;
        let parts: Vec<&str> = version.split(['.', '+']).collect();
        let [major, minor, ..] = parts[..] else { bail!("`{version}` is no version") };
        let cuda = value("cuda").filter(|cuda| has_cuda && cuda != "None");
        Ok(Torch { version: format!("{major}.{minor}"), cuda, site })
    }

    /// The part of the wheel's version that says which torch it is for: `torch2.11.cu130`.
    fn label(&self) -> String {
        let cuda = self.cuda.as_ref().map(|cuda| format!("cu{}", cuda.replace('.', "")));
        format!("torch{}.{}", self.version, cuda.as_deref().unwrap_or("cpu"))
    }
}

impl<'a> Build<'a> {
    fn new(repo: &'a Repo, workspace: Repo, changes: Changes, has_cuda: bool) -> Result<Self> {
        let libtorch = Libtorch::locate(Rule::Own, &|_| None, &workspace)?;
        let torch = Torch::of(&libtorch, has_cuda)?;
        Ok(Build { repo, workspace, changes, torch })
    }

    /// Builds, packs and checks the wheel, and returns where it is, and the name of its kernel library.
    fn wheel(&self) -> Result<(PathBuf, Option<String>)> {
        wheels::WHEEL_TOOLS.ensure(self.repo)?;
        // What the library consists of, before it is linked once more as the wheel has it.
        let crates = cargo::messages(self.cargo("build").arg("--lib"))?;
        let old = OldSystems::prepare(self.repo, &self.workspace)?;
        let scratch = tempfile::tempdir().context("cannot make a folder for the wheel")?;
        let kernels = self.kernels(&crates, &old)?;
        let library = self.library(&crates, &old)?;
        check_needs(&library, kernels.as_deref())?;
        check_exports(&library)?;
        let content = scratch.path().join("content");
        self.stage(&library, kernels.as_deref(), &crates, &content)?;
        let packed = self.pack(&content, scratch.path())?;
        let folder = self.repo.root.join("target/wheels");
        let wheel = self.retag(&packed, &scratch.path().join("tagged"), &folder)?;
        let (size, largest) =
            (std::fs::metadata(&wheel)?.len(), LARGEST[usize::from(self.torch.cuda.is_some())]);
        if size > largest {
            bail!("{} has {size} bytes, and should have {largest} at most", wheel.display());
        }
        Ok((wheel, kernels.as_deref().map(name_of)))
    }

    /// Builds the library. Its objects are those of all other builds; only the link differs.
    fn library(&self, crates: &[Value], old: &OldSystems) -> Result<PathBuf> {
        let mut link = vec!["strip=symbols".to_string()];
        link.extend(old.arguments().into_iter().map(|argument| format!("link-arg={argument}")));
        // Functions in C of other crates stay inside.
        link.push(format!("link-arg=-Wl,--exclude-libs={}", other_crates(crates).join(":")));
        let mut command = self.cargo("rustc");
        command.args(["--lib", "--crate-type", "cdylib", cargo::AS_JSON, "--"]);
        command.args(link.iter().flat_map(|option| ["-C", option]));
        let messages = cargo::output_messages(&mut command)?;
        messages.iter().find_map(cdylib).context("cargo built no library")
    }

    /// Links the kernel library once more, for the same systems. `None` without CUDA.
    fn kernels(&self, crates: &[Value], old: &OldSystems) -> Result<Option<PathBuf>> {
        let Some(built) = crossing::library(crates) else {
            return match self.torch.cuda {
                None => Ok(None),
                Some(_) => bail!("the build has linked no kernel library"),
            };
        };
        let place = built.with_file_name(place::LINK);
        let link = std::fs::read_to_string(&place)
            .with_context(|| format!("cannot read {}", place.display()))?;
        // A folder of its own: whoever links the library would find the libraries without code, too.
        let folder = old.folder.join("kernels");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let library = folder.join(built.file_name().context("a library without a name")?);
        let (program, words) = compiler::split(&old.cxx);
        let mut command = Command::new(program);
        command.args(words).args(link.lines()).args(old.arguments()).arg("-Wl,--strip-all");
        let output = command.arg("-o").arg(&library).output().context("cannot run the compiler")?;
        if !output.status.success() {
            bail!("the kernels do not link:\n{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        say(crossing::check(&self.repo.root, &library)?);
        check_needs(&library, None)?;
        Ok(Some(library))
    }

    /// A cargo command with the library's package. Its dependencies are those that all builds have: the
    /// linker leaves out what the wheel does not use.
    fn cargo(&self, subcommand: &str) -> Command {
        let package = [subcommand, "-p", PACKAGE, "--features", cargo::ALL_FEATURES];
        cargo::command(&self.workspace, &self.changes, &package)
    }

    /// Lays out what the wheel contains.
    fn stage(
        &self,
        library: &Path,
        kernels: Option<&Path>,
        crates: &[Value],
        content: &Path,
    ) -> Result<()> {
        let python = self.repo.root.join(PYTHON);
        for file in files_below(&python, "") {
            if file.components().all(|part| part.as_os_str() != "__pycache__") {
                copy(&python.join(&file), &content.join(&file))?;
            }
        }
        let package = content.join("tch_extension");
        copy(library, &package.join(LIBRARY))?;
        if let Some(kernels) = kernels {
            copy(kernels, &package.join(name_of(kernels)))?;
        }
        write(&package.join("_build.py"), &self.facts(kernels))?;
        let info = content.join(format!("tch_extension-{}.dist-info", self.version()));
        write(&info.join("METADATA"), &self.metadata()?)?;
        write(
            &info.join("WHEEL"),
            "Wheel-Version: 1.0\nGenerator: tch-extension\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n",
        )?;
        for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
            copy(&self.repo.root.join(license), &info.join("licenses").join(license))?;
        }
        for folder in self.folders_of_crates(crates)? {
            let name = folder.file_name().context("a crate without a folder")?;
            for file in licenses_in(&folder) {
                copy(&folder.join(&file), &info.join("licenses/crates").join(name).join(file))?;
            }
        }
        Ok(())
    }

    /// The folders, such as `adler2-2.0.0`, of the crates whose code is in the library.
    fn folders_of_crates(&self, crates: &[Value]) -> Result<Vec<PathBuf>> {
        let mut command = self.cargo("tree");
        command.args(["--edges", "normal", "--prefix", "none"]);
        let output = command.output().context("cannot run cargo; is it in PATH?")?;
        if !output.status.success() {
            bail!("cargo tree failed: {}", programs::last_line(&output.stderr));
        }
        let linked = linked_crates(&String::from_utf8_lossy(&output.stdout));
        let manifests = crates.iter().filter_map(|message| message["manifest_path"].as_str());
        let folders = manifests.filter_map(|path| Some(Path::new(path).parent()?.to_path_buf()));
        let is_linked = |folder: &PathBuf| {
            folder.file_name().is_some_and(|name| linked.contains(&*name.to_string_lossy()))
        };
        let mut found: Vec<PathBuf> = folders.filter(is_linked).collect();
        found.sort();
        found.dedup();
        Ok(found)
    }

    fn version(&self) -> String {
        // xtask has the workspace's version, as all packages.
        format!("{}+{}", env!("CARGO_PKG_VERSION"), self.torch.label())
    }

    fn facts(&self, kernels: Option<&Path>) -> String {
        let cuda = self.torch.cuda.as_ref().map_or("None".to_string(), |cuda| format!("{cuda:?}"));
        format!(
            "\"\"\"What this package was built for.\"\"\"\n\nVERSION = {:?}\nTORCH = {:?}\nCUDA = {cuda}\nKERNELS = {}\n",
            self.version(),
            self.torch.version,
            kernels.map_or("None".to_string(), |kernels| format!("{:?}", name_of(kernels)))
        )
    }

    fn metadata(&self) -> Result<String> {
        let readme = self.repo.root.join(PACKAGE).join("README.md");
        let readme = std::fs::read_to_string(&readme)
            .with_context(|| format!("cannot read {}", readme.display()))?;
        Ok(format!(
            "Metadata-Version: 2.4\n\
             Name: tch-extension\n\
             Version: {}\n\
             Summary: Fused operators and layers for PyTorch, written in Rust, C++ and CUDA\n\
             Project-URL: Source, {}\n\
             License-Expression: {}\n\
             License-File: LICENSE-APACHE\n\
             License-File: LICENSE-MIT\n\
             Classifier: Operating System :: POSIX :: Linux\n\
             Classifier: Programming Language :: Rust\n\
             Classifier: Typing :: Typed\n\
             Requires-Python: >=3.10\n\
             Requires-Dist: torch=={}.*\n\
             Description-Content-Type: text/markdown\n\n{readme}",
            self.version(),
            env!("CARGO_PKG_REPOSITORY"),
            env!("CARGO_PKG_LICENSE"),
            self.torch.version,
        ))
    }

    /// Makes a wheel of the folder, with the file RECORD.
    fn pack(&self, content: &Path, folder: &Path) -> Result<PathBuf> {
        let arguments = ["pack", &content.to_string_lossy(), "-d", &folder.to_string_lossy()];
        self.tool("wheel", &arguments)?;
        only_wheel(folder)
    }

    /// Gives the wheel the platform that auditwheel finds, and moves it to the folder of wheels.
    fn retag(&self, packed: &Path, scratch: &Path, folder: &Path) -> Result<PathBuf> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let (packed, out) = (packed.to_string_lossy(), scratch.to_string_lossy());
        // Nothing in the library has to be patched.
        let mut arguments = vec!["repair", "--patcher", "none", "--plat", "auto", "-w", &out];
        // The kernels are in the wheel.
        let kernels = format!("{}*.so", place::LIBRARY_PREFIX);
        let others = OF_TORCH.iter().copied().chain([kernels.as_str()]);
        arguments.extend(others.flat_map(|library| ["--exclude", library]));
        arguments.push(&packed);
        self.tool("auditwheel", &arguments)?;
        let tagged = only_wheel(scratch)?;
        let place = folder.join(tagged.file_name().context("a wheel without a name")?);
        std::fs::copy(&tagged, &place)
            .with_context(|| format!("cannot write {}", place.display()))?;
        let (major, minor) = (glibc::OLDEST[0], glibc::OLDEST[1]);
        if !place.to_string_lossy().contains(&format!("manylinux_{major}_{minor}_x86_64")) {
            let path = place.to_string_lossy();
            let why = self.tool("auditwheel", &["show", &path])?;
            say(format_args!(
                "note: this wheel needs a newer system than glibc {major}.{minor}:\n{why}"
            ));
        }
        Ok(place)
    }

    /// Runs one of the tools for wheels.
    fn tool(&self, name: &str, arguments: &[&str]) -> Result<String> {
        let mut command = programs::command("python3", &["-m", name]);
        command.args(arguments).env("PYTHONPATH", self.repo.venv().join("wheel-tools"));
        let output = command.output().context("cannot run python3")?;
        let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        if !output.status.success() {
            bail!("{name} {} failed:\n{}", arguments[0], text.trim());
        }
        Ok(text.trim().to_string())
    }

    /// Installs the wheel into an environment that has only torch, and runs the test there.
    fn test(&self, wheel: &Path, kernels: Option<&str>) -> Result<()> {
        let scratch = tempfile::tempdir().context("cannot make a folder for the test")?;
        let environment = scratch.path().join("environment");
        let python = environment.join("bin/python");
        let made = programs::command("python3", &["-m", "venv", "--without-pip"])
            .arg(&environment)
            .status()
            .context("cannot run python3")?;
        if !made.success() {
            bail!(
                "`python3 -m venv` failed; Debian and Ubuntu have it in the package python3-venv"
            );
        }
        let site = programs::first_line(
            &python,
            &["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        );
        let site = PathBuf::from(site.context("the new environment's python does not run")?);
        // torch has gigabytes, so it is not copied: Python also looks for packages where this says.
        let places = [self.repo.venv().join("python"), self.torch.site.clone()];
        let places: Vec<String> =
            places.iter().map(|place| place.to_string_lossy().into_owned()).collect();
        write(&site.join("torch.pth"), &(places.join("\n") + "\n"))?;
        let pip = pip::Pip::find_or_make(&self.repo.venv().join("pip"))?;
        let installed = programs::command(&pip.python, &["-m", "pip", "install", "--quiet"])
            .args(["--no-deps", "--no-index", "--no-compile", "--target"])
            .args([&site, wheel])
            .env("PIP_USER", "0")
            .env("PIP_REQUIRE_VIRTUALENV", "0")
            .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
            .status()?;
        if !installed.success() {
            bail!("pip cannot install {}", wheel.display());
        }
        if let Some(name) = kernels {
            let printed = programs::first_line(&python, &["-m", "tch_extension", "kernels"]);
            let expected = site.join("tch_extension").join(name);
            if printed.as_deref().map(Path::new) != Some(&expected) || !expected.exists() {
                bail!(
                    "`python3 -m tch_extension kernels` printed {printed:?} and not {}",
                    expected.display()
                );
            }
        }
        for (script, arguments) in TESTS {
            let mut command = programs::command(&python, &["-W", "ignore"]);
            command
                .arg(self.repo.root.join(PACKAGE).join(script))
                .args(arguments)
                // Not inside the repository, where Python would find its sources.
                .current_dir(scratch.path())
                .env("OUT", scratch.path())
                .envs(self.changes.iter().filter_map(|(name, value)| {
                    Some((name, value.as_ref()?)).filter(|_| name == setup::FULL)
                }))
                .env("PYTHONNOUSERSITE", "1")
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env("TORCHINDUCTOR_CACHE_DIR", scratch.path().join("inductor"))
                .env_remove("PYTHONPATH")
                .env_remove("LD_LIBRARY_PATH");
            let status = command.status().context("cannot run the test")?;
            if !status.success() {
                bail!("{PACKAGE}/{script} failed ({status})");
            }
        }
        Ok(())
    }
}

/// The files of all crates that cargo built for the library, except for our own.
fn other_crates(crates: &[Value]) -> Vec<&str> {
    let files = crates.iter().filter_map(|message| message["filenames"].as_array()).flatten();
    let names = files.filter_map(|file| Path::new(file.as_str()?).file_name()?.to_str());
    names.filter(|name| name.ends_with(".rlib") && !name.starts_with("libtch_extension")).collect()
}

/// The names and versions in the output of `cargo tree`, such as `adler2-2.0.0`.
fn linked_crates(tree: &str) -> BTreeSet<String> {
    let crates = tree.lines().filter(|line| !line.contains("(proc-macro)"));
    let names = crates.filter_map(|line| {
        let mut words = line.split(' ');
        Some(format!("{}-{}", words.next()?, words.next()?.strip_prefix('v')?))
    });
    names.collect()
}

/// The files of a crate that say what its users must be told, also those of C libraries in it.
fn licenses_in(folder: &Path) -> Vec<PathBuf> {
    let is_license = |file: &PathBuf| {
        let depth = file.components().count();
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        let words = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];
        depth <= 2 && words.iter().any(|word| name.starts_with(word))
    };
    files_below(folder, "").into_iter().filter(is_license).collect()
}

/// The library in one of cargo's messages.
fn cdylib(message: &Value) -> Option<PathBuf> {
    if message["target"]["name"] != CRATE {
        return None;
    }
    let files = message["filenames"].as_array()?.iter().filter_map(Value::as_str);
    files.map(PathBuf::from).find(|file| file.extension().is_some_and(|end| end == "so"))
}

/// How libraries are linked for systems with an older glibc and an older libstdc++.
struct OldSystems {
    cxx: String,
    folder: PathBuf,
}

impl OldSystems {
    fn prepare(repo: &Repo, workspace: &Repo) -> Result<Self> {
        let cxx = compiler::find(std::env::var("CXX").ok().as_deref())?.command;
        let folder = workspace.root.join("target/wheel");
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        glibc::write_stubs(&cxx, &folder)?;
        let old = OldSystems { cxx, folder };
        old_systems::compile(&old.cxx, &repo.root, &old.object())?;
        Ok(old)
    }

    fn object(&self) -> PathBuf {
        self.folder.join("old_systems.o")
    }

    /// The arguments for a linker that the compiler calls.
    fn arguments(&self) -> [String; 3] {
        let object = self.object().display().to_string();
        // What the stubs lack must be a message of the linker's, and not one when it is loaded.
        [format!("-L{}", self.folder.display()), object, "-Wl,-z,defs".to_string()]
    }
}

fn name_of(library: &Path) -> String {
    library.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Refuses a library that needs what neither torch nor the wheel has, or says where libraries of this
/// machine are.
fn check_needs(library: &Path, kernels: Option<&Path>) -> Result<()> {
    let dynamic = read_by("readelf", &["--dynamic", "--wide"], library)?;
    match problem_of_needs(&dynamic, kernels.map(name_of).as_deref()) {
        Some(problem) => bail!("{}: {problem}", library.display()),
        None => Ok(()),
    }
}

/// Refuses a library that exports more than its functions.
fn check_exports(library: &Path) -> Result<()> {
    let exported = read_by("nm", &["--dynamic", "--defined-only", "--format=posix"], library)?;
    let names: Vec<&str> =
        exported.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let (open, others): (Vec<&str>, Vec<&str>) =
        names.iter().copied().partition(|name| name.starts_with(OPEN));
    if open.is_empty() || others != [EXPORTED] {
        bail!(
            "{} must export {EXPORTED}, {OPEN}… and nothing else, and it exports {}",
            library.display(),
            names.join(", ")
        );
    }
    Ok(())
}

/// What one of binutils' programs prints about a library.
fn read_by(program: &str, arguments: &[&str], library: &Path) -> Result<String> {
    let path = library.to_string_lossy();
    let arguments: Vec<&str> = arguments.iter().copied().chain([&*path]).collect();
    programs::stdout(program, &arguments)
        .with_context(|| format!("{program}, which comes with binutils, cannot read {path}"))
}

/// What is wrong in readelf's listing of what a library needs, which may be these kernels.
fn problem_of_needs(dynamic: &str, kernels: Option<&str>) -> Option<String> {
    let is_known = |library: &str| {
        OF_THE_SYSTEM.contains(&library)
            || kernels == Some(library)
            || OF_TORCH.iter().any(|known| match known.strip_suffix('*') {
                Some(begin) => library.starts_with(begin),
                None => library == *known,
            })
    };
    let value = |line: &str| Some(line.split_once('[')?.1.split_once(']')?.0.to_string());
    dynamic.lines().find_map(|line| match line {
        line if line.contains("(RPATH)") || line.contains("(RUNPATH)") => {
            let folders = value(line)?;
            (!folders.split(':').all(is_in_wheel)).then(|| format!("it has the path {folders}"))
        }
        line if line.contains("(NEEDED)") => {
            let library = value(line)?;
            (!is_known(&library)).then(|| format!("it needs {library}, which torch does not bring"))
        }
        _ => None,
    })
}

/// Whether a library of the wheel may look for others in this folder: its own, that of the CUDA runtime
/// beside it, or that of the kernels in the target folder, where the library was built.
fn is_in_wheel(folder: &str) -> bool {
    let between = |start: &str, end: &str| folder.strip_prefix(start)?.strip_suffix(end);
    let is_cuda = |version: &str| version.parse::<u32>().is_ok();
    folder == "$ORIGIN"
        || between("$ORIGIN/../nvidia/cu", "/lib").is_some_and(is_cuda)
        || ["$ORIGIN/build/", "$ORIGIN/../build/"]
            .iter()
            .any(|start| between(start, "/out/kernels").is_some_and(|script| !script.contains('/')))
}

fn only_wheel(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .flatten();
    let mut wheels = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "whl"));
    match (wheels.next(), wheels.next()) {
        (Some(wheel), None) => Ok(wheel),
        _ => bail!("there is not exactly one wheel in {}", folder.display()),
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    std::fs::create_dir_all(path.parent().context("a file without a folder")?)
        .with_context(cannot)?;
    std::fs::write(path, text).with_context(cannot)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to.parent().context("a file without a folder")?)
        .and_then(|()| std::fs::copy(from, to))
        .map(|_| ())
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_says_which_torch_it_is_for() {
        let text = "from typing import Optional\n\n__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n";
        let label =
            |text: &str, has_cuda| Torch::parse(text, has_cuda, PathBuf::new()).unwrap().label();
        assert_eq!(label(text, true), "torch2.11.cu130");
        assert_eq!(label(text, false), "torch2.11.cpu");
        let no_cuda = text.replace("'13.0'", "None");
        assert_eq!(label(&no_cuda, true), "torch2.11.cpu");
        assert!(Torch::parse("", true, PathBuf::new()).is_err());
    }

    #[test]
    fn the_crates_in_the_library_have_their_licenses() {
        let tree = "tch-extension-python v0.1.0 (/repo/tch-extension-python)\ntch v0.24.0\nthiserror-impl v2.0.1 (proc-macro)\nhalf v2.7.1 (*)\n";
        let found: Vec<String> = linked_crates(tree).into_iter().collect();
        assert_eq!(found, ["half-2.7.1", "tch-0.24.0", "tch-extension-python-0.1.0"]);
        let scratch = tempfile::tempdir().unwrap();
        for file in ["LICENSE-MIT", "zlib/COPYING", "src/lib.rs", "a/b/LICENSE"] {
            write(&scratch.path().join(file), "").unwrap();
        }
        let found = licenses_in(scratch.path());
        assert_eq!(found, [PathBuf::from("LICENSE-MIT"), PathBuf::from("zlib/COPYING")]);
    }

    #[test]
    fn what_torch_does_not_bring_is_refused() {
        let kernels = "libtch_extension_kernels-01.so";
        let needs = |library: &str| {
            problem_of_needs(
                &format!(" 0x0001 (NEEDED)  Shared library: [{library}]\n"),
                Some(kernels),
            )
        };
        for library in ["libtorch_cpu.so", "libcudart.so.13", "libm.so.6", kernels] {
            assert_eq!(needs(library), None);
        }
        assert!(needs("libpython3.11.so.1.0").unwrap().contains("libpython3.11.so.1.0"));
        assert!(needs("libtch_extension_kernels-02.so").is_some());
        let path = |path: &str| {
            problem_of_needs(
                &format!(" 0x001d (RUNPATH)  Library runpath: [{path}]\n"),
                Some(kernels),
            )
        };
        assert_eq!(path("$ORIGIN:$ORIGIN/../nvidia/cu13/lib"), None);
        assert_eq!(path("$ORIGIN:$ORIGIN/build/tch-extension-01/out/kernels"), None);
        assert_eq!(path("$ORIGIN/../build/tch-extension-01/out/kernels"), None);
        for folder in [
            "/home/me",
            "$ORIGIN/..",
            "$ORIGIN/../nvidia/cu/lib",
            "$ORIGIN/../nvidia/cu13/../../lib",
            "$ORIGIN/build/../../../out/kernels",
            "",
        ] {
            assert!(path(&format!("$ORIGIN:{folder}")).unwrap().ends_with(folder), "{folder}");
        }
    }
}
