//! Finds libtorch's version, its CUDA version and an nvcc. Uses only `std`, so that every crate can
//! include this file.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A CUDA release, such as `13.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaVersion {
    /// The major version: 13 in 13.0. A program and its libraries must have the same one.
    pub major: u32,
    /// The minor version: 0 in 13.0.
    pub minor: u32,
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The version of the libtorch whose headers are in `include`, such as `2.11.0`.
pub fn libtorch_version(include: &Path) -> Option<String> {
    ["torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"].iter().find_map(
        |header| {
            let text = std::fs::read_to_string(include.join(header)).ok()?;
            let part = |name: &str| {
                let line = text.lines().find_map(|line| {
                    line.strip_prefix(&format!("#define TORCH_VERSION_{name} "))
                })?;
                line.trim().parse::<u32>().ok()
            };
            Some(format!("{}.{}.{}", part("MAJOR")?, part("MINOR")?, part("PATCH")?))
        },
    )
}

/// The CUDA major version that the libtorch in `lib` was built for; `None` for a CPU build.
///
/// It is read from the name of the CUDA runtime that `libc10_cuda.so` (a small file) loads, because
/// wheels and archives of libtorch record their versions in different places.
pub fn libtorch_cuda_major(lib: &Path) -> Option<u32> {
    if !lib.join("libtorch_cuda.so").exists() {
        return None;
    }
    let bytes = std::fs::read(lib.join("libc10_cuda.so")).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    text.match_indices("libcudart").find_map(|(start, _)| {
        let name = text[start..].split('\0').next()?;
        name.split_once(".so.")?.1.split('.').next()?.parse().ok()
    })
}

/// An nvcc and the CUDA release it belongs to.
#[derive(Clone, Debug)]
pub struct Nvcc {
    /// The compiler's path.
    pub path: PathBuf,
    /// The compiler's release.
    pub version: CudaVersion,
    /// How it was found, such as `CUDA_HOME`.
    pub source: String,
}

impl Nvcc {
    /// The toolkit's folder, which holds `include` and `lib` or `lib64`.
    pub fn home(&self) -> PathBuf {
        // The path is not canonicalised, because a link such as `.venv/cuda` is better to show and
        // to put in an rpath.
        self.path.parent().and_then(Path::parent).map(Path::to_path_buf).unwrap_or_default()
    }
}

/// The places where [`find_nvcc`] looks, in order: first those that the user names, last those that
/// merely happen to exist.
pub fn nvcc_candidates(
    libtorch_lib: &Path,
    env: &dyn Fn(&str) -> Option<String>,
) -> Vec<(String, PathBuf)> {
    let mut candidates = Vec::new();
    if let Some(nvcc) = env("NVCC") {
        candidates.push(("NVCC".to_string(), PathBuf::from(nvcc)));
    }
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = env(variable) {
            candidates.push((variable.to_string(), Path::new(&home).join("bin/nvcc")));
        }
    }
    // A wheel's libtorch is in <site>/torch/lib, and an nvcc from wheels in <site>/nvidia/cu13/bin.
    let site = libtorch_lib.canonicalize().unwrap_or_default().join("../../nvidia");
    if let Ok(folders) = std::fs::read_dir(site) {
        let mut folders: Vec<_> =
            folders.flatten().map(|entry| entry.path().join("bin/nvcc")).collect();
        folders.sort();
        candidates.extend(folders.into_iter().map(|nvcc| ("next to libtorch".to_string(), nvcc)));
    }
    for folder in std::env::split_paths(&env("PATH").unwrap_or_default()) {
        candidates.push(("PATH".to_string(), folder.join("nvcc")));
    }
    candidates.push(("the usual place".to_string(), PathBuf::from("/usr/local/cuda/bin/nvcc")));
    candidates
}

/// The first nvcc that exists and answers `--version`. A variable that points to nothing is
/// ignored, because it must not hide a toolkit that exists.
pub fn find_nvcc(libtorch_lib: &Path, env: &dyn Fn(&str) -> Option<String>) -> Option<Nvcc> {
    nvcc_candidates(libtorch_lib, env).into_iter().find_map(|(source, path)| {
        if !path.is_file() {
            return None;
        }
        let version = nvcc_version(&path)?;
        Some(Nvcc { path, version, source })
    })
}

/// The release that `nvcc --version` states.
pub fn nvcc_version(nvcc: &Path) -> Option<CudaVersion> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    parse_nvcc_version(&String::from_utf8_lossy(&output.stdout))
}

fn parse_nvcc_version(text: &str) -> Option<CudaVersion> {
    let release = text.split("release ").nth(1)?;
    let (major, rest) = release.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some(CudaVersion { major: major.trim().parse().ok()?, minor: minor.parse().ok()? })
}

/// The folder with a header of a CUDA library that is no part of the toolkit, such as `nccl.h`. It is
/// looked for in `include` of the folder that a variable names (`NCCL_HOME`), next to libtorch, where
/// wheels have it, and where the system has headers.
pub fn cuda_header(
    libtorch_lib: &Path,
    header: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Option<PathBuf> {
    let name = header.split(['.', '/']).next().unwrap_or(header).to_uppercase();
    let named = env(&format!("{name}_HOME")).map(|home| Path::new(&home).join("include"));
    let site = libtorch_lib.canonicalize().unwrap_or_default().join("../../nvidia");
    let mut wheels: Vec<_> = std::fs::read_dir(site)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("include"))
        .collect();
    wheels.sort();
    let system = SYSTEM_INCLUDES.map(PathBuf::from);
    named.into_iter().chain(wheels).chain(system).find(|folder| folder.join(header).is_file())
}

/// The folders that compilers search by themselves. Naming one would change the order in which they
/// search, which the headers of the standard library do not survive.
pub const SYSTEM_INCLUDES: [&str; 3] =
    ["/usr/include", "/usr/local/include", "/usr/include/x86_64-linux-gnu"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_release_line() {
        let text = "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.36424714_0";
        assert_eq!(parse_nvcc_version(text), Some(CudaVersion { major: 13, minor: 0 }));
        assert_eq!(parse_nvcc_version("no compiler here"), None);
    }

    #[test]
    fn a_named_compiler_comes_before_a_named_toolkit_and_both_before_the_rest() {
        let env = |name: &str| match name {
            "NVCC" => Some("/a/nvcc".to_string()),
            "CUDA_HOME" => Some("/b".to_string()),
            "PATH" => Some("/c:/d".to_string()),
            _ => None,
        };
        let paths: Vec<_> = nvcc_candidates(Path::new("/nowhere/lib"), &env)
            .into_iter()
            .map(|(_, path)| path)
            .collect();
        let expected = ["/a/nvcc", "/b/bin/nvcc", "/c/nvcc", "/d/nvcc", "/usr/local/cuda/bin/nvcc"];
        assert_eq!(paths, expected.map(PathBuf::from));
    }

    #[test]
    fn a_toolkit_that_does_not_exist_hides_nothing() {
        let env = |name: &str| (name == "CUDA_HOME").then(|| "/does/not/exist".to_string());
        let found = find_nvcc(Path::new("/nowhere/lib"), &env);
        assert!(found.is_none_or(|nvcc| nvcc.source != "CUDA_HOME"));
    }

    #[test]
    fn a_header_of_a_library_next_to_libtorch_or_where_a_variable_says() {
        let folder = std::env::temp_dir().join(format!("probe-header-{}", std::process::id()));
        let lib = folder.join("torch/lib");
        let (wheel, named) = (folder.join("nvidia/some/include"), folder.join("named/include"));
        for folder in [&lib, &wheel, &named] {
            std::fs::create_dir_all(folder).expect("a folder");
        }
        let none = |_: &str| None;
        assert_eq!(cuda_header(&lib, "probed.h", &none), None);
        std::fs::write(wheel.join("probed.h"), "").expect("a file");
        let found = cuda_header(&lib, "probed.h", &none).expect("next to libtorch");
        assert!(found.ends_with("nvidia/some/include"), "{}", found.display());
        let home = folder.join("named").display().to_string();
        let env = |name: &str| (name == "PROBED_HOME").then(|| home.clone());
        // A folder without the header hides nothing.
        assert_eq!(cuda_header(&lib, "probed.h", &env), Some(found));
        std::fs::write(named.join("probed.h"), "").expect("a file");
        assert_eq!(cuda_header(&lib, "probed.h", &env), Some(named));
        let _ = std::fs::remove_dir_all(folder);
    }
}
