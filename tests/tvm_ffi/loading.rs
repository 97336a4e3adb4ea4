//! Modules and libtvm_ffi: what is found, and what is refused.

use super::*;

#[test]
fn a_module_lists_its_functions() {
    let Some(module) = module("a_module_lists_its_functions") else { return };
    let names = module.functions();
    assert!(names.is_sorted() && names.iter().any(|name| name == "add_one"), "{names:?}");
    assert!(names.iter().all(|name| !name.starts_with('_')), "{names:?}");
    for name in names {
        assert_eq!(module.function(name).unwrap().name(), name);
    }
    let error = module.function("ad_one").unwrap_err().to_string();
    assert!(error.contains("has no function ad_one; did you mean add_one?"), "{error}");
    assert!(module.function("").is_err() && module.function("a\0b").is_err());
    let metadata = module.metadata("add_one").unwrap().expect("metadata");
    assert!(metadata.contains("type_schema"), "{metadata}");
    assert_eq!(module.metadata("nothing").unwrap(), None);
    assert!(tvm_ffi::version().unwrap().starts_with("0.1."));
}

/// A handle of a module or function is no reason for a library to stay, and libraries stay.
#[test]
fn tensors_outlive_their_modules() {
    if module("tensors_outlive_their_modules").is_none() {
        return;
    }
    let copy = folder().join("copy.so");
    std::fs::copy(functions(), &copy).unwrap();
    let module = Module::load(&copy).unwrap();
    let again = Module::load(&copy).unwrap();
    let add = module.function("add_one_alloc").unwrap();
    drop((module, again));
    let y: Tensor = add.call(args![&floats(&[1.0])]).unwrap();
    drop(add);
    assert_eq!(y, floats(&[2.0]));
}

fn not_loaded(path: &Path, expected: &str) {
    let error = Module::load(path).unwrap_err().to_string();
    assert!(error.starts_with("cannot load the "), "{error}");
    assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
}

#[test]
fn what_is_no_module_is_refused() {
    if module("what_is_no_module_is_refused").is_none() {
        return;
    }
    not_loaded(Path::new("/nonexistent/library.so"), "No such file");
    let plain = compile_text("int f() { return 1; }", "plain.so", &[]);
    not_loaded(&plain, "it is no module of TVM FFI");
    let named = folder().join("functions.so.1");
    std::fs::copy(functions(), &named).unwrap();
    not_loaded(&named, "a file whose name ends in .so");
    let bytes = std::fs::read(functions()).unwrap();
    for len in [10, 1000, bytes.len() / 2] {
        let cut = folder().join(format!("cut{len}.so"));
        std::fs::write(&cut, &bytes[..len]).unwrap();
        assert!(Module::load(&cut).is_err(), "{len}");
    }
    let missing = "extern \"C\" int missing_function(); extern \"C\" int __tvm_ffi_f() { return missing_function(); }";
    not_loaded(&compile_text(missing, "missing.so", &[]), "missing_function");
    // As a module for another version is.
    let newer = missing.replace("missing_function", "TVMFFIOfTheFuture");
    let newer = compile_text(&newer, "newer_module.so", &[]);
    not_loaded(&newer, "needs another version of libtvm_ffi than 0.1.");
    // As a module for another CUDA is.
    let stub = compile_text(
        "extern \"C\" int f9() { return 1; }",
        "libcudart.so.9",
        &["-Wl,-soname,libcudart.so.9"],
    );
    let text = "extern \"C\" int f9(); extern \"C\" int __tvm_ffi_f() { return f9(); }";
    let needs = compile_text(text, "needs.so", &[stub.to_str().unwrap()]);
    std::fs::remove_file(stub).unwrap();
    not_loaded(&needs, "libcudart.so.9");
}

/// libtvm_ffi ends the process when a global function is registered twice.
#[test]
fn a_global_function_that_exists_is_refused_before_loading() {
    if module("a_global_function_that_exists_is_refused_before_loading").is_none() {
        return;
    }
    let text = "#include <tvm/ffi/reflection/registry.h>\n#include <tvm/ffi/function.h>\n\
                TVM_FFI_STATIC_INIT_BLOCK() { tvm::ffi::reflection::GlobalDef().def(\"tch_test.twice\", [](int64_t x) { return 2 * x; }); }\n\
                int one() { return 1; }\n\
                TVM_FFI_DLL_EXPORT_TYPED_FUNC(f, one);";
    Module::load(compile_text(text, "first.so", &[])).unwrap();
    not_loaded(&compile_text(text, "second.so", &[]), "tch_test.twice");
}

/// The variable that tells this test program, started by itself, what to do.
const TASK: &str = "TCH_EXTENSION_TEST_TASK";

/// Runs a task in a process that has not loaded libtvm_ffi, with these variables, and returns what it
/// printed.
pub(super) fn alone(task: &str, variables: &[(&str, &Path)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "loading::tasks", "--nocapture"])
        .current_dir(folder())
        .env_remove("TCH_EXTENSION_TVM_FFI")
        .env(TASK, task)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    text.concat()
}

/// Does nothing unless [`alone`] runs it.
#[test]
fn tasks() {
    let Some(task) = std::env::var_os(TASK) else { return };
    let path = || PathBuf::from(std::env::var_os("TCH_EXTENSION_TEST_MODULE").expect("a path"));
    let adds = |module: Module| {
        let (x, mut y) = (floats(&[1.0]), floats(&[0.0]));
        module.function("add_one").unwrap().call::<()>(args![&x, out(&mut y)]).unwrap();
        println!("added: {}", y == floats(&[2.0]));
    };
    match task.to_str().unwrap() {
        "load" => match Module::load(path()) {
            Ok(module) => adds(module),
            Err(error) => println!("error: {error}"),
        },
        "load after a local copy" => {
            Library::load(std::env::var_os("TCH_EXTENSION_TEST_LOCAL").unwrap()).unwrap();
            adds(Module::load(path()).unwrap());
        }
        "tilelang" => others::tilelang(),
        "overflow" => {
            drop(Module::load(path()).unwrap());
            println!("{}", deep(0));
        }
        other => panic!("{other}"),
    }
}

#[expect(unconditional_recursion, reason = "it overflows the stack")]
fn deep(depth: u64) -> u64 {
    let page = std::hint::black_box([depth; 512]);
    deep(depth + 1) + page[(depth % 512) as usize]
}

#[test]
fn libtvm_ffi_is_found() {
    if module("libtvm_ffi_is_found").is_none() {
        return;
    }
    let module = ("TCH_EXTENSION_TEST_MODULE", functions());
    let lib = libtvm_ffi();
    // By the variable.
    let text = alone("load", &[module, ("TCH_EXTENSION_TVM_FFI", &lib)]);
    assert!(text.contains("added: true"), "{text}");
    // In the package of python3.
    let packages = package().parent().unwrap().to_path_buf();
    let text = alone("load", &[module, ("PYTHONPATH", &packages)]);
    assert!(text.contains("added: true"), "{text}");
    // In the process, where other libraries do not find its symbols. A second copy, which the variable
    // names, would end the process.
    let copy = folder().join("copy_of_libtvm_ffi.so");
    std::fs::copy(&lib, &copy).unwrap();
    let local = ("TCH_EXTENSION_TEST_LOCAL", &*lib);
    let text = alone("load after a local copy", &[module, local, ("TCH_EXTENSION_TVM_FFI", &copy)]);
    assert!(text.contains("added: true"), "{text}");
}

/// The first load of a process, which has no libtvm_ffi yet.
#[test]
fn a_missing_module_is_named_before_libtvm_ffi() {
    if module("a_missing_module_is_named_before_libtvm_ffi").is_none() {
        return;
    }
    let nowhere = Path::new("/nonexistent");
    let module = ("TCH_EXTENSION_TEST_MODULE", nowhere);
    for variable in [("TCH_EXTENSION_TVM_FFI", &*libtvm_ffi()), ("PATH", nowhere)] {
        let text = alone("load", &[module, variable]);
        let expected = "error: cannot load the library /nonexistent: No such file";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_libtvm_ffi_that_is_missing_is_named() {
    if module("a_libtvm_ffi_that_is_missing_is_named").is_none() {
        return;
    }
    let module = ("TCH_EXTENSION_TEST_MODULE", functions());
    let nowhere = Path::new("/nonexistent");
    let text = alone("load", &[module, ("PATH", nowhere)]);
    assert!(text.contains("`pip install apache-tvm-ffi`, or set TCH_EXTENSION_TVM_FFI"), "{text}");
    let text = alone("load", &[module, ("TCH_EXTENSION_TVM_FFI", nowhere)]);
    assert!(
        text.contains("error: TCH_EXTENSION_TVM_FFI: expected the path of libtvm_ffi.so"),
        "{text}"
    );
    // Python has no package, and the current folder is no place to look.
    std::fs::create_dir_all(folder().join("lib")).unwrap();
    compile_text("int f() { return 1; }", "lib/libtvm_ffi.so", &[]);
    let text = alone("load", &[module, ("PYTHONHOME", nowhere)]);
    assert!(text.contains("`pip install apache-tvm-ffi`"), "{text}");
    let other = compile_text("int f() { return 1; }", "other.so", &[]);
    let text = alone("load", &[module, ("TCH_EXTENSION_TVM_FFI", &other)]);
    assert!(text.contains("expected libtvm_ffi.so, got a library without its functions"), "{text}");
    let text = "extern \"C\" void TVMFFIGetVersion(unsigned* v) { v[0] = 1; v[1] = v[2] = 0; }";
    let newer = compile_text(text, "newer.so", &[]);
    let text = alone("load", &[module, ("TCH_EXTENSION_TVM_FFI", &newer)]);
    assert!(text.contains("expected version 0.1.x, got 1.0.0"), "{text}");
}

/// A module that is linked with a copy of libtvm_ffi of another name ends the process that loads it.
#[test]
fn a_second_libtvm_ffi_is_refused() {
    if module("a_second_libtvm_ffi_is_refused").is_none() {
        return;
    }
    let copy = folder().join("second_libtvm_ffi.so");
    std::fs::copy(libtvm_ffi(), &copy).unwrap();
    let error = Module::load(&copy).unwrap_err().to_string();
    assert!(error.contains("cannot load the library"), "{error}");
}

/// libtvm_ffi replaces the handler by which Rust reports this.
#[test]
fn an_overflow_of_the_stack_is_reported() {
    if module("an_overflow_of_the_stack_is_reported").is_none() {
        return;
    }
    let module = ("TCH_EXTENSION_TEST_MODULE", functions());
    let text = alone("overflow", &[module, ("TCH_EXTENSION_TVM_FFI", &libtvm_ffi())]);
    assert!(text.contains("has overflowed its stack"), "{text}");
}
