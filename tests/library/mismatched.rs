//! Tests of libraries that were built for another libtorch or another CUDA version.

use super::compiled::*;
use super::*;

/// Compiles a library with this source that needs a library with this name, which does not exist.
fn needing(missing: &str, text: &str, name: &str) -> PathBuf {
    let stub = folder().join(format!("stub_{name}"));
    std::fs::create_dir_all(&stub).unwrap();
    let source = folder().join(format!("needs_{name}.cpp"));
    std::fs::write(&source, text).unwrap();
    let soname = format!("-Wl,-soname,{missing}");
    let empty = folder().join("empty.cpp");
    std::fs::write(&empty, "").unwrap();
    let needed = compile_with(&[&empty], &["-shared", &soname], &format!("stub_{name}/{missing}"));
    let library = compile_with(
        &[&source],
        &["-shared", "-Wl,--no-as-needed", needed.to_str().unwrap()],
        name,
    );
    std::fs::remove_file(needed).unwrap();
    library
}

fn refused(path: &Path) -> String {
    let text = message(Library::load(path));
    assert!(text.starts_with("cannot load the library ") && text.lines().count() == 1, "{text}");
    text
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// The CUDA version of this libtorch, taken from the libraries that it has loaded.
fn own_cuda() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let runtime = maps.lines().find_map(|line| line.split_once("/libcudart.so."));
    runtime.map_or("without CUDA".to_string(), |(_, version)| {
        format!("for CUDA {}", version.split('.').next().unwrap_or_default())
    })
}

#[test]
fn a_library_of_another_cuda_says_so() {
    let text = refused(&needing("libcudart.so.12", "", "cuda_12.so"));
    says(&text, &["it was built for CUDA 12, and this libtorch is ", &own_cuda()]);
    says(&text, &["libcudart.so.12: cannot open shared object file"]);
    says(&refused(&needing("libcublas.so.11", "", "cublas_11.so")), &["it was built for CUDA 11,"]);
    says(&refused(&needing("libcudart.so.11.0", "", "cuda_11.so")), &["it was built for CUDA 11,"]);
    // cuDNN has version numbers of its own, and a library outside CUDA says nothing about CUDA's
    // version.
    for (missing, name) in [("libcudnn.so.7", "cudnn_7.so"), ("libcustom.so.3", "custom_3.so")] {
        let text = refused(&needing(missing, "", name));
        assert!(!text.contains("built for CUDA"), "{text}");
    }
}

#[test]
fn a_library_that_lacks_symbols_of_libtorch_says_so() {
    let gone = "namespace c10 { void gone_since(int); } void f() { c10::gone_since(1); }";
    let text = refused(&compile_text(gone, "gone.so"));
    says(
        &text,
        &[
            "it was built for another libtorch than this one, 2.",
            "which lacks c10::gone_since(int)",
        ],
    );
    says(&text, &["undefined symbol: _ZN3c1010gone_sinceEi"]);
    let shim = "extern \"C\" void aoti_torch_from_the_future(); void f() { aoti_torch_from_the_future(); }";
    says(
        &refused(&compile_text(shim, "shim.so")),
        &["another libtorch", "which lacks aoti_torch_from_the_future"],
    );
    // Missing symbols of other projects say nothing about libtorch.
    let text = refused(&compile_text(
        "namespace other { void f(); } void g() { other::f(); }",
        "other.so",
    ));
    assert!(!text.contains("another libtorch"), "{text}");
}

#[test]
fn a_library_of_the_old_abi_says_so() {
    let source = folder().join("old_abi.cpp");
    let text = "#include <string>\nnamespace c10 { void show(const std::string&); } void f() { c10::show(\"x\"); }";
    std::fs::write(&source, text).unwrap();
    let path = compile_with(&[&source], &["-shared", "-D_GLIBCXX_USE_CXX11_ABI=0"], "old_abi.so");
    says(&refused(&path), &["built with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0)", "before 2.7"]);
}

/// The layout of a package that pip installs.
#[test]
fn a_package_says_which_libtorch_it_is_for() {
    let site = folder().join("site-packages");
    for folder in ["vision", "vision-0.24.1.dist-info", "other-1.0.dist-info"] {
        std::fs::create_dir_all(site.join(folder)).unwrap();
    }
    let write = |name: &str, text: &str| std::fs::write(site.join(name), text).unwrap();
    write("other-1.0.dist-info/RECORD", "other/_C.so,sha256=abc,1\n");
    write(
        "other-1.0.dist-info/METADATA",
        "Name: other\nVersion: 1.0\nRequires-Dist: torch (==1.13.0)\n",
    );
    write("vision-0.24.1.dist-info/RECORD", "vision/__init__.py,,\nvision/_C.so,sha256=abc,1\n");
    write(
        "vision-0.24.1.dist-info/METADATA",
        "Metadata-Version: 2.1\nName: vision\nVersion: 0.24.1\nRequires-Dist: numpy\nRequires-Dist: torch==2.9.1\n\n\
         Requires-Dist: torch==0.1\n",
    );
    let gone =
        compile_text("namespace at { void gone(); } void f() { at::gone(); }", "packaged.so");
    let packaged = site.join("vision/_C.so");
    std::fs::rename(gone, &packaged).unwrap();
    let text = refused(&packaged);
    let expected = "it was built for libtorch 2.9.1, for which its package vision 0.24.1 asks, and this one is 2.";
    says(&text, &[expected, "take the vision for 2.", "undefined symbol: _ZN2at4goneEv"]);
    assert!(!text.contains("1.13"), "{text}");
}
