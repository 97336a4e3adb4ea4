//! The build variants of a kernel, which the names of their folders describe, and those that fit a
//! process.

use std::cmp::Reverse;

/// The first two numbers of a version.
pub(super) type Version = (u32, u32);

/// What decides which variants fit a process.
pub(super) struct Process {
    pub torch: Version,
    /// `None` if modules of tvm-ffi cannot be loaded.
    pub tvm_ffi: Option<Version>,
    /// `None` for kernels of the CPU.
    pub cuda: Option<Version>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Framework {
    /// Built for this version of libtorch's stable ABI, and for all later ones.
    StableAbi(Version),
    Torch(Version),
    TvmFfi(Version),
}

/// The lower, the better: frameworks in the order above, later versions of the stable ABI, names
/// without the C++ ABI, later versions of CUDA.
type Rank = (u8, Reverse<Version>, bool, Reverse<u32>);

/// Names of variants, each with what belongs to it.
type Named<T> = Vec<(String, T)>;

const PLATFORM: &str = "x86_64-linux";

/// The variants that fit, the best first, and why each of the others does not.
pub(super) fn choose(names: &[String], process: &Process) -> (Named<Framework>, Named<String>) {
    let (mut fitting, mut others) = (Vec::new(), Vec::new());
    for name in names {
        match fit(name, process) {
            Ok((framework, rank)) => fitting.push((rank, name.clone(), framework)),
            Err(reason) => others.push((name.clone(), reason)),
        }
    }
    fitting.sort_by_key(|(rank, ..)| *rank);
    (fitting.into_iter().map(|(_, name, framework)| (name, framework)).collect(), others)
}

/// Whether a folder of this name is meant to be a variant.
pub(super) fn is_variant(name: &str) -> bool {
    name.starts_with("torch") || name.starts_with("tvm-ffi")
}

fn fit(name: &str, process: &Process) -> Result<(Framework, Rank), String> {
    let no_name = || "its name is not that of a variant".to_string();
    let (framework, cxx11, rest) = match framework(name) {
        Some(parts) => parts,
        None if name.starts_with("torch-") && !name.starts_with("torch-stable-abi") => {
            return Err("it is without a library, for Python only".to_string());
        }
        None => return Err(no_name()),
    };
    let (backend, platform) = rest.split_once('-').ok_or_else(no_name)?;
    if platform != PLATFORM {
        return Err(format!("it is for {platform}, and this is {PLATFORM}"));
    }
    if cxx11 == Some(false) {
        return Err("it has the C++ ABI before C++11, and this libtorch the new one".to_string());
    }
    let (order, abi) = order(framework, process)?;
    let minor = cuda_minor(backend, process.cuda)?;
    Ok((framework, (order, Reverse(abi), cxx11.is_some(), Reverse(minor))))
}

/// The first two parts of a rank.
fn order(framework: Framework, process: &Process) -> Result<(u8, Version), String> {
    let none = (0, 0);
    let (asked, version, own) = match framework {
        Framework::StableAbi(version) if version <= process.torch => return Ok((0, version)),
        Framework::Torch(version) if version == process.torch => return Ok((1, none)),
        Framework::TvmFfi(version) if Some(version) == process.tvm_ffi => return Ok((2, none)),
        Framework::StableAbi(version) => ("at least libtorch", version, Some(process.torch)),
        Framework::Torch(version) => ("libtorch", version, Some(process.torch)),
        Framework::TvmFfi(version) => ("tvm-ffi", version, process.tvm_ffi),
    };
    let own = own.map_or("there is none".to_string(), |own| format!("this is {}", text(own)));
    Err(format!("it is for {asked} {}, and {own}", text(version)))
}

/// The second number of the variant's CUDA, and 0 for the CPU.
fn cuda_minor(backend: &str, own: Option<Version>) -> Result<u32, String> {
    match (cuda(backend), own) {
        (Some((major, minor)), Some(own)) if major == own.0 && minor <= own.1 => Ok(minor),
        (Some(version), Some(own)) => {
            Err(format!("it is for CUDA {}, and this is {}", text(version), text(own)))
        }
        (None, None) if backend == "cpu" => Ok(0),
        (_, None) => Err(format!("it is for {backend}, not for the CPU")),
        (None, _) => Err(format!("it is for {backend}, not for CUDA")),
    }
}

/// The framework, whether a variant for libtorch says that it has the C++ ABI of C++11, and the rest.
fn framework(name: &str) -> Option<(Framework, Option<bool>, &str)> {
    let numbered = |prefix: &str| {
        let (digits, rest) = name.strip_prefix(prefix)?.split_once('-')?;
        Some((version(digits, 1)?, rest))
    };
    if let Some((version, rest)) = numbered("torch-stable-abi") {
        return Some((Framework::StableAbi(version), None, rest));
    }
    if let Some((version, rest)) = numbered("tvm-ffi") {
        return Some((Framework::TvmFfi(version), None, rest));
    }
    let (version, rest) = numbered("torch")?;
    let (cxx11, rest) = match rest.split_once('-') {
        Some(("cxx11", rest)) => (Some(true), rest),
        Some(("cxx98", rest)) => (Some(false), rest),
        _ => (None, rest),
    };
    Some((Framework::Torch(version), cxx11, rest))
}

/// `cu130` is CUDA 13.0.
fn cuda(backend: &str) -> Option<Version> {
    let digits = backend.strip_prefix("cu")?;
    version(digits, digits.len().checked_sub(1)?)
}

/// Two numbers without a dot, the first of which has so many digits.
fn version(digits: &str, first: usize) -> Option<Version> {
    let (major, minor) = digits.split_at_checked(first)?;
    let number = |digits: &str| {
        let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
        is_number.then(|| digits.parse().ok()).flatten()
    };
    Some((number(major)?, number(minor)?))
}

fn text((major, minor): Version) -> String {
    format!("{major}.{minor}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(torch: &str, tvm_ffi: &str, cuda: &str) -> Process {
        let version = |text: &str| {
            let (major, minor) = text.split_once('.')?;
            Some((major.parse().unwrap(), minor.parse().unwrap()))
        };
        Process { torch: version(torch).unwrap(), tvm_ffi: version(tvm_ffi), cuda: version(cuda) }
    }

    #[test]
    fn the_choice_is_that_of_the_python_package() {
        let root = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), std::path::PathBuf::from);
        let table = std::fs::read_to_string(root.join("tests/load_kernel/choices.txt")).unwrap();
        let mut lines = table.lines().skip(1);
        let names: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with('#')).collect();
        let mut cases = 0;
        for line in lines {
            let parts: Vec<&str> = line.split('|').collect();
            let [system, folders, taken] = parts[..] else { panic!("{line}") };
            let system: Vec<&str> = system.split_whitespace().collect();
            let named = |indices: &str| -> Vec<String> {
                let indices = indices.split_whitespace();
                indices.map(|index| names[index.parse::<usize>().unwrap()].to_string()).collect()
            };
            let (folders, taken) = (named(folders), named(taken));
            let (fitting, others) = choose(&folders, &process(system[0], system[1], system[2]));
            let fitting: Vec<String> = fitting.into_iter().map(|(name, _)| name).collect();
            assert_eq!(fitting, taken, "{line}");
            assert_eq!(fitting.len() + others.len(), folders.len(), "{line}");
            cases += 1;
        }
        assert!(cases >= 600, "{cases}");
    }

    #[test]
    fn every_variant_that_is_not_taken_has_a_reason() {
        for (name, reason) in [
            ("torch213-cxx11-cu130-x86_64-linux", "it is for libtorch 2.13, and this is 2.11"),
            (
                "torch-stable-abi213-cpu-x86_64-linux",
                "it is for at least libtorch 2.13, and this is 2.11",
            ),
            ("tvm-ffi02-cu130-x86_64-linux", "it is for tvm-ffi 0.2, and this is 0.1"),
            ("torch211-cxx98-cu130-x86_64-linux", "it has the C++ ABI before C++11"),
            ("torch211-cu132-x86_64-linux", "it is for CUDA 13.2, and this is 13.0"),
            ("torch211-cu126-x86_64-linux", "it is for CUDA 12.6, and this is 13.0"),
            ("torch211-cxx11-cpu-x86_64-linux", "it is for cpu, not for CUDA"),
            ("torch211-rocm71-x86_64-linux", "it is for rocm71, not for CUDA"),
            ("torch211-xpu20253-x86_64-linux", "it is for xpu20253, not for CUDA"),
            ("torch211-metal-aarch64-darwin", "it is for aarch64-darwin, and this is x86_64-linux"),
            ("torch-universal", "it is without a library, for Python only"),
            ("torch211", "its name is not that of a variant"),
            ("torch299999999999-cpu-x86_64-linux", "its name is not that of a variant"),
        ] {
            let (fitting, others) = choose(&[name.to_string()], &process("2.11", "0.1", "13.0"));
            assert!(fitting.is_empty() && others[0].1.starts_with(reason), "{name}: {others:?}");
        }
    }
}
