//! Generates tokens for the rows of a batch. On a GPU a token is one replay of a captured graph, in
//! which everything stays on the device: each row's place, its cache, and the token that is drawn.

use crate::device::PinnedCopies;
use crate::model::Model;
use crate::sample::Drawing;
use anyhow::{Context, Result, ensure};
use tch::{Kind, Tensor};
use tch_extension::cuda::{Event, Graph};
use tch_extension::nn::KvCache;

/// Tokens of a prompt that are computed at a time, which bounds the memory that they take.
const CHUNK: i64 = 1024;

/// Rows that are generated together.
pub struct Decoder<'a> {
    step: Step<'a>,
    graph: Option<Graph>,
    reads: Reads,
}

/// What the step of a token needs, and leaves for the next one.
struct Step<'a> {
    model: &'a Model,
    drawing: &'a Drawing,
    /// Tokens from here on are padding of the embedding.
    vocabulary: i64,
    caches: Vec<KvCache>,
    /// `[B, 1]`: the last tokens, which are not in the caches yet.
    tokens: Tensor,
    /// `[B]`: how many tokens the caches have.
    places: Tensor,
}

impl<'a> Decoder<'a> {
    /// For at most so many tokens in a row, prompt included.
    pub fn new(
        model: &'a Model,
        vocabulary: i64,
        drawing: &'a Drawing,
        [rows, most]: [i64; 2],
    ) -> Result<Self> {
        let like = (Kind::Int64, model.device());
        let vocabulary = vocabulary.min(model.config.vocabulary);
        let step = Step {
            model,
            drawing,
            vocabulary,
            caches: model.caches(most),
            tokens: Tensor::f_zeros([rows, 1], like)?,
            places: Tensor::f_zeros([rows], like)?,
        };
        let reads = match model.device().is_cuda() {
            true => Reads::OfDevice(Pinned::new(&step.tokens)?),
            false => Reads::OfHost(step.tokens.copy()),
        };
        Ok(Decoder { step, graph: None, reads })
    }

    /// Computes the prompts of all rows anew, and draws the first token of each.
    pub fn start(&mut self, prompts: &[Vec<u32>]) -> Result<()> {
        self.step.start(prompts)
    }

    /// Draws the next tokens, for which the context must have a place.
    pub fn next(&mut self) -> Result<()> {
        // Autocast keeps casts of weights, which a graph must not, and the CPU has no graphs.
        let model = self.step.model;
        if self.graph.is_none() && model.device().is_cuda() && !model.autocasts() {
            self.graph = Some(self.step.captured()?);
        }
        match &self.graph {
            Some(graph) => Ok(graph.replay()?),
            None => Ok(self.step.next()?),
        }
    }

    /// Begins to copy the last tokens to the host.
    pub fn send(&mut self) -> Result<()> {
        match &mut self.reads {
            Reads::OfDevice(pinned) => pinned.send(&self.step.tokens),
            Reads::OfHost(tokens) => Ok(tokens.f_copy_(&self.step.tokens)?),
        }
    }

    /// The tokens that were sent last. More steps may have been started since.
    pub fn read(&self) -> Result<Vec<u32>> {
        let tokens = match &self.reads {
            Reads::OfDevice(pinned) => pinned.read()?,
            Reads::OfHost(tokens) => tokens.shallow_clone(),
        };
        let tokens: Vec<i64> = tokens.f_view([-1])?.try_into()?;
        tokens.into_iter().map(|token| Ok(u32::try_from(token)?)).collect()
    }
}

impl Step<'_> {
    fn start(&mut self, prompts: &[Vec<u32>]) -> Result<()> {
        let rows = self.places.size1()?;
        let lengths: Vec<i64> = prompts.iter().map(|prompt| prompt.len() as i64).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        ensure!(
            prompts.len() as i64 == rows && lengths.iter().all(|&length| length > 0),
            "internal error: {} prompts for {rows} rows, or an empty one",
            prompts.len()
        );
        // Padded at the end. What is computed of the padding is written over before a row sees it.
        let mut padded = vec![0_i64; (rows * longest) as usize];
        for (row, prompt) in prompts.iter().enumerate() {
            for (at, &token) in prompt.iter().enumerate() {
                padded[row * longest as usize + at] = i64::from(token);
            }
        }
        let device = self.model.device();
        let padded = Tensor::f_from_slice(&padded)?.f_view([rows, longest])?.f_to_device(device)?;
        self.caches.iter_mut().for_each(|cache| cache.truncate(0));
        let mut last: Vec<Option<Tensor>> = (0..rows).map(|_| None).collect();
        for from in (0..longest).step_by(CHUNK as usize) {
            let count = CHUNK.min(longest - from);
            let chunk = padded.f_narrow(1, from, count)?;
            let hidden = self.model.continued(&chunk, &mut self.caches)?;
            for (row, last) in last.iter_mut().enumerate() {
                let at = lengths[row] - 1 - from;
                if (0..count).contains(&at) {
                    *last = Some(hidden.f_get(row as i64)?.f_get(at)?);
                }
            }
        }
        let last: Option<Vec<Tensor>> = last.into_iter().collect();
        let last = Tensor::f_stack(&last.context("internal error: a prompt without an end")?, 0)?;
        self.places.f_copy_(&Tensor::f_from_slice(&lengths)?)?;
        Ok(self.draw(&last)?)
    }

    /// A graph of the next step. What a step before it has changed is set back.
    fn captured(&mut self) -> Result<Graph> {
        let (tokens, places) = (self.tokens.copy(), self.places.copy());
        self.next()?;
        self.tokens.f_copy_(&tokens)?;
        self.places.f_copy_(&places)?;
        Ok(Graph::capture(self.model.device(), || self.next())?.0)
    }

    fn next(&mut self) -> tch_extension::Result<()> {
        let hidden = self.model.placed(&self.tokens, &self.places, &mut self.caches)?;
        let _ = self.places.f_add_scalar_(1)?;
        self.draw(&hidden.f_select(1, 0)?)
    }

    /// Draws tokens from features `[B, C]`.
    fn draw(&mut self, hidden: &Tensor) -> tch_extension::Result<()> {
        let logits = self.model.logits(hidden)?;
        let drawn = self.drawing.draw(&logits.f_narrow(1, 0, self.vocabulary)?)?;
        Ok(self.tokens.f_copy_(&drawn)?)
    }
}

/// Tokens on their way to the host, which reads them while the next step is computed.
enum Reads {
    OfHost(Tensor),
    OfDevice(Pinned),
}

struct Pinned {
    copies: PinnedCopies,
    /// Of the tokens that were sent last, and of those before: a copy may still be under way.
    slots: [(Tensor, Event); 2],
    sent: usize,
}

impl Pinned {
    fn new(tokens: &Tensor) -> Result<Pinned> {
        let copies = PinnedCopies::new()?;
        let slot = || -> Result<(Tensor, Event)> {
            Ok((copies.memory(&tokens.size())?, Event::without_timing(tokens.device())?))
        };
        let slots = [slot()?, slot()?];
        Ok(Pinned { copies, slots, sent: 0 })
    }

    fn send(&mut self, tokens: &Tensor) -> Result<()> {
        self.sent += 1;
        let (pinned, copied) = &self.slots[self.sent % 2];
        self.copies.begin(pinned, tokens)?;
        Ok(copied.record()?)
    }

    fn read(&self) -> Result<Tensor> {
        let (pinned, copied) = &self.slots[self.sent % 2];
        copied.synchronize()?;
        Ok(pinned.copy())
    }
}

impl Drop for Pinned {
    /// Waits for the last copies, whose memory goes away.
    fn drop(&mut self) {
        for (_, copied) in &self.slots {
            // If the device failed, there is nothing to wait for.
            let _ = copied.synchronize();
        }
    }
}
