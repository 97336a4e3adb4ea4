//! Stores that do not answer, and what ranks report of their failures.

use super::processes::{Case, Ranks};
use std::io::Write;
use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::distributed::{
    Env, GroupOptions, ProcessGroup, ReduceOp, Store, TcpStoreOptions,
};

pub const CASES: &[Case] =
    &[("stalled", || stalled(false)), ("stalled, compared", || stalled(true))];

const TIMEOUT: Duration = Duration::from_secs(2);

/// Rank 0, which has the store, is stopped: the kernel still takes what is sent to it.
fn stalled(check: bool) -> Result<()> {
    let options = GroupOptions { check, ..GroupOptions::with_timeout(TIMEOUT) };
    let group = ProcessGroup::init(&Env::from_env()?, &options)?;
    group.barrier()?;
    if group.rank() == 0 {
        let own = std::process::id().to_string();
        let _ = Command::new("kill").args(["-STOP", &own]).status();
        return Ok(());
    }
    // Rank 0 must be stopped before its backend could answer.
    std::thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    let x = Tensor::ones([4], (Kind::Float, Device::Cpu));
    println!("REDUCED {}", group.all_reduce(&x, ReduceOp::Sum).expect_err("rank 0 is stopped"));
    println!("CHECKED {}", group.store().check("key").expect_err("rank 0 is stopped"));
    let again = Instant::now();
    println!("AGAIN {}", group.store().add("key", 1).expect_err("rank 0 is stopped"));
    assert!(again.elapsed() < Duration::from_secs(1), "{:?}", again.elapsed());
    group.poison("enough");
    drop(group);
    println!("ENDED after {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

#[test]
fn the_process_with_the_store_is_stopped() {
    for case in ["stalled", "stalled, compared"] {
        let mut ranks = Ranks::start(case, &[0, 1], 2, &[]);
        ranks.wait_for(1, "ENDED after ");
        // Only this ends a process that is stopped.
        ranks.kill(0);
        let ends = ranks.finish(Duration::from_secs(40));
        let text = &ends[1].text;
        assert_eq!(ends[1].code, Some(0), "{text}");
        assert!(text.contains("REDUCED all_reduce: rank 1 of 2: "), "{text}");
        assert!(text.contains("a rank did not take part in time"), "{text}");
        let checked = |answer: &str| {
            text.contains(&format!(
                "CHECKED Store::check: key \"key\": the store gave no answer {answer}"
            ))
        };
        // With a GPU, NCCL's watchdog asks the store, too, and may have waited for it first.
        let waited_before = tch::Cuda::is_available() && checked("to an earlier call");
        assert!(checked("within 2000 ms") || waited_before, "{text}");
        assert!(
            text.contains("AGAIN Store::add: key \"key\": the store gave no answer to an"),
            "{text}"
        );
    }
}

/// Such as `python3 -m http.server`, which waits for the end of a line.
#[test]
fn another_program_has_the_port_of_the_store() {
    for answer in ["", "HTTP/1.1 400 Bad request\r\n\r\n"] {
        let other = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = other.local_addr().expect("an address").port();
        if !answer.is_empty() {
            std::thread::spawn(move || {
                for stream in other.incoming() {
                    let _ = stream.and_then(|mut stream| stream.write_all(answer.as_bytes()));
                }
            });
        }
        let (sender, outcome) = channel();
        std::thread::spawn(move || {
            let options = TcpStoreOptions { timeout: Duration::from_secs(1), ..Default::default() };
            let _ = sender.send(Store::tcp("127.0.0.1", port, &options).map(drop));
        });
        let outcome = outcome.recv_timeout(Duration::from_secs(15)).expect("an end in time");
        let error = outcome.expect_err("it is no store").to_string();
        assert!(error.starts_with(&format!("Store::tcp: 127.0.0.1:{port}: ")), "{error}");
        assert!(error.contains("the port answers, but what answers is no store"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

/// A server cannot listen where another store does, whose address is right.
#[test]
fn a_server_whose_port_is_taken_blames_no_store() {
    let options = TcpStoreOptions { server: true, multi_tenant: false, ..Default::default() };
    let first = Store::tcp("127.0.0.1", 0, &options).expect("a server");
    let port = first.port().expect("it has one");
    let error = Store::tcp("127.0.0.1", port, &options).expect_err("it is taken").to_string();
    assert!(error.contains("in use") && !error.contains("no store"), "{error}");
}

/// A store whose calls are made by threads has the errors of c10d and stays alive after them.
#[test]
fn a_key_that_does_not_come_harms_no_store() {
    let options =
        TcpStoreOptions { server: true, timeout: Duration::from_millis(300), ..Default::default() };
    let store = Store::tcp("127.0.0.1", 0, &options).expect("a server");
    for _ in 0..2 {
        let start = Instant::now();
        let error = store.get("never").expect_err("nobody sets it").to_string();
        assert!(error.contains("imeout"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        store.set("key", b"value").expect("alive");
        assert_eq!(store.get("key").expect("alive"), b"value");
    }
    // One thread waits; the call of another one ends all the same.
    std::thread::scope(|scope| {
        scope.spawn(|| store.wait("never", Duration::from_secs(2)).expect_err("nobody sets it"));
        std::thread::sleep(Duration::from_millis(300));
        let error = store.check("key").expect_err("it is in use").to_string();
        assert!(error.contains("another thread waited in this store"), "{error}");
    });
    assert!(store.check("key").expect("alive"));
}

/// tch-run reads it: a cause is told from what follows, whichever process ends first.
#[test]
fn ranks_report_the_failure_and_what_follows() {
    let folder = tempfile::tempdir().expect("a folder");
    for (case, words) in [
        // Rank 1 writes first, and rank 0 finds the file.
        ("panic", [" first panicked at ", ": an assertion of rank 1"]),
        // Rank 1 says nothing, and rank 0 knows that it was not the first.
        ("error", [" follows ", "rank 1: it dropped the group"]),
    ] {
        let file = folder.path().join(case);
        let vars = [("TCH_RUN_ERROR_FILE", file.to_str().expect("UTF-8"))];
        let ends = Ranks::start(case, &[0, 1], 2, &vars).finish(Duration::from_secs(40));
        let said =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{error} {ends:?}"));
        assert!(words.iter().all(|words| said.contains(words)), "{said}");
        assert!(said.ends_with('\n') && said.lines().count() == 1, "{said}");
        let at: u64 = said.split(' ').next().and_then(|at| at.parse().ok()).expect("a time");
        let since = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_nanos(at));
        assert!(since.is_ok_and(|since| since < Duration::from_secs(60)), "{said}");
    }
}
