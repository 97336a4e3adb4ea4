//! What a kernel library is for: it says so in a section, which is compared with what is wanted.

use crate::arch::{Arch, CUDA_13_0, Choice};
use crate::environment::Environment;
use anyhow::{Context, Result};
use object::elf::{DT_NEEDED, DT_SONAME};
use object::read::elf::{Dyn as _, ElfFile64};
use object::{Endianness, Object as _, ObjectSection as _};
use std::collections::BTreeSet;
use std::path::Path;

/// The section with the facts.
pub const SECTION: &str = ".tch_extension";

/// What a library is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The version of tch-extension.
    pub version: String,
    /// The version of its symbols.
    pub node: String,
    /// The major version of CUDA.
    pub cuda: u32,
    pub archs: Vec<Arch>,
    /// The folders of its sources, one an operator or a family.
    pub families: BTreeSet<String>,
    /// What nvcc's variables added to its flags, in quotation marks and in one line.
    pub flags: String,
}

impl Facts {
    pub fn text(&self) -> String {
        let families: Vec<&str> = self.families.iter().map(String::as_str).collect();
        format!(
            "tch-extension's kernels\nversion {}\nnode {}\ncuda {}\narchs {}\nfamilies {}\nflags {}\n",
            self.version,
            self.node,
            self.cuda,
            list(&self.archs),
            families.join(" "),
            self.flags,
        )
    }

    fn parse(text: &str) -> Option<Self> {
        let value =
            |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        let arch = |word: &str| {
            let (number, ptx) =
                word.strip_suffix("+PTX").map_or((word, false), |number| (number, true));
            Arch { number: number.replace('.', ""), ptx }
        };
        Some(Facts {
            version: value("version")?.to_string(),
            node: value("node")?.to_string(),
            cuda: value("cuda")?.parse().ok()?,
            archs: value("archs")?.split_whitespace().map(arch).collect(),
            families: value("families")?.split_whitespace().map(str::to_string).collect(),
            flags: value("flags")?.to_string(),
        })
    }

    /// The first difference that makes a library useless for what is wanted.
    fn refusal(&self, wanted: &Facts) -> Option<String> {
        if self.version != wanted.version {
            return Some(format!(
                "belongs to tch-extension {}, this is {}; install the matching wheel",
                self.version, wanted.version
            ));
        }
        if self.node != wanted.node {
            return Some(format!(
                "has functions with other parameters than this tch-extension {}; install the matching wheel",
                wanted.version
            ));
        }
        if self.cuda != wanted.cuda {
            return Some(format!(
                "is for CUDA {}, and libtorch has CUDA {}",
                self.cuda, wanted.cuda
            ));
        }
        if let Some(family) = wanted.families.difference(&self.families).next() {
            return Some(format!("has no kernels of `{family}`"));
        }
        if self.flags != wanted.flags {
            return Some(format!(
                "was compiled with {} in NVCC_APPEND_FLAGS or NVCC_PREPEND_FLAGS, which are {} now",
                self.flags, wanted.flags
            ));
        }
        None
    }

    /// The first architecture for which a library has no kernels.
    pub fn lack(&self, asked: &Asked) -> Option<String> {
        let arch = asked.archs.iter().find(|arch| !self.serves(arch))?;
        let who = if asked.are_gpus { "this machine's GPU is" } else { "you ask for" };
        Some(format!("has kernels for {}, and {who} {}", list(&self.archs), named(arch)))
    }

    /// Whether kernels for this architecture are in the library.
    fn serves(&self, asked: &Arch) -> bool {
        let number =
            |arch: &Arch| arch.number.trim_end_matches(['a', 'f']).parse::<u32>().unwrap_or(0);
        // Newer GPUs compile PTX. That for `9.0a` or `10.0f` is for no newer ones.
        let has_ptx = |own: &Arch| own.ptx && !own.number.ends_with(['a', 'f']);
        let runs = |own: &Arch| {
            let (own_number, asked_number) = (number(own), number(asked));
            let is_older = own_number <= asked_number;
            // A binary runs on GPUs of its generation that are not older; one for `9.0a` on 9.0 only.
            let is_near = own_number / 10 == asked_number / 10 && !own.number.ends_with('a');
            own_number == asked_number || (is_older && (is_near || has_ptx(own)))
        };
        self.archs.iter().any(runs) && (!asked.ptx || self.archs.iter().any(has_ptx))
    }
}

/// The names of architectures in `TORCH_CUDA_ARCH_LIST`.
fn list(archs: &[Arch]) -> String {
    archs.iter().map(named).collect::<Vec<_>>().join(" ")
}

fn named(arch: &Arch) -> String {
    let digits = arch.number.trim_end_matches(['a', 'f']).len();
    let (major, minor) = arch.number.split_at(digits.saturating_sub(1));
    format!("{major}.{minor}{}", if arch.ptx { "+PTX" } else { "" })
}

/// A library that somebody else has built.
pub struct Found {
    pub facts: Facts,
    /// The name by which programs look for it.
    soname: String,
    /// The names of the CUDA runtimes that it loads: none or one.
    runtimes: Vec<String>,
}

impl Found {
    pub fn read(library: &Path) -> Result<Self> {
        let what = || format!("{} is no library of tch-extension's kernels", library.display());
        let bytes = std::fs::read(library).with_context(what)?;
        let file = ElfFile64::<Endianness>::parse(&*bytes).with_context(what)?;
        let section = file.section_by_name(SECTION).with_context(what)?;
        let text = section.uncompressed_data().with_context(what)?;
        let facts = Facts::parse(&String::from_utf8_lossy(&text)).with_context(what)?;

        let (sections, endian) = (file.elf_section_table(), file.endian());
        let dynamic = sections.dynamic(endian, &*bytes).with_context(what)?;
        let (entries, strings) = dynamic.with_context(what)?;
        let strings = sections.strings(endian, &*bytes, strings).with_context(what)?;
        let texts = |tag: u32| {
            let entries = entries.iter().filter(move |entry| entry.tag32(endian) == Some(tag));
            entries.filter_map(move |entry| {
                Some(String::from_utf8_lossy(entry.string(endian, strings).ok()?).into_owned())
            })
        };
        let runtimes = texts(DT_NEEDED).filter(|name| name.starts_with("libcudart")).collect();
        Ok(Found { facts, soname: texts(DT_SONAME).next().unwrap_or_default(), runtimes })
    }

    /// The first difference that makes the library at this path useless for what is wanted, and for
    /// programs that have loaded this CUDA runtime of libtorch's.
    pub fn refusal(&self, path: &Path, wanted: &Facts, runtime: &Path) -> Option<String> {
        if let Some(refusal) = self.facts.refusal(wanted) {
            return Some(refusal);
        }
        if path.file_name().is_none_or(|name| *name != *self.soname) {
            return Some(format!("must have the name {}, which programs look for", self.soname));
        }
        // A second runtime would have its own current device.
        let is_other = |name: &&String| runtime.file_name().is_none_or(|own| *own != ***name);
        let other = self.runtimes.iter().find(is_other)?;
        Some(format!("needs {other}, and libtorch has {}", runtime.display()))
    }
}

/// The architectures that a library must serve.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    archs: Vec<Arch>,
    /// Whether they are those of this machine's GPUs, and not what the user has written.
    are_gpus: bool,
}

impl Asked {
    /// Those that the user asks for, by name or by having their GPUs. If there is neither, all libraries
    /// will do.
    pub fn of(env: &dyn Environment, visible_gpus: &dyn Fn() -> Vec<String>) -> Result<Self> {
        let list = env.var("TORCH_CUDA_ARCH_LIST").filter(|list| !list.trim().is_empty());
        if list.as_ref().is_none_or(|list| list.trim() == "native") {
            // A GPU's own number, also if no nvcc knows it.
            let number = |gpu: &String| Arch { number: gpu.replace('.', ""), ptx: false };
            let archs: Vec<Arch> = visible_gpus().iter().map(number).collect();
            if list.is_none() || !archs.is_empty() {
                return Ok(Asked { archs, are_gpus: true });
            }
        }
        let list = list.unwrap_or_default();
        let choice = Choice { list: &list, from: "TORCH_CUDA_ARCH_LIST", supported: CUDA_13_0 };
        Ok(Asked { archs: choice.parse(visible_gpus)?, are_gpus: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct List(Option<&'static str>);

    impl Environment for List {
        fn var(&self, name: &str) -> Option<String> {
            (name == "TORCH_CUDA_ARCH_LIST").then_some(self.0?.to_string())
        }
    }

    fn library(archs: &str) -> Facts {
        let text = format!("version 1\nnode N\ncuda 13\narchs {archs}\nfamilies a\nflags \"\"\n");
        Facts::parse(&text).unwrap()
    }

    #[test]
    fn a_library_serves_what_its_binaries_and_its_ptx_run_on() {
        let serves = |own: &str, asked: &'static str| {
            let asked = Asked::of(&List(Some(asked)), &Vec::new).unwrap();
            library(own).lack(&asked).is_none()
        };
        for (own, asked) in [
            ("8.0", "8.0;8.6"),
            ("9.0a", "9.0"),
            ("10.0f", "10.0;10.3"),
            ("7.5+PTX", "8.0;9.0;12.0"),
            ("8.0+PTX", "9.0+PTX"),
            ("8.0+PTX 9.0", "9.0+PTX"),
            // What is newer than 8.0 is served.
            ("8.0 9.0+PTX", "8.0+PTX"),
        ] {
            assert!(serves(own, asked), "{own} for {asked}");
        }
        for (own, asked) in [
            ("8.6", "8.0"),
            ("8.0", "9.0"),
            ("9.0a+PTX", "9.0+PTX"),
            ("9.0a+PTX", "10.0"),
            ("10.0f+PTX", "12.0"),
            ("9.0+PTX", "8.0+PTX"),
            ("9.0", "9.0+PTX"),
        ] {
            assert!(!serves(own, asked), "{own} for {asked}");
        }
    }

    #[test]
    fn a_gpu_needs_no_ptx_and_is_named() {
        for list in [None, Some("native")] {
            let lack = |own: &str, gpu: &str| {
                let gpus = || vec!["9.0".to_string(), gpu.to_string()];
                library(own).lack(&Asked::of(&List(list), &gpus).unwrap())
            };
            assert_eq!(lack("9.0a", "9.0"), None);
            assert_eq!(lack("9.0+PTX", "13.7"), None, "a GPU newer than nvcc");
            let expected = "has kernels for 9.0a 7.5, and this machine's GPU is 7.0";
            assert_eq!(lack("9.0a 7.5", "7.0").as_deref(), Some(expected));
        }
        let none = Asked::of(&List(None), &Vec::new).unwrap();
        assert_eq!(library("9.0a").lack(&none), None);
        let error = Asked::of(&List(Some("native")), &Vec::new).unwrap_err();
        assert!(format!("{error:#}").contains("nvidia-smi shows no GPU"), "{error:#}");
    }
}
