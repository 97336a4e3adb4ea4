//! How runs end: the first failure, signals, and nothing that is left.

use crate::place::*;
use std::time::Duration;

/// Long enough that only a signal ends it, and not so long that it outlives a failed test for long.
const SLEEP: &str = "exec sleep 60";

#[test]
fn the_first_to_fail_gives_the_exit_code_and_ends_the_others() {
    let place = Place::new();
    let done = place.run(&["-n", "3"], &format!("[ $RANK = 1 ] && exit 7; {SLEEP}"));
    assert_eq!(done.code, 7);
    let lines: Vec<&str> = done.err.lines().collect();
    assert_eq!(lines.len(), 2, "{}", done.err);
    assert!(lines[0].starts_with("tch-run: rank 1 exited with 7 after "), "{}", done.err);
    assert!(lines[0].ends_with("; ending the others"), "{}", done.err);
    assert!(lines[1].ends_with("; exit code 7"), "{}", done.err);
    assert!(done.time < Duration::from_secs(10), "{:?}", done.time);
}

/// A rank that panics closes its connections before its process has ended.
#[test]
fn the_rank_that_says_it_failed_first_is_named() {
    let place = Place::new();
    let script = "case $RANK in \
                  1) echo $(date +%s%N) first boom > $TCH_RUN_ERROR_FILE; echo > said; sleep 0.4; exit 101;; \
                  0) until [ -e said ]; do sleep 0.02; done; \
                  echo $(date +%s%N) follows closed by peer > $TCH_RUN_ERROR_FILE; exit 1;; \
                  3) until [ -e said ]; do sleep 0.02; done; kill -KILL $$;; esac; exec sleep 60";
    let done = place.run(&["-n", "4"], script);
    assert_eq!(done.code, 101, "{}", done.err);
    let lines: Vec<&str> = done.err.lines().collect();
    assert_eq!(lines.len(), 3, "{}", done.err);
    assert!(lines[0].starts_with("tch-run: rank 1 exited with 101 after "), "{}", done.err);
    assert!(lines[0].ends_with(" s (boom); ending the others"), "{}", done.err);
    let also = "tch-run: also rank 3 was killed by SIGKILL after ";
    assert!(lines[1].starts_with(also), "{}", done.err);
    assert!(lines[1].contains(" s, rank 0 exited with 1 after "), "{}", done.err);
    assert!(lines[2].starts_with("tch-run: rank 1 exited with 101 "), "{}", done.err);
}

/// Its process may take a while to end after that.
#[test]
fn a_rank_that_has_said_so_has_the_time_to_end() {
    let place = Place::new();
    let script = "case $RANK in 1) echo $(date +%s%N) first boom > $TCH_RUN_ERROR_FILE; echo > said; \
                  sleep 1.7; exit 101;; 0) until [ -e said ]; do sleep 0.02; done; exit 1;; esac; exec sleep 60";
    let done = place.run(&["-n", "3"], script);
    assert_eq!(done.code, 101, "{}", done.err);
    assert!(done.err.starts_with("tch-run: rank 1 exited with 101 after "), "{}", done.err);
}

/// Clocks are not needed to tell a cause from what follows.
#[test]
fn a_rank_that_says_nothing_precedes_one_that_follows() {
    let place = Place::new();
    let script = "if [ $RANK = 0 ]; then echo $(date +%s%N) follows closed by peer > $TCH_RUN_ERROR_FILE; \
                  echo > said; exit 1; fi; until [ -e said ]; do sleep 0.02; done; sleep 0.3; exit 5";
    let done = place.run(&["-n", "2"], script);
    assert_eq!(done.code, 5, "{}", done.err);
    assert!(done.err.starts_with("tch-run: rank 1 exited with 5 after "), "{}", done.err);
    assert!(done.err.contains("tch-run: also rank 0 exited with 1 after "), "{}", done.err);
}

/// What a rank said long ago, of a panic that it caught for example, is no cause of its end.
#[test]
fn a_failure_that_a_rank_survived_is_not_named() {
    let place = Place::new();
    let script = "[ $RANK = 0 ] && echo $(date -d '-2 minutes' +%s%N) first probe > $TCH_RUN_ERROR_FILE; \
                  echo > said.$RANK; until [ -e said.0 -a -e said.1 ]; do sleep 0.02; done; \
                  [ $RANK = 1 ] && exit 3; sleep 0.4; exit 1";
    let done = place.run(&["-n", "2"], script);
    assert_eq!(done.code, 3, "{}", done.err);
    assert!(done.err.starts_with("tch-run: rank 1 exited with 3 after "), "{}", done.err);
    assert!(!done.err.contains("probe"), "{}", done.err);
}

#[test]
fn a_rank_that_ended_well_before_a_failure_is_named() {
    let place = Place::new();
    let script = "case $RANK in 1) echo > left;; *) until [ -e left ]; do sleep 0.02; done; \
                  sleep 0.3; [ $RANK = 0 ] && exit 4; exec sleep 60;; esac";
    let done = place.run(&["-n", "3"], script);
    assert_eq!(done.code, 4, "{}", done.err);
    let line = done.err.lines().next().unwrap();
    assert!(line.starts_with("tch-run: rank 0 exited with 4 after "), "{line}");
    assert!(line.contains(" s; before that, rank 1 exited with 0 after "), "{line}");
}

#[test]
fn what_a_rank_says_is_one_line_and_its_file_is_removed() {
    let place = Place::new();
    let script = "echo $TCH_RUN_ERROR_FILE > name.$RANK; \
                  printf '%s first a\\033[2Jb\\nc' $(date +%s%N) > $TCH_RUN_ERROR_FILE; \
                  [ $RANK = 0 ] || exit 3";
    let done = place.run(&["-n", "2"], script);
    assert_eq!(done.code, 3);
    assert!(done.err.contains("rank 1 exited with 3 after 0.0 s (a [2Jb c)"), "{:?}", done.err);
    let names = [0, 1].map(|rank| place.read(&format!("name.{rank}")).trim().to_string());
    assert_ne!(names[0], names[1]);
    let folder = std::path::Path::new(&names[0]).parent().unwrap();
    assert!(folder.is_absolute() && !folder.exists(), "{names:?}");
}

#[test]
fn a_killed_rank_gives_128_and_its_signal() {
    for (name, number) in [("KILL", 9), ("ABRT", 6), ("SEGV", 11)] {
        let place = Place::new();
        let script = format!("ulimit -c 0; [ $RANK = 1 ] && kill -{name} $$; {SLEEP}");
        let done = place.run(&["-n", "2"], &script);
        assert_eq!(done.code, 128 + number, "{}", done.err);
        assert!(done.err.contains(&format!("rank 1 was killed by SIG{name}")), "{}", done.err);
    }
}

#[test]
fn whoever_ignores_sigterm_is_killed_after_the_grace() {
    let place = Place::new();
    let script = "echo $$ > pid.$RANK; \
                  if [ $RANK = 0 ]; then trap '' TERM; echo > ready; while :; do sleep 0.1; done; fi; \
                  until [ -e ready ]; do sleep 0.02; done; exit 3";
    let done = place.run(&["-n", "2", "--grace", "1"], script);
    assert_eq!(done.code, 3);
    assert!(done.time >= Duration::from_secs(1), "{:?}", done.time);
    assert!(!runs(&place.wait_for("pid.0")));
}

#[test]
fn a_rank_may_end_in_its_own_way_within_the_grace() {
    let place = Place::new();
    // The shell has no exec here, so that the signal must reach what it started, too.
    let script = "if [ $RANK = 0 ]; then \
                  sh -c 'trap \"sleep 0.5; echo saved > saved; exit 0\" TERM; echo > ready; while :; do sleep 0.05; done'; \
                  fi; until [ -e ready ]; do sleep 0.02; done; exit 3";
    let done = place.run(&["-n", "2"], script);
    assert_eq!(done.code, 3);
    assert_eq!(place.read("saved"), "saved\n");
}

#[test]
fn what_a_rank_leaves_is_ended() {
    let place = Place::new();
    let script = "sleep 60 & echo $! > left; exit 0";
    let done = place.run(&["-n", "1"], script);
    assert_eq!(done.code, 0, "{}", done.err);
    assert!(done.time < Duration::from_secs(10), "{:?}", done.time);
    assert!(!runs(&place.wait_for("left")));
    // Also if it is silent and ignores SIGTERM.
    let script =
        "(trap '' TERM; exec sleep 60) > /dev/null 2>&1 & echo $! > left2; sleep 0.2; exit 0";
    assert_eq!(place.run(&["-n", "1"], script).code, 0);
    assert!(!runs(&place.wait_for("left2")));
}

#[test]
fn signals_are_passed_on_and_forbid_a_restart() {
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let place = Place::new();
        let script = format!("echo $$ > pid.$RANK; {SLEEP}");
        let options = ["-n", "2", "--max-restarts", "5"];
        let child = start(&mut place.command(&options, &script));
        let pids = [place.wait_for("pid.0"), place.wait_for("pid.1")];
        signal(name, &child.id().to_string());
        let done = finish_child(child, SOON);
        assert_eq!(done.code, code, "{name}: {}", done.err);
        assert!(done.err.contains(&format!("ended by SIG{name}")), "{}", done.err);
        assert!(!done.err.contains("restart"), "{}", done.err);
        assert!(pids.iter().all(|pid| !runs(pid)));
    }
}

#[test]
fn a_program_that_ends_well_by_a_signal_has_not_failed() {
    let place = Place::new();
    let script = "trap 'exit 0' TERM; echo $$ > pid.$RANK; while :; do sleep 0.05; done";
    let child = start(&mut place.command(&["-n", "2"], script));
    place.wait_for("pid.0");
    place.wait_for("pid.1");
    signal("TERM", &child.id().to_string());
    assert_eq!(finish_child(child, SOON).code, 0);
}

#[test]
fn a_second_signal_leaves_no_grace() {
    let place = Place::new();
    let script = "trap '' INT TERM; echo $$ > pid; while :; do sleep 0.1; done";
    let child = start(&mut place.command(&["-n", "1"], script));
    let pid = place.wait_for("pid");
    let own = child.id().to_string();
    signal("INT", &own);
    std::thread::sleep(Duration::from_millis(300));
    assert!(runs(&pid));
    signal("INT", &own);
    assert_eq!(finish_child(child, Duration::from_secs(10)).code, 137);
    assert!(!runs(&pid));
}

#[test]
fn a_scheduler_s_signal_reaches_the_ranks_and_ends_nothing() {
    let place = Place::new();
    let script = "trap 'echo usr1; exit 0' USR1; echo $$ > pid; while :; do sleep 0.05; done";
    let child = start(&mut place.command(&["-n", "1"], script));
    place.wait_for("pid");
    signal("USR1", &child.id().to_string());
    let done = finish_child(child, SOON);
    assert_eq!((done.code, done.out.as_str()), (0, "[rank 0] usr1\n"), "{}", done.err);
}

#[test]
fn ranks_die_with_a_tch_run_that_is_killed() {
    let place = Place::new();
    let script = format!("trap '' TERM INT HUP; echo $$ > pid.$RANK; {SLEEP}");
    let mut child = start(&mut place.command(&["-n", "2"], &script));
    let pids = [place.wait_for("pid.0"), place.wait_for("pid.1")];
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("both are gone", || pids.iter().all(|pid| !runs(pid)));
}
