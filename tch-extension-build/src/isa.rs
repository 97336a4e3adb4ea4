//! The CPU instruction sets that a source with a `TCH_EXTENSION_CPU_KERNEL` is compiled for.

use crate::environment::Environment;
use anyhow::{Result, bail};

/// The instruction sets, with PyTorch's names and flags. The program chooses one at run time, as
/// libtorch does.
const ISAS: [(&str, &str); 3] = [
    (DEFAULT, ""),
    (AVX2, "-mavx2 -mfma -mf16c"),
    // gcc 12 falsely reports variables in its own intrinsics as uninitialised.
    (
        AVX512,
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -Wno-uninitialized -Wno-maybe-uninitialized",
    ),
];

const DEFAULT: &str = "DEFAULT";
const AVX2: &str = "AVX2";
const AVX512: &str = "AVX512";

/// The variable with which a build script compiles for this machine's CPU alone.
const VARIABLE: &str = "TCH_EXTENSION_ISAS";

/// One compilation of a source.
pub struct Compilation {
    /// The instruction set.
    pub isa: &'static str,
    /// The flags that select it.
    pub flags: String,
    /// The folder of the object. Each has its own, because the objects' names are the same.
    pub folder: String,
}

/// The compilations of a source: one for each instruction set; with `only`, one for that instruction
/// set, and one of the function that calls it and of what else exists only once. The latter is
/// compiled without any instruction set's flags, because the linker may use its weak functions in
/// the whole program, which must be able to start everywhere to say what it lacks.
pub fn compilations(only: Option<&'static str>) -> Vec<Compilation> {
    let compilation = |isa, flags: &str, folder: &str| Compilation {
        isa,
        flags: flags.to_string(),
        folder: format!("isa/{folder}"),
    };
    let kernels = ISAS.iter().filter(|(isa, _)| only.is_none_or(|only| only == *isa));
    let mut all: Vec<Compilation> =
        kernels.map(|(isa, flags)| compilation(*isa, flags, isa)).collect();
    if let Some(only) = only {
        let define = format!("-DTCH_EXTENSION_ONLY_ISA={only}");
        all.push(compilation(DEFAULT, &define, &format!("only_{only}")));
    }
    all
}

/// The instruction set that [`VARIABLE`] chooses; `None` for all.
pub fn chosen(env: &dyn Environment) -> Result<Option<&'static str>> {
    match env.var(VARIABLE).as_deref() {
        None => Ok(None),
        Some("native") => Ok(native()),
        Some(other) => bail!(
            "{VARIABLE}={other}: write native (kernels for this machine's CPU only) or unset it (for all CPUs)"
        ),
    }
}

/// The best instruction set of this machine's CPU, by libtorch's rule. A CPU without any gets the
/// same as every other machine.
fn native() -> Option<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let has_fma = is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let has_avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        if has_fma && has_avx512 {
            return Some(AVX512);
        }
        if has_fma && is_x86_feature_detected!("avx2") {
            return Some(AVX2);
        }
    }
    None
}
