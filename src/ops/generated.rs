//! Files that are generated from the operators and committed.

/// Compares a file with what was made now. `cargo xtask COMMAND` sets a variable, with which it is written.
pub(super) fn compare(file: &str, made: &str, command: &str) {
    let path = format!("{}/{file}", env!("CARGO_MANIFEST_DIR"));
    let variable = format!("TCH_EXTENSION_WRITE_{}", command.to_uppercase());
    if std::env::var_os(variable).is_some() {
        std::fs::write(path, made).expect("the file is written");
        return;
    }
    let folder = std::path::Path::new(&path).parent();
    if folder.is_some_and(|folder| !folder.exists()) {
        return; // this is the published crate, which has no package for Python
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let difference = found.lines().zip(made.lines()).find(|(found, made)| found != made);
    assert!(
        found == made,
        "{file} is not what it is generated from: run `cargo xtask {command}`: {difference:?}"
    );
}
