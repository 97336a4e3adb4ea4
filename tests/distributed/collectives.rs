//! Every collective in every kind and layout, with ranks as threads. Memory next to a view must stay
//! as it is.

use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::distributed::{ProcessGroup, ReduceOp, Work, run_ranks};
use tch_extension::view::{view, view_mut};
use tch_extension::{Error, Result};

pub const KINDS: [Kind; 9] = [
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::Int8,
    Kind::Uint8,
    Kind::Int,
    Kind::Int64,
    Kind::Bool,
];

pub const REDUCTIONS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    Contiguous,
    Transposed,
    Strided,
    Offset,
}

pub const LAYOUTS: [Layout; 4] =
    [Layout::Contiguous, Layout::Transposed, Layout::Strided, Layout::Offset];

/// A tensor with the memory in which it lies.
pub struct Placed {
    base: Tensor,
    pub view: Tensor,
    layout: Layout,
}

impl Placed {
    /// Lays these values out; `[R, C]`.
    pub fn new(values: &Tensor, layout: Layout) -> Placed {
        let (rows, columns) = (values.size()[0], values.size()[1]);
        let shape = match layout {
            Layout::Contiguous => [rows, columns],
            Layout::Transposed => [columns, rows],
            Layout::Strided => [rows, 2 * columns],
            Layout::Offset => [rows + 2, columns],
        };
        let base = Tensor::ones(shape, (values.kind(), values.device()));
        let view = Placed::view_of(&base, layout);
        view.shallow_clone().copy_(values);
        Placed { base, view, layout }
    }

    fn view_of(base: &Tensor, layout: Layout) -> Tensor {
        match layout {
            Layout::Contiguous => base.shallow_clone(),
            Layout::Transposed => base.transpose(0, 1),
            Layout::Strided => base.slice(1, 0, base.size()[1], 2),
            Layout::Offset => base.slice(0, 1, base.size()[0] - 1, 1),
        }
    }

    /// Whether the view has these values, and the memory around it what it had.
    pub fn assert_is(&self, expected: &Tensor, what: &str) {
        let whole = Tensor::ones(self.base.size(), (self.base.kind(), self.base.device()));
        Placed::view_of(&whole, self.layout).copy_(expected);
        assert_eq!(self.base, whole, "{what} in {:?}, {:?}", self.base.kind(), self.layout);
    }
}

/// The values of a rank: 1 to 3, or booleans, so that no kind rounds a sum or a product.
pub fn values(rank: usize, shape: [i64; 2], kind: Kind) -> Tensor {
    let numbers = Tensor::arange(shape[0] * shape[1], (Kind::Int64, Device::Cpu)) + rank as i64;
    let numbers = match kind {
        Kind::Bool => numbers.remainder(2),
        _ => numbers.remainder(3) + 1,
    };
    numbers.reshape(shape).to_kind(kind)
}

pub fn exists(op: ReduceOp, kind: Kind) -> bool {
    let is_float = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
    match op {
        ReduceOp::Avg => is_float,
        ReduceOp::Sum | ReduceOp::Product => kind != Kind::Bool,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !is_float,
        ReduceOp::Min | ReduceOp::Max => true,
    }
}

/// The reduction of all ranks' values, computed by tch.
pub fn reduced(op: ReduceOp, ranks: usize, shape: [i64; 2], kind: Kind) -> Tensor {
    let all: Vec<_> =
        (0..ranks).map(|rank| values(rank, shape, kind).to_kind(Kind::Int64)).collect();
    let mut sum = all[0].shallow_clone();
    for next in &all[1..] {
        sum = match op {
            ReduceOp::Sum | ReduceOp::Avg => sum + next,
            ReduceOp::Product => sum * next,
            ReduceOp::Min => sum.minimum(next),
            ReduceOp::Max => sum.maximum(next),
            ReduceOp::BitAnd => sum.bitwise_and_tensor(next),
            ReduceOp::BitOr => sum.bitwise_or_tensor(next),
            ReduceOp::BitXor => sum.bitwise_xor_tensor(next),
        };
    }
    match op {
        // Rounded once, as the backend does in every kind.
        ReduceOp::Avg => (sum.to_kind(Kind::Float) / ranks as f64).to_kind(kind),
        _ => sum.to_kind(kind),
    }
}

pub fn ones(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

/// Calls `test` on 2 to 4 ranks, for each kind.
fn on_ranks(test: impl Fn(&ProcessGroup, Kind) -> Result<()> + Sync) {
    for ranks in 2..=4 {
        run_ranks(ranks, |group| KINDS.iter().try_for_each(|&kind| test(&group, kind)))
            .unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
    }
}

#[test]
fn all_reduce() {
    on_ranks(|group, kind| {
        for op in REDUCTIONS.into_iter().filter(|&op| exists(op, kind)) {
            for layout in LAYOUTS {
                let tensor = Placed::new(&values(group.rank(), [4, 3], kind), layout);
                group.all_reduce(&tensor.view, op)?;
                let expected = reduced(op, group.size(), [4, 3], kind);
                if op == ReduceOp::Avg && group.size() == 3 && kind != Kind::Float {
                    // Thirds: whether the sum or its parts are divided is up to the backend.
                    let off = (tensor.view.to_kind(Kind::Double) - expected.to_kind(Kind::Double))
                        .abs()
                        .max()
                        .double_value(&[]);
                    let bound = match kind {
                        Kind::Half => 2e-3,
                        Kind::BFloat16 => 2e-2,
                        _ => 1e-6,
                    };
                    assert!(off <= bound, "{kind:?}: {off}");
                    continue;
                }
                tensor.assert_is(&expected, &format!("all_reduce {op:?}"));
            }
        }
        Ok(())
    });
}

#[test]
fn broadcast() {
    on_ranks(|group, kind| {
        for root in 0..group.size() {
            for layout in LAYOUTS {
                let tensor = Placed::new(&values(group.rank(), [4, 3], kind), layout);
                group.broadcast(&tensor.view, root)?;
                tensor.assert_is(&values(root, [4, 3], kind), "broadcast");
            }
        }
        Ok(())
    });
}

#[test]
fn broadcast_of_many_tensors() {
    for ranks in 1..=3 {
        run_ranks(ranks, |group| {
            let make = |rank: usize| -> Vec<Placed> {
                let all = KINDS.into_iter().flat_map(|kind| LAYOUTS.map(|layout| (kind, layout)));
                all.map(|(kind, layout)| Placed::new(&values(rank, [4, 3], kind), layout)).collect()
            };
            let placed = make(group.rank());
            let scalar = Tensor::from(group.rank() as i64);
            let views: Vec<_> = placed.iter().map(|placed| &placed.view).chain([&scalar]).collect();
            group.broadcast_coalesced(&views, ranks - 1)?;
            for placed in &placed {
                let expected = values(ranks - 1, [4, 3], placed.base.kind());
                placed.assert_is(&expected, "broadcast_coalesced");
            }
            assert_eq!(i64::try_from(&scalar)?, ranks as i64 - 1);
            group.broadcast_coalesced(&[], 0)
        })
        .expect("all ranks");
    }
}

#[test]
fn reduce() {
    on_ranks(|group, kind| {
        for op in REDUCTIONS.into_iter().filter(|&op| op != ReduceOp::Avg && exists(op, kind)) {
            for layout in LAYOUTS {
                let own = values(group.rank(), [4, 3], kind);
                let tensor = Placed::new(&own, layout);
                group.reduce(&tensor.view, 1, op)?;
                let expected = match group.rank() {
                    1 => reduced(op, group.size(), [4, 3], kind),
                    _ => own,
                };
                tensor.assert_is(&expected, &format!("reduce {op:?}"));
            }
        }
        Ok(())
    });
}

#[test]
fn all_gather() {
    on_ranks(|group, kind| {
        let (rank, ranks) = (group.rank(), group.size());
        let all: Vec<_> = (0..ranks).map(|rank| values(rank, [4, 3], kind)).collect();
        let expected = Tensor::cat(&all, 0);
        for layout in LAYOUTS {
            let input = Placed::new(&values(rank, [4, 3], kind), layout);
            let gathered = group.all_gather(&input.view)?;
            assert_eq!(gathered.len(), ranks);
            for (gathered, expected) in gathered.iter().zip(&all) {
                assert_eq!(gathered, expected, "all_gather {kind:?} {layout:?}");
            }
            let output = Placed::new(&expected.zeros_like(), layout);
            group.all_gather_into(&output.view, &input.view)?;
            output.assert_is(&expected, "all_gather_into");
            input.assert_is(&all[rank], "the input of all_gather_into");
        }
        Ok(())
    });
}

#[test]
fn reduce_scatter() {
    on_ranks(|group, kind| {
        let (rank, ranks) = (group.rank(), group.size());
        let shape = [2 * ranks as i64, 3];
        for op in REDUCTIONS.into_iter().filter(|&op| op != ReduceOp::Avg && exists(op, kind)) {
            let whole = reduced(op, ranks, shape, kind);
            let expected = whole.narrow(0, 2 * rank as i64, 2);
            for layout in LAYOUTS {
                let own = values(rank, shape, kind);
                let input = Placed::new(&own, layout);
                let output = Placed::new(&expected.zeros_like(), layout);
                group.reduce_scatter_into(&output.view, &input.view, op)?;
                output.assert_is(&expected, &format!("reduce_scatter_into {op:?}"));
                input.assert_is(&own, "the input of reduce_scatter_into");
            }
        }
        Ok(())
    });
}

#[test]
fn the_mean_of_reduce_scatter() {
    for ranks in [2, 4] {
        run_ranks(ranks, |group| {
            for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
                let shape = [2 * ranks as i64, 3];
                let output = Tensor::zeros([2, 3], (kind, Device::Cpu));
                let input = values(group.rank(), shape, kind);
                group.reduce_scatter_into(&output, &input, ReduceOp::Avg)?;
                let whole = reduced(ReduceOp::Avg, ranks, shape, kind);
                assert_eq!(output, whole.narrow(0, 2 * group.rank() as i64, 2), "{kind:?}");
            }
            Ok(())
        })
        .expect("all ranks");
    }
}

#[test]
fn all_to_all() {
    on_ranks(|group, kind| {
        let (rank, ranks) = (group.rank(), group.size());
        let shape = [2 * ranks as i64, 3];
        let parts: Vec<_> = (0..ranks)
            .map(|from| values(from, shape, kind).narrow(0, 2 * rank as i64, 2))
            .collect();
        let expected = Tensor::cat(&parts, 0);
        for layout in LAYOUTS {
            let input = Placed::new(&values(rank, shape, kind), layout);
            let output = Placed::new(&expected.zeros_like(), layout);
            group.all_to_all(&output.view, &input.view)?;
            output.assert_is(&expected, "all_to_all");
        }
        Ok(())
    });
}

#[test]
fn all_to_all_of_parts_with_different_sizes() {
    on_ranks(|group, kind| {
        let (rank, ranks) = (group.rank(), group.size());
        // Rank r sends (r + s) % 3 rows to rank s.
        let rows = |from: usize, to: usize| ((from + to) % 3) as i64;
        let sent: Vec<_> = (0..ranks).map(|to| rows(rank, to)).collect();
        let received: Vec<_> = (0..ranks).map(|from| rows(from, rank)).collect();
        let input =
            |from: usize| values(from, [(0..ranks).map(|to| rows(from, to)).sum(), 3], kind);
        let parts: Vec<_> = (0..ranks)
            .map(|from| {
                let before = (0..rank).map(|to| rows(from, to)).sum();
                input(from).narrow(0, before, rows(from, rank))
            })
            .collect();
        let expected = Tensor::cat(&parts, 0);
        for layout in LAYOUTS {
            let from = Placed::new(&input(rank), layout);
            let to = Placed::new(&expected.zeros_like(), layout);
            group.all_to_all_sizes(&to.view, &received, &from.view, &sent)?;
            to.assert_is(&expected, "all_to_all_sizes");
        }
        Ok(())
    });
}

/// As a router of experts may: rank 0 has nothing to send.
#[test]
fn all_to_all_of_a_rank_without_rows() {
    super::checked(3, Duration::from_secs(8), |group| {
        let rank = group.rank();
        let sent = if rank == 0 { [0; 3] } else { [1; 3] };
        let input = values(rank, [sent.iter().sum(), 4], Kind::Float);
        let output = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
        group.all_to_all_sizes(&output, &[0, 1, 1], &input, &sent)?;
        for from in [1, 2] {
            let row = values(from, [3, 4], Kind::Float).narrow(0, rank as i64, 1);
            assert_eq!(output.narrow(0, from as i64 - 1, 1), row);
        }
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn send_and_receive() {
    on_ranks(|group, kind| {
        let (rank, ranks) = (group.rank(), group.size());
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        for layout in LAYOUTS {
            let sent = Placed::new(&values(rank, [4, 3], kind), layout);
            let received = Placed::new(&values(rank, [4, 3], kind).zeros_like(), layout);
            // Received first, and then sent, which only works without waiting.
            let receive = group.recv_async(&received.view, previous, 7)?;
            let send = group.send_async(&sent.view, next, 7)?;
            receive.wait()?;
            send.wait()?;
            received.assert_is(&values(previous, [4, 3], kind), "recv");
        }
        // Tags tell messages apart.
        if rank == 0 {
            group.send(&values(3, [4, 3], kind), 1, 3)?;
            group.send(&values(4, [4, 3], kind), 1, 4)?;
        } else if rank == 1 {
            let (third, fourth) =
                (values(0, [4, 3], kind).zeros_like(), values(0, [4, 3], kind).zeros_like());
            let (third_work, fourth_work) =
                (group.recv_async(&third, 0, 3)?, group.recv_async(&fourth, 0, 4)?);
            third_work.wait()?;
            fourth_work.wait()?;
            assert_eq!((third, fourth), (values(3, [4, 3], kind), values(4, [4, 3], kind)));
        }
        Ok(())
    });
}

#[test]
fn no_elements_one_element_and_no_dimensions() {
    on_ranks(|group, kind| {
        let (rank, ranks) = (group.rank() as i64, group.size() as i64);
        let options = (kind, Device::Cpu);
        for shape in [vec![0, 3], vec![0], vec![], vec![1], vec![1, 1]] {
            let tensor = || Tensor::ones(&shape, options);
            let count = tensor().numel() as i64;
            let x = tensor();
            group.all_reduce(&x, ReduceOp::Max)?;
            group.broadcast(&x, 1)?;
            group.reduce(&x, 0, ReduceOp::Min)?;
            assert_eq!(x, tensor(), "{shape:?}");
            for gathered in group.all_gather(&x)? {
                assert_eq!(gathered, tensor(), "{shape:?}");
            }
            let whole = Tensor::zeros([ranks * count], options);
            group.all_gather_into(&whole, &x)?;
            assert_eq!(whole, whole.ones_like());
            let part = tensor().zeros_like();
            group.reduce_scatter_into(&part, &whole, ReduceOp::Max)?;
            assert_eq!(part, tensor(), "{shape:?}");
            if rank == 0 {
                group.send(&x, 1, 0)?;
            } else if rank == 1 {
                let y = tensor().zeros_like();
                group.recv(&y, 0, 0)?;
                assert_eq!(y, tensor(), "{shape:?}");
            }
        }
        let empty = Tensor::zeros([0, 3], options);
        group.all_to_all(&empty, &empty)
    });
}

#[test]
fn many_in_flight() {
    run_ranks(3, |group| {
        let tensors: Vec<_> =
            (0..20).map(|i| Tensor::full([1000 + i], 1.0, (Kind::Float, Device::Cpu))).collect();
        let works: Result<Vec<_>> =
            tensors.iter().map(|tensor| group.all_reduce_async(tensor, ReduceOp::Sum)).collect();
        for work in works?.into_iter().rev() {
            work.wait()?;
        }
        for tensor in &tensors {
            assert_eq!(*tensor, tensor.full_like(3.0));
        }
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn a_large_tensor() {
    run_ranks(2, |group| {
        let x = Tensor::full([1 << 22], group.rank() as f64 + 1.0, (Kind::Float, Device::Cpu));
        group.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x, x.full_like(3.0));
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn waiting_for_a_while() {
    // Without checks, because they wait at the start.
    super::unchecked(2, Duration::from_secs(20), |group| {
        let x = Tensor::from(1.0);
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
        }
        let mut work = group.all_reduce_async(&x, ReduceOp::Sum)?;
        if group.rank() == 0 {
            assert!(!work.wait_timeout(Duration::from_millis(50))?);
            assert!(!work.is_completed());
        }
        while !work.wait_timeout(Duration::from_secs(1))? {}
        assert!(work.is_completed());
        assert!(work.wait_timeout(Duration::ZERO)?);
        work.wait()?;
        assert_eq!(x.double_value(&[]), 2.0);
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn a_message_that_nobody_waits_for_stops_nothing() {
    super::unchecked(2, Duration::from_secs(10), |group| {
        let x = Tensor::from(1.0);
        match group.rank() {
            0 => group.send(&x, 1, 5)?,
            _ => drop(group.recv_async(&Tensor::from(0.0), 0, 5)?),
        }
        group.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x.double_value(&[]), 2.0);
        Ok(())
    })
    .expect("all ranks");
}

/// Autograd must see that values change: it would use the new ones as if they were saved.
#[test]
fn version_counters() {
    run_ranks(2, |group| {
        let leaf = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
        let scale = Tensor::from_slice(&[3.0, 4.0]);
        let loss = (&leaf * &scale).sum(Kind::Double);
        group.all_reduce(&scale, ReduceOp::Sum)?;
        let error = loss.f_backward().map_err(Error::from).expect_err("changed").to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
        // A parameter may be written, since it belongs to no graph yet.
        group.broadcast(&leaf, 0)?;
        Ok(())
    })
    .expect("all ranks");
}

/// What a view says while an operation uses the memory.
fn in_use<T>(view: Result<T>) -> bool {
    match view {
        Ok(_) => false,
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("wait for its Work first"), "{text}");
            true
        }
    }
}

#[test]
fn memory_in_flight_has_no_views() {
    // The operations of rank 0 are in flight until rank 1 begins them, too.
    let turn = std::sync::Barrier::new(2);
    super::unchecked(2, Duration::from_secs(20), |group| {
        let ones = || Tensor::ones([4, 3], (Kind::Float, Device::Cpu));
        let in_flight = |operation: &dyn Fn() -> Result<Work>, meanwhile: &mut dyn FnMut()| {
            turn.wait();
            let work = (group.rank() == 0).then(operation).transpose()?;
            if work.is_some() {
                meanwhile();
            }
            turn.wait();
            work.map_or_else(operation, Ok)
        };
        for layout in [Layout::Contiguous, Layout::Transposed] {
            let Placed { view: x, base, .. } = Placed::new(&ones(), layout);
            let mut rest = base.narrow(0, 0, 1);
            let reduce = || group.all_reduce_async(&x, ReduceOp::Sum);
            let work = in_flight(&reduce, &mut || {
                assert!(in_use(view::<f32, 2>(&x)));
                assert!(in_use(view_mut::<f32, 2>(&mut rest)));
                let error = reduce().expect_err("the same memory").to_string();
                assert!(error.contains("wait for its Work first"), "{error}");
            })?;
            work.wait()?;
            view_mut::<f32, 2>(&mut rest)?.fill(0.0);
            let _view = view::<f32, 2>(&x)?;
        }
        // What is only read may be viewed for reading.
        let (sent, received) = (ones(), ones());
        let message = || match group.rank() {
            0 => group.send_async(&sent, 1, 0),
            _ => group.recv_async(&received, 0, 0),
        };
        let work = in_flight(&message, &mut || {
            assert!(!in_use(view::<f32, 2>(&sent)));
            assert!(in_use(view_mut::<f32, 2>(&mut sent.shallow_clone())));
        })?;
        work.wait()?;
        view_mut::<f32, 2>(&mut received.shallow_clone())?.fill(0.0);
        // An input that is part of the output, and an operation that nobody waits for.
        let whole = Tensor::ones([2], (Kind::Float, Device::Cpu));
        let own = whole.narrow(0, group.rank() as i64, 1);
        let gather = || group.all_gather_into_async(&whole, &own);
        drop(in_flight(&gather, &mut || assert!(in_use(view::<f32, 1>(&own))))?);
        group.barrier()?;
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while in_use(view::<f32, 1>(&whole)) {
            assert!(std::time::Instant::now() < end, "still pinned");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn what_has_a_view_is_not_sent() {
    run_ranks(1, |group| {
        let (x, mut y) = (Tensor::from_slice(&[1.0, 2.0]), Tensor::from_slice(&[1.0, 2.0]));
        let other = y.shallow_clone();
        let (reads, writes) = (view::<f64, 1>(&x)?, view_mut::<f64, 1>(&mut y)?);
        for tensor in [&x, &other] {
            let error = group.all_reduce(tensor, ReduceOp::Sum).expect_err("a view").to_string();
            assert!(error.contains("drop the View or ViewMut first"), "{error}");
        }
        assert!(group.broadcast_coalesced(&[&x], 0).is_err());
        drop((reads, writes));
        group.all_reduce(&x, ReduceOp::Sum)?;
        group.broadcast_coalesced(&[&x, &other], 0)
    })
    .expect("all ranks");
}
