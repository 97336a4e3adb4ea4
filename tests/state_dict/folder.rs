//! Models that are split into several files.

use super::killed::{generation, has_one_value, until};
use super::{assert_names, float, store};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tch::Device;
use tch_extension::nn::state_dict::{files, load, save, save_sharded};

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<String> =
        entries.map(|entry| name(entry).into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

#[test]
fn a_model_of_another_number_of_files_takes_the_place_of_the_one_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    std::fs::write(folder.join("config.json"), "{}").expect("written");
    let index = "model.safetensors.index.json".to_string();
    // 3 · 256 KiB; a limit below the largest tensor gives it a file of its own.
    let mut value = 0.0;
    for (most, count) in [(u64::MAX, 1), (1, 4), (600 << 10, 2), (0, 4), (1 << 20, 1), (1 << 20, 1)]
    {
        value += 1.0;
        save_sharded(&generation(value), folder, most, &Default::default()).expect("saved");
        let found = files(folder).expect("files");
        assert_eq!(found.len(), count, "{most}");
        let vs = generation(-1.0);
        load(&vs, &found, &Default::default()).expect("loaded");
        assert_eq!(has_one_value(&vs), value);
        // Nothing is left of another model, and what is no model's stays.
        let mut expected: Vec<String> = found
            .iter()
            .map(|file| file.file_name().unwrap().to_str().unwrap().to_string())
            .collect();
        expected.extend((count > 1).then(|| index.clone()));
        expected.push("config.json".to_string());
        expected.sort();
        assert_eq!(names(folder), expected);
    }
}

/// In the cache of Hugging Face's hub, files are links to others that several models may share.
#[test]
fn links_are_replaced_and_what_they_lead_to_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let (cache, model) = (folder.path().join("blobs"), folder.path().join("model"));
    for folder in [&cache, &model] {
        std::fs::create_dir(folder).expect("a folder");
    }
    for most in [u64::MAX, 1] {
        save_sharded(&generation(1.0), &cache, most, &Default::default()).expect("saved");
        for name in names(&cache) {
            std::os::unix::fs::symlink(cache.join(&name), model.join(&name)).expect("a link");
        }
        let before = names(&cache);
        load(&generation(0.0), &files(&model).expect("files"), &Default::default())
            .expect("loaded");
        save_sharded(&generation(2.0), &model, most, &Default::default()).expect("saved");
        let value = |folder: &Path| {
            let vs = generation(-1.0);
            load(&vs, &files(folder).expect("files"), &Default::default()).expect("loaded");
            has_one_value(&vs)
        };
        assert_eq!((value(&cache), value(&model)), (1.0, 2.0));
        assert_eq!(names(&cache), before);
        for name in names(&model) {
            assert!(!model.join(&name).is_symlink());
            std::fs::remove_file(model.join(name)).expect("removed");
        }
    }
}

#[test]
fn what_is_missing_or_elsewhere_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let error = files(folder).expect_err("neither");
    assert_names(&error, folder, &["model.safetensors.index.json", "got neither"]);
    let vs = store(Device::Cpu, &[("a", float(&[3])), ("b", float(&[2, 2]))]);
    save_sharded(&vs, folder, 1, &Default::default()).expect("saved");
    let shard = files(folder).expect("files").remove(1);
    std::fs::remove_file(&shard).expect("removed");
    assert_names(&files(folder).expect_err("a shard is gone"), &shard, &["got none"]);
    let index = folder.join("model.safetensors.index.json");
    let elsewhere = folder.join("inner");
    std::fs::create_dir(&elsewhere).expect("a folder");
    save(&vs, elsewhere.join("x.safetensors"), &Default::default()).expect("saved");
    for text in [r#"{"weight_map": {"a": "inner/x.safetensors"}}"#, "{}", "nonsense"] {
        std::fs::write(&index, text).expect("written");
        assert_names(&files(folder).expect_err("refused"), &index, &[]);
    }
}

const FOLDER: &str = "TCH_EXTENSION_TEST_SHARDS";
const FIRST: &str = "TCH_EXTENSION_TEST_SHARDS_FIRST";

#[test]
fn a_folder_has_a_whole_model_whenever_its_writer_is_killed() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        let first = std::env::var(FIRST).expect("a number").parse().expect("a number");
        return until(Duration::from_secs(60), first, |value| {
            let most = [u64::MAX, 1, 600 << 10][value as usize % 3];
            save_sharded(&generation(value), &folder, most, &Default::default()).expect("saved");
        });
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    save_sharded(&generation(0.0), folder, 1, &Default::default()).expect("saved");
    let mut changed = 0;
    for round in 1..=15 {
        let first = 1000.0 * f64::from(round);
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "folder::a_folder_has_a_whole_model_whenever_its_writer_is_killed"])
            .env(FOLDER, folder)
            .env(FIRST, first.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        // The child needs some time to load libtorch. Then it is killed at any time of a later save.
        let saved = || {
            let name = ["model.safetensors", "model.safetensors.index.json"];
            name.map(|name| folder.join(name).metadata().and_then(|found| found.modified()).ok())
        };
        let before = saved();
        let start = std::time::Instant::now();
        while saved() == before && start.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(2900 * round as u64));
        child.kill().expect("killed");
        child.wait().expect("ended");
        let vs = generation(-1.0);
        load(&vs, &files(folder).expect("files"), &Default::default()).expect("a whole model");
        changed += i32::from(has_one_value(&vs) >= first);
    }
    assert!(changed > 7, "the child saved before it was killed: {changed}");
}
