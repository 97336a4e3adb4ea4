//! The Python distribution that a file belongs to: what pip installed.

use std::path::{Path, PathBuf};

pub(super) struct Distribution {
    pub name: String,
    pub version: String,
    /// The version of torch that it requires, such as `torch==2.9.1`.
    pub torch: Option<String>,
}

/// The package whose list of files contains this file. pip writes that list next to the package's
/// folder.
pub(super) fn of(file: &Path) -> Option<Distribution> {
    // Libraries are in the package's folder, or one or two levels deeper.
    const DEPTH: usize = 4;
    file.ancestors().skip(1).take(DEPTH).find_map(|folder| {
        let own = file.strip_prefix(folder).ok()?.to_str()?;
        let infos = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
        let mut infos =
            infos.filter(|path| path.extension().is_some_and(|extension| extension == "dist-info"));
        infos.find(|info| lists(info, own)).and_then(read)
    })
}

fn lists(info: &Path, own: &str) -> bool {
    let record = std::fs::read_to_string(info.join("RECORD")).unwrap_or_default();
    record.lines().any(|line| line.strip_prefix(own).is_some_and(|rest| rest.starts_with(',')))
}

fn read(info: PathBuf) -> Option<Distribution> {
    let text = std::fs::read_to_string(info.join("METADATA")).ok()?;
    // The description follows after an empty line.
    let fields = || {
        text.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.split_once(": "))
    };
    let field =
        |name: &str| fields().find(|(found, _)| *found == name).map(|(_, value)| value.to_string());
    let torch =
        fields().filter(|(name, _)| *name == "Requires-Dist").find_map(|(_, value)| torch(value));
    Some(Distribution { name: field("Name")?, version: field("Version")?, torch })
}

/// Converts `torch (==2.9.1) ; extra == 'x'` to `torch==2.9.1`.
fn torch(requirement: &str) -> Option<String> {
    let requirement = requirement.split(';').next()?;
    let rest = requirement.trim().strip_prefix("torch")?;
    let is_longer = rest.starts_with(|next: char| next.is_alphanumeric() || "-_.".contains(next));
    let versions: String = rest.chars().filter(|letter| !" ()".contains(*letter)).collect();
    (!is_longer).then(|| format!("torch{versions}"))
}

#[cfg(test)]
mod tests {
    use super::torch;

    #[test]
    fn requirements_are_read_as_pip_writes_them() {
        for (text, expected) in [
            ("torch (==2.9.1)", Some("torch==2.9.1")),
            ("torch==2.9.1", Some("torch==2.9.1")),
            ("torch >=2.0, <3 ; python_version < '4'", Some("torch>=2.0,<3")),
            ("torch", Some("torch")),
            ("torchvision==0.24", None),
            ("torch-scatter", None),
            ("numpy", None),
        ] {
            assert_eq!(torch(text).as_deref(), expected, "{text}");
        }
    }
}
