//! The rules by which attempts begin and end, without sockets and clocks.

use super::{Order, Plan, Report, new_port};
use crate::options::MOST_PROCESSES;
use crate::reports::nanoseconds;
use anyhow::{Result, bail, ensure};
use std::time::{Duration, SystemTime};

/// The ranks at most: c10d counts them in 32 bits.
pub const MOST_RANKS: usize = i32::MAX as usize;

/// What node 0 decides for all.
#[derive(Clone, Debug)]
pub struct Settings {
    pub nnodes: usize,
    pub max_restarts: u32,
    pub join_timeout: Duration,
    pub run_id: String,
}

/// A failure of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code of the rank, or 128 and the number of the signal that ended it.
    pub code: u8,
    /// Whether another attempt would be of no use.
    pub is_final: bool,
    /// Whether another rank failed before, by its own account.
    pub follows: bool,
    /// When it was, in nanoseconds since 1970.
    pub at: u64,
    pub text: String,
}

impl Failure {
    pub fn now(code: u8, is_final: bool, text: String) -> Failure {
        let at = nanoseconds(SystemTime::now());
        Failure { code, is_final, follows: false, at, text }
    }

    /// Whether it is rather the cause than the other one is. Clocks of machines differ, so what a
    /// rank says itself comes first.
    fn precedes(&self, other: &Failure) -> bool {
        (self.follows, self.at) < (other.follows, other.at)
    }
}

/// What a node is doing. All but the absent ones have a number of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Absent,
    /// It has no rank.
    Waiting(usize),
    /// It may have ranks.
    Running(usize),
    /// Its ranks of this attempt exited with 0.
    Done(usize),
}

impl Node {
    fn processes(self) -> usize {
        match self {
            Node::Absent => 0,
            Node::Waiting(processes) | Node::Running(processes) | Node::Done(processes) => {
                processes
            }
        }
    }
}

/// The orders that follow from an event, each with the node that gets it.
pub type Orders = Vec<(usize, Order)>;

pub struct Coordinator {
    settings: Settings,
    master: String,
    nodes: Vec<Node>,
    attempt: u32,
    failure: Option<Failure>,
    ended: bool,
}

impl Coordinator {
    pub fn new(settings: Settings, master: String) -> Coordinator {
        let nodes = vec![Node::Absent; settings.nnodes];
        Coordinator { settings, master, nodes, attempt: 0, failure: None, ended: false }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether [`Order::End`] was given.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether an attempt waits for nodes that are absent.
    pub fn is_gathering(&self) -> bool {
        !self.ended && self.failure.is_none() && !self.is_running()
    }

    fn is_running(&self) -> bool {
        self.nodes.iter().any(|node| matches!(node, Node::Running(_) | Node::Done(_)))
    }

    /// A node is there, without ranks.
    pub fn join(&mut self, node: usize, processes: usize) -> Result<Orders> {
        ensure!(!self.ended, "the run has ended");
        let fits = (1..=MOST_PROCESSES).contains(&processes);
        ensure!(fits, "node {node} has {processes} processes, not 1 to {MOST_PROCESSES}");
        // At most 65,536 times as many, which is no overflow.
        let sum = processes + self.nodes.iter().map(|node| node.processes()).sum::<usize>();
        ensure!(sum <= MOST_RANKS, "with node {node} there would be {sum} ranks: too many");
        match self.nodes.get_mut(node) {
            Some(place @ Node::Absent) => *place = Node::Waiting(processes),
            Some(_) => bail!("--node-rank {node} is there already: give each node its own"),
            None => bail!("--node-rank {node}: node 0 has --nnodes {}", self.settings.nnodes),
        }
        self.next()
    }

    /// A node's ranks have ended.
    pub fn report(&mut self, node: usize, report: Report) -> Result<Orders> {
        let Some(Node::Running(processes)) = self.nodes.get(node).copied() else {
            bail!("node {node} reports of ranks that it does not have");
        };
        match report {
            Report::Done => {
                // After a failure elsewhere, they are to be started again.
                self.nodes[node] = match self.failure {
                    None => Node::Done(processes),
                    Some(_) => Node::Waiting(processes),
                };
                self.next()
            }
            Report::Stopped => {
                self.nodes[node] = Node::Waiting(processes);
                self.next()
            }
            Report::Failed(failure) => {
                self.nodes[node] = Node::Waiting(processes);
                self.fail(Failure { text: self.name(node) + &failure.text, ..failure })
            }
        }
    }

    /// The connection to a node is gone.
    pub fn lose(&mut self, node: usize, why: &str) -> Result<Orders> {
        let before = std::mem::replace(&mut self.nodes[node], Node::Absent);
        let text = format!("node {node} is lost: {why}");
        match (before, &mut self.failure) {
            // Its ranks had been told to end.
            (Node::Running(_) | Node::Done(_), Some(failure)) => {
                // What a rank says follows from something, which may be this.
                if failure.follows {
                    failure.text += &format!("; {text}");
                }
                self.next()
            }
            (Node::Running(_) | Node::Done(_), None) if !self.ended => {
                // Nothing of it can say more, and what others say follows from it.
                self.fail(Failure { at: 0, ..Failure::now(1, false, text) })
            }
            // Its ranks had ended.
            _ => Ok(vec![]),
        }
    }

    /// Not all nodes came in time.
    pub fn time_out(&mut self) -> Orders {
        let absent = self.nodes.iter().enumerate().filter(|(_, node)| **node == Node::Absent);
        let absent: Vec<String> = absent.map(|(node, _)| node.to_string()).collect();
        self.end(
            1,
            format!(
                "node {} did not join within {} s: start its tch-run, or raise --join-timeout",
                absent.join(", "),
                self.settings.join_timeout.as_secs()
            ),
        )
    }

    fn name(&self, node: usize) -> String {
        match self.settings.nnodes {
            1 => String::new(),
            _ => format!("node {node}: "),
        }
    }

    /// The first failure decides. All ranks that are left are ended.
    fn fail(&mut self, mut failure: Failure) -> Result<Orders> {
        if let Some(first) = &mut self.failure {
            // Each of them may forbid another attempt.
            let is_final = first.is_final || failure.is_final;
            if failure.precedes(first) {
                *first = failure;
            }
            first.is_final = is_final;
            return self.next();
        }
        let is_done = |(_, node): &(usize, &Node)| matches!(node, Node::Done(_));
        let done = self.nodes.iter().enumerate().filter(is_done);
        let done: Vec<String> = done.map(|(node, _)| node.to_string()).collect();
        if !done.is_empty() {
            let nodes = done.join(", ");
            failure.text += &format!("; before that, all ranks of node {nodes} exited with 0");
        }
        let mut orders = Orders::new();
        for (index, node) in self.nodes.iter_mut().enumerate() {
            match *node {
                Node::Running(_) => orders.push((index, Order::Stop(failure.text.clone()))),
                Node::Done(processes) => *node = Node::Waiting(processes),
                _ => {}
            }
        }
        self.failure = Some(failure);
        orders.extend(self.next()?);
        Ok(orders)
    }

    /// Goes on if nothing is left to wait for.
    fn next(&mut self) -> Result<Orders> {
        if self.ended || self.nodes.iter().any(|node| matches!(node, Node::Running(_))) {
            return Ok(vec![]);
        }
        if self.is_running() {
            // None runs, and no failure: those that are not done are absent or wait, which only
            // happens at the beginning of an attempt.
            let all_done = self.nodes.iter().all(|node| matches!(node, Node::Done(_)));
            return Ok(if all_done { self.end(0, String::new()) } else { vec![] });
        }
        if let Some(failure) = self.failure.take() {
            if failure.is_final || self.attempt >= self.settings.max_restarts {
                return Ok(self.end(failure.code, failure.text));
            }
            self.attempt += 1;
        }
        self.start_if_all_are_there()
    }

    fn start_if_all_are_there(&mut self) -> Result<Orders> {
        let waiting = self.nodes.iter().map(|node| match node {
            Node::Waiting(processes) => Some(*processes),
            _ => None,
        });
        let Some(processes) = waiting.collect::<Option<Vec<usize>>>() else { return Ok(vec![]) };
        let (port, world_size) = (new_port()?, processes.iter().sum());
        let mut first_rank = 0;
        let mut orders = Orders::new();
        for (node, processes) in processes.into_iter().enumerate() {
            self.nodes[node] = Node::Running(processes);
            let Settings { nnodes, max_restarts, ref run_id, .. } = self.settings;
            orders.push((
                node,
                Order::Start(Plan {
                    attempt: self.attempt,
                    max_restarts,
                    run_id: run_id.clone(),
                    master: self.master.clone(),
                    port,
                    first_rank,
                    world_size,
                    node_rank: node,
                    nnodes,
                }),
            ));
            first_rank += processes;
        }
        Ok(orders)
    }

    /// Ends the run on all nodes.
    pub fn end(&mut self, code: u8, text: String) -> Orders {
        self.ended = true;
        let present = self.nodes.iter().enumerate().filter(|(_, node)| **node != Node::Absent);
        // Node 0 last, because it is the coordinator's own, which leaves when all have their orders.
        let mut orders: Orders =
            present.map(|(node, _)| (node, Order::End(code, text.clone()))).collect();
        orders.reverse();
        orders
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coordinator(nnodes: usize, max_restarts: u32) -> Coordinator {
        let join_timeout = Duration::from_secs(5);
        let settings = Settings { nnodes, max_restarts, join_timeout, run_id: "r".to_string() };
        Coordinator::new(settings, "host".to_string())
    }

    fn failed(code: u8, is_final: bool) -> Report {
        failed_at(1, code, is_final)
    }

    fn failed_at(at: u64, code: u8, is_final: bool) -> Report {
        let text = "rank 1 failed".to_string();
        Report::Failed(Failure { code, is_final, follows: false, at, text })
    }

    /// The orders in short: who gets which.
    fn short(orders: Orders) -> Vec<(usize, String)> {
        let short = |order| match order {
            Order::Start(plan) => {
                format!("start {} at {} of {}", plan.attempt, plan.first_rank, plan.world_size)
            }
            Order::Stop(text) => format!("stop {text}"),
            Order::End(code, text) => format!("end {code} {text}"),
        };
        orders.into_iter().map(|(node, order)| (node, short(order))).collect()
    }

    fn orders(list: &[(usize, &str)]) -> Vec<(usize, String)> {
        list.iter().map(|(node, order)| (*node, order.to_string())).collect()
    }

    /// Two nodes, of 2 and 3 processes, whose ranks have started.
    fn running(max_restarts: u32) -> Coordinator {
        let mut all = coordinator(2, max_restarts);
        assert!(all.join(1, 3).unwrap().is_empty() && all.is_gathering());
        let started = short(all.join(0, 2).unwrap());
        assert_eq!(started, orders(&[(0, "start 0 at 0 of 5"), (1, "start 0 at 2 of 5")]));
        all
    }

    #[test]
    fn all_end_when_all_are_done() {
        let mut all = running(0);
        assert!(all.report(1, Report::Done).unwrap().is_empty() && !all.is_gathering());
        let ended = short(all.report(0, Report::Done).unwrap());
        assert_eq!(ended, orders(&[(1, "end 0 "), (0, "end 0 ")]));
        assert!(all.has_ended());
    }

    #[test]
    fn the_first_failure_stops_the_others_and_decides_the_code() {
        let mut all = running(0);
        let stops = short(all.report(1, failed(7, false)).unwrap());
        assert_eq!(stops, orders(&[(0, "stop node 1: rank 1 failed")]));
        // Node 0's ranks failed, too, before it read the order.
        let ended = short(all.report(0, failed(9, false)).unwrap());
        let text = "end 7 node 1: rank 1 failed";
        assert_eq!(ended, orders(&[(1, text), (0, text)]));
    }

    /// The first to report need not be the first to fail.
    #[test]
    fn an_earlier_failure_that_is_reported_later_decides() {
        let follows = |at, code| match failed_at(at, code, false) {
            Report::Failed(failure) => Report::Failed(Failure { follows: true, ..failure }),
            report => report,
        };
        for (reported, later, code) in [
            (failed_at(5, 7, false), failed_at(4, 9, false), 9),
            (failed_at(5, 7, true), failed_at(6, 9, false), 7),
            // The clock of node 0 may be ahead.
            (follows(5, 7), failed_at(6, 9, false), 9),
            (failed_at(6, 7, false), follows(5, 9), 7),
        ] {
            let mut all = running(0);
            all.report(1, reported).unwrap();
            let ended = short(all.report(0, later).unwrap());
            assert!(ended[0].1.starts_with(&format!("end {code} ")), "{ended:?}");
        }
        // A node that is lost says nothing, and the others only what follows from it.
        let mut all = running(0);
        all.lose(1, "gone").unwrap();
        let ended = short(all.report(0, failed(9, false)).unwrap());
        assert_eq!(ended, orders(&[(0, "end 1 node 1 is lost: gone")]));
        // One that is lost while its ranks are ended is no cause.
        let mut all = running(0);
        all.report(0, failed(9, false)).unwrap();
        let ended = short(all.lose(1, "gone").unwrap());
        assert_eq!(ended, orders(&[(0, "end 9 node 0: rank 1 failed")]));
        // Unless what failed followed from something.
        let mut all = running(0);
        all.report(0, follows(5, 9)).unwrap();
        let ended = short(all.lose(1, "gone").unwrap());
        assert_eq!(ended, orders(&[(0, "end 9 node 0: rank 1 failed; node 1 is lost: gone")]));
    }

    #[test]
    fn nodes_that_were_done_before_a_failure_are_named() {
        let mut all = running(0);
        all.report(0, Report::Done).unwrap();
        let ended = short(all.report(1, failed(9, false)).unwrap());
        let text = "node 1: rank 1 failed; before that, all ranks of node 0 exited with 0";
        assert_eq!(ended[0], (1, format!("end 9 {text}")));
    }

    #[test]
    fn an_attempt_begins_only_when_no_node_has_ranks() {
        let mut all = running(2);
        for attempt in 1..=2 {
            assert_eq!(all.report(0, failed(1, false)).unwrap().len(), 1);
            let started = short(all.report(1, Report::Stopped).unwrap());
            let start = |at| format!("start {attempt} at {at} of 5");
            assert_eq!(started, [(0, start(0)), (1, start(2))]);
        }
        all.report(0, failed(1, false)).unwrap();
        assert!(short(all.report(1, Report::Stopped).unwrap())[0].1.starts_with("end 1"));
    }

    #[test]
    fn a_node_that_was_done_starts_again_with_the_others() {
        let mut all = running(1);
        all.report(0, Report::Done).unwrap();
        assert_eq!(short(all.report(1, failed(1, false)).unwrap()).len(), 2);
        // One that is done after the failure of another is no longer done.
        assert_eq!(all.report(1, failed(1, false)).unwrap().len(), 1);
        assert!(short(all.report(0, Report::Done).unwrap())[0].1.starts_with("end 1"));
    }

    #[test]
    fn a_lost_node_is_a_failure_and_may_come_back() {
        let mut all = running(1);
        let stops = short(all.lose(1, "gone").unwrap());
        assert_eq!(stops, orders(&[(0, "stop node 1 is lost: gone")]));
        assert!(all.report(0, Report::Stopped).unwrap().is_empty() && all.is_gathering());
        let started = short(all.join(1, 4).unwrap());
        assert_eq!(started, orders(&[(0, "start 1 at 0 of 6"), (1, "start 1 at 2 of 6")]));
    }

    #[test]
    fn a_final_failure_is_not_followed_by_another_attempt() {
        let mut all = running(5);
        all.report(0, failed(130, true)).unwrap();
        assert!(short(all.report(1, Report::Stopped).unwrap())[0].1.starts_with("end 130"));
        // Also if it is the second one.
        let mut all = running(5);
        all.report(0, failed(1, false)).unwrap();
        assert!(short(all.report(1, failed(130, true)).unwrap())[0].1.starts_with("end 1 "));
    }

    #[test]
    fn absent_nodes_are_named() {
        let mut all = coordinator(3, 0);
        all.join(1, 1).unwrap();
        let ended = short(all.time_out());
        assert!(ended[0].1.starts_with("end 1 node 0, 2 did not join within 5 s"), "{ended:?}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut all = coordinator(2, 0);
        all.join(1, 1).unwrap();
        assert!(all.join(1, 1).unwrap_err().to_string().contains("--node-rank 1 is there already"));
        assert!(all.join(2, 1).unwrap_err().to_string().contains("--nnodes 2"));
        assert!(all.report(1, Report::Done).is_err());
        for processes in [0, MOST_PROCESSES + 1, usize::MAX] {
            let error = all.join(0, processes).unwrap_err().to_string();
            assert!(error.contains("not 1 to 65536"), "{error}");
        }
        let mut most = coordinator(MOST_RANKS / MOST_PROCESSES + 1, 0);
        most.nodes[1..].fill(Node::Waiting(MOST_PROCESSES));
        let error = most.join(0, MOST_PROCESSES).unwrap_err();
        assert!(error.to_string().contains("2147483648 ranks: too many"), "{error}");
    }
}
