//! The table of commands. They have two options in all, and most pass their arguments on as they
//! are, so a parser of command lines would only be compiled before the first command can run.

use crate::ahead::Ahead;
use crate::cuda::Cuda;
use crate::repo::Repo;
use crate::setup::Changes;
use crate::{bundle, cache, cargo, ci, doctor, headers, plot, report, setup, versions, wheel};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

/// The error for a command line that xtask does not understand.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; `cargo xtask help` lists what there is", self.0)
    }
}

impl std::error::Error for Usage {}

const HELP: &str = "\
cargo xtask COMMAND [ARGUMENTS]

  demo [ARGUMENTS]   train the character-level language model (examples/char_lltm); --op all compares; --op lstm, gru
  test [--tch 0.26] [NAME...] [ARGUMENTS]
                     the workspace's tests, or those of operators (`test lstm gru`), one at a time where there is a GPU;
                     arguments go to `cargo test`. Those of examples/llm, which has dependencies of its own, are
                     `cargo test -p llm`.
                     With --tch 0.26, on that tch and libtorch 2.13, which it installs next to the others
  bench [WORD...]    each operator against its rivals, as a table and in target/bench.json; criterion's statistics:
                     `cargo bench --profile dev`
  tune [SEED] [OPERATOR...] [240s]
                     measures on this GPU what each way costs, in 300 s, and writes the table by which operators choose
  plot FILE...       bench.json, and the rivals.json next to it, as pictures in docs/plots
  ci [--full] [STEP...]
                     what a change must pass: formats, lints, documentation, packages, weak symbols, tests, a stand-alone
                     crate, some tests with libtorch 2.13, which it installs; or those of its steps whose names contain a word.
                     With --full also what a release must pass
  headers            write the C++ declarations of the structs that Rust and the kernels share (csrc/*/params.h)
  python             write the Python package's functions, from the operators' definitions
  ways               write docs/ways.md, which way computes which size, from the plans
  doctor             what was found, what does not fit, and the exact fix; installs nothing
  cache [--clear]    the C++ and CUDA objects that this user's builds share: how many, how large; or an end to them
  bundle [--no-bench] [--archive]
                     dist/: test, bench and example programs with a run.sh, for a machine without Rust; with --archive also
                     dist.tar.xz, which has all of it
  wheel [--tch 0.26] the Python package in tch-extension-python as a wheel in target/wheels, installed and tested in an empty
                     environment. TCH_EXTENSION_CUDA=0 leaves CUDA out
  setup              only what the others do first: fetch libtorch and nvcc into .venv, unless they are there
  help               this text

Which libtorch: LIBTORCH_USE_PYTORCH=1 takes the Python's, LIBTORCH=/path yours; else .venv has our own.
CUDA kernels are compiled when libtorch has CUDA and there is an nvcc; TCH_EXTENSION_CUDA=0|1 decides otherwise.
";

/// Runs one command, after set-up where the command needs it.
pub fn run(name: Option<&str>, args: &[String]) -> Result<ExitCode> {
    match name {
        Some("demo") => demo(own_args(args)),
        Some("test") => match args {
            [flag, version, args @ ..] if flag == "--tch" => {
                versions::test(&Repo::find()?, version, args)
            }
            [flag] if flag == "--tch" => {
                Err(Usage(format!("--tch wants {}", versions::KNOWN)).into())
            }
            args => test(args),
        },
        Some("bench") => bench(&[], args),
        Some("tune") => bench(&["tune"], args),
        Some("plot") => plots(args),
        Some("ci") => ci::run(Repo::find()?, args),
        Some("headers") => no_args("headers", args).and_then(|()| {
            headers::write(&Repo::find()?, &Changes::new()).map(|()| ExitCode::SUCCESS)
        }),
        Some("python") => no_args("python", args).and_then(|()| write("python")),
        Some("ways") => no_args("ways", args).and_then(|()| write("ways")),
        Some("cache") => cache::run(args),
        Some("doctor") => no_args("doctor", args).and_then(|()| doctor::run(&Repo::find()?)),
        Some("bundle") => bundle::run(&Repo::find()?, bundle_options(args)?),
        Some("wheel") => match args {
            [] => wheel::run(&Repo::find()?, None),
            [flag, version] if flag == "--tch" => wheel::run(&Repo::find()?, Some(version)),
            _ => Err(Usage("`wheel` takes nothing, or `--tch 0.26`".to_string()).into()),
        },
        Some("setup") => no_args("setup", args).and_then(|()| only_setup(&Repo::find()?)),
        None | Some("help" | "--help" | "-h") => {
            report::print(HELP);
            Ok(ExitCode::SUCCESS)
        }
        Some(other) => Err(Usage(format!("there is no command `{other}`")).into()),
    }
}

/// Runs the benchmarks, or what is one of them.
fn bench(first: &[&str], args: &[String]) -> Result<ExitCode> {
    let ops = ["--profile", "dev", "--bench", "ops", "--", "table"];
    let bench = [&["bench"], &cargo::ALL_BUT_LLM[..], &ops, first].concat();
    start(&bench, own_args(args))
}

fn demo(args: &[String]) -> Result<ExitCode> {
    let repo = Repo::find()?;
    let ahead = Ahead::of_build(&repo, &["--package", cargo::DEMO]);
    let mut ready = setup::run(&repo)?;
    ahead.wait();
    ready.changes.extend(setup::short_waits());
    ready.changes.extend(setup::kernels_of_this_cpu());
    if matches!(ready.cuda, Cuda::On(_)) {
        ready.changes.extend(setup::no_kernels_without_gpu());
    }
    // If an option is given twice, the program takes the last one.
    let mut all = ["--out", "runs/char_lltm"].map(String::from).to_vec();
    all.extend_from_slice(args);
    let started = SystemTime::now();
    let mut command =
        cargo::command(&repo, &ready.changes, &["run", "--package", cargo::DEMO, "--"]);
    let status = command.args(&all).status().context("cannot run cargo; is it in PATH?")?;
    let folder = repo.root.join(last_out(&all));
    let (table, picture) = (folder.join("loss.csv"), folder.join("loss.svg"));
    // `--help` writes nothing.
    let written = table.metadata().and_then(|table| table.modified());
    if status.success() && written.is_ok_and(|written| written >= started) {
        plot::losses(&table, &picture)?;
        report::say(format_args!("drawn: {}", picture.display()));
    }
    Ok(ExitCode::from(status.code().and_then(|code| code.try_into().ok()).unwrap_or(1)))
}

/// The value of the last `--out`.
fn last_out(args: &[String]) -> &str {
    let mut out = "";
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match arg.strip_prefix("--out") {
            Some("") => out = rest.next().map_or(out, String::as_str),
            Some(value) => out = value.strip_prefix('=').unwrap_or(out),
            None => {}
        }
    }
    out
}

/// Runs set-up and then replaces this process by cargo.
fn start(cargo_args: &[&str], args: &[String]) -> Result<ExitCode> {
    let repo = Repo::find()?;
    let ready = setup::run(&repo)?;
    let mut command = cargo::command(&repo, &ready.changes, cargo_args);
    command.args(args);
    Err(cargo::become_command(command))
}

/// Runs the test that compares a file with what it is generated from, and lets it write the file.
fn write(command: &str) -> Result<ExitCode> {
    let repo = Repo::find()?;
    let mut ready = setup::run(&repo)?;
    ready
        .changes
        .push((format!("TCH_EXTENSION_WRITE_{}", command.to_uppercase()), Some("1".into())));
    let module = format!("ops::{command}");
    let test = ["test", "--quiet", "--package", "tch-extension", "--lib", &module];
    Err(cargo::become_command(cargo::command(&repo, &ready.changes, &test)))
}

fn plots(args: &[String]) -> Result<ExitCode> {
    if args.is_empty() {
        return Err(Usage("plot needs a file, such as target/bench.json".to_string()).into());
    }
    let files: Vec<PathBuf> = args.iter().map(PathBuf::from).collect();
    for path in plot::run(&files, &Repo::find()?.root.join("docs/plots"))? {
        report::say(format_args!("{}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn test(args: &[String]) -> Result<ExitCode> {
    let repo = Repo::find()?;
    let mut ready = setup::run(&repo)?;
    ready.changes.extend(setup::one_test_at_a_time());
    setup::vision(&repo, &ready)?;
    setup::python(&repo, &ready)?;
    Err(cargo::become_command(cargo::test(&repo, &ready.changes, args)))
}

fn only_setup(repo: &Repo) -> Result<ExitCode> {
    let ready = setup::run(repo)?;
    report::print(&doctor::summary(&ready));
    Ok(ExitCode::SUCCESS)
}

/// Drops a leading `--`, which many people write out of habit: the commands that call this insert
/// one themselves.
fn own_args(args: &[String]) -> &[String] {
    match args {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    }
}

fn no_args(name: &str, args: &[String]) -> Result<()> {
    match args.first() {
        Some(arg) => Err(Usage(format!("`{name}` takes no arguments, and got `{arg}`")).into()),
        None => Ok(()),
    }
}

fn bundle_options(args: &[String]) -> Result<bundle::Options> {
    let mut options = bundle::Options { benches: true, archive: false };
    for arg in args {
        match arg.as_str() {
            "--no-bench" => options.benches = false,
            "--archive" => options.archive = true,
            other => {
                let known = "only `--no-bench` and `--archive`";
                return Err(Usage(format!("`bundle` knows no `{other}`, {known}")).into());
            }
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(args: &[&str]) -> Vec<String> {
        args.iter().map(|arg| arg.to_string()).collect()
    }

    #[test]
    fn one_leading_separator_is_dropped() {
        assert_eq!(own_args(&strings(&["--", "--steps", "--"])), strings(&["--steps", "--"]));
        assert_eq!(own_args(&strings(&["--steps"])), strings(&["--steps"]));
        assert!(own_args(&[]).is_empty());
    }

    #[test]
    fn the_last_out_counts() {
        let out = |args: &[&str]| last_out(&strings(args)).to_string();
        assert_eq!(out(&["--out", "a"]), "a");
        assert_eq!(out(&["--out", "a", "--steps", "3", "--out=b c"]), "b c");
        assert_eq!(out(&["--out", "a", "--out", "b", "--outer=c"]), "b");
        assert_eq!(out(&["--out", "a", "--out"]), "a");
    }

    #[test]
    fn what_means_nothing_is_a_usage_error() {
        for (name, args) in [
            ("tset", &[][..]),
            ("doctor", &["x"][..]),
            ("bundle", &["--nobench"][..]),
            ("test", &["--tch"][..]),
            ("wheel", &["--tch"][..]),
        ] {
            let error = run(Some(name), &strings(args)).err().unwrap();
            assert!(error.is::<Usage>(), "{error}");
            assert!(error.to_string().contains("cargo xtask help"), "{error}");
        }
    }

    #[test]
    fn help_names_every_command() {
        for name in [
            "demo", "test", "bench", "tune", "ci", "python", "ways", "doctor", "cache", "bundle",
            "wheel", "setup", "help",
        ] {
            assert!(HELP.contains(&format!("\n  {name} ")), "{name}");
        }
    }
}
