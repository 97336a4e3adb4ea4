//! Names that an extension keeps to itself.
//!
//! Each extension for Python is a shared library there, and its names are its own: all define
//! `PyInit__C`, and many a `forward_kernel`. In one program they would be defined twice, or,
//! inline, the first would quietly serve both. So its objects become one, in which they find each
//! other, and what nobody else asks for becomes local.

use crate::compile::{Object, run_compiler};
use crate::cxx::Cxx;
use crate::environment::Environment;
use anyhow::{Context, Result};
use object::elf::{SHF_WRITE, STB_GNU_UNIQUE, STB_LOCAL, STT_OBJECT, STT_TLS, STV_DEFAULT};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SectionFlags, SymbolFlags};
use std::path::{Path, PathBuf};
use std::process::Command;

type ElfFile64<'data> = object::read::elf::ElfFile64<'data, object::Endianness>;

/// One object of all, in `folder`.
pub fn isolate(
    objects: &[Object],
    name: &str,
    folder: &Path,
    cxx: &Cxx,
    env: &dyn Environment,
) -> Result<PathBuf> {
    let failed = format!(
        "the names of {name} cannot be made its own (`isolated(false)` leaves them as they are)"
    );
    let linked = folder.join(format!("{name}-linked.o"));
    let mut linker = Command::new(cxx.program("ld"));
    // Without groups: a linker keeps one of several groups of a name, even if that name is local.
    linker.args(["-r", "--force-group-allocation", "-o"]).arg(&linked);
    linker.args(objects.iter().map(|object| &object.path));
    run_compiler(&mut linker, &failed, env)?;

    let names = Names::of(&linked).with_context(|| failed.clone())?;
    let isolated = folder.join(format!("{name}.o"));
    // objcopy makes no unique symbol local. As a weak one, it is still one for all where it stays
    // global.
    edit(&linked, &linked, "--weaken-symbols", &names.unique, cxx, &failed, env)?;
    edit(&linked, &isolated, "--localize-symbols", &names.own, cxx, &failed, env)?;
    let _ = std::fs::remove_file(linked);
    Ok(isolated)
}

/// Does to some symbols of an object what objcopy's option says.
fn edit(
    from: &Path,
    to: &Path,
    option: &str,
    names: &[String],
    cxx: &Cxx,
    failed: &str,
    env: &dyn Environment,
) -> Result<()> {
    let mut objcopy = Command::new(cxx.program("objcopy"));
    // A list without a name is an error to it.
    if !names.is_empty() {
        let list = from.with_extension("names");
        std::fs::write(&list, names.join("\n"))
            .with_context(|| format!("cannot write {}", list.display()))?;
        objcopy.arg(format!("{option}={}", list.display()));
    }
    run_compiler(objcopy.arg(from).arg(to), failed, env).map(|_| ())
}

/// Whether one of the objects is a module for Python. A source may only speak of one.
pub fn is_module(objects: &[Object]) -> Result<bool> {
    for object in objects {
        let bytes = std::fs::read(&object.path)?;
        for symbol in elf(&bytes)?.symbols().filter(|symbol| !symbol.is_undefined()) {
            let name = symbol.name()?;
            if name.starts_with(INIT) || name.contains(MODULE) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// The function that Python calls; how the variable begins that a `PYBIND11_MODULE` is here.
const INIT: &str = "PyInit_";
const MODULE: &str = "tch_extension_module_";

fn elf(bytes: &[u8]) -> Result<ElfFile64<'_>> {
    Ok(ElfFile64::parse(bytes)?)
}

/// Symbols that an object defines for others.
#[derive(Debug, Default)]
struct Names {
    /// Those that no other object needs.
    own: Vec<String>,
    /// g++'s kind for variables of inline functions: one in a process, whichever libraries have it.
    /// Two objects that define one do not link, unless in groups.
    unique: Vec<String>,
}

impl Names {
    fn of(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        let file = elf(&bytes)?;
        let mut names = Names::default();
        for symbol in file.symbols().filter(|symbol| !symbol.is_undefined()) {
            let SymbolFlags::Elf { st_info, st_other } = symbol.flags() else { continue };
            let (binding, kind) = (st_info >> 4, st_info & 0xf);
            if binding == STB_LOCAL {
                continue;
            }
            let name = symbol.name()?;
            if binding == STB_GNU_UNIQUE {
                names.unique.push(name.to_string());
            }
            let is_hidden = st_other & 0x3 != STV_DEFAULT;
            let is_variable =
                || [STT_OBJECT, STT_TLS].contains(&kind) && is_written(&file, &symbol);
            if is_own(name, is_hidden, is_variable) {
                names.own.push(name.to_string());
            }
        }
        Ok(names)
    }
}

/// Whether it lies where a program writes. Tables that are only relocated lie in `.data.rel.ro`.
fn is_written<'data>(file: &ElfFile64<'data>, symbol: &impl object::ObjectSymbol<'data>) -> bool {
    let section = symbol.section_index().and_then(|index| file.section_by_index(index).ok());
    section.is_some_and(|section| {
        let SectionFlags::Elf { sh_flags } = section.flags() else { return false };
        let is_relocated_only = section.name().is_ok_and(|name| name.starts_with(".data.rel.ro"));
        sh_flags & u64::from(SHF_WRITE) != 0 && !is_relocated_only
    })
}

/// Sources are compiled with hidden visibility: what is not hidden says that it is for others, or
/// is the standard library's or libtorch's, of which there is one. Without C++'s mangling,
/// functions are what Rust calls, and constants what it reads; but a variable is any that is global
/// in C++.
fn is_own(name: &str, is_hidden: bool, is_variable: impl Fn() -> bool) -> bool {
    name.starts_with(INIT) || (is_hidden && (name.starts_with("_Z") || is_variable()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_ask_for_stays_global() {
        for (name, is_hidden, is_variable, own) in [
            ("PyInit__C", false, false, true),
            ("_Z6helperv", true, false, true),
            ("total", true, true, true),
            ("my_ops_forward", true, false, false),
            ("my_ops_layout", true, false, false),
            ("_ZNSt6vectorIiSaIiEE7reserveEm", false, false, false),
            ("offered", false, true, false),
        ] {
            assert_eq!(is_own(name, is_hidden, || is_variable), own, "{name}");
        }
    }
}
