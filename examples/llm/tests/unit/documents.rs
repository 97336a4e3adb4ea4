//! What is learned of JSON lines.

use super::*;
use crate::data::{IGNORED, windows};
use crate::tokens::{self, Part, Tokens};

const LINES: &str = r#"{"prompt": "the cat", "completion": " sat", "source": "a book"}

{"text": "the bell"}
"#;

fn file(lines: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.jsonl");
    std::fs::write(&file, lines).unwrap();
    (folder, file)
}

/// The inputs and targets of all tokens but the last.
fn batch(vocabulary: &Tokenizer) -> (Vec<i64>, Vec<i64>, Option<usize>) {
    let (folder, file) = file(LINES);
    let size = (vocabulary.hash(), vocabulary.len());
    let write = |writer: &mut Writer| {
        read(&file)?.try_for_each(|document| document?.write(vocabulary, writer))
    };
    tokens::write(folder.path(), size, 0.0, true, write).unwrap().put().unwrap();
    let tokens = Tokens::open(folder.path()).unwrap();
    let count = tokens.len(Part::Train);
    let all = windows(&tokens, Part::Train, &[0], count - 1, None).unwrap();
    let of = |part| Vec::try_from(all.view([2, -1]).get(part)).unwrap();
    (of(0), of(1), tokens.id(String::new()).learned)
}

#[test]
fn a_prompt_is_read_and_its_completion_is_learned() {
    let text = b"the cat satthe bell";
    let (inputs, targets, learned) = batch(&Tokenizer::bytes());
    assert_eq!(inputs, text[..18].iter().map(|&byte| i64::from(byte)).collect::<Vec<_>>());
    let expected: Vec<i64> = text
        .iter()
        .enumerate()
        .map(|(place, &byte)| if place < 7 { IGNORED } else { i64::from(byte) })
        .collect();
    assert_eq!(targets, expected[1..]);
    assert_eq!(learned, Some(12));
}

#[test]
fn documents_of_pairs_end_with_the_end_of_text() {
    let texts = std::iter::repeat_n("the cat sat the bell ".to_string(), 20);
    let pairs = Tokenizer::train(texts, 300).unwrap();
    let (inputs, targets, learned) = batch(&pairs);
    let count = |text: &str| pairs.encode_prompt(text).unwrap().len();
    let (prompt, whole) = (count("the cat"), count("the cat sat"));
    assert!(targets[..prompt - 1].iter().all(|&target| target == IGNORED));
    let end = i64::from(pairs.end_of_text().unwrap());
    assert_eq!(targets[whole - 1], end, "the end is learned");
    assert!(targets[prompt - 1..].iter().all(|&target| target != IGNORED));
    assert_eq!(inputs.len() + 1, whole + 1 + count("the bell") + 1);
    assert_eq!(learned, Some(inputs.len() + 1 - prompt));
    // A token across the place belongs to the completion.
    let (tokens, before) = pairs.encode_from("the cat sat", 6).unwrap();
    let unlearned: String = pairs.decode(&tokens[..before]).unwrap();
    assert!(unlearned.len() <= 6, "{unlearned:?}");
}

#[test]
fn what_is_no_document_is_named() {
    for (line, expected) in [
        ("nonsense", "line 2 of"),
        (
            r#"{"text": "a", "prompt": "b"}"#,
            "give either \"text\", or \"prompt\" and \"completion\"",
        ),
        (r#"{"prompt": "b"}"#, "give either"),
        (r#"{"text": 7}"#, "line 2 of"),
    ] {
        let (_folder, file) = file(&format!("{{\"text\": \"x\"}}\n{line}\n"));
        let error = read(&file).unwrap().find_map(Result::err).unwrap();
        assert!(format!("{error:#}").contains(expected), "{line}: {error:#}");
    }
}
