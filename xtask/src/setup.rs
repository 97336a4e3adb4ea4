//! Prepares what every command needs: a C++ compiler, a libtorch, and an nvcc that suits it.

use crate::compiler::{self, Compiler};
use crate::cuda::{Cuda, Search};
use crate::libtorch::{self, Libtorch, Rule};
use crate::pip;
use crate::programs;
use crate::repo::{Repo, is_ours};
use crate::report::{say, trouble};
use crate::wheels;
use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::Path;

/// Changes to cargo's environment: for each variable a value to set, or `None` to remove it.
pub type Changes = Vec<(String, Option<OsString>)>;

/// What set-up found and decided.
pub struct Ready {
    /// The libtorch in use.
    pub libtorch: Libtorch,
    /// Whether CUDA kernels are compiled.
    pub cuda: Cuda,
    /// The environment for the cargo processes that follow.
    pub changes: Changes,
}

/// Reads a variable of the real environment.
pub fn real_env(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// Checks what is installed and installs what is missing.
pub fn run(repo: &Repo) -> Result<Ready> {
    check_platform()?;
    let cxx = std::env::var("CXX").ok();
    let compiler = compiler::find(cxx.as_deref())?;
    let rule = libtorch::choose(&real_env, repo);
    if rule == Rule::Own {
        check_glibc()?;
        wheels::LIBTORCH.ensure(repo)?;
    }
    let libtorch = Libtorch::locate(rule, &real_env, repo)?;
    libtorch.check_version(&real_env)?;
    let search = Search::run(&libtorch, &real_env, repo);
    let changes = changes(repo, &compiler, &search);
    let cuda = search.decide(std::env::var(CUDA_SWITCH).ok().as_deref())?;
    if let Cuda::Off(reason) = &cuda {
        say(format_args!("note: CUDA kernels are left out: {reason}"));
    }
    Ok(Ready { libtorch, cuda, changes })
}

/// Installs torchvision, which the tests need in addition, and returns whether it is there. Only
/// this repository's own libtorch gets it, because only with that one is it known to fit.
pub fn vision(repo: &Repo, ready: &Ready) -> Result<bool> {
    if ready.libtorch.rule != Rule::Own {
        return Ok(false);
    }
    wheels::VISION.ensure(repo)?;
    Ok(true)
}

/// Installs what torch needs of Python, for tests that start Python, and returns whether they can.
/// Only this repository's own libtorch is known to be a torch, of one version of Python.
pub fn python(repo: &Repo, ready: &Ready) -> Result<bool> {
    if ready.libtorch.rule != Rule::Own {
        return Ok(false);
    }
    let found = pip::python()?;
    if !is_python(&found, pip::PYTHON_VERSION) {
        say(format_args!(
            "note: tests that start Python are skipped: the torch in .venv is for Python {}, and `python3` is {found}",
            pip::PYTHON_VERSION
        ));
        return Ok(false);
    }
    wheels::PYTHON.ensure(repo)?;
    Ok(true)
}

/// Whether a text such as `Python 3.11.7` is of this version.
fn is_python(text: &str, version: &str) -> bool {
    let found = text.strip_prefix("Python ").and_then(|text| text.strip_prefix(version));
    found.is_some_and(|rest| rest.starts_with('.'))
}

/// Installs transformers, which a test of examples/llm needs in addition, and returns whether it is
/// there. It uses the torch of this repository's own libtorch.
pub fn transformers(repo: &Repo, ready: &Ready) -> Result<bool> {
    if ready.libtorch.rule != Rule::Own {
        return Ok(false);
    }
    wheels::TRANSFORMERS.ensure(repo)?;
    Ok(true)
}

/// Returns an error on a platform for which there are neither wheels of libtorch nor our kernels.
pub fn check_platform() -> Result<()> {
    if cfg!(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")) {
        return Ok(());
    }
    bail!(trouble(
        format_args!(
            "tch-extension supports Linux with glibc on x86-64 only, and this is another platform"
        ),
        "use such a machine, or a container or virtual machine of that kind",
    ))
}

/// The oldest C library that the wheels run with.
const OLDEST_GLIBC: (u32, u32) = (2, 28);

/// Returns an error for a C library that is too old for libtorch's wheels. Without this check, they
/// would fail to load only long after the download.
pub fn check_glibc() -> Result<()> {
    let Some(text) = programs::first_line("getconf", &["GNU_LIBC_VERSION"]) else { return Ok(()) };
    match parse_glibc(&text) {
        Some(version) if version < OLDEST_GLIBC => Err(trouble(
            format_args!(
                "this system's {text} is older than {}.{}",
                OLDEST_GLIBC.0, OLDEST_GLIBC.1
            ),
            format_args!(
                "use a newer system or a container, or set LIBTORCH to a libtorch {} built for this one",
                libtorch::WANTED
            ),
        )),
        _ => Ok(()),
    }
}

/// Parses `glibc 2.36` into (2, 36).
fn parse_glibc(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_whitespace().last()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The variable that says whether CUDA kernels are compiled.
const CUDA_SWITCH: &str = "TCH_EXTENSION_CUDA";

/// The variable that says for which instruction sets CPU kernels are compiled.
pub const ISAS: &str = "TCH_EXTENSION_ISAS";

/// The variable that says how CUDA kernels are linked.
pub const KERNELS: &str = "TCH_EXTENSION_KERNELS";

/// The variable with which tests also run what takes long, such as inductor's compiler. `ci --full` and
/// `wheel` set it.
pub const FULL: &str = "TCH_EXTENSION_FULL";

/// The variable from which libtest takes its number of threads.
pub const TEST_THREADS: &str = "RUST_TEST_THREADS";

pub fn has_gpu() -> bool {
    // The driver's device is there also where nvidia-smi is not in PATH.
    Path::new("/dev/nvidia0").exists()
        || programs::stdout("nvidia-smi", &["-L"]).is_some_and(|list| list.starts_with("GPU"))
}

/// The environment for test programs: one test at a time on a machine with a GPU. The tests share
/// the GPU, and some change global switches of libtorch's, which hold for the whole process.
pub fn one_test_at_a_time() -> Changes {
    threads_of_tests(real_env(TEST_THREADS).is_some(), has_gpu)
}

/// The environment for the demo: how often OpenMP's threads look for work before they sleep, which
/// takes about a millisecond with this number. On an otherwise idle machine it is as fast as
/// libgomp's own number. With libgomp's number, however, a waiting thread occupies a processor for
/// up to 15 ms, even when other programs or other threads of the demo need it
/// (docs/lab/methods.md, "The demo on a busy machine").
pub fn short_waits() -> Changes {
    let are_chosen =
        ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"].iter().any(|name| real_env(name).is_some());
    waits(are_chosen)
}

/// The environment for the demo on a machine without a GPU: the CUDA kernels, which could not run
/// there, are not compiled. That is most of the time until the first program runs.
pub fn no_kernels_without_gpu() -> Changes {
    let are_chosen =
        [CUDA_SWITCH, "TORCH_CUDA_ARCH_LIST"].iter().any(|name| real_env(name).is_some());
    kernels(are_chosen, has_gpu)
}

/// The environment for the demo: its CPU kernels are compiled for this machine's instruction set only,
/// because the program runs here.
pub fn kernels_of_this_cpu() -> Changes {
    of_this_cpu(real_env(ISAS).is_some())
}

fn of_this_cpu(is_chosen: bool) -> Changes {
    if is_chosen { Changes::new() } else { vec![(ISAS.to_string(), Some("native".into()))] }
}

fn kernels(are_chosen: bool, has_gpu: impl FnOnce() -> bool) -> Changes {
    if are_chosen || has_gpu() {
        return Changes::new();
    }
    say(format_args!(
        "note: the CUDA kernels are not compiled for the demo, because there is no GPU; {CUDA_SWITCH}=1 compiles them"
    ));
    vec![(CUDA_SWITCH.to_string(), Some("0".into()))]
}

fn waits(are_chosen: bool) -> Changes {
    if are_chosen {
        Changes::new()
    } else {
        vec![("GOMP_SPINCOUNT".to_string(), Some("20000".into()))]
    }
}

fn threads_of_tests(are_chosen: bool, has_gpu: impl FnOnce() -> bool) -> Changes {
    if are_chosen || !has_gpu() {
        return Changes::new();
    }
    vec![(TEST_THREADS.to_string(), Some("1".into()))]
}

fn changes(repo: &Repo, compiler: &Compiler, search: &Search) -> Changes {
    let mut changes = own_spelling(repo);
    if search.own_passed_over {
        let home = search.found.as_ref().map(|nvcc| nvcc.home()).unwrap_or_default();
        changes.push(("CUDA_HOME".to_string(), Some(home.into())));
    }
    changes.extend(name_of(compiler));
    changes
}

/// The environment for commands that need no libtorch.
pub fn without_libtorch(repo: &Repo) -> Result<Changes> {
    let mut changes = own_spelling(repo);
    changes.extend(named_compiler()?);
    Ok(changes)
}

fn own_spelling(repo: &Repo) -> Changes {
    let mut changes = Changes::new();
    // Remove the values that cargo took from `.cargo/config.toml`, so that the next cargo sets them
    // again with the spelling of a plain `cargo build`. Another spelling of the same folder would
    // build torch-sys again, which takes minutes.
    for (variable, ours) in [("LIBTORCH", repo.libtorch()), ("CUDA_HOME", repo.cuda())] {
        if is_ours(real_env(variable).as_deref(), &ours) {
            changes.push((variable.to_string(), None));
        }
    }
    changes
}

/// The environment without which cc would look for a compiler of another name.
fn name_of(compiler: &Compiler) -> Option<(String, Option<OsString>)> {
    let name = || ("CXX".to_string(), Some(compiler.command.clone().into()));
    compiler.must_be_named.then(name)
}

/// The same, for commands that do without the rest of the set-up.
pub fn named_compiler() -> Result<Changes> {
    let cxx = std::env::var("CXX").ok();
    Ok(name_of(&compiler::find(cxx.as_deref())?).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_take_turns_on_a_gpu() {
        let one = vec![(TEST_THREADS.to_string(), Some("1".into()))];
        assert_eq!(threads_of_tests(false, || true), one);
        assert_eq!(threads_of_tests(true, || true), []);
        assert_eq!(threads_of_tests(false, || false), []);
    }

    #[test]
    fn the_demo_compiles_kernels_where_they_can_run_or_are_asked_for() {
        let off = vec![(CUDA_SWITCH.to_string(), Some("0".into()))];
        assert_eq!(kernels(false, || false), off);
        assert_eq!(kernels(false, || true), []);
        assert_eq!(kernels(true, || false), []);
    }

    #[test]
    fn the_demo_is_for_this_cpu_unless_its_user_chose() {
        assert_eq!(of_this_cpu(true), []);
        assert_eq!(of_this_cpu(false), vec![(ISAS.to_string(), Some("native".into()))]);
    }

    #[test]
    fn the_demo_waits_as_its_user_chose() {
        assert_eq!(waits(true), []);
        assert_eq!(waits(false), vec![("GOMP_SPINCOUNT".to_string(), Some("20000".into()))]);
    }

    #[test]
    fn tells_the_python_of_the_wheels_from_others() {
        assert!(is_python("Python 3.11.7", "3.11"));
        assert!(!is_python("Python 3.12.3", "3.11") && !is_python("Python 3.1.1", "3.11"));
    }

    #[test]
    fn reads_the_c_librarys_version() {
        assert_eq!(parse_glibc("glibc 2.36"), Some((2, 36)));
        assert!(parse_glibc("glibc 2.17").is_some_and(|version| version < OLDEST_GLIBC));
        assert_eq!(parse_glibc("musl"), None);
    }
}
