//! Explains why a library does not load that was built for another libtorch or another CUDA.

use super::distribution::{self, Distribution};
use super::requirements::undefined_symbol;
use crate::ffi::loader as ffi;
use std::path::Path;

/// Explains the dynamic loader's message. Returns `None` if it does not point to another libtorch
/// or CUDA.
pub(super) fn explain(library: &Path, complaint: &str) -> Option<String> {
    let reason = match complaint.split_once(": cannot open shared object file") {
        Some((missing, _)) => another_cuda(missing, own_cuda().as_deref())?,
        None => another_libtorch(complaint)?,
    };
    let package = distribution::of(library);
    let whole = package
        .and_then(|package| of_package(&package, &ffi::libtorch_version()))
        .unwrap_or(reason);
    Some(format!("{whole} (the loader said: {complaint})"))
}

/// The message for a file whose package was made for another libtorch than this one.
fn of_package(package: &Distribution, own: &str) -> Option<String> {
    let Distribution { name, version, torch } = package;
    let pinned = torch.as_deref()?.strip_prefix("torch==")?;
    // A version such as `2.9.1+cu128` is a build of 2.9.1.
    let is_own = pinned.split('+').next() == own.split('+').next();
    (!is_own).then(|| {
        format!(
            "it was built for libtorch {pinned}, for which its package {name} {version} asks, and this one is {own}: \
             take the {name} for {own}"
        )
    })
}

/// Libraries whose version number is CUDA's own. That of libcufft or libcudnn is not.
const OF_CUDA: [&str; 6] = [
    "libcudart.so.",
    "libcublas.so.",
    "libcublasLt.so.",
    "libcupti.so.",
    "libnvrtc.so.",
    "libnvJitLink.so.",
];

/// `missing` is the name of a file. `own` is the CUDA version of this process, if it has CUDA.
fn another_cuda(missing: &str, own: Option<&str>) -> Option<String> {
    if own.is_none() && ["libc10_cuda.so", "libtorch_cuda.so"].contains(&missing) {
        return Some("it was built for a libtorch with CUDA, and this one is without".to_string());
    }
    let version = OF_CUDA.iter().find_map(|name| missing.strip_prefix(name))?;
    let major = version.split('.').next()?;
    match own {
        Some(own) if own == major => None,
        Some(own) => Some(format!(
            "it was built for CUDA {major}, and this libtorch is for CUDA {own}: take its build for CUDA {own}"
        )),
        None => Some(format!(
            "it was built for CUDA {major}, and this libtorch is without CUDA: take its build for the CPU"
        )),
    }
}

/// The major version of the CUDA that this process uses.
fn own_cuda() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let (_, version) = maps.lines().find_map(|line| line.split_once("/libcudart.so."))?;
    version.split('.').next().map(String::from)
}

fn another_libtorch(complaint: &str) -> Option<String> {
    let symbol = undefined_symbol(complaint)?;
    let name = ffi::demangled(symbol);
    if !is_libtorchs(symbol, &name) {
        return None;
    }
    let version = ffi::libtorch_version();
    if has_old_string(&name) {
        return Some(format!(
            "it was built with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0), as PyTorch's wheels before 2.7 were, and \
             this libtorch, {version}, with the new one: take its build for {version}"
        ));
    }
    Some(format!(
        "it was built for another libtorch than this one, {version}, which lacks {}: take its build for {version}, or \
         compile it again",
        shortened(&name)
    ))
}

/// Whether libtorch defines symbols with such names. Those of libtorch_python do not count.
fn is_libtorchs(symbol: &str, name: &str) -> bool {
    let is_c = ["aoti_torch_", "torch_"].iter().any(|prefix| symbol.starts_with(prefix));
    let is_pythons = ["THP", "Py", "pybind11"].iter().any(|word| name.contains(word));
    let begins = |place: usize| {
        !name[..place]
            .ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == ':')
    };
    let namespaces = ["c10::", "at::", "torch::", "caffe2::"];
    let is_cpp = namespaces
        .iter()
        .any(|namespace| name.match_indices(namespace).any(|(place, _)| begins(place)));
    is_c || (is_cpp && !is_pythons)
}

/// Whether the name contains `std::string` of the ABI before C++11. The new one is in an inline
/// namespace.
fn has_old_string(name: &str) -> bool {
    ["std::string", "std::basic_string<char"].iter().any(|old| name.contains(old))
}

/// Cuts a long name, because names of templates can be very long.
fn shortened(name: &str) -> String {
    const LONGEST: usize = 120;
    match name.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_is_told_from_no_cuda() {
        let text = another_cuda("libcudart.so.12", None).unwrap();
        assert_eq!(
            text,
            "it was built for CUDA 12, and this libtorch is without CUDA: take its build for the CPU"
        );
        assert!(another_cuda("libc10_cuda.so", None).unwrap().contains("a libtorch with CUDA"));
        assert_eq!(another_cuda("libc10_cuda.so", Some("13")), None);
        assert_eq!(another_cuda("libcublas.so.13", Some("13")), None);
        assert_eq!(another_cuda("libcufft.so.11", Some("13")), None);
    }

    #[test]
    fn a_package_is_for_one_libtorch_or_for_any() {
        let said = |torch: Option<&str>| {
            let package = Distribution {
                name: "v".into(),
                version: "1.0".into(),
                torch: torch.map(String::from),
            };
            of_package(&package, "2.11.0")
        };
        let expected = "it was built for libtorch 2.9.1+cu128, for which its package v 1.0 asks, and this one is 2.11.0";
        assert!(said(Some("torch==2.9.1+cu128")).unwrap().starts_with(expected));
        for torch in [Some("torch==2.11.0"), Some("torch==2.11.0+cu130"), Some("torch>=2.0"), None]
        {
            assert_eq!(said(torch), None, "{torch:?}");
        }
    }

    #[test]
    fn namespaces_are_whole_words() {
        for (name, is) in [
            ("at::Tensor::size(long) const", true),
            ("vtable for torch::autograd::Node", true),
            ("void f(c10::Device)", true),
            ("std::vector<at::Tensor>::reserve(unsigned long)", true),
            ("repeat::now()", false),
            ("mine::at::now()", false),
            ("THPVariable_Wrap(at::TensorBase const&)", false),
        ] {
            assert_eq!(is_libtorchs("_Z", name), is, "{name}");
        }
    }

    #[test]
    fn names_of_templates_are_cut() {
        let text = shortened(&"é".repeat(200));
        assert_eq!(text.chars().count(), 121);
    }
}
