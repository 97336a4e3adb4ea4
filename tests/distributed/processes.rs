//! Ranks as child processes of this test program, which is started again for each of them.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tch_extension::Result;

/// The variable that tells a child what to do.
const CASE: &str = "TCH_EXTENSION_TEST_CASE";

/// Ranks that run.
pub struct Ranks {
    children: Vec<Child>,
    texts: Vec<Arc<Mutex<String>>>,
    readers: Vec<JoinHandle<()>>,
    started: Instant,
}

/// How a rank ended.
#[derive(Debug)]
pub struct End {
    /// What it printed.
    pub text: String,
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// When, since all were started.
    pub after: Duration,
}

/// A port of this machine that is free at the moment. It is none of those that the system gives to
/// connections, or another rank's connection could take it before the server does.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const PORTS: u16 = 12_000;
    let start = (std::process::id().wrapping_mul(97) % u32::from(PORTS)) as u16;
    loop {
        let offset = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % PORTS;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", 20_000 + offset)) {
            return listener.local_addr().expect("an address").port();
        }
    }
}

impl Ranks {
    /// Starts these ranks of `size` with the variables of a launcher; a variable of `vars` wins. Where
    /// not each rank can have a GPU of its own, none has one.
    pub fn start(case: &str, ranks: &[usize], size: usize, vars: &[(&str, &str)]) -> Ranks {
        let port = free_port().to_string();
        let (mut children, mut texts, mut readers) = (Vec::new(), Vec::new(), Vec::new());
        for rank in ranks {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.args(["processes::child", "--exact", "--nocapture", "--test-threads=1"]);
            command.env(CASE, case).env("RANK", rank.to_string());
            command.env("WORLD_SIZE", size.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            if (size as i64) > tch::Cuda::device_count() {
                command.env("CUDA_VISIBLE_DEVICES", "");
            }
            command.envs(vars.iter().copied());
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().expect("this program, again");
            let text = Arc::new(Mutex::new(String::new()));
            let out: Box<dyn Read + Send> = Box::new(child.stdout.take().expect("its output"));
            let err: Box<dyn Read + Send> = Box::new(child.stderr.take().expect("its errors"));
            for pipe in [out, err] {
                let text = Arc::clone(&text);
                readers.push(std::thread::spawn(move || {
                    for line in BufReader::new(pipe).lines().map_while(std::result::Result::ok) {
                        *text.lock().unwrap() += &(line + "\n");
                    }
                }));
            }
            children.push(child);
            texts.push(text);
        }
        Ranks { children, texts, readers, started: Instant::now() }
    }

    /// Waits until a rank has printed these words.
    pub fn wait_for(&self, index: usize, words: &str) {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.texts[index].lock().unwrap().contains(words) {
            assert!(Instant::now() < end, "{}", self.texts[index].lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills a rank without a warning.
    pub fn kill(&mut self, index: usize) {
        self.children[index].kill().expect("a process to kill");
    }

    /// Waits for all ranks. One that has not ended in time is a failure.
    pub fn finish(mut self, deadline: Duration) -> Vec<End> {
        let mut ends: Vec<Option<(Option<i32>, Duration)>> = vec![None; self.children.len()];
        while ends.iter().any(Option::is_none) {
            for (child, end) in self.children.iter_mut().zip(&mut ends) {
                if end.is_none()
                    && let Some(status) = child.try_wait().expect("a child")
                {
                    *end = Some((status.code(), self.started.elapsed()));
                }
            }
            let texts = || -> Vec<_> {
                self.texts.iter().map(|text| text.lock().unwrap().clone()).collect()
            };
            assert!(self.started.elapsed() < deadline, "a rank hangs: {:#?}", texts());
            std::thread::sleep(Duration::from_millis(5));
        }
        for reader in self.readers.drain(..) {
            reader.join().expect("a reader");
        }
        let texts = self.texts.iter().map(|text| text.lock().unwrap().clone());
        texts
            .zip(ends)
            .filter_map(|(text, end)| end.map(|(code, after)| End { text, code, after }))
            .collect()
    }
}

impl Drop for Ranks {
    /// Leaves no process behind when a test fails.
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a child does, by the name of the case.
pub type Case = (&'static str, fn() -> Result<()>);

/// The beginning of a child. In the test program itself it does nothing.
#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let cases = [
        super::cuda::CASES,
        super::faults::CASES,
        super::group::CASES,
        super::replay_faults::CASES,
        super::sharded::CASES,
        super::stalls::CASES,
    ];
    let run = cases.into_iter().flatten().find(|(name, _)| *name == case);
    let (_, run) = run.unwrap_or_else(|| panic!("no case {case}"));
    let code = match run() {
        Ok(()) => 0,
        Err(error) => {
            println!("ERROR {error}");
            3
        }
    };
    std::process::exit(code);
}
