//! What a kernel library is for: it says so in a section, which is compared with what is wanted.

use crate::arch::{self, Arch, CUDA_13_0, Choice};
use crate::environment::Environment;
use anyhow::{Context, Result};
use object::{Object as _, ObjectSection as _};
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
    /// What nvcc's variables added to its flags.
    pub flags: String,
}

impl Facts {
    pub fn text(&self) -> String {
        let archs: Vec<String> = self.archs.iter().map(named).collect();
        let families: Vec<&str> = self.families.iter().map(String::as_str).collect();
        format!(
            "tch-extension's kernels\nversion {}\nnode {}\ncuda {}\narchs {}\nfamilies {}\nflags {}\n",
            self.version,
            self.node,
            self.cuda,
            archs.join(" "),
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

    /// Reads them from a library.
    pub fn of(library: &Path) -> Result<Self> {
        let what = || format!("{} is no library of tch-extension's kernels", library.display());
        let bytes = std::fs::read(library).with_context(what)?;
        let file = object::File::parse(&*bytes).with_context(what)?;
        let section = file.section_by_name(SECTION).with_context(what)?;
        let text = section.uncompressed_data().with_context(what)?;
        Facts::parse(&String::from_utf8_lossy(&text)).with_context(what)
    }

    /// The first difference that makes a library useless for what is wanted.
    pub fn refusal(&self, wanted: &Facts, asked: &[Arch]) -> Option<String> {
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
        if let Some(arch) = asked.iter().find(|arch| !self.serves(arch)) {
            let archs: Vec<String> = self.archs.iter().map(named).collect();
            return Some(format!(
                "has kernels for {}, and you ask for {}",
                archs.join(" "),
                named(arch)
            ));
        }
        if self.flags != wanted.flags {
            return Some(format!(
                "was compiled with `{}` in NVCC_APPEND_FLAGS or NVCC_PREPEND_FLAGS, which are `{}` now",
                self.flags, wanted.flags
            ));
        }
        None
    }

    /// Whether kernels for this architecture are in the library.
    fn serves(&self, asked: &Arch) -> bool {
        let number =
            |arch: &Arch| arch.number.trim_end_matches(['a', 'f']).parse::<u32>().unwrap_or(0);
        let runs = |own: &Arch| {
            let (own_number, asked_number) = (number(own), number(asked));
            let is_exact = own_number == asked_number;
            // A binary runs on GPUs of its generation that are not older; one for `9.0a` on 9.0 only.
            let is_plain = own.number.bytes().all(|byte| byte.is_ascii_digit());
            let is_near =
                is_plain && own_number / 10 == asked_number / 10 && own_number <= asked_number;
            is_exact || is_near || (own.ptx && is_plain && own_number <= asked_number)
        };
        let has_ptx = |own: &Arch| own.ptx && number(own) <= number(asked);
        self.archs.iter().any(runs) && (!asked.ptx || self.archs.iter().any(has_ptx))
    }
}

/// The name of an architecture in `TORCH_CUDA_ARCH_LIST`.
fn named(arch: &Arch) -> String {
    let digits = arch.number.trim_end_matches(['a', 'f']).len();
    let (major, minor) = arch.number.split_at(digits.saturating_sub(1));
    format!("{major}.{minor}{}", if arch.ptx { "+PTX" } else { "" })
}

/// The architectures that the user asks for, by name or by having their GPUs. If there is neither, all
/// libraries will do.
pub fn asked_archs(env: &dyn Environment) -> Result<Vec<Arch>> {
    let list = env.var("TORCH_CUDA_ARCH_LIST").filter(|list| !list.trim().is_empty());
    match list {
        Some(list) => Choice { list: &list, from: "TORCH_CUDA_ARCH_LIST", supported: CUDA_13_0 }
            .parse(&arch::visible_gpus),
        None if arch::visible_gpus().is_empty() => Ok(Vec::new()),
        None => {
            let mut archs = arch::default_archs(CUDA_13_0, &arch::visible_gpus)?;
            archs.iter_mut().for_each(|arch| arch.ptx = false);
            Ok(archs)
        }
    }
}
