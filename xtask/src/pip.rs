//! Finds or makes a pip, installs pinned wheels with it, and explains its failures.

use crate::libtorch::WANTED;
use crate::programs;
use crate::report::{say, trouble};
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};

/// The first version of pip that accepts `--platform` more than once.
const OLDEST: (u32, u32) = (20, 3);

/// The platform of the wheels, independent of the Python that runs pip. Only tests run Python code in
/// them, so their Python version need not be the user's.
pub const PYTHON_VERSION: &str = "3.11";
const NEWEST_GLIBC: u32 = 28;
const OLDEST_GLIBC: u32 = 5;

/// What the user can do instead when pip cannot be used at all.
const OR_LIBTORCH: &str = "or set LIBTORCH=/path/to/libtorch";

/// A Python that has a pip.
pub struct Pip {
    /// The command that starts the Python.
    pub python: PathBuf,
    /// The line that pip prints about itself, such as `pip 23.2.1 from …`.
    pub version: String,
}

impl Pip {
    /// Returns the pip of `python3`, or else the pip of a virtual environment at `venv`, which is
    /// made if need be.
    pub fn find_or_make(venv: &Path) -> Result<Self> {
        let python = python()?;
        if let Some(pip) =
            Self::of(Path::new("python3")).or_else(|| Self::of(&venv.join("bin/python")))
        {
            return Ok(pip);
        }
        make_venv(venv, &python)?;
        Self::of(&venv.join("bin/python"))
            .with_context(|| format!("the pip in {} does not work", venv.display()))
    }

    /// The pip of this Python, if there is one and it is new enough.
    pub fn of(python: &Path) -> Option<Self> {
        let version = programs::first_line(python, &["-m", "pip", "--version"])?;
        let new_enough = parse_version(&version)? >= OLDEST;
        new_enough.then(|| Pip { python: python.to_path_buf(), version })
    }

    /// Installs the pins into `target`, which must be absent or empty.
    ///
    /// `lock` becomes pip's stdin, which pip does not read. An open file keeps its lock, so if only
    /// xtask is killed, the next set-up still waits until this pip has ended.
    pub fn install(&self, pins: &Path, target: &Path, tmp: &Path, lock: &File) -> Result<()> {
        let mut child = self
            .install_command(pins, target, tmp)
            .stdin(lock.try_clone()?)
            // Progress belongs on stderr, as cargo's does. pip draws its progress bar when that is
            // a terminal.
            .stdout(std::io::stderr().as_fd().try_clone_to_owned()?)
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", self.python.display()))?;
        let lines = child.stderr.take().map(collect).unwrap_or_default();
        if child.wait()?.success() {
            return Ok(());
        }
        Err(explain(&lines, pins))
    }

    fn install_command(&self, pins: &Path, target: &Path, tmp: &Path) -> Command {
        let mut command = Command::new(&self.python);
        command.args(["-m", "pip", "install", "--no-deps", "--no-compile", "--only-binary=:all:"]);
        command.args([
            "--python-version",
            PYTHON_VERSION,
            "--implementation",
            "cp",
            "--abi",
            "cp311",
        ]);
        for platform in platforms() {
            command.arg("--platform").arg(platform);
        }
        command.arg("--target").arg(target).arg("--requirement").arg(pins);
        command
            // pip first unpacks gigabytes into this folder. The default folder is often too small,
            // and within one file system the move to `target` costs nothing.
            .env("TMPDIR", tmp)
            // Override settings of the user's that contradict --target.
            .env("PIP_USER", "0")
            .env("PIP_REQUIRE_VIRTUALENV", "0")
            .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
            .env("PIP_NO_INPUT", "1")
            .env("PYTHONUNBUFFERED", "1");
        command
    }
}

/// The version of `python3`; an error when there is none that runs.
pub fn python() -> Result<String> {
    let version = programs::first_line("python3", &["--version"]);
    version.ok_or_else(|| {
        trouble(
            "python3 was not found, or does not run; its pip is what fetches libtorch and nvcc",
            format_args!(
                "install Python 3 with pip (Debian, Ubuntu: `apt install python3-pip`; Fedora: `dnf install \
                 python3-pip`), {OR_LIBTORCH} (version {WANTED})"
            ),
        )
    })
}

fn make_venv(venv: &Path, python: &str) -> Result<()> {
    say("note: python3 has no pip that can be used; making one in .venv/pip");
    // Remove what an earlier attempt left.
    let _ = std::fs::remove_dir_all(venv);
    let made = programs::command("python3", &["-m", "venv"]).arg(venv).output()?;
    let executable = venv.join("bin/python");
    if made.status.success() && Pip::of(&executable).is_none() {
        // An old Python brings an old pip.
        let _ =
            programs::output(&executable, &["-m", "pip", "install", "--quiet", "--upgrade", "pip"]);
    }
    if Pip::of(&executable).is_some() {
        return Ok(());
    }
    let _ = std::fs::remove_dir_all(venv);
    bail!(trouble(
        format_args!(
            "no pip: `python3 -m pip` ({python}) is missing or older than {}.{}, and `python3 -m venv` \
             could not make one",
            OLDEST.0, OLDEST.1
        ),
        format_args!(
            "install it (Debian, Ubuntu: `apt install python3-pip`; Fedora: `dnf install python3-pip`), \
             {OR_LIBTORCH} (version {WANTED})"
        ),
    ))
}

/// Parses `pip 23.2.1 from …` into (23, 2).
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let version = text.split_whitespace().nth(1)?;
    let mut parts = version.split('.');
    Some((
        parts.next()?.parse().ok()?,
        parts.next().and_then(|minor| minor.parse().ok()).unwrap_or(0),
    ))
}

fn platforms() -> impl Iterator<Item = String> {
    let by_glibc =
        (OLDEST_GLIBC..=NEWEST_GLIBC).rev().map(|minor| format!("manylinux_2_{minor}_x86_64"));
    by_glibc.chain(["manylinux2014_x86_64", "manylinux1_x86_64"].map(String::from))
}

/// Reads pip's warnings and errors. They are collected for the one message at the end; only pip's
/// retries are announced at once.
fn collect(stderr: ChildStderr) -> Vec<String> {
    let mut lines = Vec::new();
    let mut announced = false;
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim().to_string();
        if line.contains("Retrying") && !announced {
            say("note: the package index does not answer; pip tries again");
            announced = true;
        }
        lines.push(line);
    }
    lines
}

/// Makes one message from pip's many lines.
fn explain(lines: &[String], pins: &Path) -> anyhow::Error {
    let last_error = lines.iter().rev().find(|line| line.starts_with("ERROR:"));
    let reason = last_error.or_else(|| lines.iter().rev().find(|line| !line.is_empty()));
    let reason = reason.map_or("it gave no reason", |line| line.trim_start_matches("ERROR: "));
    let what = format!("pip could not install what {} lists: {reason}", pins.display());
    if lines.iter().any(|line| line.contains("No space left")) {
        return trouble(
            what,
            "free some space, or make `.venv` a link to a folder on a larger disk",
        );
    }
    let what = match lines.iter().find_map(|line| connection_trouble(line)) {
        Some(cause) => format!("{what}\n  network: {cause}"),
        None => what,
    };
    trouble(
        what,
        format_args!(
            "see that the network works and run the command again; or point PIP_INDEX_URL to a mirror, or \
             PIP_FIND_LINKS to a folder with the wheels; {OR_LIBTORCH} (version {WANTED}), with which \
             nothing is downloaded"
        ),
    )
}

/// Extracts the cause from pip's `Retrying (…) after connection broken by '…': /path`.
fn connection_trouble(line: &str) -> Option<&str> {
    let (_, cause) = line.split_once("after connection broken by ")?;
    let cause = cause.rsplit_once(": /").map_or(cause, |(cause, _)| cause);
    // The cause may begin with the address of a Python object, which ends in `>: `.
    Some(
        cause
            .rsplit_once(">: ")
            .map_or(cause, |(_, cause)| cause)
            .trim_matches(['\'', '"', '(', ')']),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_string).collect()
    }

    #[test]
    fn reads_pips_version() {
        assert_eq!(parse_version("pip 23.2.1 from /usr/lib/python3 (python 3.11)"), Some((23, 2)));
        assert_eq!(parse_version("pip 9"), Some((9, 0)));
        assert_eq!(parse_version("No module named pip"), None);
        assert!((9, 9) < OLDEST && OLDEST < (21, 0));
    }

    #[test]
    fn platforms_go_from_new_to_old() {
        let all: Vec<_> = platforms().collect();
        assert_eq!(all.first().map(String::as_str), Some("manylinux_2_28_x86_64"));
        assert!(all.contains(&"manylinux_2_5_x86_64".to_string()));
        assert_eq!(all.len(), 26);
    }

    #[test]
    fn no_network_is_one_message_with_its_cause() {
        let said = lines(
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('<pip.Connection object at 0x7f>: Temporary failure in name resolution')': /simple/torch/\n\
             ERROR: Could not find a version that satisfies the requirement torch==2.11.0 (from versions: none)\n\
             ERROR: No matching distribution found for torch==2.11.0\n",
        );
        let message = explain(&said, Path::new("pins.txt")).to_string();
        let parts = [
            "No matching distribution",
            "Temporary failure in name resolution",
            "PIP_INDEX_URL",
            "LIBTORCH=",
        ];
        for part in parts {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
        assert!(!message.contains("Retrying") && !message.contains("0x7f"), "{message}");
    }

    #[test]
    fn a_full_disk_is_not_blamed_on_the_network() {
        let said = lines(
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        );
        let message = explain(&said, Path::new("pins.txt")).to_string();
        assert!(message.contains("free some space") && !message.contains("network"), "{message}");
    }

    #[test]
    fn a_silent_failure_still_says_something() {
        assert!(explain(&[], Path::new("pins.txt")).to_string().contains("gave no reason"));
    }
}
