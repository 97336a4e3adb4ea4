//! What the launcher tells a rank.

use super::{failed, report};
use crate::{Error, Result};
use std::collections::HashMap;
use tch::Device;

/// Who this process is among the ranks, as its launcher says.
///
/// `torchrun`, `tch-run` and Slurm start a program once for each rank, with variables that say which
/// one it is. Without any of them, the process is a group of one.
///
/// ```
/// use tch_extension::distributed::{Env, GroupOptions, ProcessGroup};
///
/// let env = Env::from_env()?;
/// let group = ProcessGroup::init(&env, &GroupOptions::default())?;
/// println!("rank {} of {} on {:?}", group.rank(), group.size(), env.device());
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Env {
    /// This process' number among all.
    pub rank: usize,
    /// How many processes there are.
    pub world_size: usize,
    /// This process' number among those of its machine.
    pub local_rank: usize,
    /// How many processes this machine has.
    pub local_world_size: usize,
    /// Where the store of the processes is; `None` for a group of one.
    pub master: Option<Master>,
    /// How often the launcher has started the processes again.
    pub restart_count: usize,
}

/// Where the store of the processes is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// The name or address of its machine.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whether the launcher has the server, as torchrun does; otherwise rank 0 has it.
    pub is_launcher: bool,
}

impl Master {
    /// The server of rank 0.
    pub fn new(host: &str, port: u16) -> Self {
        Master { host: host.to_string(), port, is_launcher: false }
    }
}

/// The port that Slurm's ranks use if `MASTER_PORT` is unset. It is that of `torch.distributed`.
const DEFAULT_PORT: u16 = 29500;

/// The variables of torchrun that must all be there.
const TORCHRUN: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

impl Env {
    /// A group of one.
    pub fn single() -> Self {
        Env {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            master: None,
            restart_count: 0,
        }
    }

    /// Reads the variables of the process.
    ///
    /// | | read in this order |
    /// |---|---|
    /// | rank, world size | `RANK`, `WORLD_SIZE`; `SLURM_PROCID`, `SLURM_NTASKS`; a group of one |
    /// | local rank and size | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`; `SLURM_LOCALID`, `SLURM_NTASKS_PER_NODE`; all ranks on this machine |
    /// | master | `MASTER_ADDR`, `MASTER_PORT`; for Slurm also the first machine of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, or `SLURM_LAUNCH_NODE_IPADDR`, and port 29500 |
    /// | restarts | `TORCHELASTIC_RESTART_COUNT`; 0 |
    ///
    /// With `TORCHELASTIC_USE_AGENT_STORE=True`, the launcher has the store's server. Under `tch-run`,
    /// which sets `TCH_RUN_ERROR_FILE`, panics are reported from now on: a hook writes the message and
    /// the time into that file, and calls the hook that there was.
    ///
    /// # Errors
    /// For a variable that is missing or wrong, by its name.
    pub fn from_env() -> Result<Self> {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        report::watch_panics();
        Env::from_vars(std::env::vars_os().filter_map(text))
    }

    /// [`Env::from_env`] with these variables.
    ///
    /// # Errors
    /// As for [`Env::from_env`].
    pub fn from_vars(vars: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let vars = Vars(vars.into_iter().collect());
        let is_torchrun = vars.text("RANK").is_some() || vars.text("WORLD_SIZE").is_some();
        let is_slurm = vars.text("SLURM_PROCID").is_some();
        let env = if is_torchrun {
            Env::of_torchrun(&vars)?
        } else if is_slurm {
            Env::of_slurm(&vars)?
        } else {
            Env::single()
        };
        env.check()?;
        Ok(env)
    }

    fn of_torchrun(vars: &Vars) -> Result<Self> {
        let missing: Vec<_> =
            TORCHRUN.into_iter().filter(|name| vars.text(name).is_none()).collect();
        let (rank, world_size) = (vars.number("RANK")?, vars.number("WORLD_SIZE")?);
        // A group of one needs no master.
        if !missing.is_empty() && (rank, world_size) != (Some(0), Some(1)) {
            let reason = format!(
                "{} {} unset; a launcher sets {}",
                missing.join(", "),
                if missing.len() == 1 { "is" } else { "are" },
                TORCHRUN.join(", ")
            );
            return Err(failed("Env::from_env", reason));
        }
        let (rank, world_size) = (rank.unwrap_or(0), world_size.unwrap_or(1));
        let master = match vars.text("MASTER_ADDR") {
            Some(host) if missing.is_empty() => Some(Master {
                host: host.to_string(),
                port: vars.port()?.unwrap_or(DEFAULT_PORT),
                is_launcher: vars.flag("TORCHELASTIC_USE_AGENT_STORE")?,
            }),
            _ => None,
        };
        Ok(Env {
            rank,
            world_size,
            local_rank: vars.number("LOCAL_RANK")?.unwrap_or(rank),
            local_world_size: vars.number("LOCAL_WORLD_SIZE")?.unwrap_or(world_size),
            master,
            restart_count: vars.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0),
        })
    }

    fn of_slurm(vars: &Vars) -> Result<Self> {
        let rank = vars.number("SLURM_PROCID")?.unwrap_or(0);
        let world_size = vars.number("SLURM_NTASKS")?.unwrap_or(1);
        let local_rank = vars.number("SLURM_LOCALID")?.unwrap_or(0);
        let per_node = match vars.text("SLURM_NTASKS_PER_NODE") {
            Some(_) => vars.number("SLURM_NTASKS_PER_NODE")?,
            None => None,
        };
        let master = if world_size == 1 {
            None
        } else {
            Some(Master::new(&slurm_host(vars)?, vars.port()?.unwrap_or(DEFAULT_PORT)))
        };
        Ok(Env {
            rank,
            world_size,
            local_rank,
            local_world_size: per_node.unwrap_or(world_size).max(local_rank + 1).min(world_size),
            master,
            restart_count: vars.number("SLURM_RESTART_COUNT")?.unwrap_or(0),
        })
    }

    /// Checks that the numbers fit together.
    pub(super) fn check(&self) -> Result<()> {
        let pairs = [
            ("RANK", self.rank, "WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size),
        ];
        for (name, rank, size_name, size) in pairs {
            if rank >= size {
                let expected = format!("less than {size_name}, which is {size}");
                return Err(refuse(name, &expected, &rank.to_string()));
            }
        }
        if self.local_world_size > self.world_size {
            let expected = format!("at most WORLD_SIZE, which is {}", self.world_size);
            return Err(refuse("LOCAL_WORLD_SIZE", &expected, &self.local_world_size.to_string()));
        }
        Ok(())
    }

    /// The device that this rank computes on: the GPU whose number is the local rank, if libtorch
    /// sees as many, or else the CPU.
    ///
    /// If a launcher lets each process see one GPU only, that is the one.
    pub fn device(&self) -> Device {
        if !crate::cuda::is_compiled() || !tch::Cuda::is_available() {
            return Device::Cpu;
        }
        match tch::Cuda::device_count() {
            1 => Device::Cuda(0),
            _ => Device::Cuda(self.local_rank),
        }
    }

    /// Whether this is rank 0, which writes files and prints.
    pub fn is_main(&self) -> bool {
        self.rank == 0
    }
}

/// The machine of rank 0 of a Slurm job.
fn slurm_host(vars: &Vars) -> Result<String> {
    if let Some(host) = vars.text("MASTER_ADDR") {
        return Ok(host.to_string());
    }
    let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    if let Some(list) = nodes.into_iter().find_map(|name| vars.text(name)) {
        return first_host(list)
            .ok_or_else(|| refuse("SLURM_JOB_NODELIST", "a list of names such as n[1-4,7]", list));
    }
    if let Some(address) = vars.text("SLURM_LAUNCH_NODE_IPADDR") {
        return Ok(address.to_string());
    }
    Err(failed(
        "Env::from_env",
        "SLURM_JOB_NODELIST is unset; set MASTER_ADDR to the machine of rank 0",
    ))
}

/// The first name of Slurm's notation: `n007` of `n[007-009,12],m1`, and `a1b` of `a[1-2]b`.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let start = &list[..end];
    if list[end..].starts_with('[') {
        let (ranges, rest) = list[end + 1..].split_once(']')?;
        let first = ranges.split([',', '-']).next().filter(|first| !first.is_empty())?;
        let rest = rest.split(',').next().unwrap_or_default();
        // A second bracket is a list, too.
        return first_host(&format!("{start}{first}{rest}"));
    }
    (!start.is_empty()).then(|| start.to_string())
}

struct Vars(HashMap<String, String>);

impl Vars {
    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        self.text(name)
            .map(|value| value.parse().map_err(|_| refuse(name, "a number, 0 or more", value)))
            .transpose()
    }

    fn port(&self) -> Result<Option<u16>> {
        let Some(value) = self.text("MASTER_PORT") else { return Ok(None) };
        match value.parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            // Only rank 0 would know which port the system chose.
            _ => Err(refuse("MASTER_PORT", "a port from 1 to 65535, the same on all ranks", value)),
        }
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match self.text(name) {
            None => Ok(false),
            Some(value) if value.eq_ignore_ascii_case("true") || value == "1" => Ok(true),
            Some(value) if value.eq_ignore_ascii_case("false") || value == "0" => Ok(false),
            Some(value) => Err(refuse(name, "True or False", value)),
        }
    }
}

fn refuse(name: &str, expected: &str, got: &str) -> Error {
    Error::argument("Env::from_env", name, expected, format!("{got:?}"), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(vars: &[(&str, &str)]) -> Result<Env> {
        Env::from_vars(vars.iter().map(|(name, value)| (name.to_string(), value.to_string())))
    }

    #[test]
    fn torchrun_slurm_and_nobody() {
        assert_eq!(env(&[]).unwrap(), Env::single());
        assert_eq!(env(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), Env::single());
        let torchrun = env(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "host"),
            ("MASTER_PORT", "1234"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("SLURM_PROCID", "7"),
        ])
        .unwrap();
        let master = Master { is_launcher: true, ..Master::new("host", 1234) };
        assert_eq!(
            torchrun,
            Env {
                rank: 3,
                world_size: 4,
                local_rank: 1,
                local_world_size: 2,
                master: Some(master),
                restart_count: 2
            }
        );
        let slurm = env(&[
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NTASKS_PER_NODE", "4"),
            ("SLURM_JOB_NODELIST", "gpu[07-08]"),
        ])
        .unwrap();
        assert_eq!((slurm.rank, slurm.world_size), (5, 8));
        assert_eq!((slurm.local_rank, slurm.local_world_size), (1, 4));
        assert_eq!(slurm.master, Some(Master::new("gpu07", 29500)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let good =
            [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host"), ("MASTER_PORT", "1")];
        assert!(env(&good).is_ok());
        for (name, value, words) in [
            ("RANK", "x", "RANK: expected a number, 0 or more, got \"x\""),
            ("RANK", "-1", "RANK: expected a number, 0 or more, got \"-1\""),
            ("RANK", "2", "RANK: expected less than WORLD_SIZE, which is 2, got \"2\""),
            ("WORLD_SIZE", "0", "RANK: expected less than WORLD_SIZE, which is 0"),
            ("MASTER_PORT", "0", "MASTER_PORT: expected a port from 1 to 65535"),
            ("MASTER_PORT", "65536", "MASTER_PORT: expected a port from 1 to 65535"),
            ("MASTER_PORT", "", "MASTER_PORT is unset; a launcher sets RANK, WORLD_SIZE"),
            ("MASTER_ADDR", "", "MASTER_ADDR is unset"),
            ("RANK", "", "RANK is unset"),
            ("LOCAL_RANK", "2", "LOCAL_RANK: expected less than LOCAL_WORLD_SIZE, which is 2"),
            ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE: expected at most WORLD_SIZE"),
            ("TORCHELASTIC_RESTART_COUNT", "a", "TORCHELASTIC_RESTART_COUNT: expected a number"),
            ("TORCHELASTIC_USE_AGENT_STORE", "yes", "expected True or False, got \"yes\""),
        ] {
            let vars: Vec<_> = good
                .into_iter()
                .filter(|(other, _)| *other != name)
                .chain(std::iter::once((name, value)))
                .collect();
            let error = env(&vars).expect_err(name).to_string();
            assert!(error.contains(words), "{name}={value}: {error}");
        }
        let error = env(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]).unwrap_err().to_string();
        assert!(error.contains("set MASTER_ADDR"), "{error}");
    }

    #[test]
    fn slurms_lists_of_machines() {
        for (list, first) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("n[007-009,12],m1", Some("n007")),
            ("n[3,5]", Some("n3")),
            ("a[1-2]b,c", Some("a1b")),
            ("r[1-2]n[05-08]", Some("r1n05")),
            ("", None),
            ("n[", None),
            ("n[]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }
}
