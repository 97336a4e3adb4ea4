//! Python with torch, transformers and PEFT, in tests that compare this program with them.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

/// Runs a script with these arguments; `None` if there are no transformers, which the test's output
/// says.
pub fn transformers(test: &str, script: &str, arguments: &[&str]) -> Option<Output> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_string());
    // `cargo xtask ci` installs transformers next to this repository's own torch.
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    let packages = [venv.join("transformers"), venv.join("site")];
    let packages = packages.iter().all(|folder| folder.exists()).then_some(packages);
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.args(arguments);
        if let Some(packages) = &packages {
            command
                .env("PYTHONPATH", std::env::join_paths(packages).expect("paths without colons"));
        }
        command.output()
    };
    // Their imports take seconds.
    let has = run(&[
        "-c",
        "import importlib.util, sys; sys.exit(None in map(importlib.util.find_spec, ['torch', 'transformers', 'peft']))",
    ]);
    if has.is_ok_and(|output| output.status.success()) {
        return Some(run(&[&["-c", script], arguments].concat()).expect("Python"));
    }
    let without = format!("{python} has no torch, transformers and peft");
    assert!(std::env::var_os("TCH_EXTENSION_REQUIRE_TRANSFORMERS").is_none(), "{without}");
    // Not by eprintln!, which the harness hides if a test passes.
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {without}\n").as_bytes());
    None
}
