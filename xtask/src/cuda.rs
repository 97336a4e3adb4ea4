//! Chooses the nvcc and checks that it suits libtorch.

use crate::libtorch::{Env, Libtorch, Rule};
use crate::probe::{self, Nvcc};
use crate::repo::{Repo, is_ours};
use crate::report::trouble;
use anyhow::{Result, bail};
use std::path::PathBuf;

/// Whether the CUDA kernels are compiled.
pub enum Cuda {
    /// The kernels are compiled, with this nvcc.
    On(Nvcc),
    /// The kernels are left out, for this reason.
    Off(String),
}

/// The result of the search for an nvcc, made exactly as build scripts make it.
pub struct Search {
    /// The CUDA major version of libtorch; `None` for a CPU build.
    pub libtorch_major: Option<u32>,
    /// Where an nvcc was looked for: the reason (such as a variable's name) and the path.
    pub tried: Vec<(String, PathBuf)>,
    /// The first nvcc that works.
    pub found: Option<Nvcc>,
    /// Whether this repository's own CUDA_HOME was ignored because it does not suit a user's
    /// libtorch.
    pub own_passed_over: bool,
}

impl Search {
    /// Looks for an nvcc.
    pub fn run(libtorch: &Libtorch, env: Env, repo: &Repo) -> Self {
        let libtorch_major = probe::libtorch_cuda_major(&libtorch.lib);
        let own_passed_over = passes_over_own(libtorch, libtorch_major, env, repo);
        let env = |name: &str| match name {
            "CUDA_HOME" if own_passed_over => None,
            // The value that cargo will set, also when xtask was started without cargo.
            "CUDA_HOME" if is_ours(env(name).as_deref(), &repo.cuda()) => {
                repo.cuda().into_os_string().into_string().ok()
            }
            _ => env(name)
                .and_then(|value| value.into_string().ok())
                .filter(|value| !value.is_empty()),
        };
        let tried = probe::nvcc_candidates(&libtorch.lib, &env);
        let found = probe::find_nvcc(&libtorch.lib, &env);
        Search { libtorch_major, tried, found, own_passed_over }
    }

    /// Decides whether the CUDA kernels are compiled. An error when nvcc and libtorch do not fit
    /// together.
    pub fn decide(self, wish: Option<&str>) -> Result<Cuda> {
        match wish.unwrap_or_default() {
            "" | "1" => {}
            "0" => return Ok(Cuda::Off("TCH_EXTENSION_CUDA=0".to_string())),
            other => bail!(trouble(
                format_args!("TCH_EXTENSION_CUDA={other} means nothing"),
                "write 1 (CUDA must be there) or 0 (leave it out), or unset it",
            )),
        }
        match (self.libtorch_major, self.found, wish == Some("1")) {
            (Some(major), Some(nvcc), _) if nvcc.version.major == major => Ok(Cuda::On(nvcc)),
            (Some(major), Some(nvcc), _) => Err(mismatch(&nvcc, major)),
            (None, _, false) => Ok(Cuda::Off("this libtorch is a CPU build".to_string())),
            (None, _, true) => Err(trouble(
                "TCH_EXTENSION_CUDA=1, but this libtorch is a CPU build",
                "unset LIBTORCH: then this repository installs one with CUDA; or unset TCH_EXTENSION_CUDA",
            )),
            (Some(major), None, false) => Ok(Cuda::Off(format!(
                "no nvcc was found; to have them, point CUDA_HOME to a CUDA {major} toolkit"
            ))),
            (Some(major), None, true) => Err(absent(&self.tried, major)),
        }
    }
}

/// Whether this repository's CUDA_HOME must be ignored. Cargo sets that value, not the user, and it
/// belongs to this repository's libtorch. With a libtorch for another CUDA version it must neither
/// hide a toolkit that fits nor be an error.
fn passes_over_own(libtorch: &Libtorch, major: Option<u32>, env: Env, repo: &Repo) -> bool {
    if libtorch.rule == Rule::Own || !is_ours(env("CUDA_HOME").as_deref(), &repo.cuda()) {
        return false;
    }
    let own = probe::nvcc_version(&repo.cuda().join("bin/nvcc"));
    own.is_some_and(|own| Some(own.major) != major)
}

fn mismatch(nvcc: &Nvcc, major: u32) -> anyhow::Error {
    let way_out = match nvcc.source.as_str() {
        "NVCC" | "CUDA_HOME" | "CUDA_PATH" => {
            format!("unset {0}, or point it to one of CUDA {major}", nvcc.source)
        }
        _ => format!("point CUDA_HOME to a CUDA {major} toolkit"),
    };
    trouble(
        format_args!(
            "nvcc and libtorch are of different CUDA versions: {} (found by {}) is CUDA {}, and libtorch \
             was built for CUDA {major}",
            nvcc.path.display(),
            nvcc.source,
            nvcc.version
        ),
        format_args!("{way_out}; or set TCH_EXTENSION_CUDA=0 to build without CUDA"),
    )
}

fn absent(tried: &[(String, PathBuf)], major: u32) -> anyhow::Error {
    trouble(
        format_args!("TCH_EXTENSION_CUDA=1, but there is no nvcc; looked at {}", describe(tried)),
        format_args!(
            "point CUDA_HOME to a CUDA {major} toolkit, or unset TCH_EXTENSION_CUDA to build without CUDA"
        ),
    )
}

/// The places in one line; the many folders of PATH appear as one word.
pub fn describe(tried: &[(String, PathBuf)]) -> String {
    let mut places: Vec<String> = Vec::new();
    for (source, path) in tried {
        let place = if source == "PATH" {
            "PATH".to_string()
        } else {
            format!("{} ({source})", path.display())
        };
        if places.last() != Some(&place) {
            places.push(place);
        }
    }
    places.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::CudaVersion;

    fn search(libtorch_major: Option<u32>, nvcc: Option<(u32, &str)>) -> Search {
        let found = nvcc.map(|(major, source)| Nvcc {
            path: "/cuda/bin/nvcc".into(),
            version: CudaVersion { major, minor: 4 },
            source: source.to_string(),
        });
        let tried = ["/a", "/b"].map(|path| ("PATH".to_string(), PathBuf::from(path))).into();
        Search { libtorch_major, tried, found, own_passed_over: false }
    }

    fn message(search: Search, wish: Option<&str>) -> String {
        search.decide(wish).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_mismatch_names_both_versions_and_the_variable_at_fault() {
        let message = message(search(Some(13), Some((12, "CUDA_HOME"))), None);
        for part in ["CUDA 12.4", "built for CUDA 13", "unset CUDA_HOME", "TCH_EXTENSION_CUDA=0"] {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    }

    #[test]
    fn cuda_is_on_when_versions_agree_and_off_on_demand() {
        assert!(matches!(search(Some(13), Some((13, "PATH"))).decide(None), Ok(Cuda::On(_))));
        assert!(matches!(search(Some(13), Some((12, "PATH"))).decide(Some("0")), Ok(Cuda::Off(_))));
        assert!(matches!(search(Some(13), None).decide(None), Ok(Cuda::Off(_))));
        assert!(matches!(search(None, Some((12, "PATH"))).decide(None), Ok(Cuda::Off(_))));
    }

    #[test]
    fn cuda_that_must_be_there_is_missed() {
        assert!(
            message(search(Some(13), None), Some("1")).contains("there is no nvcc; looked at PATH")
        );
        assert!(message(search(None, None), Some("1")).contains("CPU build"));
        assert!(message(search(Some(13), None), Some("yes")).contains("TCH_EXTENSION_CUDA=yes"));
    }
}
