//! Tests the compilers at run time: without cargo's variables, and with every report going to the
//! caller.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use support::{fake_libtorch, scratch, write};
use tch_extension_build::LIBTORCH_VERSIONS;
use tch_extension_build::environment::{Environment, Process};
use tch_extension_build::toolchain::{CudaMode, Libtorch, Object, Options, Reuse, Toolchain};

/// Records everything that is reported to it.
#[derive(Default)]
struct Recorder {
    commands: Mutex<Vec<String>>,
    read: Mutex<Vec<PathBuf>>,
    warnings: Mutex<Vec<String>>,
}

impl Environment for Recorder {
    fn reads(&self, path: &Path) {
        self.read.lock().unwrap().push(path.to_path_buf());
    }

    fn runs(&self, command: &str) {
        self.commands.lock().unwrap().push(command.to_string());
    }

    fn warns(&self, line: &str) {
        self.warnings.lock().unwrap().push(line.to_string());
    }
}

fn toolchain(folder: &Path) -> Toolchain {
    let libtorch = Libtorch::at(fake_libtorch(&folder.join("libtorch"), false), &Process).unwrap();
    Toolchain::find(libtorch, CudaMode::Off, None, &Process).unwrap()
}

fn compile(
    toolchain: &Toolchain,
    source: &Path,
    options: &Options,
    recorder: &Recorder,
) -> Vec<Object> {
    let folder = source.parent().unwrap().join("objects");
    toolchain.compile(&[source.to_path_buf()], options, &folder, 2, recorder).unwrap()
}

#[test]
fn sources_become_a_library_that_shows_its_functions() {
    let folder = scratch("library");
    let toolchain = toolchain(&folder);
    let source = write(
        &folder.join("add.cpp"),
        "#include \"add.h\"\nextern \"C\" int add(int a, int b) { return a + b + OFFSET; }\n",
    );
    let header = write(&folder.join("headers/add.h"), "extern \"C\" int add(int a, int b);\n");
    let options = Options {
        includes: vec![folder.join("headers")],
        defines: vec![("OFFSET".into(), Some("40".into()))],
        export_symbols: true,
        ..Options::default()
    };
    let recorder = Recorder::default();
    let objects = compile(&toolchain, &source, &options, &recorder);
    assert_eq!(objects[0].dependencies(), [source.clone(), header.clone()]);
    assert_eq!(*recorder.read.lock().unwrap(), [source.clone(), header.clone()]);
    assert_eq!(recorder.commands.lock().unwrap().len(), 1);

    compile(&toolchain, &source, &options, &recorder);
    assert_eq!(recorder.commands.lock().unwrap().len(), 1, "nothing changed");

    let library = folder.join("add.so");
    toolchain.link_shared(&objects, &[], &library, &recorder).unwrap();
    let names = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().unwrap();
    assert!(String::from_utf8_lossy(&names.stdout).contains(" T add"));
    std::fs::remove_dir_all(folder).unwrap();
}

/// `jit` hashes these files itself, and keeps the library.
#[test]
fn objects_that_are_needed_once_say_what_they_were_made_from() {
    let folder = scratch("once");
    let toolchain = toolchain(&folder);
    let source = write(&folder.join("a.cpp"), "#include <vector>\n#include \"a.h\"\n");
    let header = write(&folder.join("a.h"), "");
    let options = Options { reuse: Reuse::Never, ..Options::default() };
    let recorder = Recorder::default();
    for times in [1, 2] {
        let objects = compile(&toolchain, &source, &options, &recorder);
        assert_eq!(objects[0].dependencies(), [source.clone(), header.clone()]);
        assert_eq!(recorder.commands.lock().unwrap().len(), times);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_library_that_does_not_link_is_not_there() {
    let folder = scratch("missing");
    let toolchain = toolchain(&folder);
    let source = write(
        &folder.join("a.cpp"),
        "namespace there { int no(); }\nint f() { return there::no(); }\n",
    );
    let objects = compile(&toolchain, &source, &Options::default(), &Recorder::default());
    let error = toolchain
        .link_shared(&objects, &[], &folder.join("a.so"), &Process)
        .unwrap_err()
        .to_string();
    assert!(error.contains("there::no()"), "{error}");
    let left = std::fs::read_dir(&folder)
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().is_file())
        .count();
    assert_eq!(left, 1, "only the source");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn warnings_are_said_unless_they_are_off() {
    let folder = scratch("warnings");
    let toolchain = toolchain(&folder);
    let source = write(&folder.join("a.cpp"), "int f(int unused) { return 1; }\n");
    for (warnings, expected) in [(true, true), (false, false)] {
        let recorder = Recorder::default();
        compile(&toolchain, &source, &Options { warnings, ..Options::default() }, &recorder);
        let said = recorder.warnings.lock().unwrap().iter().any(|line| line.contains("unused"));
        assert_eq!(said, expected);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_identity_names_compilers_and_libtorch() {
    let folder = scratch("identity");
    let toolchain = toolchain(&folder);
    let identity = toolchain.identity();
    for part in [&toolchain.cxx.version, &format!("libtorch {}", LIBTORCH_VERSIONS[0].0)] {
        assert!(!part.is_empty() && identity.contains(part), "{part:?} is not in {identity}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_source_is_compiled_with_all_headers_only_if_it_needs_them() {
    let folder = scratch("fewer");
    let toolchain = toolchain(&folder);
    let header = "#pragma once\n#ifndef TCH_EXTENSION_FEWER_HEADERS\nstruct Rare {};\n#endif\nstruct Usual {};\n";
    write(&folder.join("headers/torch/extension.h"), header);
    let options = Options {
        includes: vec![folder.join("headers")],
        fewer_headers: true,
        ..Options::default()
    };
    let commands = |name: &str, text: &str| {
        let source = write(
            &folder.join(name).join("a.cpp"),
            &format!("#include <torch/extension.h>\n{text}\n"),
        );
        let recorder = Recorder::default();
        compile(&toolchain, &source, &options, &recorder);
        compile(&toolchain, &source, &options, &recorder);
        let commands = recorder.commands.into_inner().unwrap();
        commands
            .iter()
            .map(|command| command.contains("TCH_EXTENSION_FEWER_HEADERS"))
            .collect::<Vec<_>>()
    };
    assert_eq!(commands("usual", "Usual usual;"), [true], "once, and up to date the second time");
    assert_eq!(commands("rare", "Rare rare;"), [true, false]);
    assert_eq!(commands("named", "namespace nn { struct A {}; }\nnn::A a;"), [false]);
    std::fs::remove_dir_all(folder).unwrap();
}
