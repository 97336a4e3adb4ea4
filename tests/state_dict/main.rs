//! Tests of `nn::state_dict`: what is loaded, what is refused without changing anything, and what a
//! file holds after its writer was killed.

mod bad_files;
mod folder;
mod killed;
mod pytorch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_extension::nn::state_dict::{LoadReport, StateDictOptions, load, save};
use tch_extension::testing::devices;

const KINDS: [Kind; 10] = [
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
];

/// A folder that is removed afterwards, and a file in it.
fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.safetensors");
    (folder, file)
}

/// Variables with these values.
fn store(device: Device, tensors: &[(&str, Tensor)]) -> VarStore {
    let vs = VarStore::new(device);
    for (name, tensor) in tensors {
        let (path, last) = name.rsplit_once('.').unwrap_or(("", name));
        let parts = path.split('.').filter(|part| !part.is_empty());
        let path = parts.fold(vs.root(), |path, part| path / part);
        let trainable = tensor.is_floating_point();
        let _ = path.add(last, tensor.copy().to_device(device), trainable);
    }
    vs
}

fn float(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

/// A model of two layers with values that differ from call to call.
fn model() -> VarStore {
    store(
        Device::Cpu,
        &[
            ("a.weight", float(&[3, 4])),
            ("a.bias", float(&[3])),
            ("b.weight", float(&[2, 3])),
            ("steps", Tensor::from_slice(&[7_i64]) * float(&[1]).abs().max().to_kind(Kind::Int64)),
        ],
    )
}

fn values(vs: &VarStore) -> BTreeMap<String, Tensor> {
    vs.variables().into_iter().map(|(name, tensor)| (name, tensor.detach().copy())).collect()
}

fn assert_unchanged(vs: &VarStore, before: &BTreeMap<String, Tensor>) {
    let now = values(vs);
    assert!(
        now.len() == before.len() && now.iter().all(|(name, value)| value.equal(&before[name]))
    );
}

/// An error of one line that names the file.
fn assert_names(error: &tch_extension::Error, file: &Path, texts: &[&str]) {
    let error = error.to_string();
    assert!(error.contains(&file.display().to_string()) && !error.contains('\n'), "{error}");
    assert!(texts.iter().all(|text| error.contains(text)), "{error}: {texts:?}");
}

#[test]
fn all_kinds_shapes_and_layouts_come_back() {
    let (_folder, file) = place();
    for device in devices() {
        let mut tensors = vec![];
        for kind in KINDS {
            let values = Tensor::randn([4, 6], (Kind::Float, Device::Cpu)) * 50.0;
            let values = if kind == Kind::Bool { values.gt(0.0) } else { values.to_kind(kind) };
            let name = |what: &str| format!("{kind:?}.{what}");
            tensors.push((name("matrix"), values.copy()));
            tensors.push((name("one"), values.get(1).get(2)));
            tensors.push((name("empty"), values.narrow(0, 0, 0)));
            tensors.push((name("four"), values.view([2, 2, 3, 2])));
        }
        let tensors: Vec<_> =
            tensors.iter().map(|(name, t)| (&name[..], t.shallow_clone())).collect();
        let vs = store(device, &tensors);
        // A variable whose rows are not contiguous, and one with gaps.
        let turned = float(&[5, 3]).to_device(device).tr();
        let _ = vs.root().add("turned", turned, true);
        let gaps = float(&[4, 10]).to_device(device).slice(1, 1, 10, 3);
        let _ = vs.root().add("gaps", gaps, false);
        save(&vs, &file, &Default::default()).expect("saved");

        let other = VarStore::new(device);
        for (name, tensor) in vs.variables() {
            let (path, last) = name.rsplit_once('.').unwrap_or(("", &name));
            let path = if path.is_empty() { other.root() } else { other.root() / path };
            let _ = path.add(last, tensor.detach().zeros_like(), tensor.requires_grad());
        }
        let places = |vs: &VarStore| -> BTreeMap<String, usize> {
            vs.variables().iter().map(|(n, t)| (n.clone(), t.data_ptr().addr())).collect()
        };
        let before = places(&other);
        let report = load(&other, &[&file], &Default::default()).expect("loaded");
        assert_eq!(report, LoadReport::default());
        assert_eq!(places(&other), before, "the memory is the same");
        let found = other.variables();
        for (name, expected) in vs.variables() {
            let found = &found[&name];
            assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()), "{name}");
            assert!(found.equal(&expected), "{name}: {found} {expected}");
            assert_eq!(found.requires_grad(), expected.requires_grad(), "{name}");
        }
    }
}

#[test]
fn the_same_model_gives_the_same_bytes_and_tch_reads_them() {
    let (folder, file) = place();
    let vs = model();
    save(&vs, &file, &Default::default()).expect("saved");
    let again = folder.path().join("again.safetensors");
    save(&vs, &again, &Default::default()).expect("saved");
    let bytes = std::fs::read(&file).expect("bytes");
    assert_eq!(bytes, std::fs::read(&again).expect("bytes"));
    let mut by_tch = model();
    by_tch.load(&file).expect("tch loads it");
    assert_unchanged(&by_tch, &values(&vs));
    // And what tch writes is loaded.
    let vs = model();
    vs.save(&again).expect("tch saves");
    let ours = model();
    assert_eq!(load(&ours, &[&again], &Default::default()).expect("loaded"), LoadReport::default());
    assert_unchanged(&ours, &values(&vs));
}

#[test]
fn floating_point_values_are_converted_to_the_variable_s_kind() {
    let (_folder, file) = place();
    let floating = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];
    for from in floating {
        for to in floating {
            let source = float(&[7, 3]).to_kind(from);
            save(&store(Device::Cpu, &[("w", source.copy())]), &file, &Default::default())
                .expect("saved");
            let vs = store(Device::Cpu, &[("w", Tensor::zeros([7, 3], (to, Device::Cpu)))]);
            load(&vs, &[&file], &Default::default()).expect("loaded");
            let found = &vs.variables()["w"];
            assert!(found.kind() == to && found.equal(&source.to_kind(to)), "{from:?} {to:?}");
        }
    }
}

#[test]
fn a_gradient_s_graph_does_not_see_the_load_but_its_version_does() {
    let (_folder, file) = place();
    let vs = model();
    save(&vs, &file, &Default::default()).expect("saved");
    let weight = vs.variables()["a.weight"].shallow_clone();
    let loss = weight.square().sum(Kind::Float);
    load(&vs, &[&file], &Default::default()).expect("loaded");
    assert!(weight.is_leaf() && weight.requires_grad());
    // libtorch saved the weight for the backward pass, and its values were overwritten since.
    let error = loss.f_backward().expect_err("changed in place").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn strict_refuses_what_lenient_reports() {
    let (_folder, file) = place();
    let source = model();
    save(&source, &file, &Default::default()).expect("saved");
    let tensors: &[_] = &[
        ("a.weight", float(&[3, 4])),
        ("a.gain", float(&[3])),
        ("z", float(&[1])),
        ("c.bias", float(&[1])),
    ];
    let vs = store(Device::Cpu, tensors);
    let before = values(&vs);
    let error = load(&vs, &[&file], &Default::default()).expect_err("strict");
    let texts =
        ["no a.gain, c.bias, z", "the unexpected a.bias, b.weight, steps", "nothing was loaded"];
    assert_names(&error, &file, &texts);
    assert_unchanged(&vs, &before);

    let lenient = StateDictOptions { strict: false, ..Default::default() };
    let report = load(&vs, &[&file], &lenient).expect("lenient");
    assert_eq!(report.missing, ["a.gain", "c.bias", "z"]);
    assert_eq!(report.unexpected, ["a.bias", "b.weight", "steps"]);
    let (now, source) = (values(&vs), values(&source));
    assert!(now["a.weight"].equal(&source["a.weight"]));
    assert!(["a.gain", "z", "c.bias"].iter().all(|name| now[*name].equal(&before[*name])));
}

#[test]
fn a_long_list_of_names_is_shortened() {
    let (_folder, file) = place();
    save(&store(Device::Cpu, &[]), &file, &Default::default()).expect("an empty file");
    let names: Vec<String> = (0..100).map(|index| format!("v{index:03}")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (&name[..], float(&[1]))).collect();
    let vs = store(Device::Cpu, &tensors);
    let error = load(&vs, &[&file], &Default::default()).expect_err("strict");
    assert_names(&error, &file, &["no v000, v001", "v007 and 92 more"]);
    assert!(!error.to_string().contains("v008"));
}

#[test]
fn names_and_transposes_work_in_both_directions() {
    let (_folder, file) = place();
    let vs = model();
    let name = |name: &str| format!("module.{}", name.replace("weight", "kernel"));
    let transposed = |name: &str| name == "a.weight";
    let options =
        StateDictOptions { name: Some(&name), transposed: Some(&transposed), ..Default::default() };
    save(&vs, &file, &options).expect("saved");
    let raw: BTreeMap<_, _> =
        Tensor::read_safetensors(&file).expect("a file").into_iter().collect();
    let names = ["module.a.bias", "module.a.kernel", "module.b.kernel", "module.steps"];
    assert!(raw.keys().eq(names));
    let weight = vs.variables()["a.weight"].detach();
    assert!(raw["module.a.kernel"].equal(&weight.tr()));
    let other = model();
    load(&other, &[&file], &options).expect("loaded");
    assert_unchanged(&other, &values(&vs));

    // Without the transpose, the shapes do not fit.
    let before = values(&other);
    let options = StateDictOptions { name: Some(&name), ..Default::default() };
    let error = load(&other, &[&file], &options).expect_err("transposed");
    assert_names(&error, &file, &["module.a.kernel of shape [4, 3] instead of [3, 4]"]);
    assert_unchanged(&other, &before);
    assert!(format!("{options:?}").contains("name: true, transposed: false"));
}

#[test]
fn tied_weights_are_loaded_from_one_tensor() {
    let (_folder, file) = place();
    let table = float(&[5, 3]);
    save(&store(Device::Cpu, &[("wte.weight", table.copy())]), &file, &Default::default())
        .expect("saved");
    let vs =
        store(Device::Cpu, &[("wte.weight", float(&[5, 3])), ("lm_head.weight", float(&[5, 3]))]);
    let tie = |name: &str| name.replace("lm_head", "wte");
    let options = StateDictOptions { name: Some(&tie), ..Default::default() };
    assert_eq!(load(&vs, &[&file], &options).expect("loaded"), LoadReport::default());
    assert!(vs.variables().values().all(|value| value.equal(&table)));
    // Saving them under one name would lose one of the two.
    let error = save(&vs, &file, &options).expect_err("one name").to_string();
    assert!(
        error.contains("name: expected a name for each variable")
            && error.contains("wte.weight twice"),
        "{error}"
    );
    let reserved = |_: &str| "__metadata__".to_string();
    let options = StateDictOptions { name: Some(&reserved), ..Default::default() };
    assert!(save(&store(Device::Cpu, &[("a", table)]), &file, &options).is_err());

    // Two names of one tensor are two tensors of the file.
    let vs = VarStore::new(Device::Cpu);
    let shared = vs.root().add("a", float(&[4]), true);
    let _ = vs.root().add("b", shared.shallow_clone(), true);
    save(&vs, &file, &Default::default()).expect("saved");
    let raw: BTreeMap<_, _> =
        Tensor::read_safetensors(&file).expect("a file").into_iter().collect();
    assert!(raw["a"].equal(&shared) && raw["b"].equal(&shared));
}

#[test]
fn several_files_are_one_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let [first, second] = [1, 2].map(|n| folder.path().join(format!("model-{n}-of-2.safetensors")));
    let (a, b) = (float(&[3]), float(&[2, 2]));
    save(&store(Device::Cpu, &[("a", a.copy())]), &first, &Default::default()).expect("saved");
    save(&store(Device::Cpu, &[("b", b.copy())]), &second, &Default::default()).expect("saved");
    let vs = store(Device::Cpu, &[("a", float(&[3])), ("b", float(&[2, 2]))]);
    let files = [&first, &second];
    assert_eq!(load(&vs, &files, &Default::default()).expect("loaded"), LoadReport::default());
    assert!(vs.variables()["a"].equal(&a) && vs.variables()["b"].equal(&b));
    let before = values(&vs);
    let error = load(&vs, &[&first], &Default::default()).expect_err("half of it");
    assert_names(&error, &first, &["no b"]);
    let error = load(&vs, &[&first, &second, &first], &Default::default()).expect_err("twice");
    assert_names(&error, &first, &["names that no other file has, got a"]);
    assert_unchanged(&vs, &before);
}

#[test]
fn what_cannot_be_saved_leaves_the_old_file() {
    let (folder, file) = place();
    save(&model(), &file, &Default::default()).expect("saved");
    let before = std::fs::read(&file).expect("bytes");
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    let vs = VarStore::new(Device::Cpu);
    let _ = vs.root().add("z", complex, false);
    let error = save(&vs, &file, &Default::default()).expect_err("complex").to_string();
    assert!(error.contains("state_dict::save: z: expected a floating-point"), "{error}");
    let all = |_: &str| true;
    let options = StateDictOptions { transposed: Some(&all), ..Default::default() };
    let error = save(&model(), &file, &options).expect_err("a vector").to_string();
    assert!(
        error.contains("a.bias: expected a matrix, to be transposed, got shape [3]"),
        "{error}"
    );

    let nowhere = folder.path().join("missing").join("model.safetensors");
    assert_names(
        &save(&model(), &nowhere, &Default::default()).expect_err("no folder"),
        &nowhere,
        &[],
    );
    let error = save(&model(), folder.path(), &Default::default()).expect_err("a folder");
    assert_names(&error, folder.path(), &[]);
    assert_eq!(before, std::fs::read(&file).expect("bytes"));
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        1,
        "nothing is left over"
    );
}

#[test]
fn links_and_permissions_are_those_of_a_plain_write() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, file) = place();
    let mode = |path: &Path| std::fs::metadata(path).expect("a file").permissions().mode();
    save(&model(), &file, &Default::default()).expect("saved");
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "").expect("written");
    assert_eq!(mode(&file), mode(&plain));

    // A file that is replaced keeps its own, whether they are narrower or wider.
    for narrow_or_wide in [0o600, 0o640, 0o666, 0o400] {
        let permissions = std::fs::Permissions::from_mode(narrow_or_wide);
        std::fs::set_permissions(&file, permissions).expect("changed");
        let before = std::fs::read(&file).expect("bytes");
        save(&model(), &file, &Default::default()).expect("saved");
        assert_ne!(before, std::fs::read(&file).expect("bytes"));
        assert_eq!(mode(&file) & 0o7777, narrow_or_wide);
    }

    let link = |from: &str, to: &str| {
        let link = folder.path().join(from);
        std::os::unix::fs::symlink(to, &link).expect("a link");
        link
    };
    std::fs::create_dir(folder.path().join("other")).expect("a folder");
    let absolute = folder.path().join("other/absolute.safetensors");
    for (link, file) in [
        (link("link.safetensors", "model.safetensors"), file.clone()),
        // There is no file yet.
        (
            link("new.safetensors", "other/new.safetensors"),
            folder.path().join("other/new.safetensors"),
        ),
        (link("other/link", "../new.safetensors"), folder.path().join("other/new.safetensors")),
        (link("absolute", &absolute.to_string_lossy()), absolute),
    ] {
        let vs = model();
        save(&vs, &link, &Default::default()).expect("saved");
        assert!(std::fs::symlink_metadata(&link).expect("a link").is_symlink());
        assert!(std::fs::symlink_metadata(&file).expect("a file").is_file());
        let other = model();
        load(&other, &[&file], &Default::default()).expect("loaded");
        assert_unchanged(&other, &values(&vs));
    }
    let round = link("round", "round");
    let error = save(&model(), &round, &Default::default()).expect_err("a circle");
    assert_names(&error, &round, &["too many symbolic links"]);
}

/// Renaming a file onto a device or a pipe would remove it.
#[test]
fn what_is_no_regular_file_is_refused_and_stays() {
    use std::os::unix::fs::FileTypeExt;
    use std::os::unix::net::UnixListener;
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let _listener = UnixListener::bind(&socket).expect("a socket");
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("pipe", &link).expect("a link");
    // No device, because a test that fails would remove it.
    for path in [&socket, &pipe, &link] {
        let error = save(&model(), path, &Default::default()).expect_err("no regular file");
        assert_names(&error, path, &["expected a regular file or a new one, got a device, a pipe"]);
        let kind = std::fs::metadata(path).expect("it is still there").file_type();
        assert!(kind.is_socket() || kind.is_fifo());
    }
    let error = save(&model(), folder.path(), &Default::default()).expect_err("a folder");
    assert_names(&error, folder.path(), &["expected a regular file or a new one, got a folder"]);
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 3);
}

/// Reading a pipe without a writer would wait for ever.
#[test]
fn what_is_no_regular_file_is_not_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    for path in [pipe.as_path(), folder.path()] {
        let error = load(&model(), &[path], &Default::default()).expect_err("no regular file");
        assert_names(&error, path, &["expected a regular file, got a folder, pipe or device"]);
    }
}
