//! What collectives refuse: what cannot be sent, and ranks that differ.

use super::collectives::*;
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::distributed::{ProcessGroup, ReduceOp};

#[test]
fn a_build_with_cuda_has_nccl() {
    let libtorch = std::env::var_os("LIBTORCH").map(std::path::PathBuf::from);
    let site = libtorch.and_then(|libtorch| Some(libtorch.canonicalize().ok()?.join("../nvidia")));
    // The wheels have the header of NCCL next to libtorch. A libtorch of the user's may have none.
    if site.is_some_and(|site| site.join("nccl/include/nccl.h").exists()) {
        let missing = tch_extension::distributed::nccl_missing();
        assert!(missing.as_ref().is_none_or(|why| why.contains("without CUDA")), "{missing:?}");
    }
}

#[test]
fn what_cannot_be_sent_is_refused_before_anything_is_sent() {
    let group = ProcessGroup::single().expect("a group of one");
    let float = |shape: &[i64]| ones(shape).zeros_like();
    let refuse = |outcome: Result<()>, words: &str| {
        let error = outcome.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let x = float(&[2, 3]);
    refuse(group.all_reduce(&Tensor::new(), ReduceOp::Sum), "all_reduce: tensor: expected");
    refuse(
        group.all_reduce(&x.to_sparse_sparse_dim(2), ReduceOp::Sum),
        "all_reduce: tensor: expected a dense tensor",
    );
    refuse(
        group.all_reduce(&x.to_kind(Kind::ComplexFloat), ReduceOp::Sum),
        "all_reduce: tensor: expected kind Half or BFloat16",
    );
    refuse(
        group.all_reduce(&x.to_kind(Kind::Bool), ReduceOp::Sum),
        "all_reduce: op: expected a reduction that exists for Bool, got Sum; use ReduceOp::Max",
    );
    refuse(
        group.all_reduce(&x.to_kind(Kind::Int), ReduceOp::Avg),
        "expected a reduction that exists for Int, got Avg; use ReduceOp::Sum",
    );
    refuse(group.all_reduce(&x, ReduceOp::BitXor), "exists for Float, got BitXor");
    let graph = float(&[2]).set_requires_grad(true) * 2.0;
    refuse(
        group.all_reduce(&graph, ReduceOp::Sum),
        "expected a tensor without a graph, because it is written in place",
    );
    let expanded = float(&[1, 3]).expand([2, 3], false);
    refuse(
        group.all_reduce(&expanded, ReduceOp::Sum),
        "all_reduce: rank 0 of 1: unsupported operation: more than one element",
    );
    refuse(group.broadcast(&x, 1), "broadcast: root: expected a rank less than 1, got 1");
    refuse(group.reduce(&x, 7, ReduceOp::Sum), "reduce: root: expected a rank less than 1, got 7");
    refuse(group.send(&x, 0, 0), "send: to: expected another rank, got 0, which is this one");
    refuse(group.recv(&x, 0, 0), "recv: from: expected another rank, got 0, which is this one");
    refuse(
        group.all_gather_into(&float(&[5]), &x),
        "all_gather_into: output: expected 1 times the 6 elements of input, got 5",
    );
    refuse(
        group.all_gather_into(&x.to_kind(Kind::Double), &x),
        "all_gather_into: output: expected kind Float",
    );
    refuse(
        group.reduce_scatter_into(&float(&[4]), &x, ReduceOp::Sum),
        "reduce_scatter_into: input: expected 1 times the 4 elements of output, got 6",
    );
    refuse(
        group.all_to_all(&float(&[4]), &x),
        "all_to_all: output: expected 6 elements, as many as the input, got 4",
    );
    refuse(
        group.all_to_all(&float(&[]), &float(&[])),
        "expected a first dimension that is a multiple of 1",
    );
    for sizes in [&[1_i64][..], &[], &[1, 1], &[-2], &[i64::MAX]] {
        refuse(
            group.all_to_all_sizes(&x, &[2], &x, sizes),
            "input_sizes: expected 1 sizes, none negative, whose sum is the first dimension (2)",
        );
    }
    refuse(
        group.all_to_all_sizes(&float(&[2, 4]), &[2], &x, &[2]),
        "output: expected rows of shape [3], as the input's, got [4]",
    );
    refuse(group.monitored_barrier(Duration::ZERO), "a timeout of zero");
    // None of it did any harm.
    group.all_reduce(&x, ReduceOp::Sum).expect("still alive");
}

/// What differs between ranks is an error on each of them, and nothing is sent.
#[test]
fn ranks_that_differ() {
    type Call = dyn Fn(&ProcessGroup, bool) -> Result<()> + Sync;
    let cases: [(&Call, &str); 9] = [
        (
            &|group, odd| group.all_reduce(&ones(&[if odd { 8 } else { 4 }]), ReduceOp::Sum),
            "the ranks call different operations: rank 0, 2: all_reduce(sum) of Float [4]; rank 1: all_reduce(sum) of Float [8]",
        ),
        (
            &|group, odd| {
                let kind = if odd { Kind::Int } else { Kind::Float };
                group.all_reduce(&ones(&[4]).to_kind(kind), ReduceOp::Sum)
            },
            "rank 1: all_reduce(sum) of Int [4]",
        ),
        (
            &|group, odd| {
                group.all_reduce(&ones(&[4]), if odd { ReduceOp::Max } else { ReduceOp::Sum })
            },
            "rank 1: all_reduce(max) of Float [4]",
        ),
        (
            &|group, odd| match odd {
                true => group.broadcast(&ones(&[4]), 0),
                false => group.all_reduce(&ones(&[4]), ReduceOp::Sum),
            },
            "rank 1: broadcast from 0 of Float [4]",
        ),
        (
            &|group, odd| group.broadcast(&ones(&[4]), usize::from(odd)),
            "rank 0, 2: broadcast from 0 of Float [4]; rank 1: broadcast from 1 of Float [4]",
        ),
        (
            &|group, odd| group.all_gather(&ones(&[if odd { 5 } else { 4 }])).map(drop),
            "rank 1: all_gather_into of Float [5]",
        ),
        (
            &|group, odd| match odd {
                true => group.barrier(),
                false => group.all_reduce(&ones(&[4]), ReduceOp::Sum),
            },
            "rank 1: barrier",
        ),
        (
            &|group, odd| {
                let sizes = if odd { [2, 0, 1] } else { [1, 1, 1] };
                group.all_to_all_sizes(&ones(&[3]), &[1, 1, 1], &ones(&[3]), &sizes)
            },
            "rank 1 sends 2 rows to rank 0, which expects 1",
        ),
        (
            &|group, odd| {
                let x = ones(&[3, if odd { 2 } else { 1 }]);
                group.all_to_all(&x.zeros_like(), &x)
            },
            "all_to_all of Float [3, 2]",
        ),
    ];
    super::checked(3, Duration::from_secs(20), |group| {
        for (call, words) in cases {
            let error = call(group, group.rank() == 1).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
            // The group is as it was.
            let x = ones(&[4]);
            group.all_reduce(&x, ReduceOp::Sum)?;
            assert_eq!(x, x.full_like(3.0));
        }
        Ok(())
    })
    .expect("all ranks");
}

#[test]
fn a_message_that_does_not_fit() {
    for (sent, received) in [(8, 4), (4, 8)] {
        let outcome = super::checked(2, Duration::from_secs(10), |group| {
            let x = Tensor::ones(
                [if group.rank() == 0 { sent } else { received }],
                (Kind::Float, Device::Cpu),
            );
            let outcome = match group.rank() {
                0 => group.send(&x, 1, 0),
                _ => group.recv(&x, 0, 0),
            };
            Ok(outcome.expect_err("another size").to_string())
        });
        let errors = outcome.expect("all ranks");
        let words = format!("rank 0 sends Float [{sent}], but rank 1 expects Float [{received}]");
        assert!(errors[1].contains(&words), "{errors:?}");
        assert!(errors[0].contains("send: rank 0 of 2"), "{errors:?}");
    }
}
