//! `docs/ways.md`: which way computes which size, as the plans decide it on an H200. `cargo xtask ways` writes
//! the page, and the test here compares it.

use super::generated::compare;
use super::kinds::{Device, Kind};
use super::lltm_cell::plan as cell;
use super::recurrent::plan::{Direction, Sizes};
use std::fmt::Write;

/// The kinds of a table, and whether libtorch allows tf32.
const KINDS: [(&str, Kind, bool); 4] = [
    ("half", Kind::BFloat16, false),
    ("`Float`, tf32", Kind::Float, true),
    ("`Float`, strict", Kind::Float, false),
    ("`Double`", Kind::Double, false),
];
const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];
/// The largest number of rows.
const MOST: i64 = 4096;

/// The ways for 1 to [`MOST`] rows, each with the last number of rows before the next one; steps of
/// fewer than `FEW` rows in between are left out.
pub(super) fn intervals(way: impl Fn(i64) -> &'static str) -> String {
    const FEW: i64 = 8;
    let mut found: Vec<(&str, i64)> = Vec::new();
    for rows in 1..=MOST {
        match (way(rows), found.last_mut()) {
            (name, Some((last, end))) if *last == name => *end = rows,
            (name, _) => found.push((name, rows)),
        }
    }
    let mut before = 0;
    found.retain(|(_, end)| {
        let is_long = end - before >= FEW || before == 0;
        before = *end;
        is_long
    });
    found.dedup_by(|next, last| {
        let is_same = next.0 == last.0;
        if is_same {
            last.1 = next.1;
        }
        is_same
    });
    let last = found.len() - 1;
    let text = found.iter().enumerate().map(|(index, (name, end))| match index == last {
        true => (*name).to_string(),
        false => format!("{name} {end}"),
    });
    text.collect::<Vec<_>>().join(", ")
}

/// A table with a row for each hidden size and kind, and a column for each direction.
fn table(
    page: &mut String,
    title: &str,
    text: &str,
    hidden: &[i64],
    way: impl Fn(Direction, Sizes, Kind, bool) -> &'static str,
) -> std::fmt::Result {
    writeln!(page, "\n## {title}\n\n{text}\n")?;
    writeln!(page, "| H, kind | forward | backward |\n|---|---|---|")?;
    for &hidden in hidden {
        for (name, kind, tf32) in KINDS {
            let of = |direction| {
                intervals(|batch| {
                    way(
                        direction,
                        Sizes { steps: 512, batch, features: hidden, hidden },
                        kind,
                        tf32,
                    )
                })
            };
            let [forward, backward] = DIRECTIONS.map(of);
            writeln!(page, "| {hidden}, {name} | {forward} | {backward} |")?;
        }
    }
    Ok(())
}

fn of_cell(direction: Direction, sizes: Sizes, kind: Kind, tf32: bool) -> &'static str {
    let Sizes { batch, features, hidden, .. } = sizes;
    let step = cell::Sizes { batch, features, hidden };
    let (gpu, way) = (Device::Cuda(0), cell::Way::Automatic);
    let is_fused = match direction {
        Direction::Forward => step.fuse_forward_where(way, kind, gpu, || tf32),
        Direction::Backward => step.fuse_backward(way, kind, gpu),
    };
    let is_tiled = || {
        direction == Direction::Forward
            && step.fit_tensor_cores(kind, gpu)
            && step.use_tensor_cores(way, 132)
    };
    match is_fused {
        true => "fused",
        false if is_tiled() => "tensor cores",
        false => "product",
    }
}

fn page() -> Result<String, std::fmt::Error> {
    const HIDDEN: [i64; 8] = [64, 128, 256, 512, 768, 1024, 1536, 2048];
    let mut page = String::from(
        "# Ways\n\n\
         Which way computes which size on an H200, as the plans decide it. `cargo xtask ways` writes this page from them, and a test compares it.\n\
         [architecture.md](architecture.md) says which files decide, and in which files the ways are.\n\n\
         \"cluster 120, grid 192, step\" means a cluster up to B = 120, then a grid up to 192, and then a product and a kernel for each step. Runs of fewer\n\
         than 8 values of B between others are left out. Half is `Half` and `BFloat16`. There are as many features as columns of h.\n",
    );
    let recurrent = "T = 512. The kernels are in `csrc/recurrent/` and the folder of that name, or in `csrc/lltm_cell` for \"fused\" and\n\
                     \"tensor cores\"; \"plain grid\" is `grid/plain.h`.";
    table(&mut page, "lltm", recurrent, &HIDDEN, super::lltm::way_on_h200)?;
    let layers = "T = 512, where our kernels compute the layer: at each call cuDNN's and oneDNN's layers are compared with them, and taken instead of\n\
                  single steps (`src/ops/recurrent/layer/plan.rs:library`). Products are in tf32 where cuDNN's surely are (`tf32.rs`).";
    table(
        &mut page,
        "lstm",
        layers,
        &HIDDEN,
        super::recurrent::layer::way_on_h200::<super::lstm::Lstm>,
    )?;
    table(
        &mut page,
        "gru",
        layers,
        &HIDDEN,
        super::recurrent::layer::way_on_h200::<super::gru::Gru>,
    )?;
    let cell = "The kernels are in `csrc/lltm_cell`: `fused_*.cu`, `hopper_forward.cu`, and `cuda.cu` after libtorch's product.";
    table(&mut page, "lltm_cell", cell, &HIDDEN, of_cell)?;
    super::gemm::ways_on_h200(&mut page)?;
    super::norm::ways_on_h200(&mut page)?;
    Ok(page)
}

#[test]
fn the_page_is_what_the_plans_decide() {
    compare("docs/ways.md", &page().expect("a text"), "ways");
}
