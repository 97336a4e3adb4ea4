//! Describes the machine that the figures are measured on.

use serde_json::{Map, Value};
use std::fmt;
use std::process::Command;

/// Facts without which a figure would be worthless.
pub struct Machine {
    fields: [(&'static str, String); 7],
}

pub fn describe() -> Machine {
    let threads = tch::get_num_threads().to_string();
    Machine {
        fields: [
            ("date", time::OffsetDateTime::now_utc().date().to_string()),
            ("commit", commit()),
            ("gpu", gpu()),
            ("driver", driver()),
            ("libtorch", tch_extension_libtorch().to_string()),
            ("cpu", cpu()),
            ("threads", threads),
        ],
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: Vec<String> =
            self.fields.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        f.write_str(&fields.join("; "))
    }
}

impl Machine {
    /// The members of a JSON object.
    pub fn json(&self) -> Map<String, Value> {
        let member = |(name, value): &(&str, String)| (name.to_string(), value.as_str().into());
        self.fields.iter().map(member).collect()
    }
}

/// The libtorch version that torch-sys 0.24 is made for and checks.
fn tch_extension_libtorch() -> &'static str {
    "2.11.0"
}

/// The commit, from the variable that the caller sets, or else from git.
fn commit() -> String {
    let told = std::env::var("TCH_EXTENSION_COMMIT").ok().filter(|commit| !commit.is_empty());
    told.unwrap_or_else(|| first_line("git", &["describe", "--always", "--dirty"]))
}

fn gpu() -> String {
    first_line("nvidia-smi", &["--query-gpu=name", "--format=csv,noheader"])
}

fn driver() -> String {
    first_line("nvidia-smi", &["--query-gpu=driver_version", "--format=csv,noheader"])
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(": "))
        .map_or("unknown".to_string(), |(_, name)| name.to_string())
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .ok()
        .filter(|output| output.status.success());
    let text = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    text.lines().next().unwrap_or("none").trim().to_string()
}
