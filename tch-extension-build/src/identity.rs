//! What a compiler is: its version, the programs that it runs, and what it would search and compile for.

use crate::compile::{Job, Language};
use crate::content::{digest, resolve};
use crate::objects::TOOLKIT;
use crate::search::searched;
use std::path::Path;
use std::process::{Command, Stdio};

/// The flags that choose the compiler and what it makes, without folders, macros and GPUs.
pub(crate) fn flags_of_compiler(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut flags = arguments.iter();
    while let Some(flag) = flags.next() {
        if ["-isystem", "-I", "-D", "-U", "-gencode", "-arch", "-code"].contains(&flag.as_str()) {
            flags.next();
        } else if flag.starts_with("-X") {
            // The next one is for a program that the compiler runs.
            kept.push(flag.clone());
            if !flag.contains('=') {
                kept.extend(flags.next().cloned());
            }
        } else if !["-I", "-D", "-U", "-gencode=", "-arch=", "-code=", "-ffile-prefix-map="]
            .iter()
            .any(|start| flag.starts_with(start))
        {
            kept.push(flag.clone());
        }
    }
    kept
}

/// What the compiler says of itself and of the folders that it searches, for an empty file.
pub(crate) fn asked(job: &Job, flags: &[String]) -> Option<String> {
    let question: &[&str] = match job.language {
        Language::Cxx => &["-E", "-v", "-x", "c++", "/dev/null"],
        Language::Cuda => &["-E", "-Xcompiler", "-v", "-x", "cu", "/dev/null"],
    };
    let mut command = Command::new(&job.program);
    command.args(flags).args(question).env("LC_ALL", "C").stdin(Stdio::null());
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (!searched(&text).is_empty()).then_some(text)
}

/// The compiler: its version, the features of the processor that it compiles for (`-march=native`
/// means others on each machine), the folders that it searches by itself, and the programs that it
/// runs.
pub(crate) fn identity(job: &Job, flags: &[String]) -> Option<String> {
    let report = asked(job, flags)?;
    let mut parts = Vec::new();
    match job.language {
        Language::Cxx => {
            let programs = [&job.program, &job.compiler].map(|path| program(path));
            parts.extend(programs.into_iter().flatten());
            for name in ["cc1plus", "as"] {
                let output = Command::new(&job.compiler)
                    .arg(format!("-print-prog-name={name}"))
                    .output()
                    .ok()?;
                let path = String::from_utf8_lossy(&output.stdout).trim().to_string();
                parts.push(format!("{name} {:?}", length(Path::new(&path))));
            }
        }
        Language::Cuda => {
            let output = Command::new(&job.program).arg("--version").output().ok()?;
            parts.push(String::from_utf8_lossy(&output.stdout).into_owned());
            let real = resolve(&job.program)?.canonicalize().ok()?;
            let home = real.parent().and_then(Path::parent)?;
            for tool in ["bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc"] {
                parts.push(format!("{tool} {:?}", length(&home.join(tool))));
            }
            // Its flags, and headers that its last step includes and its list leaves out.
            for file in
                ["bin/nvcc.profile", "include/crt/host_runtime.h", "include/fatbinary_section.h"]
            {
                let text = std::fs::read(home.join(file)).unwrap_or_default();
                parts.push(digest([&text[..]]));
            }
        }
    }
    let toolkit = job.roots.iter().find(|(name, _)| *name == TOOLKIT);
    let report = match toolkit {
        Some((name, folder)) => report.replace(&folder.display().to_string(), name),
        None => report,
    };
    Some(format!("{}\n{report}", parts.join("\n")))
}

/// A program that may be a script around a compiler: its contents, or its length if it is large.
fn program(path: &Path) -> Option<String> {
    const LARGE: u64 = 4 << 20;
    let path = resolve(path)?;
    match length(&path)? {
        length if length > LARGE => Some(length.to_string()),
        _ => Some(digest([&std::fs::read(path).ok()?[..]])),
    }
}

fn length(path: &Path) -> Option<u64> {
    path.metadata().ok().map(|file| file.len())
}
