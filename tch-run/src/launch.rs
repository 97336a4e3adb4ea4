//! Runs attempts until one of them succeeds or no more is allowed.

use crate::nodes::{Failure, Meeting, Order, Plan, Report};
use crate::options::Options;
use crate::output::note;
use crate::ranks::{CannotStart, End, Ranks, Status};
use crate::reports::nanoseconds;
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime};

/// What happens while tch-run waits.
#[derive(Debug)]
pub enum Event {
    /// The first process of a rank ended.
    Ended {
        attempt: u32,
        index: usize,
        status: Status,
        at: SystemTime,
    },
    /// One of the two outputs of a rank ended.
    Silent {
        attempt: u32,
        index: usize,
    },
    /// tch-run itself got a signal.
    Signal(i32),
    Order(Order),
    /// There will be no more orders.
    Lost(String),
}

/// The signals by which ranks are to end.
const TO_END: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];
/// Those that mean what the program likes. A scheduler sends one before the time is over.
const TO_PASS_ON: [i32; 2] = [SIGUSR1, SIGUSR2];

/// How long to wait after the first failure for those that belong to it: the first process to end
/// need not be that of the rank that failed first.
const SETTLING: Duration = Duration::from_secs(1);
/// How often that is done once more for a rank that has said that it failed and has not ended.
const MOST_DELAYS: usize = 4;
/// How many ranks a line names.
const MOST_NAMES: usize = 8;

/// Runs the program as the options say, and returns the exit code.
pub fn run(options: &Options) -> Result<u8> {
    options.meeting()?;
    let processes = options.processes()?;
    let (sender, events) = mpsc::channel();
    listen_to_signals(sender.clone())?;
    let mut meeting = Meeting::join(options, processes, sender.clone())?;
    loop {
        match events.recv().context("no events any more")? {
            Event::Order(Order::Start(plan)) => {
                if plan.attempt > 0 {
                    note(&format!("restart {} of {}", plan.attempt, plan.max_restarts));
                }
                let attempt = Attempt::new(&plan);
                let report = match attempt.run(options, processes, &events, &sender)? {
                    Outcome::Report(report) => report,
                    Outcome::Lost(why) => bail!(why),
                };
                meeting.report(report)?;
            }
            Event::Order(Order::End(code, text)) => {
                if code != 0 {
                    note(&format!("{text}; exit code {code}"));
                }
                meeting.leave();
                return Ok(code);
            }
            Event::Lost(why) => bail!(why),
            Event::Signal(signal) if TO_END.contains(&signal) => return Ok(code_of(signal)),
            // There are no ranks now.
            Event::Order(Order::Stop(_)) => {}
            Event::Ended { .. } | Event::Silent { .. } | Event::Signal(_) => {}
        }
    }
}

fn code_of(signal: i32) -> u8 {
    Status::Killed(signal).code()
}

fn listen_to_signals(events: Sender<Event>) -> Result<()> {
    let all = TO_END.iter().chain(&TO_PASS_ON);
    let mut signals = Signals::new(all).context("cannot listen to signals")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                break;
            }
        }
    });
    Ok(())
}

/// How an attempt ended on this node. No rank is left.
enum Outcome {
    Report(Report),
    /// Nobody is there to be told.
    Lost(String),
}

/// An attempt on this node, whose ranks run.
struct Attempt<'a> {
    plan: &'a Plan,
    /// Why the ranks were told to end, or soon will be.
    reason: Option<Reason>,
    /// When it is decided which rank failed first.
    settles: Option<Instant>,
    delays: usize,
    /// Whether they were told by a signal.
    is_signalled: bool,
}

enum Reason {
    /// A rank failed, perhaps not the first one until that is decided.
    Failure(Failure),
    /// tch-run got this signal.
    Signal(i32),
    /// Another node's rank failed. Until it is decided, one of this node may turn out to be first.
    Stop,
    Lost(String),
}

impl<'a> Attempt<'a> {
    fn new(plan: &'a Plan) -> Attempt<'a> {
        Attempt { plan, reason: None, settles: None, delays: 0, is_signalled: false }
    }

    fn run(
        mut self,
        options: &Options,
        processes: usize,
        events: &Receiver<Event>,
        sender: &Sender<Event>,
    ) -> Result<Outcome> {
        let mut ranks = match Ranks::start(options, self.plan, processes, sender) {
            Ok(ranks) => ranks,
            Err(CannotStart { error, code }) => {
                let failure = Failure::now(code, true, format!("{error:#}"));
                return Ok(Outcome::Report(Report::Failed(failure)));
            }
        };
        while let Some(limit) = ranks.tidy() {
            let left = self.settles.map(|at| at.saturating_duration_since(Instant::now()));
            if let Some(event) = next(events, left.map_or(limit, |left| left.min(limit)))? {
                self.handle(event, &mut ranks);
            }
            if self.settles.is_some_and(|at| Instant::now() >= at) {
                self.settle(&mut ranks);
            }
        }
        self.settle(&mut ranks);
        Ok(self.outcome(&ranks))
    }

    fn handle(&mut self, event: Event, ranks: &mut Ranks) {
        match event {
            Event::Ended { attempt, index, status, at } if attempt == self.plan.attempt => {
                ranks.has_ended(index, status, at);
                if !status.is_success() && self.reason.is_none() {
                    let failure = Failure::now(status.code(), false, String::new());
                    self.reason = Some(Reason::Failure(failure));
                    self.settles = Some(Instant::now() + SETTLING);
                }
            }
            Event::Signal(signal) => self.pass_on(signal, ranks),
            Event::Order(Order::Stop(text)) => {
                if self.reason.is_none() {
                    note(&format!("{text}; ending the ranks of this node"));
                    self.reason = Some(Reason::Stop);
                    self.settles = Some(Instant::now() + SETTLING);
                }
            }
            Event::Lost(why) => {
                ranks.end();
                self.reason = Some(Reason::Lost(why));
            }
            Event::Silent { attempt, index } if attempt == self.plan.attempt => {
                ranks.is_silent(index);
            }
            // Of an earlier attempt.
            Event::Ended { .. } | Event::Silent { .. } => {}
            // Only if node 0 cannot go on: otherwise it waits until no node has ranks.
            Event::Order(Order::End(_, text)) => {
                ranks.end();
                self.reason = Some(Reason::Lost(text));
            }
            Event::Order(Order::Start(_)) => {}
        }
    }

    /// Names the rank that failed first, and ends those that still run.
    fn settle(&mut self, ranks: &mut Ranks) {
        if self.settles.take().is_none() {
            return;
        }
        if self.delays < MOST_DELAYS && ranks.are_failing() {
            self.delays += 1;
            self.settles = Some(Instant::now() + SETTLING);
            return;
        }
        let is_final = match &self.reason {
            Some(Reason::Failure(failure)) => failure.is_final,
            Some(Reason::Stop) => false,
            _ => return,
        };
        let (done, mut failed): (Vec<End>, Vec<End>) =
            ranks.ends().into_iter().partition(|end| end.status.is_success());
        failed.sort_by_key(|end| (end.follows, end.at));
        let Some((first, others)) = failed.split_first() else { return ranks.end() };
        let name = |end: &End| {
            let rank = self.plan.first_rank + end.index;
            format!("rank {rank} {} after {:.1} s", end.status.text(), end.after.as_secs_f64())
        };
        let mut text = name(first);
        if let Some(said) = &first.said {
            text += &format!(" ({said})");
        }
        // A rank that leaves the others alone is the cause, as a rule.
        let before = done.iter().filter(|end| end.at <= first.at).map(name);
        if let Some(names) = listed(before) {
            text += &format!("; before that, {names}");
        }
        if self.plan.world_size > 1 {
            let end = if ranks.run() { "; ending the others" } else { "" };
            note(&format!("{text}{end}"));
            if let Some(names) = listed(others.iter().map(name)) {
                note(&format!("also {names}"));
            }
        }
        self.reason = Some(Reason::Failure(Failure {
            code: first.status.code(),
            is_final,
            follows: first.follows,
            at: nanoseconds(first.at),
            text,
        }));
        ranks.end();
    }

    /// Passes a signal on. The second one by which to end leaves no more time.
    fn pass_on(&mut self, signal: i32, ranks: &mut Ranks) {
        let is_to_end = TO_END.contains(&signal);
        if is_to_end && self.is_signalled {
            return ranks.end_now();
        }
        if let Some(named) = Signal::from_named_raw(signal) {
            ranks.signal(named, is_to_end);
        }
        if is_to_end {
            self.is_signalled = true;
            match &mut self.reason {
                Some(Reason::Failure(failure)) => failure.is_final = true,
                reason => *reason = Some(Reason::Signal(signal)),
            }
        }
    }

    fn outcome(self, ranks: &Ranks) -> Outcome {
        let report = match self.reason {
            None => Report::Done,
            Some(Reason::Stop) => Report::Stopped,
            Some(Reason::Failure(failure)) => Report::Failed(failure),
            Some(Reason::Lost(why)) => return Outcome::Lost(why),
            Some(Reason::Signal(signal)) => {
                let failed = ranks.ends().into_iter().find(|end| !end.status.is_success());
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                match failed {
                    // A program that ends well when it is asked to end has not failed.
                    None => Report::Done,
                    Some(end) => {
                        let text = format!("ended by {name}");
                        Report::Failed(Failure::now(end.status.code(), true, text))
                    }
                }
            }
        };
        Outcome::Report(report)
    }
}

/// The first names of a list and the number of the others, or `None` if it is empty.
fn listed(names: impl Iterator<Item = String>) -> Option<String> {
    let names: Vec<String> = names.collect();
    let more = names.len().saturating_sub(MOST_NAMES);
    let shown = names[..names.len() - more].join(", ");
    match (names.is_empty(), more) {
        (true, _) => None,
        (false, 0) => Some(shown),
        (false, more) => Some(format!("{shown}, and {more} more")),
    }
}

/// The next event, or `None` after this time.
fn next(events: &Receiver<Event>, limit: Duration) -> Result<Option<Event>> {
    match events.recv_timeout(limit) {
        Ok(event) => Ok(Some(event)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => bail!("no events any more"),
    }
}
