//! Generates text, one token after the other.

use crate::decode::Decoder;
use crate::device;
use crate::model::Model;
use crate::origin::Origin;
use crate::progress::{say, show};
use crate::range;
use crate::tokenizer::Tokenizer;
use anyhow::{Result, ensure};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tch::{Kind, Tensor};

/// Tokens of a text.
pub const LENGTHS: [i64; 2] = [0, 10_000_000];

/// How tokens are drawn.
#[derive(Debug, Clone, clap::Args)]
pub struct Drawing {
    /// Text to continue; given several times, texts of one batch [default: a new line, or the end
    /// of a document]
    #[arg(long = "prompt", value_name = "PROMPT")]
    pub prompts: Vec<String>,
    /// Below 1 keeps to likely tokens, above 1 is more daring; 0 takes the likeliest
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Draws from the K likeliest tokens only
    #[arg(long, value_name = "K")]
    pub top_k: Option<i64>,
    /// Draws from the fewest tokens that have this probability together
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
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
    /// Continue each prompt so many times, all at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub count: usize,
    /// Generate all tokens, also after the end of a text
    #[arg(long)]
    pub ignore_end: bool,
    /// Print to stderr, as JSON, how long the first token took and each of the others
    #[arg(long)]
    pub times: bool,
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
            self.temperature == 0.0 || (1e-30..=1e30).contains(&self.temperature),
            "--temperature {:?} is out of range: give 0 for the likeliest token, or up to 1e30",
            self.temperature
        );
        range::check("--top-k", self.top_k.unwrap_or(1), [1, 1 << 40])?;
        range::check_above_0("--top-p", self.top_p.unwrap_or(1.0), 1.0)
    }

    /// Draws a token `[B, 1]` from the logits `[B, V]` of each row. Nothing waits for a GPU.
    pub fn draw(&self, logits: &Tensor) -> tch_extension::Result<Tensor> {
        if self.temperature == 0.0 {
            return Ok(logits.f_argmax(-1, true)?);
        }
        let logits = logits.f_to_kind(Kind::Float)?;
        let count = logits.size2()?.1;
        // A sum of all probabilities in the order of size needs sorted ones.
        let few = self.top_k.unwrap_or(count).min(count);
        let (logits, tokens) = match few < count || self.top_p.is_some() {
            true => {
                let (values, tokens) = logits.f_topk(few, -1, true, true)?;
                (values, Some(tokens))
            }
            false => (logits, None),
        };
        // The largest logit is subtracted first, so that no temperature causes an overflow.
        let scaled = logits.f_sub(&logits.f_amax([-1_i64].as_slice(), true)?)?;
        let scaled = scaled.f_div_scalar(self.temperature)?;
        let mut probabilities = scaled.f_softmax(-1, Kind::Float)?;
        if let Some(p) = self.top_p {
            let before = probabilities.f_cumsum(-1, Kind::Float)?.f_sub(&probabilities)?;
            probabilities = probabilities.f_masked_fill(&before.f_ge(p)?, 0.0)?;
        }
        // Of exponential numbers divided by these probabilities, each is the least with its
        // probability. `multinomial` does the same, and waits for the GPU.
        let drawn = probabilities.f_empty_like()?.f_exponential_(1.0)?;
        let drawn = probabilities.f_div(&drawn)?.f_argmax(-1, true)?;
        match tokens {
            Some(tokens) => Ok(tokens.f_gather(1, &drawn, false)?),
            None => Ok(drawn),
        }
    }
}

/// The subcommand.
pub fn run(options: &SampleOptions) -> Result<()> {
    let begun = Instant::now();
    options.drawing.check()?;
    range::check("--length", options.length, LENGTHS)?;
    range::check("--count", options.count, [1, 4096])?;
    let device = device::parse(&options.device)?;
    let origin = Origin::open("--from", &options.from, options.adapter.as_deref())?;
    let (model, tokenizer) = (origin.model_for_text(device)?, &origin.tokenizer);
    let prompts = &options.drawing.prompts;
    if options.logits {
        ensure!(
            prompts.len() <= 1,
            "--logits takes one --prompt, not {}: run it once for each",
            prompts.len()
        );
        let prompt = prompts.first().map_or("", String::as_str);
        return say(&logits(&model, tokenizer, prompt)?);
    }
    tch::manual_seed(options.seed);
    let mut texts = Texts::new(&model, tokenizer, prompts, options.count)?;
    if options.ignore_end {
        texts.ends.clear();
    }
    let mut times = Vec::new();
    let mut shown = Shown::new(tokenizer, &texts.prompts[0]);
    let is_one = texts.prompts.len() == 1;
    if is_one {
        show(&texts.whole(0, &texts.prompts[0].tokens)?)?;
    }
    let rows = texts.generate(&options.drawing, options.length, |rows| {
        times.push(begun.elapsed());
        // Several texts are shown one after the other, at the end.
        if let [row] = rows { show(&shown.next(row)?) } else { Ok(()) }
    })?;
    if is_one {
        say("")?;
    }
    for (index, row) in rows.iter().enumerate().filter(|_| !is_one) {
        say(&format!("--- {} of {} ---\n{}", index + 1, rows.len(), texts.whole(index, row)?))?;
    }
    if options.times {
        eprintln!("{}", times_as_json(&times, texts.longest(), rows.len()));
    }
    Ok(())
}

/// The seconds from the start of the program to the first token, and milliseconds for each other one.
fn times_as_json(times: &[Duration], prompt: usize, rows: usize) -> serde_json::Value {
    let later = times.len().saturating_sub(1);
    let all = times.first().zip(times.last()).map(|(first, last)| (*last - *first).as_secs_f64());
    let of_token = all.filter(|_| later > 0).map(|all| all / later as f64);
    serde_json::json!({
        "rows": rows,
        "prompt": prompt,
        "tokens": times.len(),
        "first_token_s": times.first().map(Duration::as_secs_f64),
        "ms_per_token": of_token.map(|seconds| 1e3 * seconds),
        "tokens_per_s": of_token.map(|seconds| rows as f64 / seconds),
    })
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

/// The prompts and `length` tokens after each, as text.
pub fn sample(
    model: &Model,
    tokenizer: &Tokenizer,
    drawing: &Drawing,
    length: i64,
    seed: i64,
) -> Result<String> {
    tch::manual_seed(seed);
    let texts = Texts::new(model, tokenizer, &drawing.prompts, 1)?;
    let rows = texts.generate(drawing, length, |_| Ok(()))?;
    let rows = rows.iter().enumerate().map(|(index, row)| texts.whole(index, row));
    Ok(rows.collect::<Result<Vec<_>>>()?.join("\n\n"))
}

/// What a model continues: at least one token.
#[derive(Clone)]
struct Prompt {
    tokens: Vec<u32>,
    /// How many of them are not shown.
    hidden: usize,
}

impl Prompt {
    fn new(tokenizer: &Tokenizer, text: &str) -> Result<Prompt> {
        let mut tokens = tokenizer.encode_prompt(text)?;
        let hidden = usize::from(tokens.is_empty());
        if tokens.is_empty() {
            tokens.push(tokenizer.end_of_text().unwrap_or(u32::from(b'\n')));
        }
        Ok(Prompt { tokens, hidden })
    }
}

/// Texts that a model continues together, each by itself.
struct Texts<'a> {
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    prompts: Vec<Prompt>,
    /// Tokens after which a text ends.
    ends: Vec<u32>,
}

impl<'a> Texts<'a> {
    /// Each prompt `count` times. Without any, one that is empty.
    fn new(
        model: &'a Model,
        tokenizer: &'a Tokenizer,
        prompts: &[String],
        count: usize,
    ) -> Result<Texts<'a>> {
        let prompts = if prompts.is_empty() { &[String::new()] } else { prompts };
        let prompts = prompts.iter().map(|prompt| Prompt::new(tokenizer, prompt));
        let prompts = prompts.collect::<Result<Vec<_>>>()?;
        let prompts = prompts.into_iter().flat_map(|prompt| vec![prompt; count]).collect();
        let mut ends: Vec<u32> = model.config.ends.iter().map(|&end| end as u32).collect();
        if ends.is_empty() {
            ends.extend(tokenizer.end_of_text());
        }
        Ok(Texts { model, tokenizer, prompts, ends })
    }

    /// The tokens of the longest prompt.
    fn longest(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0)
    }

    /// The prompts and `length` tokens after each, or fewer where the model ends a text. `each` gets
    /// the rows after each token.
    fn generate(
        &self,
        drawing: &Drawing,
        length: i64,
        mut each: impl FnMut(&[Vec<u32>]) -> Result<()>,
    ) -> Result<Vec<Vec<u32>>> {
        let _no_grad = tch::no_grad_guard();
        let context = self.model.config.context as usize;
        let mut rows: Vec<Vec<u32>> =
            self.prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
        if length == 0 {
            return Ok(rows);
        }
        // Rows go on after their ends, as long as others do, and are cut there in the end.
        let mut ends: Vec<Option<usize>> = vec![None; rows.len()];
        let sizes = [rows.len() as i64, self.longest() as i64 + length];
        let vocabulary = self.tokenizer.len() as i64;
        let mut decoder = Decoder::new(self.model, vocabulary, drawing, sizes)?;
        // Where the window of each row begins.
        let mut firsts: Vec<usize> =
            rows.iter().map(|row| row.len().saturating_sub(context)).collect();
        decoder.start(&windows(&rows, &firsts))?;
        decoder.send()?;
        for done in 1..=length as usize {
            let has_place = windows(&rows, &firsts).iter().all(|window| window.len() < context);
            // The next token is on its way before the host looks at this one.
            let goes_on = done < length as usize && has_place;
            if goes_on {
                decoder.next()?;
            }
            for ((row, end), token) in rows.iter_mut().zip(&mut ends).zip(decoder.read()?) {
                row.push(token);
                if end.is_none() && self.ends.contains(&token) {
                    *end = Some(row.len() - 1);
                }
            }
            if ends.iter().all(Option::is_some) {
                break;
            }
            each(&rows)?;
            if done == length as usize {
                break;
            }
            if !goes_on {
                // Positions are absolute, so the second half is computed again, as the first half.
                for (first, row) in firsts.iter_mut().zip(&rows) {
                    *first = row.len().saturating_sub(context.div_ceil(2)).max(*first);
                }
                decoder.start(&windows(&rows, &firsts))?;
            }
            decoder.send()?;
        }
        for (row, end) in rows.iter_mut().zip(ends) {
            row.truncate(end.unwrap_or(row.len()));
        }
        Ok(rows)
    }

    /// What is shown of a row.
    fn whole(&self, index: usize, row: &[u32]) -> Result<String> {
        Ok(printable(&self.tokenizer.decode(&row[self.prompts[index].hidden..])?))
    }
}

/// The part of each row that the model sees.
fn windows<'a>(rows: &'a [Vec<u32>], firsts: &[usize]) -> Vec<&'a [u32]> {
    rows.iter().zip(firsts).map(|(row, first)| &row[*first..]).collect()
}

/// A text that is shown while it is generated.
struct Shown<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens before this one have been shown.
    shown: usize,
    /// Tokens from this one to `shown` are decoded again, because what a token is depends on them.
    before: usize,
}

impl<'a> Shown<'a> {
    /// The prompt is shown already.
    fn new(tokenizer: &'a Tokenizer, prompt: &Prompt) -> Self {
        Shown { tokenizer, shown: prompt.tokens.len(), before: prompt.hidden }
    }

    /// The text of the row's tokens that were not shown, unless they end within a character.
    fn next(&mut self, row: &[u32]) -> Result<String> {
        let before = self.tokenizer.decode(&row[self.before..self.shown])?;
        let all = self.tokenizer.decode(&row[self.before..])?;
        let Some(new) = all.strip_prefix(&before).filter(|new| !new.is_empty()) else {
            return Ok(String::new());
        };
        if new.ends_with(char::REPLACEMENT_CHARACTER) && row.len() - self.shown < 4 {
            return Ok(String::new());
        }
        (self.before, self.shown) = (self.shown, row.len());
        Ok(printable(new))
    }
}

/// Replaces control characters: a generated one must not control the terminal.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{FFFD}")
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use tch::Device;

    /// Random numbers belong to the process, so tests that draw do so one after the other.
    pub fn alone() -> MutexGuard<'static, ()> {
        static DRAWS: Mutex<()> = Mutex::new(());
        DRAWS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn model() -> Model {
        let config = ModelConfig {
            vocabulary: 320,
            context: 8,
            layers: 1,
            heads: 1,
            dim: 8,
            ..Default::default()
        };
        Model::new(&config, Device::Cpu, 1).unwrap()
    }

    fn drawing(top_k: Option<i64>) -> Drawing {
        Drawing { prompts: vec!["ab".into()], temperature: 1.0, top_k, top_p: None }
    }

    fn texts<'a>(
        model: &'a Model,
        bytes: &'a Tokenizer,
        prompts: &[&[u32]],
        ends: &[u32],
    ) -> Texts<'a> {
        let prompt = |tokens: &&[u32]| Prompt { tokens: tokens.to_vec(), hidden: 0 };
        let (prompts, ends) = (prompts.iter().map(prompt).collect(), ends.to_vec());
        Texts { model, tokenizer: bytes, prompts, ends }
    }

    #[test]
    fn generates_beyond_the_context_and_only_tokens_of_the_vocabulary() {
        let _alone = alone();
        let (model, bytes) = (model(), Tokenizer::bytes());
        let mut lengths = vec![];
        let texts = texts(&model, &bytes, &[&[1_u32; 20][..]; 3], &[]);
        let rows = texts.generate(&drawing(None), 50, |rows| {
            lengths.push(rows[2].len());
            Ok(())
        });
        let rows = rows.unwrap();
        assert_eq!(lengths, (21..=70).collect::<Vec<_>>());
        assert!(rows.iter().all(|row| row.len() == 70 && row.iter().all(|&token| token < 256)));
        assert!(rows[0] != rows[1] && rows[1] != rows[2]);
    }

    #[test]
    fn the_likeliest_token_is_what_the_whole_window_says() {
        let _alone = alone();
        let (model, bytes) = (model(), Tokenizer::bytes());
        let of = |drawing: &Drawing, ends: &[u32]| {
            let texts = texts(&model, &bytes, &[&[3_u32, 4, 5][..]; 2], ends);
            texts.generate(drawing, 20, |_| Ok(())).unwrap()
        };
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
            let logits = logits.narrow(1, 0, 256);
            expected.push(logits.argmax(-1, false).int64_value(&[0]) as u32);
        }
        let likeliest = Drawing { temperature: 0.0, ..drawing(None) };
        for drawing in [drawing(Some(1)), likeliest.clone()] {
            assert_eq!(of(&drawing, &[]), [expected.clone(), expected.clone()]);
        }
        let end = expected[9];
        let first = 3 + expected[3..].iter().position(|&token| token == end).unwrap();
        assert_eq!(of(&likeliest, &[end])[1], expected[..first]);
    }

    #[test]
    fn rows_have_prompts_and_ends_of_their_own() {
        let _alone = alone();
        let (model, bytes) = (model(), Tokenizer::bytes());
        let likeliest = Drawing { temperature: 0.0, ..drawing(None) };
        let prompts: [&[u32]; 4] = [&[3], &[3, 4, 5], &[9; 13], &[1, 2, 3, 4, 5, 6, 7]];
        let of = |prompts: &[&[u32]], length, ends: &[u32]| {
            texts(&model, &bytes, prompts, ends).generate(&likeliest, length, |_| Ok(())).unwrap()
        };
        // Until the longest row fills the context, each is as if it were alone. One that has filled it
        // begins anew with others, and its window is then longer than the others'.
        let long = &prompts[2..3];
        let together = of(&[prompts[0], prompts[1]], 5, &[]);
        assert_eq!(together[0], of(&prompts[..1], 5, &[])[0]);
        assert_eq!(together[1], of(&prompts[1..2], 5, &[])[0]);
        assert_eq!(of(long, 1, &[])[0], of(&prompts, 1, &[])[2]);
        let all = of(&prompts, 30, &[]);
        let lengths: Vec<usize> = all.iter().map(Vec::len).collect();
        assert_eq!(lengths, prompts.map(|prompt| prompt.len() + 30));
        // Each row ends at its own first end.
        let end = together[0][3];
        let cut = |row: &[u32], prompt: usize| {
            let at = row[prompt..].iter().position(|&token| token == end);
            row[..at.map_or(row.len(), |at| prompt + at)].to_vec()
        };
        let ended = of(&[prompts[0], prompts[1]], 5, &[end]);
        assert_eq!(ended, [cut(&together[0], 1), cut(&together[1], 3)]);
    }

    #[test]
    fn tokens_are_drawn_with_their_probabilities() {
        let _alone = alone();
        tch::manual_seed(1);
        let logits = Tensor::from_slice(&[0.5_f32, 0.3, 0.15, 0.05]).log().repeat([4000, 1]);
        let shares = |drawing: Drawing| -> Vec<f64> {
            let drawn = drawing.draw(&logits).unwrap().view([-1]);
            let counts = drawn.bincount::<&Tensor>(None, 4).to_kind(Kind::Double) / 4000.0;
            Vec::try_from(counts).unwrap()
        };
        for (drawing, expected) in [
            (drawing(None), [0.5, 0.3, 0.15, 0.05]),
            (drawing(Some(2)), [0.625, 0.375, 0.0, 0.0]),
            (drawing(Some(100)), [0.5, 0.3, 0.15, 0.05]),
            (Drawing { top_p: Some(0.85), ..drawing(None) }, [0.526, 0.316, 0.158, 0.0]),
            (Drawing { top_p: Some(1e-9), ..drawing(None) }, [1.0, 0.0, 0.0, 0.0]),
            (Drawing { top_p: Some(0.7), ..drawing(Some(3)) }, [0.625, 0.375, 0.0, 0.0]),
            (Drawing { temperature: 0.5, ..drawing(None) }, [0.685, 0.247, 0.062, 0.007]),
            (Drawing { temperature: 1e-30, ..drawing(None) }, [1.0, 0.0, 0.0, 0.0]),
            (Drawing { temperature: 1e30, ..drawing(None) }, [0.25; 4]),
        ] {
            let found = shares(drawing.clone());
            for (found, expected) in found.iter().zip(expected) {
                // Five deviations.
                let bound = 5.0 * (expected * (1.0 - expected) / 4000.0_f64).sqrt() + 1e-3;
                assert!((found - expected).abs() < bound, "{drawing:?}: {found} {expected}");
            }
        }
    }

    #[test]
    fn a_text_is_shown_as_it_comes() {
        let _alone = alone();
        let (model, bytes) = (model(), Tokenizer::bytes());
        let row: Vec<u32> =
            "aé\u{1F600}b\u{1}é".bytes().chain([0xff, b'c']).map(u32::from).collect();
        let texts = texts(&model, &bytes, &[&row[..1]], &[]);
        let mut shown = Shown::new(&bytes, &texts.prompts[0]);
        let mut pieces = vec![texts.whole(0, &row[..1]).unwrap()];
        for len in 2..=row.len() {
            pieces.push(shown.next(&row[..len]).unwrap());
        }
        assert_eq!(pieces.concat(), texts.whole(0, &row).unwrap());
        assert_eq!(pieces[..7], ["a", "", "é", "", "", "", "\u{1F600}"]);
    }

    #[test]
    fn the_seed_decides_the_sample_and_the_prompt_begins_it() {
        let _alone = alone();
        let (model, bytes) = (model(), Tokenizer::bytes());
        let text = |seed| sample(&model, &bytes, &drawing(None), 30, seed).unwrap();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        assert!(text(1).starts_with("ab"));
        assert!(!text(1).chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
    }

    #[test]
    fn bad_ways_to_draw_are_refused() {
        for temperature in [-1.0, 1e-31, f64::NAN, f64::INFINITY] {
            assert!(Drawing { temperature, ..drawing(None) }.check().is_err());
        }
        for top_p in [0.0, 1.1, f64::NAN] {
            assert!(Drawing { top_p: Some(top_p), ..drawing(None) }.check().is_err());
        }
        assert!(drawing(Some(0)).check().is_err());
        assert!(Drawing { temperature: 0.0, ..drawing(Some(3)) }.check().is_ok());
    }
}
