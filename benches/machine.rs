//! Describes the machine that the figures are measured on.

use std::fmt;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// Facts without which a figure would be worthless.
pub struct Machine {
    fields: [(&'static str, String); 7],
}

pub fn describe() -> Machine {
    let threads = tch::get_num_threads().to_string();
    Machine {
        fields: [
            ("date", date()),
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
    pub fn json(&self) -> String {
        let member = |(name, value): &(&str, String)| {
            format!("\"{name}\": \"{}\"", value.replace(['"', '\\'], ""))
        };
        self.fields.iter().map(member).collect::<Vec<_>>().join(", ")
    }
}

/// The libtorch version that torch-sys 0.24 is made for and checks.
fn tch_extension_libtorch() -> &'static str {
    "2.11.0"
}

/// Today's date in UTC.
fn date() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (year, month, day) = civil((seconds / 86400) as i64);
    format!("{year}-{month:02}-{day:02}")
}

/// The date that is `days` days after 1970-01-01 in the Gregorian calendar. The computation counts
/// years from March, so that the leap day is the last day of a year.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day_of_month)
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
