//! Our public headers, embedded in the program, because there may be no copy of this crate's
//! sources where the program runs.

use std::path::{Path, PathBuf};
use tch_extension_build::{content, place, trusted};

macro_rules! headers {
    ($($path:literal),* $(,)?) => {
        /// The path of each header below the include folder, and its text.
        pub(super) const HEADERS: &[(&str, &str)] =
            &[$(($path, include_str!(concat!("../../csrc/include/tch_extension/", $path)))),*];
    };
}

headers! {
    "accessor.h",
    "c_abi.h",
    "column_sums.h",
    "cpu.h",
    "cpu_column_sums.h",
    "cpu_registers.h",
    "cpu_small_product.h",
    "cuda_column_sums.h",
    "cuda_reduce.h",
    "cuda_vector.h",
    "host_device.h",
    "kind.h",
    "launch.h",
    "pybind/convert.h",
    "pybind/module.h",
    "pybind/operator.h",
    "pybind/signature.h",
    "pybind/unsupported.h",
    "python/ATen/Dispatch.h",
    "python/Python.h",
    "python/THC/THC.h",
    "python/pybind11/cast.h",
    "python/pybind11/complex.h",
    "python/pybind11/eigen.h",
    "python/pybind11/embed.h",
    "python/pybind11/functional.h",
    "python/pybind11/numpy.h",
    "python/pybind11/operators.h",
    "python/pybind11/pybind11.h",
    "python/pybind11/pytypes.h",
    "python/pybind11/stl.h",
    "python/torch/all.h",
    "python/torch/csrc/utils/pybind.h",
    "python/torch/extension.h",
    "python/torch/python.h",
    "scalar_math.h",
    "tensor.h",
}

/// The folders for the include path, in order. The first process that needs them writes them to the
/// cache.
pub(super) fn install(cache: &Path) -> std::io::Result<Vec<PathBuf>> {
    let parts = HEADERS.iter().flat_map(|(path, text)| [path.as_bytes(), text.as_bytes()]);
    let folder = cache.join(format!("include-{}", content::digest(parts)));
    if !folder.exists() {
        // The folder appears as a whole or not at all. A process that comes second finds it.
        let partial = place::unique(cache, "include-part");
        let written = write(&partial).and_then(|()| std::fs::rename(&partial, &folder));
        if written.is_err() {
            let _ = std::fs::remove_dir_all(&partial);
            if !folder.exists() {
                written?;
            }
        }
    }
    trusted::check(&folder)?;
    Ok(vec![folder.join("tch_extension/python"), folder])
}

fn write(folder: &Path) -> std::io::Result<()> {
    place::create(folder)?;
    for (path, text) in HEADERS {
        let path = folder.join("tch_extension").join(path);
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { collect(&path, found) } else { found.push(path) }
        }
    }

    #[test]
    fn every_public_header_is_carried() {
        let root = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
            .join("csrc/include/tch_extension");
        let mut found = Vec::new();
        collect(&root, &mut found);
        let mut names: Vec<_> = found
            .iter()
            .map(|path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_string())
            .collect();
        names.sort();
        let mut carried: Vec<_> = HEADERS.iter().map(|(path, _)| path.to_string()).collect();
        carried.sort();
        assert_eq!(names, carried);
    }
}
