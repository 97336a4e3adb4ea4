//! The coordinator of several nodes, in the tch-run of node 0.

use super::coordinator::{Coordinator, Orders, Settings};
use super::wire::{Hello, NO_ID, Reader, VERSION, Writer};
use super::{Order, Report};
use crate::options::Master;
use crate::output::note;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError, Sender};
use std::time::{Duration, Instant};

/// What the threads that read the connections say, each with the number of its connection.
enum Said {
    /// A stranger wants to be a member.
    Hello(Hello, Writer),
    Report(Report),
    Alive,
    /// The connection ended.
    Left(String),
}

/// The thread that coordinates.
pub struct Server {
    address: SocketAddr,
    done: Receiver<()>,
}

/// How many connections there may be of programs that are no members.
const STRANGERS: usize = 64;

impl Server {
    pub fn start(
        settings: Settings,
        master: &Master,
        own: Option<&str>,
        lost_after: Duration,
    ) -> Result<Server> {
        let listener = listen(master, own)?;
        let address = listener.local_addr()?;
        let most = settings.nnodes + STRANGERS;
        let coordinator = Coordinator::new(settings, master.host.clone());
        let (said, hears) = mpsc::channel();
        std::thread::spawn(move || accept(&listener, most, lost_after, &said));
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || {
            let (connected, waiting) = (HashMap::new(), Vec::new());
            let members = Members { coordinator, connected, waiting };
            if let Err(error) = members.serve(&hears) {
                note(&format!("error: {error:#}"));
            }
            // Nobody need wait for it.
            let _ = sender.send(());
        });
        Ok(Server { address, done })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until the members have left, but not longer than this.
    pub fn finish(self, within: Duration) {
        // Whoever has not left by then reads its order later.
        let _ = self.done.recv_timeout(within);
    }
}

/// Listens on the address that `own` names, or else on that of the master. If this machine has
/// another name or address for itself than the other nodes know, or cannot resolve that of the master,
/// it listens on all of its addresses.
fn listen(master: &Master, own: Option<&str>) -> Result<TcpListener> {
    let Master { host, port } = master;
    let at = own.unwrap_or(host);
    let cannot = || {
        let way_out = "give another port in --master, on all nodes, or another address in --listen";
        format!("cannot listen on port {port} of {at}: {way_out}")
    };
    let is_local = |host: &str| {
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    };
    match TcpListener::bind((at, *port)) {
        // The others do not mean their own loopback by the name of node 0.
        Ok(listener)
            if own.is_none() && !is_local(at) && listener.local_addr()?.ip().is_loopback() =>
        {
            drop(listener);
        }
        Err(error)
            if own.is_none()
                && !matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) => {}
        outcome => return outcome.with_context(cannot),
    }
    note(&format!("this machine has no address {host}, so it listens on all: see --listen"));
    // `::` takes IPv4 as well, where there is IPv6.
    TcpListener::bind(("::", *port))
        .or_else(|_| TcpListener::bind(("0.0.0.0", *port)))
        .with_context(cannot)
}

fn accept(listener: &TcpListener, most: usize, lost_after: Duration, said: &Sender<(u64, Said)>) {
    // Each thread that reads a connection has one of these.
    let open = Arc::new(());
    for (stream, connection) in listener.incoming().zip(0..) {
        match stream {
            // It is closed at once.
            Ok(_) if Arc::strong_count(&open) > most => {}
            Ok(stream) => {
                let (said, open) = (said.clone(), Arc::clone(&open));
                std::thread::spawn(move || {
                    // A stranger that is no tch-run is not answered.
                    let _ = serve_one(stream, lost_after, |what| said.send((connection, what)));
                    drop(open);
                });
            }
            // Too many open files, for instance.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Reads what a member says until its connection ends.
fn serve_one(
    stream: TcpStream,
    lost_after: Duration,
    say: impl Fn(Said) -> std::result::Result<(), SendError<(u64, Said)>>,
) -> Result<()> {
    let gone = |_| anyhow!("the coordinator has ended");
    let writer = Writer::new(&stream, lost_after)?;
    let mut reader = Reader::new(stream, lost_after);
    let hello = Hello::parse(&reader.first()?.context("it is no tch-run")?)?;
    say(Said::Hello(hello, writer.clone())).map_err(gone)?;
    writer.keep_alive(lost_after);
    let why = loop {
        let line = reader.line_or_alive();
        match line.and_then(|line| line.as_deref().map(Report::parse).transpose()) {
            Ok(Some(report)) => say(Said::Report(report)).map_err(gone)?,
            Ok(None) => say(Said::Alive).map_err(gone)?,
            Err(error) => break format!("{error:#}"),
        }
    };
    writer.close();
    say(Said::Left(why)).map_err(gone)
}

struct Members {
    coordinator: Coordinator,
    /// The node of a connection, and how to write to it.
    connected: HashMap<u64, (usize, Writer)>,
    waiting: Vec<Waiting>,
}

/// A node that has a connection already. Either it came back before the end of that one was noticed,
/// or it is a second one with the same number.
struct Waiting {
    connection: u64,
    hello: Hello,
    writer: Writer,
    /// When the other one first spoke since.
    heard: Option<Instant>,
}

/// Lines of the time before a connection's end are read one right after the other. One that lives says so
/// no more often than this.
const LIVES: Duration = Duration::from_millis(200);

impl Members {
    fn serve(mut self, hears: &Receiver<(u64, Said)>) -> Result<()> {
        let mut gathering = None;
        while !(self.coordinator.has_ended() && self.connected.is_empty()) {
            gathering = match self.coordinator.is_gathering() {
                true => gathering.or_else(|| Some(Instant::now())),
                false => None,
            };
            let limit = self.coordinator.settings().join_timeout;
            let said = match gathering {
                Some(since) => hears.recv_timeout(limit.saturating_sub(since.elapsed())),
                None => hears.recv().map_err(RecvTimeoutError::from),
            };
            let orders = match said {
                Ok((connection, said)) => self.hear(connection, said),
                Err(RecvTimeoutError::Timeout) => Ok(self.coordinator.time_out()),
                Err(RecvTimeoutError::Disconnected) => bail!("nobody listens any more"),
            };
            let orders = orders.unwrap_or_else(|error| {
                self.coordinator.end(1, format!("node 0 cannot go on: {error:#}"))
            });
            self.give(orders);
        }
        Ok(())
    }

    fn hear(&mut self, connection: u64, said: Said) -> Result<Orders> {
        match (said, self.connected.get(&connection).map(|(node, _)| *node)) {
            (Said::Hello(hello, writer), _) => Ok(self.greet(connection, hello, writer)),
            (Said::Report(report), Some(node)) => self.coordinator.report(node, report),
            (Said::Alive, Some(node)) => {
                self.refuse_twins(node);
                Ok(vec![])
            }
            (Said::Left(why), Some(node)) => {
                self.connected.remove(&connection);
                let orders = self.coordinator.lose(node, &why);
                let next = self.waiting.iter().position(|other| other.hello.node_rank == node);
                if let Some(Waiting { connection, hello, writer, .. }) =
                    next.map(|next| self.waiting.remove(next))
                {
                    let more = self.greet(connection, hello, writer);
                    return orders.map(|orders| [orders, more].concat());
                }
                orders
            }
            (Said::Left(_), None) => {
                self.waiting.retain(|other| other.connection != connection);
                Ok(vec![])
            }
            // Of one that waits or was refused.
            (Said::Report(_) | Said::Alive, None) => Ok(vec![]),
        }
    }

    /// Makes it a member, refuses it, or lets it wait for the end of the connection that its node has.
    fn greet(&mut self, connection: u64, hello: Hello, writer: Writer) -> Orders {
        let is_taken = self.connected.values().any(|(node, _)| *node == hello.node_rank);
        let joined = self.check(&hello).and_then(|()| match is_taken {
            true => Ok(None),
            false => self.coordinator.join(hello.node_rank, hello.processes).map(Some),
        });
        match joined {
            Ok(Some(orders)) => {
                self.connected.insert(connection, (hello.node_rank, writer));
                orders
            }
            Ok(None) => {
                self.waiting.push(Waiting { connection, hello, writer, heard: None });
                vec![]
            }
            Err(error) => {
                refuse(&writer, &error);
                vec![]
            }
        }
    }

    /// This node's connection lives, so those that wait for its end are other nodes.
    fn refuse_twins(&mut self, node: usize) {
        self.waiting.retain_mut(|other| {
            if other.hello.node_rank != node {
                return true;
            }
            let lives = other.heard.get_or_insert_with(Instant::now).elapsed() >= LIVES;
            if lives {
                let twin = anyhow!("--node-rank {node} is there already: give each node its own");
                refuse(&other.writer, &twin);
            }
            !lives
        });
    }

    fn check(&self, hello: &Hello) -> Result<()> {
        let settings = self.coordinator.settings();
        ensure!(
            hello.version == VERSION,
            "its tch-run speaks version {}, and node 0's {VERSION}: install the same",
            hello.version
        );
        ensure!(
            hello.nnodes == settings.nnodes,
            "it has --nnodes {}, and node 0 has {}",
            hello.nnodes,
            settings.nnodes
        );
        ensure!(
            hello.run_id == NO_ID || hello.run_id == settings.run_id,
            "its --run-id is {}, and node 0's is {}",
            hello.run_id,
            settings.run_id
        );
        Ok(())
    }

    /// Sends orders. If one cannot be sent, the thread that reads what the member says notices that
    /// it is gone.
    fn give(&self, orders: Orders) {
        for (to, order) in orders {
            for (_, writer) in self.connected.values().filter(|(node, _)| *node == to) {
                let _ = writer.line(&order.to_line());
            }
        }
    }
}

/// It is not a member, whether it reads this or not.
fn refuse(writer: &Writer, why: &anyhow::Error) {
    let refusal = Order::End(1, format!("node 0 refuses this node: {why:#}"));
    let _ = writer.line(&refusal.to_line());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_0_need_not_know_the_name_that_the_others_have_for_it() {
        // Longer than a name may be, so that no server is asked.
        let (stranger, local) = ("x".repeat(64), "127.0.0.1".to_string());
        let everywhere = listen(&Master { host: stranger.clone(), port: 0 }, None).unwrap();
        assert!(everywhere.local_addr().unwrap().ip().is_unspecified());
        // What the user names is meant, and a port that is taken is no matter of names.
        let own = listen(&Master { host: local.clone(), port: 0 }, Some(&stranger)).unwrap_err();
        assert!(own.to_string().contains("another address in --listen"), "{own}");
        let taken = TcpListener::bind((local.as_str(), 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = listen(&Master { host: local, port }, None).unwrap_err();
        assert!(error.to_string().contains("give another port"), "{error}");
    }
}
