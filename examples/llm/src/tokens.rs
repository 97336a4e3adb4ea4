//! The token file: a header, the tokens to train on, and those held out.

use crate::files::Whole;
use crate::settings::DataId;
use anyhow::{Context, Result, bail, ensure};
use memmap2::Mmap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

/// The file's name in the folder of prepared data.
pub const FILE: &str = "tokens.bin";

const MAGIC: &[u8; 8] = b"GPTTOKEN";
const VERSION: u32 = 1;
/// That of files with tokens that are read and not learned.
const WITH_UNLEARNED: u32 = 2;
/// What marks such a token, of 4 bytes.
const UNLEARNED: u32 = 1 << 31;
const HEADER: usize = 96;
/// Where the checksum of the header's other bytes is.
const CHECKSUM: usize = HEADER - 4;

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Header {
    /// The bytes of a token: 2 or 4.
    width: usize,
    train: usize,
    held_out: usize,
    /// The hash of the vocabulary.
    vocabulary: [u8; 32],
    /// The number of tokens in the vocabulary.
    size: u32,
    /// The checksum of all tokens.
    checksum: u32,
    /// How many tokens to train on are learned, if not all.
    learned: Option<usize>,
}

impl Header {
    fn to_bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, MAGIC);
        let version = if self.learned.is_some() { WITH_UNLEARNED } else { VERSION };
        put(8, &version.to_le_bytes());
        put(12, &(self.width as u32).to_le_bytes());
        put(16, &(self.train as u64).to_le_bytes());
        put(24, &(self.held_out as u64).to_le_bytes());
        put(32, &self.vocabulary);
        put(64, &self.size.to_le_bytes());
        put(68, &self.checksum.to_le_bytes());
        put(72, &(self.learned.unwrap_or_default() as u64).to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..CHECKSUM]);
        bytes[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Header> {
        let field = |at: usize| bytes.get(at..at + 4).and_then(|part| part.try_into().ok());
        let short = |at: usize| field(at).map(u32::from_le_bytes).unwrap_or_default();
        let long = |at: usize| u64::from(short(at)) | u64::from(short(at + 4)) << 32;
        ensure!(bytes.get(..8) == Some(MAGIC), "it is no token file");
        let version = short(8);
        let is_known = [VERSION, WITH_UNLEARNED].contains(&version);
        ensure!(is_known, "it has version {version}, which this program does not know");
        let header = bytes.get(..HEADER).context("it is cut off")?;
        ensure!(crc32fast::hash(&header[..CHECKSUM]) == short(CHECKSUM), "its header is damaged");
        let width = short(12) as usize;
        ensure!(width == 2 || width == 4, "its tokens have {width} bytes");
        Ok(Header {
            width,
            train: usize::try_from(long(16))?,
            held_out: usize::try_from(long(24))?,
            vocabulary: header[32..64].try_into()?,
            size: short(64),
            checksum: short(68),
            learned: (version == WITH_UNLEARNED).then(|| long(72) as usize),
        })
    }

    fn length(&self) -> Option<usize> {
        let tokens = self.train.checked_add(self.held_out)?;
        tokens.checked_mul(self.width)?.checked_add(HEADER)
    }
}

/// A token file in memory, page by page as it is read.
pub struct Tokens {
    map: Mmap,
    header: Header,
}

/// One of the parts of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Train,
    HeldOut,
}

impl Tokens {
    /// Opens the token file of a folder that `prepare` wrote.
    pub fn open(folder: &Path) -> Result<Tokens> {
        Tokens::open_file(&folder.join(FILE))
    }

    /// [`Tokens::open`] of the file itself.
    pub fn open_file(path: &Path) -> Result<Tokens> {
        let name = path.display();
        let file = File::open(path).with_context(|| {
            format!("cannot open {name} (give a folder that `prepare` wrote with --data)")
        })?;
        // SAFETY: the map is only read, as bytes. Nobody may shorten or change the file meanwhile:
        // this program replaces token files by renaming, which leaves mapped ones as they are.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {name}"))?;
        let way_out = || format!("{name} cannot be used; write it again with `prepare`");
        let header = Header::from_bytes(&map).with_context(way_out)?;
        ensure!(
            header.length() == Some(map.len()),
            "{name} has {} bytes instead of {}; write it again with `prepare`",
            map.len(),
            header.length().unwrap_or(usize::MAX)
        );
        Ok(Tokens { map, header })
    }

    pub fn len(&self, part: Part) -> usize {
        match part {
            Part::Train => self.header.train,
            Part::HeldOut => self.header.held_out,
        }
    }

    /// The number of tokens in the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.header.size as usize
    }

    pub fn vocabulary_hash(&self) -> [u8; 32] {
        self.header.vocabulary
    }

    /// What tells these data apart, with their vocabulary's hash.
    pub fn id(&self, vocabulary: String) -> DataId {
        let Header { train, checksum, learned, .. } = self.header;
        DataId { vocabulary, tokens: train, checksum, learned }
    }

    /// Copies the tokens from `start` of a part on. Zeros follow the part's end. One that is not learned
    /// has all bits inverted, so that it is negative.
    pub fn read(&self, part: Part, start: usize, into: &mut [i64]) {
        let width = self.header.width;
        let (from, to) = match part {
            Part::Train => (start, self.header.train),
            Part::HeldOut => (self.header.train + start, self.header.train + self.header.held_out),
        };
        let to = to.min(from.saturating_add(into.len()));
        let bytes = self.map.get(HEADER + from * width..HEADER + to * width).unwrap_or_default();
        into.fill(0);
        for (token, bytes) in into.iter_mut().zip(bytes.chunks_exact(width)) {
            *token = match *bytes {
                [a, b] => i64::from(u16::from_le_bytes([a, b])),
                [a, b, c, d] => match u32::from_le_bytes([a, b, c, d]) {
                    token if token & UNLEARNED != 0 => !i64::from(token ^ UNLEARNED),
                    token => i64::from(token),
                },
                _ => 0,
            };
        }
    }
}

/// Writes a token file, piece by piece.
pub struct Writer {
    file: BufWriter<File>,
    width: usize,
    count: usize,
    checksum: crc32fast::Hasher,
}

impl Writer {
    /// Adds tokens that are read and not learned, to a file that may have them.
    pub fn write_unlearned(&mut self, tokens: &[u32]) -> Result<()> {
        self.write(&tokens.iter().map(|token| token | UNLEARNED).collect::<Vec<_>>())
    }

    /// Adds tokens at the end.
    pub fn write(&mut self, tokens: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = match self.width {
            2 => tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect(),
            _ => tokens.iter().flat_map(|&token| token.to_le_bytes()).collect(),
        };
        self.checksum.update(&bytes);
        self.count += tokens.len();
        Ok(self.file.write_all(&bytes)?)
    }
}

/// Writes the token file of a folder under a temporary name. `fill` writes all tokens, of which the
/// last `held_out` are not trained on, as a fraction. Some may be `unlearned`.
pub fn write(
    folder: &Path,
    vocabulary: ([u8; 32], usize),
    held_out: f64,
    unlearned: bool,
    fill: impl FnOnce(&mut Writer) -> Result<()>,
) -> Result<Whole> {
    let (hash, size) = vocabulary;
    Whole::write(&folder.join(FILE), |path| {
        let mut file = BufWriter::new(File::options().write(true).open(path)?);
        file.write_all(&[0; HEADER])?;
        let width = if size <= 1 << 16 && !unlearned { 2 } else { 4 };
        let mut writer = Writer { file, width, count: 0, checksum: Default::default() };
        fill(&mut writer)?;
        let Writer { mut file, width, count, checksum } = writer;
        if count == 0 {
            bail!("the text is empty: give a longer one with --text");
        }
        let held_out = ((count as f64 * held_out) as usize).min(count);
        file.flush()?;
        let train = count - held_out;
        let learned = unlearned.then(|| learned(path, train)).transpose()?;
        if learned == Some(0) {
            bail!("no text is learned: give lines with \"text\", or with a \"completion\"");
        }
        let header = Header {
            width,
            train,
            learned,
            held_out,
            vocabulary: hash,
            size: u32::try_from(size)?,
            checksum: checksum.finalize(),
        };
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header.to_bytes())?;
        Ok(file.flush()?)
    })
}

/// How many of the first tokens of a file, of 4 bytes each, are learned.
fn learned(path: &Path, tokens: usize) -> Result<usize> {
    // SAFETY: the file is this process' own, which only reads it meanwhile.
    let map = unsafe { Mmap::map(&File::open(path)?) }?;
    let marked = |token: &&[u8]| token[3] & 0x80 != 0;
    Ok(tokens - map[HEADER..].chunks_exact(4).take(tokens).filter(marked).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(size: usize, tokens: &[u32]) -> (tempfile::TempDir, Result<Tokens>) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), ([7; 32], size), 0.25, false, |writer| {
            tokens.chunks(3).try_for_each(|piece| writer.write(piece))
        })
        .and_then(Whole::put)
        .unwrap();
        let tokens = Tokens::open(folder.path());
        (folder, tokens)
    }

    #[test]
    fn tokens_come_back_in_both_widths() {
        for (size, big) in [(300, 299), (1 << 17, 100_000)] {
            let (_folder, tokens) = written(size, &[1, 2, 3, 4, 5, big, 7, 8]);
            let tokens = tokens.unwrap();
            assert_eq!((tokens.len(Part::Train), tokens.len(Part::HeldOut)), (6, 2));
            assert_eq!((tokens.vocabulary(), tokens.vocabulary_hash()), (size, [7; 32]));
            let mut found = [9; 4];
            tokens.read(Part::Train, 4, &mut found);
            assert_eq!(found, [5, i64::from(big), 0, 0], "no token of the other part");
            tokens.read(Part::HeldOut, 0, &mut found);
            assert_eq!(found, [7, 8, 0, 0]);
        }
    }

    #[test]
    fn every_damage_to_the_header_or_the_length_is_noticed() {
        let (folder, tokens) = written(300, &[1, 2, 3, 4]);
        drop(tokens);
        let path = folder.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(Tokens::open(folder.path()).is_err(), "cut at {length}");
        }
        for byte in 0..HEADER {
            let mut damaged = whole.clone();
            damaged[byte] ^= 0x10;
            std::fs::write(&path, &damaged).unwrap();
            assert!(Tokens::open(folder.path()).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn an_empty_text_writes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write(folder.path(), ([0; 32], 256), 0.1, false, |_| Ok(())).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
