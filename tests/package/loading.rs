//! Files that are no package, or not one for this machine.

use super::*;
use std::fs;
use std::path::PathBuf;

/// A file of these bytes, in a folder that is removed afterwards.
fn file(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file.pt2");
    fs::write(&path, bytes).expect("a file");
    (folder, path)
}

#[test]
fn what_is_no_package_is_an_error() {
    let error = message(Package::load("no/such.pt2"));
    assert_eq!(
        error,
        "cannot load the package no/such.pt2: No such file or directory (os error 2)"
    );
    assert!(Package::load(".").is_err());
    for bytes in [&b""[..], b"text", b"PK\x03\x04 and so on"] {
        let (_folder, path) = file(bytes);
        let error = message(Package::load(&path));
        assert!(error.contains("it is no package, or incomplete"), "{error}");
    }
    let (_folder, path) = file(b"");
    let module = tch::nn::VarStore::new(Device::Cpu);
    module.save(&path).expect("a file of weights");
    assert!(Package::load(&path).is_err());
    let options = PackageOptions { runners: 0, ..Default::default() };
    assert!(message(Package::load_with(&path, options)).contains("1 is the least"));
    let options = PackageOptions { runners: 2, single_threaded: true, ..Default::default() };
    assert!(message(Package::load_with(&path, options)).contains("single_threaded needs 1"));
}

#[test]
fn a_damaged_package_is_an_error() {
    let Some(folder) = packages("a_damaged_package_is_an_error") else { return };
    let whole = fs::read(folder.join("fixed.pt2")).expect("a package");
    for part in 0..40 {
        let (_folder, path) = file(&whole[..whole.len() * part / 40]);
        let error = message(Package::load(&path));
        assert!(error.contains("it is no package, or incomplete"), "{error}");
    }
    // A byte in the middle of the compiled library, which is most of the file.
    let mut changed = whole.clone();
    let middle = changed.len() - 150_000;
    changed[middle] ^= 1;
    let (_folder, path) = file(&changed);
    let error = message(Package::load(&path));
    assert!(error.contains(".so is broken: Invalid checksum"), "{error}");
}

#[test]
fn a_package_for_something_else_is_an_error() {
    let Some(folder) = packages("a_package_for_something_else_is_an_error") else { return };
    for (name, expected) in [
        ("elsewhere", "it was compiled for the device \"xpu\", which is not supported"),
        ("nowhere", "it does not say which device it was compiled for"),
        ("other_libtorch", "it was compiled by another torch than this libtorch 2."),
        ("other_libtorch", "undefined symbol: aoti_torch_empty_stridxx"),
        ("no_weights", "it has no value of the constant weight: compile it with aot_inductor."),
        ("no_library", "it has no compiled library"),
        ("no_library_at_all", "file too short"),
    ] {
        let error = message(Package::load(folder.join(name).with_extension("pt2")));
        assert!(error.starts_with("cannot load the package "), "{error}");
        assert!(
            error.contains(expected) && !error.contains('\n'),
            "{error}\ninstead of\n{expected}"
        );
    }
    if !tch::Cuda::is_available() {
        let error = message(Package::load(folder.join("cuda.pt2")));
        assert!(error.contains("it was compiled for CUDA, and there is no GPU here"), "{error}");
    }
    let options = PackageOptions { model: "other".to_string(), ..Default::default() };
    let error = message(Package::load_with(folder.join("fixed.pt2"), options));
    assert!(error.contains("it has no model \"other\", but model"), "{error}");
    let options = PackageOptions { device: Some(Device::Cuda(0)), ..Default::default() };
    let error = message(Package::load_with(folder.join("fixed.pt2"), options));
    assert!(error.contains("it was compiled for Cpu, not for Cuda(0)"), "{error}");
    let options = PackageOptions { device: Some(Device::Cpu), ..Default::default() };
    assert!(Package::load_with(folder.join("fixed.pt2"), options).is_ok());
}

/// What a process has of something that a load takes.
#[derive(Debug, PartialEq)]
struct Held {
    libraries: usize,
    files: usize,
    folders: usize,
}

fn held() -> Held {
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let own = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("tch_extension_package_");
    let temporary = fs::read_dir(std::env::temp_dir()).expect("a folder");
    let count = temporary.flatten().filter(|entry| own(&entry.file_name())).count();
    Held {
        libraries: maps.lines().filter(|line| line.contains("wrapper.so")).count(),
        files: fs::read_dir("/proc/self/fd").expect("files").count(),
        folders: count,
    }
}

fn kib_of_memory() -> i64 {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("a line");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

/// Other tests would disturb it, so it runs in a process of its own.
#[test]
fn a_hundred_loads_leave_nothing_behind() {
    const FOLDER: &str = "TCH_EXTENSION_TEST_PACKAGES";
    let Some(folder) = std::env::var_os(FOLDER) else {
        let Some(folder) = packages("a_hundred_loads_leave_nothing_behind") else { return };
        let temporary = tempfile::tempdir().expect("a folder");
        let output = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "loading::a_hundred_loads_leave_nothing_behind", "--nocapture"])
            .env(FOLDER, folder)
            .env("TMPDIR", temporary.path())
            .output()
            .expect("this program");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        eprintln!("{}", text.lines().last().unwrap_or_default());
        return;
    };
    let folder = Path::new(&folder);
    let inputs = inputs(64);
    let round = || {
        let package = load(folder, "model.pt2");
        let zeros = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
        package.update_constants(&[("linear.weight", &zeros)]).unwrap();
        run(&package, &inputs).unwrap();
        assert!(run(&package, &inputs[..1]).is_err());
        let _ = Package::load(folder.join("other_libtorch.pt2")).unwrap_err();
    };
    (0..10).for_each(|_| round());
    let (before, memory) = (held(), kib_of_memory());
    (0..100).for_each(|_| round());
    // libtorch 2.13 never unloads the code of a package, also when Python has loaded it.
    let stays = libtorch_version().starts_with("2.13.");
    let mut after = held();
    if stays {
        // Each load maps the six segments of one library.
        assert!(after.libraries <= before.libraries + 6 * 100, "{before:?}, then {after:?}");
        after.libraries = before.libraries;
    }
    assert_eq!(after, before);
    // g++ marks variables of inline functions so that the first library that has them stays.
    assert!((before.libraries < 10 || stays) && before.folders == 0, "{before:?}");
    let grown = kib_of_memory() - memory;
    // With libtorch 2.13 we measured 308 KiB a load, because the library stays.
    let most = if stays { 500 } else { 100 };
    assert!(grown < most * 100, "{grown} KiB more after 100 loads");
    eprintln!("{grown} KiB more after 100 loads");
}
