//! The packages that all tests load.

use super::*;
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

type Written = std::result::Result<PathBuf, String>;

/// The folder of the packages. `None`, with a message, if there is no Python that can write them.
pub fn packages(test: &str) -> Option<&'static Path> {
    packages_for("cpu", test)
}

/// The same for this device.
pub fn packages_for(device: &str, test: &str) -> Option<&'static Path> {
    static CPU: OnceLock<Written> = OnceLock::new();
    static CUDA: OnceLock<Written> = OnceLock::new();
    let written = if device == "cpu" { &CPU } else { &CUDA };
    match written.get_or_init(|| write(device)) {
        Ok(folder) => Some(folder),
        Err(why) => {
            assert!(std::env::var_os("TCH_EXTENSION_REQUIRE_PYTHON").is_none(), "{why}");
            // eprintln! would be captured by the test harness.
            let line = format!("SKIPPED {test}: {why}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            None
        }
    }
}

/// Writes the packages for a device, and returns their folder. It takes a minute.
fn write(device: &str) -> Written {
    // Not a temporary folder, which could not be removed after the last test.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = if target.exists() { target.to_path_buf() } else { std::env::temp_dir() };
    let folder = target.join("tch_extension_packages").join(device);
    std::fs::create_dir_all(&folder).expect("a folder");
    let arguments = [folder.as_os_str(), device.as_ref()];
    let mut command = support::python::command("tests/package/packages.py", &arguments)?;
    // The compiler's results stay there, which makes later runs faster.
    command.env("TORCHINDUCTOR_CACHE_DIR", folder.join("cache"));
    // What the compiler imports, as set-up installed it.
    let installed = [".venv/python", ".venv/site"].map(|part| support::root().join(part));
    if installed.iter().all(|part| part.exists()) {
        command.env("PYTHONPATH", std::env::join_paths(installed).expect("paths"));
    }
    let output = command.output().expect("python3 was there a moment ago");
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("ModuleNotFoundError") {
        return Err("python3 lacks what torch.compile imports".to_string());
    }
    assert!(output.status.success(), "{errors}");
    Ok(folder)
}
