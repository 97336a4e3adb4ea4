//! Fewer of libtorch's headers, where a source asks for all.
//!
//! `torch/extension.h` brings the whole C++ frontend, and compiling that takes longer than all the
//! rest. Our header of this name leaves most of it out on request. Whether a source needs the rest
//! is known when it does not compile without.

/// The macro that asks for it; `None` if this source names what would be left out.
pub fn macro_for(text: &str) -> Option<String> {
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if !text.contains("#include") || has(LEFT_OUT) {
        return None;
    }
    let level = if has(OF_AUTOGRAD) { 2 } else { 1 };
    Some(format!("TCH_EXTENSION_FEWER_HEADERS={level}"))
}

/// Words of what no level has. One too many costs time only, and so does one that is missing.
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

/// Words of torch/autograd.h and torch/utils.h, which are a fifth of the work that is left.
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
