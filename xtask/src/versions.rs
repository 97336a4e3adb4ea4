//! Tests the repository with another version of tch than the one in Cargo.lock.
//!
//! A program can contain only one tch, because torch-sys has a `links` key, and a lock file can
//! hold only one version of it. So the other version gets a workspace of its own in `target`: it
//! has links to everything here, and its own Cargo.lock and `.venv/libtorch`.

use crate::commands::Usage;
use crate::repo::Repo;
use crate::setup;
use crate::{cargo, wheels};
use anyhow::{Context, Result};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The values that `--tch` accepts.
pub const KNOWN: &str = "0.26; the tch of Cargo.lock needs no option";

/// The version of tch that is supported in addition to the one in Cargo.lock.
const OTHER: &str = "0.26.0";

/// Entries of the root that the other workspace does not link to: it has its own, or none.
const NOT_LINKED: [&str; 8] =
    [".git", ".venv", "target", "dist", "dist.tmp", "dist.tar.xz", "runs", "Cargo.lock"];

/// Runs `cargo test` with the other version of tch.
pub fn test(repo: &Repo, version: &str, args: &[String]) -> Result<ExitCode> {
    check(version)?;
    Err(cargo::become_command(command(repo, args)?))
}

fn check(version: &str) -> Result<()> {
    if version != "0.26" && version != OTHER {
        return Err(Usage(format!("--tch takes {KNOWN}, and got `{version}`")).into());
    }
    Ok(())
}

/// The workspace with the other version of tch, whose libtorch is installed first, and the
/// environment of its cargo.
pub fn workspace(repo: &Repo, version: &str) -> Result<(Repo, setup::Changes)> {
    check(version)?;
    prepare(repo)
}

/// A `cargo test` with the other version of tch, whose libtorch is installed first.
pub fn command(repo: &Repo, args: &[String]) -> Result<Command> {
    let (other, mut changes) = prepare(repo)?;
    changes.extend(setup::one_test_at_a_time());
    Ok(cargo::test(&other, &changes, args))
}

/// What `.cargo/config.toml` sets in the other workspace.
pub fn variables(repo: &Repo) -> setup::Changes {
    let venv = repo.root.join("target/tch-0.26/.venv");
    let variable =
        |(name, folder): (&str, &str)| (name.to_string(), Some(venv.join(folder).into()));
    [("LIBTORCH", "libtorch"), ("CUDA_HOME", "cuda")].map(variable).into()
}

fn prepare(repo: &Repo) -> Result<(Repo, setup::Changes)> {
    setup::check_platform()?;
    setup::check_glibc()?;
    let named = setup::named_compiler()?;
    wheels::LIBTORCH_2_13.ensure(repo)?;
    let root = repo.root.join("target/tch-0.26");
    lay_out(repo, &root)?;
    let other = Repo { root };
    // Remove the variables that name this workspace's libtorch; in the other workspace
    // `.cargo/config.toml` names the other libtorch.
    let mut changes: setup::Changes = ["LIBTORCH", "CUDA_HOME", "LIBTORCH_USE_PYTORCH"]
        .map(|variable| (variable.to_string(), None))
        .into();
    changes.extend(named);
    changes.push((cargo::TARGET.to_string(), Some(cargo::target_folder(repo).into())));
    lock(repo, &other, &changes)?;
    Ok((other, changes))
}

/// Makes links to everything that exists now and removes links whose target no longer exists.
fn lay_out(repo: &Repo, root: &Path) -> Result<()> {
    let venv = root.join(".venv");
    std::fs::create_dir_all(&venv).with_context(|| format!("cannot make {}", venv.display()))?;
    for entry in std::fs::read_dir(root)?.flatten() {
        if entry.path().is_symlink() && !entry.path().exists() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    for entry in std::fs::read_dir(&repo.root)?.flatten() {
        let name = entry.file_name();
        if NOT_LINKED.iter().all(|other| name != *other) {
            link(&entry.path(), &root.join(name))?;
        }
    }
    link(&repo.venv().join("site-2.13/torch"), &venv.join("libtorch"))?;
    // What Python finds beside this libtorch.
    link(&repo.venv().join("site-2.13"), &venv.join("site"))?;
    link(&repo.venv().join("python"), &venv.join("python"))?;
    link(&repo.venv().join("site-2.13/nvidia/cu13"), &venv.join("cuda"))
}

fn link(target: &Path, place: &Path) -> Result<()> {
    if std::fs::read_link(place).is_ok_and(|found| found == target) {
        return Ok(());
    }
    let _ = std::fs::remove_file(place);
    symlink(target, place).with_context(|| format!("cannot make the link {}", place.display()))
}

/// Writes a Cargo.lock that differs from this repository's only in tch and torch-sys. It is made
/// again when this repository's changes.
fn lock(repo: &Repo, other: &Repo, changes: &setup::Changes) -> Result<()> {
    let here =
        std::fs::read_to_string(repo.root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let (place, made_of) = (other.root.join("Cargo.lock"), other.root.join("Cargo.lock.made-of"));
    if place.exists() && std::fs::read_to_string(&made_of).is_ok_and(|text| text == here) {
        return Ok(());
    }
    let _ = std::fs::remove_file(&made_of);
    std::fs::write(&place, &here).with_context(|| format!("cannot write {}", place.display()))?;
    let update = ["update", "tch", "torch-sys", "--precise", OTHER];
    cargo::run(&mut cargo::command(other, changes, &update))?;
    std::fs::write(&made_of, &here).with_context(|| format!("cannot write {}", made_of.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pins_are_those_of_the_libtorch_that_tch_wants() {
        let known = include_str!("../../tch-extension-build/src/lib.rs");
        let pin = include_str!("../libtorch-2.13.txt")
            .lines()
            .find_map(|line| line.strip_prefix("torch=="));
        let pair = format!("(\"{}\", \"{}\")", pin.unwrap(), OTHER.strip_suffix(".0").unwrap());
        assert!(known.contains(&pair), "{pair}");
    }

    #[test]
    fn another_workspace_has_links_to_all_but_what_is_its_own() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().to_path_buf();
        let repo = Repo { root: root.join("repo") };
        std::fs::create_dir_all(repo.root.join("src")).unwrap();
        std::fs::create_dir_all(repo.root.join("target")).unwrap();
        for file in ["Cargo.lock", "dist.tar.xz"] {
            std::fs::write(repo.root.join(file), "").unwrap();
        }
        let other = repo.root.join("target/tch-0.26");
        for _ in 0..2 {
            lay_out(&repo, &other).unwrap();
        }
        assert_eq!(std::fs::read_link(other.join("src")).unwrap(), repo.root.join("src"));
        for own in ["target", "Cargo.lock", "dist.tar.xz"] {
            assert!(!other.join(own).exists(), "{own}");
        }
        std::fs::remove_dir(repo.root.join("src")).unwrap();
        lay_out(&repo, &other).unwrap();
        assert!(!other.join("src").is_symlink(), "what is gone here is gone there");
    }

    #[test]
    fn an_unknown_version_is_a_usage_error() {
        let error = test(&Repo { root: "/repo".into() }, "0.25", &[]).err().unwrap();
        assert!(error.is::<Usage>() && error.to_string().contains("0.25"), "{error}");
    }
}
