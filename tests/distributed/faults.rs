//! What goes wrong with ranks: it is always an error that says what, and never a hang.

use super::processes::{Case, End, Ranks, free_port};
use std::net::TcpListener;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::distributed::{
    Env, GroupOptions, ProcessGroup, ReduceOp, Store, TcpStoreOptions, run_ranks,
};

pub const CASES: &[Case] = &[
    ("reduce until killed", reduce_until_killed),
    ("late", late),
    ("server", server),
    ("error", error),
    ("panic", panic),
    ("join", join),
    ("shapes", shapes),
    ("poison", poison),
    ("exit", exit),
    ("drop", drop_in_flight),
];

/// The timeout of groups whose ranks fail.
const TIMEOUT: Duration = Duration::from_secs(4);

fn ones(size: i64) -> Tensor {
    Tensor::ones([size], (Kind::Float, Device::Cpu))
}

/// The group of a child.
fn group() -> Result<ProcessGroup> {
    ProcessGroup::init(&Env::from_env()?, &GroupOptions::with_timeout(TIMEOUT))
}

fn unchecked_group() -> Result<ProcessGroup> {
    let options = GroupOptions { check: false, ..GroupOptions::with_timeout(TIMEOUT) };
    ProcessGroup::init(&Env::from_env()?, &options)
}

fn assert_failed(end: &End, words: &str) {
    assert!(end.code == Some(3) && end.text.contains(words), "{words}: {end:#?}");
}

fn reduce_until_killed() -> Result<()> {
    let group = unchecked_group()?;
    group.barrier()?;
    println!("READY");
    loop {
        group.all_reduce(&ones(1 << 18), ReduceOp::Sum)?;
    }
}

#[test]
fn a_rank_is_killed_in_an_all_reduce() {
    let mut ranks = Ranks::start("reduce until killed", &[0, 1, 2], 3, &[]);
    for rank in 0..3 {
        ranks.wait_for(rank, "READY");
    }
    std::thread::sleep(Duration::from_millis(100));
    ranks.kill(1);
    let killed = Instant::now();
    let ends = ranks.finish(Duration::from_secs(20));
    // At once, and not after the timeout.
    assert!(killed.elapsed() < Duration::from_secs(3), "{ends:#?}");
    assert_eq!(ends[1].code, None);
    for rank in [0, 2] {
        assert_failed(&ends[rank], &format!("ERROR all_reduce: rank {rank} of 3: "));
        assert_failed(&ends[rank], "a rank ended or gave up");
    }
}

fn late() -> Result<()> {
    let options =
        GroupOptions { check: false, ..GroupOptions::with_timeout(Duration::from_secs(2)) };
    let group = ProcessGroup::init(&Env::from_env()?, &options)?;
    group.barrier()?;
    if group.rank() == 1 {
        std::thread::sleep(Duration::from_secs(4));
    }
    group.all_reduce(&ones(4), ReduceOp::Sum)
}

#[test]
fn a_rank_is_late() {
    let ends = Ranks::start("late", &[0, 1], 2, &[]).finish(Duration::from_secs(20));
    assert_failed(&ends[0], "ERROR all_reduce: rank 0 of 2: Timed out waiting 2000ms");
    assert_failed(&ends[0], "a rank did not take part in time");
    assert_failed(&ends[1], "ERROR all_reduce: rank 1 of 2: ");
}

fn server() -> Result<()> {
    let group = unchecked_group()?;
    group.barrier()?;
    println!("READY");
    if group.rank() == 0 {
        std::thread::sleep(Duration::from_secs(60));
    }
    // The parent kills rank 0 meanwhile.
    std::thread::sleep(Duration::from_secs(1));
    let start = Instant::now();
    println!("GET {}", group.store().get("nothing").expect_err("no server"));
    println!("SUBGROUP {}", group.subgroup(&[1, 2]).expect_err("no server"));
    assert!(start.elapsed() < Duration::from_secs(2), "at once");
    // The ranks that live still reach one another.
    let x = ones(2) * group.rank() as f64;
    match group.rank() {
        1 => group.send(&x, 2, 0)?,
        _ => group.recv(&x, 1, 0)?,
    }
    println!("RECEIVED {}", x.double_value(&[0]));
    Ok(())
}

#[test]
fn the_process_with_the_store_is_killed() {
    let mut ranks = Ranks::start("server", &[0, 1, 2], 3, &[]);
    for rank in 0..3 {
        ranks.wait_for(rank, "READY");
    }
    ranks.kill(0);
    let ends = ranks.finish(Duration::from_secs(20));
    for end in &ends[1..] {
        assert_eq!(end.code, Some(0), "{end:#?}");
        assert!(end.text.contains("GET Store::get: key \"nothing\": "), "{end:#?}");
        assert!(end.text.contains("SUBGROUP "), "{end:#?}");
        assert!(end.text.contains("RECEIVED 1"), "{end:#?}");
    }
}

fn error() -> Result<()> {
    let group = unchecked_group()?;
    if group.rank() == 1 {
        return Err(tch_extension::Error::msg("the data is missing"));
    }
    group.all_reduce(&ones(4), ReduceOp::Sum)
}

fn panic() -> Result<()> {
    let group = unchecked_group()?;
    assert!(group.rank() != 1, "an assertion of rank 1");
    group.all_reduce(&ones(4), ReduceOp::Sum)
}

#[test]
fn a_rank_returns_an_error_or_panics() {
    for (case, words) in [("error", "the data is missing"), ("panic", "an assertion of rank 1")] {
        let ends = Ranks::start(case, &[0, 1], 2, &[]).finish(Duration::from_secs(20));
        assert_failed(&ends[0], "ERROR all_reduce: rank 0 of 2: ");
        // A busy machine needs seconds to start both.
        let later = ends[0].after.saturating_sub(ends[1].after);
        assert!(later < Duration::from_secs(4), "{ends:#?}");
        assert!(ends[1].text.contains(words), "{ends:#?}");
        assert!(ends[1].code != Some(0));
    }
}

fn join() -> Result<()> {
    group().map(drop)
}

#[test]
fn a_rank_never_comes() {
    // Neither the other rank nor the store of rank 0.
    for (rank, words) in [(0, "1/2 clients joined"), (1, "127.0.0.1:")] {
        let ends = Ranks::start("join", &[rank], 2, &[]).finish(Duration::from_secs(20));
        assert_failed(&ends[0], "ERROR Store::tcp: 127.0.0.1:");
        assert_failed(&ends[0], words);
    }
}

#[test]
fn variables_are_wrong() {
    for (vars, words) in [
        ([("RANK", "two")], "ERROR Env::from_env: RANK: expected a number, 0 or more, got \"two\""),
        ([("WORLD_SIZE", "0")], "RANK: expected less than WORLD_SIZE, which is 0, got \"0\""),
        ([("MASTER_PORT", "0")], "MASTER_PORT: expected a port from 1 to 65535"),
        ([("MASTER_ADDR", "")], "MASTER_ADDR is unset"),
        ([("MASTER_ADDR", "no-such-host.invalid")], "ERROR Store::tcp: no-such-host.invalid:"),
    ] {
        let ends = Ranks::start("join", &[0], 2, &vars).finish(Duration::from_secs(20));
        assert_failed(&ends[0], words);
    }
}

#[test]
fn the_port_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let options = TcpStoreOptions { server: true, ..Default::default() };
    let error = Store::tcp("127.0.0.1", port, &options).expect_err("taken").to_string();
    assert!(error.contains(&format!("Store::tcp: 127.0.0.1:{port}: ")), "{error}");
    assert!(error.contains("address already in use") || error.contains("EADDRINUSE"), "{error}");
    let error = Store::tcp("127.0.0.1", 0, &TcpStoreOptions::default()).expect_err("0").to_string();
    assert!(error.contains("port 0 is none that a client could connect to"), "{error}");
    // A server may take any port.
    let store = Store::tcp("127.0.0.1", 0, &options).expect("a store");
    assert!(store.port().is_some_and(|port| port > 0));
}

#[test]
fn a_store_without_a_server() {
    let options = TcpStoreOptions { timeout: Duration::from_secs(2), ..Default::default() };
    let start = Instant::now();
    let error = Store::tcp("127.0.0.1", free_port(), &options).expect_err("no server").to_string();
    assert!(error.contains("Store::tcp: 127.0.0.1:"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10), "{error}");
}

fn shapes() -> Result<()> {
    let options = GroupOptions { check: true, ..GroupOptions::with_timeout(TIMEOUT) };
    let group = ProcessGroup::init(&Env::from_env()?, &options)?;
    group.all_reduce(&ones(4 + group.rank() as i64), ReduceOp::Sum)
}

#[test]
fn shapes_differ() {
    let ends = Ranks::start("shapes", &[0, 1], 2, &[]).finish(Duration::from_secs(20));
    for end in &ends {
        assert_failed(
            end,
            "rank 0: all_reduce(sum) of Float [4]; rank 1: all_reduce(sum) of Float [5]",
        );
    }
}

fn poison() -> Result<()> {
    let group = unchecked_group()?;
    let pair = group.subgroup(&[0, 1])?;
    group.barrier()?;
    if group.rank() == 1 {
        group.poison("its loss is NaN");
        let error = group.barrier().expect_err("poisoned").to_string();
        println!("OWN {error}");
        // It must live on, so that the others do not just see it end.
        std::thread::sleep(Duration::from_secs(2));
        return Ok(());
    }
    let start = Instant::now();
    let error = group.all_reduce(&ones(4), ReduceOp::Sum).expect_err("poisoned").to_string();
    println!("OTHER {error}");
    if let Some(pair) = pair {
        println!("PAIR {}", pair.barrier().expect_err("poisoned"));
    }
    println!("AGAIN {}", group.barrier().expect_err("poisoned"));
    assert!(start.elapsed() < Duration::from_secs(1), "at once");
    Ok(())
}

#[test]
fn a_rank_gives_its_groups_up() {
    let ends = Ranks::start("poison", &[0, 1, 2], 3, &[]).finish(Duration::from_secs(20));
    assert!(ends.iter().all(|end| end.code == Some(0)), "{ends:#?}");
    let own = "OWN barrier: rank 1 of 3: the group has failed: its loss is NaN";
    assert!(ends[1].text.contains(own), "{ends:#?}");
    for (end, rank) in [(&ends[0], 0), (&ends[2], 2)] {
        let words = format!("OTHER all_reduce: rank {rank} of 3: rank 1: its loss is NaN (");
        assert!(end.text.contains(&words), "{end:#?}");
        assert!(end.text.contains("AGAIN barrier: "), "{end:#?}");
    }
    assert!(ends[0].text.contains("PAIR barrier: rank 0 of 2: "), "{ends:#?}");
}

fn exit() -> Result<()> {
    let group = unchecked_group()?;
    let x = ones(1 << 20);
    // Nobody waits for it, and nothing is dropped.
    std::mem::forget(group.all_reduce_async(&x, ReduceOp::Sum)?);
    std::mem::forget(group);
    std::process::exit(7)
}

#[test]
fn a_program_ends_with_everything_in_flight() {
    let ends = Ranks::start("exit", &[0, 1], 2, &[]).finish(Duration::from_secs(20));
    assert!(ends.iter().all(|end| end.code == Some(7)), "{ends:#?}");
}

fn drop_in_flight() -> Result<()> {
    let group = unchecked_group()?;
    group.barrier()?;
    if group.rank() == 1 {
        std::thread::sleep(Duration::from_secs(1));
        return Ok(());
    }
    // The other rank never takes part, and ends.
    drop(group.all_reduce_async(&ones(4), ReduceOp::Sum)?);
    drop(group);
    println!("DROPPED");
    Ok(())
}

#[test]
fn a_group_is_dropped_with_an_operation_in_flight() {
    let ends = Ranks::start("drop", &[0, 1], 2, &[]).finish(Duration::from_secs(20));
    assert!(ends.iter().all(|end| end.code == Some(0)), "{ends:#?}");
    assert!(ends[0].text.contains("DROPPED"), "{ends:#?}");
}

#[test]
fn threads_that_fail() {
    let start = Instant::now();
    let error = run_ranks(3, |group| {
        if group.rank() == 1 {
            return Err(tch_extension::Error::msg("no data on rank 1"));
        }
        group.all_reduce(&ones(4), ReduceOp::Sum)
    });
    assert_eq!(error.expect_err("rank 1").to_string(), "no data on rank 1");
    let error = run_ranks(3, |group| {
        assert!(group.rank() != 2, "an assertion of rank 2");
        group.all_reduce(&ones(4), ReduceOp::Sum)
    });
    let error = error.expect_err("rank 2").to_string();
    assert!(error.contains("rank 2 panicked: an assertion of rank 2"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "at once");
    assert!(run_ranks(0, |_| Ok(())).is_err());
}

/// A thread that waits must wake up when another one gives the group up.
#[test]
fn abort_wakes_what_waits() {
    for check in [false, true] {
        let options = GroupOptions { check, ..GroupOptions::with_timeout(Duration::from_secs(20)) };
        super::ranks_with(2, &options, |group| {
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(1500));
                return Ok(());
            }
            let start = Instant::now();
            let other = group.clone();
            let aborts = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                other.abort();
            });
            let error = group.all_reduce(&ones(4), ReduceOp::Sum).expect_err("aborted").to_string();
            assert!(error.contains("the group was aborted"), "{error}");
            aborts.join().expect("no panic");
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
            assert!(group.failure().is_some());
            Ok(())
        })
        .expect("all ranks");
    }
}

#[test]
fn a_receiver_wakes_up_too() {
    super::unchecked(2, Duration::from_secs(20), |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_secs(1));
            return Ok(());
        }
        let other = group.clone();
        let aborts = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            other.abort();
        });
        let start = Instant::now();
        assert!(group.recv(&ones(4), 1, 0).is_err());
        assert!(start.elapsed() < Duration::from_secs(1));
        aborts.join().expect("no panic");
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn the_ranks_that_do_not_come_are_named() {
    let errors = super::unchecked(3, Duration::from_secs(10), |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_millis(1500));
            return Ok(String::new());
        }
        let outcome = group.monitored_barrier(Duration::from_millis(500));
        Ok(outcome.err().map_or(String::new(), |error| error.to_string()))
    });
    let errors = errors.expect("all ranks");
    assert!(errors[0].contains("monitored_barrier: rank 0 of 3: "), "{errors:?}");
    assert!(errors[0].contains("Ranks 2 failed to pass monitoredBarrier"), "{errors:?}");
}

#[test]
fn only_some_ranks_compare() {
    let store = Store::hash(Duration::from_secs(4)).expect("a store");
    let errors = run_ranks(2, |outer| {
        let options = GroupOptions {
            check: outer.rank() == 0,
            ..GroupOptions::with_timeout(Duration::from_secs(2))
        };
        let outcome = ProcessGroup::with_store(&store, outer.rank(), 2, &options);
        Ok(outcome.expect_err("they differ").to_string())
    });
    let errors = errors.expect("both ranks");
    assert!(
        errors[0].contains("rank 1 does not compare operations; set GroupOptions::check"),
        "{errors:?}"
    );
}

/// The ranks wait in the store there, of which Gloo's connections know nothing.
#[test]
fn what_waits_in_the_store_ends_when_a_rank_gives_up() {
    type Waits = fn(&ProcessGroup) -> Result<()>;
    let cases: [Waits; 2] = [|group| group.shutdown(), |group| group.subgroup(&[0, 1]).map(drop)];
    for waits in cases {
        let texts = super::unchecked(3, Duration::from_secs(20), |group| {
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(300));
                group.poison("its loss is NaN");
                return Ok(String::new());
            }
            let start = Instant::now();
            let error = waits(group).expect_err("rank 1 gave up").to_string();
            assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
            Ok(error)
        });
        let texts = texts.expect("all ranks");
        for rank in [0, 2] {
            let words = format!("rank {rank} of 3: rank 1: its loss is NaN (");
            assert!(texts[rank].contains(&words), "{texts:?}");
        }
    }
}

/// A thread of the same rank can end the waiting, too.
#[test]
fn abort_wakes_a_shutdown() {
    super::unchecked(2, Duration::from_secs(20), |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(1500));
            return Ok(());
        }
        let (other, start) = (group.clone(), Instant::now());
        let aborts = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            other.abort();
        });
        let error = group.shutdown().expect_err("aborted").to_string();
        assert!(error.contains("the group was aborted"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        aborts.join().expect("no panic");
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn one_rank_ends_the_group_while_another_uses_it() {
    let start = Instant::now();
    let texts = super::checked(2, Duration::from_secs(20), |group| {
        let outcome = match group.rank() {
            0 => group.shutdown(),
            _ => group.all_reduce(&ones(4), ReduceOp::Sum),
        };
        Ok(outcome.expect_err("they differ").to_string())
    });
    for text in texts.expect("both ranks") {
        let words =
            "the ranks call different operations: rank 0: shutdown; rank 1: all_reduce(sum)";
        assert!(text.contains(words), "{text}");
    }
    assert!(start.elapsed() < Duration::from_secs(5), "at once");
}

/// The others are told what failed first, also when it was no operation of the group.
#[test]
fn an_error_of_a_program_reaches_the_others() {
    type Fails = fn(&ProcessGroup) -> Result<()>;
    let cases: [(Fails, &str); 2] = [
        (
            |group| group.run(|| Err(tch_extension::Error::msg("the data end early"))),
            "rank 1: the data end early",
        ),
        (
            |group| {
                let panics = || group.run(|| -> Result<()> { panic!("an assertion") });
                assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
                Ok(())
            },
            "rank 1: it panicked",
        ),
    ];
    for (fails, words) in cases {
        super::unchecked(3, Duration::from_secs(20), |group| {
            let joined = |rank: usize| format!("joined/{rank}");
            group.store().set(&joined(group.rank()), b"")?;
            if group.rank() == 1 {
                // A rank that is not connected yet would have no operation that fails.
                for rank in [0, 2] {
                    group.store().wait(&joined(rank), group.timeout())?;
                }
                let _ = fails(group);
                return Ok(());
            }
            let error = group.run(|| group.all_reduce(&ones(4), ReduceOp::Sum));
            let error = error.expect_err("rank 1 failed").to_string();
            assert!(error.contains(words), "{error}");
            // This rank has given the group up, too. What was the cause stays.
            std::thread::sleep(Duration::from_millis(100));
            let kept = group.store().get("tch_extension/failed")?;
            assert_eq!(String::from_utf8_lossy(&kept), words);
            Ok(())
        })
        .expect("all ranks");
    }
}

/// The others may still connect when a rank that has joined fails: the failure is the cause.
#[test]
fn an_error_of_a_program_reaches_a_rank_that_joins() {
    let options =
        GroupOptions { check: false, ..GroupOptions::with_timeout(Duration::from_secs(2)) };
    let store = Store::hash(options.timeout).expect("a store");
    let own = store.prefix(&format!("{}/", options.name)).expect("the group's part");
    own.set("tch_extension/failed", b"rank 1: the data end early").expect("set");
    let error = ProcessGroup::with_store(&store, 0, 2, &options).expect_err("nobody joins");
    let words = "ProcessGroup::with_store: rank 0 of 2: rank 1: the data end early (";
    assert!(error.to_string().starts_with(words), "{error}");
}

/// As a program does that returns an error between two operations.
#[test]
fn a_rank_that_drops_its_group_is_named() {
    let store = Store::hash(Duration::from_secs(20)).expect("a store");
    let texts = run_ranks(2, |outer| {
        let options = GroupOptions::with_timeout(Duration::from_secs(20));
        let group = ProcessGroup::with_store(&store, outer.rank(), 2, &options)?;
        group.barrier()?;
        if group.rank() == 1 {
            drop(group);
            outer.barrier()?;
            return Ok(String::new());
        }
        let error = group.all_reduce(&ones(4), ReduceOp::Sum).expect_err("rank 1 has left");
        outer.barrier()?;
        Ok(error.to_string())
    });
    let words = "rank 1: it dropped the group without shutdown or poison (";
    let texts = texts.expect("both ranks");
    assert!(texts[0].contains(words), "{texts:?}");
}
