//! Generates text, one token after the other.

use crate::device::{self, Precision};
use crate::model::Model;
use crate::origin::Origin;
use crate::progress::say;
use crate::tokenizer::Tokenizer;
use anyhow::{Result, ensure};
use std::path::PathBuf;
use tch::{Kind, Tensor};
use tch_extension::amp::Autocast;

/// How tokens are drawn.
#[derive(Debug, Clone, clap::Args)]
pub struct Drawing {
    /// Text to continue [default: a new line, or the end of a document]
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Below 1 keeps to likely tokens, above 1 is more daring
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Draws from the K likeliest tokens only
    #[arg(long, value_name = "K")]
    pub top_k: Option<i64>,
}

#[derive(Debug, clap::Args)]
pub struct SampleOptions {
    /// The folder of a run, the --out of `train`, or of a model in Hugging Face's format
    #[arg(long, value_name = "FOLDER", default_value = "runs/llm")]
    pub from: PathBuf,
    /// A folder with an adapter of this model in PEFT's format
    #[arg(long, value_name = "FOLDER")]
    pub adapter: Option<PathBuf>,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 400)]
    pub length: i64,
    #[command(flatten)]
    pub drawing: Drawing,
    /// Print the logits of the token after the prompt as JSON, in place of text
    #[arg(long)]
    pub logits: bool,
    /// Seed of the sample
    #[arg(long, default_value_t = 1)]
    pub seed: i64,
    /// Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
}

impl Drawing {
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.temperature > 0.0 && self.temperature <= 1e30,
            "--temperature {:?} is out of range: give a number above 0, up to 1e30",
            self.temperature
        );
        if let Some(k) = self.top_k {
            ensure!(k >= 1, "--top-k {k} is out of range: give 1 or more");
        }
        Ok(())
    }
}

/// The subcommand.
pub fn run(options: &SampleOptions) -> Result<()> {
    options.drawing.check()?;
    check_length("--length", options.length)?;
    let device = device::parse(&options.device)?;
    let origin = Origin::open("--from", &options.from, options.adapter.as_deref())?;
    let (model, tokenizer) = (origin.model(device)?, &origin.tokenizer);
    if options.logits {
        return say(&logits(&model, tokenizer, &options.drawing.prompt)?);
    }
    let precision = origin.precision(device);
    let (length, seed) = (options.length, options.seed);
    say(&sample(&model, precision, tokenizer, &options.drawing, length, seed)?)
}

/// The logits of the token after the prompt, as JSON.
fn logits(model: &Model, tokenizer: &Tokenizer, prompt: &str) -> Result<String> {
    let tokens = tokenizer.encode_prompt(prompt)?;
    let context = model.config.context as usize;
    ensure!(
        (1..=context).contains(&tokens.len()),
        "--prompt has {} tokens: give 1 to {context}",
        tokens.len()
    );
    let _no_grad = tch::no_grad_guard();
    let tokens: Vec<i64> = tokens.into_iter().map(i64::from).collect();
    let input = Tensor::f_from_slice(&tokens)?.f_view([1, -1])?.f_to_device(model.device())?;
    let logits = model.next_logits(&input, &mut model.caches(input.size2()?.1))?;
    let logits: Vec<f32> = logits.f_view([-1])?.f_to_kind(Kind::Float)?.try_into()?;
    Ok(serde_json::to_string(&logits)?)
}

pub fn check_length(option: &str, length: i64) -> Result<()> {
    ensure!(
        (0..=10_000_000).contains(&length),
        "{option} {length} is out of range: give 0 to 10000000"
    );
    Ok(())
}

/// The prompt and `length` tokens after it, as text. On a GPU, products have the precision of the run.
pub fn sample(
    model: &Model,
    precision: Precision,
    tokenizer: &Tokenizer,
    drawing: &Drawing,
    length: i64,
    seed: i64,
) -> Result<String> {
    let prompt = tokenizer.encode_prompt(&drawing.prompt)?;
    let begins_with = tokenizer.end_of_text().unwrap_or(u32::from(b'\n'));
    let mut tokens = prompt.clone();
    if tokens.is_empty() {
        tokens.push(begins_with);
    }
    let known = tokens.len();
    tch::manual_seed(seed);
    let half = precision.half().filter(|_| model.device().is_cuda());
    let of_model = model.config.ends.iter().map(|&end| end as u32);
    let mut ends: Vec<u32> = of_model.collect();
    if ends.is_empty() {
        ends.extend(tokenizer.end_of_text());
    }
    generate(model, half, tokenizer.len() as i64, &ends, drawing, length, &mut tokens)?;
    let shown = if prompt.is_empty() { &tokens[known..] } else { &tokens[..] };
    Ok(tokenizer.decode(shown)?.chars().map(printable).collect())
}

/// Appends `length` tokens, or fewer if the model ends its text.
fn generate(
    model: &Model,
    half: Option<Kind>,
    vocabulary: i64,
    ends: &[u32],
    drawing: &Drawing,
    length: i64,
    tokens: &mut Vec<u32>,
) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let context = model.config.context as usize;
    let mut caches = model.caches(tokens.len() as i64 + length);
    // The cache has the tokens from `first` to `done`.
    let (mut first, mut done) = (tokens.len().saturating_sub(context), 0);
    for _ in 0..length {
        if tokens.len() - first > context {
            // Positions are absolute, so the second half is computed again, as the first half.
            first = tokens.len() - context.div_ceil(2);
            done = 0;
            caches.iter_mut().for_each(|cache| cache.truncate(0));
        }
        let new: Vec<i64> =
            tokens[first.max(done)..].iter().map(|&token| i64::from(token)).collect();
        let input = Tensor::f_from_slice(&new)?.f_view([1, -1])?.f_to_device(model.device())?;
        let logits = {
            let _autocast = half.map(|kind| Autocast::new(model.device(), kind)).transpose()?;
            model.next_logits(&input, &mut caches)?
        };
        done = tokens.len();
        // The rows after the vocabulary are padding.
        let logits =
            logits.f_view([-1])?.f_narrow(0, 0, vocabulary.min(model.config.vocabulary))?;
        let token = draw(&logits, drawing)?;
        if ends.contains(&token) {
            break;
        }
        tokens.push(token);
    }
    Ok(())
}

/// Draws a token from `logits[V]`. The largest logit is subtracted first, so that no temperature
/// causes an overflow.
fn draw(logits: &Tensor, drawing: &Drawing) -> Result<u32> {
    let logits = logits.f_to_kind(Kind::Double)?;
    let (logits, tokens) = match drawing.top_k {
        Some(k) if k < logits.size1()? => {
            let (values, tokens) = logits.f_topk(k, 0, true, true)?;
            (values, Some(tokens))
        }
        _ => (logits, None),
    };
    let scaled = logits.f_sub(&logits.f_max()?)?.f_div_scalar(drawing.temperature)?;
    let probabilities = scaled.f_softmax(0, Kind::Double)?;
    let drawn = probabilities.f_multinomial(1, false)?;
    let token = match tokens {
        Some(tokens) => tokens.f_gather(0, &drawn, false)?,
        None => drawn,
    };
    Ok(u32::try_from(token.f_int64_value(&[0])?)?)
}

/// Replaces control characters: a generated one must not control the terminal.
fn printable(c: char) -> char {
    if c.is_control() && c != '\n' && c != '\t' { char::REPLACEMENT_CHARACTER } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use tch::Device;

    fn model() -> Model {
        let config = ModelConfig {
            vocabulary: 320,
            context: 8,
            layers: 1,
            heads: 1,
            dim: 8,
            dropout: 0.0,
            recompute: false,
            llama: None,
            ends: vec![],
        };
        Model::new(&config, Device::Cpu, 1).unwrap()
    }

    fn drawing(top_k: Option<i64>) -> Drawing {
        Drawing { prompt: "ab".into(), temperature: 1.0, top_k }
    }

    #[test]
    fn generates_beyond_the_context_and_only_tokens_of_the_vocabulary() {
        let mut tokens = vec![1; 20];
        generate(&model(), None, 256, &[], &drawing(None), 50, &mut tokens).unwrap();
        assert_eq!(tokens.len(), 70);
        assert!(tokens.iter().all(|&token| token < 256));
    }

    #[test]
    fn the_likeliest_token_is_what_the_whole_window_says() {
        let model = model();
        let mut tokens = vec![3, 4, 5];
        generate(&model, None, 320, &[], &drawing(Some(1)), 20, &mut tokens).unwrap();
        // By hand, without a cache, as the windows slide.
        let (mut expected, mut first): (Vec<u32>, usize) = (vec![3, 4, 5], 0);
        let _no_grad = tch::no_grad_guard();
        for _ in 0..20 {
            if expected.len() - first > 8 {
                first = expected.len() - 4;
            }
            let window: Vec<i64> =
                expected[first..].iter().map(|&token| i64::from(token)).collect();
            let window = Tensor::from_slice(&window).view([1, -1]);
            let logits = model.next_logits(&window, &mut model.caches(8)).unwrap();
            expected.push(logits.argmax(-1, false).int64_value(&[0]) as u32);
        }
        assert_eq!(tokens, expected);

        let mut ended = vec![3, 4, 5];
        let end = expected[9];
        generate(&model, None, 320, &[end], &drawing(Some(1)), 20, &mut ended).unwrap();
        let first = 3 + expected[3..].iter().position(|&token| token == end).unwrap();
        assert_eq!(ended, expected[..first]);
    }

    #[test]
    fn the_seed_decides_the_sample_and_the_prompt_begins_it() {
        let (model, bytes) = (model(), Tokenizer::bytes());
        let text = |seed| sample(&model, Precision::F32, &bytes, &drawing(None), 30, seed).unwrap();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        assert!(text(1).starts_with("ab"));
        assert!(!text(1).chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
    }

    #[test]
    fn bad_ways_to_draw_are_refused() {
        assert!(Drawing { temperature: 0.0, ..drawing(None) }.check().is_err());
        assert!(Drawing { temperature: f64::NAN, ..drawing(None) }.check().is_err());
        assert!(drawing(Some(0)).check().is_err());
    }
}
