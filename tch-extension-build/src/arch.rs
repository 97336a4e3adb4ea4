//! Parses `TORCH_CUDA_ARCH_LIST` in PyTorch's grammar: `8.0;8.6 9.0a+PTX`, `Hopper`, `native`.

use anyhow::{Context, Result, bail};

/// The architectures to build for when no list is given and no GPU is visible: one binary for each
/// generation that CUDA 13 supports and data centres run, and PTX, which newer GPUs compile when
/// the program starts.
pub const DEFAULT_ARCHS: &str = "7.5;8.0;9.0+PTX";

/// The architectures that nvcc 13.0 compiles for, as major · 10 + minor.
pub const CUDA_13_0: &[u32] = &[75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

/// PyTorch's names for groups of architectures (`torch/utils/cpp_extension.py`). CUDA 13 no longer
/// supports the first ones.
const NAMES: &[(&str, &str)] = &[
    ("Kepler", "3.5+PTX"),
    ("Kepler+Tesla", "3.7"),
    ("Maxwell", "5.0;5.2+PTX"),
    ("Maxwell+Tegra", "5.3"),
    ("Pascal", "6.0;6.1+PTX"),
    ("Volta", "7.0+PTX"),
    ("Volta+Tegra", "7.2"),
    ("Turing", "7.5+PTX"),
    ("Ampere", "8.0;8.6+PTX"),
    ("Ampere+Tegra", "8.7"),
    ("Ada", "8.9+PTX"),
    ("Hopper", "9.0+PTX"),
    ("Blackwell", "10.0;10.3;12.0;12.1+PTX"),
    ("Blackwell+Tegra", "11.0"),
];

/// One architecture to compile for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arch {
    /// The compute capability without its dot, with its suffix: `90`, `90a`, `120f`.
    pub number: String,
    /// Whether to embed PTX, too, for GPUs that come later. The PTX of an `a` target is not forward
    /// compatible.
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

/// nvcc's flags for all of these architectures. With `for_hopper`, `9.0a` is added if 9.0 is among
/// them.
pub fn flags_of(archs: &[Arch], for_hopper: bool) -> Vec<String> {
    let mut flags: Vec<String> = archs.iter().flat_map(Arch::flags).collect();
    let has = |number: &str| archs.iter().any(|arch| arch.number == number);
    if for_hopper && has("90") && !has("90a") {
        flags.extend(Arch { number: "90a".to_string(), ptx: false }.flags());
    }
    flags
}

/// A list of architectures, where it comes from, and which architectures exist.
pub struct Choice<'a> {
    /// The list as it was written, such as `8.0;9.0+PTX`.
    pub list: &'a str,
    /// The name of the variable or function that the list comes from, for messages.
    pub from: &'a str,
    /// The architectures that nvcc compiles for, such as [`CUDA_13_0`].
    pub supported: &'a [u32],
}

impl Choice<'_> {
    /// Parses the list. For `native`, it asks `visible_gpus` for compute capabilities such as
    /// `9.0`.
    pub fn parse(&self, visible_gpus: &dyn Fn() -> Vec<String>) -> Result<Vec<Arch>> {
        let mut archs: Vec<Arch> = Vec::new();
        for item in self.list.split([';', ' ', ',']).map(str::trim).filter(|item| !item.is_empty())
        {
            for arch in self.parse_item(item, visible_gpus)? {
                match archs.iter_mut().find(|known| known.number == arch.number) {
                    Some(known) => known.ptx |= arch.ptx,
                    None => archs.push(arch),
                }
            }
        }
        if archs.is_empty() {
            bail!("{} names no architecture; {}", self.from, self.way_out());
        }
        Ok(archs)
    }

    fn parse_item(&self, item: &str, visible_gpus: &dyn Fn() -> Vec<String>) -> Result<Vec<Arch>> {
        if item == "native" {
            return of_gpus(visible_gpus, self.supported).with_context(|| {
                format!(
                    "{}: `native`, but nvidia-smi shows no GPU; name the architectures, such as `9.0+PTX`",
                    self.from
                )
            });
        }
        let (name, ptx) = match item.strip_suffix("+PTX") {
            Some(name) => (name, true),
            None => (item, false),
        };
        let members =
            NAMES.iter().find(|(known, _)| *known == name).map_or(name, |(_, members)| *members);
        let mut archs = Vec::new();
        for member in members.split(';') {
            let (number, member_ptx) = match member.strip_suffix("+PTX") {
                Some(number) => (number, true),
                None => (member, false),
            };
            let number = self.parse_number(number).with_context(|| self.refusal(item))?;
            archs.push(Arch { number, ptx: member_ptx });
        }
        if let (true, Some(newest)) = (ptx, archs.last_mut()) {
            newest.ptx = true;
        }
        Ok(archs)
    }

    /// Parses `9.0a` into `90a`.
    fn parse_number(&self, text: &str) -> Option<String> {
        let (major, minor) = text.split_once('.')?;
        let digits = minor.trim_end_matches(['a', 'f']);
        let whole: u32 = major.parse().ok().filter(|_| !major.starts_with(['+', '0']))?;
        let part: u32 = digits.parse().ok().filter(|_| digits.len() == 1)?;
        let number = whole.checked_mul(10)? + part;
        let oldest = match &minor[digits.len()..] {
            "" => 0,
            "a" => 90,
            "f" => 100,
            _ => return None,
        };
        (self.supported.contains(&number) && number >= oldest).then(|| format!("{major}{minor}"))
    }

    fn refusal(&self, item: &str) -> String {
        format!(
            "{}: `{item}` is no architecture that this nvcc compiles for; {}",
            self.from,
            self.way_out()
        )
    }

    /// The part of an error message that lists everything that is allowed.
    fn way_out(&self) -> String {
        let numbers: Vec<_> = self
            .supported
            .iter()
            .map(|number| format!("{}.{}", number / 10, number % 10))
            .collect();
        let names: Vec<_> = NAMES
            .iter()
            .filter(|(_, members)| {
                let first = members.split([';', '+']).next().unwrap_or_default();
                self.parse_number(first).is_some()
            })
            .map(|(name, _)| *name)
            .collect();
        format!(
            "write a list such as `8.0;9.0a;12.0+PTX` out of {} (from 9.0 on also with the suffix a, from 10.0 on also \
             with f, each also with +PTX), the names {}, or `native`",
            numbers.join(", "),
            names.join(", ")
        )
    }
}

/// The architectures of the machine's GPUs, the newest of them with PTX. A GPU that is newer than
/// nvcc gets the newest architecture that nvcc knows.
fn of_gpus(visible_gpus: &dyn Fn() -> Vec<String>, supported: &[u32]) -> Option<Vec<Arch>> {
    let newest = supported.iter().max()?;
    let number = |gpu: String| -> Option<u32> {
        let (major, minor) = gpu.split_once('.')?;
        Some(
            (major.parse::<u32>().ok()?.checked_mul(10)? + minor.parse::<u32>().ok()?).min(*newest),
        )
    };
    let mut numbers: Vec<_> = visible_gpus().into_iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut archs: Vec<_> =
        numbers.iter().map(|number| Arch { number: number.to_string(), ptx: false }).collect();
    archs.last_mut()?.ptx = true;
    Some(archs)
}

/// The compute capabilities of the GPUs that nvidia-smi lists.
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

/// The architectures to build for when the user names none: those of this machine's GPUs, or else
/// [`DEFAULT_ARCHS`].
pub fn default_archs(
    supported: &[u32],
    visible_gpus: &dyn Fn() -> Vec<String>,
) -> Result<Vec<Arch>> {
    if let Some(archs) = of_gpus(visible_gpus, supported) {
        return Ok(archs);
    }
    Choice { list: DEFAULT_ARCHS, from: "the default list", supported }.parse(visible_gpus)
}

/// Parses the output of `nvcc --list-gpu-arch`.
pub fn parse_supported(text: &str) -> Vec<u32> {
    let mut numbers: Vec<_> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("compute_")?.parse().ok())
        .collect();
    // nvcc itself orders them by family.
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str, gpus: &[&str]) -> Result<Vec<Arch>> {
        let gpus = || gpus.iter().map(|gpu| gpu.to_string()).collect();
        Choice { list, from: "TORCH_CUDA_ARCH_LIST", supported: CUDA_13_0 }.parse(&gpus)
    }

    fn flags(list: &str) -> Vec<String> {
        parse(list, &[]).expect("a valid list").iter().flat_map(Arch::flags).collect()
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
        assert_eq!(flags("10.0f 12.0a")[0], "-gencode=arch=compute_100f,code=sm_100f");
        assert_eq!(flags("8.0 8.0;8.0").len(), 1, "an architecture named twice is built once");
        assert_eq!(flags("9.0;9.0+PTX"), flags("9.0+PTX"));
        assert_eq!(flags(" 8.0;; 9.0 "), flags("8.0;9.0"));
    }

    #[test]
    fn names() {
        for (name, members) in [
            ("Turing", "7.5+PTX"),
            ("Ampere", "8.0;8.6+PTX"),
            ("Ampere+Tegra", "8.7"),
            ("Ada", "8.9+PTX"),
            ("Hopper", "9.0+PTX"),
            ("Hopper+PTX", "9.0+PTX"),
            ("Blackwell", "10.0;10.3;12.0;12.1+PTX"),
            ("Blackwell+Tegra", "11.0"),
        ] {
            assert_eq!(flags(name), flags(members), "{name}");
        }
        assert_eq!(flags("Ampere;Hopper"), flags("8.0;8.6+PTX;9.0+PTX"));
    }

    /// The message contains the whole list, so that nobody has to guess twice.
    #[test]
    fn nonsense_is_refused_with_all_that_is_allowed() {
        for list in [
            "Hooper",
            "hopper",
            "90",
            "9.",
            "9.0b",
            "9.0aa",
            "9.0af",
            "x.y",
            ";",
            "8.0a",
            "9.0f",
            "9.1",
            "+9.0",
            "09.0",
            "9.0+ptx",
            "4294967295.0",
            "Volta",
            "3.5",
            "All",
        ] {
            let error = format!("{:#}", parse(list, &[]).expect_err(list));
            for part in
                ["TORCH_CUDA_ARCH_LIST", "7.5, 8.0", "12.1", "+PTX", "native", "Turing, Ampere"]
            {
                assert!(error.contains(part), "{list}: {part} is not in {error}");
            }
            assert!(!error.contains("Kepler"), "not with CUDA 13: {error}");
        }
        let error = format!("{:#}", parse("native", &[]).expect_err("no GPU"));
        assert!(error.contains("nvidia-smi shows no GPU"), "{error}");
    }

    #[test]
    fn hopper_s_own_instructions_where_the_list_has_hopper() {
        let flags = |list, for_hopper| flags_of(&parse(list, &[]).expect("a list"), for_hopper);
        let both = flags("8.0;9.0+PTX", true);
        assert_eq!(both[..3], flags("8.0;9.0+PTX", false));
        assert_eq!(both[3..], ["-gencode=arch=compute_90a,code=sm_90a"]);
        for list in ["8.0", "9.0a", "9.0;9.0a", "10.0+PTX"] {
            assert_eq!(flags(list, true), flags(list, false), "{list}");
        }
    }

    #[test]
    fn native_is_what_the_machine_has() {
        let native = |gpus: &[&str]| parse("native", gpus).expect("GPUs");
        assert_eq!(native(&["9.0", "8.0", "9.0"]), parse("8.0;9.0+PTX", &[]).expect("a list"));
        assert_eq!(
            native(&["13.7"]),
            parse("12.1+PTX", &[]).expect("a list"),
            "a GPU newer than nvcc"
        );
    }

    #[test]
    fn without_a_list_the_machine_decides() {
        let two_gpus = || vec!["9.0".to_string(), "8.0".to_string()];
        let archs = default_archs(CUDA_13_0, &two_gpus).expect("two GPUs");
        assert_eq!(archs.iter().flat_map(Arch::flags).collect::<Vec<_>>(), flags("8.0;9.0+PTX"));
        let none = default_archs(CUDA_13_0, &Vec::new).expect("the default list");
        assert!(
            none.last().is_some_and(|arch| arch.ptx),
            "the default must reach GPUs that come later"
        );
    }

    #[test]
    fn reads_what_nvcc_lists() {
        assert_eq!(parse_supported("compute_75\ncompute_110\ncompute_103\n"), [75, 103, 110]);
    }
}
