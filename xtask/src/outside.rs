//! Builds the crates outside the workspace as a user would: the one in `examples/extension`, and
//! those that two pages of `docs` build step by step.

use crate::cargo;
use crate::page::{self, Step};
use crate::repo::{Repo, files_below};
use crate::report::say;
use crate::setup::{Changes, KERNELS};
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A page that builds a crate.
pub struct Page {
    /// The page's file, relative to the repository.
    pub file: &'static str,
    /// Beginnings of commands, each of which the page must contain. Otherwise a page whose blocks
    /// lost their marks would pass.
    commands: &'static [&'static str],
    /// The page whose crate it continues.
    continues: Option<&'static Page>,
}

/// The page about operators with kernels.
pub const OPERATOR: Page = Page {
    file: "docs/write-an-operator.md",
    commands: &["cargo test", "cargo bench"],
    continues: None,
};

/// The page about operators for Python.
pub const PYTHON: Page = Page {
    file: "docs/python.md",
    commands: &["python3 -m pip wheel", "python3 -m pip install", "python3 check.py", "cargo test"],
    continues: Some(&OPERATOR),
};

/// The folder of the stand-alone example, relative to the repository.
pub const EXAMPLE: &str = "examples/extension";

/// A cargo command in another folder. It shares this repository's target folder, because each
/// further one builds torch-sys again, and it does not see `LD_LIBRARY_PATH`, which users do not
/// set either.
pub fn cargo_in(repo: &Repo, changes: &Changes, folder: &Path, args: &[&str]) -> Command {
    let mut command = cargo::command(repo, changes, args);
    command.current_dir(folder).env_remove("LD_LIBRARY_PATH");
    command.env(cargo::TARGET, cargo::target_folder(repo));
    command
}

/// Tests the stand-alone example and runs its program, as its user would, or a copy [`with_unify`].
pub fn follow_example(repo: &Repo, changes: &Changes, as_is: bool) -> Result<()> {
    let place = repo.root.join(EXAMPLE);
    for args in [&["fmt", "--check"][..], &["tree", "--quiet", "--locked", "--depth", "0"]] {
        cargo::run(&mut cargo_in(repo, changes, &place, args))?;
    }
    let run = |place: &Path, lock: &[&str]| {
        for args in [&["clippy", "--all-targets"][..], &["test"], &["run"]] {
            let mut command = cargo_in(repo, changes, place, args);
            command.args(lock);
            if args[0] == "clippy" {
                command.args(["--", "-D", "warnings"]);
            }
            cargo::run(&mut command)?;
        }
        Ok(())
    };
    if as_is {
        return run(&place, &["--locked"]);
    }
    let folder = tempfile::tempdir().context("cannot make a folder for the example")?;
    let (copy, root) = (folder.path().join("example"), repo.root.display());
    for file in files_below(&place, "") {
        let (from, to) = (place.join(&file), copy.join(&file));
        std::fs::create_dir_all(to.parent().context("a file without a folder")?)
            .and_then(|()| std::fs::copy(&from, &to))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let manifest = std::fs::read_to_string(copy.join("Cargo.toml"))?;
    let manifest = with_unify(repo, &manifest.replace("\"../..", &format!("\"{root}")));
    write(repo, &copy.join("Cargo.toml"), &manifest)?;
    let venv =
        format!("[env]\nLIBTORCH = '{root}/.venv/libtorch'\nCUDA_HOME = '{root}/.venv/cuda'\n");
    write(repo, &copy.join(".cargo/config.toml"), &venv)?;
    copy_lock(repo, &copy)?;
    run(&copy, &[])
}

/// Does what the page tells its reader to do, or the same [`with_unify`].
pub fn follow_page(repo: &Repo, changes: &Changes, page: &Page, as_is: bool) -> Result<()> {
    let folder = tempfile::tempdir().context("cannot make a folder for the page's crate")?;
    // A reader has not set it, so each program contains the kernels.
    let mut changes = changes.clone();
    changes.push((KERNELS.to_string(), None));
    let (changes, folder) = (&changes, folder.path());
    Follower { repo, changes, page, as_is, folder, commands: Vec::new() }.follow()
}

struct Follower<'a> {
    repo: &'a Repo,
    changes: &'a Changes,
    page: &'a Page,
    as_is: bool,
    folder: &'a Path,
    /// The commands that were run.
    commands: Vec<String>,
}

impl Follower<'_> {
    fn follow(mut self) -> Result<()> {
        let (file, mut place) = (self.page.file, self.folder.to_path_buf());
        if let Some(before) = self.page.continues {
            // Its crate, without what was tested there.
            let makes = |line: &str| line.starts_with("cargo new ") || line.starts_with("cd ");
            self.take(before, &mut place, makes)?;
        }
        self.take(self.page, &mut place, |_| true)?;
        let is_missing =
            |start: &&&str| !self.commands.iter().any(|command| command.starts_with(**start));
        match self.page.commands.iter().find(is_missing) {
            None => Ok(()),
            Some(start) => {
                bail!("{file} never says `{start}` in a block of sh, so something was not checked")
            }
        }
    }

    /// Takes the steps of a page, with those of its commands that are wanted.
    fn take(&mut self, page: &Page, place: &mut PathBuf, wanted: fn(&str) -> bool) -> Result<()> {
        let text = std::fs::read_to_string(self.repo.root.join(page.file))
            .with_context(|| format!("cannot read {}", page.file))?;
        for step in page::steps(&text) {
            match step {
                Step::File { path, text } => {
                    let changes = path == "Cargo.toml" && !self.as_is;
                    let text = if changes { with_unify(self.repo, &text) } else { text };
                    write(self.repo, &place.join(path), &text)?;
                }
                Step::Append { path, text } => append(&place.join(path), &text)?,
                Step::Commands(lines) => {
                    for line in lines.lines().filter(|line| wanted(line)) {
                        self.run(line, place)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, line: &str, place: &mut PathBuf) -> Result<()> {
        say(format_args!("$ {line}"));
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["cd", folder] => *place = place.join(folder),
            ["cargo", ref args @ ..] => {
                cargo::run(&mut cargo_in(self.repo, self.changes, place, args))?;
                lock_as_here(self.repo, place)?;
            }
            ["python3", ref args @ ..] => self.python3(place, args)?,
            _ => {
                let file = self.page.file;
                bail!("{file} has a command that is neither cargo, python3 nor cd: {line}")
            }
        }
        self.commands.push(line.to_string());
        Ok(())
    }

    /// Runs python3 with the torch of set-up. What pip installs is put into a folder of the page's.
    fn python3(&self, place: &Path, args: &[&str]) -> Result<()> {
        let installed = self.folder.join("installed");
        let own = ["python", "site"].map(|name| self.repo.venv().join(name));
        let path = std::env::join_paths(std::iter::once(&installed).chain(&own))?;
        let mut command = Command::new("python3");
        // A build with pip runs cargo, which needs what `cargo_in` sets.
        for (name, value) in cargo_in(self.repo, self.changes, place, &[]).get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.args(args).current_dir(place).env("PYTHONPATH", path);
        command.env("PIP_TARGET", &installed).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
        let caches = self.folder.join("inductor");
        command.env("TORCHINDUCTOR_CACHE_DIR", caches).env("PYTHONWARNINGS", "ignore");
        let status = command.status().context("cannot run python3")?;
        if !status.success() {
            bail!("`python3 {}` failed ({status})", args.join(" "));
        }
        Ok(())
    }
}

/// A manifest with one more dependency, with which tch is not compiled once more for this crate.
fn with_unify(repo: &Repo, manifest: &str) -> String {
    const TABLE: &str = "[dependencies]\n";
    let unify = format!("{TABLE}unify = {{ path = \"{}/tests/unify\" }}\n", repo.root.display());
    manifest.replace(TABLE, &unify)
}

/// Writes a block of the page unchanged, except for the path of the clone.
fn write(repo: &Repo, path: &Path, text: &str) -> Result<()> {
    let text = text.replace("../tch-extension", &repo.root.to_string_lossy());
    let parent = path.parent().context("a file without a folder")?;
    std::fs::create_dir_all(parent)
        .and_then(|()| std::fs::write(path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn append(path: &Path, text: &str) -> Result<()> {
    let cannot = || format!("cannot add to {}", path.display());
    let mut file = File::options().append(true).open(path).with_context(cannot)?;
    file.write_all(text.as_bytes()).with_context(cannot)
}

/// Gives new crates the repository's Cargo.lock, so that no dependency is built again in another version.
fn lock_as_here(repo: &Repo, folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let has = |file: &str| entry.path().join(file).exists();
        if has("Cargo.toml") && !has("Cargo.lock") {
            copy_lock(repo, &entry.path())?;
        }
    }
    Ok(())
}

fn copy_lock(repo: &Repo, folder: &Path) -> Result<()> {
    let lock = folder.join("Cargo.lock");
    std::fs::copy(repo.root.join("Cargo.lock"), &lock)
        .with_context(|| format!("cannot write {}", lock.display()))?;
    Ok(())
}
