//! Checks that paths can be passed to compilers and cargo, and read back from them, as text.

use anyhow::{Result, bail};
use std::path::Path;

/// Refuses a path that is not UTF-8. The lines that cargo reads and the compilers' lists of files
/// are text, so everything made from such a path would always, or never, be up to date.
pub fn check(what: &str, path: &Path) -> Result<()> {
    if path.to_str().is_none() {
        bail!("{what} {path:?} is not UTF-8; rename it, or name a link to it that is");
    }
    Ok(())
}

/// Refuses variables whose value is not UTF-8, because they would wrongly count as unset.
pub fn check_variables(names: &[&str]) -> Result<()> {
    for name in names {
        if let Some(value) = std::env::var_os(name).filter(|value| value.to_str().is_none()) {
            bail!("the variable {name} ({value:?}) is not UTF-8; set it to a path that is");
        }
    }
    Ok(())
}
