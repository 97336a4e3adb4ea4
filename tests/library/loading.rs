//! Tests of libraries that can be loaded and of those that must be refused.

use super::compiled::*;
use super::*;

fn refused(path: &Path, expected: &str) {
    let text = message(Library::load(path));
    assert!(text.starts_with("cannot load the library ") && text.contains(expected), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(!text.contains("terminate called") && !text.contains("frame #"), "{text}");
    // The operators that were loaded before still work.
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
    // The same holds for a library without symbols.
    let stripped = folder().join("stripped.so");
    std::fs::copy(library().path(), &stripped).unwrap();
    let strip = std::process::Command::new("strip").arg(&stripped).status().expect("strip");
    assert!(strip.success());
    refused(&stripped, expected);
    // Other threads can still load libraries, because nothing holds the loader's lock.
    let other = std::thread::spawn(|| {
        Library::load(compile_text("int nothing() { return 1; }", "after.so"))
    });
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
    refused(folder(), "it is not a regular file");
    refused(Path::new("a\0b"), "NUL byte");
    refused(Path::new("two\nlines.so"), "No such file or directory");
    let text = folder().join("text.so");
    std::fs::write(
        &text,
        "this is a text, and a rather long one, for a header of a file to fit into it",
    )
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
    std::io::Write::write_all(
        &mut std::fs::File::options().append(true).open(&path).unwrap(),
        b"more",
    )
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
    let output =
        std::process::Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
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

/// Two libraries that are parts of one package, where neither lists the other as needed.
#[test]
fn a_library_that_leans_on_anothers_symbols() {
    let defines = compile_text("int leant_on() { return 7; }", "leant_on.so");
    let leans = "int leant_on(); extern \"C\" const int value_of_leans = leant_on();";
    let leans = compile_text(leans, "leans.so");
    // At first no library defines the symbol, and then one does but keeps it local.
    refused(
        &leans,
        "undefined symbol: _Z8leant_onv; a library that defines it has to be loaded before, with LoadOptions",
    );
    let first = Library::load(&defines).unwrap();
    let place = first.path().display().to_string();
    let way_out = "which was loaded without `global`: load that one with LoadOptions { global: true, .. } first";
    refused(&leans, &format!("it needs leant_on() of {place}, {way_out}"));
    // The same library is loaded again, now with its symbols visible to all.
    let global = LoadOptions { global: true, ..Default::default() };
    assert!(Library::load_with(&defines, global).unwrap().is_same(&first));
    Library::load(&leans).unwrap();
}

#[test]
fn a_library_may_be_global_from_the_start() {
    for (rehearsal, name) in [(true, "rehearsed"), (false, "unrehearsed")] {
        let defines = format!("int global_{name}() {{ return 7; }}");
        let defines = compile_text(&defines, &format!("global_{name}.so"));
        Library::load_with(defines, LoadOptions { global: true, rehearsal }).unwrap();
        let leans = format!("int global_{name}(); int x = global_{name}();");
        Library::load(compile_text(&leans, &format!("leans_{name}.so"))).unwrap();
    }
    // A library that is loaded in the default way keeps its symbols local.
    Library::load(compile_text("int kept() { return 7; }", "kept.so")).unwrap();
    refused(
        &compile_text("int kept(); int x = kept();", "leans_on_kept.so"),
        "it needs kept() of ",
    );
}

/// Runs this test again in a separate process that ignores SIGCHLD, so that the kernel reaps its
/// children automatically.
fn alone(test: &str, library: &Path) -> std::process::Command {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' CHLD; exec \"$0\" --exact \"$1\" --nocapture"]);
    command
        .arg(std::env::current_exe().unwrap())
        .arg(format!("loading::{test}"))
        .env(ALONE, library);
    command
}

/// Runs a test that would take longer if other tests loaded libraries at the same time.
fn passes_alone(test: &str, library: &Path) {
    let output = alone(test, library).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

/// The variable that holds the path of the library that a process of [`alone`] loads.
const ALONE: &str = "TCH_EXTENSION_TEST_ALONE";

#[test]
fn an_initialiser_that_exits_is_refused_whatever_the_status_says() {
    if let Some(path) = std::env::var_os(ALONE) {
        return println!("{:?}", Library::load(path));
    }
    let refused = "its initialisers ended the process that tried them";
    for (name, code, expected) in [
        ("exits.so", "_exit(0);", refused),
        ("killed.so", "raise(SIGKILL);", refused),
        ("prints.so", "puts(\"hello\"); fflush(stdout);", "Ok(Library"),
    ] {
        let text = format!(
            "#include <csignal>\n#include <cstdio>\n#include <unistd.h>\nstruct A {{ A() {{ {code} }} }} a;"
        );
        let path = compile_text(&text, name);
        let test = "an_initialiser_that_exits_is_refused_whatever_the_status_says";
        let output = alone(test, &path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        // If the initialiser also ended this process, even with status 0, the last line would be
        // missing.
        assert!(said.contains(expected) && said.contains("1 passed"), "{name}: {said}");
    }
}

#[test]
fn a_trial_runs_no_exit_handlers_of_the_process() {
    let file = folder().join("handled");
    let registers = format!(
        "#include <cstdio>\n#include <cstdlib>\nvoid handler() {{ fclose(fopen({file:?}, \"w\")); }}\n\
         struct A {{ A() {{ atexit(handler); }} }} a;"
    );
    Library::load(compile_text(&registers, "registers.so")).unwrap();
    let exits = "#include <cstdlib>\nstruct A { A() { exit(3); } } a;";
    refused(
        &compile_text(exits, "exits_3.so"),
        "its initialisers ended the process that tried them",
    );
    assert!(!file.exists());
}

#[test]
fn a_trial_does_not_wait_for_processes_that_initialisers_start() {
    let starts =
        "#include <unistd.h>\nstruct A { A() { if (fork() == 0) { sleep(60); _exit(0); } } } a;";
    let path = compile_text(starts, "starts.so");
    let start = std::time::Instant::now();
    Library::load(path).unwrap();
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn a_trial_ends_with_the_process_that_made_it() {
    if let Some(path) = std::env::var_os(ALONE) {
        return drop(Library::load(path));
    }
    let file = folder().join("pid");
    let hangs = format!(
        "#include <cstdio>\n#include <unistd.h>\nstruct A {{ A() {{ FILE* f = fopen({file:?}, \"w\"); \
         fprintf(f, \"%d.\", getpid()); fclose(f); for (;;) pause(); }} }} a;"
    );
    let path = compile_text(&hangs, "hangs.so");
    let mut parent = alone("a_trial_ends_with_the_process_that_made_it", &path).spawn().unwrap();
    let soon = |condition: &dyn Fn() -> bool| {
        let start = std::time::Instant::now();
        while !condition() {
            assert!(start.elapsed().as_secs() < 60);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    soon(&|| std::fs::read_to_string(&file).is_ok_and(|text| text.ends_with('.')));
    parent.kill().unwrap();
    parent.wait().unwrap();
    // Look at this pid only, because a second trial may have begun.
    let pid = std::fs::read_to_string(&file).unwrap();
    let state = format!("/proc/{}/stat", pid.trim_end_matches('.'));
    soon(&|| std::fs::read_to_string(&state).map_or(true, |text| text.contains(") Z ")));
}

/// OpenMP's threads do not exist in the forked child, which could wait for them forever.
#[test]
fn initialisers_may_compute_in_parallel() {
    let Some(path) = std::env::var_os(ALONE) else {
        let computes =
            "#include <ATen/ops/ones.h>\nstatic at::Tensor x = at::ones({1000, 1000}).exp();";
        let path = compile_text(computes, "computes.so");
        return passes_alone("initialisers_may_compute_in_parallel", &path);
    };
    tch::set_num_threads(2);
    let x = Tensor::rand([1000, 1000], (Kind::Float, Device::Cpu));
    let _ = x.exp().sum(Kind::Float).double_value(&[]);
    let start = std::time::Instant::now();
    Library::load(path).unwrap();
    assert!(start.elapsed().as_secs_f64() < 1.9, "{:?}", start.elapsed());
    assert_eq!(tch::get_num_threads(), 2);
}

/// If a thread were looking up an operator when the child is forked, the registrations in the child
/// could wait forever.
#[test]
fn libraries_load_while_other_threads_find_operators() {
    // The template's namespace, for which each copy has another one of eight bytes.
    const PLACE: &[u8] = b"tchnsXXX";
    let Some(path) = std::env::var_os(ALONE) else {
        let path = registrations::library_of("tchnsXXX", "", &[]);
        return passes_alone("libraries_load_while_other_threads_find_operators", &path);
    };
    let template = std::fs::read(path).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (mut slowest, mut outcomes) = (std::time::Duration::ZERO, Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    Operator::find("aten::mm").unwrap();
                }
            });
        }
        for number in 0..100 {
            let name = format!("tchns{number:03}");
            let mut bytes = template.clone();
            for place in 0..bytes.len() - PLACE.len() {
                if bytes[place..].starts_with(PLACE) {
                    bytes[place..place + PLACE.len()].copy_from_slice(name.as_bytes());
                }
            }
            let path = folder().join(format!("{name}.so"));
            std::fs::write(&path, bytes).unwrap();
            let start = std::time::Instant::now();
            outcomes.push((Library::load(path), format!("{name}::f")));
            slowest = slowest.max(start.elapsed());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    for (library, operator) in outcomes {
        assert!(library.unwrap().operators().contains(&operator), "{operator}");
    }
    // A first trial that hangs would take two seconds.
    assert!(slowest.as_secs_f64() < 1.9, "{slowest:?}");
}

/// The layout of some package managers: each file is a link into a store, and the library that it
/// needs is next to the link.
#[test]
fn what_a_library_needs_is_looked_for_beside_the_link() {
    let (store, tree) = (folder().join("store"), folder().join("tree"));
    std::fs::create_dir_all(&store).unwrap();
    std::fs::create_dir_all(&tree).unwrap();
    let needed = compile_text("int beside() { return 1; }", "libbeside.so");
    let (source, target) = (folder().join("links.cpp"), folder().join("links.so"));
    std::fs::write(&source, "int beside(); int f() { return beside(); }").unwrap();
    let status =
        std::process::Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()))
            .args(["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-L"])
            .arg(folder())
            .arg(&source)
            .args(["-l:libbeside.so", "-o"])
            .arg(&target)
            .status()
            .expect("a C++ compiler");
    assert!(status.success());
    for (number, file) in [needed, target].iter().enumerate() {
        let stored = store.join(number.to_string());
        std::fs::rename(file, &stored).unwrap();
        std::os::unix::fs::symlink(&stored, tree.join(file.file_name().unwrap())).unwrap();
    }
    let library = Library::load(tree.join("links.so")).unwrap();
    assert!(library.is_same(&Library::load(store.join("1")).unwrap()));
}

/// Loads Python's library if there is one; otherwise the message says how to name it. The test
/// below runs this one with a wrong name.
#[test]
fn a_library_that_needs_python() {
    let source =
        "extern \"C\" int PyInstanceMethod_Type; int* f() { return &PyInstanceMethod_Type; }";
    let loaded = Library::load(compile_text(source, "python.so"));
    match std::env::var("TCH_EXTENSION_LIBPYTHON") {
        Ok(wrong) if !Path::new(&wrong).exists() => {
            let text = message(loaded);
            assert!(
                text.contains(
                    "it needs Python, and TCH_EXTENSION_LIBPYTHON=/nonexistent/libpython.so"
                ),
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
