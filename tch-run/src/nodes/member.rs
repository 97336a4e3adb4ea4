//! A node's connection to the coordinator.

use super::wire::{Hello, NO_ID, Reader, VERSION, Writer};
use super::{Order, Report};
use crate::launch::Event;
use crate::options::{Master, Options};
use anyhow::{Context, Result, ensure};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long to wait before node 0 is called again.
const AGAIN: Duration = Duration::from_millis(200);

/// A connection that a thread makes, so that signals are heard meanwhile. It is there when the first
/// order is.
pub struct Member(Arc<OnceLock<Writer>>);

impl Member {
    /// Calls node 0 until it answers; `own` is where it listens, if this is node 0. Orders go to
    /// `events`, and so does the end of the connection.
    pub fn join(
        options: &Options,
        master: Master,
        own: Option<SocketAddr>,
        processes: usize,
        events: Sender<Event>,
    ) -> Member {
        let writer = Arc::new(OnceLock::new());
        let run_id = options.run_id.clone().unwrap_or_else(|| NO_ID.to_string());
        let (nnodes, node_rank) = (options.nnodes, options.node_rank);
        let call = Call {
            master,
            own,
            hello: Hello { version: VERSION, nnodes, node_rank, processes, run_id },
            join_timeout: options.join_timeout(),
            lost_after: options.lost_after(),
        };
        let shared = Arc::clone(&writer);
        std::thread::spawn(move || {
            let why = match call.connect(&shared) {
                Ok(reader) => call.pass_on(reader, &events),
                Err(error) => format!("{error:#}"),
            };
            // Nobody hears it if the run has ended.
            let _ = events.send(Event::Lost(why));
        });
        Member(writer)
    }

    /// If the report cannot be sent, the end of the connection is an event.
    pub fn report(&self, report: &Report) {
        if let Some(writer) = self.0.get() {
            let _ = writer.line(&report.to_line());
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(writer) = self.0.get() {
            writer.close();
        }
    }
}

struct Call {
    master: Master,
    /// Node 0 itself need not know the name by which others know it.
    own: Option<SocketAddr>,
    hello: Hello,
    join_timeout: Duration,
    lost_after: Duration,
}

impl Call {
    fn connect(&self, shared: &OnceLock<Writer>) -> Result<Reader> {
        let stream = self.call()?;
        let writer = Writer::new(&stream, self.lost_after)?;
        let reader = Reader::new(stream, self.lost_after);
        writer.line(&self.hello.to_line()).context("node 0 does not answer")?;
        writer.keep_alive(self.lost_after);
        // It is set only here.
        let _ = shared.set(writer);
        Ok(reader)
    }

    /// Passes orders on and returns why there are no more.
    fn pass_on(&self, mut reader: Reader, events: &Sender<Event>) -> String {
        let Master { host, port } = &self.master;
        let parse = |line: String| Order::parse(&line, host, &self.hello);
        let mut order = match reader.first().and_then(|line| line.map(parse).transpose()) {
            Ok(order) => order,
            Err(error) => {
                return format!(
                    "{host}:{port} is no tch-run of node 0: {error:#}; correct --master"
                );
            }
        };
        loop {
            if let Some(order) = order
                && events.send(Event::Order(order)).is_err()
            {
                return String::new();
            }
            match reader.line().and_then(parse) {
                Ok(next) => order = Some(next),
                Err(error) => return format!("node 0 is lost: {error:#}"),
            }
        }
    }

    /// Connects to node 0, whose tch-run may start later than this one.
    fn call(&self) -> Result<TcpStream> {
        let begun = Instant::now();
        let Master { host, port } = &self.master;
        loop {
            match self.try_hosts() {
                Ok(stream) => return Ok(stream),
                Err(error) if begun.elapsed() >= self.join_timeout => {
                    return Err(error).with_context(|| {
                        format!(
                            "no tch-run of node 0 at {host}:{port} within {} s: start it, or correct --master",
                            self.join_timeout.as_secs()
                        )
                    });
                }
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
    }

    fn try_hosts(&self) -> Result<TcpStream> {
        let Master { host, port } = &self.master;
        let stream = match self.own {
            Some(own) => TcpStream::connect(own)?,
            None => TcpStream::connect((host.as_str(), *port))?,
        };
        // Without a listener, Linux may connect a socket to itself.
        ensure!(stream.local_addr()? != stream.peer_addr()?, "nobody listens");
        Ok(stream)
    }
}
