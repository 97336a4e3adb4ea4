//! Finds the C++ compiler with the cc crate and checks that it suits libtorch.

use crate::environment::Environment;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest g++ that PyTorch supports.
const OLDEST_GXX: u32 = 9;

/// The C++ compiler and the flags that the user wants for every source.
#[derive(Clone, Debug)]
pub struct Cxx {
    /// The program to run: the compiler, or a wrapper such as ccache.
    program: PathBuf,
    /// If there is a wrapper, the compiler; then the flags in `CXX`, cc's own flags and those in
    /// `CXXFLAGS`.
    arguments: Vec<String>,
    /// The compiler itself, without a wrapper. nvcc uses it as its host compiler.
    pub path: PathBuf,
    /// The version, such as `12.2.0`.
    pub version: String,
    /// Whether it is clang, which has an OpenMP of its own; libtorch uses g++'s.
    pub is_clang: bool,
}

impl Cxx {
    /// Finds the compiler as the cc crate does, from `CXX` (which may contain a wrapper and flags)
    /// and `CXXFLAGS`, including cargo's target-specific spellings. It is an error if the
    /// compiler's objects do not go with a libtorch that was built with this
    /// `_GLIBCXX_USE_CXX11_ABI`.
    pub fn find(cxx11_abi: &str, env: &dyn Environment) -> Result<Self> {
        let (target, host) = env.triples();
        for variable in variables(&target) {
            env.var(&variable);
        }
        let mut build = cc::Build::new();
        // `warnings(false)` is not called, because it adds `-w`, which silences every other warning
        // flag. The level of optimisation does not follow cargo's profile: at -O0, an AVX-512
        // object exports inline functions with AVX-512 code, which the linker may then use
        // everywhere. Our own flags come later and win.
        build.cpp(true).opt_level(3).debug(false).target(&target).host(&host);
        // The lines that cc prints for cargo are useful only in a build script.
        build.cargo_metadata(false).cargo_warnings(false);
        let tool = build.try_get_compiler().context(MISSING)?;
        let command = tool.to_command();
        let arguments: Vec<_> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        let path = tool.path().to_path_buf();
        let macros = macros(&path, &arguments, cxx11_abi)?;
        let (version, is_clang) = check(&path, &macros, cxx11_abi)?;
        Ok(Cxx { program: command.get_program().into(), arguments, path, version, is_clang })
    }

    /// The compiler, its version and its flags.
    pub fn identity(&self) -> String {
        format!("{} ({}) {}", self.program.display(), self.version, self.arguments.join(" "))
    }

    /// The flags that make `at::parallel_for` run in parallel, on libtorch's own threads.
    pub fn openmp(&self) -> &'static [&'static str] {
        if self.is_clang { &[] } else { &["-fopenmp"] }
    }

    /// The path of another program that the compiler uses, such as `ld`; only the name if the
    /// compiler knows no path.
    pub fn program(&self, name: &str) -> PathBuf {
        let output = Command::new(&self.path).arg(format!("-print-prog-name={name}")).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string());
        text.ok().filter(|text| !text.is_empty()).unwrap_or_else(|| name.to_string()).into()
    }

    /// The compiler with its flags.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}

const MISSING: &str = "a C++17 compiler is needed (Debian: apt install g++; or set CXX)";

/// The variables that cc reads.
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

/// The macros that the compiler and its standard library define.
fn macros(path: &Path, arguments: &[String], cxx11_abi: &str) -> Result<HashMap<String, String>> {
    let flags = arguments.iter().filter(|argument| argument.starts_with('-'));
    let output = Command::new(path)
        .args(flags)
        .arg(format!("-D_GLIBCXX_USE_CXX11_ABI={cxx11_abi}"))
        .args(["-dM", "-E", "-include", "cstddef", "-x", "c++", "/dev/null"])
        .output()
        .with_context(|| format!("cannot run {}: {MISSING}", path.display()))?;
    if !output.status.success() {
        bail!(
            "{} does not work (see CXX and CXXFLAGS):\n{}",
            path.display(),
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(parse_macros(&String::from_utf8_lossy(&output.stdout)))
}

fn parse_macros(text: &str) -> HashMap<String, String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '))
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

/// Checks the compiler, and returns its version and whether it is clang.
fn check(path: &Path, macros: &HashMap<String, String>, cxx11_abi: &str) -> Result<(String, bool)> {
    let name = path.display();
    let number =
        |key: &str| macros.get(key).and_then(|value| value.parse::<u32>().ok()).unwrap_or(0);
    let version =
        macros.get("__VERSION__").map_or("", String::as_str).trim_matches('"').to_string();
    if macros.contains_key("_LIBCPP_VERSION") {
        bail!(
            "{name} uses libc++, but libtorch is built on libstdc++; drop -stdlib=libc++ from CXX and CXXFLAGS"
        );
    }
    let is_clang = macros.contains_key("__clang__");
    if !is_clang && number("__GNUC__") < OLDEST_GXX {
        bail!(
            "{name} is g++ {version}, but libtorch's headers need g++ {OLDEST_GXX} or newer; set CXX to one"
        );
    }
    let abi = macros.get("_GLIBCXX_USE_CXX11_ABI");
    if abi.is_some_and(|abi| abi != cxx11_abi) {
        bail!(
            "{name} has only the old ABI of std::string (_GLIBCXX_USE_CXX11_ABI=0), but libtorch was built with \
             {cxx11_abi}; set CXX to a compiler whose libstdc++ has both"
        );
    }
    Ok((version, is_clang))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(macros: &str) -> std::result::Result<(String, bool), String> {
        check(Path::new("c++"), &parse_macros(macros), "1").map_err(|error| error.to_string())
    }

    #[test]
    fn a_compiler_that_does_not_go_with_libtorch_is_refused() {
        let gxx =
            "#define __GNUC__ 12\n#define __VERSION__ \"12.2.0\"\n#define _GLIBCXX_USE_CXX11_ABI ";
        assert_eq!(checked(&format!("{gxx}1\n")), Ok(("12.2.0".to_string(), false)));
        let clang = "#define __GNUC__ 4\n#define __clang__ 1\n#define __VERSION__ \"Clang 19\"\n";
        assert_eq!(checked(clang), Ok(("Clang 19".to_string(), true)));
        for (macros, reason) in [
            (format!("{gxx}0\n"), "old ABI"),
            ("#define __GNUC__ 8\n".to_string(), "need g++ 9 or newer; set CXX"),
            (format!("{clang}#define _LIBCPP_VERSION 190000\n"), "drop -stdlib=libc++"),
        ] {
            let error = checked(&macros).expect_err(reason);
            assert!(error.contains(reason), "{error}");
        }
    }
}
