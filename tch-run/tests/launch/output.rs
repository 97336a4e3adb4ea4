//! Lines of several ranks are never torn, and stay on their streams.

use crate::place::*;
use std::collections::BTreeMap;

#[test]
fn stdout_and_stderr_stay_apart_and_have_prefixes() {
    let place = Place::new();
    let done = place.run(&["-n", "1"], "echo out; echo err >&2; printf end");
    assert_eq!(done.out, "[rank 0] out\n[rank 0] end\n");
    assert_eq!(done.err, "[rank 0] err\n");
    let done = place.run(&["-n", "1", "--no-prefix"], "echo out; echo err >&2");
    assert_eq!((done.out.as_str(), done.err.as_str()), ("out\n", "err\n"));
}

#[test]
fn lines_that_are_written_in_pieces_come_whole() {
    let place = Place::new();
    let script = "for i in $(seq 200); do printf 'a%s' $i; printf 'b%s' $RANK; echo c; done";
    let done = place.run(&["-n", "4"], script);
    assert_eq!(done.code, 0, "{}", done.err);
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in done.out.lines() {
        let (prefix, line) = line.split_once("] ").unwrap_or_else(|| panic!("torn: {line:?}"));
        found.entry(prefix.to_string()).or_default().push(line.to_string());
    }
    assert_eq!(found.len(), 4);
    for (rank, (prefix, lines)) in found.into_iter().enumerate() {
        assert_eq!(prefix, format!("[rank {rank}"));
        let expected: Vec<String> = (1..=200).map(|i| format!("a{i}b{rank}c")).collect();
        assert_eq!(lines, expected);
    }
}

#[test]
fn a_closed_reader_does_not_stop_the_ranks() {
    let place = Place::new();
    let script = "for i in $(seq 2000); do echo line $i; done; echo whole >> done.$RANK";
    let mut child = start(&mut place.command(&["-n", "2"], script));
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(place.read("done.0") + &place.read("done.1"), "whole\nwhole\n");
}
