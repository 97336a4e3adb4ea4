//! Restarts on one node.

use crate::place::*;

#[test]
fn a_failure_restarts_all_ranks_on_another_port() {
    let place = Place::new();
    let script = "echo $RANK $TORCHELASTIC_RESTART_COUNT $MASTER_PORT >> log; \
                  if [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then \
                  [ $RANK = 1 ] && exit 4; exec sleep 60; fi";
    let done = place.run(&["-n", "2", "--max-restarts", "3"], script);
    assert_eq!(done.code, 0, "{}", done.err);
    for expected in ["tch-run: restart 1 of 3\n", "tch-run: restart 2 of 3\n"] {
        assert!(done.err.contains(expected), "{}", done.err);
    }
    assert!(!done.err.contains("restart 3"), "{}", done.err);
    let log = place.read("log");
    let mut starts: Vec<&str> = log.lines().map(|line| &line[..3]).collect();
    starts.sort();
    // Rank 0 of the first attempts may have been ended before it wrote.
    starts.retain(|start| start.starts_with('1') || start.ends_with('2'));
    assert_eq!(starts, ["0 2", "1 0", "1 1", "1 2"]);
    let ports = |attempt: &str| -> Vec<String> {
        let lines = log.lines().filter(|line| line.split(' ').nth(1) == Some(attempt));
        lines.filter_map(|line| Some(line.split(' ').nth(2)?.to_string())).collect()
    };
    assert_ne!(ports("0")[0], ports("1")[0]);
    assert_eq!(ports("2")[0], ports("2")[1]);
}

#[test]
fn the_last_failure_decides_when_no_restart_is_left() {
    let place = Place::new();
    let script = "echo x >> log; exit $((10 + TORCHELASTIC_RESTART_COUNT))";
    let done = place.run(&["-n", "1", "--max-restarts", "2"], script);
    assert_eq!(done.code, 12, "{}", done.err);
    assert_eq!(place.read("log"), "x\nx\nx\n");
}

#[test]
fn a_rank_killed_from_outside_comes_back() {
    let place = Place::new();
    let script = "echo $$ > pid.$RANK.$TORCHELASTIC_RESTART_COUNT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60";
    let child = start(&mut place.command(&["-n", "2", "--max-restarts", "1"], script));
    place.wait_for("pid.0.0");
    signal("KILL", &place.wait_for("pid.1.0"));
    let done = finish_child(child, SOON);
    assert_eq!(done.code, 0, "{}", done.err);
    assert!(done.err.contains("rank 1 was killed by SIGKILL"), "{}", done.err);
    assert!(!runs(place.read("pid.0.0").trim()));
}
