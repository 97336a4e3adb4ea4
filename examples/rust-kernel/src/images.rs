//! The cubins that `cargo run -p kernels` made.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use tch::{Device, Kind};
use tch_extension::cuda::Kernel;
use tch_extension::{Error, Result};

/// The folder of the cubins: `RUST_KERNEL_IMAGES`, or `images` of this crate.
fn folder() -> PathBuf {
    std::env::var_os("RUST_KERNEL_IMAGES")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("images"), PathBuf::from)
}

fn suffix(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Half => Some("f16"),
        Kind::BFloat16 => Some("bf16"),
        Kind::Float => Some("f32"),
        Kind::Double => Some("f64"),
        _ => None,
    }
}

type Key = (&'static str, Kind, bool, Device);
static KERNELS: Mutex<Option<HashMap<Key, Kernel>>> = Mutex::new(None);

/// The kernel of a function for tensors of this kind. `aligned`: addresses and rows are multiples of
/// 16 bytes.
pub(crate) fn kernel(
    function: &'static str,
    kind: Kind,
    aligned: bool,
    device: Device,
) -> Result<Kernel> {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = kernels.get_or_insert_default();
    let key = (function, kind, aligned, device);
    if let Some(kernel) = kernels.get(&key) {
        return Ok(kernel.clone());
    }
    let kernel = find(function, kind, aligned, device)?;
    kernels.insert(key, kernel.clone());
    Ok(kernel)
}

/// Loads all kernels for tensors of this kind on a device, so that none is loaded while a graph is
/// captured or a time is measured.
///
/// # Errors
/// When the folder has no cubin for the kind or for the device.
pub fn prepare(kind: Kind, device: Device) -> Result<()> {
    for function in ["silu", "silu_backward", "matmul_add_relu"] {
        for aligned in [true, false] {
            kernel(function, kind, aligned, device)?;
        }
    }
    Ok(())
}

/// The first image for the kind that runs on the device. A file's name ends in its architecture.
fn find(function: &str, kind: Kind, aligned: bool, device: Device) -> Result<Kernel> {
    let suffix =
        suffix(kind).ok_or_else(|| Error::msg(format!("{function}: no kernel for {kind:?}")))?;
    let start = format!("{function}_{suffix}_{}_", if aligned { "aligned" } else { "any" });
    let folder = folder();
    let mut reason = "there is none".to_string();
    for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with(&start) || !name.ends_with(".cubin") {
            continue;
        }
        let bytes = std::fs::read(entry.path())
            .map_err(|error| Error::msg(format!("{}: {error}", entry.path().display())))?;
        let loaded = Kernel::load(bytes, &format!("{function}_entry"))
            .and_then(|kernel| kernel.prepare(device).map(|()| kernel));
        match loaded {
            Ok(kernel) => return Ok(kernel),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(Error::msg(format!(
        "{function}: no image {start}*.cubin in {} for {device:?}: {reason}; `sh setup.sh sm_90` makes it for compute capability 9.0",
        folder.display()
    )))
}
