//! A build script as every crate with kernels has one.

fn main() {
    let built =
        tch_extension_build::Extension::new("downstream").source_dir("csrc").build_or_exit();
    // These sources were written for Python and are unchanged. Each module's functions become
    // operators.
    let python = |name: &str| tch_extension_build::Extension::new(name);
    python("linear_cpp").source("../python_sources/linear.cpp").build_or_exit();
    python("layer_norm_cpp").source("../python_sources/layer_norm.cpp").build_or_exit();
    // Two extensions that use the same names for different things.
    for name in ["double", "triple"] {
        let extension = python(&format!("same_names_{name}"));
        let extension = extension.source_dir(format!("../python_sources/same_names/{name}"));
        let extension = if built.cuda { extension.define("WITH_CUDA", None) } else { extension };
        extension.build_or_exit();
    }
    if built.cuda {
        let sources = ["../python_sources/lltm_cuda.cpp", "../python_sources/lltm_cuda_kernel.cu"];
        python("lltm_cuda").sources(sources).build_or_exit();
    }
    tch_extension_build::link_args();
}
