//! Stores, and how groups are made and end.

use super::processes::{Case, Ranks, free_port};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use support::python;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::distributed::{
    Env, GroupOptions, Master, ProcessGroup, ReduceOp, Store, TcpStoreOptions, run_ranks,
};

pub const CASES: &[Case] = &[("everything", everything)];

const TIMEOUT: Duration = Duration::from_secs(10);

fn number(value: f64) -> Tensor {
    Tensor::from_slice(&[value])
}

/// What each kind of store does.
fn use_store(store: &Store) -> Result<()> {
    store.set("a", b"1")?;
    store.set("empty", b"")?;
    assert_eq!(store.get("a")?, b"1");
    assert_eq!(store.get("empty")?, b"");
    store.set("a", &[0, 255, 10])?;
    assert_eq!(store.get("a")?, [0, 255, 10]);
    assert_eq!(store.add("count", 5)?, 5);
    assert_eq!(store.add("count", -2)?, 3);
    assert!(store.check("a")? && !store.check("b")?);
    assert_eq!(store.compare_set("c", b"", b"first")?, b"first");
    assert_eq!(store.compare_set("c", b"other", b"second")?, b"first");
    assert_eq!(store.compare_set("c", b"first", b"second")?, b"second");
    store.wait("c", Duration::from_secs(1))?;
    let error = store.wait("b", Duration::from_millis(50)).expect_err("unset").to_string();
    assert!(error.contains("Store::wait: key \"b\": "), "{error}");
    let part = store.prefix("part")?;
    part.set("a", b"x")?;
    assert_eq!(store.get("part/a")?, b"x");
    assert_eq!(part.prefix("deep")?.add("n", 1)?, 1);
    Ok(())
}

#[test]
fn stores() {
    use_store(&Store::hash(TIMEOUT).expect("a store")).expect("hash");
    let options = TcpStoreOptions { server: true, timeout: TIMEOUT, ..Default::default() };
    let server = Store::tcp("127.0.0.1", 0, &options).expect("a server");
    use_store(&server).expect("tcp");
    let options = TcpStoreOptions { timeout: TIMEOUT, ..Default::default() };
    let client =
        Store::tcp("127.0.0.1", server.port().expect("a port"), &options).expect("a client");
    assert_eq!(client.get("c").expect("the server's"), b"second");
    assert!(client.delete("c").expect("deleted"));
    assert!(!server.check("c").expect("gone"));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("store");
    use_store(&Store::file(&path, 1, TIMEOUT).expect("a store")).expect("file");
    let missing = Store::file(folder.path().join("no/such/folder"), 1, TIMEOUT);
    let error = missing.expect_err("no folder").to_string();
    assert!(error.contains("Store::file: ") && error.contains("No such file"), "{error}");
    let short = Store::hash(Duration::from_millis(50)).expect("a store");
    assert!(short.get("never").is_err());
}

/// Joins three ranks by stores of their own, and adds.
fn join_by(store: impl Fn(usize) -> Result<Store> + Sync) {
    run_ranks(3, |outer| {
        let options = GroupOptions::with_timeout(TIMEOUT);
        let group = ProcessGroup::with_store(&store(outer.rank())?, outer.rank(), 3, &options)?;
        let x = number(group.rank() as f64);
        group.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x.double_value(&[0]), 3.0);
        group.shutdown()
    })
    .expect("all ranks");
}

#[test]
fn groups_over_a_file_and_over_tcp() {
    let folder = tempfile::tempdir().expect("a folder");
    join_by(|_| Store::file(folder.path().join("store"), 3, TIMEOUT));
    let port = free_port();
    join_by(|rank| {
        let options = TcpStoreOptions {
            server: rank == 0,
            workers: Some(3),
            timeout: TIMEOUT,
            ..Default::default()
        };
        Store::tcp("127.0.0.1", port, &options)
    });
}

#[test]
fn a_group_of_one() {
    let group = ProcessGroup::single().expect("a group");
    assert_eq!((group.rank(), group.size(), group.name()), (0, 1, "0"));
    assert_eq!(group.device(), Device::Cpu);
    let x = number(2.0);
    group.all_reduce(&x, ReduceOp::Avg).expect("alone");
    group.broadcast(&x, 0).expect("alone");
    group.reduce(&x, 0, ReduceOp::Sum).expect("alone");
    assert_eq!(group.all_gather(&x).expect("alone"), [number(2.0)]);
    let y = number(0.0);
    group.reduce_scatter_into(&y, &x, ReduceOp::Sum).expect("alone");
    group.all_to_all(&y, &x).expect("alone");
    assert_eq!(y, x);
    group.barrier().expect("alone");
    group.monitored_barrier(TIMEOUT).expect("alone");
    let own = group.subgroup(&[0]).expect("alone").expect("a member");
    own.all_reduce(&x, ReduceOp::Sum).expect("alone");
    // Also as a launcher would start it, or nobody.
    let env = Env::from_vars([]).expect("a group of one");
    let options = GroupOptions { device: Some(Device::Cpu), ..GroupOptions::default() };
    ProcessGroup::init(&env, &options).expect("a group").barrier().expect("alone");
}

#[test]
fn subgroups() {
    run_ranks(4, |group| {
        let rank = group.rank();
        // The order of the list is that of the new ranks.
        let odd = group.subgroup(&[3, 1])?;
        assert_eq!(odd.is_some(), rank % 2 == 1);
        let even = group.subgroup(&[0, 2])?;
        let all = group.subgroup(&[2, 1, 0, 3])?.expect("a member");
        assert_eq!(all.rank(), [2, 1, 0, 3][rank]);
        let own = odd.or(even).expect("a member of one of them");
        let x = number(rank as f64);
        own.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x.double_value(&[0]), if rank % 2 == 1 { 4.0 } else { 2.0 });
        if rank == 3 {
            assert_eq!((own.rank(), own.size()), (0, 2));
        }
        // Subgroups of subgroups.
        let one = own.subgroup(&[1])?;
        assert_eq!(one.is_some(), own.rank() == 1);
        group.barrier()
    })
    .expect("all ranks");
}

#[test]
fn subgroups_that_are_refused() {
    run_ranks(2, |group| {
        for ranks in [&[][..], &[2], &[0, 0], &[usize::MAX]] {
            let error = group.subgroup(ranks).expect_err("wrong").to_string();
            assert!(
                error.contains("subgroup: ranks: expected different ranks less than 2"),
                "{error}"
            );
        }
        // The ranks do not agree, which is an error on both.
        let error = group.subgroup(&[group.rank()]).expect_err("they differ").to_string();
        assert!(error.contains("asks for the ranks ["), "{error}");
        // The next attempt works.
        assert!(group.subgroup(&[0, 1])?.is_some());
        // What only one rank asks for is refused on both, and counted on both.
        let ranks: &[usize] = if group.rank() == 1 { &[0, 5] } else { &[0, 1] };
        let error = group.subgroup(ranks).expect_err("one is wrong").to_string();
        let words = ["rank 1 asks for the ranks [0, 5]", "expected different ranks less than 2"];
        assert!(error.contains(words[group.rank()]), "{error}");
        assert!(group.subgroup(&[0, 1])?.is_some());
        group.barrier()
    })
    .expect("all ranks");
}

#[test]
fn several_groups_in_one_store_and_several_threads_in_one_group() {
    let store = Store::hash(TIMEOUT).expect("a store");
    run_ranks(2, |outer| {
        let rank = outer.rank();
        let named = |name: &str| {
            let options =
                GroupOptions { name: name.to_string(), ..GroupOptions::with_timeout(TIMEOUT) };
            ProcessGroup::with_store(&store, rank, 2, &options)
        };
        let groups = [named("a")?, named("b")?];
        // Each thread has a group of its own; they may run at any time.
        std::thread::scope(|scope| {
            for group in &groups {
                scope.spawn(move || {
                    for round in 0..20 {
                        let x = number(round as f64);
                        group.all_reduce(&x, ReduceOp::Sum).expect("both ranks");
                        assert_eq!(x.double_value(&[0]), 2.0 * round as f64);
                    }
                });
            }
        });
        // Threads that share a group start their operations one at a time.
        let turn = Mutex::new(());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let _turn = turn.lock().expect("no panic");
                    let x = number(1.0);
                    groups[0].all_reduce(&x, ReduceOp::Sum).expect("both ranks");
                    assert_eq!(x.double_value(&[0]), 2.0);
                });
            }
        });
        outer.barrier()
    })
    .expect("all ranks");
}

#[test]
fn the_end_of_a_group() {
    run_ranks(3, |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        group.shutdown()?;
        let error = group.barrier().expect_err("ended").to_string();
        assert!(error.contains("the group has failed: it was shut down"), "{error}");
        assert!(group.shutdown().is_err());
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn wrong_ranks_and_options() {
    let store = Store::hash(TIMEOUT).expect("a store");
    for (rank, size) in [(0, 0), (2, 2)] {
        let outcome = ProcessGroup::with_store(&store, rank, size, &GroupOptions::default());
        let error = outcome.expect_err("wrong").to_string();
        assert!(error.contains("rank: expected a number less than the size"), "{error}");
    }
    let none = GroupOptions::with_timeout(Duration::ZERO);
    assert!(ProcessGroup::with_store(&store, 0, 1, &none).is_err());
    let gpu = GroupOptions { device: Some(Device::Cuda(100)), ..GroupOptions::default() };
    let error = ProcessGroup::with_store(&store, 0, 1, &gpu).expect_err("no GPU").to_string();
    assert!(error.contains("options.device: expected"), "{error}");
    let env = Env { world_size: 2, local_world_size: 2, ..Env::single() };
    let error = ProcessGroup::init(&env, &GroupOptions::default()).expect_err("alone").to_string();
    assert!(error.contains("env.master: expected the place of the store"), "{error}");
}

/// Every collective between processes; the threads test kinds and layouts.
fn everything() -> Result<()> {
    let env = Env::from_env()?;
    let options = GroupOptions { device: Some(Device::Cpu), ..GroupOptions::with_timeout(TIMEOUT) };
    let group = ProcessGroup::init(&env, &options)?;
    let (rank, ranks) = (group.rank() as i64, group.size() as i64);
    assert_eq!((group.rank(), group.size()), (env.rank, env.world_size));
    let options = (Kind::Double, Device::Cpu);
    let all = |value: f64| Tensor::full([ranks], value, options);
    let sum = ranks * (ranks - 1) / 2;
    let x = Tensor::full([3, 4], rank as f64, options);
    group.all_reduce(&x.transpose(0, 1), ReduceOp::Sum)?;
    assert_eq!(x, x.full_like(sum as f64));
    let x = number(rank as f64);
    group.broadcast(&x, 1)?;
    assert_eq!(x, number(1.0));
    let x = number(rank as f64);
    group.reduce(&x, 0, ReduceOp::Max)?;
    assert_eq!(x, number(if rank == 0 { ranks - 1 } else { rank } as f64));
    let gathered = group.all_gather(&number(rank as f64))?;
    assert_eq!(Tensor::cat(&gathered, 0), Tensor::arange(ranks, options));
    let part = number(0.0);
    group.reduce_scatter_into(&part, &(Tensor::arange(ranks, options) + rank), ReduceOp::Sum)?;
    assert_eq!(part, number((sum + ranks * rank) as f64));
    let received = all(0.0);
    group.all_to_all(&received, &all(rank as f64))?;
    assert_eq!(received, Tensor::arange(ranks, options));
    let y = number(0.0);
    if rank == 0 {
        group.send(&number(5.0), 1, 2)?;
    } else if rank == 1 {
        group.recv(&y, 0, 2)?;
        assert_eq!(y, number(5.0));
    }
    if let Some(pair) = group.subgroup(&[1, 0])? {
        let x = number(rank as f64);
        pair.broadcast(&x, 0)?;
        assert_eq!(x, number(1.0));
    }
    group.monitored_barrier(TIMEOUT)?;
    println!("DONE");
    group.shutdown()
}

#[test]
fn processes() {
    for size in [2, 4] {
        let ranks: Vec<_> = (0..size).collect();
        let ends = Ranks::start("everything", &ranks, size, &[]).finish(Duration::from_secs(30));
        for end in &ends {
            assert!(end.code == Some(0) && end.text.contains("DONE"), "{ends:#?}");
        }
    }
}

/// A rank in Python, which is rank 0, and one in Rust.
/// A TCP store's client does one thing at a time, also while it waits for a key.
#[test]
fn a_group_is_given_up_while_a_thread_waits_in_its_store() {
    let options = TcpStoreOptions { server: true, ..Default::default() };
    let store = Store::tcp("127.0.0.1", 0, &options).expect("a server");
    let options = GroupOptions { check: false, ..GroupOptions::with_timeout(TIMEOUT) };
    let group = ProcessGroup::with_store(&store, 0, 1, &options).expect("a group");
    std::thread::scope(|scope| {
        scope.spawn(|| group.store().wait("never", Duration::from_secs(4)).expect_err("unset"));
        std::thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        group.poison("enough");
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    });
}

/// libtorch 2.11 notes the first operation of each group in a map without a lock, so that this crashed.
#[test]
fn groups_of_several_threads_start_operations_at_once() {
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                for _ in 0..120 {
                    let group = ProcessGroup::single().expect("a group");
                    let x = number(2.0);
                    group.all_reduce(&x, ReduceOp::Sum).expect("a sum");
                    assert_eq!(x, number(2.0));
                }
            });
        }
    });
}

#[test]
fn a_rank_in_python() {
    let port = free_port();
    let mut python = match python::command("tests/distributed/rank.py", &[port.to_string()]) {
        Ok(command) => command,
        Err(missing) => return eprintln!("SKIPPED a_rank_in_python: {missing}"),
    };
    let python = std::thread::spawn(move || python.output());
    let master = Some(Master::new("127.0.0.1", port));
    let env = Env {
        rank: 1,
        world_size: 2,
        local_rank: 1,
        local_world_size: 2,
        master,
        restart_count: 0,
    };
    let options = GroupOptions {
        check: false,
        device: Some(Device::Cpu),
        ..GroupOptions::with_timeout(Duration::from_secs(60))
    };
    let ours = || -> Result<()> {
        let group = ProcessGroup::init(&env, &options)?;
        let x = Tensor::from_slice(&[1.0_f32, 2.0]);
        group.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x, Tensor::from_slice(&[11.0_f32, 22.0]));
        group.broadcast(&x, 0)?;
        assert_eq!(x, Tensor::from_slice(&[5.0_f32, 6.0]));
        let gathered = group.all_gather(&Tensor::from(1_i64))?;
        assert_eq!(Tensor::stack(&gathered, 0), Tensor::from_slice(&[7_i64, 1]));
        group.send(&Tensor::from_slice(&[3.5_f32]), 0, 0)?;
        group.barrier()
    };
    let outcome = ours();
    let output = python.join().expect("no panic").expect("python3 was there a moment ago");
    let said = String::from_utf8_lossy(&output.stderr);
    outcome.unwrap_or_else(|error| panic!("{error}\n{said}"));
    assert!(output.status.success(), "{said}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.trim(), "[11.0, 22.0] [7, 1] [3.5]");
}
