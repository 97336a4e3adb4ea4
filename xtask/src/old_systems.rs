//! Definitions of what newer compilers and C libraries take for granted and older systems lack.

use crate::compiler;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "xtask/src/old_systems.cpp";

/// Compiles the definitions, which are in the repository.
pub fn compile(cxx: &str, root: &Path, object: &Path) -> Result<()> {
    let (program, words) = compiler::split(cxx);
    let output = Command::new(program)
        .args(words)
        .args(["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-c"])
        .arg(root.join(SOURCE))
        .arg("-o")
        .arg(object)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{SOURCE}:\n{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs;

    #[test]
    fn what_old_systems_lack_works() {
        let scratch = tempfile::tempdir().unwrap();
        let object = scratch.path().join("old_systems.o");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        compile("c++", root, &object).unwrap();
        let (source, program) = (scratch.path().join("use.cpp"), scratch.path().join("use"));
        std::fs::write(&source, USE_OF_OLD_SYSTEMS).unwrap();
        let built = Command::new("c++")
            .args(["-std=c++17", "-O1", "-o"])
            .arg(&program)
            .args([&source, &object])
            .status();
        assert!(built.unwrap().success());
        let symbols = programs::stdout("nm", &["-D", &program.to_string_lossy()]).unwrap();
        for new in [
            "_M_addref",
            "_M_release",
            "_ZSt28__throw_bad_array",
            " stat64",
            "basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev",
        ] {
            assert!(!symbols.contains(new), "{new} is taken from the system: {symbols}");
        }
        assert!(Command::new(&program).status().unwrap().success());
    }

    /// Counts how often an exception lives, so that a wrong reference count shows.
    const USE_OF_OLD_SYSTEMS: &str = r#"
        #include <exception>
        #include <memory>
        #include <new>
        #include <sstream>
        #include <sys/stat.h>
        #include <vector>
        static int alive = 0;
        struct Counted {
            Counted() { ++alive; }
            Counted(const Counted&) { ++alive; }
            ~Counted() { --alive; }
        };
        int main(int argc, char** argv) {
            std::exception_ptr first;
            try { throw Counted(); } catch (...) { first = std::current_exception(); }
            for (int round = 0; round < 3; ++round) {
                std::vector<std::exception_ptr> copies(100, first);
                copies[7] = nullptr;
                if (alive != 1) return 1;
            }
            if (alive != 1) return 2;
            try { std::rethrow_exception(first); } catch (const Counted&) {} catch (...) { return 3; }
            first = nullptr;
            if (alive != 0) return 4;
            std::ostringstream text;
            text << "a" << 1;
            if (text.str() != "a1") return 5;
            try {
                std::size_t size = -argc;
                static_cast<void>(std::allocator<long>().allocate(size / 2));
                return 6;
            } catch (const std::bad_array_new_length&) {}
            struct stat64 found;
            return stat64(argv[0], &found) == 0 && found.st_size > 0 ? 0 : 7;
        }
    "#;
}
