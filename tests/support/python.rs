//! Python with the torch of the libtorch in use, for tests that compare with PyTorch itself.

use crate::root;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use tch_extension::library::libtorch_version;

/// python3, which also finds the packages that set-up fetched.
fn python3(root: &Path) -> Command {
    let mut command = Command::new("python3");
    let folders = [".venv/python", ".venv/site"].map(|folder| root.join(folder));
    let present = folders.into_iter().filter(|folder| folder.exists());
    if let Ok(path) = std::env::join_paths(present)
        && !path.is_empty()
    {
        command.env("PYTHONPATH", path);
    }
    let venv = root.join(".venv");
    if venv.exists() {
        // Set-up installs no compiled modules. Without them, each start of torch takes twice as long.
        command.env("PYTHONPYCACHEPREFIX", venv.join("pycache"));
        command.env_remove("PYTHONDONTWRITEBYTECODE");
    }
    // Otherwise torch.compile starts processes that import torch, to compile one or two kernels.
    command.env("TORCHINDUCTOR_COMPILE_THREADS", "1");
    command
}

/// The version of python3's torch. It is asked for once, because torch takes seconds to start.
fn version(root: &Path) -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let script = "import torch; print(torch.__version__)";
        let output = python3(root).args(["-c", script]).output();
        output.map_or_else(
            |error| error.to_string(),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    })
}

/// The command of a script of this repository with these arguments, or why it cannot run: there is
/// no python3 with that torch. Panics where `TCH_EXTENSION_REQUIRE_PYTHON` says that there is one.
pub fn command(script: &str, arguments: &[impl AsRef<OsStr>]) -> Result<Command, String> {
    let found = find(script, arguments);
    let required = std::env::var_os("TCH_EXTENSION_REQUIRE_PYTHON").is_some_and(|it| it != "0");
    assert!(found.is_ok() || !required, "{script}: {:?}", found.err());
    found
}

fn find(script: &str, arguments: &[impl AsRef<OsStr>]) -> Result<Command, String> {
    let root = root();
    let script = root.join(script);
    let wanted = libtorch_version();
    if !version(&root).starts_with(&wanted) {
        return Err(format!("no python3 with torch {wanted}"));
    }
    let mut command = python3(&root);
    command.args(["-W", "ignore"]).arg(script).args(arguments);
    Ok(command)
}

/// The output of such a script. Panics if it fails.
pub fn run(script: &str, arguments: &[&OsStr]) -> Result<Output, String> {
    let output = command(script, arguments)?.output().expect("python3 was there a moment ago");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}
