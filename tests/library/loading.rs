//! Libraries that load, and those that must not.

use super::compiled::*;
use super::*;

fn refused(path: &Path, expected: &str) {
    let text = message(Library::load(path));
    assert!(text.starts_with("cannot load the library ") && text.contains(expected), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(!text.contains("terminate called") && !text.contains("frame #"), "{text}");
    // All is as it was.
    assert_eq!(operator("thrice").call::<i64>(args![2]).unwrap(), 6);
}

#[test]
fn a_library_lists_what_it_registered() {
    let operators = library().operators();
    assert!(operators.iter().any(|name| name == "tch_test::twice.float"), "{operators:?}");
    assert!(operators.iter().all(|name| name.starts_with("tch_test::")), "{operators:?}");
    assert!(operators.is_sorted());
    for name in operators {
        assert!(Operator::find(name).unwrap().schema().starts_with(name.as_str()));
    }
}

#[test]
fn the_same_file_is_one_library() {
    let first = library();
    let link = folder().join("link.so");
    std::os::unix::fs::symlink(first.path(), &link).unwrap();
    for path in [first.path(), &link] {
        let second = Library::load(path).unwrap();
        assert!(second.is_same(first) && second.operators() == first.operators());
    }
    let threads: Vec<_> =
        (0..4).map(|_| std::thread::spawn(|| Library::load(library().path()).unwrap())).collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap().is_same(first)));
}

#[test]
fn a_taken_namespace_is_refused_before_loading() {
    let copy = folder().join("copy.so");
    std::fs::copy(library().path(), &copy).unwrap();
    let expected = "Only a single TORCH_LIBRARY can be used to register the namespace tch_test";
    refused(&copy, expected);
    // Without its symbols, too.
    let stripped = folder().join("stripped.so");
    std::fs::copy(library().path(), &stripped).unwrap();
    let strip = std::process::Command::new("strip").arg(&stripped).status().expect("strip");
    assert!(strip.success());
    refused(&stripped, expected);
    // Other threads can still load: nothing holds the loader's lock.
    let other = std::thread::spawn(|| Library::load(compile_text("int nothing() { return 1; }", "after.so")));
    assert!(other.join().unwrap().unwrap().operators().is_empty());
}

#[test]
fn an_operator_that_exists_is_refused_before_loading() {
    library();
    refused(&compile_file("fragment.cpp", "fragment.so"), "tch_test::cube");
}

#[test]
fn what_is_no_library_is_refused() {
    refused(Path::new("/nonexistent/library.so"), "No such file or directory");
    refused(folder(), "it is no file");
    refused(Path::new("a\0b"), "NUL byte");
    let text = folder().join("text.so");
    std::fs::write(&text, "this is a text, and a rather long one, for a header of a file to fit into it")
        .unwrap();
    refused(&text, "invalid ELF header");
    refused(
        &compile_text("void missing(); void f() { missing(); }", "missing.so"),
        "undefined symbol: _Z7missingv",
    );
}

#[test]
fn initialisers_that_end_the_process_are_refused() {
    let abort = "#include <cstdlib>\nstruct A { A() { std::abort(); } } a;";
    refused(&compile_text(abort, "abort.so"), "its initialisers ended the process that tried them");
    let throws = "struct A { A() { throw 1; } } a;";
    let text = message(Library::load(compile_text(throws, "throws.so")));
    assert!(text.contains("unknown type") || text.contains("ended the process"), "{text}");
}

#[test]
fn a_file_that_changed_is_refused() {
    let path = compile_text("int version() { return 1; }", "changing.so");
    Library::load(&path).unwrap();
    std::io::Write::write_all(&mut std::fs::File::options().append(true).open(&path).unwrap(), b"more")
        .unwrap();
    refused(&path, "it has changed since it was loaded; libraries never unload");
    std::fs::remove_file(&path).unwrap();
    compile_text("int version() { return 2; }", "changing.so");
    refused(&path, "another file of this name is loaded; libraries never unload");
}

#[test]
fn without_a_rehearsal_it_loads_as_well() {
    let path = compile_text("int function() { return 1; }", "unrehearsed.so");
    let library = Library::load_without_rehearsal(&path).unwrap();
    assert!(library.is_same(&Library::load(&path).unwrap()));
    let text = message(Library::load_without_rehearsal(folder().join("absent.so")));
    assert!(text.contains("No such file or directory"), "{text}");
}

#[test]
fn a_missing_library_that_it_needs_is_named() {
    let needed = compile_text("int needed() { return 1; }", "libneeded.so");
    let target = folder().join("needs.so");
    let source = folder().join("needs.cpp");
    std::fs::write(&source, "int needed(); int f() { return needed(); }").unwrap();
    let output = std::process::Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
        .args(["-shared", "-fPIC"])
        .args([&source, &needed])
        .arg("-Wl,-soname,needs.so,-rpath,/nonexistent")
        .arg("-o")
        .arg(&target)
        .output()
        .expect("a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::remove_file(&needed).unwrap();
    refused(&target, "libneeded.so: cannot open shared object file");
}

/// With a Python's library where there is one; otherwise the message says how to name one. The parent below runs it
/// with a wrong name.
#[test]
fn a_library_that_needs_python() {
    let source = "extern \"C\" int PyInstanceMethod_Type; int* f() { return &PyInstanceMethod_Type; }";
    let loaded = Library::load(compile_text(source, "python.so"));
    match std::env::var("TCH_EXTENSION_LIBPYTHON") {
        Ok(wrong) if !Path::new(&wrong).exists() => {
            let text = message(loaded);
            assert!(
                text.contains("it needs Python, and TCH_EXTENSION_LIBPYTHON=/nonexistent/libpython.so"),
                "{text}"
            );
        }
        _ => {
            if let Err(error) = loaded {
                assert!(
                    error.to_string().contains("set TCH_EXTENSION_LIBPYTHON to the path of one"),
                    "{error}"
                );
                eprintln!("there is no Python's library here: {error}");
            }
        }
    }
}

#[test]
fn a_libpython_that_is_missing_is_named() {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "loading::a_library_that_needs_python"])
        .env("TCH_EXTENSION_LIBPYTHON", "/nonexistent/libpython.so")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&status.stdout);
    assert!(status.status.success() && said.contains("1 passed"), "{said}");
}
