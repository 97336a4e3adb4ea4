//! Links against an older glibc than the one that is installed.
//!
//! The linker binds each function to the newest version of it that the C library has, and the
//! program then needs that version. So it is given libraries without code instead: they have the
//! names of glibc's, and all their functions and variables, each in the newest version that the
//! older glibc has, too. When the program runs, the real libraries take their place.
//!
//! No tool among the packages does this: `ziglang` 0.17.1 links for an older glibc, but takes its own libc++
//! for libstdc++, with which torch's symbols are not found, and 413 MB on disk.

use crate::compiler::split;
use crate::programs;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A version such as (2, 28), or (2, 2, 5).
type Version = Vec<u32>;

/// The glibc that is linked against.
pub const OLDEST: [u32; 2] = [2, 28];

/// Since this version, `libc.so.6` has what was in other libraries before.
const MERGED: [u32; 2] = [2, 34];

const LIBRARIES: [&str; 4] = ["libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"];

/// One function or variable in one of its versions.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Symbol {
    name: String,
    version: Version,
    /// Whether this is the version that the linker would take.
    is_default: bool,
    /// The bytes of a variable; `None` for a function.
    size: Option<u64>,
}

/// Writes the libraries into a folder, for `-L`.
pub fn write_stubs(compiler: &str, folder: &Path) -> Result<()> {
    let mut all: BTreeMap<&str, Vec<Symbol>> = BTreeMap::new();
    for library in LIBRARIES {
        let path = place_of(compiler, library)?;
        let listing = read_elf(&path)?;
        for symbol in old_symbols(symbols(&listing)) {
            all.entry(home(library, &symbol)).or_default().push(symbol);
        }
    }
    for library in LIBRARIES {
        let symbols = all.get(library).with_context(|| format!("{library} has no symbol"))?;
        compile(compiler, folder, library, symbols)?;
    }
    // Some functions are in a static library that the real libc.so names, too, and one is in the
    // dynamic loader.
    let rest = place_of(compiler, "libc_nonshared.a")?;
    let loader = place_of(compiler, "ld-linux-x86-64.so.2")?;
    let script = format!(
        "GROUP ( {} {} AS_NEEDED ( {} ) )\n",
        folder.join("libc.so.6").display(),
        rest.display(),
        loader.display()
    );
    write(&folder.join("libc.so"), &script)
}

fn place_of(compiler: &str, file: &str) -> Result<PathBuf> {
    let (program, mut words) = split(compiler);
    let question = format!("-print-file-name={file}");
    words.push(&question);
    let path = programs::first_line(program, &words);
    let path = path.map(PathBuf::from).filter(|path| path.is_absolute());
    path.with_context(|| format!("{compiler} does not know where {file} is"))
}

fn read_elf(path: &Path) -> Result<String> {
    let path = path.to_string_lossy();
    programs::stdout("readelf", &["--dyn-syms", "--wide", &path])
        .with_context(|| format!("readelf, which comes with binutils, cannot read {path}"))
}

/// The functions and variables in readelf's listing.
fn symbols(listing: &str) -> Vec<Symbol> {
    listing.lines().filter_map(symbol).collect()
}

/// Reads `1434: 0000000000089380  3821 FUNC    GLOBAL DEFAULT   16 pthread_create@@GLIBC_2.34`.
fn symbol(line: &str) -> Option<Symbol> {
    let mut words = line.split_whitespace().skip(2);
    let size = words.next()?;
    let kind = words.next()?;
    let place = words.nth(2)?;
    let (name, version) = words.next()?.split_once("@")?;
    let (is_default, version) = match version.strip_prefix('@') {
        Some(version) => (true, version),
        None => (false, version),
    };
    let size = match kind {
        "FUNC" | "IFUNC" => None,
        "OBJECT" => Some(size.parse().ok()?),
        _ => return None,
    };
    // A place that is no number is that of a symbol which is defined elsewhere, or of the name of a
    // version.
    place.parse::<u32>().ok()?;
    let version = parse(version.strip_prefix("GLIBC_")?)?;
    Some(Symbol { name: name.to_string(), version, is_default, size })
}

fn parse(version: &str) -> Option<Version> {
    version.split('.').map(|part| part.parse().ok()).collect()
}

/// Each symbol in the newest version that is not too new. Those that came later are left out.
fn old_symbols(symbols: Vec<Symbol>) -> Vec<Symbol> {
    let mut newest: BTreeMap<String, Symbol> = BTreeMap::new();
    let mut merged = Vec::new();
    for symbol in symbols {
        if symbol.is_default && symbol.version[..] == MERGED {
            merged.push(symbol.name.clone());
        }
        if symbol.version[..] > OLDEST[..] {
            continue;
        }
        match newest.get(&symbol.name) {
            Some(known) if known.version > symbol.version => {}
            _ => {
                newest.insert(symbol.name.clone(), symbol);
            }
        }
    }
    for name in merged {
        if let Some(symbol) = newest.get_mut(&name) {
            symbol.is_default = false;
        }
    }
    newest.into_values().collect()
}

/// The library in which the older glibc has a symbol. One that glibc 2.34 gave a new version was in
/// another library before, as its name says; the name's other symbols have always been in libc.
fn home<'a>(library: &'a str, symbol: &Symbol) -> &'a str {
    let begins = |prefix: &str| symbol.name.starts_with(prefix);
    match library {
        "libc.so.6" if !symbol.is_default && begins("dl") => "libdl.so.2",
        "libc.so.6" if !symbol.is_default && (begins("pthread_") || begins("sem_")) => {
            "libpthread.so.0"
        }
        other => other,
    }
}

/// Makes a library with these symbols, and a link to it with the name that the linker looks for.
fn compile(compiler: &str, folder: &Path, library: &str, symbols: &[Symbol]) -> Result<()> {
    let (source, versions) = (folder.join("stub.s"), folder.join("stub.map"));
    write(&source, &assembly(symbols)?)?;
    write(&versions, &version_script(symbols)?)?;
    let (program, words) = split(compiler);
    let mut command = Command::new(program);
    command
        .args(words)
        .args(["-shared", "-nostdlib"])
        .arg(format!("-Wl,-soname,{library}"))
        .arg(format!("-Wl,--version-script={}", versions.display()))
        .arg("-o")
        .arg(folder.join(library))
        .arg(&source);
    let output = command.output().with_context(|| format!("cannot run {compiler}"))?;
    if !output.status.success() {
        bail!("{compiler} cannot make {library}: {}", programs::last_line(&output.stderr));
    }
    let (name, _) = library.split_once(".so").context("a library's name")?;
    if name == "libc" {
        return Ok(());
    }
    write(
        &folder.join(format!("{name}.so")),
        &format!("INPUT ( {} )\n", folder.join(library).display()),
    )
}

fn assembly(symbols: &[Symbol]) -> Result<String> {
    let mut text = String::from(".section .note.GNU-stack,\"\",@progbits\n");
    for Symbol { name, size, .. } in symbols {
        match size {
            None => writeln!(text, ".text\n.globl {name}\n.type {name},@function\n{name}:")?,
            Some(size) => writeln!(
                text,
                ".data\n.globl {name}\n.type {name},@object\n.size {name},{size}\n{name}: .zero {size}"
            )?,
        }
    }
    Ok(text)
}

fn version_script(symbols: &[Symbol]) -> Result<String> {
    let mut of_version: BTreeMap<&Version, Vec<&str>> = BTreeMap::new();
    for symbol in symbols {
        of_version.entry(&symbol.version).or_default().push(&symbol.name);
    }
    let mut text = String::new();
    for (version, names) in of_version {
        let version: Vec<String> = version.iter().map(u32::to_string).collect();
        writeln!(text, "GLIBC_{} {{ global: {}; }};", version.join("."), names.join("; "))?;
    }
    Ok(text)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
Symbol table '.dynsym' contains 3044 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND _dl_find_dso_for_object@GLIBC_PRIVATE (40)
     5: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.28
   177: 0000000000109530    76 FUNC    GLOBAL DEFAULT   16 __xstat64@@GLIBC_2.2.5
  1432: 0000000000089380  3821 FUNC    GLOBAL DEFAULT   16 pthread_create@GLIBC_2.2.5
  1434: 0000000000089380  3821 FUNC    GLOBAL DEFAULT   16 pthread_create@@GLIBC_2.34
  1500: 0000000000089380    21 FUNC    GLOBAL DEFAULT   16 pthread_self@@GLIBC_2.2.5
  1819: 00000000000f7840    21 FUNC    WEAK   DEFAULT   16 stat64@@GLIBC_2.33
  2001: 00000000001d3a60     8 OBJECT  WEAK   DEFAULT   34 environ@@GLIBC_2.2.5
  2100: 0000000000089380    21 IFUNC   GLOBAL DEFAULT   16 memcpy@@GLIBC_2.14
  2101: 0000000000089380    21 IFUNC   GLOBAL DEFAULT   16 memcpy@GLIBC_2.2.5
";

    #[test]
    fn each_symbol_is_there_in_its_newest_old_version() {
        let found = old_symbols(symbols(LISTING));
        let found: Vec<String> = found
            .iter()
            .map(|symbol| {
                format!("{} {:?} {}", symbol.name, symbol.version, home("libc.so.6", symbol))
            })
            .collect();
        assert_eq!(
            found,
            [
                "__xstat64 [2, 2, 5] libc.so.6",
                "environ [2, 2, 5] libc.so.6",
                "memcpy [2, 14] libc.so.6",
                "pthread_create [2, 2, 5] libpthread.so.0",
                "pthread_self [2, 2, 5] libc.so.6",
            ]
        );
    }

    #[test]
    fn a_library_that_uses_them_needs_no_newer_glibc() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        write_stubs("cc", folder).unwrap();
        let source = folder.join("user.c");
        // In glibc 2.29 exp got a new version, in 2.34 the other two, which moved to libc.
        let code = "#include <dlfcn.h>\n#include <math.h>\n#include <pthread.h>\n\
             double use(double x) { pthread_create(0, 0, 0, 0); dlsym(0, \"\"); return exp(x); }\n";
        std::fs::write(&source, code).unwrap();
        let library = folder.join("user.so");
        let link = |folder: &[String]| {
            let status = Command::new("cc")
                .args(["-shared", "-fPIC", "-Wl,-z,defs", "-o"])
                .arg(&library)
                .arg(&source)
                .args(folder)
                .args(["-lm", "-lpthread", "-ldl"])
                .status();
            assert!(status.unwrap().success());
            read_elf(&library).unwrap()
        };
        let old = link(&[format!("-L{}", folder.display())]);
        for symbol in ["exp@GLIBC_2.2.5", "pthread_create@GLIBC_2.2.5", "dlsym@GLIBC_2.2.5"] {
            assert!(old.contains(symbol), "{symbol} is not in {old}");
        }
        // What the test relies on: without the stubs, newer versions are taken.
        assert_ne!(old, link(&[]));
    }
}
