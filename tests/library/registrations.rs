//! Tests of the operators that a library lists as its own.

use super::compiled::*;
use super::*;
use std::sync::OnceLock;

/// The object file that all these libraries share. It is slow to compile and compiled once.
fn registers() -> &'static Path {
    static OBJECT: OnceLock<PathBuf> = OnceLock::new();
    OBJECT.get_or_init(|| compile_with(&[&source("registers.cpp")], &["-c"], "registers.o"))
}

/// Makes a library that registers `namespace::f`.
pub fn library_of(namespace: &str, before: &str, flags: &[&str]) -> PathBuf {
    linked(namespace, before, flags, registers())
}

fn linked(namespace: &str, before: &str, flags: &[&str], registers: &Path) -> PathBuf {
    let text = format!(
        "#include <fcntl.h>\n#include <unistd.h>\nextern \"C\" __attribute__((visibility(\"hidden\"))) const char* name_of_library() \
         {{ {before} return \"{namespace}\"; }}"
    );
    let named = folder().join(format!("{namespace}.cpp"));
    std::fs::write(&named, text).expect("a source file");
    compile_with(
        &[&named, registers],
        &[&["-shared"], flags].concat(),
        &format!("lib{namespace}.so"),
    )
}

#[test]
fn what_a_needed_library_registers_is_its_own() {
    let needed = library_of("tch_needed", "", &[]);
    let flags = [needed.to_str().unwrap(), "-Wl,--no-as-needed,-rpath,$ORIGIN"];
    // The flag must come before the library that it applies to.
    let needing = library_of("tch_needing", "", &[flags[1], flags[0]]);
    assert_eq!(Library::load(needing).unwrap().operators(), ["tch_needing::f"]);
    assert_eq!(Operator::find("tch_needed::f").unwrap().call::<i64>(args![3]).unwrap(), 3);
    assert_eq!(Library::load(needed).unwrap().operators(), ["tch_needed::f"]);
}

/// Without these tables, the stack does not show whose initialiser is running.
#[test]
fn a_library_without_tables_for_unwinding_lists_its_own() {
    let object = folder().join("no_tables.o");
    let mut objcopy = std::process::Command::new("objcopy");
    objcopy.args(["-R", ".eh_frame", "-R", ".rela.eh_frame"]).arg(registers()).arg(&object);
    assert!(objcopy.status().expect("objcopy").success());
    let library = Library::load(linked("tch_no_tables", "", &[], &object)).unwrap();
    assert_eq!(library.operators(), ["tch_no_tables::f"]);
}

#[test]
fn what_others_register_meanwhile_is_not_a_librarys() {
    let (begun, done) = (folder().join("begun"), folder().join("done"));
    let waits = format!(
        "close(creat({begun:?}, 0600)); for (int i = 0; i < 5000 && access({done:?}, F_OK); ++i) usleep(1000);"
    );
    let slow = library_of("tch_slow", &waits, &[]);
    let register = operator("register_operator");
    // A thread's first call creates its thread-local variables, for which it needs the loader's
    // lock.
    register.call::<()>(args!["before"]).unwrap();
    std::thread::scope(|scope| {
        let loads = scope.spawn(|| Library::load_without_rehearsal(&slow));
        while !begun.exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for number in 0..3 {
            register.call::<()>(args![format!("f{number}").as_str()]).unwrap();
        }
        std::fs::write(&done, "").unwrap();
        assert_eq!(loads.join().unwrap().unwrap().operators(), ["tch_slow::f"]);
    });
    assert_eq!(operators("tch_meanwhile").unwrap().len(), 4);
}
