//! Makes folders that look like a libtorch, for tests that need no real one.
#![allow(dead_code)]

use super::LIBTORCH_VERSIONS;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes a new, empty folder.
pub fn scratch(name: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("tch-extension-build-{name}-{}", std::process::id()));
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

/// Makes the headers of a libtorch of this version, and returns the folder of its libraries.
pub fn fake_headers(root: &Path, version: &str) -> PathBuf {
    let version: String = ["MAJOR", "MINOR", "PATCH"]
        .iter()
        .zip(version.split('.'))
        .map(|(name, part)| format!("#define TORCH_VERSION_{name} {part}\n"))
        .collect();
    write(&root.join("include/torch/headeronly/version.h"), &version);
    root.join("lib")
}

/// Makes a libtorch with a version and empty libraries, and returns the folder of its libraries.
pub fn fake_libtorch(root: &Path, cuda: bool) -> PathBuf {
    let lib = fake_headers(root, LIBTORCH_VERSIONS[0].0);
    std::fs::create_dir_all(&lib).unwrap();
    let of_cuda: &[&str] = if cuda { &["cudart.so.13"] } else { &[] };
    for name in ["c10.so", "torch_cpu.so", "torch.so"].iter().chain(of_cuda) {
        let output = lib.join(format!("lib{name}"));
        let status = Command::new("g++")
            .args(["-shared", "-x", "c++", "/dev/null", "-o"])
            .arg(output)
            .status();
        assert!(status.unwrap().success());
    }
    if cuda {
        write(&lib.join("libtorch_cuda.so"), "");
        write(&lib.join("libcublasLt.so.13"), "");
        write(&lib.join("libc10_cuda.so"), "\0libcudart.so.13\0");
    }
    lib
}

/// Makes an nvcc of this release that calls g++ to compile, and returns its path.
pub fn fake_nvcc(home: &Path, release: &str) -> PathBuf {
    let script = format!(
        "#!/bin/sh\n\
         [ \"$1\" = --version ] && echo 'Cuda compilation tools, release {release}, V{release}.88' && exit\n\
         [ \"$1\" = --list-gpu-arch ] && printf 'compute_80\\ncompute_86\\ncompute_90\\n' && exit\n\
         words= skip=\n\
         for word; do\n\
           case \"$word\" in\n\
             -Xcompiler) skip=1; continue;;\n\
             -v) skip=;;\n\
             -lineinfo|--*|-gencode=*|-ccbin=*|-x|cu) continue;;\n\
           esac\n\
           [ $skip ] || words=\"$words $word\"\n\
           skip=\n\
         done\n\
         exec g++ -x c++ $words\n"
    );
    let path = write(&home.join("bin/nvcc"), &script);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}
