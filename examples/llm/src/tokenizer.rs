//! Vocabularies: bytes, or byte pairs that are trained here.

use crate::files::{Whole, read_text};
use crate::range;
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{AddedToken, NormalizerWrapper, TokenizerBuilder};

/// The file of a vocabulary, in the format of Hugging Face's tokenizers.
pub const FILE: &str = "tokenizer.json";
/// The token between documents of a byte-pair vocabulary, as in GPT-2.
const END_OF_TEXT: &str = "<|endoftext|>";
/// The same, and what Llama 3, and Llama 2 and Mistral, have in its place.
const ENDS_OF_TEXT: [&str; 3] = [END_OF_TEXT, "<|end_of_text|>", "</s>"];
/// The smallest byte-pair vocabulary: all bytes, and the end of a text.
const SMALLEST: usize = 257;

/// What turns text into tokens and back.
#[derive(Clone)]
pub struct Tokenizer {
    /// The contents of the file.
    json: String,
    /// `None` if a token is a byte.
    pairs: Option<Box<tokenizers::Tokenizer>>,
}

impl Tokenizer {
    /// The vocabulary of all bytes, for any data.
    pub fn bytes() -> Tokenizer {
        Tokenizer { json: bytes_value().to_string(), pairs: None }
    }

    /// Trains byte pairs on texts, until there are `size` tokens or no pair occurs twice.
    pub fn train(texts: impl Iterator<Item = String> + Send, size: usize) -> Result<Tokenizer> {
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(size)
            .min_frequency(2)
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let level = ByteLevel::new(false, true, true);
        let json = TokenizerBuilder::default()
            .with_model(BPE::default())
            .with_normalizer(None::<NormalizerWrapper>)
            .with_pre_tokenizer(Some(level))
            .with_post_processor(Some(level))
            .with_decoder(Some(level))
            .build()
            .and_then(|mut tokenizer| tokenizer.train(&mut trainer, texts)?.to_string(false))
            .map_err(|error| anyhow!("cannot train the vocabulary: {error}"))?;
        Tokenizer::parse(json)
    }

    /// Reads `tokenizer.json` of a folder.
    pub fn load(folder: &Path) -> Result<Tokenizer> {
        let file = folder.join(FILE);
        let json = read_text(&file, "give a folder with a vocabulary")?;
        Tokenizer::parse(json)
            .with_context(|| format!("{} is no vocabulary of this program", file.display()))
    }

    pub fn parse(json: String) -> Result<Tokenizer> {
        // As values, because the order of a JSON object says nothing.
        if serde_json::from_str::<Value>(&json).is_ok_and(|value| value == bytes_value()) {
            return Ok(Tokenizer::bytes());
        }
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&json)
            .map_err(|error| anyhow!("expected a tokenizer.json: {error}"))?;
        // Some files have what their last call was for. Texts are longer, and have no padding.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| anyhow!("{error}"))?;
        Ok(Tokenizer { json, pairs: Some(Box::new(tokenizer)) })
    }

    /// Writes `tokenizer.json` to a folder.
    pub fn save(&self, folder: &Path) -> Result<()> {
        self.write(folder)?.put()
    }

    /// Writes `tokenizer.json` of a folder under a temporary name.
    pub fn write(&self, folder: &Path) -> Result<Whole> {
        Whole::write(&folder.join(FILE), |path| Ok(std::fs::write(path, &self.json)?))
    }

    /// What tells vocabularies apart.
    pub fn hash(&self) -> [u8; 32] {
        let content = if self.pairs.is_some() { self.json.as_str() } else { "bytes" };
        Sha256::digest(content).into()
    }

    /// [`Tokenizer::hash`] in hexadecimal digits.
    pub fn hash_in_hex(&self) -> String {
        self.hash().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The number of tokens, those that are left out before the last one included.
    pub fn len(&self) -> usize {
        let Some(pairs) = &self.pairs else { return 256 };
        pairs.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1)
    }

    /// The text of a single token, such as the end of a document.
    pub fn name(&self, token: u32) -> Option<String> {
        self.pairs.as_ref()?.id_to_token(token)
    }

    /// The token after each document, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        let pairs = self.pairs.as_ref()?;
        ENDS_OF_TEXT.iter().find_map(|name| pairs.token_to_id(name))
    }

    /// The tokens before each document: those that the vocabulary's post-processor sets there.
    pub fn begin_of_text(&self) -> Result<Vec<u32>> {
        let mut tokens = self.encode_prompt("")?;
        tokens.retain(|token| Some(*token) != self.end_of_text());
        Ok(tokens)
    }

    /// A text for a model to continue, with the tokens that the post-processor adds.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_from(text, 0)?.0)
    }

    /// Whether any bytes can be encoded, and not only UTF-8.
    pub fn takes_any_bytes(&self) -> bool {
        self.pairs.is_none()
    }

    /// Encodes pieces of text, in parallel if there are several. Byte pairs need UTF-8.
    pub fn encode(&self, pieces: &[Vec<u8>]) -> Result<Vec<u32>> {
        let Some(pairs) = &self.pairs else {
            return Ok(pieces.iter().flatten().map(|&byte| u32::from(byte)).collect());
        };
        let texts: Vec<&str> =
            pieces.iter().map(|piece| std::str::from_utf8(piece)).collect::<Result<_, _>>()?;
        let encoded = pairs.encode_batch_fast(texts, false).map_err(cannot_encode)?;
        Ok(encoded.iter().flat_map(|encoding| encoding.get_ids()).copied().collect())
    }

    /// A document's tokens, with those that the post-processor adds, and how many of them stand before
    /// the first with a byte from `start` on. A token across that place counts as one after it.
    pub fn encode_from(&self, text: &str, start: usize) -> Result<(Vec<u32>, usize)> {
        let Some(pairs) = &self.pairs else {
            return Ok((text.bytes().map(u32::from).collect(), start));
        };
        let encoding = pairs.encode(text, true).map_err(cannot_encode)?;
        let first = match start {
            0 => Some(0),
            _ => encoding.get_offsets().iter().position(|(_, end)| *end > start),
        };
        Ok((encoding.get_ids().to_vec(), first.unwrap_or(encoding.len())))
    }

    /// The text of tokens. Bytes that are no UTF-8 are shown as the replacement character.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let Some(pairs) = &self.pairs else {
            let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        };
        pairs.decode(tokens, true).map_err(|error| anyhow!("cannot decode the tokens: {error}"))
    }
}

fn cannot_encode(error: tokenizers::Error) -> anyhow::Error {
    anyhow!("cannot encode the text: {error}")
}

/// The vocabulary of bytes in the format of Hugging Face's tokenizers: byte pairs without a pair. A
/// byte's token is its value.
fn bytes_value() -> Value {
    let names: Map<String, Value> = byte_names()
        .iter()
        .enumerate()
        .map(|(byte, name)| (name.to_string(), json!(byte)))
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": names, "merges": []
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": level, "post_processor": level, "decoder": level, "model": model
    })
}

/// GPT-2's names of the bytes: printable ones stand for themselves, and the others for the
/// characters from U+0100 on.
fn byte_names() -> [char; 256] {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = (0x100..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        byte if is_printable(byte) => byte as char,
        _ => others.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}

/// The kind of vocabulary that is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Vocabulary {
    /// The 256 bytes
    Bytes,
    /// Byte pairs, as in GPT-2, trained on the text
    Bpe,
}

/// Checks that a size given for a vocabulary is one that it can have.
pub fn check_size(kind: Vocabulary, size: Option<usize>) -> Result<()> {
    let Some(size) = size else { return Ok(()) };
    ensure!(
        kind == Vocabulary::Bpe,
        "--vocabulary-size {size} is for --vocabulary bpe: leave it out, because there are 256 bytes"
    );
    range::check("--vocabulary-size", size, [SMALLEST, 1 << 20])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "the cat and the other cat, naïve — and the \u{7}bell\n";

    #[test]
    fn bytes_are_their_own_tokens_in_the_library_s_eyes_too() {
        let ours = Tokenizer::bytes();
        let theirs = tokenizers::Tokenizer::from_bytes(&ours.json).unwrap();
        let tokens = ours.encode(&[TEXT.into()]).unwrap();
        assert_eq!(tokens, TEXT.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(theirs.encode_fast(TEXT, false).unwrap().get_ids(), tokens);
        assert_eq!(theirs.decode(&tokens, true).unwrap(), TEXT);
        assert_eq!(ours.decode(&tokens).unwrap(), TEXT);
        assert_eq!((ours.len(), theirs.get_vocab_size(true)), (256, 256));
    }

    #[test]
    fn trained_pairs_shorten_the_text_and_give_it_back() {
        let texts = || std::iter::repeat_n(TEXT.to_string(), 20);
        let pairs = Tokenizer::train(texts(), 300).unwrap();
        let tokens = pairs.encode(&[TEXT.into()]).unwrap();
        assert!(tokens.len() < TEXT.len() * 3 / 4, "{} of {}", tokens.len(), TEXT.len());
        assert_eq!(pairs.decode(&tokens).unwrap(), TEXT);
        assert!(pairs.len() > 257 && pairs.len() <= 300);
        assert_eq!(pairs.end_of_text(), Some(0));

        let folder = tempfile::tempdir().unwrap();
        pairs.save(folder.path()).unwrap();
        let again = Tokenizer::load(folder.path()).unwrap();
        assert_eq!(again.hash(), pairs.hash());
        assert_eq!(again.encode(&[TEXT.into()]).unwrap(), tokens);
        // Training gives the same vocabulary again.
        assert_eq!(Tokenizer::train(texts(), 300).unwrap().hash(), pairs.hash());
    }

    #[test]
    fn texts_are_not_cut_and_the_last_token_counts() {
        let pairs = Tokenizer::train(std::iter::repeat_n(TEXT.to_string(), 20), 300).unwrap();
        let mut json: Value = serde_json::from_str(&pairs.json).unwrap();
        json["truncation"] =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({
            "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<|endoftext|>"
        });
        json["model"]["vocab"]["unused"] = json!(999);
        let other = Tokenizer::parse(json.to_string()).unwrap();
        assert_eq!(other.encode(&[TEXT.into()]).unwrap(), pairs.encode(&[TEXT.into()]).unwrap());
        assert_eq!(other.encode_prompt(TEXT).unwrap(), pairs.encode_prompt(TEXT).unwrap());
        assert_eq!(other.len(), 1000);
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_by_pairs_only() {
        let odd = [vec![0xFF, 0xFE]];
        assert_eq!(Tokenizer::bytes().encode(&odd).unwrap(), [0xFF, 0xFE]);
        let pairs = Tokenizer::train(std::iter::once(TEXT.to_string()), 260).unwrap();
        assert!(pairs.encode(&odd).is_err());
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(check_size(Vocabulary::Bytes, Some(300)).is_err());
        assert!(check_size(Vocabulary::Bpe, Some(256)).is_err());
        assert!(check_size(Vocabulary::Bpe, Some(257)).is_ok());
        assert!(check_size(Vocabulary::Bytes, None).is_ok());
    }
}
