//! The lines that tch-runs send one another.

use super::{Failure, Order, Plan, Report};
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The version of the lines. Nodes with another one are refused.
pub const VERSION: u32 = 1;
/// A longer line is not one of ours.
const LONGEST: u64 = 4096;
/// The line that only says that a node is alive.
const ALIVE: &str = "alive";
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
            Report::Failed(Failure { code, is_final, text }) => {
                one_line(&format!("failed {code} {} {text}", u8::from(*is_final)))
            }
        }
    }

    pub fn parse(line: &str) -> Result<Report> {
        let mut words = line.splitn(4, ' ');
        match words.next() {
            Some("done") => Ok(Report::Done),
            Some("stopped") => Ok(Report::Stopped),
            Some("failed") => Ok(Report::Failed(Failure {
                code: number(&mut words)?,
                is_final: number::<u8>(&mut words)? != 0,
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

    /// `master` is the host, and `node` and `nnodes` are the member's.
    pub fn parse(line: &str, master: &str, [node, nnodes]: [usize; 2]) -> Result<Order> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "stop" => Ok(Order::Stop(rest.to_string())),
            "end" => {
                let (code, text) = rest.split_once(' ').unwrap_or((rest, ""));
                Ok(Order::End(code.parse().context("an unknown exit code")?, text.to_string()))
            }
            "start" => {
                let mut words = rest.split(' ');
                Ok(Order::Start(Plan {
                    attempt: number(&mut words)?,
                    max_restarts: number(&mut words)?,
                    run_id: words.next().context("too few words")?.to_string(),
                    master: master.to_string(),
                    port: number(&mut words)?,
                    first_rank: number(&mut words)?,
                    world_size: number(&mut words)?,
                    node_rank: node,
                    nnodes,
                }))
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
    text.replace('\n', " ").chars().take(LONGEST as usize / 8).collect()
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
                std::thread::sleep(lost_after / 4);
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
    pub fn new(stream: TcpStream, lost_after: Duration) -> Result<Reader> {
        stream.set_read_timeout(Some(lost_after))?;
        Ok(Reader { stream: BufReader::new(stream), lost_after })
    }

    pub fn line(&mut self) -> Result<String> {
        loop {
            let line = self.any_line()?;
            if line != ALIVE {
                return Ok(line);
            }
        }
    }

    fn any_line(&mut self) -> Result<String> {
        let mut line = Vec::new();
        let read = self.stream.by_ref().take(LONGEST).read_until(b'\n', &mut line);
        match read {
            Ok(0) => bail!("its tch-run has ended"),
            Ok(_) if line.ends_with(b"\n") => {
                line.pop();
                Ok(String::from_utf8_lossy(&line).into_owned())
            }
            Ok(_) => bail!("it sent no whole line"),
            Err(error) if is_timeout(&error) => {
                bail!("it was silent for {} s", self.lost_after.as_secs())
            }
            Err(error) => Err(error).context("the connection broke"),
        }
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_as_they_were() {
        let run_id = "job-7".to_string();
        let hello = Hello { version: 1, nnodes: 2, node_rank: 1, processes: 8, run_id };
        assert_eq!(Hello::parse(&hello.to_line()).unwrap(), hello);
        let failure = Failure { code: 137, is_final: true, text: "rank 3 was killed".to_string() };
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
            assert_eq!(Order::parse(&order.to_line(), "host", [1, 2]).unwrap(), order);
        }
    }

    #[test]
    fn strangers_are_no_members() {
        for line in ["", "GET / HTTP/1.1", "tch-run", "tch-run 1 2 x 4 -", "tch-run 1 2 3 4"] {
            assert!(Hello::parse(line).is_err(), "{line:?}");
        }
        assert!(Report::parse("failed x").is_err());
        assert!(Order::parse("start 1 2", "", [0, 1]).is_err());
    }
}
