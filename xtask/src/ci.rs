//! The checks that a change must pass, in order of cost. The first failure stops the run.

use crate::commands::Usage;
use crate::cuda::Cuda;
use crate::repo::{Repo, files_below};
use crate::report::{say, trouble};
use crate::runner::{self, Run};
use crate::setup::{self, Changes};
use crate::{cargo, crossing, headers, misuse, outside, versions, weak_symbols, wheel, wheels};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

struct Ci {
    repo: Repo,
    is_full: bool,
    installed: Installed,
}

/// What set-up installed, and the environment that it found.
#[derive(Default)]
struct Installed {
    changes: Changes,
    has_vision: bool,
    has_python: bool,
    has_cuda: bool,
    has_transformers: bool,
}

/// A step's name and what it does.
type Step = (&'static str, fn(&Ci) -> Result<()>);

/// The architectures to compile for when the user names none: the newest that kernels are written
/// for, and in a full run the oldest, too, and those of A100, RTX 4090, L4 and B200. Each one costs
/// minutes.
const ARCHS: &str = "TORCH_CUDA_ARCH_LIST";
const NEWEST: &str = "9.0a";
const MANY: &str = "7.5;8.0;8.9;9.0a;10.0";

/// Flags of nvcc where no GPU runs the kernels. It takes about half the time with them.
const NVCC_FLAGS: (&str, &str) = ("NVCC_APPEND_FLAGS", "-Xcicc -O1 -Xptxas -O1");

/// At -O0, llm's programs and what only they need compile in a fifth of the time, and its tests take no
/// longer. Everything else stays as other commands compile it.
const AT_0: [&str; 4] = ["llm", "tokenizers", "fancy-regex", "regex-automata"];

/// The package that is published first, because the other one needs it.
const BUILD_CRATE: &str = "tch-extension-build";
const LIBRARY: &str = "tch-extension";

const FULL: &str = "--full";
const TESTS: &str = "tests";
const OTHER_LIBTORCH: &str = "libtorch 2.13";

/// Steps that need no libtorch. They run while libtorch is downloaded, which leaves processors idle.
const BEFORE_LIBTORCH: &[Step] = &[
    ("format", Ci::format),
    ("clang-format", Ci::clang_format),
    ("headers", Ci::headers),
    ("clippy", Ci::clippy),
    ("documentation", Ci::documentation),
    ("package", Ci::package),
];

const STEPS: &[Step] = &[
    ("weak symbols", Ci::weak_symbols),
    ("misuse", Ci::misuse),
    (TESTS, Ci::tests),
    ("operators, each instruction set", Ci::operators_per_isa),
    ("wheel", Ci::wheel),
    ("stand-alone example", Ci::example),
    (outside::OPERATOR.file, Ci::page),
    (outside::PYTHON.file, Ci::python_page),
    (OTHER_LIBTORCH, Ci::other_libtorch),
];

/// Runs every step, or those whose name contains one of these words. A full run takes longer and is
/// for releases: `--full` is one of the words.
pub fn run(repo: Repo, words: &[String]) -> Result<ExitCode> {
    let (options, words): (Vec<&String>, Vec<&String>) =
        words.iter().partition(|word| word.starts_with("--"));
    if let Some(other) = options.iter().find(|option| **option != FULL) {
        return Err(Usage(format!("`ci` knows no `{other}`, only `{FULL}`")).into());
    }
    let is_full = !options.is_empty();
    let is_wanted =
        |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    let wanted = |steps: &'static [Step]| -> Vec<&Step> {
        steps.iter().filter(|(name, _)| is_wanted(name)).collect()
    };
    let (first, rest) = (wanted(BEFORE_LIBTORCH), wanted(STEPS));
    if first.is_empty() && rest.is_empty() {
        let names: Vec<&str> = BEFORE_LIBTORCH.iter().chain(STEPS).map(|(name, _)| *name).collect();
        bail!("no step's name contains {words:?}; there are: {}", names.join("; "));
    }
    wheels::TOOLS.ensure(&repo)?;
    let mut times = Vec::new();
    let installed = std::thread::scope(|scope| {
        let install = || install(&repo, is_full, &rest);
        let installed = (!rest.is_empty()).then(|| scope.spawn(install));
        let changes = environment(setup::without_libtorch(&repo)?, is_full);
        let none = Installed { changes, ..Default::default() };
        let outcome = Ci { repo: repo.clone(), is_full, installed: none }.run(&first, &mut times);
        let Some(installed) = installed else { return outcome.map(|()| None) };
        if !installed.is_finished() {
            say("note: still installing");
        }
        let start = Instant::now();
        let installed = installed.join().expect("set-up does not panic");
        times.push(("waiting for what is installed", start.elapsed()));
        outcome.and(installed.map(Some))
    })?;
    if let Some(installed) = installed {
        Ci { repo, is_full, installed }.run(&rest, &mut times)?;
    }
    say(table(&times, true));
    Ok(ExitCode::SUCCESS)
}

/// Installs what these steps need.
fn install(repo: &Repo, is_full: bool, steps: &[&Step]) -> Result<Installed> {
    let is_step = |name: &str| steps.iter().any(|(step, _)| *step == name);
    let ready = setup::run(repo)?;
    if is_step(OTHER_LIBTORCH) {
        // Here, so that a disk that is full fails the first step and not the last.
        wheels::LIBTORCH_2_13.ensure(repo)?;
    }
    Ok(Installed {
        has_vision: setup::vision(repo, &ready)?,
        has_python: setup::python(repo, &ready)?,
        has_transformers: is_step(TESTS) && setup::transformers(repo, &ready)?,
        has_cuda: matches!(ready.cuda, Cuda::On(_)),
        changes: environment(ready.changes, is_full),
    })
}

/// The environment of all steps, given what set-up changes.
fn environment(mut changes: Changes, is_full: bool) -> Changes {
    if std::env::var_os(ARCHS).is_none() {
        let archs = if is_full { MANY } else { NEWEST };
        changes.push((ARCHS.to_string(), Some(archs.into())));
    }
    if std::env::var_os(NVCC_FLAGS.0).is_none() && !setup::has_gpu() {
        changes.push((NVCC_FLAGS.0.to_string(), Some(NVCC_FLAGS.1.into())));
    }
    if is_full {
        changes.push((setup::FULL.to_string(), Some("1".into())));
    }
    changes.extend(setup::one_test_at_a_time());
    // Sources do not change during a run, so data for incremental builds would only fill the disk.
    changes.push(("CARGO_INCREMENTAL".to_string(), Some("0".into())));
    changes
}

fn at_0() -> [String; 4] {
    AT_0.map(|package| format!("--config=profile.dev.package.{package}.opt-level=0"))
}

impl Ci {
    /// Runs these steps, and adds the time of each. The first failure stops the run.
    fn run(&self, steps: &[&Step], times: &mut Vec<(&'static str, Duration)>) -> Result<()> {
        for (name, step) in steps {
            say(format_args!("\n== {name} =="));
            let start = Instant::now();
            let outcome = step(self);
            times.push((*name, start.elapsed()));
            if let Err(error) = outcome {
                say(table(times, false));
                return Err(error.context(format!("the step `{name}` failed")));
            }
        }
        Ok(())
    }

    fn changes(&self) -> &Changes {
        &self.installed.changes
    }

    fn cargo(&self, args: &[&str]) -> Command {
        let mut command = cargo::command(&self.repo, self.changes(), &[]);
        command.args(at_0()).args(args);
        command
    }

    fn format(&self) -> Result<()> {
        self.need_component("fmt", "rustfmt")?;
        cargo::run(&mut self.cargo(&["fmt", "--all", "--check"]))
    }

    fn clang_format(&self) -> Result<()> {
        let files = c_files(&self.repo.root);
        let program = self.repo.venv().join("tools/clang_format/data/bin/clang-format");
        let status = Command::new(&program)
            .args(["--dry-run", "-Werror"])
            .args(&files)
            .current_dir(&self.repo.root)
            .status()
            .with_context(|| format!("cannot run {}", program.display()))?;
        if !status.success() {
            bail!(
                "files differ from clang-format's result; `{} -i FILE` formats one",
                program.display()
            );
        }
        say(format_args!("{} files", files.len()));
        Ok(())
    }

    fn headers(&self) -> Result<()> {
        headers::check(&self.repo, self.changes())?;
        cargo::run(&mut self.cargo(&[
            "test",
            "--quiet",
            "--package",
            "tch-extension-build",
            "--features",
            "headers",
            "--lib",
            "headers",
        ]))
    }

    fn clippy(&self) -> Result<()> {
        self.need_component("clippy", "clippy")?;
        let mut command = self.cargo(&["clippy", "--all-targets"]);
        let everything = cargo::only_checks(command.args(cargo::EVERYTHING));
        cargo::run(everything.args(["--", "-D", "warnings"]))?;
        // The library as it is without CUDA, as docs.rs builds it, and with fewer features: each
        // takes seconds.
        let library = |args: &[&str]| {
            let mut command = self.cargo(&["clippy", "--lib", "-p", LIBRARY]);
            cargo::run(command.args(args).args(["--", "-D", "warnings"]))
        };
        library(&["--features", "doc-only"])?;
        for family in [
            "",
            "norm",
            "loss",
            "gemm",
            "mlp",
            "recurrent",
            "rope",
            "train",
            "distributed",
            "tvm_ffi",
            "open",
        ] {
            let features = format!("doc-only,{family}");
            library(&["--no-default-features", "--features", features.trim_end_matches(',')])?;
        }
        Ok(())
    }

    /// Builds what the tests run. Building the library alone would select other features of its
    /// dependencies and so compile it twice.
    fn build(&self) -> Result<Vec<Value>> {
        cargo::messages(self.cargo(&["test", "--no-run"]).args(cargo::EVERYTHING))
    }

    fn weak_symbols(&self) -> Result<()> {
        let messages = self.build()?;
        say(weak_symbols::check(&cargo::out_dir(&messages)?)?);
        if self.installed.has_cuda {
            let library = crossing::library(&messages).context("there is no kernel library")?;
            say(crossing::check(&self.repo.root, &library)?);
        }
        Ok(())
    }

    fn misuse(&self) -> Result<()> {
        misuse::check(&self.repo, &self.build()?)
    }

    fn tests(&self) -> Result<()> {
        // The tests of several processes start the launcher.
        cargo::run(self.cargo(&["build", "--bin", cargo::LAUNCHER]).args(cargo::EVERYTHING))?;
        let programs = runner::programs(&self.build()?);
        // The examples of the documentation begin first, because cargo has yet to compile them.
        let mut command = self.cargo(&["test", "--doc"]);
        command.args(cargo::EVERYTHING);
        let again = format!("cargo test {} --doc", cargo::EVERYTHING.join(" "));
        let mut runs = vec![Run { title: "documentation".to_string(), command, again }];
        runs.extend(programs.iter().map(|program| program.run(self.changes(), &cargo::EVERYTHING)));
        // In this run, what cannot be loaded or imported is a failure and not a reason to skip a
        // test: torchvision, torch by Python, and transformers for a test of examples/llm.
        for (required, name) in [
            (self.installed.has_vision, "TCH_EXTENSION_REQUIRE_TORCHVISION"),
            (self.installed.has_python, "TCH_EXTENSION_REQUIRE_PYTHON"),
            (self.installed.has_transformers, "TCH_EXTENSION_REQUIRE_TRANSFORMERS"),
        ] {
            if required {
                runs.iter_mut().for_each(|run| _ = run.command.env(name, "1"));
            }
        }
        Self::run_programs(runs, false)
    }

    /// Runs test programs. Each has its share of the cores for libtorch's threads, or all of them, and
    /// then threads wait for others that have no core. They sleep while they wait, where they would
    /// otherwise spin (docs/lab/methods.md, "Build times").
    fn run_programs(mut runs: Vec<Run>, with_all_threads: bool) -> Result<()> {
        let (at_once, changes) = runner::shares();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if with_all_threads { cores } else { cores / at_once };
        for run in &mut runs {
            run.command.env("OMP_WAIT_POLICY", "passive");
            run.command.env("OMP_NUM_THREADS", threads.to_string());
            run.command
                .envs(changes.iter().filter_map(|(name, value)| Some((name, value.as_ref()?))));
        }
        runner::run(runs, at_once, runner::LIMIT)
    }

    /// Tests the CPU kernels for the other instruction sets. The kernels are compiled once for each
    /// of three instruction sets, and at run time one of the three is chosen: by the processor, or
    /// by libtorch's variable `ATEN_CPU_CAPABILITY`. oneDNN, which libtorch calls, has a variable of its
    /// own: where only one is set, libtorch's attention of bf16 fails. The previous step ran the
    /// instruction set that the processor chose. Nobody can run those that it lacks.
    fn operators_per_isa(&self) -> Result<()> {
        let tests = operator_tests(&self.repo.root);
        let mut programs = runner::programs(&self.build()?);
        programs.retain(|program| tests.contains(&program.name));
        let mut runs = Vec::new();
        for program in &programs {
            for (capability, onednn) in others() {
                let mut run = program.run(self.changes(), &cargo::EVERYTHING);
                if !self.is_full {
                    // The tests of values and gradients. Others, and second derivatives, run no code
                    // that is compiled for each instruction set. A full run has them all.
                    let first =
                        program.first_with_tests(&["random_cases", "agree"], self.changes())?;
                    // Processors without AVX2 are rare.
                    let others: &[&str] =
                        if *capability == DEFAULT { &[] } else { &["agree", "gradcheck"] };
                    run.command.arg(first).args(others).args(["--skip", "second_derivatives"]);
                }
                let variables =
                    [("ATEN_CPU_CAPABILITY", capability), ("ONEDNN_MAX_CPU_ISA", onednn)];
                run.command.envs(variables);
                run.title += &format!(", {capability}");
                let variables = variables.map(|(name, value)| format!("{name}={value} "));
                run.again.insert_str(0, &variables.concat());
                runs.push(run);
            }
        }
        // The step before computed with fewer threads.
        Self::run_programs(runs, true)
    }

    /// Tests the parts that depend on libtorch's version most, and one family of operators, with
    /// the other libtorch that is supported. CUDA and the other families would take twice as long; a
    /// full run tests them, too, as `cargo xtask test --tch 0.26` does.
    fn other_libtorch(&self) -> Result<()> {
        if self.is_full {
            let mut command = versions::command(&self.repo, &[])?;
            command.env("CARGO_INCREMENTAL", "0").env("OMP_WAIT_POLICY", "passive");
            command.envs(self.changes().iter().filter_map(|(name, value)| {
                let is_set_here = [ARCHS, NVCC_FLAGS.0, setup::FULL].contains(&name.as_str());
                Some((name, value.as_ref()?)).filter(|_| is_set_here)
            }));
            return cargo::run(&mut command);
        }
        let tests = ["autograd", "library", "jit", "layer_norm"].map(String::from);
        let features = "tch-extension/jit,tch-extension/norm";
        let rest = ["-p", "tests", "--no-default-features", "--features", features, "--no-run"];
        // Nothing here is measured, and nothing that it compiles serves other steps.
        let unoptimised = ["torch-sys", "tch", LIBRARY]
            .map(|package| format!("--config=profile.dev.package.{package}.opt-level=0"));
        let args: Vec<String> =
            tests.into_iter().chain(rest.map(String::from)).chain(unoptimised).collect();
        let mut command = versions::command(&self.repo, &args)?;
        command.env("TCH_EXTENSION_CUDA", "0").env("CARGO_INCREMENTAL", "0");
        // The step before has tested the other instruction sets, and libtorch chooses this one.
        command.env(setup::ISAS, "native");
        let programs = runner::programs(&cargo::messages(&mut command)?);
        let runs = programs.iter().map(|program| {
            let mut run = program.run(&versions::variables(&self.repo), &[]);
            run.again = format!("cargo xtask test --tch 0.26 {}", program.name);
            // It is built without CUDA, also where there is a GPU.
            run.command.env_remove("TCH_EXTENSION_REQUIRE_CUDA");
            match program.name.as_str() {
                // What compiles against this libtorch. The cache and the messages know no version.
                "jit" => _ = run.command.args(["inline", "conversions"]),
                "library" => {
                    _ = run.command.args(["--skip", "a_handle_adds_at_most_a_microsecond"])
                }
                _ => {}
            }
            run
        });
        Self::run_programs(runs.collect(), false)
    }

    /// Builds and tests the wheel of tch-extension-python, with CUDA if the tests before have it:
    /// then everything is compiled already.
    fn wheel(&self) -> Result<()> {
        if !self.installed.has_python {
            say(
                "skipped: a wheel is built with this repository's own libtorch and its version of Python",
            );
            return Ok(());
        }
        let workspace = self.repo.clone();
        let wheel = wheel::build_and_test(
            &self.repo,
            workspace,
            self.changes().clone(),
            self.installed.has_cuda,
        )?;
        if self.changes().iter().any(|(name, _)| name == NVCC_FLAGS.0) {
            // Nobody shall publish kernels that were compiled with these flags.
            std::fs::remove_file(&wheel)
                .with_context(|| format!("cannot remove {}", wheel.display()))?;
        }
        Ok(())
    }

    fn example(&self) -> Result<()> {
        // Users compile the kernels or take those of the wheel. The pages compile them.
        let mut changes = self.changes().clone();
        if self.installed.has_python && self.installed.has_cuda {
            let kernels = wheel::kernels(&self.repo, self.changes().clone(), true)?;
            let kernels = kernels.map(PathBuf::into_os_string);
            changes.push((setup::KERNELS.to_string(), kernels));
        }
        outside::follow_example(&self.repo, &changes, self.is_full)
    }

    fn page(&self) -> Result<()> {
        outside::follow_page(&self.repo, self.changes(), &outside::OPERATOR, self.is_full)
    }

    fn python_page(&self) -> Result<()> {
        if !self.installed.has_python {
            say(
                "skipped: the libtorch in use does not belong to a torch that was set up for Python",
            );
            return Ok(());
        }
        outside::follow_page(&self.repo, self.changes(), &outside::PYTHON, self.is_full)
    }

    fn documentation(&self) -> Result<()> {
        let build = |args: &[&str]| {
            let mut command = self.cargo(&["doc", "--no-deps"]);
            command.args(args).env("RUSTDOCFLAGS", "-D warnings");
            command
        };
        cargo::run(cargo::only_checks(&mut build(&cargo::EVERYTHING)))?;
        // As docs.rs builds it, where there is no libtorch. The features are those of
        // `[package.metadata.docs.rs]` in the packages' manifests.
        let library = ["-p", LIBRARY, "--features", "doc-only,distributed,tvm_ffi"];
        for args in [&library[..], &["-p", BUILD_CRATE, "--all-features"]] {
            cargo::run(build(args).env("DOCS_RS", "1"))?;
        }
        Ok(())
    }

    /// Makes the packages that a release publishes, without compiling them. Cargo warns of each
    /// example that is not packed, which `--quiet` silences.
    fn package(&self) -> Result<()> {
        let crates = ["-p", BUILD_CRATE, "-p", LIBRARY, "-p", cargo::LAUNCHER];
        let args = ["package", "--quiet", "--no-verify", "--allow-dirty"];
        cargo::run(self.cargo(&args).args(crates))
    }

    fn need_component(&self, subcommand: &str, component: &str) -> Result<()> {
        let output = self.cargo(&[subcommand, "--version"]).output().context("cannot run cargo")?;
        if output.status.success() {
            return Ok(());
        }
        Err(trouble(
            format_args!("`cargo {subcommand}` is missing"),
            format_args!("rustup component add {component}"),
        ))
    }
}

/// The C++ and CUDA files that clang-format checks, relative to the root.
fn c_files(root: &Path) -> Vec<PathBuf> {
    let is_c = |file: &PathBuf| {
        file.extension().is_some_and(|end| ["h", "cpp", "cu", "cuh"].iter().any(|c| end == *c))
    };
    let folders = ["csrc", "tests", "examples", "benches", "xtask"].into_iter();
    folders.flat_map(|folder| files_below(root, folder)).filter(is_c).collect()
}

/// The operators' tests: the folders of `tests` that are named like a file in `src/ops`.
fn operator_tests(root: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(root.join("src/ops")).into_iter().flatten().flatten();
    let stems = entries.filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_string()));
    let mut tests: Vec<_> =
        stems.filter(|stem| root.join("tests").join(stem).join("main.rs").exists()).collect();
    tests.sort();
    tests.dedup();
    tests
}

/// The instruction set that every x86-64 processor has.
const DEFAULT: &str = "default";

/// The instruction sets that this processor has and libtorch does not choose on it, by libtorch's
/// name and oneDNN's.
fn others() -> &'static [(&'static str, &'static str)] {
    let has_avx512 = std::arch::is_x86_feature_detected!("avx512vl")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq");
    if has_avx512 { &[(DEFAULT, "SSE41"), ("avx2", "AVX2")] } else { &[(DEFAULT, "SSE41")] }
}

fn table(times: &[(&str, Duration)], passed: bool) -> String {
    let mut text = String::from("\n");
    for (index, (name, time)) in times.iter().enumerate() {
        let failed = !passed && index + 1 == times.len();
        let outcome = if failed { "FAILED" } else { "ok" };
        text += &format!("{name:<34}{:>8.1} s  {outcome}\n", time.as_secs_f64());
    }
    let total: Duration = times.iter().map(|(_, time)| *time).sum();
    text + &format!("{:<34}{:>8.1} s", "all", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_marks_the_step_that_failed() {
        let times = [("format", Duration::from_millis(500)), ("tests", Duration::from_secs(2))];
        let failed = table(&times, false);
        assert!(
            failed.contains("format")
                && failed.contains("0.5 s  ok")
                && failed.contains("2.0 s  FAILED")
        );
        assert!(!table(&times, true).contains("FAILED"));
    }

    #[test]
    fn the_folder_of_objects_is_the_librarys() {
        let script = |package: &str| {
            let id = format!("path+file:///a/tch-extension-build#{package}@0.1.0");
            serde_json::json!({
                "reason": "build-script-executed", "package_id": id, "out_dir": package
            })
        };
        let messages = ["torch-sys", "tch-extension", "tch-extension-python"].map(script);
        assert_eq!(cargo::out_dir(&messages).unwrap(), Path::new("tch-extension"));
        assert!(cargo::out_dir(&messages[..1]).is_err());
    }

    #[test]
    fn finds_c_files_and_operator_tests() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().to_path_buf();
        for file in [
            "csrc/a/cuda.cu",
            "csrc/a/notes.md",
            "examples/x/target/gen.h",
            "src/ops/mod.rs",
            "src/ops/a.rs",
            "tests/a/main.rs",
            "tests/b/main.rs",
        ] {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        assert_eq!(c_files(&root), [PathBuf::from("csrc/a/cuda.cu")]);
        assert_eq!(operator_tests(&root), ["a"]);
    }
}
