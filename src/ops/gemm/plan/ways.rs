//! The tables of products in `docs/ways.md`.

use super::*;
use crate::ops::ways::intervals;
use std::fmt::Write;
use std::ptr::{dangling, null, null_mut};

/// K and N.
const SIZES: [i64; 7] = [32, 64, 128, 512, 1000, 1001, 1024];
const KINDS: [(&str, Kind, bool); 4] = [
    ("half", Kind::BFloat16, false),
    ("`Float`, tf32", Kind::Float, true),
    ("`Float`, strict", Kind::Float, false),
    ("`Double`", Kind::Double, false),
];

#[derive(Clone, Copy, PartialEq)]
enum Bias {
    Row,
    Full,
    None,
}

/// What an H200 can do with a product of contiguous tensors: `x [M, K]`, and a weight `[N, K]` or, for
/// a full bias, a matrix `[K, N]`.
fn describe([m, k, n]: [i64; 3], bias: Bias, kind: Kind, tf32: bool) -> Description {
    let by_k = bias != Bias::Full;
    let matrices = |row, column| Matrices { data: dangling(), row, column, batch: 0 };
    let product = Product {
        batch: 1,
        m,
        n,
        k,
        lhs: matrices(k, 1),
        rhs: if by_k { matrices(1, k) } else { matrices(n, 1) },
        bias: match bias {
            Bias::Row => matrices(0, 1),
            Bias::Full => matrices(n, 1),
            Bias::None => Matrices { data: null(), ..matrices(0, 0) },
        },
        out: null_mut(),
        kind: kind_code(kind).expect("a kind with kernels"),
        relu: i32::from(bias == Bias::Full),
    };
    let (rows, shorts) = (m.max(n), m.min(n));
    let lanes = 16 / product.element_size();
    let up = |size: i64| (size + lanes - 1) / lanes * lanes;
    let is_even = |size: i64| size % lanes == 0;
    let [lhs, rhs, out] = [(m, up(k)), (up(k), up(n)), (m, up(n))].map(|(a, b)| (a * b) as f64);
    let copies = [!is_even(k), !is_even(k) || !is_even(n), !is_even(n)];
    let sizes = [lhs, rhs, out];
    let copied = sizes.iter().zip(copies).filter(|(_, copies)| *copies).map(|(size, _)| size).sum();
    Description {
        product,
        skinny: match shorts <= MOST_SHORT {
            // Of a matrix `[K, N]` with a few rows before it, N is the contiguous dimension.
            true => {
                let by_rows = by_k || n <= m;
                Skinny { rows, shorts, by_rows: by_rows.into(), whole: is_even(n).into() }
            }
            false => Skinny::default(),
        },
        padding: Padding {
            lhs,
            rhs,
            out,
            copied,
            launches: i64::from(copies[0] || copies[1]) + i64::from(copies[2]),
        },
        size: [0; MOST_DIMS],
        dims: 2,
        device: 0,
        tf32,
        small: true,
        hopper: bias == Bias::Full && product.is_half() && is_even(k) && is_even(n),
    }
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
                |bias| intervals(|m| name(choose(&describe([m, size, size], bias, kind, tf32))));
            let [row, full, none] = [Bias::Row, Bias::Full, Bias::None].map(of);
            writeln!(page, "| {size}, {kind_name} | {row} | {full} | {none} |")?;
        }
    }
    Ok(())
}
