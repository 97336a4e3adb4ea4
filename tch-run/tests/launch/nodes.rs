//! Several nodes: two or three tch-runs on this machine.

use crate::place::*;
use std::process::Child;
use std::time::Duration;

/// The tch-runs of a run, which meet on a port of its own.
struct Nodes<'a> {
    place: &'a Place,
    master: String,
    nnodes: String,
}

impl Nodes<'_> {
    fn new(place: &Place, nnodes: usize) -> Nodes<'_> {
        let master = format!("127.0.0.1:{}", free_port());
        Nodes { place, master, nnodes: nnodes.to_string() }
    }

    fn start(&self, node: usize, options: &[&str], script: &str) -> Child {
        let node = node.to_string();
        let mut all =
            vec!["--nnodes", &self.nnodes, "--node-rank", &node, "--master", &self.master];
        all.extend(["--join-timeout", "10", "--lost-after", "5"]);
        all.extend(options);
        start(&mut self.place.command(&all, script))
    }
}

fn finish_all<const N: usize>(children: [Child; N]) -> [Done; N] {
    children.map(|child| finish_child(child, SOON))
}

#[test]
fn ranks_are_counted_over_the_nodes() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 3);
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR; \
                  echo $MASTER_PORT $TORCHELASTIC_RUN_ID >> agreed";
    // In an order that is not theirs, and with different numbers of processes.
    let children = [(2, "1"), (1, "2"), (0, "1")];
    let children = children.map(|(node, count)| nodes.start(node, &["-n", count], script));
    let mut lines = Vec::new();
    for done in finish_all(children) {
        assert_eq!(done.code, 0, "{}", done.err);
        lines.extend(done.out.lines().map(String::from).collect::<Vec<_>>());
    }
    lines.sort();
    assert_eq!(
        lines,
        [
            "[rank 0] 0 0 4 1 0 127.0.0.1",
            "[rank 1] 1 0 4 2 1 127.0.0.1",
            "[rank 2] 2 1 4 2 1 127.0.0.1",
            "[rank 3] 3 0 4 1 2 127.0.0.1",
        ]
    );
    let agreed = place.read("agreed");
    let mut agreed: Vec<&str> = agreed.lines().collect();
    assert_eq!(agreed.len(), 4);
    agreed.dedup();
    assert_eq!(agreed.len(), 1, "{agreed:?}");
}

#[test]
fn a_failure_ends_all_nodes_with_its_exit_code() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "[ $RANK = 3 ] && exit 9; exec sleep 60";
    let children = [0, 1].map(|node| nodes.start(node, &["-n", "2"], script));
    for done in finish_all(children) {
        assert_eq!(done.code, 9, "{}", done.err);
        assert!(done.err.contains("node 1: rank 3 exited with 9"), "{}", done.err);
    }
}

/// The node whose failure is reported first need not be that of the rank that failed first.
#[test]
fn the_rank_that_failed_first_is_named_on_all_nodes() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "if [ $RANK = 1 ]; then echo $(date +%s%N) first boom > $TCH_RUN_ERROR_FILE; \
                  echo > said; sleep 0.5; exit 9; fi; until [ -e said ]; do sleep 0.02; done; \
                  echo $(date +%s%N) follows closed > $TCH_RUN_ERROR_FILE; exit 1";
    let children = [0, 1].map(|node| nodes.start(node, &["-n", "1"], script));
    for done in finish_all(children) {
        assert_eq!(done.code, 9, "{}", done.err);
        let last = done.err.lines().last().unwrap();
        assert!(last.starts_with("tch-run: node 1: rank 1 exited with 9 after "), "{}", done.err);
        assert!(last.ends_with(" s (boom); exit code 9"), "{}", done.err);
    }
}

/// Another program at `--master`: the store of a job, for instance.
#[test]
fn a_master_that_is_no_tch_run_is_named_at_once() {
    use std::io::Write;
    let place = Place::new();
    for (answer, words) in [
        (None, "it was silent for 1 s"),
        (Some("HTTP/1.1 400 Bad request\r\n"), "an unknown order"),
        (Some(""), "its tch-run has ended"),
    ] {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let master = other.local_addr().unwrap().to_string();
        let nodes = Nodes { place: &place, master, nnodes: "2".to_string() };
        let options = ["-n", "1", "--lost-after", "1"];
        let child = nodes.start(1, &options, "true");
        let (mut stream, _) = other.accept().unwrap();
        if let Some(answer) = answer {
            let mut hello = String::new();
            let mut reader = std::io::BufReader::new(stream.try_clone().unwrap());
            std::io::BufRead::read_line(&mut reader, &mut hello).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            drop((stream, reader));
        }
        let done = finish_child(child, SOON);
        assert_eq!(done.code, 1);
        let expected = format!("{} is no tch-run of node 0: {words}", nodes.master);
        assert!(done.err.contains(&expected), "{}", done.err);
        assert!(done.err.contains("correct --master"), "{}", done.err);
        assert!(done.time < Duration::from_secs(5), "{:?}", done.time);
    }
}

#[test]
fn node_0_listens_on_one_address() {
    use std::net::TcpStream;
    let place = Place::new();
    for (listen, open, closed) in [
        (&[][..], "127.0.0.2", "127.0.0.1"),
        (&["--listen", "127.0.0.3"], "127.0.0.3", "127.0.0.2"),
    ] {
        let port = free_port();
        let master = format!("127.0.0.2:{port}");
        let nodes = Nodes { place: &place, master, nnodes: "2".to_string() };
        let options = [&["-n", "1"], listen].concat();
        let mut first = nodes.start(0, &options, "true");
        wait_until("it listens", || TcpStream::connect((open, port)).is_ok());
        assert!(TcpStream::connect((closed, port)).is_err(), "{open}");
        let other = Nodes { master: format!("{open}:{port}"), nnodes: "2".to_string(), ..nodes };
        let second = finish_child(other.start(1, &["-n", "1"], "true"), SOON);
        assert_eq!(second.code, 0, "{}", second.err);
        first.wait().unwrap();
    }
}

/// The counts of restarts are one count: attempts begin together, and no rank of an earlier one is
/// left anywhere when the next begins.
#[test]
fn all_nodes_restart_together() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    // In each attempt but the last, another node fails. A rank that met one of another attempt
    // would find its lock.
    let script = "a=$TORCHELASTIC_RESTART_COUNT; for old in running.*; do \
                  case $old in running.$a.*|'running.*') ;; *) echo $old >> overlaps;; esac; done; \
                  echo > running.$a.$RANK; trap 'rm running.$a.$RANK; exit 1' TERM; \
                  echo $a $RANK $MASTER_PORT >> log; \
                  if [ $a = 3 ]; then rm running.$a.$RANK; exit 0; fi; \
                  if [ $RANK = $a ]; then until [ $(ls running.$a.* | wc -l) = 4 ]; do sleep 0.02; done; \
                  rm running.$a.$RANK; exit 1; fi; while :; do sleep 0.05; done";
    let options = ["-n", "2", "--max-restarts", "3"];
    let children = [0, 1].map(|node| nodes.start(node, &options, script));
    for done in finish_all(children) {
        assert_eq!(done.code, 0, "{}", done.err);
        assert!(done.err.contains("restart 3 of 3"), "{}", done.err);
    }
    assert_eq!(place.read("overlaps"), "");
    let log = place.read("log");
    for attempt in 0..4 {
        let lines = log.lines().filter(|line| line.starts_with(&attempt.to_string()));
        let ports: Vec<&str> = lines.filter_map(|line| line.split(' ').nth(2)).collect();
        assert_eq!(ports.len(), 4, "{log}");
        assert!(ports.iter().all(|port| *port == ports[0]), "{log}");
    }
}

#[test]
fn a_node_whose_tch_run_is_killed_may_come_back() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo $$ > pid.$RANK.$TORCHELASTIC_RESTART_COUNT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60";
    let options = ["-n", "1", "--max-restarts", "1"];
    let first = nodes.start(0, &options, script);
    let mut second = nodes.start(1, &options, script);
    place.wait_for("pid.0.0");
    let pid = place.wait_for("pid.1.0");
    second.kill().unwrap();
    second.wait().unwrap();
    wait_until("its rank is gone", || !runs(&pid));
    let again = nodes.start(1, &options, script);
    for done in finish_all([first, again]) {
        assert_eq!(done.code, 0, "{}", done.err);
    }
    place.wait_for("pid.1.1");
}

/// It comes back while its old connection, which nobody has closed, may still be alive.
#[test]
fn a_node_may_come_back_before_its_loss_is_noticed() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo > ready.$RANK.$TORCHELASTIC_RESTART_COUNT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60";
    let options = ["-n", "1", "--max-restarts", "1", "--lost-after", "2"];
    let first = nodes.start(0, &options, script);
    let mut second = nodes.start(1, &options, script);
    place.wait_for("ready.0.0");
    place.wait_for("ready.1.0");
    signal("STOP", &second.id().to_string());
    let again = nodes.start(1, &options, script);
    for done in finish_all([first, again]) {
        assert_eq!(done.code, 0, "{}", done.err);
    }
    second.kill().unwrap();
    second.wait().unwrap();
    place.wait_for("ready.1.1");
}

/// What the old connection said before its end is read late, and is no sign of life.
#[test]
fn a_node_may_come_back_while_node_0_is_stopped() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo > ready.$RANK.$TORCHELASTIC_RESTART_COUNT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60";
    let options = ["-n", "1", "--max-restarts", "1", "--lost-after", "20"];
    let first = nodes.start(0, &options, script);
    let mut second = nodes.start(1, &options, script);
    place.wait_for("ready.0.0");
    place.wait_for("ready.1.0");
    signal("STOP", &first.id().to_string());
    // It says that it is alive once a second.
    std::thread::sleep(Duration::from_millis(3500));
    second.kill().unwrap();
    second.wait().unwrap();
    let again = nodes.start(1, &options, script);
    std::thread::sleep(Duration::from_millis(500));
    signal("CONT", &first.id().to_string());
    for done in finish_all([first, again]) {
        assert_eq!(done.code, 0, "{}", done.err);
    }
    place.wait_for("ready.1.1");
}

#[test]
fn without_node_0_the_others_end() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo $$ > pid.$RANK; exec sleep 60";
    let mut first = nodes.start(0, &["-n", "1"], script);
    let second = nodes.start(1, &["-n", "1"], script);
    let pids = ["pid.0", "pid.1"].map(|name| place.wait_for(name));
    first.kill().unwrap();
    first.wait().unwrap();
    let done = finish_child(second, SOON);
    assert_eq!(done.code, 1);
    assert!(done.err.contains("error: node 0 is lost: its tch-run has ended"), "{}", done.err);
    wait_until("all are gone", || pids.iter().all(|pid| !runs(pid)));
}

/// A machine that loses its power closes no connection. A tch-run that is stopped does not, either.
#[test]
fn a_node_that_falls_silent_is_lost() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo $$ > pid.$RANK; exec sleep 60";
    let options = ["-n", "1", "--lost-after", "1"];
    let first = nodes.start(0, &options, script);
    let mut second = nodes.start(1, &options, script);
    place.wait_for("pid.0");
    place.wait_for("pid.1");
    signal("STOP", &second.id().to_string());
    let done = finish_child(first, SOON);
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(done.code, 1);
    assert!(done.err.contains("node 1 is lost: it was silent for 1 s"), "{}", done.err);
}

#[test]
fn an_interrupted_node_ends_all_without_a_restart() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo $$ > pid.$RANK; exec sleep 60";
    let options = ["-n", "1", "--max-restarts", "5"];
    let children = [0, 1].map(|node| nodes.start(node, &options, script));
    place.wait_for("pid.0");
    place.wait_for("pid.1");
    signal("INT", &children[1].id().to_string());
    for done in finish_all(children) {
        assert_eq!(done.code, 130, "{}", done.err);
        assert!(done.err.contains("node 1: ended by SIGINT"), "{}", done.err);
    }
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 3);
    let options = ["-n", "1", "--join-timeout", "1"];
    let children = [0, 1].map(|node| nodes.start(node, &options, "true"));
    for done in finish_all(children) {
        assert_eq!(done.code, 1);
        assert!(done.err.contains("node 2 did not join within 1 s"), "{}", done.err);
    }
    let alone = finish_child(nodes.start(1, &options, "true"), SOON);
    assert!(alone.err.contains("no tch-run of node 0 at 127.0.0.1:"), "{}", alone.err);
}

#[test]
fn a_signal_is_heard_while_nodes_are_awaited() {
    let place = Place::new();
    for node in [0, 1] {
        let nodes = Nodes::new(&place, 2);
        let child = nodes.start(node, &["-n", "1"], "true");
        std::thread::sleep(Duration::from_millis(500));
        signal("INT", &child.id().to_string());
        assert_eq!(finish_child(child, Duration::from_secs(5)).code, 130);
    }
}

#[test]
fn nodes_that_do_not_belong_together_are_refused() {
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo > ready.$RANK; until [ -e go ]; do sleep 0.02; done";
    let first = nodes.start(0, &["-n", "1", "--run-id", "a"], script);
    // Another job's.
    let stranger = finish_child(nodes.start(1, &["-n", "1", "--run-id", "b"], script), SOON);
    assert_eq!(stranger.code, 1);
    assert!(stranger.err.contains("its --run-id is b, and node 0's is a"), "{}", stranger.err);
    let second = nodes.start(1, &["-n", "1", "--run-id", "a"], script);
    place.wait_for("ready.1");
    // A second one with the same number does not disturb the first.
    let twin = finish_child(nodes.start(1, &["-n", "1"], script), SOON);
    assert!(twin.err.contains("--node-rank 1 is there already"), "{}", twin.err);
    std::fs::write(place.path("go"), "").unwrap();
    for done in finish_all([first, second]) {
        assert_eq!(done.code, 0, "{}", done.err);
    }
}

#[test]
fn a_stranger_on_the_port_is_no_harm() {
    use std::io::Write;
    let place = Place::new();
    let nodes = Nodes::new(&place, 2);
    let script = "echo > ready.$RANK; until [ -e go ]; do sleep 0.02; done";
    let children = [0, 1].map(|node| nodes.start(node, &["-n", "1"], script));
    place.wait_for("ready.1");
    // More of them than there are places.
    let mut open = Vec::new();
    for text in [
        "GET / HTTP/1.1\r\n\r\n",
        "tch-run 2 2 1 1 -\nnonsense\n",
        "tch-run 2 2 1 18446744073709551615 -\n",
        "tch-run 2 18446744073709551615 18446744073709551615 1 -\n",
        "alive\nalive\n",
        "",
        "done\n",
    ]
    .iter()
    .cycle()
    .take(100)
    {
        let mut stream = std::net::TcpStream::connect(&nodes.master).unwrap();
        // Node 0 may have closed it already.
        let _ = stream.write_all(text.as_bytes());
        open.push(stream);
    }
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(place.path("go"), "").unwrap();
    for done in finish_all(children) {
        assert_eq!(done.code, 0, "{}", done.err);
    }
}
