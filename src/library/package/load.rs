//! How a package is loaded: what is checked before its code runs.

use super::archive::{self, Unpacked};
use super::generated::Generated;
use super::inputs::{DeviceType, Inputs};
use super::{Package, PackageOptions};
use crate::ffi::loader::{self, libtorch_version};
use crate::ffi::package as ffi;
use crate::library::requirements;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tch::{Cuda, Device, Tensor};

/// The key of the metadata that describes the inputs.
const DESCRIPTION: &str = "tch_extension.inputs";

type Loaded<T> = std::result::Result<T, String>;

pub(super) fn load(path: &Path, options: &PackageOptions) -> Loaded<Package> {
    if options.runners == 0 || options.single_threaded && options.runners != 1 {
        let needed =
            if options.single_threaded { "single_threaded needs 1" } else { "1 is the least" };
        return Err(format!("PackageOptions::runners is {}, but {needed}", options.runners));
    }
    let unpacked = archive::unpack(path, &options.model)?;
    let named = |key: &str| unpacked.metadata.get(key).map_or("", String::as_str);
    let key = named("AOTI_DEVICE_KEY");
    let device_type = DeviceType::named(key).ok_or_else(|| match key {
        "" => "it does not say which device it was compiled for".to_string(),
        _ => format!("it was compiled for the device {key:?}, which is not supported"),
    })?;
    let index = check_device(device_type, options.device)?;
    if let Some(missing) = missing_instructions(named("AOTI_CPU_ISA")) {
        return Err(format!("it was compiled for a CPU with {missing}, which this one lacks"));
    }
    let inputs = describe(&unpacked, device_type, options.inputs.as_deref())?;
    let weights = unpacked.weights.as_deref().map(text).transpose()?;
    let compiled = ffi::Compiled {
        library: &text(&unpacked.library)?,
        folder: &text(unpacked.folder.path())?,
        weights: weights.as_deref(),
        device_type: match device_type {
            DeviceType::Cpu => c"cpu",
            DeviceType::Cuda => c"cuda",
        },
        index,
        runners: options.runners,
        single_threaded: options.single_threaded,
    };
    let model = open(&compiled)?;
    if model.inputs != inputs.inputs.len() {
        return Err(format!(
            "the model has {} inputs, but {} are described",
            model.inputs,
            inputs.inputs.len()
        ));
    }
    let mut constants = BTreeMap::new();
    let note = |name: &str, tensor: &Tensor| {
        constants.insert(name.to_string(), (tensor.size(), tensor.f_kind().ok()));
    };
    model.for_each_constant(note).map_err(|error| error.to_string())?;
    let device = match device_type {
        DeviceType::Cpu => Device::Cpu,
        DeviceType::Cuda => Device::Cuda(usize::try_from(model.index).unwrap_or_default()),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Unpacked { folder, metadata, .. } = unpacked;
    Ok(Package { model, name, device, inputs, constants, metadata, _folder: folder })
}

/// Opens the compiled library. Each time that the dynamic loader lacks a part of libtorch, that part
/// is loaded first: a package needs `libtorch.so`, which no Rust program links.
fn open(compiled: &ffi::Compiled<'_>) -> Loaded<ffi::Package> {
    let mut tried = Vec::new();
    loop {
        let reason = match ffi::Package::load(compiled) {
            Ok(package) => return Ok(package),
            Err(error) => error.to_string(),
        };
        let complaint = reason.rsplit_once("Error in dlopen: ").map(|(_, complaint)| complaint);
        let found = complaint.map_or(Ok(None), requirements::find)?;
        match found {
            Some(found) if !tried.contains(&found) => {
                loader::open_library(&text(&found)?, true)?;
                tried.push(found);
            }
            _ => return Err(explained(&reason)),
        }
    }
}

fn text(path: &Path) -> Loaded<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| "its path contains a zero byte".to_string())
}

/// Adds what a reason of the dynamic loader's means.
fn explained(reason: &str) -> String {
    if !reason.contains("undefined symbol") {
        return reason.to_string();
    }
    format!(
        "it was compiled by another torch than this libtorch {}, or needs a library that is not loaded ({reason})",
        libtorch_version()
    )
}

/// The index of the device; -1 for the current one.
fn check_device(compiled_for: DeviceType, asked: Option<Device>) -> Loaded<i32> {
    match (compiled_for, asked) {
        (DeviceType::Cpu, None | Some(Device::Cpu)) => Ok(-1),
        (DeviceType::Cuda, None | Some(Device::Cuda(_))) => {
            let count = Cuda::device_count();
            let index = match asked {
                Some(Device::Cuda(index)) => i32::try_from(index).unwrap_or(i32::MAX),
                _ => -1,
            };
            match (i64::from(index), count) {
                (_, ..=0) => Err("it was compiled for CUDA, and there is no GPU here".to_string()),
                (index, count) if index >= count => {
                    Err(format!("there is no Cuda({index}), only {count} GPUs"))
                }
                _ => Ok(index),
            }
        }
        (compiled_for, Some(asked)) => {
            Err(format!("it was compiled for {compiled_for:?}, not for {asked:?}"))
        }
    }
}

/// The first set of instructions that the package was compiled for and this CPU lacks. Without this
/// check, the process would end at the first such instruction.
fn missing_instructions(compiled_for: &str) -> Option<&str> {
    compiled_for.split_whitespace().find(|name| match *name {
        "AVX2" => !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")),
        "AVX512" => {
            !(is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bw"))
        }
        "AVX512_VNNI" => !is_x86_feature_detected!("avx512vnni"),
        _ => false,
    })
}

/// The inputs as they were described, or as the generated C++ implies them.
fn describe(unpacked: &Unpacked, device: DeviceType, given: Option<&str>) -> Loaded<Inputs> {
    let generated = Generated::read(&unpacked.source);
    let described = [
        (given, "PackageOptions::inputs"),
        (unpacked.metadata.get(DESCRIPTION).map(String::as_str), "its metadata"),
    ];
    for (text, source) in described {
        let Some(text) = text else { continue };
        let inputs = Inputs::read(text, device)
            .map_err(|why| format!("{source} does not describe the inputs: {why}"))?;
        let wrong = generated.as_ref().and_then(|generated| generated.contradiction(&inputs));
        return match wrong {
            Some(wrong) => Err(format!("{source} does not fit the compiled model: {wrong}")),
            None => Ok(inputs),
        };
    }
    let open = match generated.map(|generated| generated.inputs()) {
        Some(Ok(inputs)) => return Ok(inputs),
        Some(Err(open)) => open,
        None => "what its inputs must be".to_string(),
    };
    Err(format!(
        "it does not tell {open}, so inputs could not be checked: compile it with the metadata {DESCRIPTION} \
         (the docs of library::Package show how), or describe the inputs in PackageOptions::inputs"
    ))
}
