//! Builds `dist/`, the bundle: the programs of this repository, to run on a machine that has
//! libtorch but no Rust.

use crate::repo::{Repo, files_below};
use crate::report::{self, say};
use crate::setup::{self, Changes};
use crate::{cargo, crossing, outside, programs};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What the bundle contains besides the test and example programs.
pub struct Options {
    /// Whether the benchmarks are included.
    pub benches: bool,
    /// Whether all of it is also packed into one file.
    pub archive: bool,
}

/// A program that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    folder: &'static str,
    name: String,
    executable: PathBuf,
    source: PathBuf,
}

/// What is built for a bundle.
#[derive(Default)]
struct Parts {
    programs: Vec<Program>,
    /// The libraries of kernels that the programs link.
    kernels: Vec<PathBuf>,
}

/// A bundle larger than this draws a warning, because it is tedious to copy to another machine.
const LARGE_MIB: f64 = 64.0;
/// The bundle as one file.
const ARCHIVE: &str = "dist.tar.xz";
/// Larger files are not source files and are not copied.
const LARGEST_FILE: u64 = 1 << 20;

/// Builds everything and writes `dist/` completely or, on an error, not at all.
pub fn run(repo: &Repo, options: Options) -> Result<ExitCode> {
    let ready = setup::run(repo)?;
    let has_vision = setup::vision(repo, &ready)?;
    let Parts { programs, kernels } = build(repo, &ready.changes, &options)?;
    let (fresh, place) = (repo.root.join("dist.tmp"), repo.root.join("dist"));
    remove(&fresh)?;
    for program in &programs {
        copy_program(program, &fresh)?;
    }
    for library in &kernels {
        let name = library.file_name().context("a library without a name")?;
        copy_stripped(library, &fresh.join("lib").join(name))?;
    }
    copy_files(repo, &fresh.join("files"))?;
    if has_vision {
        copy_vision(repo, &fresh.join("torchvision"))?;
        copy_tvm_ffi(repo, &fresh.join("tvm_ffi"))?;
    }
    write_script(&fresh.join("run.sh"))?;
    build_rounding(repo, &fresh.join("round_allocations.so"))?;
    write_commit(repo, &fresh.join("commit"))?;
    remove(&place)?;
    // It would have the programs of an earlier bundle.
    let _ = std::fs::remove_file(repo.root.join(ARCHIVE));
    std::fs::rename(&fresh, &place).context("cannot move the bundle to dist")?;
    report::print(&summary(&place, &programs)?);
    if options.archive {
        pack(repo)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Packs `dist` into `dist.tar.xz`, completely or not at all.
fn pack(repo: &Repo) -> Result<()> {
    let (partial, place) = (repo.root.join("dist.tar.tmp"), repo.root.join(ARCHIVE));
    let mut command = programs::command("tar", &["--xz", "--create", "--file"]);
    // The programs have much in common, in places that are further apart than the programs are large.
    command
        .arg(&partial)
        .arg("dist")
        .current_dir(&repo.root)
        .env("XZ_OPT", "-6 --lzma2=dict=64MiB -T1");
    let status = command.status().context("cannot start `tar`, which packs the bundle")?;
    if !status.success() {
        bail!("`tar --xz` could not pack dist; it needs `xz` (Debian: apt install xz-utils)");
    }
    std::fs::rename(&partial, &place)
        .with_context(|| format!("cannot write {}", place.display()))?;
    let size = mib(std::fs::metadata(&place)?.len());
    report::print(&format!("{:<40}{size:>8.1} MiB\n", ARCHIVE));
    Ok(())
}

fn build(repo: &Repo, changes: &Changes, options: &Options) -> Result<Parts> {
    let mut builds: Vec<&[&str]> = vec![&["test", "--no-run"], &["build", "--bins"]];
    if options.benches {
        builds.push(&["bench", "--profile", "dev", "--bench", "ops", "--no-run"]);
    }
    let example = repo.root.join(outside::EXAMPLE);
    let outside = [&["test", "--no-run"][..], &["build"]];
    let here = builds.into_iter().map(|args| {
        let mut command = cargo::command(repo, changes, args);
        command.args(cargo::EVERYTHING);
        command
    });
    let there = outside.into_iter().map(|args| outside::cargo_in(repo, changes, &example, args));
    let mut parts = Parts::default();
    let found = &mut parts.programs;
    for mut command in here.chain(there) {
        let messages = cargo::messages(&mut command)?;
        // Nothing, without CUDA and where the library was not built.
        parts.kernels.extend(crossing::library(&messages));
        for program in messages.iter().filter_map(|message| program(message, &repo.root)) {
            if needs_rust(&program.source) {
                say(format_args!(
                    "note: {} starts cargo or rustc, and stays out of the bundle",
                    program.name
                ));
            } else if !found.contains(&program) {
                found.push(program);
            }
        }
    }
    match found.is_empty() {
        true => bail!("cargo built no program"),
        false => Ok(parts),
    }
}

/// The packages whose programs are useful on another machine. `xtask` and `tch-extension-build` are
/// not among them.
const PACKAGES: [&str; 8] = [
    "Cargo.toml",
    "benches/Cargo.toml",
    "tests/Cargo.toml",
    "tests/downstream/Cargo.toml",
    "examples/char_lltm/Cargo.toml",
    "examples/extension/Cargo.toml",
    "examples/llm/Cargo.toml",
    "tch-run/Cargo.toml",
];

/// The program that one of cargo's messages reports, if it belongs to one of [`PACKAGES`].
fn program(message: &Value, root: &Path) -> Option<Program> {
    let executable = message["executable"].as_str()?;
    let manifest = message["manifest_path"].as_str().map(Path::new)?;
    if !PACKAGES.iter().any(|package| manifest == root.join(package)) {
        return None;
    }
    let target = &message["target"];
    let folder = match target["kind"][0].as_str()? {
        "bench" => "benches",
        // Only examples and the launcher have binaries. Their unit-test programs are left out.
        "bin" if message["profile"]["test"] == true => return None,
        "bin" => "examples",
        _ if message["profile"]["test"] == true => "tests",
        _ => return None,
    };
    Some(Program {
        folder,
        name: target["name"].as_str()?.to_string(),
        executable: executable.into(),
        source: target["src_path"].as_str()?.into(),
    })
}

/// Whether a program starts cargo or rustc and is therefore useless without Rust.
fn needs_rust(source: &Path) -> bool {
    let text = std::fs::read_to_string(source).unwrap_or_default();
    ["trybuild::", "\"cargo\"", "\"rustc\"", "\"CARGO\""].iter().any(|sign| text.contains(sign))
}

fn copy_program(program: &Program, dist: &Path) -> Result<()> {
    copy_stripped(&program.executable, &dist.join(program.folder).join(&program.name))
}

/// Copies a program or library without its debug information, which is most of its size.
fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file without a folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let stripped = programs::command("strip", &["-o"]).arg(to).arg(from).output();
    if stripped.is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    say(format_args!(
        "warning: {} is copied with its debug information: no `strip` (binutils)",
        from.display()
    ));
    std::fs::copy(from, to).with_context(|| format!("cannot write {}", to.display()))?;
    Ok(())
}

/// Copies the repository's text files, and the images of kernels, because the tests and the demo
/// read some of them.
fn copy_files(repo: &Repo, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for file in text_files(&repo.root) {
        let (from, to) = (repo.root.join(&file), folder.join(&file));
        // A folder is a link to one whose files are in the list by themselves.
        if from.is_dir() || is_large(&from) {
            continue;
        }
        let content =
            std::fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        if content.contains(&0) && !is_image(&file) {
            continue;
        }
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
        }
        std::fs::write(&to, content).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

/// Copies torchvision's operators, which the tests of `library` load.
fn copy_vision(repo: &Repo, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let from = repo.venv().join("vision/torchvision/_C.so");
    std::fs::copy(&from, folder.join("_C.so"))
        .with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Copies libtvm_ffi and its headers, with which the tests of `tvm_ffi` compile a module.
fn copy_tvm_ffi(repo: &Repo, folder: &Path) -> Result<()> {
    let package = repo.venv().join("vision/tvm_ffi");
    let headers = files_below(&package, "include");
    for file in headers.into_iter().chain([PathBuf::from("lib/libtvm_ffi.so")]) {
        let to = folder.join(&file);
        let parent = to.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot make {}", parent.display()))?;
        std::fs::copy(package.join(&file), &to)
            .with_context(|| format!("cannot copy {}", file.display()))?;
    }
    Ok(())
}

/// Whether a file is an image of kernels, which tests load.
fn is_image(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "cubin" || ending == "fatbin")
}

fn is_large(path: &Path) -> bool {
    std::fs::metadata(path).map_or(true, |data| !data.is_file() || data.len() > LARGEST_FILE)
}

/// The files that git tracks or would add; without git, the files of the folders that hold sources.
fn text_files(root: &Path) -> Vec<PathBuf> {
    let place = root.to_string_lossy();
    let args = ["-C", &place, "ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    match programs::stdout("git", &args) {
        Some(list) if !list.is_empty() => {
            list.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect()
        }
        _ => without_git(root),
    }
}

fn without_git(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        let name = PathBuf::from(entry.file_name());
        let is_source = ["src", "csrc", "docs", "tests", "benches", "examples"]
            .iter()
            .any(|dir| name == Path::new(dir));
        if is_source && entry.path().is_dir() {
            files.extend(files_below(root, &name));
        } else if name.extension().is_some_and(|ending| ending == "md" || ending == "toml") {
            files.push(name);
        }
    }
    files.sort();
    files
}

fn write_script(path: &Path) -> Result<()> {
    let write = || {
        std::fs::write(path, include_str!("run.sh"))?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Compiles the library that `run.sh sanitize` preloads to round device allocations.
fn build_rounding(repo: &Repo, path: &Path) -> Result<()> {
    let source = repo.root.join("xtask/src/round_allocations.c");
    let mut command = programs::command("cc", &["-shared", "-fPIC", "-O1", "-Wall", "-Wextra"]);
    let status = command.arg("-o").arg(path).arg(&source).arg("-ldl").status();
    match status.context("cannot start `cc`")?.success() {
        true => Ok(()),
        false => bail!("`cc` could not compile {}", source.display()),
    }
}

/// Writes the commit that the programs were built from; the benchmarks record it with their
/// figures.
fn write_commit(repo: &Repo, path: &Path) -> Result<()> {
    let place = repo.root.to_string_lossy();
    let commit = programs::stdout("git", &["-C", &place, "describe", "--always", "--dirty"]);
    std::fs::write(path, commit.unwrap_or_default())
        .with_context(|| format!("cannot write {}", path.display()))
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn summary(dist: &Path, programs: &[Program]) -> Result<String> {
    let mut text = String::new();
    for program in programs {
        let name = format!("{}/{}", program.folder, program.name);
        text +=
            &format!("{name:<40}{:>8.1} MiB\n", mib(std::fs::metadata(dist.join(&name))?.len()));
    }
    let total = mib(folder_size(dist));
    text += &format!("{:<40}{total:>8.1} MiB\n", "dist, with run.sh and files");
    if total > LARGE_MIB {
        say(format_args!(
            "warning: the bundle is larger than {LARGE_MIB} MiB; `--archive` packs it, and `--no-bench` leaves out the benchmarks"
        ));
    }
    Ok(text)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

fn folder_size(folder: &Path) -> u64 {
    let sizes = files_below(folder, "").into_iter().map(|file| folder.join(file).metadata());
    sizes.flatten().map(|data| data.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: &str, test: bool, manifest: &str) -> Value {
        serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": manifest,
            "target": { "kind": [kind], "name": "cell", "src_path": "/w/tests/cell.rs" },
            "profile": { "test": test },
            "executable": "/w/target/debug/deps/cell-0123",
        })
    }

    #[test]
    fn programs_go_where_they_belong() {
        let folder = |kind, test| {
            program(&message(kind, test, "/w/Cargo.toml"), Path::new("/w"))
                .map(|program| program.folder)
        };
        assert_eq!(folder("test", true), Some("tests"));
        assert_eq!(folder("lib", true), Some("tests"));
        assert_eq!(folder("bench", true), Some("benches"));
        assert_eq!(folder("bin", false), Some("examples"));
        assert_eq!(folder("bin", true), None);
    }

    #[test]
    fn other_packages_programs_stay_out() {
        assert_eq!(program(&message("test", true, "/w/xtask/Cargo.toml"), Path::new("/w")), None);
    }

    /// Writes an executable script.
    fn script(path: &Path, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("#!/bin/bash\n{text}\n")).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs `run.sh sanitize` in a bundle whose programs print only what the script reads. The
    /// sanitizer tools report `finding` if it is not empty.
    fn sanitize(folder: &Path, arguments: &[&str], tools: &str, finding: &str) -> (bool, String) {
        let run = |name: &str| folder.join("tests").join(name);
        let many = "if [[ $1 == --list ]]; then for i in {1..9}; do echo module::cuda_$i: test; done; exit; fi";
        let passed = "echo 'test result: ok. 1 passed; 0 failed'";
        script(&run("many"), &format!("{many}\n{passed}"));
        script(&run("none"), &format!("[[ $1 == --list ]] || {passed}"));
        script(&run("planted"), passed);
        std::fs::write(folder.join("run.sh"), include_str!("run.sh")).unwrap();
        std::fs::create_dir_all(folder.join("files")).unwrap();
        let torch = folder.join("torch/lib");
        std::fs::create_dir_all(&torch).unwrap();
        std::fs::write(torch.join("libtorch.so"), "").unwrap();
        // The tools also write down how layer_norm's tests are run.
        let tool = "options=\"$* $LD_PRELOAD\"; while [[ $1 != --log-file ]]; do shift; done; log=$2; shift 2\n\
                    [[ $1 != */layer_norm ]] || echo \"$options\" > \"${log%/*}/options\"\n\
                    { [[ $1 == */planted ]] && echo '========= at planted'; echo \"$FINDING\"; echo '========= ERROR SUMMARY: 0 errors'; } > \"$log\"\n\"$@\"";
        script(&folder.join("sanitizer"), tool);
        let output = std::process::Command::new("bash")
            .arg(folder.join("run.sh"))
            .arg("sanitize")
            .args(arguments)
            .env("LIBTORCH", folder.join("torch"))
            .env("LIBTORCH_BYPASS_VERSION_CHECK", "1")
            .env("COMPUTE_SANITIZER", folder.join("sanitizer"))
            .env("OUT", folder.join("out"))
            .env("SANITIZE_TOOLS", tools)
            .env("FINDING", finding)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    #[test]
    fn the_sanitizers_see_every_program_that_is_named() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().to_path_buf();
        let (good, text) = sanitize(&folder, &["many"], "", "");
        assert!(
            good && text.contains("no finding of ours in 36 checks (0 more were skipped); the planted faults were found"),
            "{text}"
        );
        assert!(text.contains("memcheck         many                 module::cuda_9: clean\n"));
        let (good, text) = sanitize(&folder, &["many", "none"], "", "");
        assert!(!good && text.contains("no test of none has `cuda` in its name"), "{text}");
        let (good, text) = sanitize(&folder, &[], "", "");
        assert!(good && !text.contains(" none "), "{text}");
    }

    #[test]
    fn a_skipped_test_is_not_clean_and_hides_no_finding() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        let skips = "[[ $1 == --list ]] && { echo cuda_a: test; exit; }\n\
                     echo 'SKIPPED cuda_a: no cache'; echo 'test result: ok. 1 passed; 0 failed'";
        script(&folder.join("tests/skips"), skips);
        let (good, text) = sanitize(folder, &["skips"], "memcheck", "");
        assert!(good && text.contains("cuda_a: skipped, no cache"), "{text}");
        assert!(text.contains("in 0 checks (1 more were skipped)"), "{text}");
        let (good, text) = sanitize(folder, &["skips"], "memcheck", "========= at tch_extension");
        assert!(!good && text.contains("cuda_a: FAILED, 1 findings of ours"), "{text}");
    }

    #[test]
    fn copies_of_fewer_than_16_bytes_have_a_check_of_their_own() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        // Only the tests of layer_norm have such kernels.
        let (good, text) = sanitize(folder, &["many"], "memcheck_rounded", "");
        assert!(!good && text.contains("nothing was checked"), "{text}");
        let options = |tool: &str| {
            std::fs::copy(folder.join("tests/many"), folder.join("tests/layer_norm")).unwrap();
            let (good, text) = sanitize(folder, &["layer_norm"], tool, "");
            assert!(good && text.contains(&format!("{tool:<16} layer_norm")), "{text}");
            std::fs::read_to_string(folder.join("out/options")).unwrap()
        };
        let (exact, rounded) = (options("memcheck"), options("memcheck_rounded"));
        for kernel in ["backward_ring", "backward_in_place"] {
            assert!(exact.contains(&format!("--kernel-name-exclude kns={kernel} ")), "{exact}");
            assert!(rounded.contains(&format!("--kernel-name kns={kernel} ")), "{rounded}");
        }
        assert!(rounded.contains("--tool memcheck ") && rounded.contains("round_allocations.so"));
        assert!(!exact.contains("round_allocations.so"), "{exact}");
    }

    #[test]
    fn racecheck_is_believed_where_it_knows_the_barriers() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().to_path_buf();
        let of_grid =
            "=========     and Read access at tch_extension::recurrent::grid::sum() in product.h:9";
        let other = "========= Error: Write access at tch_extension::sums() in cuda.cu:3";
        for (tool, finding, is_good) in [
            ("racecheck", of_grid, true),
            ("racecheck", other, false),
            ("memcheck", of_grid, false),
            ("synccheck", "", true),
        ] {
            let (good, text) = sanitize(&folder, &["many"], tool, finding);
            assert_eq!(good, is_good, "{tool}, {finding}: {text}");
            assert!(text.contains(&format!("{tool:<16} many")), "{text}");
            assert_eq!(
                text.contains("1 in lltm's grids left out"),
                tool == "racecheck" && is_good,
                "{text}"
            );
        }
    }
}
