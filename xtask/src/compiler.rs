//! The C++ compiler that build scripts will use.

use crate::programs;
use crate::report::trouble;
use anyhow::Result;
use std::io::Write;
use std::process::{Command, Stdio};

/// A C++17 compiler that works.
pub struct Compiler {
    /// The command, as one would write it in CXX.
    pub command: String,
    /// Whether CXX must be set for build scripts, because they would otherwise try only `c++`.
    pub must_be_named: bool,
}

impl Compiler {
    /// The first line that the compiler prints about itself, such as `g++ (Debian 12.2.0-14)
    /// 12.2.0`.
    pub fn version(&self) -> String {
        let (program, args) = split(&self.command);
        let args: Vec<&str> = args.into_iter().chain(["--version"]).collect();
        programs::first_line(program, &args).unwrap_or_else(|| "version unknown".to_string())
    }
}

/// Finds the compiler: CXX if it is set, otherwise the first of the usual names that exists. An
/// error unless that one works.
pub fn find(cxx: Option<&str>) -> Result<Compiler> {
    if let Some(command) = cxx.filter(|command| !command.trim().is_empty()) {
        return match try_compile(command) {
            None => Err(trouble(
                format_args!("no C++ compiler: CXX is `{command}`, and there is no such program"),
                "unset CXX, or set it to a C++17 compiler such as g++",
            )),
            Some(outcome) => {
                outcome.map(|()| Compiler { command: command.to_string(), must_be_named: false })
            }
        };
    }
    for command in ["c++", "g++", "clang++"] {
        if let Some(outcome) = try_compile(command) {
            return outcome.map(|()| Compiler {
                command: command.to_string(),
                must_be_named: command != "c++",
            });
        }
    }
    Err(trouble(
        "no C++ compiler: tried CXX, c++, g++ and clang++",
        "install one (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`), or set CXX to its \
         path",
    ))
}

/// Compiles a two-line C++17 program, because a compiler can be installed without its standard
/// library, or be too old. `None` when there is no such program.
fn try_compile(command: &str) -> Option<Result<()>> {
    let (program, args) = split(command);
    let child = Command::new(program)
        .args(args)
        .args(["-std=c++17", "-fsyntax-only", "-x", "c++", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.ok()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A compiler that exits at once closes the pipe; its exit status then reports the failure.
        let _ = stdin.write_all(b"#include <optional>\nstd::optional<int> x;\n");
    }
    let output = child.wait_with_output().ok()?;
    Some(if output.status.success() { Ok(()) } else { Err(broken(command, &output.stderr)) })
}

fn broken(command: &str, stderr: &[u8]) -> anyhow::Error {
    let text = String::from_utf8_lossy(stderr);
    let reason = text.lines().find(|line| line.contains("error")).unwrap_or("no message").trim();
    trouble(
        format_args!("the C++ compiler `{command}` cannot compile C++17: {reason}"),
        "install a C++17 compiler with its standard library (Debian, Ubuntu: `apt install g++`), or name \
         one in CXX",
    )
}

/// Splits the program from its arguments: CXX may hold arguments, or a wrapper such as ccache
/// before the compiler.
pub fn split(command: &str) -> (&str, Vec<&str>) {
    let mut words = command.split_whitespace();
    (words.next().unwrap_or(command), words.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_cxx_is_named() {
        let message = format!("{:#}", find(Some("/no/such/c++ -m64")).err().unwrap());
        assert!(message.contains("CXX is `/no/such/c++ -m64`"), "{message}");
        assert!(message.contains("way out"), "{message}");
    }

    #[test]
    fn a_program_that_is_no_compiler_is_named() {
        let message = format!("{:#}", find(Some("false")).err().unwrap());
        assert!(message.contains("`false` cannot compile C++17"), "{message}");
    }

    #[test]
    fn a_wrapper_keeps_its_arguments() {
        assert_eq!(split("ccache g++ -m64"), ("ccache", vec!["g++", "-m64"]));
    }
}
