//! Tests of many processes at a time, and of processes that are killed.

use super::*;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The variable that is set for the processes that these tests start. Its value is the cache to
/// load from.
const CACHE: &str = "JIT_TEST_CACHE";

/// Loads the library in such a process; returns `false` in the test itself.
fn is_child() -> bool {
    let Some(cache) = std::env::var_os(CACHE) else { return false };
    let started = Instant::now();
    let module = Extension::new("processes").cpp(ANSWER).cache(cache).load().unwrap();
    let took = started.elapsed();
    assert_eq!(number(&module, "answer").unwrap(), 42);
    println!("loaded in {} ms", took.as_millis());
    true
}

/// A folder with a cache, and with a compiler that records each of its runs and sleeps as long as
/// there is a file `slow`.
struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Self {
        let scene = Scene(scratch());
        let script = format!(
            "#!/bin/sh\ncd '{}'\necho \"$@\" >> runs\n\
             case \" $* \" in *' -c '*) if [ -e slow ]; then touch started; exec sleep 60; fi;; esac\n\
             exec c++ \"$@\"\n",
            scene.0.path().display()
        );
        std::fs::write(scene.compiler(), script).unwrap();
        std::fs::set_permissions(scene.compiler(), std::fs::Permissions::from_mode(0o700)).unwrap();
        scene
    }

    fn compiler(&self) -> PathBuf {
        self.0.path().join("compiler")
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join("cache")
    }

    /// The number of times that the compiler ran, for any reason.
    fn runs(&self) -> usize {
        std::fs::read_to_string(self.0.path().join("runs")).map_or(0, |runs| runs.lines().count())
    }

    /// Runs `test` in a separate process, in which [`is_child`] is true.
    fn start(&self, test: &str) -> Child {
        self.start_with(test, &[])
    }

    fn start_with(&self, test: &str, variables: &[(&str, &str)]) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .envs(variables.iter().copied())
            .args(["--exact", "--nocapture", &format!("processes::{test}")])
            .env(CACHE, self.cache())
            .env("CXX", self.compiler())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

/// The output of a child, which must have loaded the library.
fn finish(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("loaded in"), "{text}{errors}");
    text
}

#[test]
fn ten_processes_build_once() {
    if is_child() {
        return;
    }
    let scene = Scene::new();
    let children: Vec<_> = (0..10).map(|_| scene.start("ten_processes_build_once")).collect();
    for child in children {
        finish(child);
    }
    assert_eq!(builds(&scene.cache()), 1);
}

#[test]
fn a_later_process_runs_no_compiler() {
    if is_child() {
        return;
    }
    let scene = Scene::new();
    let load = || finish(scene.start("a_later_process_runs_no_compiler"));
    load();
    let runs = scene.runs();
    assert!(runs > 0, "the compiler of the test was used");
    let timed = || {
        let text = load();
        let milliseconds =
            text.split("loaded in ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        milliseconds.parse::<u64>().unwrap()
    };
    // The fastest of several runs, because the machine may be busy.
    let took = (0..5).map(|_| timed()).min().unwrap();
    assert!(took < 50, "{took} ms");
    assert_eq!(scene.runs(), runs, "no run, not even to ask for its version");

    // If the compiler's file changes, it counts as another compiler.
    let script = std::fs::read_to_string(scene.compiler()).unwrap();
    std::fs::write(scene.compiler(), script + "# newer\n").unwrap();
    load();
    assert_eq!(builds(&scene.cache()), 2);

    // Other flags also cause a new build, in whichever variable they are.
    let flags = [("TARGET_CXXFLAGS", "-DUNUSED")];
    finish(scene.start_with("a_later_process_runs_no_compiler", &flags));
    assert_eq!(builds(&scene.cache()), 3);
}

#[test]
fn a_builder_that_is_killed_is_recovered_from() {
    if is_child() {
        return;
    }
    let scene = Scene::new();
    let file = |name: &str| scene.0.path().join(name);
    std::fs::write(file("slow"), "").unwrap();
    let mut builder = scene.start("a_builder_that_is_killed_is_recovered_from");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !file("started").exists() {
        assert!(Instant::now() < deadline, "the compiler never ran");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The second process waits for the builder and takes over after it was killed.
    let waiting = scene.start("a_builder_that_is_killed_is_recovered_from");
    std::thread::sleep(Duration::from_millis(300));
    std::fs::remove_file(file("slow")).unwrap();
    builder.kill().unwrap();
    builder.wait().unwrap();
    let killed = Instant::now();
    finish(waiting);
    assert!(
        killed.elapsed() < Duration::from_secs(30),
        "the compiler that the killed one left still sleeps"
    );
    assert_eq!(builds(&scene.cache()), 1);
    let entries = std::fs::read_dir(scene.cache()).unwrap().flatten();
    let left: Vec<_> = entries
        .flat_map(|entry| std::fs::read_dir(entry.path()).unwrap().flatten())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("build") || name.contains("part"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
