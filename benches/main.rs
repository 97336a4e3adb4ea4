//! `cargo xtask bench`: each operator against what a user would call instead, and the bridge by itself.

mod autograd;
mod common;
mod lltm_cell;

criterion::criterion_main!(autograd::benches, lltm_cell::benches);
