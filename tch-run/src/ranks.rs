//! The processes of an attempt on this node.
//!
//! Each rank leads a process group of its own, so that a signal reaches what it started as well. A
//! rank that has ended stays a zombie until its group is ended: its number is not given to another
//! process meanwhile, so no signal can reach a stranger.

use crate::environment::{self, Place};
use crate::launch::Event;
use crate::nodes::Plan;
use crate::options::Options;
use crate::output::{Target, forward};
use crate::reports::Reports;
use anyhow::{Error, Result};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, getpid, getppid, kill_process_group,
    set_parent_process_death_signal, waitid,
};
use std::io::{ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Exited(i32),
    Killed(i32),
}

impl Status {
    fn of(status: &WaitIdStatus) -> Status {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Status::Exited(code),
            (None, Some(signal)) => Status::Killed(signal),
            (None, None) => Status::Exited(1),
        }
    }

    pub fn is_success(self) -> bool {
        self == Status::Exited(0)
    }

    /// As a shell has it: 128 and the signal's number for a process that was killed.
    pub fn code(self) -> u8 {
        match self {
            Status::Exited(code) => code as u8,
            Status::Killed(signal) => 128_u8.wrapping_add(signal as u8),
        }
    }

    /// What happened, after "rank 3 ".
    pub fn text(self) -> String {
        match self {
            Status::Exited(code) => format!("exited with {code}"),
            Status::Killed(signal) => match signal_hook::low_level::signal_name(signal) {
                Some(name) => format!("was killed by {name}"),
                None => format!("was killed by signal {signal}"),
            },
        }
    }
}

/// How a rank ended.
pub struct End {
    pub index: usize,
    pub status: Status,
    /// When it failed by its own account, or else when its process ended.
    pub at: SystemTime,
    /// How long it had run by then.
    pub after: Duration,
    /// Whether it failed because another rank had, by its own account.
    pub follows: bool,
    /// What it says about its failure.
    pub said: Option<String>,
}

/// The ranks of this node. Dropped, they are killed.
pub struct Ranks {
    ranks: Vec<Rank>,
    grace: Duration,
    reports: Reports,
}

struct Rank {
    child: Child,
    pid: Pid,
    /// Its outputs to which something can still write.
    open: usize,
    begun: SystemTime,
    ended: Option<(Status, SystemTime)>,
    /// When what is left of it gets SIGKILL.
    deadline: Option<Instant>,
    /// Nothing of it is left.
    gone: bool,
}

/// Why a rank could not be started.
pub struct CannotStart {
    pub error: Error,
    /// As a shell has it: 127 if there is no such program, or else 126.
    pub code: u8,
}

impl Ranks {
    /// Starts all ranks, or none.
    pub fn start(
        options: &Options,
        plan: &Plan,
        count: usize,
        events: &Sender<Event>,
    ) -> Result<Ranks, CannotStart> {
        let reports = Reports::new();
        let mut ranks = Ranks { ranks: Vec::new(), grace: options.grace(), reports };
        for local_rank in 0..count {
            let error_file = ranks.reports.path(local_rank);
            let place = Place { local_rank, local_world_size: count, error_file };
            ranks.ranks.push(Rank::start(options, plan, &place, events)?);
        }
        Ok(ranks)
    }

    /// Notes that a rank has ended. What it left of its group is asked to end, too.
    pub fn has_ended(&mut self, index: usize, status: Status, at: SystemTime) {
        let deadline = Instant::now() + self.grace;
        if let Some(rank) = self.ranks.get_mut(index) {
            rank.ended = Some((status, at));
            rank.end(deadline);
        }
    }

    /// Notes that an output of a rank has ended.
    pub fn is_silent(&mut self, index: usize) {
        if let Some(rank) = self.ranks.get_mut(index) {
            rank.open = rank.open.saturating_sub(1);
        }
    }

    /// Asks all ranks to end by SIGTERM.
    pub fn end(&mut self) {
        let deadline = Instant::now() + self.grace;
        self.ranks.iter_mut().for_each(|rank| rank.end(deadline));
    }

    /// Passes a signal on to all ranks. If it is one to end by, they have the grace to do so.
    pub fn signal(&mut self, signal: Signal, is_to_end: bool) {
        let deadline = Instant::now() + self.grace;
        for rank in self.ranks.iter_mut().filter(|rank| !rank.gone) {
            rank.send(signal);
            if is_to_end {
                rank.deadline.get_or_insert(deadline);
            }
        }
    }

    /// Lets the grace of all ranks be over.
    pub fn end_now(&mut self) {
        let now = Instant::now();
        self.ranks.iter_mut().for_each(|rank| rank.deadline = Some(now));
    }

    /// Kills what is over its time, and reaps ranks of which nothing else is left. Returns when to
    /// call it again at the latest, or `None` if all ranks are gone.
    pub fn tidy(&mut self) -> Option<Duration> {
        let left = self.ranks.iter_mut().filter_map(Rank::tidy).min();
        // Also where the clock stood still.
        left.map(|left| left.max(Duration::from_millis(1)))
    }

    /// The ranks that have ended.
    pub fn ends(&self) -> Vec<End> {
        let ended = |(index, rank): (usize, &Rank)| {
            let (status, at) = rank.ended?;
            // One that ended well may have reported what it could mend.
            let said = (!status.is_success()).then(|| self.reports.read(index, at)).flatten();
            let at = said.as_ref().map_or(at, |said| said.at.min(at));
            Some(End {
                index,
                status,
                at,
                after: at.duration_since(rank.begun).unwrap_or_default(),
                follows: said.as_ref().is_some_and(|said| said.follows),
                said: said.map(|said| said.text).filter(|text| !text.is_empty()),
            })
        };
        self.ranks.iter().enumerate().filter_map(ended).collect()
    }

    /// Whether a rank has not ended.
    pub fn run(&self) -> bool {
        self.ranks.iter().any(|rank| rank.ended.is_none())
    }

    /// Whether a rank that has said that it failed first has not ended.
    pub fn are_failing(&self) -> bool {
        let now = SystemTime::now();
        let is_failing = |(index, rank): (usize, &Rank)| {
            rank.ended.is_none() && self.reports.read(index, now).is_some_and(|said| !said.follows)
        };
        self.ranks.iter().enumerate().any(is_failing)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| !rank.gone) {
            rank.send(Signal::KILL);
            // If it cannot be waited for, it was.
            let _ = rank.child.wait();
        }
    }
}

impl Rank {
    fn start(
        options: &Options,
        plan: &Plan,
        place: &Place,
        events: &Sender<Event>,
    ) -> Result<Rank, CannotStart> {
        let begun = SystemTime::now();
        let mut child = spawn(options, plan, place)?;
        let pid = Pid::from_child(&child);
        let rank = plan.first_rank + place.local_rank;
        let prefix = if options.no_prefix { String::new() } else { format!("[rank {rank}] ") };
        let (attempt, index) = (plan.attempt, place.local_rank);
        // Whether somebody still hears an event matters to none of these threads.
        let silent =
            |sender: Sender<Event>| move || drop(sender.send(Event::Silent { attempt, index }));
        let mut open = 0;
        if let Some(from) = child.stdout.take() {
            copy(from, Target::Stdout, prefix.clone(), silent(events.clone()));
            open += 1;
        }
        if let Some(from) = child.stderr.take() {
            copy(from, Target::Stderr, prefix, silent(events.clone()));
            open += 1;
        }
        let events = events.clone();
        std::thread::spawn(move || {
            let status = wait(pid);
            drop(events.send(Event::Ended { attempt, index, status, at: SystemTime::now() }));
        });
        Ok(Rank { child, pid, open, begun, ended: None, deadline: None, gone: false })
    }

    fn send(&self, signal: Signal) {
        // A group that is empty needs no signal.
        let _ = kill_process_group(self.pid, signal);
    }

    fn end(&mut self, deadline: Instant) {
        if !self.gone && self.deadline.is_none() {
            self.send(Signal::TERM);
            // A process that was stopped ends only when it goes on.
            self.send(Signal::CONT);
            self.deadline = Some(deadline);
        }
    }

    fn tidy(&mut self) -> Option<Duration> {
        if self.gone {
            return None;
        }
        let now = Instant::now();
        let is_over = self.deadline.is_some_and(|deadline| now >= deadline);
        // As long as something has its output open, it may still end in its own way.
        let is_silent = self.open == 0;
        if is_over || self.ended.is_some() && is_silent {
            self.send(Signal::KILL);
        }
        if self.ended.is_some() && (is_over || is_silent) {
            // The zombie of the group's leader, which is the last of it.
            let _ = self.child.wait();
            self.gone = true;
            return None;
        }
        match self.deadline {
            // The leader has been killed, and its end is an event.
            Some(_) if is_over => Some(Duration::from_secs(1)),
            Some(deadline) => Some(deadline - now),
            None => Some(Duration::from_secs(3600)),
        }
    }
}

fn spawn(options: &Options, plan: &Plan, place: &Place) -> Result<Child, CannotStart> {
    let [program, arguments @ ..] = options.program.as_slice() else {
        return Err(CannotStart { error: Error::msg("no program is given"), code: 127 });
    };
    let mut command = Command::new(program);
    command.args(arguments).process_group(0);
    // A process group that is not the terminal's foreground would be stopped if it read from it.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    environment::set(&mut command, plan, place);
    let parent = getpid();
    let die_with_parent = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        match getppid() == Some(parent) {
            true => Ok(()),
            // The parent died before the line above, and so without a signal to this process.
            false => Err(ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure makes
    // two system calls and allocates nothing: both errors are numbers.
    unsafe { command.pre_exec(die_with_parent) };
    command.spawn().map_err(|error| CannotStart {
        code: if error.kind() == ErrorKind::NotFound { 127 } else { 126 },
        error: Error::new(error).context(format!("cannot start {}", program.to_string_lossy())),
    })
}

/// Waits for the end of a child and leaves its zombie.
fn wait(pid: Pid) -> Status {
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => return Status::of(&status),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            // There is no such child, which cannot be while its zombie is not reaped.
            Err(_) => return Status::Exited(1),
        }
    }
}

fn copy(
    from: impl Read + Send + 'static,
    target: Target,
    prefix: String,
    then: impl FnOnce() + Send + 'static,
) {
    std::thread::spawn(move || {
        forward(from, target, &prefix);
        then();
    });
}
