//! From text files to a token file and its vocabulary.

use crate::documents;
use crate::files::{self, Taken, Whole, repository, take_folder};
use crate::options::name_of;
use crate::settings::{Difference, NOT_GIVEN};
use crate::tokenizer::{self, Tokenizer, Vocabulary};
use crate::tokens::{self, Part, Tokens};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
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
    /// Text files, or folders of them; a line of a .jsonl file is a "text", or a "prompt" and the
    /// "completion" to learn [default: this repository's own prose and sources]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,
    /// The vocabulary [default: bytes]
    #[arg(long, value_enum)]
    pub vocabulary: Option<Vocabulary>,
    /// The number of byte pairs, with `--vocabulary bpe` [default: 8192]
    #[arg(long, value_name = "N")]
    pub vocabulary_size: Option<usize>,
    /// The vocabulary of a folder, such as that of a run, instead of a new one
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["vocabulary", "vocabulary_size"])]
    pub vocabulary_from: Option<PathBuf>,
    /// The fraction of the text, at its end, that is held out for validation [default: 0.1]
    #[arg(long, value_name = "FRACTION")]
    pub held_out: Option<f64>,
}

impl TextOptions {
    fn vocabulary(&self) -> Vocabulary {
        self.vocabulary.unwrap_or(Vocabulary::Bytes)
    }

    fn held_out(&self) -> f64 {
        self.held_out.unwrap_or(0.1)
    }

    /// The options by name, with the defaults of those that were not given.
    pub fn by_name(&self) -> BTreeMap<String, String> {
        let mut all = self.clone();
        all.held_out = Some(self.held_out());
        if self.vocabulary_from.is_none() {
            all.vocabulary = Some(self.vocabulary());
        }
        if all.vocabulary == Some(Vocabulary::Bpe) {
            all.vocabulary_size.get_or_insert(DEFAULT_SIZE);
        }
        all.given()
    }

    /// Those that were given.
    fn given(&self) -> BTreeMap<String, String> {
        let absolute = |path: &PathBuf| files::absolute(path).display().to_string();
        let text: Vec<String> = self.text.iter().map(absolute).collect();
        let all = [
            ("--text", (!text.is_empty()).then(|| text.join(" "))),
            ("--vocabulary", self.vocabulary.as_ref().map(name_of)),
            ("--vocabulary-size", self.vocabulary_size.map(|size| size.to_string())),
            ("--vocabulary-from", self.vocabulary_from.as_ref().map(absolute)),
            ("--held-out", self.held_out.map(|part| format!("{part:?}"))),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect()
    }

    /// The first option that was given and that differs from those of an earlier run.
    pub fn difference(&self, earlier: &BTreeMap<String, String>) -> Option<Difference> {
        self.given().into_iter().find_map(|(option, now)| {
            let before = earlier.get(&option).cloned().unwrap_or(NOT_GIVEN.to_string());
            (before != now).then_some(Difference { option, before, now })
        })
    }
}

/// A text's tokens and vocabulary, complete but under temporary names.
pub struct Prepared {
    pub tokenizer: Tokenizer,
    vocabulary: Whole,
    tokens: Whole,
    said: String,
    // Released last, when the temporary files are gone.
    _folder: Taken,
}

impl Prepared {
    pub fn tokens(&self) -> Result<Tokens> {
        Tokens::open_file(self.tokens.path())
    }

    /// Replaces what was in the folder, and returns what was done in words.
    pub fn put(self) -> Result<String> {
        // Should the program be killed in between, the hash in the token file tells.
        self.vocabulary.put()?;
        self.tokens.put()?;
        Ok(self.said)
    }
}

/// Writes `tokens.bin` and `tokenizer.json` into a folder, and returns what it did in words.
pub fn prepare(options: &TextOptions, option: &str, folder: &Path) -> Result<String> {
    beside(options, option, folder)?.put()
}

/// Writes both files under temporary names into a folder, whose own files stay until
/// [`Prepared::put`].
pub fn beside(options: &TextOptions, option: &str, folder: &Path) -> Result<Prepared> {
    tokenizer::check_size(options.vocabulary(), options.vocabulary_size)?;
    let held_out = options.held_out();
    ensure!(
        held_out > 0.0 && held_out < 1.0,
        "--held-out {held_out:?} is out of range: give a number between 0 and 1, such as 0.1"
    );
    let (name, files) = sources(&options.text)?;
    let _folder = take_folder(option, folder)?;
    let tokenizer = match (&options.vocabulary_from, options.vocabulary()) {
        (Some(folder), _) => Tokenizer::load(folder)?,
        (None, Vocabulary::Bytes) => Tokenizer::bytes(),
        (None, Vocabulary::Bpe) => train(&files, options.vocabulary_size.unwrap_or(DEFAULT_SIZE))?,
    };
    let size = (tokenizer.hash(), tokenizer.len());
    let unlearned = files.iter().any(|file| documents::are_in(file));
    let tokens = tokens::write(folder, size, held_out, unlearned, |writer| {
        files.iter().try_for_each(|file| encode(file, &tokenizer, writer))
    })?;
    let written = Tokens::open_file(tokens.path())?;
    let said = format!(
        "{name} ({} files): {} tokens to train on, {} held out, vocabulary of {}",
        files.len(),
        written.len(Part::Train),
        written.len(Part::HeldOut),
        written.vocabulary()
    );
    Ok(Prepared { vocabulary: tokenizer.write(folder)?, tokenizer, tokens, said, _folder })
}

/// The texts of a file: its pieces, or its documents.
fn texts(file: &Path) -> Box<dyn Iterator<Item = Result<String>> + Send + '_> {
    if !documents::are_in(file) {
        return Box::new(pieces(file).map(move |piece| Ok(text(file, &piece?)?.to_string())));
    }
    match documents::read(file) {
        Ok(documents) => Box::new(documents.map(|document| Ok(document?.text()))),
        Err(error) => Box::new(std::iter::once(Err(error))),
    }
}

fn train(files: &[PathBuf], size: usize) -> Result<Tokenizer> {
    let mut failure = None;
    let texts = files
        .iter()
        .flat_map(|file| texts(file))
        .map_while(|text| text.map_err(|error| failure.get_or_insert(error)).ok());
    let trained = Tokenizer::train(texts, size);
    match failure {
        Some(error) => Err(error),
        None => trained,
    }
}

fn encode(file: &Path, vocabulary: &Tokenizer, writer: &mut tokens::Writer) -> Result<()> {
    if documents::are_in(file) {
        return documents::read(file)?.try_for_each(|document| document?.write(vocabulary, writer));
    }
    writer.write(&vocabulary.begin_of_text()?)?;
    let mut pieces = pieces(file).peekable();
    while pieces.peek().is_some() {
        let some = pieces.by_ref().take(PIECES).collect::<Result<Vec<_>>>()?;
        if !vocabulary.takes_any_bytes() {
            some.iter().try_for_each(|piece| text(file, piece).map(drop))?;
        }
        writer.write(&vocabulary.encode(&some)?)?;
    }
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

/// The contents of a file in pieces that end with a line, up to the first error.
fn pieces(file: &Path) -> impl Iterator<Item = Result<Vec<u8>>> + Send + use<'_> {
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
        // A piece of a longer line ends with a character: the next three bytes may belong to it.
        for _ in 0..3 {
            match reader.fill_buf()?.first() {
                Some(&byte) if byte & 0xC0 == 0x80 && !piece.ends_with(b"\n") => piece.push(byte),
                _ => break,
            }
            reader.consume(1);
        }
        Ok(piece)
    };
    std::iter::from_fn(move || {
        let piece = next().with_context(|| cannot_read(file));
        piece.map(|piece| (!piece.is_empty()).then_some(piece)).transpose()
    })
}

/// What a text is called, and its files in order.
fn sources(paths: &[PathBuf]) -> Result<(String, Vec<PathBuf>)> {
    if paths.is_empty() {
        return Ok(("this repository".to_string(), of_repository()?));
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
    Ok((names.join(", "), files))
}

fn of_repository() -> Result<Vec<PathBuf>> {
    let root = repository().context("there are no sources here: give a text with --text")?;
    let folders = ["docs", "src", "csrc", "tests", "benches", "examples", "xtask"];
    let parts = ["README.md", "CHANGELOG.md"].iter().chain(&folders);
    let mut files = Vec::new();
    for part in parts.map(|part| root.join(part)).filter(|part| part.exists()) {
        files.extend(texts_below(&part)?);
    }
    files.retain(|file| {
        let ending = file.extension().unwrap_or_default();
        ["md", "rs", "h", "cpp", "cu", "cuh", "py", "toml"].iter().any(|known| ending == *known)
    });
    let root = root.display();
    ensure!(!files.is_empty(), "there are no sources in {root}: give a text with --text");
    Ok(files)
}

/// A file, or the text files in a folder in the order of their names, without hidden ones and build
/// output.
fn texts_below(path: &Path) -> Result<Vec<PathBuf>> {
    let is_wanted = |entry: &DirEntry| {
        let name = entry.file_name().to_string_lossy();
        entry.depth() == 0 || !(name.starts_with('.') || name == "target")
    };
    let mut files = Vec::new();
    let walk = WalkDir::new(path).follow_links(true).sort_by_file_name();
    for entry in walk.into_iter().filter_entry(is_wanted) {
        let entry = match entry {
            Err(error) if error.depth() > 0 && is_hidden(error.path()) => continue,
            entry => entry.with_context(|| format!("cannot list --text {}", path.display()))?,
        };
        let is_named = entry.depth() == 0;
        if entry.file_type().is_file() && (is_named || looks_like_text(entry.path())?) {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// Whether the first bytes of a file have no zero, which texts do not have.
fn looks_like_text(file: &Path) -> Result<bool> {
    let mut first = Vec::new();
    let read = File::open(file).and_then(|file| file.take(4096).read_to_end(&mut first));
    read.with_context(|| cannot_read(file))?;
    Ok(!first.contains(&0))
}

fn is_hidden(path: Option<&Path>) -> bool {
    let name = path.and_then(Path::file_name).unwrap_or_default();
    name.to_string_lossy().starts_with('.')
}

pub fn cannot_read(file: &Path) -> String {
    format!("cannot read the text {} (give existing, readable files with --text)", file.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: Vec<PathBuf>, vocabulary: Vocabulary) -> TextOptions {
        TextOptions {
            text,
            vocabulary: Some(vocabulary),
            vocabulary_size: None,
            vocabulary_from: None,
            held_out: None,
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
        let elsewhere = tempfile::tempdir().unwrap();
        std::fs::write(elsewhere.path().join("y"), b"cc").unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), folder.path().join("c")).unwrap();
        std::os::unix::fs::symlink("/no/such", folder.path().join(".#b.txt")).unwrap();
        let to = tempfile::tempdir().unwrap();
        let text = vec![folder.path().to_path_buf()];
        let said = prepare(&options(text, Vocabulary::Bytes), "--out", to.path()).unwrap();
        assert!(said.contains("(3 files): 6 tokens to train on, 0 held out"), "{said}");
        let mut found = [0; 6];
        Tokens::open(to.path()).unwrap().read(Part::Train, 0, &mut found);
        assert_eq!(found.map(|token| token as u8), *b"aabbcc");

        std::os::unix::fs::symlink("/no/such", folder.path().join("d")).unwrap();
        let text = vec![folder.path().to_path_buf()];
        let failed = prepare(&options(text, Vocabulary::Bytes), "--out", to.path());
        assert!(format!("{:#}", failed.unwrap_err()).contains("cannot list --text"));
    }

    #[test]
    fn an_empty_text_leaves_the_folder_as_it_was() {
        let from = tempfile::tempdir().unwrap();
        let (some, none) = (from.path().join("some"), from.path().join("none"));
        std::fs::write(&some, "one and one and one").unwrap();
        std::fs::write(&none, "").unwrap();
        let to = tempfile::tempdir().unwrap();
        prepare(&options(vec![some], Vocabulary::Bpe), "--out", to.path()).unwrap();
        let files =
            || [tokens::FILE, tokenizer::FILE].map(|name| std::fs::read(to.path().join(name)));
        let before = files().map(Result::unwrap);
        let failed = prepare(&options(vec![none], Vocabulary::Bytes), "--out", to.path());
        let error = format!("{:#}", failed.unwrap_err());
        assert!(error.starts_with("the text is empty"), "{error}");
        assert!(files().map(Result::unwrap) == before);
        assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 2);
    }

    #[test]
    fn pieces_are_the_whole_file_and_end_with_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = "x".repeat(1000) + "\n";
        let whole = line.repeat(3000) + "end";
        std::fs::write(file.path(), &whole).unwrap();
        let found: Vec<Vec<u8>> = pieces(file.path()).map(|piece| piece.unwrap()).collect();
        assert_eq!(found.concat(), whole.as_bytes());
        assert_eq!(found.len(), 3);
        assert!(found[..2].iter().all(|piece| piece.ends_with(b"x\n")));
    }

    #[test]
    fn pieces_of_a_very_long_line_end_with_a_character() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let whole = "x".to_string() + &"\u{e9}".repeat((PIECE + LONGEST_LINE) as usize / 2 + 9);
        std::fs::write(file.path(), &whole).unwrap();
        let found: Vec<Vec<u8>> = pieces(file.path()).map(|piece| piece.unwrap()).collect();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|piece| std::str::from_utf8(piece).is_ok()));
        assert!(found.concat() == whole.as_bytes());
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
