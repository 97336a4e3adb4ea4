//! Starts cargo in the root of the repository.

use crate::repo::Repo;
use crate::report::say;
use crate::setup::{Changes, ISAS};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Selects all packages but the one whose dependencies are not everybody's. `ci` tests it, too, and
/// `-p gpt` tests it alone.
pub const ALL_BUT_GPT: [&str; 3] = ["--workspace", "--exclude", GPT];
/// Selects all packages, and switches on what is off by default. Cargo unites the features of the
/// packages that a command selects, so only commands that select the same share what is built.
pub const EVERYTHING: [&str; 3] = [
    "--workspace",
    "--features",
    "tch-extension/distributed,gpt/distributed,char_lltm/distributed",
];
/// The launcher, which the tests of several processes need.
pub const LAUNCHER: &str = "tch-run";
/// The package of the demo, in `examples/char_lltm`.
pub const DEMO: &str = "char_lltm";
/// The package in `examples/gpt`.
pub const GPT: &str = "gpt";

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
    for (name, value) in changes {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
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

/// Runs the commands at the same time and returns an error unless all succeed. The output of each
/// is printed as a whole, below its title.
pub fn run_together<const N: usize>(commands: [(String, Command); N]) -> Result<()> {
    let outputs = std::thread::scope(|scope| {
        let running = commands.map(|(title, mut command)| {
            scope.spawn(move || {
                let output = command.output().context("cannot run cargo; is it in PATH?")?;
                anyhow::Ok((title, describe(&command), output))
            })
        });
        running.map(|thread| thread.join().expect("nothing in it panics"))
    });
    let mut failed = Vec::new();
    for output in outputs {
        let (title, command, output) = output?;
        let text = [&output.stderr[..], &output.stdout].map(String::from_utf8_lossy).concat();
        say(format_args!("-- {title}\n{}", text.trim_end()));
        if !output.status.success() {
            failed.push(format!("`{command}` with {title} failed ({})", output.status));
        }
    }
    if !failed.is_empty() {
        bail!(failed.join("; "));
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

    fn shell(title: &str, script: &str) -> (String, Command) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        (title.to_string(), command)
    }

    #[test]
    fn kernels_are_compiled_for_all_cpus_unless_a_command_says_otherwise() {
        let repo = Repo { root: "/repo".into() };
        let isas = |changes: Changes| {
            let command = command(&repo, &changes, &[]);
            let mut variables = command.get_envs().filter(|(name, _)| *name == ISAS);
            variables.next().map(|(_, value)| value.map(|value| value.to_owned()))
        };
        assert_eq!(isas(Changes::new()), Some(None));
        assert_eq!(isas(vec![(ISAS.into(), Some("native".into()))]), Some(Some("native".into())));
    }

    #[test]
    fn one_of_several_that_fails_is_named() {
        run_together([shell("a", "echo fine"), shell("b", "true")]).unwrap();
        let error =
            run_together([shell("a", "exit 3"), shell("b", "true")]).unwrap_err().to_string();
        assert!(error.contains("with a failed") && !error.contains("with b"), "{error}");
    }

    #[test]
    fn they_run_at_the_same_time() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().to_path_buf();
        std::fs::create_dir_all(&folder).unwrap();
        // Each of the two commands waits for the file that the other one makes.
        let meets = |own: &str, other: &str| {
            let wait = "for i in $(seq 500); do [ -e $1 ] && exit; sleep 0.02; done; exit 1";
            let (own, other) = (folder.join(own), folder.join(other));
            shell("", &format!("set -- '{}'; touch '{}'; {wait}", other.display(), own.display()))
        };
        run_together([meets("a", "b"), meets("b", "a")]).unwrap();
    }
}
