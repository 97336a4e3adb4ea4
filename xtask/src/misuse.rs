//! Checks the programs that must not compile: `tests/misuse/*.rs`. Each begins with a comment that
//! says which error the compiler must report; any other error is a failure. trybuild works in the
//! same manner, but it would build libtorch's bindings and all kernels again in a target folder of
//! its own. This check uses the library that is already built.

use crate::repo::Repo;
use crate::report::say;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs' folder, relative to the repository.
const FOLDER: &str = "tests/misuse";

/// Checks every program against the library that these messages of a cargo build report.
pub fn check(repo: &Repo, messages: &[Value]) -> Result<()> {
    let library =
        library(messages).context("cargo did not say where the library of tch-extension is")?;
    let mut programs: Vec<PathBuf> = std::fs::read_dir(repo.root.join(FOLDER))
        .with_context(|| format!("cannot read {FOLDER}"))?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "rs"))
        .collect();
    programs.sort();
    if programs.is_empty() {
        bail!("there is no program in {FOLDER}, so nothing was checked");
    }
    for program in &programs {
        let text = std::fs::read_to_string(program)
            .with_context(|| format!("cannot read {}", program.display()))?;
        let output = compile(program, &library)?;
        judge(&text, &output)
            .map_err(|trouble| anyhow::anyhow!("{}: {trouble}", program.display()))?;
    }
    say(format_args!("{} programs are refused, each for its reason", programs.len()));
    Ok(())
}

fn library(messages: &[Value]) -> Option<PathBuf> {
    let artifacts = messages.iter().filter(|message| {
        message["reason"] == "compiler-artifact"
            && message["target"]["name"] == "tch_extension"
            && message["target"]["kind"][0] == "lib"
    });
    // One of the artifacts is the library's unit-test program, which has no `.rlib`.
    let files = artifacts.filter_map(|artifact| artifact["filenames"].as_array());
    let files = files.flatten().filter_map(Value::as_str);
    files.map(PathBuf::from).find(|file| file.extension().is_some_and(|ending| ending == "rlib"))
}

/// Compiles a program and returns the compiler's messages.
fn compile(program: &Path, library: &Path) -> Result<String> {
    let deps = library.parent().context("a library without a folder")?;
    // Cargo links the library itself into the folder above the one that holds its dependencies.
    let folders = [deps.to_path_buf(), deps.join("deps")];
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.args(["--edition", "2024", "--crate-type", "bin", "--emit", "metadata"]);
    // Not /dev/null, which rustc would replace by a file if the program did compile.
    command.arg("-o").arg(deps.join("misuse.rmeta"));
    for folder in folders {
        command.arg("-L").arg(format!("dependency={}", folder.display()));
    }
    command.arg("--extern").arg(format!("tch_extension={}", library.display())).arg(program);
    let output = command.output().context("cannot run rustc; is it in PATH?")?;
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Compares the compiler's output with the program's first line, for example `// E0277: cannot be
/// shared between threads`, or `// error: operators!: …` for an error of a macro.
fn judge(program: &str, output: &str) -> std::result::Result<(), String> {
    let expected = program.lines().next().and_then(|line| line.strip_prefix("// "));
    let Some((code, says)) = expected.and_then(|line| line.split_once(": ")) else {
        return Err("its first line should be `// CODE: words of the compiler's`".to_string());
    };
    // An error of a macro's has no code.
    let start = if code == "error" { "error: ".to_string() } else { format!("error[{code}]") };
    let errors: Vec<&str> = output
        .lines()
        .filter(|line| line.starts_with("error") && !line.starts_with("error: aborting"))
        .collect();
    match errors[..] {
        [] => Err(format!("it compiles, but {code} ({says}) should keep it from that")),
        // When a struct breaks the rule for two reasons, the compiler reports both.
        _ if errors.iter().all(|error| error.starts_with(&start)) && output.contains(says) => {
            Ok(())
        }
        _ => Err(format!(
            "{code} ({says}) should be the only error, but the compiler says:\n{output}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_error_and_the_right_one() {
        let program = "// E0277: between threads\nfn main() {}\n";
        let right = "error[E0277]: `X` cannot be sent between threads\nerror: aborting due to 1 previous error\n";
        assert_eq!(judge(program, right), Ok(()));
        for wrong in [
            "",
            "error[E0432]: unresolved import\n",
            "error[E0277]: the trait bound is not satisfied\n",
            "error[E0277]: between threads\nerror[E0432]: unresolved import\n",
            "error: between threads\n",
        ] {
            assert!(judge(program, wrong).is_err(), "{wrong}");
        }
        assert!(judge("fn main() {}", right).is_err());
    }
}
