//! The lines that tch-runs send one another.

use super::coordinator::MOST_RANKS;
use super::{Failure, Order, Plan, Report};
use crate::options::is_run_id;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The version of the lines. Nodes with another one are refused.
pub const VERSION: u32 = 2;
/// A longer line is not one of ours.
const LONGEST: usize = 4096;
/// The line that only says that a node is alive.
const ALIVE: &str = "alive";
/// How long the first line of the other side may take. A tch-run sends it at once.
const FIRST: Duration = Duration::from_secs(10);
/// The longest silence of one that is alive.
const MOST_SILENT: Duration = Duration::from_secs(1);
/// What a member without `--run-id` says in its place.
pub const NO_ID: &str = "-";

/// A member's first line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub version: u32,
    pub nnodes: usize,
    pub node_rank: usize,
    pub processes: usize,
    pub run_id: String,
}

impl Hello {
    pub fn to_line(&self) -> String {
        let Hello { version, nnodes, node_rank, processes, run_id } = self;
        format!("tch-run {version} {nnodes} {node_rank} {processes} {run_id}")
    }

    pub fn parse(line: &str) -> Result<Hello> {
        let mut words = line.split(' ');
        ensure!(words.next() == Some("tch-run"), "it is no tch-run");
        Ok(Hello {
            version: number(&mut words)?,
            nnodes: number(&mut words)?,
            node_rank: number(&mut words)?,
            processes: number(&mut words)?,
            run_id: words.next().context("too few words")?.to_string(),
        })
    }
}

impl Report {
    pub fn to_line(&self) -> String {
        match self {
            Report::Done => "done".to_string(),
            Report::Stopped => "stopped".to_string(),
            Report::Failed(Failure { code, is_final, follows, at, text }) => {
                let [is_final, follows] = [is_final, follows].map(|flag| u8::from(*flag));
                one_line(&format!("failed {code} {is_final} {follows} {at} {text}"))
            }
        }
    }

    pub fn parse(line: &str) -> Result<Report> {
        let mut words = line.splitn(6, ' ');
        match words.next() {
            Some("done") => Ok(Report::Done),
            Some("stopped") => Ok(Report::Stopped),
            Some("failed") => Ok(Report::Failed(Failure {
                code: number(&mut words)?,
                is_final: number::<u8>(&mut words)? != 0,
                follows: number::<u8>(&mut words)? != 0,
                at: number(&mut words)?,
                text: words.next().unwrap_or_default().to_string(),
            })),
            _ => bail!("an unknown report"),
        }
    }
}

impl Order {
    /// The line. A plan's master and node are not in it, because the member knows its own.
    pub fn to_line(&self) -> String {
        match self {
            Order::Start(plan) => format!(
                "start {} {} {} {} {} {}",
                plan.attempt,
                plan.max_restarts,
                plan.run_id,
                plan.port,
                plan.first_rank,
                plan.world_size
            ),
            Order::Stop(text) => one_line(&format!("stop {text}")),
            Order::End(code, text) => one_line(&format!("end {code} {text}")),
        }
    }

    /// `master` is the host, and `hello` is what the member has said.
    pub fn parse(line: &str, master: &str, hello: &Hello) -> Result<Order> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "stop" => Ok(Order::Stop(rest.to_string())),
            "end" => {
                let (code, text) = rest.split_once(' ').unwrap_or((rest, ""));
                Ok(Order::End(code.parse().context("an unknown exit code")?, text.to_string()))
            }
            "start" => {
                let mut words = rest.split(' ');
                let plan = Plan {
                    attempt: number(&mut words)?,
                    max_restarts: number(&mut words)?,
                    run_id: words.next().context("too few words")?.to_string(),
                    master: master.to_string(),
                    port: number(&mut words)?,
                    first_rank: number(&mut words)?,
                    world_size: number(&mut words)?,
                    node_rank: hello.node_rank,
                    nnodes: hello.nnodes,
                };
                ensure!(is_run_id(&plan.run_id) && plan.port != 0, "an order that cannot be");
                let end = plan.first_rank.checked_add(hello.processes);
                let fits = end.is_some_and(|end| end <= plan.world_size);
                ensure!(fits && plan.world_size <= MOST_RANKS, "ranks that cannot be");
                Ok(Order::Start(plan))
            }
            _ => bail!("an unknown order"),
        }
    }
}

fn number<'a, T: std::str::FromStr>(words: &mut impl Iterator<Item = &'a str>) -> Result<T> {
    words.next().and_then(|word| word.parse().ok()).context("a number is missing")
}

/// Cuts a text where it would be too long for a line.
fn one_line(text: &str) -> String {
    text.replace('\n', " ").chars().take(LONGEST / 8).collect()
}

/// The writing side of a connection, which several threads share.
#[derive(Clone)]
pub struct Writer(Arc<Mutex<TcpStream>>);

impl Writer {
    /// Writes a line, or fails after this time.
    pub fn new(stream: &TcpStream, within: Duration) -> Result<Writer> {
        let stream = stream.try_clone()?;
        stream.set_write_timeout(Some(within))?;
        stream.set_nodelay(true)?;
        Ok(Writer(Arc::new(Mutex::new(stream))))
    }

    pub fn line(&self, line: &str) -> Result<()> {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(stream.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Ends the connection for reading, too.
    pub fn close(&self) {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // If the connection is gone already, it need not be ended.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }

    /// Says from now on, until the connection ends, that this side is alive.
    pub fn keep_alive(&self, lost_after: Duration) {
        let writer = self.clone();
        std::thread::spawn(move || {
            while writer.line(ALIVE).is_ok() {
                std::thread::sleep(MOST_SILENT.min(lost_after / 4));
            }
        });
    }
}

/// The lines of a connection, without those that only say that the other side is alive. An error
/// says why there are no more.
pub struct Reader {
    stream: BufReader<TcpStream>,
    lost_after: Duration,
}

impl Reader {
    pub fn new(stream: TcpStream, lost_after: Duration) -> Reader {
        Reader { stream: BufReader::new(stream), lost_after }
    }

    /// The first line, from which it is known whether the other side is a tch-run. `None` if it only
    /// says that it is alive.
    pub fn first(&mut self) -> Result<Option<String>> {
        self.within(FIRST.min(self.lost_after))
    }

    /// The next line. `None` if it only says that the other side is alive.
    pub fn line_or_alive(&mut self) -> Result<Option<String>> {
        self.within(self.lost_after)
    }

    pub fn line(&mut self) -> Result<String> {
        loop {
            if let Some(line) = self.line_or_alive()? {
                return Ok(line);
            }
        }
    }

    fn within(&mut self, time: Duration) -> Result<Option<String>> {
        let line = self.any_line(time)?;
        Ok((line != ALIVE).then_some(line))
    }

    /// A line that arrives as a whole within this time.
    fn any_line(&mut self, within: Duration) -> Result<String> {
        let end = Instant::now() + within;
        let mut line = Vec::new();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let silent = || format!("it was silent for {} s", within.as_secs());
            // A socket takes no timeout of zero.
            self.stream.get_ref().set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let bytes = match self.stream.fill_buf() {
                Ok([]) if line.is_empty() => bail!("its tch-run has ended"),
                Ok([]) => bail!("it sent no whole line"),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if is_timeout(&error) => bail!(silent()),
                Err(error) => return Err(error).context("the connection broke"),
            };
            let newline = bytes.iter().position(|byte| *byte == b'\n');
            let taken = newline.unwrap_or(bytes.len());
            line.extend_from_slice(&bytes[..taken]);
            self.stream.consume(taken + usize::from(newline.is_some()));
            ensure!(line.len() <= LONGEST, "it sent too long a line");
            if newline.is_some() {
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            ensure!(!left.is_zero(), silent());
        }
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_as_they_were() {
        let run_id = "job-7".to_string();
        let hello = Hello { version: 1, nnodes: 2, node_rank: 1, processes: 8, run_id };
        assert_eq!(Hello::parse(&hello.to_line()).unwrap(), hello);
        let text = "rank 3 was killed".to_string();
        let failure = Failure { code: 137, is_final: true, follows: true, at: u64::MAX, text };
        for report in [Report::Done, Report::Stopped, Report::Failed(failure)] {
            assert_eq!(Report::parse(&report.to_line()).unwrap(), report);
        }
        let plan = Plan {
            attempt: 1,
            max_restarts: 3,
            run_id: "job-7".to_string(),
            master: "host".to_string(),
            port: 29_500,
            first_rank: 8,
            world_size: 16,
            node_rank: 1,
            nnodes: 2,
        };
        let ends = [Order::End(0, String::new()), Order::End(7, "a b".to_string())];
        for order in [Order::Start(plan), Order::Stop("a b".to_string())].into_iter().chain(ends) {
            assert_eq!(Order::parse(&order.to_line(), "host", &hello).unwrap(), order);
        }
        // Numbers that do not fit together.
        for numbers in [
            "1 3 job-7 0 8 16",
            "1 3 job-7 65536 8 16",
            "1 3 job-7 29500 9 16",
            "1 3 job-7 29500 18446744073709551615 16",
            "1 3 job-7 29500 8 2147483648",
            "1 3  29500 8 16",
            "4294967296 3 job-7 29500 8 16",
        ] {
            let order = Order::parse(&format!("start {numbers}"), "host", &hello);
            assert!(order.is_err(), "{order:?}");
        }
    }

    #[test]
    fn strangers_are_no_members() {
        for line in ["", "GET / HTTP/1.1", "tch-run", "tch-run 1 2 x 4 -", "tch-run 1 2 3 4"] {
            assert!(Hello::parse(line).is_err(), "{line:?}");
        }
        assert!(Report::parse("failed x").is_err());
        assert!(Report::parse("failed 256 0 0 1 x").is_err());
        let hello = Hello::parse("tch-run 1 2 1 4 -").unwrap();
        assert!(Order::parse("start 1 2", "", &hello).is_err());
        assert!(Order::parse("HTTP/1.1 400 Bad Request", "", &hello).is_err());
    }
}
