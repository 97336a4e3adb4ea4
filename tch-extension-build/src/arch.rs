//! `TORCH_CUDA_ARCH_LIST` in PyTorch's grammar: `8.0;8.6 9.0a+PTX`, `Hopper`, `native`.

use anyhow::{Context, Result, bail};

/// What is built when no list is given and no GPU is visible: one binary for each of the generations that
/// CUDA 13 supports and data centres run, and PTX that newer GPUs compile when the program starts.
pub const DEFAULT_ARCHS: &str = "7.5;8.0;9.0+PTX";

/// PyTorch's names for groups of architectures.
const NAMES: &[(&str, &str)] = &[
    ("Volta", "7.0+PTX"),
    ("Turing", "7.5+PTX"),
    ("Ampere", "8.0;8.6+PTX"),
    ("Ada", "8.9+PTX"),
    ("Hopper", "9.0+PTX"),
    ("Blackwell", "10.0;10.3;12.0;12.1+PTX"),
];

/// One architecture to compile for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arch {
    /// Compute capability without its dot, with its suffix: `90`, `90a`, `120f`.
    pub number: String,
    /// Also embed PTX, for GPUs that come later. An `a` target's PTX is not forward compatible.
    pub ptx: bool,
}

impl Arch {
    /// nvcc's flags for this architecture.
    pub fn flags(&self) -> Vec<String> {
        let number = &self.number;
        let mut flags = vec![format!("-gencode=arch=compute_{number},code=sm_{number}")];
        if self.ptx {
            flags.push(format!("-gencode=arch=compute_{number},code=compute_{number}"));
        }
        flags
    }
}

/// Reads a list; `native` asks `visible_gpus` (compute capabilities such as `9.0`).
pub fn parse(list: &str, visible_gpus: &dyn Fn() -> Vec<String>) -> Result<Vec<Arch>> {
    let mut archs = Vec::new();
    for item in list.split([';', ' ', ',']).map(str::trim).filter(|item| !item.is_empty()) {
        for arch in parse_item(item, visible_gpus)? {
            if !archs.contains(&arch) {
                archs.push(arch);
            }
        }
    }
    if archs.is_empty() {
        bail!("TORCH_CUDA_ARCH_LIST names no architecture; unset it, or write for example `8.0;9.0+PTX`");
    }
    Ok(archs)
}

fn parse_item(item: &str, visible_gpus: &dyn Fn() -> Vec<String>) -> Result<Vec<Arch>> {
    if item == "native" {
        let gpus = visible_gpus();
        if gpus.is_empty() {
            bail!(
                "TORCH_CUDA_ARCH_LIST=native, but nvidia-smi shows no GPU; name the architectures, such as `9.0+PTX`"
            );
        }
        return gpus.iter().map(|gpu| parse_number(gpu)).collect();
    }
    let (name, ptx) = match item.strip_suffix("+PTX") {
        Some(name) => (name, true),
        None => (item, false),
    };
    if let Some((_, members)) = NAMES.iter().find(|(known, _)| *known == name) {
        return parse(members, visible_gpus);
    }
    let mut arch = parse_number(name)?;
    arch.ptx = ptx;
    Ok(vec![arch])
}

fn parse_number(text: &str) -> Result<Arch> {
    let unknown = || {
        let names: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
        format!(
            "TORCH_CUDA_ARCH_LIST: `{text}` is no architecture; write numbers such as 8.0, 9.0a or 9.0+PTX, \
             `native`, or one of {}",
            names.join(", ")
        )
    };
    let (major, minor) = text.split_once('.').with_context(unknown)?;
    let digits = minor.trim_end_matches(['a', 'f']);
    let suffix = &minor[digits.len()..];
    let valid =
        |part: &str| !part.is_empty() && part.len() <= 2 && part.bytes().all(|byte| byte.is_ascii_digit());
    if !valid(major) || !valid(digits) || suffix.len() > 1 {
        bail!(unknown());
    }
    Ok(Arch { number: format!("{major}{minor}"), ptx: false })
}

/// Compute capabilities of the GPUs that nvidia-smi lists.
pub fn visible_gpus() -> Vec<String> {
    let output = std::process::Command::new("nvidia-smi")
        .args(["--query-gpu=compute_cap", "--format=csv,noheader"])
        .output();
    let Ok(output) = output else { return Vec::new() };
    if !output.status.success() {
        return Vec::new();
    }
    String::from_utf8_lossy(&output.stdout).lines().map(|line| line.trim().to_string()).collect()
}

/// The architectures to build: the list if there is one, else the GPUs of this machine (the newest with
/// PTX), else [`DEFAULT_ARCHS`].
pub fn choose(list: Option<&str>, visible_gpus: &dyn Fn() -> Vec<String>) -> Result<Vec<Arch>> {
    if let Some(list) = list.filter(|list| !list.trim().is_empty()) {
        return parse(list, visible_gpus);
    }
    let mut gpus: Vec<_> = visible_gpus().iter().filter_map(|gpu| parse_number(gpu).ok()).collect();
    gpus.sort_by_key(|arch| arch.number.parse::<u32>().unwrap_or(0));
    gpus.dedup();
    match gpus.last_mut() {
        Some(newest) => {
            newest.ptx = true;
            Ok(gpus)
        }
        None => parse(DEFAULT_ARCHS, visible_gpus),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(list: &str) -> Vec<String> {
        let no_gpus = Vec::new;
        parse(list, &no_gpus).expect("a valid list").iter().flat_map(Arch::flags).collect()
    }

    #[test]
    fn numbers_suffixes_and_ptx() {
        assert_eq!(
            flags("8.0;9.0a"),
            ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a"]
        );
        assert_eq!(
            flags("9.0+PTX"),
            ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_90,code=compute_90"]
        );
        assert_eq!(flags("8.0 8.0;8.0").len(), 1, "an architecture named twice is built once");
    }

    #[test]
    fn names() {
        assert_eq!(flags("Hopper"), flags("9.0+PTX"));
        assert_eq!(flags("Ampere"), flags("8.0;8.6+PTX"));
    }

    #[test]
    fn nonsense_is_refused_with_the_way_out() {
        let no_gpus = Vec::new;
        for list in ["Hooper", "90", "9.", "9.0b", "9.0aa", "x.y", ";", "native"] {
            let error = parse(list, &no_gpus).expect_err(list).to_string();
            assert!(error.contains("TORCH_CUDA_ARCH_LIST"), "{list}: {error}");
        }
    }

    #[test]
    fn without_a_list_the_machine_decides() {
        let two_gpus = || vec!["9.0".to_string(), "8.0".to_string()];
        let archs = choose(None, &two_gpus).expect("two GPUs");
        assert_eq!(archs.iter().flat_map(Arch::flags).collect::<Vec<_>>(), flags("8.0;9.0+PTX"));
        let none = choose(None, &Vec::new).expect("the default list");
        assert!(none.last().is_some_and(|arch| arch.ptx), "the default must reach GPUs that come later");
    }
}
