//! What a rank tells tch-run about its failure, so that tch-run can name the rank that failed first:
//! a rank closes its connections before its process has ended, and the others may end before it.
//! `tch-run/src/reports.rs` reads it, and has the same time that a process may take to end.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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

/// How long a process may take to end after it failed. What it said earlier it has survived: a panic
/// that was caught, for example.
const SURVIVED: Duration = Duration::from_secs(60);

fn write(text: &str, follows: bool) {
    if let Some(file) = file() {
        write_to(file, text, follows);
    }
}

/// Writes the line, unless there is a recent one: what happens after the first failure follows from
/// it.
fn write_to(file: &Path, text: &str, follows: bool) {
    static ONE: Mutex<()> = Mutex::new(());
    let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH) else { return };
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let written = file.metadata().and_then(|metadata| metadata.modified());
    // One of a time that is yet to come is as good as new.
    if written.is_ok_and(|at| at.elapsed().unwrap_or_default() < SURVIVED) {
        return;
    }
    let word = if follows { "follows" } else { "first" };
    let line = format!("{} {word} {}\n", now.as_nanos(), text.replace('\n', " "));
    // Whoever reads it meanwhile gets one line or the other. Without a report, tch-run knows when the
    // process ends.
    let new = file.with_extension("new");
    drop(std::fs::write(&new, line).and_then(|()| std::fs::rename(&new, file)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn the_first_failure_stays_unless_it_was_survived() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("0");
        let said = || std::fs::read_to_string(&file).expect("a line");
        write_to(&file, "a panic\nthat is caught", false);
        write_to(&file, "what follows", true);
        assert!(said().ends_with(" first a panic that is caught\n"), "{}", said());
        let open = File::options().write(true).open(&file).expect("a file");
        open.set_modified(SystemTime::now() - SURVIVED).expect("older");
        write_to(&file, "the end", true);
        write_to(&file, "what follows", false);
        assert!(said().ends_with(" follows the end\n"), "{}", said());
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 1);
    }
}
