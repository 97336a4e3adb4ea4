//! The tables of products in `docs/ways.md`.

use super::super::costs::COSTS;
use super::contiguous::Layout;
use super::*;
use crate::ops::ways::intervals;
use std::fmt::Write;

/// K and N.
const SIZES: [i64; 7] = [32, 64, 128, 512, 1000, 1001, 1024];
const KINDS: [(&str, Kind, bool); 4] = [
    ("half", Kind::BFloat16, false),
    ("`Float`, tf32", Kind::Float, true),
    ("`Float`, strict", Kind::Float, false),
    ("`Double`", Kind::Double, false),
];

/// What an H200 can do with a product of contiguous tensors: `x [M, K]`, and a weight `[N, K]` or, for
/// a full bias, a matrix `[K, N]`.
fn describe(sizes: [i64; 3], bias: Bias, kind: Kind, tf32: bool) -> Description {
    let layout = if bias == Bias::Full { Layout::Matrices } else { Layout::Linear };
    contiguous(([1, 1], sizes), bias, (kind, tf32), 0, layout)
}

fn chosen(described: &Description) -> Way {
    choose(described, || Ok((COSTS.h200(), 132))).expect("a way")
}

fn name(way: Way) -> &'static str {
    match way {
        Way::Plan => "cuBLASLt",
        Way::Small => "small",
        Way::Hopper => "hopper",
        Way::Skinny => "skinny",
        Way::Padded => "padded",
        Way::Automatic | Way::Pass | Way::Composite => "libtorch",
    }
}

pub(in crate::ops) fn ways_on_h200(page: &mut String) -> std::fmt::Result {
    writeln!(
        page,
        "\n## linear, matmul_add_relu\n\n\
         Products of `[M, K]` and `[K, N]`, contiguous, with K = N: linear, whose weight is `[N, K]`; matmul_add_relu with a bias `[M, N]`;\n\
         and a product without a bias, as those of the gradients and the MLPs. \"small 192, libtorch\" means the kernel of `csrc/gemm/small.cu` up to\n\
         M = 192, and then libtorch's product; \"cuBLASLt\" is `csrc/gemm/plan.cpp`.\n\n\
         | K = N, kind | linear | matmul_add_relu, full bias | without a bias |\n|---|---|---|---|"
    )?;
    for size in SIZES {
        for (kind_name, kind, tf32) in KINDS {
            let of =
                |bias| intervals(|m| name(chosen(&describe([m, size, size], bias, kind, tf32))));
            let [row, full, none] = [Bias::Row, Bias::Full, Bias::None].map(of);
            writeln!(page, "| {size}, {kind_name} | {row} | {full} | {none} |")?;
        }
    }
    Ok(())
}
