//! The C++ compiler, as the cc crate finds it.

use crate::environment::Environment;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::Command;

/// The C++ compiler with the flags that the user wants everywhere.
#[derive(Clone, Debug)]
pub struct Cxx {
    /// What to run: the compiler or a wrapper such as ccache.
    program: PathBuf,
    /// The wrapper's compiler, flags out of `CXX`, cc's own and those of `CXXFLAGS`.
    arguments: Vec<String>,
    /// The compiler itself, without a wrapper: what nvcc takes for its host compiler.
    pub path: PathBuf,
    /// The first line of its answer to `--version`.
    pub version: String,
}

impl Cxx {
    /// What cc makes of `CXX` (a wrapper and flags included) and `CXXFLAGS`, in cargo's spellings, too.
    pub fn find(env: &dyn Environment) -> Result<Self> {
        let (target, host) = env.triples();
        for variable in variables(&target) {
            env.var(&variable);
        }
        // No `warnings(false)`: that is `-w`, which silences every other flag. Optimised, without cargo's profile: at -O0 an AVX-512 unit exports inline functions full of AVX-512 code,
        // which the linker may then use everywhere. Our own flags follow, and win.
        let mut build = cc::Build::new();
        build.cpp(true).opt_level(3).debug(false).target(&target).host(&host);
        // Outside a build script, nobody reads cc's lines for cargo.
        build.cargo_metadata(false).cargo_warnings(false);
        let tool = build.try_get_compiler().context(MISSING)?;
        let command = tool.to_command();
        let argument = |argument: &std::ffi::OsStr| argument.to_string_lossy().into_owned();
        let path = tool.path().to_path_buf();
        let output = Command::new(&path).arg("--version").output();
        let output = output.with_context(|| format!("cannot run {}: {MISSING}", path.display()))?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_string();
        Ok(Cxx {
            program: command.get_program().into(),
            arguments: command.get_args().map(argument).collect(),
            path,
            version,
        })
    }

    /// Compiler, version and flags.
    pub fn identity(&self) -> String {
        format!("{} ({}) {}", self.program.display(), self.version, self.arguments.join(" "))
    }

    /// The compiler with its flags.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}

const MISSING: &str = "a C++17 compiler is needed (Debian: apt install g++; or set CXX)";

/// What cc reads.
fn variables(target: &str) -> Vec<String> {
    let underscored = target.replace(['-', '.'], "_");
    ["CXX", "CXXFLAGS", "CXXSTDLIB"]
        .iter()
        .flat_map(|name| {
            [
                format!("{name}_{target}"),
                format!("{name}_{underscored}"),
                format!("HOST_{name}"),
                format!("TARGET_{name}"),
                name.to_string(),
            ]
        })
        .chain(["CRATE_CC_NO_DEFAULTS".to_string()])
        .collect()
}
