//! Starts cargo in the root of the repository.

use crate::repo::Repo;
use crate::setup::{Changes, ISAS, KERNELS};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Selects all packages but the one whose dependencies are not everybody's. `ci` tests it, too, and
/// `-p llm` tests it alone. All that is built for it is also built for [`EVERYTHING`].
pub const ALL_BUT_LLM: [&str; 5] = [
    "--workspace",
    "--exclude",
    LLM,
    "--features",
    "tch-extension/distributed,tch-extension/tvm_ffi,char_lltm/distributed",
];
/// Selects all packages, and switches on what is off by default. Cargo unites the features of the
/// packages that a command selects, so only commands that select the same share what is built. The
/// package `unify` sees to it for the dependencies of tch-extension.
pub const EVERYTHING: [&str; 3] = [
    "--workspace",
    "--features",
    "tch-extension/distributed,tch-extension/tvm_ffi,llm/distributed,char_lltm/distributed",
];
/// What [`EVERYTHING`] switches on in tch-extension, for a command that selects one package of it.
pub const ALL_FEATURES: &str =
    "tch-extension/default,tch-extension/distributed,tch-extension/tvm_ffi,tch-extension/open";
/// The launcher, which the tests of several processes need.
pub const LAUNCHER: &str = "tch-run";
/// The package of the demo, in `examples/char_lltm`.
pub const DEMO: &str = "char_lltm";
/// The package in `examples/llm`.
pub const LLM: &str = "llm";

/// A cargo command with the environment that set-up found.
pub fn command(repo: &Repo, changes: &Changes, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(&repo.root);
    // `cargo run` sets variables that describe xtask's own package. The cargo that is started here
    // must not see them.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    // Tests need the kernels of all instruction sets, and a bundle or a wheel leaves this machine.
    command.env_remove(ISAS);
    // The bundle and the wheel contain the kernel library, and `ci` checks it.
    command.env(KERNELS, "shared");
    for (name, value) in changes {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Lets the command check Rust without compiling any C++: no script of this workspace does, and
/// torch-sys does not with the feature. CUDA's items are checked, whether there is a compiler for
/// them or not.
pub fn only_checks(command: &mut Command) -> &mut Command {
    command.args(["--features", "tch-extension/doc-only"]);
    command.env("TCH_EXTENSION_CHECK", "1").env_remove("TCH_EXTENSION_CUDA")
}

/// The variable that names the folder in which cargo compiles.
pub const TARGET: &str = "CARGO_TARGET_DIR";

/// The folder in which cargo compiles here. Crates of other workspaces are compiled there, too, so
/// that what they share is compiled once.
pub fn target_folder(repo: &Repo) -> PathBuf {
    std::env::var_os(TARGET).map_or_else(|| repo.root.join("target"), PathBuf::from)
}

/// A `cargo test` of all packages but llm, or of those that the arguments name with `-p`. Words before
/// the options name test programs of the package `tests`: `lstm` is `--test lstm`.
pub fn test(repo: &Repo, changes: &Changes, args: &[String]) -> Command {
    let mut command = command(repo, changes, &["test"]);
    let own = args.iter().take_while(|arg| *arg != "--");
    if !own.into_iter().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        command.args(ALL_BUT_LLM);
    }
    let manifest = std::fs::read_to_string(repo.root.join("tests/Cargo.toml")).unwrap_or_default();
    let programs: Vec<&str> = manifest.split("[[test]]").skip(1).collect();
    let is_program = |word: &String| {
        let line = format!("\nname = {word:?}\n");
        programs.iter().any(|program| program.starts_with(&line))
    };
    let names = args.iter().take_while(|word| is_program(word)).count();
    command.args(args[..names].iter().flat_map(|name| ["--test", name]));
    command.args(&args[names..]);
    command
}

/// Replaces this process by the command, so that signals and the exit status are the command's own.
/// Returns only on failure.
pub fn become_command(mut command: Command) -> anyhow::Error {
    anyhow::Error::new(command.exec()).context("cannot run cargo; is it in PATH?")
}

/// Runs the command and returns an error unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().context("cannot run cargo; is it in PATH?")?;
    if !status.success() {
        bail!("`{}` failed ({status})", describe(command));
    }
    Ok(())
}

/// Runs a cargo build whose messages arrive as JSON on stdout; diagnostics still reach the
/// terminal.
pub fn messages(command: &mut Command) -> Result<Vec<Value>> {
    output_messages(command.arg(AS_JSON))
}

/// The option with which cargo's messages arrive as JSON.
pub const AS_JSON: &str = "--message-format=json-render-diagnostics";

/// The same for a command that has [`AS_JSON`] among its arguments, because further ones follow it.
pub fn output_messages(command: &mut Command) -> Result<Vec<Value>> {
    command.stdout(Stdio::piped());
    let child = command.spawn().context("cannot run cargo; is it in PATH?")?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("`{}` failed ({})", describe(command), output.status);
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

/// What the library's build script told cargo.
pub fn build_script(messages: &[Value]) -> Option<&Value> {
    // The id of a package whose folder has its name ends without the name.
    let is_library = |id: &str| match id.rsplit_once('#') {
        Some((place, version)) if !version.contains('@') => place.ends_with("/tch-extension"),
        Some((_, package)) => package.starts_with("tch-extension@"),
        None => false,
    };
    messages.iter().find(|message| {
        message["reason"] == "build-script-executed"
            && message["package_id"].as_str().is_some_and(is_library)
    })
}

/// The folder in which the library's build script wrote its objects.
pub fn out_dir(messages: &[Value]) -> Result<PathBuf> {
    let folder = build_script(messages).and_then(|message| message["out_dir"].as_str());
    Ok(folder.context("cargo did not say where the library's objects are")?.into())
}

/// Picks cargo's messages out of the output; other programs may print between them.
fn parse(text: &str) -> Vec<Value> {
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(Value::is_object)
        .collect()
}

fn describe(command: &Command) -> String {
    let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
    format!("cargo {}", args.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn repo() -> Repo {
        Repo { root: Path::new(env!("CARGO_MANIFEST_DIR")).join("..") }
    }

    /// What a package depends on, with features, when cargo builds this selection.
    fn dependencies(package: &str, selection: &[&str]) -> BTreeSet<String> {
        let args = ["tree", "--offline", "--no-dedupe", "--edges", "normal,build"];
        let mut command = command(&repo(), &Changes::new(), &args);
        command.args(["--prefix", "depth", "--format", " {p} {f}"]).args(selection);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut found = BTreeSet::new();
        let mut top = None;
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            let Some((depth, name)) = line.split_once(' ') else { continue };
            let depth: usize = depth.parse().unwrap();
            top = top.filter(|top| depth > *top);
            if top.is_some() {
                found.insert(name.to_string());
            } else if name.split(' ').next() == Some(package) {
                top = Some(depth);
            }
        }
        assert!(!found.is_empty(), "{package} is not in {selection:?}");
        found
    }

    #[test]
    fn kernels_are_a_library_for_all_cpus_unless_a_command_says_otherwise() {
        let variable = |variable: &str, changes: Changes| {
            let command = command(&repo(), &changes, &[]);
            let mut variables = command.get_envs().filter(|(name, _)| *name == variable);
            variables.next().map(|(_, value)| value.map(|value| value.to_owned()))
        };
        assert_eq!(variable(ISAS, Changes::new()), Some(None));
        let native = vec![(ISAS.into(), Some("native".into()))];
        assert_eq!(variable(ISAS, native), Some(Some("native".into())));
        assert_eq!(variable(KERNELS, Changes::new()), Some(Some("shared".into())));
        let path = vec![(KERNELS.into(), Some("/a.so".into()))];
        assert_eq!(variable(KERNELS, path), Some(Some("/a.so".into())));
    }

    #[test]
    fn commands_share_what_they_build() {
        let everything = ["tch", "tch-extension"].map(|it| (it, dependencies(it, &EVERYTHING)));
        let check = |package: usize, selection: &[&str]| {
            let (package, all) = &everything[package];
            let found = dependencies(package, selection);
            let differ: Vec<_> = found.symmetric_difference(all).collect();
            assert!(
                differ.is_empty(),
                "tests/unify/Cargo.toml: {selection:?} differs in {differ:#?}"
            );
        };
        let ours: [&[&str]; 6] = [
            &[],
            &ALL_BUT_LLM,
            &["-p", LLM],
            &["-p", "tests"],
            &["-p", "benches"],
            &["-p", "tch-extension-python", "--features", ALL_FEATURES],
        ];
        for selection in ours {
            check(1, selection);
        }
        // These have not all features of tch-extension.
        for package in ["tch-extension-python", DEMO] {
            check(0, &["-p", package]);
        }
    }

    #[test]
    fn names_of_test_programs_are_words_before_the_options() {
        let arguments = |args: &[&str]| {
            let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
            let command = test(&repo(), &Changes::new(), &args);
            let found = command.get_args().map(|arg| arg.to_str().unwrap().to_string());
            found.collect::<Vec<_>>().join(" ")
        };
        let all = format!("test {}", ALL_BUT_LLM.join(" "));
        assert_eq!(arguments(&[]), all);
        assert_eq!(
            arguments(&["lstm", "view", "--", "layout"]),
            format!("{all} --test lstm --test view -- layout")
        );
        assert_eq!(arguments(&["build", "lstm"]), format!("{all} build lstm"));
        assert_eq!(arguments(&["-p", "tch-run", "--", "-p"]), "test -p tch-run -- -p");
        assert_eq!(arguments(&["--", "-p"]), format!("{all} -- -p"));
    }
}
