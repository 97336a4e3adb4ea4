//! The long tests that `ci` leaves out and `ci --full` runs. `cargo xtask test` runs them, too.

use crate::programs;
use crate::runner::Run;
use anyhow::{Context, Result, bail};

/// Test programs, and words in the names of the tests that are left out of them. CONTRIBUTING.md
/// has the same table, with what a change still tests of each.
const LEFT_OUT: &[(&str, &[&str])] = &[
    ("distributed", &["a_rank_in_rust_and_a_rank_in_python_end_with_the_same_bits"]),
    (
        "jit",
        &[
            "all_of_libtorch_s_frontend_is_there",
            "cuda_jit_lltm",
            "cuda_jit_older_source",
            "inside_precompiled_headers",
        ],
    ),
    ("lltm", &["each_way_gives_the_same_sizes_kinds_strides_and_memory"]),
    ("package", &["a_copy_of_a_constant_is_not_the_constant"]),
];

/// Leaves the long tests out of this run of the program with this name.
pub fn leave_out(name: &str, run: &mut Run) -> Result<()> {
    let words = LEFT_OUT.iter().find(|(program, _)| *program == name).map_or(&[][..], |row| row.1);
    for word in words {
        if !has_test(run, word)? {
            bail!("{name} has no test with `{word}` in its name; change xtask/src/left_out.rs");
        }
    }
    run.command.args(words.iter().flat_map(|word| ["--skip", word]));
    Ok(())
}

/// Whether a test's name contains the word.
pub fn has_test(run: &Run, word: &str) -> Result<bool> {
    let program = run.command.get_program().to_string_lossy().into_owned();
    let mut list = programs::command(&program, &["--list", word]);
    for (name, value) in run.command.get_envs() {
        match value {
            Some(value) => list.env(name, value),
            None => list.env_remove(name),
        };
    }
    if let Some(folder) = run.command.get_current_dir() {
        list.current_dir(folder);
    }
    let output = list.output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} cannot list its tests: {}", programs::last_line(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.ends_with(": test")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn contributing_names_each_test_that_is_left_out() {
        let text = include_str!("../../CONTRIBUTING.md");
        for (program, words) in LEFT_OUT {
            let names: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
            let row = format!("| {program} | {} |", names.join(", "));
            assert!(text.contains(&row), "CONTRIBUTING.md lacks: {row}");
        }
    }

    #[test]
    fn a_test_that_does_not_exist_cannot_be_left_out() {
        let scratch = tempfile::tempdir().unwrap();
        let program = scratch.path().join("program");
        let script =
            "#!/bin/sh\n[ $1 = --list ] && [ $2 != cuda_jit_lltm ] && echo $2: test\nexit 0\n";
        std::fs::write(&program, script).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let run =
            || Run { title: String::new(), command: Command::new(&program), again: String::new() };
        let mut other = run();
        leave_out("other", &mut other).unwrap();
        assert_eq!(other.command.get_args().count(), 0);
        let error = leave_out("jit", &mut run()).unwrap_err().to_string();
        assert!(error.contains("no test with `cuda_jit_lltm`"), "{error}");
    }
}
