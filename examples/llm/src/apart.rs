//! Documents of a window that do not see one another.

use crate::tokenizer::Tokenizer;
use crate::tokens::{Part, Tokens};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use tch::Tensor;
use tch_extension::nn::Packed;

/// Whether the documents of a window see one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Documents {
    /// A window is one text
    #[default]
    Together,
    /// A token sees only those of its own document, and the last one of a document learns nothing
    Apart,
}

/// Where documents end, and what no window of the data exceeds, so that batches have one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Apart {
    /// The last token of each document.
    pub end: i64,
    /// The most places in a window at which a document begins, apart from its first one.
    pub borders: usize,
    /// The most tokens of a document in a window.
    longest: i64,
    /// How many of the tokens to train on are learned.
    learned: usize,
    tokens: usize,
}

impl Apart {
    /// Reads all tokens once, if documents are to be apart.
    pub fn of(
        documents: Documents,
        tokens: &Tokens,
        vocabulary: &Tokenizer,
        context: i64,
    ) -> Result<Option<Apart>> {
        if documents == Documents::Together {
            return Ok(None);
        }
        let end = vocabulary.end_of_text().context(
            "--documents apart needs a vocabulary with a token after each document: give --vocabulary bpe, or \
             --documents together",
        )?;
        let apart = Apart::scan(tokens, end.into(), context);
        ensure!(apart.learned > 0, "no document has a token to learn: give longer ones");
        Ok(Some(apart))
    }

    pub fn scan(tokens: &Tokens, end: i64, context: i64) -> Apart {
        let (mut borders, mut longest, mut learned) = (0, 0, 0);
        for part in [Part::Train, Part::HeldOut] {
            // The last `context` - 1 places at which one may begin have these.
            let (mut recent, mut first) = (VecDeque::new(), 0);
            let count = tokens.len(part);
            let mut some = vec![0; 1 << 16];
            for start in (0..count).step_by(some.len()) {
                tokens.read(part, start, &mut some);
                for (place, &token) in (start..count).zip(&some) {
                    // No token comes before the first one of a document, from which it is learned.
                    let is_learned = token >= 0 && place != first;
                    learned += usize::from(part == Part::Train && is_learned);
                    if token.max(!token) != end {
                        continue;
                    }
                    longest = longest.max(place + 1 - first);
                    first = place + 1;
                    recent.push_back(first);
                    while recent.front().is_some_and(|&old| old + context as usize <= first + 1) {
                        recent.pop_front();
                    }
                    borders = borders.max(recent.len());
                }
            }
            longest = longest.max(count - first);
        }
        Apart {
            end,
            borders,
            longest: context.min(longest as i64),
            learned,
            tokens: tokens.len(Part::Train),
        }
    }

    /// The share of the tokens to train on that are learned.
    pub fn learned_share(&self) -> f64 {
        self.learned as f64 / self.tokens as f64
    }

    /// Where documents begin in a batch of inputs `[B, T]`, its targets and what
    /// [`windows`](crate::data::windows) adds to them.
    pub fn packed(&self, batch: &[Tensor]) -> tch_extension::Result<Packed> {
        let [inputs, _, borders] = batch else {
            return Err(tch_extension::Error::msg("a batch has no borders of documents"));
        };
        Packed::f_new(borders, inputs.size2()?.into(), self.longest)
    }
}

#[cfg(test)]
#[path = "../tests/unit/apart.rs"]
mod tests;
