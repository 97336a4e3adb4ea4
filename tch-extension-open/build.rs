//! Compiles the CUDA kernels of the operators that are exported, with the paths and flags of tch-extension's
//! own build script: then the compile cache has them already. `csrc` is a link to the library's.

/// What the kernels are in, below `csrc`.
const FOLDERS: [&str; 6] = ["norm", "rms_norm", "layer_norm", "add_rms_norm", "rope", "loss"];

fn main() {
    let mut sources = Vec::new();
    for folder in FOLDERS.map(|folder| format!("csrc/{folder}")) {
        println!("cargo::rerun-if-changed={folder}");
        let entries =
            std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}"));
        let paths = entries.map(|entry| entry.unwrap_or_else(|error| panic!("{error}")).path());
        sources.extend(paths.filter(|path| path.extension().is_some_and(|end| end == "cu")));
    }
    sources.sort();
    tch_extension_build::Extension::new("tch_extension_open")
        .cuda_sources(sources)
        .include("csrc/include")
        .define("AT_PER_OPERATOR_HEADERS", None)
        .static_kernels()
        .build_or_exit();
    tch_extension_build::python_link_args();
}
