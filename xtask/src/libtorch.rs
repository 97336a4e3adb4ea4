//! Chooses the libtorch and checks that it can be used.

use crate::probe;
use crate::programs;
use crate::repo::{Repo, is_ours};
use crate::report::trouble;
use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The libtorch version that torch-sys' bindings were generated from. A test checks that the pins
/// in `libtorch.txt` agree.
pub const WANTED: &str = "2.11.0";

/// A function that reads an environment variable. It is a parameter so that tests need not change
/// the real environment.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Which rule chose the libtorch. The rules and their order are torch-sys' own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// LIBTORCH_USE_PYTORCH is set: the libtorch of the torch package in the Python that torch-sys
    /// asks.
    Python(&'static str),
    /// LIBTORCH is set to this folder.
    User(PathBuf),
    /// Neither is set: the libtorch that set-up installs into this repository.
    Own,
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rule::Python(python) => {
                write!(f, "LIBTORCH_USE_PYTORCH is set: the torch of `{python}`")
            }
            Rule::User(_) => write!(f, "LIBTORCH is set"),
            Rule::Own => {
                write!(
                    f,
                    "this repository's own, as neither LIBTORCH_USE_PYTORCH nor LIBTORCH is set"
                )
            }
        }
    }
}

/// Applies the rules in torch-sys' order.
pub fn choose(env: Env, repo: &Repo) -> Rule {
    if env("LIBTORCH_USE_PYTORCH").is_some() {
        // This is what torch-sys does: in a virtual environment, only `python` is certain to be the
        // environment's own.
        return Rule::Python(if env("VIRTUAL_ENV").is_some() { "python" } else { "python3" });
    }
    let libtorch = env("LIBTORCH");
    match libtorch {
        Some(path) if !is_ours(Some(&path), &repo.libtorch()) => Rule::User(path.into()),
        _ => Rule::Own,
    }
}

/// A libtorch and where its parts are.
pub struct Libtorch {
    /// Which rule chose it.
    pub rule: Rule,
    /// The folder that holds `libtorch.so`.
    pub lib: PathBuf,
    /// The folder that holds `torch/`.
    pub include: PathBuf,
}

impl Libtorch {
    /// Finds the files of the chosen libtorch.
    pub fn locate(rule: Rule, env: Env, repo: &Repo) -> Result<Self> {
        let root = match &rule {
            Rule::Python(python) => python_torch(python, repo)?,
            Rule::User(root) => root.clone(),
            Rule::Own => repo.libtorch(),
        };
        // Some distributions keep libraries and headers in different folders. torch-sys has a
        // variable for each.
        let root_of = |variable: &str| match (&rule, env(variable)) {
            (Rule::User(_) | Rule::Own, Some(path)) => PathBuf::from(path),
            _ => root.clone(),
        };
        let lib = root_of("LIBTORCH_LIB").join("lib");
        let include = root_of("LIBTORCH_INCLUDE").join("include");
        let found = Libtorch { rule, lib, include };
        found.check_files()?;
        Ok(found)
    }

    fn check_files(&self) -> Result<()> {
        let way_out = match self.rule {
            Rule::User(_) => {
                "set LIBTORCH to the absolute path of a folder with lib/libtorch.so and include/torch, or \
                 unset it: then this repository installs its own"
            }
            Rule::Python(_) => {
                "install torch in that Python again, or unset LIBTORCH_USE_PYTORCH: then this repository \
                 installs its own"
            }
            Rule::Own => "run `cargo xtask setup`",
        };
        if let Rule::User(root) = &self.rule
            && root.is_relative()
        {
            // Each build script runs in its own package's folder, so a relative path would mean
            // another folder there.
            bail!(trouble(format_args!("LIBTORCH={} is a relative path", root.display()), way_out));
        }
        for path in [self.lib.join("libtorch.so"), self.include.join("torch")] {
            if !path.exists() {
                bail!(trouble(
                    format_args!("no libtorch: {} is missing ({})", path.display(), self.rule),
                    way_out
                ));
            }
        }
        Ok(())
    }

    /// The version, such as `2.11.0`, read from the headers.
    pub fn version(&self) -> Option<String> {
        probe::libtorch_version(&self.include)
    }

    /// Returns an error for a version that torch-sys' bindings were not generated from.
    pub fn check_version(&self, env: Env) -> Result<()> {
        if env("LIBTORCH_BYPASS_VERSION_CHECK").is_some() {
            return Ok(());
        }
        match self.version() {
            Some(version) if version == WANTED => Ok(()),
            found => Err(wrong_version(found.as_deref(), &self.lib, &self.rule)),
        }
    }
}

fn wrong_version(found: Option<&str>, lib: &Path, rule: &Rule) -> anyhow::Error {
    let what = format!(
        "the libtorch in {} is version {}, but {WANTED} is needed ({rule})",
        lib.display(),
        found.unwrap_or("unknown")
    );
    let way_out = match rule {
        Rule::Python(python) => format!(
            "`{python} -m pip install torch=={WANTED}`, or unset LIBTORCH_USE_PYTORCH: then this repository \
             installs its own"
        ),
        Rule::User(_) => {
            format!(
                "unset LIBTORCH: then this repository installs its own; or point it to a libtorch {WANTED}"
            )
        }
        Rule::Own => "the pins in xtask/libtorch.txt must name that version".to_string(),
    };
    trouble(what, format_args!("{way_out} (LIBTORCH_BYPASS_VERSION_CHECK=1 tries anyway)"))
}

/// Prints where torch is without importing it, because the import takes seconds.
const FIND_TORCH: &str = "
import importlib.util, sys
spec = importlib.util.find_spec('torch')
places = spec and spec.submodule_search_locations
print(places[0] if places else '')
print(sys.executable)
";

/// The import that torch-sys makes.
const IMPORT_TORCH: &str = "from torch.utils import cpp_extension";

/// The folder of the torch package in this Python.
fn python_torch(python: &str, repo: &Repo) -> Result<PathBuf> {
    let instead = "unset LIBTORCH_USE_PYTORCH: then this repository installs its own";
    let Some(output) = programs::output(python, &["-c", FIND_TORCH])? else {
        bail!(trouble(
            format_args!("LIBTORCH_USE_PYTORCH is set, but `{python}` was not found"),
            format_args!("put the Python that has torch first in PATH, or {instead}"),
        ));
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines().map(str::trim);
    let (root, executable) = (lines.next().unwrap_or_default(), lines.next().unwrap_or(python));
    if root.is_empty() {
        bail!(trouble(
            format_args!("LIBTORCH_USE_PYTORCH is set, but `{python}` ({executable}) has no torch"),
            format_args!("`{python} -m pip install torch=={WANTED}`, or {instead}"),
        ));
    }
    check_import(python, &format!("{executable}\n{root}\n"), instead, repo)?;
    Ok(PathBuf::from(root))
}

/// Tries the import that torch-sys makes, because torch-sys' own message does not say what is
/// wrong. The import takes seconds, so a success is recorded in a file.
fn check_import(python: &str, which: &str, instead: &str, repo: &Repo) -> Result<()> {
    let memory = repo.venv().join(".python-torch");
    if std::fs::read_to_string(&memory).is_ok_and(|known| known == which) {
        return Ok(());
    }
    let output = programs::command(python, &["-c", IMPORT_TORCH]).output()?;
    if !output.status.success() {
        let reason = programs::last_line(&output.stderr);
        let way_out = if reason.contains("setuptools") {
            format!("`{python} -m pip install setuptools`, or {instead}")
        } else {
            format!(
                "repair that Python's torch until `{python} -c '{IMPORT_TORCH}'` works, or {instead}"
            )
        };
        bail!(trouble(format_args!("`{python}` cannot import its torch: {reason}"), way_out));
    }
    // The file saves only time: without it, the next run imports again.
    let _ = std::fs::create_dir_all(repo.venv()).and_then(|()| std::fs::write(&memory, which));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(variables: &[(&str, &str)]) -> Rule {
        let env = |name: &str| {
            variables
                .iter()
                .find(|(variable, _)| *variable == name)
                .map(|(_, value)| OsString::from(value))
        };
        choose(&env, &Repo { root: PathBuf::from("/repo") })
    }

    #[test]
    fn python_wins_then_a_users_libtorch_then_our_own() {
        let (python, user) = (("LIBTORCH_USE_PYTORCH", "1"), ("LIBTORCH", "/opt/libtorch"));
        assert_eq!(chosen(&[python, user]), Rule::Python("python3"));
        assert_eq!(chosen(&[python, ("VIRTUAL_ENV", "/venv")]), Rule::Python("python"));
        assert_eq!(chosen(&[user]), Rule::User("/opt/libtorch".into()));
        assert_eq!(chosen(&[]), Rule::Own);
    }

    #[test]
    fn the_value_that_cargo_sets_is_not_a_users() {
        assert_eq!(chosen(&[("LIBTORCH", "/repo/.venv/libtorch")]), Rule::Own);
        assert_eq!(chosen(&[("LIBTORCH", "")]), Rule::Own);
    }

    #[test]
    fn a_wrong_version_names_both_and_the_way_out() {
        let rule = Rule::User("/opt/libtorch".into());
        let message =
            wrong_version(Some("2.4.1"), Path::new("/opt/libtorch/lib"), &rule).to_string();
        for part in [
            "2.4.1",
            WANTED,
            "/opt/libtorch/lib",
            "unset LIBTORCH",
            "LIBTORCH_BYPASS_VERSION_CHECK",
        ] {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    }

    #[test]
    fn a_relative_libtorch_is_refused() {
        let rule = Rule::User("libtorch".into());
        let repo = Repo { root: PathBuf::from("/repo") };
        let message = Libtorch::locate(rule, &|_| None, &repo).err().unwrap().to_string();
        assert!(message.contains("LIBTORCH=libtorch is a relative path"), "{message}");
    }

    #[test]
    fn the_pins_name_the_wanted_version() {
        assert!(include_str!("../libtorch.txt").contains(&format!("\ntorch=={WANTED}\n")));
    }
}
