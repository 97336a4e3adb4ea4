//! Starts other programs and reads their output.

use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::process::{Command, Output, Stdio};

/// A command that reads nothing from the terminal.
pub fn command(program: impl AsRef<OsStr>, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs a program to its end; `None` when there is no such program.
pub fn output(program: impl AsRef<OsStr>, args: &[&str]) -> Result<Option<Output>> {
    match command(&program, args).output() {
        Ok(output) => Ok(Some(output)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(error).with_context(|| format!("cannot run {}", program.as_ref().to_string_lossy()))
        }
    }
}

/// What a program prints on stdout; `None` when it is missing or fails.
pub fn stdout(program: impl AsRef<OsStr>, args: &[&str]) -> Option<String> {
    let output = command(program, args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// The first line of what a program prints on stdout.
pub fn first_line(program: impl AsRef<OsStr>, args: &[&str]) -> Option<String> {
    stdout(program, args)?.lines().next().map(str::to_string)
}

/// The last line that is not empty: most programs end with their reason.
pub fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .unwrap_or("no message")
        .to_string()
}

/// The free space, in GiB, of the file system that holds an existing folder.
pub fn free_gib(folder: &std::path::Path) -> Option<f64> {
    let output = command("df", &["-Pk"]).arg(folder).output().ok()?;
    parse_df(&String::from_utf8_lossy(&output.stdout))
}

fn parse_df(text: &str) -> Option<f64> {
    let kib: f64 = text.lines().nth(1)?.split_whitespace().nth(3)?.parse().ok()?;
    Some(kib / (1024.0 * 1024.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_free_space() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/vda 264212084 18820928 10485760 20% /\n";
        assert_eq!(parse_df(text), Some(10.0));
        assert_eq!(parse_df(""), None);
    }

    #[test]
    fn the_reason_is_the_last_line_that_is_not_blank() {
        assert_eq!(last_line(b"a\nb \n\n"), "b");
        assert_eq!(last_line(b""), "no message");
    }

    #[test]
    fn a_missing_program_is_no_error_of_its_own() {
        assert!(output("no-such-program-here", &[]).unwrap().is_none());
        assert_eq!(stdout("no-such-program-here", &[]), None);
    }
}
