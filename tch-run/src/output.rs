//! What ranks print, line by line, and the lines of tch-run itself.

use std::io::{ErrorKind, Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while whole lines are written. It is one for stdout and stderr, which may be one terminal.
static PRINTING: Mutex<()> = Mutex::new(());

/// A longer line is cut into several, so that a rank that prints no line end takes no memory without
/// limit.
const LONGEST_LINE: usize = 1 << 20;

/// Where lines go to: to our stream of the same name.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    Stdout,
    Stderr,
}

impl Target {
    /// Writes whole lines. What cannot be written is lost: if the reader is gone (`| head`, say), the
    /// ranks go on.
    fn write(self, lines: &[u8]) {
        let _printing = lock();
        let _ = match self {
            Target::Stdout => {
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(lines).and_then(|()| stdout.flush())
            }
            Target::Stderr => std::io::stderr().lock().write_all(lines),
        };
    }
}

fn lock() -> MutexGuard<'static, ()> {
    PRINTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints a line of tch-run's own. Parts of it come from ranks and from other machines, so nothing
/// in it may steer a terminal.
pub fn note(text: &str) {
    let line = text.replace(char::is_control, " ");
    Target::Stderr.write(format!("tch-run: {line}\n").as_bytes());
}

/// Copies a rank's output until its end, with the prefix in front of each line. Nothing is ever
/// printed inside a line. A last line without an end gets one.
pub fn forward(mut from: impl Read, target: Target, prefix: &str) {
    let mut lines = Lines { prefix: prefix.as_bytes(), rest: Vec::new() };
    let mut bytes = vec![0; 1 << 16];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => {
                let whole = lines.add(&bytes[..count]);
                if !whole.is_empty() {
                    target.write(&whole);
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let last = lines.finish();
    if !last.is_empty() {
        target.write(&last);
    }
}

/// Puts lines together that arrive in pieces.
struct Lines<'a> {
    prefix: &'a [u8],
    /// The beginning of a line whose end has not arrived.
    rest: Vec<u8>,
}

impl Lines<'_> {
    /// The lines that are whole now, with their prefixes.
    fn add(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut whole = Vec::new();
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.rest.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.rest.len() >= LONGEST_LINE {
                whole.append(&mut self.finish());
            }
        }
        whole
    }

    /// The line that has arrived so far, with an end.
    fn finish(&mut self) -> Vec<u8> {
        if self.rest.is_empty() {
            return Vec::new();
        }
        let mut line = self.prefix.to_vec();
        line.append(&mut self.rest);
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_put_together_whatever_the_pieces() {
        let text = b"a\n\nlong line \xff\r\nlast".to_vec();
        let expected = b"[rank 3] a\n[rank 3] \n[rank 3] long line \xff\r\n[rank 3] last\n";
        for size in 1..=text.len() {
            let mut lines = Lines { prefix: b"[rank 3] ", rest: Vec::new() };
            let mut found = Vec::new();
            for piece in text.chunks(size) {
                let whole = lines.add(piece);
                assert!(whole.is_empty() || whole.ends_with(b"\n"));
                found.extend(whole);
            }
            found.extend(lines.finish());
            assert_eq!(found, expected, "pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let mut lines = Lines { prefix: b"", rest: Vec::new() };
        let piece = vec![b'x'; LONGEST_LINE / 2];
        assert!(lines.add(&piece).is_empty());
        assert_eq!(lines.add(&piece).len(), LONGEST_LINE + 1);
        assert!(lines.finish().is_empty());
    }
}
