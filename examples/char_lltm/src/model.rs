//! The model: an embedding, a recurrent layer, and a linear layer to the vocabulary.

use crate::layer::{self, Layer, State};
use crate::options::{Family, Op, Options};
use anyhow::{Result, ensure};
use std::fs;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

/// The number of features of a character's embedding.
const EMBEDDING: i64 = 64;

/// A character-level language model.
pub struct CharModel {
    pub variables: nn::VarStore,
    embedding: nn::Embedding,
    recurrent: Box<dyn Layer>,
    output: nn::Linear,
}

impl CharModel {
    /// The operators of a family begin with the same weights, which the seed decides: all of them
    /// draw the weights in the same order.
    pub fn new(device: Device, vocabulary: i64, hidden: i64, op: Op, seed: i64) -> CharModel {
        tch::manual_seed(seed);
        let variables = nn::VarStore::new(device);
        let root = variables.root();
        let embedding =
            nn::embedding(&root / "embedding", vocabulary, EMBEDDING, Default::default());
        let recurrent = layer::new(op, &root / op.family().name(), EMBEDDING, hidden);
        let output = nn::linear(&root / "output", hidden, vocabulary, Default::default());
        CharModel { variables, embedding, recurrent, output }
    }

    pub fn zero_state(&self, rows: i64) -> State {
        self.recurrent.zero_state(rows)
    }

    /// Returns the logits `[rows, count, vocabulary]` for the characters that follow `inputs[rows,
    /// count]`.
    pub fn forward(&self, inputs: &Tensor, state: &[Tensor]) -> (Tensor, State) {
        let embedded = self.embedding.forward(inputs);
        let (hidden, state) = self.recurrent.sequence(&embedded, state);
        (self.output.forward(&hidden), state)
    }

    /// Generates `count` characters. The first one follows a line end.
    pub fn sample(&self, vocabulary: &[char], count: i64, temperature: f64) -> Result<String> {
        let _no_grad = tch::no_grad_guard();
        let mut last = vocabulary.iter().position(|&c| c == '\n').unwrap_or(0) as i64;
        let mut state = self.zero_state(1);
        let mut text = String::new();
        for _ in 0..count {
            let input = Tensor::from_slice(&[last]).view([1, 1]).to_device(self.variables.device());
            let (logits, next) = self.forward(&input, &state);
            state = next;
            last = draw(&logits.view([-1]), temperature)?;
            text.push(printable(vocabulary[last as usize]));
        }
        Ok(text)
    }
}

/// Draws an index from `logits[vocabulary]`. The largest logit is subtracted first, so that no
/// temperature causes an overflow.
fn draw(logits: &Tensor, temperature: f64) -> Result<i64> {
    let logits = logits.to_kind(Kind::Double);
    let scaled = (&logits - logits.max()) / temperature;
    Ok(scaled.softmax(0, Kind::Double).f_multinomial(1, false)?.int64_value(&[0]))
}

/// Replaces control characters. The training text may contain escape sequences, and a generated one
/// must not control the terminal.
fn printable(c: char) -> char {
    if c.is_control() && c != '\n' && c != '\t' { char::REPLACEMENT_CHARACTER } else { c }
}

/// The name and shape of every variable of the model.
pub fn shapes(family: Family, vocabulary: i64, hidden: i64) -> Vec<(String, Vec<i64>)> {
    let mut all = vec![
        ("embedding.weight".to_string(), vec![vocabulary, EMBEDDING]),
        ("output.weight".to_string(), vec![vocabulary, hidden]),
        ("output.bias".to_string(), vec![vocabulary]),
    ];
    let recurrent = layer::shapes(family, EMBEDDING, hidden).into_iter();
    all.extend(recurrent.map(|(name, shape)| (family.prefix() + name, shape)));
    all
}

/// Refuses sizes that cannot fit in main memory. Linux grants memory that it does not have and
/// later kills the process that touches it, so a failed allocation would end the program without a
/// message. (A GPU's allocator does fail with a message.)
pub fn check_memory(options: &Options, vocabulary: i64, device: Device) -> Result<()> {
    let needed = needed_bytes(options, vocabulary);
    let available = if device == Device::Cpu { available_bytes() } else { None };
    if let Some(available) = available {
        ensure!(
            needed <= available,
            "these sizes need about {} MiB of memory and {} MiB are free: lower --hidden, --batch or --seq-len",
            needed >> 20,
            available >> 20
        );
    }
    Ok(())
}

/// Estimates the memory in bytes, with f32 values. Each learner keeps its weights, their gradients
/// and Adam's two moments. A step, in which only one learner runs, uses about as much again for
/// temporary values, and keeps some values of each character for the backward pass.
fn needed_bytes(options: &Options, vocabulary: i64) -> u64 {
    let shapes = shapes(options.op.family(), vocabulary, options.hidden);
    let parameters: i64 = shapes.iter().map(|(_, shape)| shape.iter().product::<i64>()).sum();
    let learners = options.op.each().len() as i64;
    let kept_per_character = 20 * options.hidden + 2 * EMBEDDING + 4 * vocabulary;
    let kept = options.batch * options.seq_len * kept_per_character;
    4 * ((4 * learners + 4) * parameters + kept) as u64
}

fn available_bytes() -> Option<u64> {
    let table = fs::read_to_string("/proc/meminfo").ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}
