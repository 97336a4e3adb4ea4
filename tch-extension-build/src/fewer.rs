//! Decides how many of libtorch's headers a source needs when it includes all of them.
//!
//! `torch/extension.h` includes the whole C++ frontend, and compiling that takes longer than all
//! the rest. Our header of this name leaves most of it out if a macro says so. When a source does
//! not compile without the rest, it is compiled again with it.

/// The level at which torch/autograd.h is not left out.
pub const AUTOGRAD: u32 = 2;

/// The argument that leaves headers out.
pub fn argument(level: u32) -> String {
    format!("-DTCH_EXTENSION_FEWER_HEADERS={level}")
}

/// How few headers a source needs, or `None` if it uses names from all.
pub fn level_for(text: &str) -> Option<u32> {
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    // What the user's own headers include is not looked at.
    if !text.contains("torch/") || has(LEFT_OUT) {
        return None;
    }
    Some(if has(OF_AUTOGRAD) { AUTOGRAD } else { 1 })
}

/// Whether the headers at the level [`AUTOGRAD`], without anything before them, are what this source
/// begins with.
pub fn takes_precompiled(text: &str) -> bool {
    let first = text.lines().map(str::trim_start).find(|line| line.starts_with('#'));
    let words = first.map(|line| line.split_whitespace().collect::<String>());
    words.is_some_and(|line| line.starts_with("#include<torch/extension.h>"))
        && level_for(text).is_some()
}

/// Names from headers that are left out at every level. A name that is wrongly in this list, or
/// missing from it, costs only compile time.
const LEFT_OUT: &[&str] = &[
    "nn::",
    "optim::",
    "data::",
    "jit::",
    "serialize",
    "torch::save",
    "torch::load",
    "TORCH_MODULE",
    "OrderedDict",
];

/// Names from torch/autograd.h and torch/utils.h, which take a fifth of the remaining compile time.
const OF_AUTOGRAD: &[&str] = &[
    "autograd",
    "NoGrad",
    "AutoGradMode",
    "InferenceMode",
    "manual_seed",
    "num_threads",
    "record",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn macros_before_the_headers_count() {
        assert!(takes_precompiled("// torch\n  #include <torch/extension.h> // all\nint f();"));
        for other in [
            "#define STRIP_ERROR_MESSAGES\n#include <torch/extension.h>\n",
            "#include <vector>\n#include <torch/extension.h>\n",
            "#include <torch/extension.h>\ntorch::nn::Linear layer(1, 2);",
            "int f();",
        ] {
            assert!(!takes_precompiled(other), "{other}");
        }
    }

    #[test]
    fn a_source_gets_what_it_names() {
        let of = |text: &str| level_for(&format!("#include <torch/extension.h>\n{text}"));
        assert_eq!(of("torch::Tensor f(torch::Tensor x) { return x; }"), Some(1));
        assert_eq!(of("struct F : torch::autograd::Function<F> {};"), Some(AUTOGRAD));
        assert_eq!(of("torch::NoGradGuard guard;"), Some(AUTOGRAD));
        assert_eq!(of("torch::nn::Linear layer(1, 2);"), None);
        assert_eq!(level_for("#include <vector>\nint f();"), None, "nothing to leave out");
    }
}
