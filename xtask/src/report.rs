//! What the user reads: progress and errors on stderr, results on stdout.

use std::fmt::Display;
use std::io::Write;

/// Prints a line on stderr. Unlike `eprintln!`, does not panic when nobody reads it any more.
pub fn say(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints text on stdout; a reader that left early (`| head`) is no error.
pub fn print(text: &str) {
    let mut stdout = std::io::stdout();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// An error that names the way out.
pub fn trouble(what: impl Display, way_out: impl Display) -> anyhow::Error {
    anyhow::anyhow!("{what}\n  way out: {way_out}")
}
