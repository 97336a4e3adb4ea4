//! Folders that look like a libtorch, for tests that need no real one.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use tch_extension_build::LIBTORCH_VERSION;

/// A new, empty folder.
pub fn scratch(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("tch-extension-build-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Writes a file and the folders above it.
pub fn write(path: &Path, text: &str) -> PathBuf {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
    path.to_path_buf()
}

/// A CPU libtorch with a version and with libraries that hold nothing; the folder of its libraries.
pub fn fake_libtorch(root: &Path) -> PathBuf {
    let parts: Vec<_> = LIBTORCH_VERSION.split('.').collect();
    let version: String = ["MAJOR", "MINOR", "PATCH"]
        .iter()
        .zip(parts)
        .map(|(name, part)| format!("#define TORCH_VERSION_{name} {part}\n"))
        .collect();
    write(&root.join("include/torch/headeronly/version.h"), &version);
    let lib = root.join("lib");
    std::fs::create_dir_all(&lib).unwrap();
    for name in ["c10", "torch_cpu", "torch"] {
        let output = lib.join(format!("lib{name}.so"));
        let status =
            Command::new("g++").args(["-shared", "-x", "c++", "/dev/null", "-o"]).arg(output).status();
        assert!(status.unwrap().success());
    }
    lib
}
