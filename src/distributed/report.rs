//! What a rank tells tch-run about its failure, so that tch-run can name the rank that failed first:
//! a rank closes its connections before its process has ended, and the others may end before it.
//! `tch-run/src/reports.rs` reads it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// The file of this rank; `None` under another launcher.
fn file() -> Option<&'static PathBuf> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    FILE.get_or_init(|| std::env::var_os("TCH_RUN_ERROR_FILE").map(PathBuf::from)).as_ref()
}

/// Reports panics from now on, and then calls the hook that there was.
pub(super) fn watch_panics() {
    static ONCE: Once = Once::new();
    // The hook cannot be changed by a thread that panics.
    if file().is_none() || std::thread::panicking() {
        return;
    }
    ONCE.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            failure(&panic.to_string());
            next(panic);
        }));
    });
}

/// This rank fails. If it is because another rank has ended, the text tells.
pub(super) fn failure(text: &str) {
    write(text, peer_has_ended(text));
}

/// This rank fails because another one has.
pub(super) fn consequence(text: &str) {
    write(text, true);
}

/// Whether an error of c10d's means that another rank ended or gave up.
pub(super) fn peer_has_ended(reason: &str) -> bool {
    let words = [
        "by peer",
        "Socket closed",
        "pair closure",
        "Broken pipe",
        "shutdown or crash",
        "a remote process exiting",
    ];
    words.iter().any(|words| reason.contains(words))
}

/// Writes the line, unless there is one: what happens after the first failure follows from it.
fn write(text: &str, follows: bool) {
    let Some(file) = file() else { return };
    let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH) else { return };
    let word = if follows { "follows" } else { "first" };
    let line = format!("{} {word} {}\n", now.as_nanos(), text.replace('\n', " "));
    // Without a report, tch-run knows when the process ends.
    let opened = OpenOptions::new().write(true).create_new(true).open(file);
    drop(opened.and_then(|mut file| file.write_all(line.as_bytes())));
}
