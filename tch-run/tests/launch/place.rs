//! A folder in which a test starts tch-run, and what came out.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The deadline of a run that waits for nothing.
pub const SOON: Duration = Duration::from_secs(20);

pub fn tch_run() -> Command {
    // The bundle's script sets the variable where there is no cargo.
    match std::env::var_os("TCH_EXTENSION_EXAMPLES") {
        Some(folder) => Command::new(PathBuf::from(folder).join("tch-run")),
        None => Command::new(env!("CARGO_BIN_EXE_tch-run")),
    }
}

/// The script runs in this folder, which scripts use to leave notes.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Place {
        Place(TempDir::new().unwrap())
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// tch-run with these options, whose program is a shell script.
    pub fn command(&self, options: &[&str], script: &str) -> Command {
        let mut command = tch_run();
        command.args(options).args(["--", "sh", "-c", script]).current_dir(self.folder());
        // A tch-run that is killed leaves its files.
        command.env("TMPDIR", self.folder());
        command
    }

    pub fn run(&self, options: &[&str], script: &str) -> Done {
        finish(self.command(options, script), SOON)
    }

    /// The lines of a run that succeeds, sorted.
    pub fn lines(&self, options: &[&str], script: &str) -> Vec<String> {
        let done = self.run(options, script);
        assert_eq!(done.code, 0, "{}", done.err);
        let mut lines: Vec<String> = done.out.lines().map(String::from).collect();
        lines.sort();
        lines
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Waits until a script has written a line to a file.
    pub fn wait_for(&self, name: &str) -> String {
        wait_until(&format!("{name} is written"), || self.read(name).ends_with('\n'));
        self.read(name).trim().to_string()
    }
}

/// What a program printed, and its exit code.
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
    pub time: Duration,
}

/// Runs a command to its end, which must come before the deadline.
pub fn finish(mut command: Command, deadline: Duration) -> Done {
    finish_child(start(&mut command), deadline)
}

/// Starts a command whose output is kept.
pub fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn finish_child(mut child: Child, deadline: Duration) -> Done {
    let begun = Instant::now();
    let out = read_aside(child.stdout.take().unwrap());
    let err = read_aside(child.stderr.take().unwrap());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it did not end within {deadline:?}; stderr: {}", err.join().unwrap());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let time = begun.elapsed();
    let code = status.code().unwrap_or(-1);
    Done { code, out: out.join().unwrap(), err: err.join().unwrap(), time }
}

fn read_aside(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < SOON, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to a process by its number.
pub fn signal(name: &str, pid: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), pid]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
}

/// Whether a process runs. A zombie does not.
pub fn runs(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = status.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z' && state != 'X')
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}
