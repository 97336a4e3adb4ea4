//! Tests of the messages for sources that cannot be compiled or loaded.

use super::*;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

#[test]
fn the_compiler_s_own_words() {
    let folder = scratch();
    let source = folder.path().join("broken.cpp");
    std::fs::write(&source, "extern \"C\" int answer() { return undeclared_thing; }").unwrap();
    let load =
        || Extension::new("broken").source(&source).cache(folder.path().join("cache")).load();
    let text = message(load());
    assert!(
        text.starts_with(&format!("jit: broken: {} does not compile", source.display())),
        "{text}"
    );
    assert_says(&text, &["undeclared_thing", "not declared", "broken.cpp:1:"]);

    // A failed build leaves nothing that would stop the next one.
    std::fs::write(&source, ANSWER).unwrap();
    assert_eq!(number(&load().unwrap(), "answer").unwrap(), 42);
}

#[test]
fn the_file_that_has_the_whole_of_a_long_message() {
    let folder = scratch();
    let lines: String = (0..200).map(|i| format!("int f{i}() {{ return no_{i}; }}\n")).collect();
    let text = message(Extension::new("long").cpp(lines).cache(folder.path()).load());
    let (_, file) = text.split_once("the whole message is in ").expect(&text);
    let whole = std::fs::read_to_string(file.lines().next().unwrap()).expect("the file");
    assert!(!text.contains("no_199") && whole.contains("no_199"), "{text}");
}

#[test]
fn a_symbol_that_is_nowhere() {
    let text = message(
        extension("missing").cpp("int gone(); extern \"C\" int answer() { return gone(); }").load(),
    );
    assert_says(&text, &["jit: missing: ", "does not link", "gone()"]);
}

#[test]
fn names_that_cannot_be_names() {
    for name in ["", "a-b", "../up", "a b", "9lives", "naïve", "a/b", "nul\0", "aten"] {
        assert_says(&message(extension(name).cpp(ANSWER).load()), &["jit: name", "expected"]);
    }
    let text = message(extension("odd").cpp(ANSWER).functions(["f); system("]).load());
    assert_says(&text, &["jit: functions", "identifier"]);
    assert_says(&message(extension("empty").load()), &["empty", "no source"]);
    let text = message(extension("absent").source("no/such/file.cpp").load());
    assert_says(&text, &["absent", "no/such/file.cpp"]);
}

#[test]
fn a_cache_that_cannot_be_written() {
    let folder = scratch();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    // The cache's path goes through a file, so not even root can write there.
    let text = message(Extension::new("nowhere").cpp(ANSWER).cache(file.join("cache")).load());
    assert_says(&text, &["nowhere", "file/cache", "TCH_EXTENSION_CACHE"]);
}

/// Compilers and cargo write lists of files as text, so such paths must be refused.
#[test]
fn paths_that_are_no_text_are_refused_by_name() {
    let folder = scratch();
    let odd = folder.path().join(OsStr::from_bytes(b"odd\xff"));
    std::fs::create_dir(&odd).unwrap();
    let source = odd.join("answer.cpp");
    std::fs::write(&source, ANSWER).unwrap();
    let says = |extension: Extension, parts: &[&str]| {
        let text = message(extension.load());
        assert_says(&text, &["odd: ", "odd\\xFF", "not UTF-8"]);
        assert_says(&text, parts);
    };
    says(extension("odd").source(&source), &["the source", "odd\\xFF/answer.cpp", "rename"]);
    says(extension("odd").cpp(ANSWER).include(&odd), &["the include folder", "rename"]);
    says(Extension::new("odd").cpp(ANSWER).cache(&odd), &["the cache", "set TCH_EXTENSION_CACHE"]);
    // A header's path is known only after a compiler has read the header.
    let header = folder.path().join(OsStr::from_bytes(b"header\xff.h"));
    std::fs::write(&header, "").unwrap();
    let includes = folder.path().join("includes.cpp");
    let text = [b"#include \"header\xff.h\"\n", ANSWER.as_bytes()].concat();
    std::fs::write(&includes, text).unwrap();
    let text = message(extension("odd").source(&includes).load());
    assert_says(&text, &["odd: ", "header\u{fffd}.h", "not UTF-8", "rename"]);
}

#[test]
fn a_module_that_cannot_be_registered_is_an_error_and_not_an_abort() {
    let folder = scratch();
    let module = |body: &str| {
        let text = format!(
            "#include <pybind11/pybind11.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ {body} }}"
        );
        Extension::new("unregistered").cpp(text).flag("-O0").cache(folder.path()).load()
    };
    let text = message(module(
        "m.def(\"fine\", [] { return 1; }); m.def(\"not-a-name\", [] { return 2; });",
    ));
    assert_says(&text, &["unregistered", "`not-a-name` cannot be an operator's name"]);
    // Without a rehearsal, the library is loaded directly. Its operators are then registered
    // completely or not at all, too.
    let files = std::fs::read_dir(folder.path()).unwrap().flatten();
    let files = files.filter_map(|entry| std::fs::read_dir(entry.path()).ok()).flatten().flatten();
    let library =
        files.map(|file| file.path()).find(|path| path.extension().is_some_and(|end| end == "so"));
    let text = message(tch_extension::library::Library::load_without_rehearsal(library.unwrap()));
    assert_says(&text, &["`not-a-name` cannot be an operator's name"]);
    assert!(tch_extension::library::operators("unregistered").unwrap().is_empty());
}

#[test]
fn what_python_alone_could_give_is_refused_in_plain_words() {
    let text = "#include <torch/extension.h>\n\
                struct Point { int x; };\n\
                Point origin() { return {0}; }\n\
                int length(py::dict values);\n\
                PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n\
                  m.def(\"origin\", &origin);\n\
                  m.def(\"half\", [](int a, int b) { return a / b; }, py::arg(\"a\"));\n\
                  m.def(\"deep\", [](int a) { return a; }, py::arg(\"a\") = \"text\");\n\
                  py::class_<Point>(m, \"Point\");\n\
                }";
    let syntax = extension("objects").cpp(text).flag("-fsyntax-only").use_pch(false);
    let text = message(syntax.load());
    assert_says(
        &text,
        &[
            "no operator can take or return this type",
            "there is no Python here",
            "name every argument with py::arg, or none",
            "does not convert to the argument's type",
            "py::class_ needs Python",
        ],
    );
}
