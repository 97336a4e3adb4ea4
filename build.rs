//! Compiles `csrc` into a static library that is linked with libtorch.

use std::path::Path;

#[macro_use]
#[path = "src/ops/list.rs"]
mod list;

macro_rules! entries {
    ($($name:ident of $family:literal { $($rest:tt)* })*) => {
        &[$((stringify!($name), $family)),*]
    };
}

/// The operators and their families.
const OPERATORS: &[(&str, &str)] = operators!(entries);

/// The name of a source that includes others, which are then not compiled by themselves.
const UNIT: &str = "unit.cpp";

/// The sources that the units of a folder and of the folders below include.
fn parts(folder: &str) -> Vec<String> {
    let mut parts = Vec::new();
    for path in paths(folder) {
        if Path::new(&path).is_dir() {
            parts.extend(self::parts(&path));
        } else if path.ends_with(&format!("/{UNIT}")) {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
            let included =
                text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
            parts.extend(included.map(|part| format!("{folder}/{part}")));
        }
    }
    parts
}

fn paths(folder: &str) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path().display().to_string())
}

/// Whether there is anything to compile in a folder: a family may consist of headers, and an operator
/// may have all its kernels in its family's folder.
fn has_sources(folder: &str) -> bool {
    paths(folder).any(|path| path.ends_with(".cu") || path.ends_with(".cpp"))
}

fn main() {
    // With this macro, libtorch's headers include only the operators that they use, whose parsing
    // was most of the time of a C++ source (docs/lab/methods.md, "Build times").
    let mut extension = tch_extension_build::Extension::new("tch_extension")
        .source_dir("csrc")
        .define("AT_PER_OPERATOR_HEADERS", None)
        // What C++ defines for others is declared in a header. Rust's declarations are in those that
        // `cargo xtask headers` writes, which a source must include for the compiler to compare them.
        .flag("-Werror=missing-declarations");
    for part in parts("csrc") {
        extension = extension.without(part);
    }
    for (name, family) in OPERATORS {
        if std::env::var_os(format!("CARGO_FEATURE_{}", family.to_uppercase())).is_none() {
            for folder in [name, family].map(|folder| format!("csrc/{folder}")) {
                if has_sources(&folder) {
                    extension = extension.without(folder);
                }
            }
        }
    }
    if std::env::var_os("CARGO_FEATURE_OPTIM").is_none() {
        extension = extension.without("csrc/optim");
    }
    if std::env::var_os("CARGO_FEATURE_DISTRIBUTED").is_some() {
        // Declarations for headers of Gloo that libtorch's headers include, and that it lacks.
        extension = extension
            .include_for("csrc/distributed", "csrc/distributed/stub")
            .cuda_header("csrc/distributed", "nccl.h");
    } else {
        extension = extension.without("csrc/distributed");
    }
    if std::env::var_os("CARGO_FEATURE_TVM_FFI").is_none() {
        extension = extension.without("csrc/tvm_ffi");
    }
    extension = extension.kernel_library("csrc/kernels.map");
    if std::env::var_os("CARGO_FEATURE_GEMM").is_some() {
        extension = extension.cuda_library("cublasLt");
    }
    if std::env::var_os("CARGO_FEATURE_RECURRENT").is_some() {
        extension = extension.cuda_library("cublas");
    }
    extension.build_or_exit();
    tch_extension_build::link_args();
}
