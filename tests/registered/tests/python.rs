//! Python loads the operators and checks them.

use std::path::PathBuf;
use std::sync::OnceLock;
use support::python;

/// The library that cargo built for this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a path");
    let folder = program.parent().expect("a folder");
    let places = [folder.join("libregistered.so"), folder.join("../libregistered.so")];
    places.into_iter().find(|place| place.exists()).expect("the library next to its test")
}

/// The checks, in order. The last one loads a library that is refused.
const CHECKS: [&str; 5] = ["eager", "opcheck", "compile", "transforms", "twice"];

/// What one Python prints that runs all checks, because torch takes seconds to start.
fn all() -> &'static Result<String, String> {
    static OUTPUT: OnceLock<Result<String, String>> = OnceLock::new();
    OUTPUT.get_or_init(|| {
        let library = library();
        let checks = CHECKS.map(AsRef::as_ref);
        let arguments = [&[library.as_os_str()][..], &checks].concat();
        let output = python::command("tests/registered/tests/check.py", &arguments)?.output();
        let output = output.expect("python3 was there a moment ago");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(format!("{}\n{}\n{}", text(&output.stdout), text(&output.stderr), output.status))
    })
}

/// Returns what Python printed, in which this check succeeded, or nothing without Python.
fn run(check: &str) -> Option<&'static str> {
    match all() {
        Ok(output) => {
            let done = format!("done {check}");
            assert!(output.lines().any(|line| line == done), "{check}: {output}");
            assert!(output.ends_with("exit status: 0"), "{output}");
            Some(output)
        }
        Err(why) => {
            eprintln!("SKIPPED {check}: {why}");
            None
        }
    }
}

#[test]
fn operators_compute_and_have_gradients() {
    run("eager");
}

#[test]
fn opcheck_finds_nothing_but_the_planted_fault() {
    run("opcheck");
}

#[test]
fn one_graph_serves_all_sizes() {
    run("compile");
}

#[test]
fn transforms_see_the_operators() {
    run("transforms");
}

#[test]
fn loading_twice_is_harmless() {
    let Some(output) = run("twice") else { return };
    let refused = "the operators of registered (tests/registered/src/lib.rs:";
    assert_eq!(output.matches(refused).count(), 2, "{output}");
}
