//! Compiles what needs no libtorch while libtorch is downloaded, which leaves the processors idle.

use crate::libtorch::{self, Rule};
use crate::repo::Repo;
use crate::report::say;
use crate::setup::{self, Changes, real_env};
use crate::{cargo, wheels};
use std::process::{Child, Command, Stdio};

/// A build in the background whose result is not needed: the command that follows builds the same,
/// and says what fails. On a failed set-up it is ended.
pub struct Ahead(Option<Child>);

impl Ahead {
    /// Begins to build what these arguments of `cargo build` select, if set-up is about to download libtorch.
    pub fn of_build(repo: &Repo, args: &[&str]) -> Ahead {
        let is_missing = libtorch::choose(&real_env, repo) == Rule::Own
            && setup::check_glibc().is_ok()
            && wheels::LIBTORCH.missing(repo).is_ok_and(|missing| missing.is_some());
        if !is_missing {
            return Ahead(None);
        }
        // torch-sys fails at this folder, and cargo goes on with what does not need it. With the
        // real folder, a download that ends early would let it build everything, unseen.
        let nowhere = repo.venv().join("no-libtorch-yet");
        let changes: Changes = vec![("LIBTORCH".to_string(), Some(nowhere.into()))];
        let mut command = cargo::command(repo, &changes, &["build", "--keep-going"]);
        command.args(args);
        Self::of(command)
    }

    fn of(mut command: Command) -> Ahead {
        // Its messages would stand between those of pip.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ahead(command.spawn().ok())
    }

    /// Waits for the end, so that the next cargo does not wait for this one without a reason.
    pub fn wait(mut self) {
        let Some(mut child) = self.0.take() else { return };
        if matches!(child.try_wait(), Ok(None)) {
            say("note: still compiling what needs no libtorch");
        }
        let _ = child.wait();
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::{Duration, Instant};

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A package that needs two others, of which one cannot be built without its folder.
    #[test]
    fn what_needs_no_libtorch_is_compiled_while_it_is_missing() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
        let package = |name: &str, rest: &str| {
            let text = format!(
                "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n{rest}"
            );
            write(&root.join(name).join("Cargo.toml"), &text);
            write(&root.join(name).join("src/lib.rs"), "");
        };
        package("free", "");
        package("bound", "");
        let script = "fn main() { assert!(std::path::Path::new(&std::env::var(\"LIBTORCH\").unwrap()).exists()) }";
        write(&root.join("bound/build.rs"), script);
        package(
            "demo",
            "[dependencies]\nfree = { path = \"../free\" }\nbound = { path = \"../bound\" }\n",
        );
        write(&root.join("Cargo.toml"), "[workspace]\nmembers = [\"demo\"]\nresolver = \"3\"\n");
        write(&root.join("xtask/libtorch.txt"), "torch==1\n");

        let repo = Repo { root: root.to_path_buf() };
        let nowhere = repo.venv().join("nowhere");
        let changes: Changes = vec![
            ("LIBTORCH".to_string(), Some(nowhere.into())),
            ("CARGO_TARGET_DIR".to_string(), Some(root.join("target").into())),
        ];
        let args = ["build", "--offline", "--keep-going", "--package", "demo"];
        Ahead::of(cargo::command(&repo, &changes, &args)).wait();
        let deps = std::fs::read_dir(root.join("target/debug/deps")).unwrap().flatten();
        let names: Vec<String> =
            deps.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let has = |name: &str| names.iter().any(|found| found.starts_with(name));
        assert!(has("libfree") && !has("libbound") && !has("libdemo"), "{names:?}");
    }

    #[test]
    fn a_failed_set_up_ends_it() {
        let begun = Instant::now();
        let mut command = Command::new("sleep");
        command.arg("60");
        drop(Ahead::of(command));
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_cargo_that_is_missing_is_left_to_the_next_command() {
        Ahead::of(Command::new("/nowhere/cargo")).wait();
    }
}
