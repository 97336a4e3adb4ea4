//! What a library lists as its own.

use super::compiled::*;
use super::*;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The slow part of them all, compiled once.
fn registers() -> &'static Path {
    static OBJECT: OnceLock<PathBuf> = OnceLock::new();
    OBJECT.get_or_init(|| compile_with(&[&source("registers.cpp")], &["-c"], "registers.o"))
}

/// A library that registers `namespace::f`.
fn library_of(namespace: &str, before: &str, flags: &[&str]) -> PathBuf {
    let text = format!(
        "#include <unistd.h>\nextern \"C\" __attribute__((visibility(\"hidden\"))) const char* name_of_library() \
         {{ {before} return \"{namespace}\"; }}"
    );
    let named = folder().join(format!("{namespace}.cpp"));
    std::fs::write(&named, text).expect("a source file");
    compile_with(&[&named, registers()], &[&["-shared"], flags].concat(), &format!("lib{namespace}.so"))
}

#[test]
fn what_a_needed_library_registers_is_its_own() {
    let needed = library_of("tch_needed", "", &[]);
    let flags = [needed.to_str().unwrap(), "-Wl,--no-as-needed,-rpath,$ORIGIN"];
    // First the flag, then what it is about.
    let needing = library_of("tch_needing", "", &[flags[1], flags[0]]);
    assert_eq!(Library::load(needing).unwrap().operators(), ["tch_needing::f"]);
    assert_eq!(Operator::find("tch_needed::f").unwrap().call::<i64>(args![3]).unwrap(), 3);
    assert_eq!(Library::load(needed).unwrap().operators(), ["tch_needed::f"]);
}

#[test]
fn what_others_register_meanwhile_is_not_a_librarys() {
    let slow = library_of("tch_slow", "usleep(300000);", &[]);
    let (register, is_loaded) = (operator("register_operator"), AtomicBool::new(false));
    let mut others = 0;
    std::thread::scope(|scope| {
        let loads = scope.spawn(|| {
            let library = Library::load_without_rehearsal(&slow);
            is_loaded.store(true, Ordering::Relaxed);
            library
        });
        while !is_loaded.load(Ordering::Relaxed) {
            register.call::<()>(args![format!("f{others}").as_str()]).unwrap();
            others += 1;
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(loads.join().unwrap().unwrap().operators(), ["tch_slow::f"]);
    });
    assert!(others > 5 && Operator::find("tch_meanwhile::f0").is_ok(), "{others}");
}
