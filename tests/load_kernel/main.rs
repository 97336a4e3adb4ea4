//! Tests of kernels in folders as Hugging Face's builder lays them out.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use support::compile::{compile, compile_with, folder};
use support::root;
use support::tvm_ffi::{installed_or_skip, libtvm_ffi, package};
use tch::{Device, Kind, Tensor};
use tch_extension::library::{
    Library, LoadOptions, LoadedKernel, libtorch_version, load_kernel, load_kernel_for,
};
use tch_extension::testing::cuda_or_skip;
use tch_extension::tvm_ffi::out;
use tch_extension::{Result, args, cuda};

mod refused;

/// `211` for libtorch 2.11.
fn torch() -> String {
    libtorch_version().split('.').take(2).collect()
}

/// A variant that fits, if the backend does.
fn named(backend: &str) -> String {
    format!("torch{}-cxx11-{backend}-x86_64-linux", torch())
}

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| compile(&root().join("tests/load_kernel/kernel.cpp"), "kernel.so"))
}

/// Digests are Python's, as those of the builder are not from this crate either.
fn digest(algorithm: &str, file: &Path) -> String {
    const PROGRAM: &str = "import base64, hashlib, sys; data = open(sys.argv[2], 'rb').read(); \
                           print(base64.b64encode(hashlib.new(sys.argv[1], data).digest()).decode())";
    let output =
        Command::new("python3").args(["-c", PROGRAM, algorithm]).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}

fn metadata(id: &str, backend: &str, algorithm: &str) -> String {
    let digest = digest(algorithm, library());
    let backend = if backend.starts_with("cu") { "cuda" } else { backend };
    format!(
        r#"{{"name": "kernel", "id": "{id}", "version": 3, "license": "MIT", "python-depends": [],
            "backend": {{"type": "{backend}", "archs": ["5.0+PTX"]}},
            "digest": {{"algorithm": "{algorithm}", "files": {{"{id}.abi3.so": "{digest}"}}}}}}"#
    )
}

/// Makes a variant in a folder, with an operator `twice`. Kernels that are loaded need different ids.
fn add(folder: &Path, name: &str, id: &str) -> PathBuf {
    let variant = folder.join(name);
    std::fs::create_dir_all(&variant).unwrap();
    std::fs::copy(library(), variant.join(format!("{id}.abi3.so"))).unwrap();
    let backend = name.split('-').rev().nth(2).unwrap();
    std::fs::write(variant.join("metadata.json"), metadata(id, backend, "sha256")).unwrap();
    variant
}

/// An empty folder with this name.
fn repository(name: &str) -> PathBuf {
    let path = folder().join(name);
    std::fs::create_dir(&path).unwrap();
    path
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

fn computes(kernel: &LoadedKernel) {
    let y: Tensor = kernel.operator("twice").unwrap().call(args![&Tensor::from(1.5)]).unwrap();
    assert_eq!(y, Tensor::from(3.0));
}

#[test]
fn any_folder_of_a_repository_will_do() {
    let (repository, id) = (repository("any"), "_any_cpu_1a2b3c4");
    let variant = add(&repository.join("build"), &named("cpu"), id);
    std::fs::create_dir(repository.join("build/torch-cuda")).unwrap();
    let folders = [repository.clone(), repository.join("build"), variant.clone()];
    for folder in folders {
        let kernel = load_kernel_for(&folder, Device::Cpu).unwrap();
        computes(&kernel);
        assert_eq!((kernel.id(), kernel.version()), (id, 3));
        assert_eq!(kernel.variant(), named("cpu"));
        assert_eq!(kernel.operators().unwrap(), ["twice"]);
        assert_eq!(kernel.path(), variant.join(format!("{id}.abi3.so")).canonicalize().unwrap());
    }
    let text = message(load_kernel_for(&repository, Device::Cpu).unwrap().operator("thrice"));
    assert!(text.contains(&format!("did you mean {id}::twice?")), "{text}");
    // Whoever names a variant for the CPU means the CPU.
    computes(&load_kernel(variant).unwrap());
}

#[test]
fn links_of_the_hub_cache_are_followed() {
    let cache = repository("models--org--linked");
    let (snapshot, id) = (cache.join("snapshots/0123abcd"), "_linked_cpu_1a2b3c4");
    let variant = add(&snapshot.join("build"), &named("cpu"), id);
    std::fs::create_dir(cache.join("blobs")).unwrap();
    for file in [format!("{id}.abi3.so"), "metadata.json".to_string()] {
        let blob = cache.join("blobs").join(format!("{}ffff", file.len()));
        std::fs::rename(variant.join(&file), &blob).unwrap();
        let up = Path::new("../../../..").join(blob.strip_prefix(&cache).unwrap());
        std::os::unix::fs::symlink(up, variant.join(&file)).unwrap();
    }
    let kernel = load_kernel_for(&snapshot, Device::Cpu).unwrap();
    computes(&kernel);
    assert!(kernel.path().ends_with(Path::new("blobs").join(kernel.path().file_name().unwrap())));
}

#[test]
fn the_first_choice_is_loaded_and_if_it_fails_the_next() {
    let repository = repository("choices");
    add(&repository, &named("cpu"), "_choices_cpu_torch");
    let stable = format!("torch-stable-abi{}-cpu-x86_64-linux", torch());
    let first = add(&repository, &stable, "_choices_cpu_stable");
    std::fs::write(first.join("_choices_cpu_stable.abi3.so"), "changed").unwrap();
    let kernel = load_kernel_for(&repository, Device::Cpu).unwrap();
    computes(&kernel);
    assert_eq!((kernel.id(), kernel.variant()), ("_choices_cpu_torch", named("cpu").as_str()));
    // The same repository, mended.
    add(&repository, &stable, "_choices_cpu_stable");
    let kernel = load_kernel_for(&repository, Device::Cpu).unwrap();
    computes(&kernel);
    assert_eq!(kernel.variant(), stable);
}

#[test]
fn a_library_of_the_stable_abi_is_loaded() {
    let (repository, id) = (repository("stable"), "_stable_cpu_1");
    let stable = format!("torch-stable-abi{}-cpu-x86_64-linux", torch());
    let variant = add(&repository, &stable, id);
    let library = compile(&root().join("tests/load_kernel/stable.cpp"), "stable.so");
    std::fs::copy(&library, variant.join(format!("{id}.abi3.so"))).unwrap();
    let metadata = metadata(id, "cpu", "sha256");
    let metadata =
        metadata.replace(&digest("sha256", self::library()), &digest("sha256", &library));
    std::fs::write(variant.join("metadata.json"), metadata).unwrap();
    let kernel = load_kernel_for(&repository, Device::Cpu).unwrap();
    computes(&kernel);
    assert_eq!(kernel.operators().unwrap(), ["twice"]);
}

#[test]
fn a_module_of_tvm_ffi_is_loaded() {
    if !installed_or_skip("a_module_of_tvm_ffi_is_loaded") {
        return;
    }
    let options = LoadOptions { global: true, ..Default::default() };
    Library::load_with(libtvm_ffi(), options).unwrap();
    let (repository, id) = (repository("functions"), "_functions_cpu_1");
    let variant = add(&repository, "tvm-ffi01-cpu-x86_64-linux", id);
    let include = format!("-I{}", package().join("include").display());
    let source = root().join("tests/load_kernel/functions.cpp");
    let module = compile_with(&[&source], &["-shared", &include], "functions.so");
    std::fs::rename(&module, variant.join(format!("{id}.so"))).unwrap();
    let metadata = metadata(id, "cpu", "sha256").replace("digest", "no-digest");
    std::fs::write(variant.join("metadata.json"), metadata).unwrap();
    let kernel = load_kernel_for(&repository, Device::Cpu).unwrap();
    assert_eq!(
        (kernel.functions(), kernel.operators().unwrap().len()),
        (&["twice_cpu".to_string()][..], 0)
    );
    let (x, mut y) =
        (Tensor::from_slice(&[1.0, 2.0]), Tensor::zeros([2], (Kind::Double, Device::Cpu)));
    kernel.function("twice_cpu").unwrap().call::<()>(args![out(&mut y), &x]).unwrap();
    assert_eq!(y, &x * 2.0);
    let text = message(kernel.operator("twice"));
    assert!(
        text.ends_with("its variant tvm-ffi01-cpu-x86_64-linux has functions of TVM FFI"),
        "{text}"
    );
    // A variant for libtorch comes first.
    add(&repository, &named("cpu"), "_functions_cpu_torch");
    let kernel = load_kernel_for(&repository, Device::Cpu).unwrap();
    computes(&kernel);
    assert!(kernel.functions().is_empty());
    let text = message(kernel.function("twice"));
    assert!(
        text.contains("has no function twice") && text.ends_with("has operators of libtorch"),
        "{text}"
    );
}

#[test]
fn longer_digests_are_compared_too() {
    let repository = repository("sha512");
    let variant = add(&repository, &named("cpu"), "_sha512_cpu_1");
    let text = metadata("_sha512_cpu_1", "cpu", "sha512");
    std::fs::write(variant.join("metadata.json"), text.replace("==\"", "=\"")).unwrap();
    let refusal = message(load_kernel_for(&repository, Device::Cpu));
    assert!(refusal.contains("its digest is "), "{refusal}");
    std::fs::write(variant.join("metadata.json"), text).unwrap();
    computes(&load_kernel_for(&repository, Device::Cpu).unwrap());
}

#[test]
fn a_variant_for_cuda_needs_no_gpu() {
    if !cuda::is_compiled() {
        return;
    }
    let repository = repository("cuda");
    add(&repository, &named("cu130"), "_cuda_cuda_1");
    add(&repository, &named("cpu"), "_cuda_cpu_1");
    let kernel = load_kernel(&repository).unwrap();
    computes(&kernel);
    assert_eq!(kernel.variant(), named("cu130"));
    assert_eq!(load_kernel_for(&repository, Device::Cpu).unwrap().variant(), named("cpu"));
}

#[test]
fn cuda_architectures_are_those_of_the_gpu() {
    let Some(device) = cuda_or_skip("cuda_architectures_are_those_of_the_gpu") else { return };
    let repository = repository("architectures");
    let variant = add(&repository, &named("cu130"), "_architectures_cuda_1").join("metadata.json");
    let text = std::fs::read_to_string(&variant).unwrap();
    std::fs::write(&variant, text.replace("5.0+PTX", "5.0\", \"6.1")).unwrap();
    let own = cuda::device_properties(device).unwrap();
    let expected =
        format!("for compute capability 5.0, 6.1, and this GPU has {}.{}", own.major, own.minor);
    for refusal in [load_kernel(&repository), load_kernel_for(&repository, device)] {
        let refusal = message(refusal);
        assert!(refusal.contains(&expected), "{refusal}");
    }
    std::fs::write(&variant, text.replace("5.0+PTX", &format!("{}.{}", own.major, own.minor)))
        .unwrap();
    computes(&load_kernel_for(&repository, device).unwrap());
    let refusal = message(load_kernel_for(&repository, Device::Cuda(99)));
    assert!(refusal.contains("there is no CUDA device 99"), "{refusal}");
}
