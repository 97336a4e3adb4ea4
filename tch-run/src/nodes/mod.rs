//! What the nodes agree on: when an attempt begins, which ranks it has where, and what comes after.
//!
//! One node needs nobody's agreement. With several, the tch-run of node 0 coordinates, and each
//! tch-run, that of node 0 as well, is a member that keeps a connection to it:
//!
//! 1. An attempt begins when all nodes are there and none of them has a rank of an earlier attempt.
//! 2. After the first failure of a rank, or after a node is lost, all nodes end their ranks.
//! 3. Then the next attempt begins, with the next number and a new port, or all end with one exit
//!    code.
//!
//! So a rank never meets one of an earlier attempt, all nodes count the same restarts, and no rank
//! waits for a timeout because a peer on another machine is gone.

mod coordinator;
mod member;
mod server;
mod wire;

use crate::launch::Event;
use crate::options::Options;
use crate::port;
use anyhow::{Context, Result};
use std::sync::mpsc::Sender;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use coordinator::Failure;
use coordinator::{Coordinator, Settings};
use member::Member;
use server::Server;

/// An attempt, as a node needs to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How many attempts there were before.
    pub attempt: u32,
    pub max_restarts: u32,
    pub run_id: String,
    /// The host and the port of rank 0's store.
    pub master: String,
    pub port: u16,
    /// The rank of this node's first process.
    pub first_rank: usize,
    pub world_size: usize,
    pub node_rank: usize,
    pub nnodes: usize,
}

/// What a node is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the ranks.
    Start(Plan),
    /// End the ranks, because of what happened on another node.
    Stop(String),
    /// Exit with this code. The text is empty if nothing failed.
    End(u8, String),
}

/// What a node tells about its ranks, none of which is left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// All exited with 0.
    Done,
    /// One failed, and the others were ended.
    Failed(Failure),
    /// They were ended because of an [`Order::Stop`].
    Stopped,
}

/// This node's way to the others. Orders arrive as [`Event::Order`].
pub struct Meeting(Way);

enum Way {
    /// This node is the only one.
    Alone(Box<Alone>),
    Several {
        member: Member,
        /// On node 0 only.
        server: Option<Server>,
    },
}

struct Alone {
    coordinator: Coordinator,
    events: Sender<Event>,
}

impl Meeting {
    /// Joins the other nodes.
    pub fn join(options: &Options, processes: usize, events: Sender<Event>) -> Result<Meeting> {
        let settings = Settings {
            nnodes: options.nnodes,
            max_restarts: options.max_restarts,
            join_timeout: options.join_timeout(),
            run_id: options.run_id.clone().unwrap_or_else(new_run_id),
        };
        let Some(master) = options.meeting()? else {
            let coordinator = Coordinator::new(settings, "127.0.0.1".to_string());
            let mut alone = Box::new(Alone { coordinator, events });
            alone.handle(|coordinator| coordinator.join(0, processes))?;
            return Ok(Meeting(Way::Alone(alone)));
        };
        let server = match options.node_rank {
            0 => {
                let listen = options.listen.as_deref();
                Some(Server::start(settings, &master, listen, options.lost_after())?)
            }
            _ => None,
        };
        let own = server.as_ref().map(Server::address);
        let member = Member::join(options, master, own, processes, events);
        Ok(Meeting(Way::Several { member, server }))
    }

    /// Tells how an attempt ended on this node. An order answers.
    pub fn report(&mut self, report: Report) -> Result<()> {
        match &mut self.0 {
            Way::Alone(alone) => alone.handle(|coordinator| coordinator.report(0, report)),
            Way::Several { member, .. } => {
                member.report(&report);
                Ok(())
            }
        }
    }

    /// Leaves after [`Order::End`]. Node 0 first waits until the others have read theirs.
    pub fn leave(self) {
        if let Way::Several { member, server } = self.0 {
            drop(member);
            if let Some(server) = server {
                server.finish(Duration::from_secs(3));
            }
        }
    }
}

impl Alone {
    fn handle(
        &mut self,
        body: impl FnOnce(&mut Coordinator) -> Result<Vec<(usize, Order)>>,
    ) -> Result<()> {
        for (_, order) in body(&mut self.coordinator)? {
            self.events.send(Event::Order(order)).context("nobody waits for orders")?;
        }
        Ok(())
    }
}

/// A name that another run will hardly have.
fn new_run_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_nanos(), std::process::id())
}

/// The port of the store of the next attempt, which runs on node 0, as the coordinator does.
fn new_port() -> Result<u16> {
    port::reserve()
}
