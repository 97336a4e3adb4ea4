//! Builds the crates outside the workspace as a user would: the one in `examples/extension`, and
//! the one that `docs/write-an-operator.md` builds step by step.

use crate::cargo;
use crate::page::{self, Step};
use crate::repo::Repo;
use crate::report::say;
use crate::setup::Changes;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// The page that builds a crate.
const PAGE: &str = "docs/write-an-operator.md";

/// The folder of the stand-alone example, relative to the repository.
pub const EXAMPLE: &str = "examples/extension";

/// A cargo command in another folder. It shares this repository's target folder, because each
/// further one builds torch-sys again, and it does not see `LD_LIBRARY_PATH`, which users do not
/// set either.
pub fn cargo_in(repo: &Repo, changes: &Changes, folder: &Path, args: &[&str]) -> Command {
    let mut command = cargo::command(repo, changes, args);
    command.current_dir(folder).env_remove("LD_LIBRARY_PATH");
    if std::env::var_os("CARGO_TARGET_DIR").is_none() {
        command.env("CARGO_TARGET_DIR", repo.root.join("target"));
    }
    command
}

/// Does what the page tells its reader to do.
pub fn follow_page(repo: &Repo, changes: &Changes) -> Result<()> {
    let folder = tempfile::tempdir().context("cannot make a folder for the page's crate")?;
    follow(repo, changes, folder.path())
}

fn follow(repo: &Repo, changes: &Changes, folder: &Path) -> Result<()> {
    let page = std::fs::read_to_string(repo.root.join(PAGE))
        .with_context(|| format!("cannot read {PAGE}"))?;
    let mut place = folder.to_path_buf();
    let (mut tested, mut timed) = (false, false);
    for step in page::steps(&page) {
        match step {
            Step::File { path, text } => write(repo, &place.join(path), &text)?,
            Step::Append { path, text } => append(&place.join(path), &text)?,
            Step::Commands(lines) => {
                for line in lines.lines() {
                    say(format_args!("$ {line}"));
                    match line.split(' ').collect::<Vec<_>>()[..] {
                        ["cd", folder] => place = place.join(folder),
                        ["cargo", ref args @ ..] => {
                            tested |= args == ["test"];
                            timed |= args.first() == Some(&"bench");
                            cargo::run(&mut cargo_in(repo, changes, &place, args))?;
                            lock_as_here(repo, &place)?;
                        }
                        _ => bail!("{PAGE} has a command that is neither cargo nor cd: {line}"),
                    }
                }
            }
        }
    }
    if !tested || !timed {
        bail!(
            "{PAGE} never says `cargo test` or `cargo bench` in a block of sh, so something was not checked"
        );
    }
    Ok(())
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
        let lock = entry.path().join("Cargo.lock");
        if entry.path().join("Cargo.toml").exists() && !lock.exists() {
            std::fs::copy(repo.root.join("Cargo.lock"), &lock)
                .with_context(|| format!("cannot write {}", lock.display()))?;
        }
    }
    Ok(())
}
