//! Generates tokens for the rows of a batch. On a GPU a token is one replay of a captured graph, in
//! which everything stays on the device: each row's place, its cache, and the token that is drawn.

use crate::device::PinnedCopies;
use crate::model::Model;
use crate::sample::Drawing;
use anyhow::{Context, Result};
use tch::{Kind, Tensor};
use tch_extension::cuda::{Event, Graph};
use tch_extension::nn::KvCache;

/// Tokens of a prompt that are computed at a time, which bounds the memory that they take.
const CHUNK: i64 = 1024;

/// Rows that are generated together.
pub struct Decoder<'a> {
    model: &'a Model,
    drawing: &'a Drawing,
    /// Tokens from here on are padding of the embedding.
    vocabulary: i64,
    caches: Vec<KvCache>,
    /// `[B, 1]`: the last tokens, which are not in the caches yet.
    tokens: Tensor,
    /// `[B]`: how many tokens the caches have.
    places: Tensor,
    graph: Option<Graph>,
    reads: Reads,
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
        let tokens = Tensor::f_zeros([rows, 1], like)?;
        Ok(Decoder {
            model,
            drawing,
            vocabulary: vocabulary.min(model.config.vocabulary),
            caches: model.caches(most),
            places: Tensor::f_zeros([rows], like)?,
            graph: None,
            reads: Reads::new(&tokens)?,
            tokens,
        })
    }

    /// Draws the next tokens, for which the context must have a place.
    pub fn next(&mut self) -> Result<()> {
        // Autocast keeps casts of weights, which a graph must not, and the CPU has no graphs.
        if self.graph.is_none() && self.model.device().is_cuda() && !self.model.autocasts() {
            self.graph = Some(self.captured()?);
        }
        match &self.graph {
            Some(graph) => Ok(graph.replay()?),
            None => Ok(self.step()?),
        }
    }

    /// Begins to copy the last tokens to the host.
    pub fn send(&mut self) -> Result<()> {
        self.reads.send(&self.tokens)
    }

    /// The tokens that were sent last. More steps may have been started since.
    pub fn read(&self) -> Result<Vec<u32>> {
        let tokens: Vec<i64> = self.reads.read()?.f_view([-1])?.try_into()?;
        tokens.into_iter().map(|token| Ok(u32::try_from(token)?)).collect()
    }

    /// Computes all rows anew, which need not be equally long, and draws the next token of each.
    pub fn start(&mut self, rows: &[&[u32]]) -> Result<()> {
        let lengths: Vec<i64> = rows.iter().map(|row| row.len() as i64).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        // Padded at the end. What is computed of the padding is written over before a row sees it.
        let padded = |row: &&[u32]| {
            let tokens = row.iter().map(|&token| i64::from(token));
            tokens.chain(std::iter::repeat(0)).take(longest as usize).collect::<Vec<_>>()
        };
        let tokens: Vec<i64> = rows.iter().flat_map(padded).collect();
        let tokens = Tensor::f_from_slice(&tokens)?.f_view([rows.len() as i64, longest])?;
        let tokens = tokens.f_to_device(self.model.device())?;
        self.caches.iter_mut().for_each(|cache| cache.truncate(0));
        let mut last: Vec<Option<Tensor>> = rows.iter().map(|_| None).collect();
        for from in (0..longest).step_by(CHUNK as usize) {
            let chunk = tokens.f_narrow(1, from, CHUNK.min(longest - from))?;
            let hidden = self.model.continued(&chunk, &mut self.caches)?;
            for (row, last) in last.iter_mut().enumerate() {
                let at = lengths[row] - 1 - from;
                if (0..CHUNK).contains(&at) {
                    *last = Some(hidden.f_get(row as i64)?.f_get(at)?);
                }
            }
        }
        let last: Option<Vec<Tensor>> = last.into_iter().collect();
        let last = Tensor::f_stack(&last.context("internal error: an empty row")?, 0)?;
        self.places.f_copy_(&Tensor::f_from_slice(&lengths)?)?;
        Ok(self.draw(&last)?)
    }

    /// A graph of the next step. What a step before it has changed is set back.
    fn captured(&mut self) -> Result<Graph> {
        let (tokens, places) = (self.tokens.copy(), self.places.copy());
        self.step()?;
        self.tokens.f_copy_(&tokens)?;
        self.places.f_copy_(&places)?;
        Ok(Graph::capture(self.model.device(), || self.step())?.0)
    }

    fn step(&mut self) -> tch_extension::Result<()> {
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
struct Reads {
    /// On a GPU.
    copies: Option<PinnedCopies>,
    /// Of the tokens that were sent last, and of those before: a copy may still be under way.
    slots: [(Tensor, Option<Event>); 2],
    sent: usize,
}

impl Reads {
    fn new(tokens: &Tensor) -> Result<Reads> {
        let device = tokens.device();
        let copies = device.is_cuda().then(PinnedCopies::new).transpose()?;
        let slot = || match &copies {
            Some(copies) => {
                anyhow::Ok((copies.memory(&tokens.size())?, Some(Event::without_timing(device)?)))
            }
            None => Ok((tokens.f_zeros_like()?, None)),
        };
        let slots = [slot()?, slot()?];
        Ok(Reads { copies, slots, sent: 0 })
    }

    fn send(&mut self, tokens: &Tensor) -> Result<()> {
        self.sent += 1;
        let (on_host, copied) = &mut self.slots[self.sent % 2];
        match (&self.copies, copied) {
            (Some(copies), Some(copied)) => {
                copies.begin(on_host, tokens)?;
                Ok(copied.record()?)
            }
            _ => Ok(on_host.f_copy_(tokens)?),
        }
    }

    fn read(&self) -> Result<Tensor> {
        let (on_host, copied) = &self.slots[self.sent % 2];
        copied.as_ref().map_or(Ok(()), Event::synchronize)?;
        Ok(on_host.copy())
    }
}

impl Drop for Reads {
    /// Waits for the last copies, whose memory goes away.
    fn drop(&mut self) {
        for copied in self.slots.iter().filter_map(|(_, copied)| copied.as_ref()) {
            // If the device failed, there is nothing to wait for.
            let _ = copied.synchronize();
        }
    }
}
