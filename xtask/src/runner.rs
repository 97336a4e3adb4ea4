//! Runs test programs, several at the same time. Cargo would run one after another, and at the end of
//! each its longest test leaves cores idle.

use crate::programs;
use crate::report::say;
use crate::setup::{self, Changes};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::HashMap;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A program that takes longer is killed. The longest takes a few minutes.
pub const LIMIT: Duration = Duration::from_secs(20 * 60);

/// The programs that take longest, in this order. They begin first, so that none of them is left
/// alone at the end.
const LONGEST: [&str; 12] = [
    "jit",
    "distributed",
    "lstm",
    "python",
    "llm",
    "lltm_cell",
    "lltm",
    "gru",
    "library",
    "char_lltm",
    "layer_norm",
    "package",
];

/// A command to run, and how its user runs it again.
pub struct Run {
    pub title: String,
    pub command: Command,
    pub again: String,
}

/// A test program that cargo built.
pub struct Program {
    pub name: String,
    package: String,
    kind: String,
    executable: PathBuf,
    folder: PathBuf,
}

/// The test programs that these messages of `cargo test --no-run` report, the longest first.
pub fn programs(messages: &[Value]) -> Vec<Program> {
    let mut programs: Vec<Program> = messages.iter().filter_map(program).collect();
    programs.sort_by_key(|program| {
        LONGEST.iter().position(|name| *name == program.name).unwrap_or(LONGEST.len())
    });
    programs
}

fn program(message: &Value) -> Option<Program> {
    let executable =
        message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    // `path+file:///folder#name@version`, or without the name if it is that of the folder.
    let id = message["package_id"].as_str()?;
    let named = id.rsplit_once('#').and_then(|(_, id)| Some(id.split_once('@')?.0));
    Some(Program {
        name: message["target"]["name"].as_str()?.to_string(),
        package: named.or_else(|| folder.file_name()?.to_str())?.to_string(),
        kind: message["target"]["kind"][0].as_str()?.to_string(),
        executable: executable.into(),
        folder: folder.into(),
    })
}

impl Program {
    /// The run of this program in the environment that cargo would give it.
    pub fn run(&self, changes: &Changes, selection: &[&str]) -> Run {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder);
        // These describe xtask's own package.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CARGO_PKG_") {
                command.env_remove(name);
            }
        }
        command.env("CARGO_MANIFEST_DIR", &self.folder);
        // What the changes remove for cargo is what cargo sets again: `cargo run` has set it here.
        command.envs(changes.iter().filter_map(|(name, value)| Some((name, value.as_ref()?))));
        let target = match self.kind.as_str() {
            "test" => format!("--test {}", self.name),
            "bin" => format!("--bin {}", self.name),
            _ => "--lib".to_string(),
        };
        let again = format!("cargo test {} {target}", selection.join(" "));
        Run { title: format!("{} {target}", self.package), command, again }
    }

    /// The first of these words that the name of one of its tests contains. It is an error if there is
    /// none, because nothing would be tested.
    pub fn first_with_tests<'a>(&self, words: &[&'a str], changes: &Changes) -> Result<&'a str> {
        for word in words {
            let output = self.run(changes, &[]).command.args(["--list", word]).output();
            let output =
                output.with_context(|| format!("cannot run {}", self.executable.display()))?;
            if String::from_utf8_lossy(&output.stdout).contains(": test\n") {
                return Ok(word);
            }
        }
        bail!("no name of a test of {} contains one of {words:?}", self.name)
    }
}

/// How many programs run at the same time, and the environment that leaves each its share of the
/// cores. On a GPU it is one, because tests measure its memory.
pub fn shares() -> (usize, Changes) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let at_once = if setup::has_gpu() { 1 } else { cores.min(2) };
    let mut changes = setup::one_test_at_a_time();
    if changes.is_empty() && setup::real_env(setup::TEST_THREADS).is_none() {
        changes.push((setup::TEST_THREADS.to_string(), Some((cores / at_once).to_string().into())));
    }
    (at_once, changes)
}

/// Runs all of them, in this order and as many at the same time, and returns an error that lists
/// those that failed or took longer than the limit. The output of each is printed as a whole.
pub fn run(runs: Vec<Run>, at_once: usize, limit: Duration) -> Result<()> {
    let total = runs.len();
    if total == 0 {
        bail!("there is no test program, so nothing was tested");
    }
    let (queue, failed) = (Mutex::new(runs.into_iter()), Mutex::new(Vec::new()));
    let next = || queue.lock().expect("nothing panics while it is locked").next();
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(Run { title, command, again }) = next() {
                    if let Err(error) = run_one(&title, command, limit) {
                        let line = format!("{title}: {error:#}\n    {again}");
                        failed.lock().expect("nothing panics while it is locked").push(line);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("nothing panics while it is locked");
    if !failed.is_empty() {
        bail!("{} of {total} failed:\n  {}", failed.len(), failed.join("\n  "));
    }
    Ok(())
}

fn run_one(title: &str, mut command: Command, limit: Duration) -> Result<()> {
    // Not a pipe, which a process that outlives the program would keep open.
    let mut output = tempfile::tempfile().context("cannot make a file for the output")?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
    let start = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    let status = wait(&mut child, start + limit)?;
    let mut text = Vec::new();
    output
        .rewind()
        .and_then(|()| output.read_to_end(&mut text))
        .context("cannot read the output")?;
    let outcome = match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(anyhow::anyhow!("{status}")),
        None => Err(anyhow::anyhow!("killed after {} s", limit.as_secs_f64())),
    };
    let what =
        outcome.as_ref().map_or_else(|error| format!("FAILED, {error}"), |()| "ok".to_string());
    say(format_args!(
        "-- {title}: {what}, {:.1} s\n{}",
        start.elapsed().as_secs_f64(),
        String::from_utf8_lossy(&text).trim_end()
    ));
    outcome
}

/// Waits for a process; `None` if it was killed at the deadline, with all that it had started.
fn wait(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            let ids: Vec<String> = family(child.id()).iter().map(u32::to_string).collect();
            programs::command("kill", &["-KILL"]).args(ids).stderr(Stdio::null()).status()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A process and its descendants.
fn family(id: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        // `12 (a name) S 11 …`: the name may contain anything, and the parent's number comes third.
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split(' ').nth(2)?.parse().ok());
        let id = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let (Some(parent), Some(id)) = (parent, id) {
            children.entry(parent).or_default().push(id);
        }
    }
    let mut family = vec![id];
    let mut seen = 0;
    while let Some(id) = family.get(seen) {
        family.extend(children.remove(id).into_iter().flatten());
        seen += 1;
    }
    family
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(title: &str, script: &str) -> Run {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Run { title: title.to_string(), command, again: format!("again {title}") }
    }

    #[test]
    fn each_that_fails_is_named_and_the_others_run() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("ran");
        let last = shell("last", &format!("touch '{}'", file.display()));
        let runs = vec![shell("a", "exit 3"), shell("b", "true"), shell("c", "kill -9 $$"), last];
        let error = run(runs, 2, LIMIT).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().map(str::trim).collect();
        assert_eq!(lines[0], "2 of 4 failed:");
        for expected in ["a: exit status: 3", "again a", "c: signal: 9 (SIGKILL)", "again c"] {
            assert!(lines.contains(&expected), "{error}");
        }
        assert!(lines.len() == 5 && file.exists(), "{error}");
        assert!(run(Vec::new(), 2, LIMIT).unwrap_err().to_string().contains("nothing was tested"));
    }

    #[test]
    fn they_run_at_the_same_time() {
        let scratch = tempfile::tempdir().unwrap();
        // Each of the two waits for the file that the other one makes.
        let meets = |own: &str, other: &str| {
            let wait = "for i in $(seq 500); do [ -e $1 ] && exit; sleep 0.02; done; exit 1";
            let (own, other) = (scratch.path().join(own), scratch.path().join(other));
            shell("", &format!("set -- '{}'; touch '{}'; {wait}", other.display(), own.display()))
        };
        run(vec![meets("a", "b"), meets("b", "a")], 2, LIMIT).unwrap();
        let short = Duration::from_millis(200);
        let error = run(vec![meets("c", "d"), meets("d", "c")], 1, short).unwrap_err();
        assert!(error.to_string().contains("killed after 0.2 s"), "{error}");
    }

    #[test]
    fn one_that_hangs_is_killed_with_what_it_started() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("id");
        let script = format!("sh -c 'echo $$ > {0}; exec sleep 600' & wait", file.display());
        let begin = Instant::now();
        let error = run(vec![shell("a", &script)], 2, Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains("a: killed after 1 s"), "{error}");
        let id = std::fs::read_to_string(&file).unwrap();
        // It ends a moment after the signal.
        let is_there = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.trim()));
            stat.is_ok_and(|stat| stat.contains("(sleep)") && !stat.contains(") Z "))
        };
        while is_there() {
            assert!(begin.elapsed() < Duration::from_secs(60), "it was not killed");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn finds_test_programs_in_cargos_messages_and_the_longest_first() {
        let message = |folder: &str, id: &str, kind: &str, name: &str, test: bool| {
            serde_json::json!({
                "package_id": format!("path+file:///w{folder}{id}"),
                "manifest_path": format!("/w{folder}/Cargo.toml"),
                "target": { "kind": [kind], "name": name },
                "profile": { "test": test },
                "executable": "/w/target/debug/deps/x",
            })
        };
        let found = programs(&[
            message("", "#tch-extension@0.1.0", "lib", "tch_extension", true),
            message("", "#tch-extension@0.1.0", "example", "demo", false),
            message("/tests", "#0.1.0", "test", "rope", true),
            message("/tests", "#0.1.0", "test", "jit", true),
            serde_json::json!({ "reason": "build-finished", "success": true }),
        ]);
        let runs = found.iter().map(|program| program.run(&Changes::new(), &["--workspace"]));
        let (titles, again): (Vec<_>, Vec<_>) = runs.map(|run| (run.title, run.again)).unzip();
        assert_eq!(titles, ["tests --test jit", "tch-extension --lib", "tests --test rope"]);
        assert_eq!(again[0], "cargo test --workspace --test jit");
    }
}
