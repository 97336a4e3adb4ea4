//! Reports what was found, what does not fit together, and the exact fix. Installs nothing.

use crate::cache;
use crate::compiler;
use crate::cuda::{self, Cuda, Search};
use crate::libtorch::{self, Libtorch, Rule};
use crate::pip::{self, Pip};
use crate::place;
use crate::programs::{first_line, free_gib, stdout};
use crate::repo::Repo;
use crate::report;
use crate::setup::{self, Ready, real_env};
use crate::wheels;
use anyhow::Result;
use std::path::Path;
use std::process::ExitCode;

/// The rows of the report and the problems found.
#[derive(Default)]
struct Findings {
    rows: Vec<(&'static str, String)>,
    problems: Vec<String>,
}

impl Findings {
    fn row(&mut self, name: &'static str, value: impl Into<String>) {
        self.rows.push((name, value.into()));
    }

    /// Adds a row for what was found, or adds the problem, which is printed in full below the
    /// table.
    fn check(&mut self, name: &'static str, outcome: Result<String>) {
        match outcome {
            Ok(value) => self.row(name, value),
            Err(error) => {
                self.row(name, "PROBLEM, see below");
                self.problems.push(format!("{error:#}"));
            }
        }
    }

    fn text(&self) -> String {
        let mut text = table(&self.rows);
        for problem in &self.problems {
            text += &format!("\nproblem: {problem}\n");
        }
        text + if self.problems.is_empty() { "\nall is well\n" } else { "" }
    }
}

/// Prints the report. The exit status is 1 if there is any problem.
pub fn run(repo: &Repo) -> Result<ExitCode> {
    let mut findings = Findings::default();
    check_machine(&mut findings, repo);
    check_tools(&mut findings);
    findings.check("compile cache", cache::describe());
    check_libtorch(&mut findings, repo);
    check_costs(&mut findings, repo);
    report::print(&findings.text());
    Ok(if findings.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Says for each GPU where the costs come from by which operators choose their kernels.
fn check_costs(findings: &mut Findings, repo: &Repo) {
    let names = stdout("nvidia-smi", &["--query-gpu=name", "--format=csv,noheader"]);
    let mut names: Vec<String> = names.unwrap_or_default().lines().map(String::from).collect();
    names.dedup();
    let shipped = texts(&repo.root.join("src/ops/costs"));
    let measured =
        place::folder(None).map(|folder| texts(&folder.join("costs"))).unwrap_or_default();
    for name in names {
        findings.row("costs", costs_of(&name, &measured, &shipped));
    }
}

/// The texts of all tables in a folder.
fn texts(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    let tables = files.filter(|path| path.extension().is_some_and(|extension| extension == "txt"));
    tables.filter_map(|path| std::fs::read_to_string(path).ok()).collect()
}

fn costs_of(name: &str, measured: &[String], shipped: &[String]) -> String {
    let line = format!("card = {name}");
    let has = |tables: &[String]| tables.iter().any(|text| text.lines().any(|of| of == line));
    match (has(measured), has(shipped)) {
        (true, _) => format!("{name}: measured here, if libtorch and CUDA are still those"),
        (_, true) => format!("{name}: its table is part of tch-extension"),
        _ => format!("{name}: untuned; `cargo xtask tune` measures it in 5 minutes"),
    }
}

/// The summary with which `setup` ends.
pub fn summary(ready: &Ready) -> String {
    let cuda = match &ready.cuda {
        Cuda::On(nvcc) => {
            format!("CUDA {} ({}, found by {})", nvcc.version, nvcc.path.display(), nvcc.source)
        }
        Cuda::Off(reason) => format!("left out: {reason}"),
    };
    table(&[("libtorch", describe_libtorch(&ready.libtorch)), ("CUDA kernels", cuda)])
}

fn table(rows: &[(&str, String)]) -> String {
    rows.iter().map(|(name, value)| format!("{name:<14}{value}\n")).collect()
}

fn check_machine(findings: &mut Findings, repo: &Repo) {
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let system = system
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .unwrap_or("unknown system");
    let platform = format!(
        "{} {}, {}",
        std::env::consts::OS,
        std::env::consts::ARCH,
        system.trim_matches('"')
    );
    findings.check("platform", setup::check_platform().map(|()| platform));
    let glibc =
        first_line("getconf", &["GNU_LIBC_VERSION"]).unwrap_or_else(|| "unknown".to_string());
    findings.check("C library", setup::check_glibc().map(|()| glibc));
    let free = free_gib(&repo.root).map_or("unknown".to_string(), |free| format!("{free:.0} GiB"));
    findings.row("free disk", format!("{free} in {}", repo.root.display()));
    findings.row("GPU", gpus());
}

fn gpus() -> String {
    let query = ["--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"];
    match stdout("nvidia-smi", &query) {
        Some(text) if !text.is_empty() => text.lines().collect::<Vec<_>>().join("; "),
        _ => "none seen (no nvidia-smi, or it fails): kernels are compiled, GPU tests skip"
            .to_string(),
    }
}

fn check_tools(findings: &mut Findings) {
    let unknown = || "unknown".to_string();
    findings.row("rustc", first_line("rustc", &["--version"]).unwrap_or_else(unknown));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    findings.row("cargo", first_line(cargo, &["--version"]).unwrap_or_else(unknown));
    let cxx = std::env::var("CXX").ok();
    let compiler = compiler::find(cxx.as_deref());
    findings.check(
        "C++ compiler",
        compiler.map(|found| format!("{}: {}", found.command, found.version())),
    );
}

/// pip matters only when something still has to be installed.
fn check_pip(findings: &mut Findings, repo: &Repo) {
    let pip =
        Pip::of(Path::new("python3")).or_else(|| Pip::of(&repo.venv().join("pip/bin/python")));
    let pip = pip.map_or("no pip; set-up tries `python3 -m venv`".to_string(), |pip| pip.version);
    findings.check("python3", pip::python().map(|python| format!("{python}, {pip}")));
}

fn check_libtorch(findings: &mut Findings, repo: &Repo) {
    let rule = libtorch::choose(&real_env, repo);
    findings.row("which", rule.to_string());
    if rule == Rule::Own {
        let missing = wheels::LIBTORCH.missing(repo);
        if !matches!(missing, Ok(None)) {
            check_pip(findings, repo);
        }
        let complete = missing.and_then(|missing| match missing {
            None => Ok("complete".to_string()),
            Some(why) => Err(report::trouble(
                format_args!("set-up is not complete: {why}"),
                "`cargo xtask setup`",
            )),
        });
        let is_complete = complete.is_ok();
        findings.check("set-up", complete);
        if !is_complete {
            return;
        }
    }
    let located = Libtorch::locate(rule, &real_env, repo);
    let checked = located.and_then(|libtorch| libtorch.check_version(&real_env).map(|()| libtorch));
    match checked {
        Ok(libtorch) => {
            findings.row("libtorch", describe_libtorch(&libtorch));
            check_cuda(findings, &libtorch, repo);
            findings.row("distributed", distributed(&libtorch));
        }
        Err(error) => findings.check("libtorch", Err(error)),
    }
}

fn describe_libtorch(libtorch: &Libtorch) -> String {
    let version = libtorch.version().unwrap_or_else(|| "of unknown version".to_string());
    let cuda = crate::probe::libtorch_cuda_major(&libtorch.lib);
    let cuda = cuda.map_or("without CUDA".to_string(), |major| format!("with CUDA {major}"));
    format!("{version} {cuda} ({})", libtorch.lib.display())
}

fn check_cuda(findings: &mut Findings, libtorch: &Libtorch, repo: &Repo) {
    let search = Search::run(libtorch, &real_env, repo);
    let nvcc = search.found.as_ref().map(|nvcc| {
        format!("{} ({}, found by {})", nvcc.version, nvcc.path.display(), nvcc.source)
    });
    findings.row("nvcc", nvcc.unwrap_or_else(|| "none".to_string()));
    findings.row("tried", cuda::describe(&search.tried));
    check_driver(findings, search.libtorch_major);
    let wish = std::env::var("TCH_EXTENSION_CUDA").ok();
    let decision = search.decide(wish.as_deref()).map(|decision| match decision {
        Cuda::On(_) => "compiled".to_string(),
        Cuda::Off(reason) => format!("left out: {reason}"),
    });
    findings.check("CUDA kernels", decision);
}

/// What the feature `distributed` can use.
fn distributed(libtorch: &Libtorch) -> String {
    let include = libtorch.lib.join("../include");
    let header = include.join("torch/csrc/distributed/c10d/ProcessGroupGloo.hpp");
    if !header.is_file() {
        return "Gloo: no, this libtorch has no c10d; NCCL: no".to_string();
    }
    let env = |name: &str| real_env(name)?.into_string().ok();
    let nccl = match crate::probe::libtorch_cuda_major(&libtorch.lib) {
        None => "no, this libtorch has no CUDA".to_string(),
        Some(_) => match crate::probe::cuda_header(&libtorch.lib, "nccl.h", &env) {
            None => "no, there is no nccl.h (next to libtorch, or in NCCL_HOME)".to_string(),
            Some(folder) => nccl(&folder, libtorch.version().as_deref()),
        },
    };
    format!("Gloo: yes; NCCL: {nccl}")
}

/// The versions of libtorch and of the NCCL that each was compiled with, as in
/// `csrc/distributed/nccl.cpp`.
const NCCL: [(&str, &str); 2] = [("2.11.0", "2.28.9"), ("2.13.0", "2.29.7")];

/// Whether the `nccl.h` of a folder is the one that libtorch was compiled with.
fn nccl(folder: &Path, libtorch: Option<&str>) -> String {
    let text = std::fs::read_to_string(folder.join("nccl.h")).unwrap_or_default();
    let part = |name: &str| {
        let start = format!("#define NCCL_{name} ");
        text.lines().find_map(|line| line.strip_prefix(&start)).map_or("?", str::trim)
    };
    let found = format!("{}.{}.{}", part("MAJOR"), part("MINOR"), part("PATCH"));
    let wanted = NCCL.iter().find(|(version, _)| Some(*version) == libtorch);
    match wanted {
        Some((_, wanted)) if *wanted == found => format!("yes, {found} ({})", folder.display()),
        Some((_, wanted)) => {
            format!("no, {} has {found}, but libtorch needs {wanted}", folder.display())
        }
        None => format!("unknown for this libtorch ({} has {found})", folder.display()),
    }
}

/// The oldest driver that runs programs of this CUDA major version.
fn oldest_driver(cuda_major: u32) -> Option<u32> {
    match cuda_major {
        11 => Some(450),
        12 => Some(525),
        13 => Some(580),
        _ => None,
    }
}

fn check_driver(findings: &mut Findings, cuda_major: Option<u32>) {
    let Some(driver) =
        first_line("nvidia-smi", &["--query-gpu=driver_version", "--format=csv,noheader"])
    else {
        return;
    };
    let outcome = driver_suits(&driver, cuda_major).map(|()| driver);
    findings.check("GPU driver", outcome);
}

fn driver_suits(driver: &str, cuda_major: Option<u32>) -> Result<()> {
    let major: Option<u32> = driver.split('.').next().and_then(|major| major.parse().ok());
    match (major, cuda_major, cuda_major.and_then(oldest_driver)) {
        (Some(driver_major), Some(cuda), Some(oldest)) if driver_major < oldest => {
            Err(report::trouble(
                format_args!(
                    "the GPU driver {driver} is too old for CUDA {cuda}, with which libtorch was built"
                ),
                format_args!(
                    "install driver {oldest} or newer, or set LIBTORCH to a libtorch of an older CUDA"
                ),
            ))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_stands_below_the_table_with_its_fix() {
        let mut findings = Findings::default();
        findings.row("GPU", "none");
        findings.check("libtorch", Err(report::trouble("no libtorch", "`cargo xtask setup`")));
        let text = findings.text();
        assert!(text.contains("GPU           none\n"), "{text}");
        assert!(
            text.contains("\nproblem: no libtorch\n  way out: `cargo xtask setup`\n"),
            "{text}"
        );
        assert!(!text.contains("all is well"), "{text}");
    }

    #[test]
    fn a_card_without_a_table_is_told() {
        let [h200, l4] = ["NVIDIA H200", "NVIDIA L4"];
        let table = |name: &str| format!("# costs\ncard = {name}\nclock = 1980\n");
        let shipped = [table(h200)];
        assert!(costs_of(h200, &[], &shipped).ends_with("part of tch-extension"));
        assert!(costs_of(h200, &[table(h200)], &shipped).contains("measured here"));
        assert!(costs_of(l4, &[table(h200)], &shipped).contains("untuned; `cargo xtask tune`"));
    }

    #[test]
    fn an_old_driver_is_told() {
        assert!(driver_suits("580.159.03", Some(13)).is_ok());
        assert!(driver_suits("[N/A]", Some(13)).is_ok());
        let message = driver_suits("535.54", Some(13)).err().unwrap().to_string();
        assert!(message.contains("535.54") && message.contains("580"), "{message}");
    }
}
