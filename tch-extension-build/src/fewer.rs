//! Decides how many of libtorch's headers a source needs when it includes all of them.
//!
//! `torch/extension.h` includes the whole C++ frontend, and compiling that takes longer than all
//! the rest. Our header of this name leaves most of it out if a macro says so. When a source does
//! not compile without the rest, it is compiled again with it.

/// The macro that leaves headers out, or `None` if this source uses names from them.
pub fn macro_for(text: &str) -> Option<String> {
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if !text.contains("#include") || has(LEFT_OUT) {
        return None;
    }
    let level = if has(OF_AUTOGRAD) { 2 } else { 1 };
    Some(format!("TCH_EXTENSION_FEWER_HEADERS={level}"))
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
    fn a_source_gets_what_it_names() {
        let of = |text: &str| macro_for(&format!("#include <torch/extension.h>\n{text}"));
        let level = |level: i32| Some(format!("TCH_EXTENSION_FEWER_HEADERS={level}"));
        assert_eq!(of("torch::Tensor f(torch::Tensor x) { return x; }"), level(1));
        assert_eq!(of("struct F : torch::autograd::Function<F> {};"), level(2));
        assert_eq!(of("torch::NoGradGuard guard;"), level(2));
        assert_eq!(of("torch::nn::Linear layer(1, 2);"), None);
        assert_eq!(macro_for("extern \"C\" int f() { return 1; }"), None, "nothing to leave out");
    }
}
