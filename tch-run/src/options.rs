//! The command line.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The processes of a node at most.
pub const MOST_PROCESSES: usize = 65_536;
/// The nodes at most.
const MOST_NODES: usize = 65_536;
/// The longest name of a run.
const LONGEST_ID: usize = 200;

/// Starts a program on several processes, its ranks, with torchrun's environment variables. The
/// first rank to fail ends the others, and its exit code becomes that of tch-run.
#[derive(Debug, Parser)]
#[command(name = "tch-run", version, args_override_self = true)]
pub struct Options {
    /// Processes on this node: a number; `gpu` for one on each GPU; `auto` for one on each GPU, or
    /// on each core if there is no GPU
    #[arg(short, long = "nproc-per-node", value_name = "N", allow_hyphen_values = true)]
    pub nproc: String,
    /// How many nodes (machines) there are. Each of them runs tch-run
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nnodes: usize,
    /// Which of the nodes this one is, from 0
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub node_rank: usize,
    /// The address of node 0 as all nodes see it, and a free port there. Needed for several nodes
    #[arg(long, value_name = "HOST:PORT")]
    pub master: Option<String>,
    /// The address of this machine on which the tch-run of node 0 listens; `0.0.0.0` or `::` for all
    /// [default: the host of --master]
    #[arg(long, value_name = "HOST")]
    pub listen: Option<String>,
    /// How often all ranks are started again after a failure. With several nodes, node 0's number
    /// counts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: u32,
    /// The run's name, in TORCHELASTIC_RUN_ID; nodes with different names refuse one another
    /// [default: made by node 0]
    #[arg(long, value_name = "ID")]
    pub run_id: Option<String>,
    /// How long ranks may take to end after SIGTERM before they get SIGKILL
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    /// How long to wait until all nodes are there
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub join_timeout: u64,
    /// A node that was silent for so long is lost
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub lost_after: u64,
    /// Print the ranks' lines without `[rank 1] ` in front of each
    #[arg(long)]
    pub no_prefix: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    pub program: Vec<OsString>,
}

/// The address of node 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    pub host: String,
    pub port: u16,
}

impl Options {
    /// Reads the command line, which may also be the single word `help`.
    pub fn from_arguments(arguments: impl IntoIterator<Item = OsString>) -> Options {
        let mut arguments: Vec<OsString> = arguments.into_iter().collect();
        if let [_, word] = arguments.as_mut_slice()
            && word == "help"
        {
            *word = "--help".into();
        }
        Options::parse_from(arguments)
    }

    /// Where the nodes meet, or `None` if there is only this one.
    pub fn meeting(&self) -> Result<Option<Master>> {
        ensure!(
            (1..=MOST_NODES).contains(&self.nnodes),
            "--nnodes {}: give 1 to {MOST_NODES}",
            self.nnodes
        );
        ensure!(
            self.node_rank < self.nnodes,
            "--node-rank {} does not exist with --nnodes {}: give 0 to {}",
            self.node_rank,
            self.nnodes,
            self.nnodes - 1
        );
        for (option, seconds, least) in [
            ("--grace", self.grace, 0),
            ("--join-timeout", self.join_timeout, 1),
            ("--lost-after", self.lost_after, 1),
        ] {
            ensure!(
                (least..=1 << 32).contains(&seconds),
                "{option} {seconds} is out of range: give {least} to {} seconds",
                1_u64 << 32
            );
        }
        if let Some(id) = &self.run_id {
            ensure!(
                is_run_id(id),
                "--run-id {id:?}: give 1 to {LONGEST_ID} visible ASCII characters without spaces"
            );
        }
        ensure!(
            self.listen.is_none() || self.nnodes > 1 && self.node_rank == 0,
            "--listen is for node 0 of several nodes: leave it out"
        );
        match (&self.master, self.nnodes) {
            (None, 1) => Ok(None),
            (Some(_), 1) => bail!("--master is for several nodes: leave it out, or give --nnodes"),
            (None, _) => bail!("--nnodes {} needs --master HOST:PORT of node 0", self.nnodes),
            (Some(master), _) => parse_master(master).map(Some),
        }
    }

    /// The processes of this node.
    pub fn processes(&self) -> Result<usize> {
        match self.nproc.as_str() {
            "gpu" => {
                let gpus = gpus();
                ensure!(gpus > 0, "-n gpu: no GPU is visible here (`nvidia-smi -L` lists them)");
                Ok(gpus)
            }
            "auto" => Ok(match gpus() {
                0 => cores(),
                gpus => gpus,
            }),
            number => match number.parse() {
                Ok(processes) if (1..=MOST_PROCESSES).contains(&processes) => Ok(processes),
                _ => bail!("-n {number}: give a number from 1 to {MOST_PROCESSES}, gpu or auto"),
            },
        }
    }

    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace)
    }

    pub fn join_timeout(&self) -> Duration {
        Duration::from_secs(self.join_timeout)
    }

    pub fn lost_after(&self) -> Duration {
        Duration::from_secs(self.lost_after)
    }
}

/// Whether a text can be the name of a run.
pub fn is_run_id(id: &str) -> bool {
    let is_visible = id.chars().all(|c| c.is_ascii_graphic());
    (1..=LONGEST_ID).contains(&id.len()) && is_visible
}

/// Splits at the last colon, so that an IPv6 address may stand in brackets.
fn parse_master(master: &str) -> Result<Master> {
    let parts = master.rsplit_once(':');
    let way_out = || format!("--master {master:?}: give HOST:PORT, such as 10.0.0.1:29500");
    let (host, port) = parts.with_context(way_out)?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']').with_context(way_out)?,
        None => host,
    };
    ensure!(!host.is_empty(), way_out());
    let port = port.parse().with_context(way_out)?;
    ensure!(port != 0, "--master {master:?}: all nodes must know the port, so it cannot be 0");
    Ok(Master { host: host.to_string(), port })
}

/// How many cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// How many GPUs the ranks will see: those of CUDA_VISIBLE_DEVICES, or those that the driver's own
/// program lists.
fn gpus() -> usize {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => listed(&list),
        Err(_) => {
            let query = ["--query-gpu=index", "--format=csv,noheader"];
            let output = Command::new("nvidia-smi").args(query).stdin(Stdio::null()).output();
            let output = output.ok().filter(|output| output.status.success());
            output.map_or(0, |output| {
                let text = String::from_utf8_lossy(&output.stdout);
                text.lines().filter(|line| line.trim().parse::<u32>().is_ok()).count()
            })
        }
    }
}

/// CUDA takes no device after the first entry that it does not know, such as -1.
fn listed(devices: &str) -> usize {
    let entries = devices.split(',').map(str::trim);
    entries.take_while(|entry| !entry.is_empty() && !entry.starts_with('-')).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(line: &str) -> Options {
        Options::parse_from(format!("tch-run {line}").split_whitespace())
    }

    #[test]
    fn what_follows_the_program_is_its_own() {
        let options = options("-n 2 prog -n 3 --nnodes 7 -- x");
        assert_eq!(options.processes().unwrap(), 2);
        assert_eq!(options.program, ["prog", "-n", "3", "--nnodes", "7", "--", "x"]);
        let options = Options::parse_from(["tch-run", "-n", "2", "--", "--odd-name", "a"]);
        assert_eq!(options.program, ["--odd-name", "a"]);
    }

    #[test]
    fn wrong_options_name_the_way_out() {
        let error = |line: &str| options(line).meeting().unwrap_err().to_string();
        for nodes in ["0", "65537", "18446744073709551615"] {
            assert!(error(&format!("-n 2 --nnodes {nodes} x")).contains("give 1 to 65536"));
        }
        assert!(error("-n 2 --listen 10.0.0.1 x").contains("--listen is for node 0"));
        let one = "-n 2 --nnodes 2 --master h:1 --node-rank";
        assert!(error(&format!("{one} 1 --listen h x")).contains("--listen is for node 0"));
        assert!(options(&format!("{one} 0 --listen h x")).meeting().is_ok());
        assert!(error("-n 2 --nnodes 2 --node-rank 2 x").contains("give 0 to 1"));
        assert!(error("-n 2 --nnodes 2 x").contains("needs --master"));
        assert!(error("-n 2 --master h:1 x").contains("leave it out"));
        for master in ["h", "h:", ":1", "h:0", "h:x", "[::1:5"] {
            let line = format!("-n 2 --nnodes 2 --master {master} x");
            assert!(error(&line).contains("--master"), "{master}");
        }
        assert_eq!(options("-n2 x").processes().unwrap(), 2);
        for processes in ["0", "-1", "x", "70000"] {
            let error = options(&format!("-n {processes} x")).processes().unwrap_err();
            assert!(error.to_string().contains("-n "), "{error}");
        }
    }

    #[test]
    fn the_master_may_be_an_ipv6_address() {
        let master = |text| parse_master(text).unwrap();
        assert_eq!(master("[::1]:29500"), Master { host: "::1".into(), port: 29500 });
        assert_eq!(master("a.example:1"), Master { host: "a.example".into(), port: 1 });
    }

    #[test]
    fn visible_devices_are_counted_as_cuda_does() {
        assert_eq!(
            ["", "-1", "0", "3,1", "0,-1,1", "GPU-8a, GPU-9b"].map(listed),
            [0, 0, 1, 2, 1, 2]
        );
    }
}
