//! Several processes, as a launcher starts them: the curve of one, and files of rank 0 only.

use crate::place::*;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts a rank with the variables of a launcher.
fn start(place: &Place, arguments: &[&str], [rank, size]: [usize; 2], port: u16) -> Child {
    let mut command: Command = place.command(arguments);
    let numbers =
        [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)];
    for (name, number) in numbers {
        command.env(name, number.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of a rank, and returns what it printed on stdout.
fn finish(mut child: Child) -> String {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("a rank did not end within a minute");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    succeeded(&child.wait_with_output().unwrap())
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn several_processes_have_the_curve_of_one() {
    let place = Place::new();
    for op in ["sequence", "lstm"] {
        let arguments = ["--op", op, "--steps", "25", "--lr", "0.01"];
        succeeded(&place.run(&arguments));
        let (expected, names) = (place.losses(), place.result_names());
        for size in [2, 4] {
            let port = free_port();
            let ranks: Vec<Child> =
                (0..size).map(|rank| start(&place, &arguments, [rank, size], port)).collect();
            let printed: Vec<String> = ranks.into_iter().map(finish).collect();
            assert!(
                printed[0].contains("sample of the") && printed[1..].iter().all(String::is_empty)
            );
            let found = place.losses();
            assert_eq!(found.len(), expected.len());
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!((found - expected).abs() < 1e-3, "step {step}: {found} and {expected}");
            }
            assert_eq!(place.result_names(), names);
        }
    }
}

#[test]
fn rows_that_cannot_be_divided_are_refused() {
    let place = Place::new();
    let port = free_port();
    let arguments = ["--batch", "3"];
    let ranks = [0, 1].map(|rank| start(&place, &arguments, [rank, 2], port));
    for mut rank in ranks {
        let status = rank.wait().unwrap();
        assert_eq!(status.code(), Some(1));
    }
}
