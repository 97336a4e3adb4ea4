//! NCCL: CUDA tensors of ranks that are processes, on one GPU and on two.

use super::collectives::{KINDS, LAYOUTS, Placed, REDUCTIONS, exists, reduced, values};
use super::gpus_or_skip;
use super::processes::{Case, Ranks};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::{Graph, Stream, StreamGuard, empty_cache};
use tch_extension::distributed::{
    Env, GroupOptions, OnNcclError, ProcessGroup, ReduceOp, functional,
};

pub const CASES: &[Case] = &[
    ("nccl", everything),
    ("nccl, checked", differences),
    ("nccl, abort", || until_killed(OnNcclError::Abort)),
    ("nccl, exit", || until_killed(OnNcclError::Exit)),
    ("nccl, late", late),
    ("nccl, poison", poison),
    ("nccl, memory", memory),
    ("nccl, dropped", dropped),
    ("nccl, dropped after an error", dropped_after_an_error),
    ("nccl, dropped with a graph", || dropped_with_a_graph(false)),
    ("nccl, dropped with a graph in a panic", || dropped_with_a_graph(true)),
    ("nccl, captured, abort", captured_with_abort),
];

fn group(check: bool, timeout: u64) -> Result<ProcessGroup> {
    let options =
        GroupOptions { check, ..GroupOptions::with_timeout(Duration::from_secs(timeout)) };
    ProcessGroup::init(&Env::from_env()?, &options)
}

/// Every collective in every kind and layout that NCCL has.
fn everything() -> Result<()> {
    let group = group(false, 60)?;
    let (rank, ranks, device) = (group.rank(), group.size(), group.device());
    assert_eq!(device, Device::Cuda(rank));
    let on = |values: Tensor| values.to_device(device);
    for kind in KINDS {
        let own = |shape| on(values(rank, shape, kind));
        for layout in LAYOUTS {
            let all: Vec<_> = (0..ranks).map(|rank| on(values(rank, [4, 3], kind))).collect();
            let reductions = REDUCTIONS.into_iter().filter(|&op| {
                let is_bitwise =
                    matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor);
                exists(op, kind) && !is_bitwise
            });
            for op in reductions {
                let expected = on(reduced(op, ranks, [4, 3], kind));
                let tensor = Placed::new(&own([4, 3]), layout);
                group.all_reduce(&tensor.view, op)?;
                tensor.assert_is(&expected, &format!("all_reduce {op:?}"));
                let tensor = Placed::new(&own([4, 3]), layout);
                group.reduce(&tensor.view, 0, op)?;
                let expected = if rank == 0 { expected } else { own([4, 3]) };
                tensor.assert_is(&expected, &format!("reduce {op:?}"));
                let shape = [2 * ranks as i64, 3];
                let expected = on(reduced(op, ranks, shape, kind)).narrow(0, 2 * rank as i64, 2);
                let input = Placed::new(&own(shape), layout);
                let output = Placed::new(&expected.zeros_like(), layout);
                group.reduce_scatter_into(&output.view, &input.view, op)?;
                output.assert_is(&expected, &format!("reduce_scatter_into {op:?}"));
            }
            let tensor = Placed::new(&own([4, 3]), layout);
            group.broadcast(&tensor.view, ranks - 1)?;
            tensor.assert_is(&all[ranks - 1], "broadcast");
            let input = Placed::new(&own([4, 3]), layout);
            let expected = Tensor::cat(&all, 0);
            let output = Placed::new(&expected.zeros_like(), layout);
            group.all_gather_into(&output.view, &input.view)?;
            output.assert_is(&expected, "all_gather_into");
            assert_eq!(Tensor::cat(&group.all_gather(&input.view)?, 0), expected);
            let shape = [2 * ranks as i64, 3];
            let parts: Vec<_> = (0..ranks)
                .map(|from| on(values(from, shape, kind)).narrow(0, 2 * rank as i64, 2))
                .collect();
            let input = Placed::new(&own(shape), layout);
            let output = Placed::new(&own(shape).zeros_like(), layout);
            group.all_to_all(&output.view, &input.view)?;
            output.assert_is(&Tensor::cat(&parts, 0), "all_to_all");
            if ranks == 2 {
                match rank {
                    0 => group.send(&input.view, 1, 0)?,
                    _ => {
                        let whole = Placed::new(&own(shape).zeros_like(), layout);
                        group.recv(&whole.view, 0, 0)?;
                        whole.assert_is(&on(values(0, shape, kind)), "recv");
                    }
                }
            }
        }
        for shape in [vec![0, 3], vec![], vec![1]] {
            let x = Tensor::ones(&shape, (kind, device));
            group.all_reduce(&x, ReduceOp::Max)?;
            group.broadcast(&x, 0)?;
            assert_eq!(x, x.ones_like());
        }
    }
    // Tensors of the CPU, in the same group.
    let x = Tensor::from(rank as i64 + 1);
    group.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(i64::try_from(&x)?, (ranks * (ranks + 1) / 2) as i64);
    // What is launched after `wait` sees the results, without waiting on the CPU.
    let large = Tensor::ones([1 << 24], (Kind::Float, device));
    let mut works = Vec::new();
    for _ in 0..4 {
        works.push(group.all_reduce_async(&large, ReduceOp::Sum)?);
    }
    works.into_iter().try_for_each(|work| work.wait())?;
    let expected = (ranks as f64).powi(4);
    assert_eq!((&large - expected).abs().max().double_value(&[]), 0.0);
    let mut work = group.all_reduce_async(&large, ReduceOp::Max)?;
    assert!(work.wait_timeout(Duration::from_secs(30))?);
    group.broadcast_coalesced(&[&large, &x], 0)?;
    let leaf = Tensor::ones([2], (Kind::Double, device)).set_requires_grad(true);
    functional::all_reduce(&group, &leaf, ReduceOp::Sum)?.sum(Kind::Double).backward();
    assert_eq!(leaf.grad(), leaf.ones_like() * ranks as f64);
    let error = group.all_reduce(&Tensor::ones([2], (Kind::Int, device)), ReduceOp::BitAnd);
    assert!(error.expect_err("NCCL has none").to_string().contains("NCCL has none"));
    let all: Vec<_> = (0..ranks).rev().collect();
    let reversed = group.subgroup(&all)?.expect("a member");
    let x = Tensor::full([1], rank as f64, (Kind::Float, device));
    reversed.broadcast(&x, 0)?;
    assert_eq!(x.double_value(&[0]), ranks as f64 - 1.0);
    reversed.shutdown()?;
    group.barrier()?;
    println!("DONE");
    group.shutdown()
}

fn start(case: &str, ranks: usize) -> Ranks {
    let all: Vec<_> = (0..ranks).collect();
    Ranks::start(case, &all, ranks, &[])
}

fn assert_done(case: &str, ranks: usize) {
    for end in start(case, ranks).finish(Duration::from_secs(120)) {
        assert!(end.code == Some(0) && end.text.contains("DONE"), "{end:#?}");
    }
}

#[test]
fn cuda_one_rank() {
    if gpus_or_skip("cuda_one_rank", 1) {
        assert_done("nccl", 1);
    }
}

#[test]
fn cuda_two_ranks() {
    if gpus_or_skip("cuda_two_ranks", 2) {
        assert_done("nccl", 2);
    }
}

fn differences() -> Result<()> {
    let group = group(true, 30)?;
    let device = group.device();
    let size = if group.rank() == 0 { 4 } else { 8 };
    let x = Tensor::ones([size], (Kind::Float, device));
    let error = group.all_reduce(&x, ReduceOp::Sum).expect_err("they differ").to_string();
    assert!(error.contains("rank 1: all_reduce(sum) of Float [8]"), "{error}");
    let x = Tensor::ones([4], (Kind::Float, device));
    group.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(x, x.full_like(2.0));
    println!("DONE");
    group.shutdown()
}

#[test]
fn cuda_ranks_that_differ() {
    if gpus_or_skip("cuda_ranks_that_differ", 2) {
        assert_done("nccl, checked", 2);
    }
}

fn until_killed(on_nccl_error: OnNcclError) -> Result<()> {
    let options = GroupOptions {
        check: false,
        on_nccl_error,
        ..GroupOptions::with_timeout(Duration::from_secs(8))
    };
    let group = ProcessGroup::init(&Env::from_env()?, &options)?;
    println!("READY");
    loop {
        let x = Tensor::ones([1 << 20], (Kind::Float, group.device()));
        group.all_reduce(&x, ReduceOp::Sum)?;
        let _ = x.double_value(&[0]);
    }
}

#[test]
fn cuda_a_killed_rank() {
    if !gpus_or_skip("cuda_a_killed_rank", 2) {
        return;
    }
    for (case, code) in [("nccl, abort", Some(3)), ("nccl, exit", None)] {
        let mut ranks = start(case, 2);
        ranks.wait_for(0, "READY");
        ranks.wait_for(1, "READY");
        std::thread::sleep(Duration::from_millis(500));
        ranks.kill(1);
        let killed = Instant::now();
        let ends = ranks.finish(Duration::from_secs(120));
        // NCCL's watchdog waits up to a minute for a report of all ranks before it ends the process.
        assert!(killed.elapsed() < Duration::from_secs(90), "{case}: {ends:#?}");
        // An error, or the end of the process by NCCL's watchdog.
        assert_eq!(ends[0].code, code, "{case}: {ends:#?}");
        assert!(code.is_none() || ends[0].text.contains("ERROR all_reduce"), "{ends:#?}");
    }
}

fn late() -> Result<()> {
    let options = GroupOptions {
        check: false,
        on_nccl_error: OnNcclError::Abort,
        ..GroupOptions::with_timeout(Duration::from_secs(5))
    };
    let group = ProcessGroup::init(&Env::from_env()?, &options)?;
    let x = Tensor::ones([4], (Kind::Float, group.device()));
    group.all_reduce(&x, ReduceOp::Sum)?;
    if group.rank() == 1 {
        std::thread::sleep(Duration::from_secs(12));
        std::process::exit(0);
    }
    let start = Instant::now();
    let error = group.all_reduce(&x, ReduceOp::Sum).expect_err("late").to_string();
    println!("LATE after {:?}: {error}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(12));
    println!("DONE");
    std::process::exit(0)
}

#[test]
fn cuda_a_late_rank() {
    if gpus_or_skip("cuda_a_late_rank", 2) {
        let ends = start("nccl, late", 2).finish(Duration::from_secs(90));
        assert!(ends[0].code == Some(0) && ends[0].text.contains("DONE"), "{ends:#?}");
    }
}

fn poison() -> Result<()> {
    let group = group(false, 8)?;
    let x = Tensor::ones([4], (Kind::Float, group.device()));
    group.all_reduce(&x, ReduceOp::Sum)?;
    group.poison("its loss is NaN");
    let error = group.all_reduce(&x, ReduceOp::Sum).expect_err("poisoned").to_string();
    assert!(error.contains("its loss is NaN"), "{error}");
    println!("DONE");
    Ok(())
}

#[test]
fn cuda_a_rank_gives_its_group_up() {
    if gpus_or_skip("cuda_a_rank_gives_its_group_up", 1) {
        assert_done("nccl, poison", 1);
    }
}

/// Elements of 64 MiB.
const LARGE: i64 = 1 << 24;

/// Takes all memory of this size that the current stream may have, and writes other values there.
fn overwrite(device: Device) -> Vec<Tensor> {
    (0..4).map(|_| Tensor::full([LARGE], -7.0, (Kind::Float, device))).collect()
}

/// Memory of an operation must not be used again before the operation, and what follows it on the
/// stream that waits, has ended.
fn memory() -> Result<()> {
    let group = group(false, 60)?;
    let (rank, ranks, device) = (group.rank(), group.size(), group.device());
    let is_all =
        |tensor: &Tensor, value: f64| (tensor - value).abs().max().double_value(&[]) == 0.0;
    let (main, side) = (Stream::current(device)?, Stream::new(device)?);
    let matrix = Tensor::zeros([4096, 4096], (Kind::Float, device));
    for round in 0..8 {
        // So that the memory which becomes free is the only one.
        empty_cache()?;
        let input = Tensor::full([LARGE], (round + rank) as f64, (Kind::Float, device));
        let output = Tensor::zeros([ranks as i64 * LARGE], (Kind::Float, device));
        let work = group.all_gather_into_async(&output, &input)?;
        drop(input);
        let others = overwrite(device);
        work.wait()?;
        for (from, part) in output.chunk(ranks as i64, 0).iter().enumerate() {
            assert!(is_all(part, (round + from) as f64), "round {round}, rank {from}");
        }
        drop((others, output));

        // A strided tensor is computed in a copy, which belongs to the main stream. The side stream
        // copies it back, long after `wait` has returned and the copy is free.
        empty_cache()?;
        let whole = Tensor::ones([LARGE, 2], (Kind::Float, device));
        let strided = whole.select(1, 0);
        let work = group.all_reduce_async(&strided, ReduceOp::Sum)?;
        side.wait_stream(&main)?;
        {
            let _guard = StreamGuard::new(&side)?;
            for _ in 0..40 {
                let _ = matrix.matmul(&matrix);
            }
            work.wait()?;
        }
        assert!(!side.is_idle()?, "the side stream has still work to do");
        let others = overwrite(device);
        main.wait_stream(&side)?;
        assert!(is_all(&strided, ranks as f64), "round {round}");
        assert!(is_all(&whole.select(1, 1), 1.0), "round {round}");
        drop(others);
    }
    println!("DONE");
    group.shutdown()
}

#[test]
fn cuda_memory_of_operations_of_one_rank() {
    if gpus_or_skip("cuda_memory_of_operations_of_one_rank", 1) {
        assert_done("nccl, memory", 1);
    }
}

#[test]
fn cuda_memory_of_operations_of_two_ranks() {
    if gpus_or_skip("cuda_memory_of_operations_of_two_ranks", 2) {
        assert_done("nccl, memory", 2);
    }
}

/// What is in flight when a group is dropped is not lost.
fn dropped() -> Result<()> {
    let group = group(false, 60)?;
    let (ranks, device) = (group.size() as i64, group.device());
    let x = Tensor::ones([LARGE], (Kind::Float, device));
    let y = Tensor::zeros([ranks * LARGE], (Kind::Float, device));
    for _ in 0..20 {
        drop(group.all_reduce_async(&x, ReduceOp::Sum)?);
    }
    drop(group.all_gather_into_async(&y, &x)?);
    drop(group);
    let expected = (ranks as f64).powi(20);
    assert_eq!((&x - expected).abs().max().double_value(&[]), 0.0);
    assert_eq!((&y - expected).abs().max().double_value(&[]), 0.0);
    println!("DONE");
    // A rank that ends may still be read from.
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
}

#[test]
fn cuda_a_group_is_dropped_with_operations_in_flight() {
    for ranks in [1, 2] {
        if gpus_or_skip("cuda_a_group_is_dropped_with_operations_in_flight", ranks) {
            assert_done("nccl, dropped", ranks);
        }
    }
}

/// The other rank takes no part, so what is in flight would be waited for until the timeout.
fn dropped_after_an_error() -> Result<()> {
    let group = group(false, 60)?;
    let x = Tensor::ones([4], (Kind::Float, group.device()));
    group.all_reduce(&x, ReduceOp::Sum)?;
    if group.rank() == 1 {
        group.poison("its data end");
        // Its connections stay for a while.
        std::thread::sleep(Duration::from_secs(12));
        return Ok(());
    }
    // Whether it can be started is NCCL's affair.
    drop(group.all_reduce_async(&x, ReduceOp::Sum));
    let error = group.barrier().expect_err("rank 1 has given up").to_string();
    assert!(error.contains("its data end"), "{error}");
    let start = Instant::now();
    drop(group);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    println!("DONE");
    std::process::exit(0)
}

#[test]
fn cuda_a_group_is_dropped_after_an_error() {
    if gpus_or_skip("cuda_a_group_is_dropped_after_an_error", 2) {
        let ends = start("nccl, dropped after an error", 2).finish(Duration::from_secs(60));
        assert!(ends[0].code == Some(0) && ends[0].text.contains("DONE"), "{ends:#?}");
    }
}

/// NCCL would wait for the graph without end.
fn dropped_with_a_graph(panics: bool) -> Result<()> {
    let group = group(false, 60)?;
    let x = Tensor::ones([4], (Kind::Float, group.device()));
    group.all_reduce(&x, ReduceOp::Sum)?;
    let (graph, ()) = Graph::capture(group.device(), || group.all_reduce(&x, ReduceOp::Sum))?;
    let start = Instant::now();
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _group = group;
        assert!(!panics, "it is meant to panic");
    }));
    assert_eq!(dropped.is_err(), panics);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    println!("DONE");
    drop(graph);
    Ok(())
}

#[test]
fn cuda_a_group_is_dropped_with_a_graph() {
    if gpus_or_skip("cuda_a_group_is_dropped_with_a_graph", 1) {
        for end in start("nccl, dropped with a graph", 1).finish(Duration::from_secs(60)) {
            assert!(end.code == Some(0) && end.text.contains("DONE"), "{end:#?}");
            assert!(end.text.contains("a CUDA graph holds its collectives"), "{end:#?}");
        }
        for end in start("nccl, dropped with a graph in a panic", 1).finish(Duration::from_secs(60))
        {
            assert!(end.code == Some(0) && end.text.contains("DONE"), "{end:#?}");
        }
    }
}

/// The CPU must not wait for an operation that is captured.
fn captured_with_abort() -> Result<()> {
    let options = GroupOptions {
        check: false,
        on_nccl_error: OnNcclError::Abort,
        ..GroupOptions::with_timeout(Duration::from_secs(60))
    };
    let group = ProcessGroup::init(&Env::from_env()?, &options)?;
    let ranks = group.size() as i64;
    let like = (Kind::Float, group.device());
    let (x, y) = (Tensor::ones([4], like), Tensor::zeros([4 * ranks], like));
    let both = || {
        group.all_reduce_async(&x, ReduceOp::Sum)?.wait()?;
        group.all_gather_into(&y, &x)
    };
    both()?;
    let (graph, ()) = Graph::capture(group.device(), both)?;
    for _ in 0..3 {
        graph.replay()?;
    }
    both()?;
    assert_eq!(y, y.full_like((ranks as f64).powi(5)));
    drop(graph);
    println!("DONE");
    group.shutdown()
}

#[test]
fn cuda_operations_are_captured_with_abort() {
    for ranks in [1, 2] {
        if gpus_or_skip("cuda_operations_are_captured_with_abort", ranks) {
            assert_done("nccl, captured, abort", ranks);
        }
    }
}
