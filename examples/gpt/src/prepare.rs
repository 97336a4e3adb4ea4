//! From text files to a token file and its vocabulary.

use crate::files::{prepare_folder, repository};
use crate::tokenizer::{self, Tokenizer, Vocabulary};
use crate::tokens::{self, Part, Tokens};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use walkdir::{DirEntry, WalkDir};

/// A piece of text is encoded at once. It ends with a line, unless a line is longer than
/// [`LONGEST_LINE`].
const PIECE: u64 = 1 << 20;
const LONGEST_LINE: u64 = 64 << 20;
/// So many pieces are encoded in parallel.
const PIECES: usize = 32;
/// The size of a byte-pair vocabulary where none is given.
const DEFAULT_SIZE: usize = 8192;

/// What to make of which text.
#[derive(Debug, Clone, clap::Args)]
pub struct TextOptions {
    /// Text files, or folders of them [default: this repository's own prose and sources]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// The vocabulary
    #[arg(long, value_enum, default_value_t = Vocabulary::Bytes)]
    pub vocabulary: Vocabulary,
    /// The number of byte pairs, with `--vocabulary bpe` [default: 8192]
    #[arg(long, value_name = "N")]
    pub vocabulary_size: Option<usize>,
    /// The vocabulary of a folder, such as that of a run, instead of a new one
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["vocabulary", "vocabulary_size"])]
    pub vocabulary_from: Option<PathBuf>,
    /// The fraction of the text, at its end, that is held out for validation
    #[arg(long, value_name = "FRACTION", default_value_t = 0.1)]
    pub held_out: f64,
}

/// Writes `tokens.bin` and `tokenizer.json` into a folder, and returns what it did in words.
pub fn prepare(options: &TextOptions, option: &str, folder: &Path) -> Result<String> {
    tokenizer::check_size(options.vocabulary, options.vocabulary_size)?;
    ensure!(
        options.held_out > 0.0 && options.held_out < 1.0,
        "--held-out {:?} is out of range: give a number between 0 and 1, such as 0.1",
        options.held_out
    );
    let sources = Sources::find(&options.text)?;
    prepare_folder(option, folder)?;
    let vocabulary = match (&options.vocabulary_from, options.vocabulary) {
        (Some(folder), _) => Tokenizer::load(folder)?,
        (None, Vocabulary::Bytes) => Tokenizer::bytes(),
        (None, Vocabulary::Bpe) => {
            train(&sources, options.vocabulary_size.unwrap_or(DEFAULT_SIZE))?
        }
    };
    // The vocabulary first, so that no token file is there without its own.
    vocabulary.save(folder)?;
    let size = (vocabulary.hash(), vocabulary.len());
    tokens::write(folder, size, options.held_out, |writer| {
        sources.files.iter().try_for_each(|file| encode(file, &vocabulary, writer))
    })?;
    let written = Tokens::open(folder)?;
    Ok(format!(
        "{}: {} tokens to train on, {} held out, vocabulary of {}",
        sources.describe(),
        written.len(Part::Train),
        written.len(Part::HeldOut),
        written.vocabulary()
    ))
}

fn train(sources: &Sources, size: usize) -> Result<Tokenizer> {
    let mut failure = None;
    let texts = sources.files.iter().flat_map(|file| pieces(file)).map_while(|piece| {
        piece
            .and_then(|(file, bytes)| Ok(text(file, &bytes)?.to_string()))
            .map_err(|error| failure.get_or_insert(error))
            .ok()
    });
    let trained = Tokenizer::train(texts, size);
    match failure {
        Some(error) => Err(error),
        None => trained,
    }
}

fn encode(file: &Path, vocabulary: &Tokenizer, writer: &mut tokens::Writer) -> Result<()> {
    let mut waiting = Vec::with_capacity(PIECES);
    for piece in pieces(file) {
        let (_, bytes) = piece?;
        if !vocabulary.takes_any_bytes() {
            text(file, &bytes)?;
        }
        waiting.push(bytes);
        if waiting.len() == PIECES {
            writer.write(&vocabulary.encode(&waiting)?)?;
            waiting.clear();
        }
    }
    writer.write(&vocabulary.encode(&waiting)?)?;
    writer.write(vocabulary.end_of_text().as_slice())
}

fn text<'a>(file: &Path, bytes: &'a [u8]) -> Result<&'a str> {
    std::str::from_utf8(bytes).ok().with_context(|| {
        format!(
            "the text {} is not UTF-8: convert it, with iconv for instance, or give --vocabulary bytes",
            file.display()
        )
    })
}

/// The contents of a file in pieces that end with a line.
fn pieces(file: &Path) -> impl Iterator<Item = Result<(&Path, Vec<u8>)>> + Send + use<'_> {
    let mut reader = None;
    let mut next = move || -> Result<Vec<u8>> {
        let reader = match &mut reader {
            Some(reader) => reader,
            None => reader.insert(BufReader::new(File::open(file)?)),
        };
        let mut piece = Vec::new();
        reader.take(PIECE).read_to_end(&mut piece)?;
        if piece.last().is_some_and(|&byte| byte != b'\n') {
            reader.take(LONGEST_LINE).read_until(b'\n', &mut piece)?;
        }
        Ok(piece)
    };
    let mut failed = false;
    std::iter::from_fn(move || {
        if failed {
            return None;
        }
        match next() {
            Ok(piece) => (!piece.is_empty()).then_some(Ok((file, piece))),
            Err(error) => {
                failed = true;
                let cannot = format!(
                    "cannot read the text {} (give existing, readable files with --text)",
                    file.display()
                );
                Some(Err(error.context(cannot)))
            }
        }
    })
}

/// The files of a text, in order.
struct Sources {
    name: String,
    files: Vec<PathBuf>,
}

impl Sources {
    fn find(paths: &[PathBuf]) -> Result<Sources> {
        if paths.is_empty() {
            return Sources::of_repository();
        }
        let mut files = Vec::new();
        for path in paths {
            ensure!(
                path.exists(),
                "--text {} does not exist: give a text file or a folder of them",
                path.display()
            );
            files.extend(texts_below(path)?);
        }
        let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        ensure!(!files.is_empty(), "--text {}: there is no text file: give one", names.join(" "));
        Ok(Sources { name: names.join(", "), files })
    }

    fn of_repository() -> Result<Sources> {
        let root = repository().context("there are no sources here: give a text with --text")?;
        let mut files = Vec::new();
        for part in [
            "README.md",
            "CHANGELOG.md",
            "docs",
            "src",
            "csrc",
            "tests",
            "benches",
            "examples",
            "xtask",
        ] {
            if root.join(part).exists() {
                files.extend(texts_below(&root.join(part))?);
            }
        }
        files.retain(|file| {
            let ending = file.extension().unwrap_or_default();
            ["md", "rs", "h", "cpp", "cu", "cuh", "py", "toml"].iter().any(|known| ending == *known)
        });
        ensure!(
            !files.is_empty(),
            "there are no sources in {}: give a text with --text",
            root.display()
        );
        Ok(Sources { name: "this repository".to_string(), files })
    }

    fn describe(&self) -> String {
        format!("{} ({} files)", self.name, self.files.len())
    }
}

/// A file, or the text files in a folder in the order of their names, without hidden ones and build
/// output.
fn texts_below(path: &Path) -> Result<Vec<PathBuf>> {
    let is_wanted = |entry: &DirEntry| {
        let name = entry.file_name().to_string_lossy();
        entry.depth() == 0 || !(name.starts_with('.') || name == "target")
    };
    let mut files = Vec::new();
    for entry in WalkDir::new(path).sort_by_file_name().into_iter().filter_entry(is_wanted) {
        let entry = entry.with_context(|| format!("cannot list --text {}", path.display()))?;
        let is_named = entry.depth() == 0;
        if entry.file_type().is_file() && (is_named || looks_like_text(entry.path())) {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// Whether the first bytes of a file have no zero, which texts do not have.
fn looks_like_text(file: &Path) -> bool {
    let mut first = Vec::new();
    let read = File::open(file).and_then(|file| file.take(4096).read_to_end(&mut first));
    read.is_ok() && !first.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: Vec<PathBuf>, vocabulary: Vocabulary) -> TextOptions {
        TextOptions {
            text,
            vocabulary,
            vocabulary_size: None,
            vocabulary_from: None,
            held_out: 0.1,
        }
    }

    #[test]
    fn files_of_a_folder_come_in_order_and_without_other_things() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &[u8]| {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        put("b.txt", b"bb");
        put("a/x.txt", b"aa");
        put("a/.hidden", b"hh");
        put("target/o", b"oo");
        put("picture", b"\0\0");
        let to = tempfile::tempdir().unwrap();
        let text = vec![folder.path().to_path_buf()];
        let said = prepare(&options(text, Vocabulary::Bytes), "--out", to.path()).unwrap();
        assert!(said.contains("(2 files): 4 tokens to train on, 0 held out"), "{said}");
        let mut found = [0; 4];
        Tokens::open(to.path()).unwrap().read(Part::Train, 0, &mut found);
        assert_eq!(found.map(|token| token as u8), *b"aabb");
    }

    #[test]
    fn pieces_are_the_whole_file_and_end_with_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = "x".repeat(1000) + "\n";
        let whole = line.repeat(3000) + "end";
        std::fs::write(file.path(), &whole).unwrap();
        let found: Vec<Vec<u8>> = pieces(file.path()).map(|piece| piece.unwrap().1).collect();
        assert_eq!(found.concat(), whole.as_bytes());
        assert_eq!(found.len(), 3);
        assert!(found[..2].iter().all(|piece| piece.ends_with(b"x\n")));
    }

    #[test]
    fn byte_pairs_end_each_document() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "one and one and one").unwrap();
        std::fs::write(folder.path().join("b"), "two and two").unwrap();
        let to = tempfile::tempdir().unwrap();
        let text = vec![folder.path().to_path_buf()];
        prepare(&options(text, Vocabulary::Bpe), "--out", to.path()).unwrap();
        let (tokens, vocabulary) =
            (Tokens::open(to.path()).unwrap(), Tokenizer::load(to.path()).unwrap());
        assert_eq!(tokens.vocabulary_hash(), vocabulary.hash());
        let (train, held_out) = (tokens.len(Part::Train), tokens.len(Part::HeldOut));
        let mut found = vec![0; train + held_out];
        tokens.read(Part::Train, 0, &mut found[..train]);
        tokens.read(Part::HeldOut, 0, &mut found[train..]);
        let end = i64::from(vocabulary.end_of_text().unwrap());
        assert_eq!(found.iter().filter(|&&token| token == end).count(), 2);
        assert_eq!(found.last(), Some(&end));
    }

    #[test]
    fn what_is_no_text_is_an_error_that_names_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0xFF, b'\n']).unwrap();
        let to = tempfile::tempdir().unwrap();
        let run = |vocabulary| {
            prepare(&options(vec![file.path().into()], vocabulary), "--out", to.path())
        };
        let error = format!("{:#}", run(Vocabulary::Bpe).unwrap_err());
        assert!(error.contains("not UTF-8") && error.contains("--vocabulary bytes"), "{error}");
        run(Vocabulary::Bytes).unwrap();
        let missing =
            prepare(&options(vec!["/no/such".into()], Vocabulary::Bytes), "--out", to.path());
        assert!(missing.unwrap_err().to_string().contains("--text /no/such does not exist"));
    }
}
