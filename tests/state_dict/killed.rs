//! A process that is killed while it saves.

use super::{place, store};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::nn::state_dict::{load, save};

const FILE: &str = "TCH_EXTENSION_TEST_STATE_DICT";
const FIRST: &str = "TCH_EXTENSION_TEST_STATE_DICT_FIRST";
const TENSORS: [&str; 4] = ["a", "b", "c", "d"];

/// Each generation has one value in all its elements.
pub fn generation(value: f64) -> tch::nn::VarStore {
    let tensors =
        TENSORS.map(|name| (name, Tensor::full([64, 1024], value, (Kind::Float, Device::Cpu))));
    store(Device::Cpu, &tensors)
}

/// The value of all elements.
pub fn has_one_value(vs: &tch::nn::VarStore) -> f64 {
    let found: Vec<f64> = vs
        .variables()
        .values()
        .flat_map(|tensor| [tensor.min(), tensor.max()])
        .map(|value| value.double_value(&[]))
        .collect();
    assert!(found.iter().all(|value| *value == found[0] && *value >= 0.0), "{found:?}");
    found[0]
}

/// What the child process does: it saves one generation after the other.
pub fn until(limit: Duration, first: f64, save: impl Fn(f64)) {
    let start = Instant::now();
    let mut value = first;
    while start.elapsed() < limit {
        save(value);
        value += 1.0;
    }
}

#[test]
fn the_file_is_whole_whenever_its_writer_is_killed() {
    if let Some(file) = std::env::var_os(FILE) {
        let first = std::env::var(FIRST).expect("a number").parse().expect("a number");
        return until(Duration::from_secs(60), first, |value| {
            save(&generation(value), &file, &Default::default()).expect("saved");
        });
    }
    let (folder, file) = place();
    save(&generation(0.0), &file, &Default::default()).expect("saved");
    let mut changed = 0;
    for round in 1..=15 {
        let first = 1000.0 * round as f64;
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "killed::the_file_is_whole_whenever_its_writer_is_killed"])
            .env(FILE, &file)
            .env(FIRST, first.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        let before = std::fs::metadata(&file).expect("a file").modified().expect("a time");
        let start = Instant::now();
        // The child needs some time to load libtorch. Then it is killed at any time of a save.
        while std::fs::metadata(&file).expect("a file").modified().expect("a time") == before
            && start.elapsed() < Duration::from_secs(30)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(1700 * round));
        child.kill().expect("killed");
        child.wait().expect("ended");
        let vs = generation(-1.0);
        load(&vs, &[&file], &Default::default()).expect("a whole file");
        changed += i32::from(has_one_value(&vs) >= first);
    }
    assert!(changed > 10, "the child saved before it was killed: {changed}");
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    eprintln!("{} unfinished files were left", left - 1);
}
