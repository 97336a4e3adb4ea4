//! The contents of files, and what a file's text asks of the preprocessor.

use sha2::{Digest, Sha256};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Identifies these parts: the first 128 bits of their SHA-256, each preceded by its length.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part.len().to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a file changed after `start`, judged by its change time (ctime), which nobody can set. A
/// modification time may be in the future.
pub fn is_changed_since(path: &Path, start: SystemTime) -> bool {
    let since = start.duration_since(UNIX_EPOCH).unwrap_or_default();
    let start = (since.as_secs() as i64, i64::from(since.subsec_nanos()));
    path.metadata().map_or(true, |file| (file.ctime(), file.ctime_nsec()) >= start)
}

/// The path of a program that is run by name.
pub fn resolve(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// What the outcome of preprocessing a file depends on, besides its text. It is more than the
/// preprocessor asks, because comments and parts that are left out count, too.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Asks {
    /// The names in `#include "…"`, which are looked for next to the file first.
    pub quoted: Vec<String>,
    /// The names that `__has_include` is asked for, and whether they are in quotes.
    pub has: Vec<(String, bool)>,
    /// Whether a directive begins with a name that only macros tell.
    pub computed: bool,
    /// Whether the file contains what no list of headers shows: a file for the assembler, or the
    /// time of the compilation.
    pub hidden: bool,
    /// Whether it depends on the macro that says that CUDA is compiled.
    pub cuda: bool,
}

/// Words whose meaning is in no file that a compiler lists.
const HIDDEN: [&str; 6] =
    [".incbin", ".include ", "__TIME__", "__DATE__", "__TIMESTAMP__", "__has_embed"];

/// Whether a text has the macro that says that CUDA is compiled, or pastes it together.
pub(crate) fn mentions_cuda(text: &str) -> bool {
    text.contains("TCH_EXTENSION_CUDA") || text.contains("TCH_EXTENSION_##")
}

impl Asks {
    /// Reads the text of a file. Of the system's headers, which are many and large, only the
    /// directives are read.
    pub fn of(text: &str, is_system: bool) -> Self {
        let spliced;
        let text = if text.contains("\\\n") || text.contains("\\\r\n") {
            spliced = text.replace("\\\r\n", "").replace("\\\n", "");
            &spliced
        } else {
            text
        };
        let mut asks = Asks::default();
        let mut read = |start: usize, mark: &str| {
            asks.directive(&text[..start], &text[start + mark.len()..], is_system);
        };
        text.match_indices('#').for_each(|(start, mark)| read(start, mark));
        if !is_system {
            // The other spelling of `#`.
            text.match_indices("%:").for_each(|(start, mark)| read(start, mark));
            asks.cuda = mentions_cuda(text);
            asks.hidden |= HIDDEN.iter().any(|word| text.contains(word));
        }
        asks
    }

    /// Reads what follows a `#`. It may also be in a comment or a string.
    fn directive(&mut self, before: &str, rest: &str, is_system: bool) {
        let rest = without_comments(rest);
        let word = word_of(rest);
        let operand = without_comments(&rest[word.len()..]);
        let line = operand.split('\n').next().unwrap_or_default();
        match word {
            "include" | "include_next" | "import" | "embed" => match line.chars().next() {
                Some('"') => self.quoted.extend(name_of(line).map(|(name, _)| name)),
                Some('<') => {}
                _ => self.computed |= is_first(before),
            },
            "if" | "elif" | "define" => self.condition(line, is_system),
            _ => {}
        }
    }

    /// Reads a directive that may ask for files.
    fn condition(&mut self, line: &str, is_system: bool) {
        for (start, word) in line.match_indices("__has_include") {
            let rest = &line[start + word.len()..];
            let rest = without_comments(rest.strip_prefix("_next").unwrap_or(rest));
            let operand = rest.strip_prefix('(').map(without_comments);
            let before = line[..start].trim_end().trim_end_matches('(').trim_end();
            match operand.and_then(name_of) {
                Some(name) => self.has.push(name),
                // Whether the compiler has it at all.
                None if operand.is_none() && before.ends_with("defined") => {}
                None => self.computed = true,
            }
        }
        if is_system {
            self.hidden |= HIDDEN.iter().any(|word| line.contains(word));
            // Some libraries have a macro of their own in place of `__has_include`.
            let operands = line.match_indices('(').map(|(start, _)| &line[start + 1..]);
            let names = operands.filter_map(|operand| name_of(without_comments(operand)));
            self.has.extend(names.filter(|(name, _)| !name.contains(' ')));
        }
    }
}

/// The text after blanks and comments.
fn without_comments(mut text: &str) -> &str {
    loop {
        text = text.trim_start_matches([' ', '\t', '\r', '\u{b}', '\u{c}']);
        match text.strip_prefix("/*").and_then(|comment| comment.split_once("*/")) {
            Some((_, rest)) => text = rest,
            None => return text,
        }
    }
}

fn word_of(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphabetic() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The name in `"…"` or `<…>`, and whether it is in quotes.
fn name_of(text: &str) -> Option<(String, bool)> {
    let (end, is_quoted) = match text.chars().next()? {
        '"' => ('"', true),
        '<' => ('>', false),
        _ => return None,
    };
    let line = text[1..].split('\n').next()?;
    Some((line.split_once(end)?.0.to_string(), is_quoted))
}

/// Whether what follows this text is the first of its line, as directives are.
fn is_first(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or_default().trim_end();
    line.is_empty() || line.ends_with("*/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Asks {
        Asks::of(text, false)
    }

    #[test]
    fn names_in_quotes_are_found_however_they_are_written() {
        let text = "#include \"a.h\"\n  #  include /* why */ \"b/b.h\" // c\n%:include \"c.h\"\n\
                    #inc\\\nlude \"d.h\"\n#/**/include_next\"e.h\"\n#include <no.h>\n\
                    // #include \"f.h\"\n#import \"g.h\"\r\n";
        let quoted = of(text).quoted;
        assert_eq!(quoted, ["a.h", "b/b.h", "d.h", "e.h", "f.h", "g.h", "c.h"]);
        assert!(!of(text).computed);
    }

    #[test]
    fn what_has_include_asks_for() {
        let text = "#if defined(__has_include) && __has_include(<a.h>)\n#endif\n#ifdef __has_include\n\
                    #elif defined __has_include || __has_include ( \"b c.h\" )\n";
        let asks = of(text);
        assert_eq!(asks.has, [("a.h".to_string(), false), ("b c.h".to_string(), true)]);
        assert!(!asks.computed);
        let asks = Asks::of("#if _CCCL_HAS_INCLUDE(<c.h>) && (A < B)\n", true);
        assert_eq!(asks.has, [("c.h".to_string(), false)]);
    }

    #[test]
    fn names_that_only_macros_tell() {
        for text in [
            "#include HEADER\n",
            "  #  include HEADER(a)\n",
            "/* a */ #include HEADER\n",
            "#define HAS(x) __has_include(x)\n",
            "#define HAS __has_include\n",
        ] {
            assert!(of(text).computed, "{text}");
        }
        assert!(!of("// You should #include this file.\n").computed);
    }

    #[test]
    fn what_is_in_no_list_of_headers() {
        for text in ["asm(\".incbin \\\"a\\\"\");", "char t[] = __TIME__;", "f(__DATE__)"] {
            assert!(of(text).hidden, "{text}");
        }
        assert!(Asks::of("#define BUILT __TIME__\n", true).hidden);
        assert!(!of("int time;").hidden);
        for text in ["#ifdef TCH_EXTENSION_CUDA\n", "#define HAS(x) TCH_EXTENSION_##x\n"] {
            assert!(of(text).cuda, "{text}");
        }
    }
}
