//! What ranks say about their failures.
//!
//! A rank that fails closes its connections before its process has ended, so another rank, which fails
//! because of that, may end first. Therefore each rank has a file, named by TCH_RUN_ERROR_FILE, into
//! which it writes one line when it fails: the time in nanoseconds since 1970, `first` or `follows`,
//! and what happened. `follows` says that another rank failed before. Programs that use
//! `tch_extension::distributed` do so by themselves. What a rank said long before its end it has
//! survived: a panic that was caught, for example.

use std::fs::{DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a rank says.
#[derive(Debug, PartialEq, Eq)]
pub struct Said {
    pub at: SystemTime,
    /// Whether another rank failed before.
    pub follows: bool,
    pub text: String,
}

/// The files of an attempt. Dropped, they are removed.
pub struct Reports {
    /// `None` if it cannot be made. Then only the ends of ranks are known.
    folder: Option<PathBuf>,
}

/// What is read of a file at most.
const LONGEST: u64 = 4096;
/// What is shown of a text at most, in characters.
const SHOWN: usize = 300;
/// How long a process may take to end after it failed.
const SURVIVED: Duration = Duration::from_secs(60);

impl Reports {
    pub fn new() -> Reports {
        let name = format!("tch-run-{}-{:x}", std::process::id(), nanoseconds(SystemTime::now()));
        let folder = std::env::temp_dir().join(name);
        // Nobody else may write into it, and one that is there already is an error.
        let made = DirBuilder::new().mode(0o700).create(&folder);
        Reports { folder: made.is_ok().then_some(folder) }
    }

    /// The file of a rank of this node.
    pub fn path(&self, index: usize) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(index.to_string()))
    }

    /// What a rank of this node has said of its end, at this time or later.
    pub fn read(&self, index: usize, end: SystemTime) -> Option<Said> {
        let mut line = Vec::new();
        File::open(self.path(index)?).ok()?.take(LONGEST).read_to_end(&mut line).ok()?;
        let said = parse(&String::from_utf8_lossy(&line))?;
        // Of a clock that was set back, nothing is known.
        let since = end.duration_since(said.at).unwrap_or_default();
        (since < SURVIVED).then_some(said)
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // What cannot be removed is left to whoever cleans the folder of temporary files.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

fn parse(line: &str) -> Option<Said> {
    let mut words = line.trim_end().splitn(3, ' ');
    let at = UNIX_EPOCH.checked_add(Duration::from_nanos(words.next()?.parse().ok()?))?;
    let follows = match words.next()? {
        "first" => false,
        "follows" => true,
        _ => return None,
    };
    let text = words.next().unwrap_or_default().chars().take(SHOWN).collect();
    Some(Said { at, follows, text })
}

/// Nanoseconds since 1970.
pub fn nanoseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_not_ours_says_nothing() {
        let said = parse("1500000000 follows rank 0: a b\n").unwrap();
        assert_eq!(said.at, UNIX_EPOCH + Duration::from_millis(1500));
        assert_eq!((said.follows, said.text.as_str()), (true, "rank 0: a b"));
        assert!(parse("18446744073709551615 first").is_some());
        for line in ["", "x", "1", "1 maybe x", "-1 first x", "99999999999999999999 first x"] {
            assert_eq!(parse(line), None, "{line:?}");
        }
    }

    #[test]
    fn the_files_are_private_and_are_removed() {
        use std::os::unix::fs::PermissionsExt;
        let reports = Reports::new();
        let path = reports.path(3).unwrap();
        let folder = path.parent().unwrap().to_path_buf();
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let at = UNIX_EPOCH + Duration::from_secs(7);
        assert_eq!(reports.read(3, at), None);
        std::fs::write(&path, "7000000000 first x").unwrap();
        assert_eq!(reports.read(3, at).unwrap().text, "x");
        // Its process went on.
        assert_eq!(reports.read(3, at + SURVIVED), None);
        assert!(
            reports.read(3, at + SURVIVED / 2).is_some() && reports.read(3, UNIX_EPOCH).is_some()
        );
        drop(reports);
        assert!(!folder.exists());
    }
}
