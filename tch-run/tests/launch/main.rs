//! Runs tch-run as its users do. The ranks are shell scripts, and every test has a deadline.

mod ends;
mod nodes;
mod output;
mod place;
mod restarts;

use place::*;

#[test]
fn ranks_have_torchrun_s_variables() {
    let place = Place::new();
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $ROLE_RANK \
                  $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS \
                  $TORCH_NCCL_ASYNC_ERROR_HANDLING";
    let done = place.run(&["-n", "3"], script);
    assert_eq!(done.code, 0, "{}", done.err);
    let mut lines: Vec<&str> = done.out.lines().collect();
    lines.sort();
    assert_eq!(
        lines,
        [
            "[rank 0] 0 0 3 3 0 0 127.0.0.1 0 0 1",
            "[rank 1] 1 1 3 3 0 1 127.0.0.1 0 0 1",
            "[rank 2] 2 2 3 3 0 2 127.0.0.1 0 0 1",
        ]
    );
}

#[test]
fn the_ranks_agree_on_a_port_and_a_name() {
    let place = Place::new();
    let script = "echo $MASTER_PORT $TORCHELASTIC_RUN_ID";
    let mut lines = place.lines(&["-n", "4", "--no-prefix"], script);
    lines.dedup();
    assert_eq!(lines.len(), 1, "{lines:?}");
    let (port, _) = lines[0].split_once(' ').unwrap();
    assert!(port.parse::<u16>().unwrap() > 0);
    let named = place.lines(&["-n", "1", "--run-id", "job-7"], "echo $TORCHELASTIC_RUN_ID");
    assert_eq!(named, ["[rank 0] job-7"]);
}

#[test]
fn threads_share_the_cores_unless_their_number_is_given() {
    let place = Place::new();
    let cores = std::thread::available_parallelism().unwrap().get();
    let script = "echo $OMP_NUM_THREADS";
    let mut command = place.command(&["-n", "1", "--no-prefix"], script);
    command.env_remove("OMP_NUM_THREADS");
    assert_eq!(finish(command, SOON).out, format!("{cores}\n"));
    let mut command = place.command(&["-n", "1", "--no-prefix"], script);
    command.env("OMP_NUM_THREADS", "7");
    assert_eq!(finish(command, SOON).out, "7\n");
}

/// Under torchrun's agent, every rank is a client of the agent's store. Here rank 0 serves.
#[test]
fn an_agent_s_variables_are_not_inherited() {
    let place = Place::new();
    let mut command =
        place.command(&["-n", "1"], "echo ${TORCHELASTIC_USE_AGENT_STORE:-none} $RANK");
    command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("RANK", "9");
    assert_eq!(finish(command, SOON).out, "[rank 0] none 0\n");
}

#[test]
fn gpus_are_those_that_ranks_would_see() {
    let place = Place::new();
    let mut command = place.command(&["-n", "gpu"], "echo $WORLD_SIZE");
    command.env("CUDA_VISIBLE_DEVICES", "4,6");
    let mut lines: Vec<String> = finish(command, SOON).out.lines().map(String::from).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] 2", "[rank 1] 2"]);
    let mut command = place.command(&["-n", "gpu"], "true");
    command.env("CUDA_VISIBLE_DEVICES", "");
    let refused = finish(command, SOON);
    assert_eq!(refused.code, 1);
    assert!(refused.err.starts_with("tch-run: error: -n gpu: no GPU"), "{}", refused.err);
}

#[test]
fn help_is_a_word_and_an_option() {
    let [word, option] = ["help", "--help"].map(|argument| {
        let mut command = tch_run();
        command.arg(argument);
        finish(command, SOON)
    });
    assert_eq!((word.code, option.code), (0, 0), "{}", word.err);
    assert!(word.out.contains("--max-restarts") && word.out == option.out, "{}", word.out);
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let place = Place::new();
    let mut command = tch_run();
    command
        .args(["-n", "2", "--max-restarts", "3", "/no/such/program"])
        .current_dir(place.folder());
    let refused = finish(command, SOON);
    assert_eq!(refused.code, 127);
    assert_eq!(refused.err.lines().count(), 1, "{}", refused.err);
    assert!(refused.err.contains("cannot start /no/such/program: No such file"), "{}", refused.err);
}
