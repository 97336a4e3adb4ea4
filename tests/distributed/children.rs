//! Ranks as processes: this test program itself, which runs one test with arguments.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a child got.
pub struct ThisChild(Vec<String>);

impl ThisChild {
    pub fn arguments(&self) -> &[String] {
        &self.0
    }
}

const VARIABLE: &str = "TCH_EXTENSION_TEST_CHILD";

/// The arguments, if this process was started to run this test.
pub fn this_child(test: &str) -> Option<ThisChild> {
    let text = std::env::var(VARIABLE).ok()?;
    let mut parts = text.split('\n').map(str::to_string);
    let name = parts.next()?;
    name.ends_with(test).then(|| ThisChild(parts.collect()))
}

/// Ends this process as `kill -9` does.
pub fn kill_this() -> ! {
    let id = std::process::id().to_string();
    let _ = Command::new("kill").args(["-9", &id]).status();
    unreachable!("it was killed")
}

/// A process, which is killed when it is dropped.
pub struct Child {
    process: std::process::Child,
}

/// How a child ended.
pub struct End {
    pub success: bool,
    pub signal: Option<i32>,
    pub output: String,
}

impl Child {
    /// Runs a test of this program, by its full name, in a process of its own.
    pub fn start(test: &str, arguments: &[String]) -> Child {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(VARIABLE, format!("{test}\n{}", arguments.join("\n")))
            .env("OMP_NUM_THREADS", "1");
        Child::spawn(command)
    }

    pub fn spawn(mut command: Command) -> Child {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Child { process: command.spawn().expect("a process") }
    }

    /// Waits, and kills the process after this time. Its output must fit into the pipes.
    pub fn wait(mut self, timeout: Duration) -> End {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("a status") {
                break Some(status);
            }
            if begin.elapsed() > timeout {
                let _ = self.process.kill();
                let _ = self.process.wait();
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut output = String::new();
        if status.is_none() {
            output.push_str("killed at its deadline: ");
        }
        if let Some(stdout) = &mut self.process.stdout {
            let _ = stdout.read_to_string(&mut output);
        }
        if let Some(stderr) = &mut self.process.stderr {
            let _ = stderr.read_to_string(&mut output);
        }
        End {
            success: status.is_some_and(|status| status.success()),
            signal: status.and_then(|status| status.signal()),
            output,
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
