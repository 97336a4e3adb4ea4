//! Makes the names of an extension local to it.
//!
//! For Python, each extension is a shared library with names of its own: all define `PyInit__C`,
//! and many define a `forward_kernel`. In one program these names would be defined twice, or, for
//! inline functions, the first definition would silently serve both extensions. So an extension's
//! objects are linked into one object, in which they find each other, and the names that nothing
//! else needs become local.

use crate::compile::{Object, run_compiler};
use crate::cxx::Cxx;
use crate::environment::Environment;
use anyhow::{Context, Result};
use object::elf::{SHF_WRITE, STB_GNU_UNIQUE, STB_LOCAL, STT_OBJECT, STT_TLS, STV_DEFAULT};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SectionFlags, SymbolFlags};
use std::path::{Path, PathBuf};
use std::process::Command;

type ElfFile64<'data> = object::read::elf::ElfFile64<'data, object::Endianness>;

/// Links all objects into one in `folder` and makes its own names local.
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
    // Resolve section groups: of several groups with the same name a linker keeps one, even if that
    // name is local.
    linker.args(["-r", "--force-group-allocation", "-o"]).arg(&linked);
    linker.args(objects.iter().map(|object| &object.path));
    run_compiler(&mut linker, &failed, env)?;

    let names = Names::of(&linked).with_context(|| failed.clone())?;
    let isolated = folder.join(format!("{name}.o"));
    // objcopy cannot make a unique symbol local, so it is first made weak. A symbol that stays
    // global is, as a weak one, still shared by the whole program.
    edit(&linked, &linked, "--weaken-symbols", &names.unique, cxx, &failed, env)?;
    edit(&linked, &isolated, "--localize-symbols", &names.own, cxx, &failed, env)?;
    let _ = std::fs::remove_file(linked);
    Ok(isolated)
}

/// Applies an objcopy option to these symbols of an object.
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
    // objcopy rejects an empty list.
    if !names.is_empty() {
        let list = from.with_extension("names");
        std::fs::write(&list, names.join("\n"))
            .with_context(|| format!("cannot write {}", list.display()))?;
        objcopy.arg(format!("{option}={}", list.display()));
    }
    run_compiler(objcopy.arg(from).arg(to), failed, env).map(|_| ())
}

/// Whether one of the objects is a module for Python. The sources alone do not tell: one may
/// mention a module without being one.
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

/// The prefix of the function that Python calls, and a part of the name of the variable that our
/// header makes of a `PYBIND11_MODULE`.
const INIT: &str = "PyInit_";
const MODULE: &str = "tch_extension_module_";

fn elf(bytes: &[u8]) -> Result<ElfFile64<'_>> {
    Ok(ElfFile64::parse(bytes)?)
}

/// The symbols that an object defines and other objects can see.
#[derive(Debug, Default)]
struct Names {
    /// The symbols that no other object needs.
    own: Vec<String>,
    /// Symbols of g++'s unique kind, used for variables of inline functions: there is one in a
    /// process, however many libraries define it. Two objects that define the same one do not link,
    /// unless it is in section groups.
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

/// Whether the symbol is in a section that the program writes to. Tables that are only relocated
/// are in `.data.rel.ro`.
fn is_written<'data>(file: &ElfFile64<'data>, symbol: &impl object::ObjectSymbol<'data>) -> bool {
    let section = symbol.section_index().and_then(|index| file.section_by_index(index).ok());
    section.is_some_and(|section| {
        let SectionFlags::Elf { sh_flags } = section.flags() else { return false };
        let is_relocated_only = section.name().is_ok_and(|name| name.starts_with(".data.rel.ro"));
        sh_flags & u64::from(SHF_WRITE) != 0 && !is_relocated_only
    })
}

/// Whether a symbol must become local. Sources are compiled with hidden visibility, so a symbol
/// that is not hidden is either meant for others or belongs to the standard library or libtorch, of
/// which there is only one. Among the hidden symbols without C++'s name mangling, functions are
/// called by Rust and constants are read by Rust, so both stay global. Variables do not, because in
/// C++ every global variable's name is unmangled.
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
