//! Python loads the operators and checks them.

use std::path::PathBuf;
use support::python;

/// The library that cargo built for this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a path");
    let folder = program.parent().expect("a folder");
    let places = [folder.join("libregistered.so"), folder.join("../libregistered.so")];
    places.into_iter().find(|place| place.exists()).expect("the library next to its test")
}

/// Runs the script, which prints a line for each check, or returns nothing without Python.
fn run(check: &str) -> Option<String> {
    let script = "tests/registered/tests/check.py";
    match python::command(script, &[library().as_os_str(), check.as_ref()]) {
        Ok(mut command) => {
            let output = command.output().expect("python3 was there a moment ago");
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (out, errors) = (text(&output.stdout), text(&output.stderr));
            assert!(output.status.success(), "{}: {out}{errors}", output.status);
            assert!(out.ends_with("done\n"), "{out}{errors}");
            Some(out + &errors)
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
    assert_eq!(output.matches(refused).count(), 1, "{output}");
}
