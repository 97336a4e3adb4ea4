//! `cargo xtask bench`: each operator against what a user would call instead, and the bridge by itself.
//!
//! By default criterion's statistics, one provider after the other. With `--ratios`, the figures that claims are
//! made from: providers in turn, and the ratios of their medians.

mod autograd;
mod common;
mod layer_norm;
mod library;
mod linear;
mod lltm_cell;
mod matmul_add_relu;

use common::Case;
use tch::Device;

/// Each operator's table.
const OPERATORS: [fn(Device) -> Vec<Case>; 4] =
    [layer_norm::cases, linear::cases, lltm_cell::cases, matmul_add_relu::cases];

fn main() {
    if std::env::args().any(|argument| argument == "--ratios") {
        OPERATORS.into_iter().for_each(common::ratios);
        return;
    }
    autograd::benches();
    library::benches();
    let mut criterion = criterion::Criterion::default().configure_from_args();
    OPERATORS.into_iter().for_each(|cases| common::groups(&mut criterion, cases));
    criterion.final_summary();
}
