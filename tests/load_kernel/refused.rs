//! Tests of folders that must be refused, with one line that says why.

use super::*;

fn refused(path: &Path, expected: &[&str]) {
    let text = message(load_kernel_for(path, Device::Cpu));
    assert!(text.starts_with(&format!("cannot load a kernel from {}: ", path.display())), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    for expected in expected {
        assert!(text.contains(expected), "{expected} is not in: {text}");
    }
}

#[test]
fn metadata_that_is_wrong_is_named() {
    let (repository, id) = (repository("wrong"), "_wrong_cpu_1");
    let variant = add(&repository, &named("cpu"), id);
    let (file, right) = (variant.join("metadata.json"), metadata(id, "cpu", "sha256"));
    let library = format!("\"{id}.abi3.so\"");
    let long = format!("\"version\": 3, \"x\": \"{}\"", "x".repeat(1 << 20));
    let deep = format!("\"version\": {}", "[".repeat(100_000));
    for (from, to, expected) in [
        ("\"version\": 3", "\"version\": -3", "version: expected a natural number, got -3"),
        ("\"version\": 3", "\"version\": 3.5", "version: expected a natural number, got 3.5"),
        ("\"version\": 3", "\"version\": 99999999999999999999", "got 1e+20"),
        ("\"version\": 3", "\"version\": 1e999", "number out of range"),
        ("\"version\": 3", "\"version\": \"3\"", "version: expected a natural number, got \"3\""),
        ("\"version\": 3", "\"versions\": 3", "version: expected a natural number, got nothing"),
        ("\"version\": 3", &long, "metadata.json: it is larger than 1048576 bytes"),
        ("\"version\": 3", &deep, "recursion limit exceeded"),
        (id, "../_wrong", "id: expected a name of letters, digits and _, got \"../_wrong\""),
        (id, "1wrong", "id: expected a name"),
        (id, "", "id: expected a name"),
        (
            id,
            "_other_cpu_1",
            "digest.files: expected files, _other_cpu_1.abi3.so among them, got {",
        ),
        ("\"cpu\"", "\"cuda\"", "backend.type: expected cpu, got \"cuda\""),
        (
            "{\"type\": \"cpu\", \"archs\": [\"5.0+PTX\"]}",
            "7",
            "backend.type: expected cpu, got nothing",
        ),
        ("sha256", "md5", "digest.algorithm: expected sha256 or sha512, got \"md5\""),
        (&library, "\"_ops.py\"", "digest.files: expected files, _wrong_cpu_1.abi3.so among them"),
        (&library, "\"../x\": \"\", \"_wrong_cpu_1.abi3.so\"", "digest.files: \"../x\" is outside"),
        (&library, "\"/etc/passwd\": 1, \"_wrong_cpu_1.abi3.so\"", "\"/etc/passwd\" is outside"),
        (&library, "\"\": 1, \"_wrong_cpu_1.abi3.so\"", "digest.files: \"\" is outside"),
        (&library, "\"absent.py\": 1, \"_wrong_cpu_1.abi3.so\"", "absent.py: No such file"),
        (&library, "\"_wrong_cpu_1.abi3.so\": 1, \"x\"", "its digest is "),
    ] {
        let text = right.replacen(from, to, 1);
        assert_ne!(text, right, "{from}");
        std::fs::write(&file, text).unwrap();
        refused(&repository, &[&named("cpu"), expected]);
    }
    for len in [0, 1, right.len() / 2, right.len() - 1] {
        std::fs::write(&file, &right[..len]).unwrap();
        refused(&repository, &["metadata.json: EOF while parsing"]);
    }
    std::fs::write(&file, "[]").unwrap();
    refused(
        &variant,
        &["metadata.json: id: expected a name of letters, digits and _, got nothing"],
    );
    std::fs::remove_file(&file).unwrap();
    refused(&variant, &[&named("cpu"), "metadata.json: No such file or directory"]);
    // A pipe that nobody writes to.
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    refused(&repository, &["metadata.json: it is not a regular file"]);
}

#[test]
fn files_that_are_damaged_are_not_loaded() {
    let (repository, id) = (repository("damaged"), "_damaged_cpu_1");
    let variant = add(&repository, &named("cpu"), id);
    let file = variant.join(format!("{id}.abi3.so"));
    let mut bytes = std::fs::read(library()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    for wrong in [&bytes[..], &bytes[..middle], b"", b"version https://git-lfs.github.com/spec/v1"]
    {
        std::fs::write(&file, wrong).unwrap();
        refused(&repository, &["_damaged_cpu_1.abi3.so: its digest is ", "fetch it again"]);
    }
    // Without digests the loader finds it out.
    let metadata = metadata(id, "cpu", "sha256").replace("\"digest\"", "\"no-digest\"");
    std::fs::write(variant.join("metadata.json"), metadata).unwrap();
    std::fs::write(&file, &bytes[..middle]).unwrap();
    refused(&repository, &["cannot load the library ", "_damaged_cpu_1.abi3.so"]);
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    refused(&repository, &["it is not a regular file"]);
}

#[test]
fn every_variant_is_listed_with_a_reason() {
    let (repository, own) = (repository("listed"), torch());
    let broken = named("cpu");
    for name in [
        &broken,
        "torch29-cxx11-cpu-x86_64-linux",
        "torch-stable-abi99-cpu-x86_64-linux",
        "tvm-ffi99-cpu-x86_64-linux",
        &format!("torch{own}-cxx11-cu130-x86_64-linux"),
        &format!("torch{own}-cxx11-rocm71-x86_64-linux"),
        &format!("torch{own}-metal-aarch64-darwin"),
        "torch-universal",
        "torch-what",
        "torchs",
        "__pycache__",
    ] {
        std::fs::create_dir_all(repository.join("build").join(name)).unwrap();
    }
    refused(
        &repository,
        &[
            &format!("{broken}: metadata.json: No such file or directory"),
            "; torch29-cxx11-cpu-x86_64-linux: it is for libtorch 2.9, and this is ",
            "torch-stable-abi99-cpu-x86_64-linux: it is for at least libtorch 9.9, and this is ",
            "tvm-ffi99-cpu-x86_64-linux: it is for tvm-ffi 9.9, and this is 0.1",
            "-cxx11-cu130-x86_64-linux: it is for cu130, not for the CPU",
            "-cxx11-rocm71-x86_64-linux: it is for rocm71, not for the CPU",
            "-metal-aarch64-darwin: it is for aarch64-darwin, and this is x86_64-linux",
            "torch-universal: it is without a library, for Python only",
            "torchs: its name is not that of a variant",
        ],
    );
    assert!(!message(load_kernel_for(&repository, Device::Cpu)).contains("pycache"));
}

#[test]
fn what_is_no_repository_is_refused() {
    let repository = repository("nothing");
    refused(&repository, &["it contains no variants such as torch211-cxx11-cu130-x86_64-linux"]);
    refused(&repository.join("absent"), &["No such file or directory"]);
    std::fs::write(repository.join("file\nname"), "").unwrap();
    let text = message(load_kernel(repository.join("file\nname")));
    assert!(text.ends_with("file name: Not a directory (os error 20)"), "{text}");
    // A variant that was renamed does not tell what it is for.
    std::fs::rename(add(&repository, &named("cpu"), "_renamed_cpu_1"), repository.join("mine"))
        .unwrap();
    refused(&repository.join("mine"), &["mine: its name is not that of a variant"]);
    let text = message(load_kernel_for(&repository, Device::Mps));
    assert!(text.contains("it contains no variants"), "{text}");
    add(&repository, &named("cpu"), "_mps_cpu_1");
    let text = message(load_kernel_for(&repository, Device::Mps));
    assert!(text.contains("Mps") || !cuda::is_compiled(), "{text}");
}
