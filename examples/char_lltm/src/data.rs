//! The training text: where it comes from, its vocabulary, and its split into a training part and a
//! held-out part.

use anyhow::{Context, Result, anyhow, ensure};
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use tch::{Device, Tensor};

/// The largest accepted size. As tensors of 64-bit indices, a larger text would take gigabytes.
const LARGEST_TEXT: u64 = 256 << 20;

/// The files of the default text: a folder of the repository, the endings of the files to take from
/// it, and whether its subfolders are included. The text is their prose.
const REPOSITORY_TEXT: &[(&str, &[&str], bool)] = &[
    ("", &["README.md", "CHANGELOG.md"], false),
    ("docs", &[".md"], true),
    ("src", &[".rs"], true),
    ("csrc", &[".h", ".cpp", ".cu", ".cuh"], true),
    ("tests", &[".rs"], true),
    ("examples", &[".rs"], true),
    ("tch-extension-build/src", &[".rs"], true),
    ("xtask/src", &[".rs"], true),
];

/// A text and its name.
pub struct Text {
    pub source: String,
    pub content: String,
}

/// Reads the text at `path`, or this repository's own.
pub fn load(path: Option<&Path>) -> Result<Text> {
    match path {
        Some(path) => Ok(Text { source: path.display().to_string(), content: read_utf8(path)? }),
        None => load_repository(&repository()),
    }
}

/// The root of the repository: the nearest folder with kernels at or above one that a variable names.
/// Cargo sets the variable to this package's folder for programs that it runs; a bundle's script sets
/// it to the folder with the bundle's copy of the sources.
fn repository() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let root = folder.ancestors().find(|folder| folder.join("csrc").is_dir());
    root.unwrap_or(&folder).to_path_buf()
}

fn load_repository(root: &Path) -> Result<Text> {
    let mut files = Vec::new();
    for (folder, endings, deep) in REPOSITORY_TEXT {
        collect(&root.join(folder), endings, *deep, &mut files)?;
    }
    ensure!(
        !files.is_empty(),
        "no sources of this repository in {}: give a text with --text",
        root.display()
    );
    // File systems list files in no particular order; the text must not depend on it.
    files.sort();
    let prose_of =
        |file: &PathBuf| Ok(prose(&read_utf8(file)?, file.extension() == Some("md".as_ref())));
    let contents = files.iter().map(prose_of).collect::<Result<Vec<_>>>()?;
    Ok(Text {
        source: format!("the prose of this repository ({} files)", files.len()),
        content: contents.concat(),
    })
}

/// The sentences of a page in Markdown, or of a source's comments: one line for each paragraph.
/// Headings, tables and code are left out. A model of code would mostly learn to indent.
fn prose(text: &str, is_page: bool) -> String {
    let (mut prose, mut paragraph, mut is_code) = (String::new(), String::new(), false);
    for line in text.lines().chain([""]) {
        let line = if is_page { Some(line) } else { comment(line) };
        // A block of code ends with its comment, whether or not that says so.
        is_code &= line.is_some();
        let line = line.unwrap_or_default().trim();
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        let is_text = !(is_code || is_fence || line.starts_with(['|', '#', '<']));
        if !is_text || line.is_empty() || line.starts_with("- ") {
            let plain = without_markup(&std::mem::take(&mut paragraph));
            if plain.starts_with(char::is_uppercase) && plain.ends_with(['.', ':', '?', '!']) {
                prose = prose + &plain + "\n";
            }
        }
        if is_text {
            let separator = if paragraph.is_empty() { "" } else { " " };
            paragraph = paragraph + separator + line.trim_start_matches("- ");
        }
    }
    prose
}

/// What a line of a source says if it is a comment.
fn comment(line: &str) -> Option<&str> {
    let comment = line.trim_start().strip_prefix("//")?;
    Some(comment.strip_prefix(['/', '!']).unwrap_or(comment))
}

/// A paragraph of Markdown without its links' targets and without quotation marks of code.
fn without_markup(mut paragraph: &str) -> String {
    let mut plain = String::new();
    while let Some((text, link)) = paragraph.split_once("](") {
        plain += text;
        paragraph = link.split_once(')').map_or("", |(_, rest)| rest);
    }
    plain += paragraph;
    plain.replace("**", "").replace(['`', '[', ']'], "")
}

/// Adds the regular files under `folder` whose names end in one of `endings`. Build output and
/// hidden folders are skipped, because the text would otherwise differ from one build to the next.
fn collect(folder: &Path, endings: &[&str], deep: bool, files: &mut Vec<PathBuf>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let cannot = || format!("cannot list {} (give another text with --text)", folder.display());
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let entry = entry.with_context(cannot)?;
        let kind = entry.file_type().with_context(cannot)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if kind.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
            files.push(entry.path());
        } else if deep && kind.is_dir() && name != "target" && !name.starts_with('.') {
            collect(&entry.path(), endings, deep, files)?;
        }
    }
    Ok(())
}

fn read_utf8(path: &Path) -> Result<String> {
    let name = path.display();
    ensure!(!path.is_dir(), "the text {name} is a folder: give a text file");
    let cannot =
        || format!("cannot read the text {name} (give an existing, readable file with --text)");
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(cannot)?;
    file.take(LARGEST_TEXT + 1).read_to_end(&mut bytes).with_context(cannot)?;
    ensure!(
        bytes.len() as u64 <= LARGEST_TEXT,
        "the text {name} is larger than {} MiB, the most that is held in memory: give a part of it",
        LARGEST_TEXT >> 20
    );
    String::from_utf8(bytes).map_err(|error| {
        let byte = error.utf8_error().valid_up_to();
        anyhow!(
            "the text {name} is not UTF-8 (byte {byte}, counted from 0): convert it, with iconv for instance"
        )
    })
}

/// Consecutive text, cut into rows that are read at the same time. Each row continues in the next
/// chunk where it ended in the previous one, so the recurrent state can be carried over.
pub struct Streams {
    inputs: Tensor,  // [rows, length], Int64
    targets: Tensor, // [rows, length], Int64: the character after each input
}

impl Streams {
    fn new(indices: &[i64], rows: i64, device: Device) -> Streams {
        let length = (indices.len() as i64 - 1) / rows;
        let all = Tensor::from_slice(indices).to_device(device);
        let cut = |start| all.narrow(0, start, rows * length).view([rows, length]);
        Streams { inputs: cut(0), targets: cut(1) }
    }

    /// Some of the rows.
    pub fn part(&self, first: i64, rows: i64) -> Streams {
        let part = |all: &Tensor| all.narrow(0, first, rows);
        Streams { inputs: part(&self.inputs), targets: part(&self.targets) }
    }

    pub fn rows(&self) -> i64 {
        self.inputs.size()[0]
    }

    pub fn length(&self) -> i64 {
        self.inputs.size()[1]
    }

    /// The inputs and the targets, `[rows, count]` each, from column `start` on.
    pub fn chunk(&self, start: i64, count: i64) -> (Tensor, Tensor) {
        (self.inputs.narrow(1, start, count), self.targets.narrow(1, start, count))
    }
}

/// The text in the form that the model reads.
pub struct Corpus {
    /// The text's characters, sorted by code point. A character's index is its position in this
    /// list.
    pub vocabulary: Vec<char>,
    pub train: Streams,
    pub held_out: Streams,
    /// The held-out loss, in nats, of the best model that ignores context.
    pub unigram: f64,
    characters: usize,
}

impl Corpus {
    /// Splits the text; its last tenth is held out.
    pub fn new(text: &Text, batch: i64, seq_len: i64, device: Device) -> Result<Corpus> {
        ensure!(!text.content.is_empty(), "the text {} is empty: give a longer one", text.source);
        let vocabulary: Vec<char> =
            text.content.chars().collect::<BTreeSet<_>>().into_iter().collect();
        ensure!(
            vocabulary.len() > 1,
            "the text {} consists of {:?} only, so there is nothing to predict: give a text of several characters",
            text.source,
            vocabulary[0]
        );
        let indices = index(&text.content, &vocabulary);
        let (train, held_out) = split(&indices, batch * seq_len + 1).with_context(|| {
            format!(
                "the text {} is too short for --batch {batch} and --seq-len {seq_len}",
                text.source
            )
        })?;
        // The held-out part may have fewer rows than the batch, because a short text has too few
        // characters for that many.
        let rows = batch.min(held_out.len() as i64 - 1);
        let train_streams = Streams::new(train, batch, device);
        let held_out_streams = Streams::new(held_out, rows, device);
        let targets = &held_out[1..=(rows * held_out_streams.length()) as usize];
        Ok(Corpus {
            unigram: unigram_loss(train, targets, vocabulary.len()),
            characters: indices.len(),
            vocabulary,
            train: train_streams,
            held_out: held_out_streams,
        })
    }

    /// The facts about the text for the run's heading.
    pub fn describe(&self, text: &Text) -> String {
        format!(
            "text: {}\n{} characters, vocabulary of {}\nSHA-256 {:x}\nunigram baseline {:.4} nats per character",
            text.source,
            self.characters,
            self.vocabulary.len(),
            Sha256::digest(&text.content),
            self.unigram
        )
    }
}

fn index(text: &str, vocabulary: &[char]) -> Vec<i64> {
    let places: HashMap<char, i64> = vocabulary.iter().copied().zip(0..).collect();
    text.chars().filter_map(|c| places.get(&c).copied()).collect()
}

/// The training part and the held-out tenth. The first must have at least `needed` characters, the
/// second at least two.
fn split(indices: &[i64], needed: i64) -> Result<(&[i64], &[i64])> {
    let held_out = (indices.len() / 10).max(2);
    let train = indices.len().saturating_sub(held_out);
    ensure!(
        train as i64 >= needed,
        "it has {} characters and they need {}: lower them, or give a longer text",
        indices.len(),
        needed + (needed / 9).max(2)
    );
    Ok(indices.split_at(train))
}

/// The cross-entropy of `targets` under the frequencies of the characters in `train`. Each count is
/// increased by one, so that a character that does not occur in the training part has a finite
/// cost.
fn unigram_loss(train: &[i64], targets: &[i64], vocabulary: usize) -> f64 {
    let mut counts = vec![1.0; vocabulary];
    for &i in train {
        counts[i as usize] += 1.0;
    }
    let total: f64 = counts.iter().sum();
    let nats: f64 = targets.iter().map(|&i| -(counts[i as usize] / total).ln()).sum();
    nats / targets.len() as f64
}
