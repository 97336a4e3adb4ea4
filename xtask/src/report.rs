//! Prints for the user: progress and errors on stderr, results on stdout.

use std::fmt::Display;
use std::io::Write;

/// Prints a line on stderr. Unlike `eprintln!`, it does not panic when stderr is closed.
pub fn say(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints text on stdout. It is no error when the reader (`| head`, say) has closed the pipe.
pub fn print(text: &str) {
    let mut stdout = std::io::stdout();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// An error that also tells the user how to solve the problem.
pub fn trouble(what: impl Display, way_out: impl Display) -> anyhow::Error {
    anyhow::anyhow!("{what}\n  way out: {way_out}")
}
