//! `cargo xtask bench`: each operator against what a user would call instead.

mod common;
mod lltm_cell;

criterion::criterion_main!(lltm_cell::benches);
