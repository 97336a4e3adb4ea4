//! The benchmarks.
//!
//! - `cargo xtask bench [WORD…]` compares each operator with what a user would call instead, and
//!   writes a table and JSON. With words, it runs only the cases whose titles contain all of them.
//! - `cargo xtask bench host` measures small calls of three operators, where the host decides.
//! - `cargo xtask bench sweep` measures layer_norm over a grid of sizes.
//! - `cargo xtask bench lltm sweep` measures sequences with various numbers of steps and rows.
//! - `cargo xtask bench lstm sweep` and `gru sweep` measure each way of a layer; `lstm sizes` and
//!   `gru sizes` compare a layer with libtorch's at sizes of all sorts; `lstm layers` and `gru layers`
//!   measure two directions and two layers.
//! - `cargo xtask bench gelu_mlp ways` measures cuBLASLt's epilogue next to a pass.
//! - `cargo xtask bench OPERATOR random SEED [WORD…]` measures any operator, or `optim`, `embedding`
//!   or `attention`, at random sizes.
//! - `cargo xtask tune` measures the ways of operators, and fits the costs by which plans choose.
//! - `cargo bench --profile dev` runs criterion, which measures one provider after another, and
//!   also the autograd bridge and the dispatcher.

#[macro_use]
#[path = "../src/ops/list.rs"]
mod list;

mod add_layer_norm;
mod add_norm;
mod add_rms_norm;
mod autograd;
mod clock;
mod common;
mod cross_entropy;
mod draw;
mod floor;
mod gelu_mlp;
mod gru;
mod host;
mod layer_norm;
mod layer_norm_sweep;
mod library;
mod linear;
mod linear_cross_entropy;
mod lltm;
mod lltm_cell;
mod lltm_sweep;
mod lstm;
mod machine;
mod matmul_add_relu;
mod mlp_ways;
mod nn;
mod optim;
mod random;
mod rms_norm;
mod rnn;
mod rnn_layers;
mod rnn_sweep;
mod rope;
mod swiglu_mlp;
mod table;
mod tune;

use common::Case;
use tch::Device;

macro_rules! cases {
    ($($operator:ident of $family:literal { $($rest:tt)* })*) => {
        &[autograd::cases, optim::cases, $($operator::cases),*]
    };
}

/// The cases of autograd, of the optimizers and of each operator.
const OPERATORS: &[fn(Device) -> Vec<Case>] = operators!(cases);

/// The tables that `lstm` and `gru` have in addition.
type RnnTable = fn(rnn::Layer, &[String]) -> tch_extension::Result<()>;
const RNN_TABLES: [(&str, RnnTable); 3] =
    [("sweep", rnn_sweep::sweep), ("sizes", rnn_sweep::sizes), ("layers", rnn_layers::run)];

fn main() {
    // Cargo adds `--bench`. Arguments that do not begin with `table` belong to criterion, which
    // reads the command line itself.
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match &arguments[..] {
        [first, second, words @ ..] if first == "table" && second == "sweep" => {
            layer_norm_sweep::run(words).expect("a GPU that can be measured");
        }
        [first, second, third, words @ ..]
            if first == "table" && second == "lltm" && third == "sweep" =>
        {
            lltm_sweep::run(words).expect("a device that can be measured");
        }
        [first, second, third, words @ ..]
            if first == "table"
                && ["lstm", "gru"].contains(&second.as_str())
                && RNN_TABLES.iter().any(|(name, _)| name == third) =>
        {
            let layer = if second == "lstm" { lstm::LAYER } else { gru::LAYER };
            let tables = RNN_TABLES.iter().filter(|(name, _)| name == third);
            tables.for_each(|(_, run)| run(layer, words).expect("a GPU that can be measured"));
        }
        [first, operator, ways, words @ ..]
            if first == "table" && operator == "gelu_mlp" && ways == "ways" =>
        {
            mlp_ways::run(words).expect("a GPU that can be measured");
        }
        [first, second] if first == "table" && second == "host" => host::run(),
        [first, second, words @ ..] if first == "table" && second == "tune" => {
            // Users call it, also where there is no GPU.
            if let Err(error) = tune::run(words) {
                eprintln!("error: {error}");
                std::process::exit(1);
            }
        }
        [first, operator, random, seed, words @ ..] if first == "table" && random == "random" => {
            random::run(operator, seed, words).expect("a GPU that can be measured");
        }
        [first, words @ ..] if first == "table" => table(words),
        _ => criterion_statistics(),
    }
}

fn table(words: &[String]) {
    table::run(OPERATORS, words).expect("the folder of bench.json can be written");
}

fn criterion_statistics() {
    autograd::benches();
    library::benches();
    let mut criterion = criterion::Criterion::default().configure_from_args();
    OPERATORS.iter().for_each(|cases| common::groups(&mut criterion, cases));
    criterion.final_summary();
}
