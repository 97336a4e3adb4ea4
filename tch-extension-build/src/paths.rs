//! Paths that compilers and cargo can be told of, and tell of.

use anyhow::{Result, bail};
use std::path::Path;

/// Refuses a path that is not UTF-8: the lines that cargo reads and compilers' lists of files are
/// text, so that what is made of it would never be up to date, or always.
pub fn check(what: &str, path: &Path) -> Result<()> {
    if path.to_str().is_none() {
        bail!("{what} {path:?} is not UTF-8; rename it, or name a link to it that is");
    }
    Ok(())
}

/// Refuses variables that would count as unset although they are not.
pub fn check_variables(names: &[&str]) -> Result<()> {
    for name in names {
        if let Some(value) = std::env::var_os(name).filter(|value| value.to_str().is_none()) {
            bail!("the variable {name} ({value:?}) is not UTF-8; set it to a path that is");
        }
    }
    Ok(())
}
