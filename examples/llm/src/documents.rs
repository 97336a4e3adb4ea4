//! Files of JSON lines, each of which is a document: a text, or a prompt and what is to follow it.

use crate::prepare::cannot_read;
use crate::tokenizer::Tokenizer;
use crate::tokens::Writer;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// A line. Other keys are left alone.
#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    prompt: Option<String>,
    completion: Option<String>,
}

/// A document, whose prompt is read and not learned.
pub struct Document {
    prompt: String,
    completion: String,
}

pub fn are_in(file: &Path) -> bool {
    file.extension().is_some_and(|ending| ending == "jsonl")
}

/// The documents of a file.
pub fn read(file: &Path) -> Result<impl Iterator<Item = Result<Document>> + Send + use<'_>> {
    let lines = BufReader::new(File::open(file).with_context(|| cannot_read(file))?).lines();
    let documents = lines.zip(1..).map(move |(line, number)| {
        let line = line.with_context(|| cannot_read(file))?;
        match line.trim().is_empty() {
            true => Ok(None),
            false => Document::parse(&line)
                .map(Some)
                .with_context(|| format!("line {number} of {} is no document", file.display())),
        }
    });
    Ok(documents.filter_map(Result::transpose))
}

impl Document {
    fn parse(line: &str) -> Result<Document> {
        match serde_json::from_str(line)? {
            Line { text: Some(completion), prompt: None, completion: None } => {
                Ok(Document { prompt: String::new(), completion })
            }
            Line { text: None, prompt: Some(prompt), completion: Some(completion) } => {
                Ok(Document { prompt, completion })
            }
            _ => bail!("give either \"text\", or \"prompt\" and \"completion\""),
        }
    }

    /// All of it.
    pub fn text(&self) -> String {
        format!("{}{}", self.prompt, self.completion)
    }

    /// Writes its tokens, with those that the vocabulary sets before and after a document.
    pub fn write(&self, vocabulary: &Tokenizer, writer: &mut Writer) -> Result<()> {
        let (mut tokens, prompt) = vocabulary.encode_from(&self.text(), self.prompt.len())?;
        let end = vocabulary.end_of_text();
        if tokens.last().copied() != end {
            tokens.extend(end);
        }
        let (prompt, completion) = tokens.split_at(prompt);
        writer.write_unlearned(prompt)?;
        writer.write(completion)
    }
}

#[cfg(test)]
#[path = "../tests/unit/documents.rs"]
mod tests;
