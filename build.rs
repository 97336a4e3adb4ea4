//! Compiles `csrc` into a static library that is linked with libtorch.

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

/// One translation unit of several sources, which are not compiled by themselves.
const UNIT: &str = "csrc/bridge.cpp";

/// The sources that [`UNIT`] includes.
fn parts() -> Vec<String> {
    let text = std::fs::read_to_string(UNIT).unwrap_or_else(|error| panic!("{UNIT}: {error}"));
    let included =
        text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
    included.map(|part| format!("csrc/{part}")).collect()
}

/// Whether there is anything to compile in a folder: a family may consist of headers, and an operator
/// may have all its kernels in its family's folder.
fn has_sources(folder: &str) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut extensions = entries.filter_map(|entry| Some(entry.path().extension()?.to_owned()));
    extensions.any(|extension| extension == "cu" || extension == "cpp")
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
    for part in parts() {
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
            .cuda_header("csrc/distributed/nccl.cpp", "nccl.h");
    } else {
        extension = extension.without("csrc/distributed");
    }
    if std::env::var_os("CARGO_FEATURE_GEMM").is_some() {
        extension = extension.cuda_library("cublasLt");
    }
    if std::env::var_os("CARGO_FEATURE_RECURRENT").is_some() {
        extension = extension.cuda_library("cublas");
    }
    extension.build_or_exit();
    tch_extension_build::link_args();
}
