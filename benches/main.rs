//! `cargo xtask bench`: each operator against what a user would call instead, and the bridge by itself.
//!
//! By default criterion's statistics, one provider after the other. With `--ratios`, the figures that claims are
//! made from: providers in turn, and the ratio of their medians.

mod autograd;
mod common;
mod layer_norm;
mod linear;
mod lltm_cell;
mod matmul_add_relu;

fn main() {
    if std::env::args().any(|argument| argument == "--ratios") {
        layer_norm::ratios();
        linear::ratios();
        lltm_cell::ratios();
        matmul_add_relu::ratios();
        return;
    }
    autograd::benches();
    layer_norm::benches();
    linear::benches();
    lltm_cell::benches();
    matmul_add_relu::benches();
    criterion::Criterion::default().configure_from_args().final_summary();
}
