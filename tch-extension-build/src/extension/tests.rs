//! Tests what `Extension` tells the compiler and the linker, with programs that stand in for them.

mod kernels;

use super::build::Purpose;
use super::*;
use crate::environment::Environment;
use crate::place;
use crate::support::{fake_libtorch, fake_nvcc, scratch, write};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Mutex;

/// A build script in a folder that has a libtorch of its own.
struct Script {
    folder: PathBuf,
    vars: HashMap<&'static str, String>,
    warnings: Mutex<Vec<String>>,
    read: Mutex<Vec<PathBuf>>,
}

impl Environment for Script {
    fn var(&self, name: &str) -> Option<String> {
        self.vars.get(name).cloned().filter(|value| !value.is_empty())
    }

    fn reads(&self, path: &Path) {
        self.read.lock().unwrap().push(path.to_path_buf());
    }

    fn warns(&self, line: &str) {
        self.warnings.lock().unwrap().push(line.to_string());
    }

    fn temporary(&self) -> PathBuf {
        self.var("TMPDIR").map_or_else(|| "/nowhere".into(), PathBuf::from)
    }
}

impl Script {
    fn new(name: &str, cuda: bool) -> Self {
        let folder = scratch(name);
        let lib = fake_libtorch(&folder.join("libtorch"), cuda);
        let vars = HashMap::from([
            ("CARGO_CFG_TARGET_OS", "linux".to_string()),
            ("CARGO_CFG_TARGET_ARCH", "x86_64".to_string()),
            ("DEP_TCH_EXTENSION_LIBTORCH_LIB", lib.display().to_string()),
            ("OUT_DIR", folder.join("out").display().to_string()),
            ("TCH_EXTENSION_CACHE", folder.join("cache").display().to_string()),
        ]);
        Script { folder, vars, warnings: Mutex::default(), read: Mutex::default() }
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.vars.insert(name, value.to_string());
        self
    }

    fn source(&self, name: &str, text: &str) -> PathBuf {
        write(&self.folder.join(name), text)
    }

    #[track_caller]
    fn refusal(&self, extension: &Extension) -> String {
        match extension.build_in(self) {
            Ok(_) => panic!("it was built"),
            Err(error) => format!("{error:#}"),
        }
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn a_crate_of_cpp_is_linked_with_libtorch() {
    let script = Script::new("links", false);
    let source = script
        .source("a.cpp", "#ifndef NDEBUG\n#error\n#endif\nextern \"C\" int a() { return TILE; }\n");
    let extension = Extension::new("my_ops").source(source).define("TILE", "64").standard("c++20");
    let (built, lines) = extension.build_in(&script).expect("a library");
    assert!(!built.cuda);
    assert!(lines.contains(&"rustc-link-lib=static=my_ops".to_string()), "{lines:?}");
    assert!(script.folder.join("out/libmy_ops.a").exists());
    assert!(!lines.iter().any(|line| line.contains("cuda")), "{lines:?}");
}

#[test]
fn builds_in_several_folders_compile_once() {
    let mut script = Script::new("objects", false).with("CARGO_PKG_NAME", "b");
    let extension = Extension::new("a").source(script.source("a.cpp", "int a() { return 1; }\n"));
    for build in ["one", "another"] {
        let out_dir = script.folder.join(build);
        std::fs::create_dir(&out_dir).unwrap();
        script = script.with("OUT_DIR", &out_dir.display().to_string());
        extension.build_in(&script).expect("a library");
        assert!(out_dir.join("liba.a").exists());
    }
    let log = script.folder.join("cache/objects/log");
    let counts = || {
        let log = std::fs::read_to_string(&log).unwrap();
        let of = |line: &str| line.split_once(" b: ").unwrap().1.to_string();
        log.lines().map(of).collect::<Vec<_>>()
    };
    let both = ["current=0 found=0 compiled=1", "current=0 found=1 compiled=0"];
    assert_eq!(counts(), both);
    extension.build_in(&script).expect("a library");
    assert_eq!(counts()[2], "current=1 found=0 compiled=0");

    let script = script.with(place::SWITCH, "0");
    let elsewhere = script.folder.join("elsewhere").display().to_string();
    let script = script.with("OUT_DIR", &elsewhere);
    extension.build_in(&script).expect("a library");
    assert_eq!(counts().len(), 3, "no cache");
    let script = script.with(place::SWITCH, "off");
    assert_says(&script.refusal(&extension), &["TCH_EXTENSION_COMPILE_CACHE=off", "write 0"]);
}

#[test]
fn kernels_are_compiled_for_every_cpu_or_for_this_one() {
    let script = Script::new("isas", false);
    let text = "// TCH_EXTENSION_CPU_KERNEL
        #define PASTE(a, b) a##b
        #define JOIN(a, b) PASTE(a, b)
        #ifdef TCH_EXTENSION_ONLY_ISA
        extern \"C\" int JOIN(calls_, TCH_EXTENSION_ONLY_ISA)() { return 1; }
        #else
        extern \"C\" int JOIN(kernel_, CPU_CAPABILITY)() { return 1; }
        #endif
        int JOIN(in_, CPU_CAPABILITY)() { return 1; }\n";
    let extension = Extension::new("a").source(script.source("cpu.cpp", text));
    let names = |script: &Script| -> Vec<String> {
        extension.build_in(script).expect("a library");
        let archive = script.folder.join("out/liba.a");
        let listing = std::process::Command::new("nm").arg(archive).output().unwrap().stdout;
        let listing = String::from_utf8_lossy(&listing).into_owned();
        let mut names: Vec<String> = listing
            .split_whitespace()
            .filter(|name| name.starts_with("kernel_") || name.starts_with("calls_"))
            .map(String::from)
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&script), ["kernel_AVX2", "kernel_AVX512", "kernel_DEFAULT"]);
    let script = script.with("TCH_EXTENSION_ISAS", "native");
    // The names are those of /proc/cpuinfo, which Linux reads from the CPU in its own way.
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let has =
        |names: &[&str]| names.iter().all(|name| cpu.split_whitespace().any(|flag| flag == *name));
    match () {
        () if has(&["avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"]) => {
            assert_eq!(names(&script), ["calls_AVX512", "kernel_AVX512"]);
        }
        () if has(&["avx2", "fma", "f16c"]) => {
            assert_eq!(names(&script), ["calls_AVX2", "kernel_AVX2"]);
        }
        () => assert_eq!(names(&script).len(), 3),
    }
    let script = script.with("TCH_EXTENSION_ISAS", "avx2");
    let expected = ["TCH_EXTENSION_ISAS=avx2", "write native", "unset it"];
    assert_says(&script.refusal(&extension), &expected);
}

#[test]
fn a_source_that_is_named_twice_is_compiled_once() {
    let script = Script::new("twice", false);
    let source = script.source("csrc/a.cpp", "int a() { return 1; }\n");
    let again = script.folder.join("csrc/../csrc/a.cpp");
    let extension =
        Extension::new("a").source(source).source(again).source_dir(script.folder.join("csrc"));
    extension.build_in(&script).expect("a library");
    assert_eq!(
        std::fs::read_dir(script.folder.join("out/cpp")).unwrap().count(),
        2,
        "an object and what it was made from"
    );
}

#[test]
fn folders_and_files_can_be_left_out() {
    let script = Script::new("without", false);
    for folder in ["shared", "off", "off_too", "file"] {
        script.source(&format!("csrc/{folder}/{folder}.cpp"), "int a() { return 1; }\n");
    }
    let csrc = script.folder.join("csrc");
    let extension = Extension::new("a")
        .source_dir(&csrc)
        .without(csrc.join("off"))
        .without(csrc.join("file/file.cpp"));
    extension.build_in(&script).expect("a library");
    let names: Vec<String> = std::fs::read_dir(script.folder.join("out/cpp"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".o"))
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names.iter().any(|name| name.contains("off_too")), "{names:?}");
    // What is left out already may be named again, by itself or with its folder.
    let again = Extension::new("a").source_dir(&csrc).without(csrc.join("off/off.cpp"));
    again.without(csrc.join("off")).build_in(&script).expect("a library");
    let wrong = [
        Extension::new("a").source_dir(&csrc).without(csrc.join("of")),
        Extension::new("a").without(csrc.join("off")).source_dir(&csrc),
    ];
    for extension in wrong {
        let error = script.refusal(&extension);
        assert!(error.contains("without: no source"), "{error}");
    }
}

#[test]
fn sources_that_register_themselves_are_linked_whole() {
    let script = Script::new("whole", false);
    let source = script.source("a.cpp", "#define TORCH_LIBRARY(x) int x\nTORCH_LIBRARY(a);\n");
    let whole = "rustc-link-lib=static:+whole-archive=a".to_string();
    let lines =
        |extension: Extension| extension.source(&source).build_in(&script).expect("a library").1;
    assert!(lines(Extension::new("a")).contains(&whole));
    assert!(!lines(Extension::new("a").whole_archive(false)).contains(&whole));
}

/// A source with names that two extensions for Python may share, and with `value` and `layout`,
/// which Rust uses.
fn of_common_names(n: usize) -> String {
    format!(
        "#include <stdexcept>\n\
         extern \"C\" void* PyInit__C() {{ return nullptr; }}\n\
         int total = {n};\n\
         extern \"C\" const int layout_{n}[1] = {{{n}}};\n\
         int helper() {{ return {n}; }}\n\
         inline int inlined() {{ static int count = 0; return count += {n}; }}\n\
         template <typename T> T templated(T x) {{ return x * {n}; }}\n\
         struct Thing {{ virtual ~Thing() {{}} virtual int value() {{ return {n}; }} }};\n\
         struct Failure : std::runtime_error {{ using std::runtime_error::runtime_error; }};\n\
         int catches() {{ try {{ throw Failure(\"\"); }} catch (const Failure&) {{ return {n}; }} }}\n\
         extern \"C\" int value_{n}() {{\n\
           Thing* thing = new Thing;\n\
           int sum = total + helper() + inlined() + templated(1) + thing->value() + catches();\n\
           delete thing;\n\
           return sum;\n\
         }}\n"
    )
}

#[test]
fn extensions_with_the_same_names_call_their_own() {
    let script = Script::new("same_names", false);
    let mut program = std::process::Command::new("g++");
    let main = "extern \"C\" { int value_1(); int value_2(); extern const int layout_1[1], layout_2[1]; }\n\
                int main() {\n\
                  const bool read = layout_1[0] == 1 && layout_2[0] == 2;\n\
                  return value_1() == 6 && value_2() == 12 && value_1() == 7 && read ? 0 : 1;\n\
                }\n";
    program.arg(script.source("main.cpp", main));
    for n in [1, 2] {
        let source = script.source(&format!("{n}/a.cpp"), &of_common_names(n));
        // Another source of the same extension uses the same functions and variables.
        let more = script
            .source(&format!("{n}/b.cpp"), "int helper();\nint again() { return helper(); }\n");
        let extension = Extension::new(&format!("python_{n}")).source(source).source(more);
        extension.build_in(&script).expect("a library");
        program.arg(script.folder.join(format!("out/libpython_{n}.a")));
    }
    let output = program.arg("-o").arg(script.folder.join("main")).output().expect("g++");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let status =
        std::process::Command::new(script.folder.join("main")).status().expect("the program");
    assert!(status.success(), "each calls its own");
}

#[test]
fn who_only_speaks_of_a_module_is_none() {
    let script = Script::new("speaks", false);
    let speaks = "// As a PYBIND11_MODULE has it, or PyInit_x.\nint used() { return 1; }\n";
    let uses = "int used();\nint main() { return used() - 1; }\n";
    let (source, main) = (script.source("a.cpp", speaks), script.source("main.cpp", uses));
    Extension::new("speaks").source(source).build_in(&script).expect("a library");
    let archive = script.folder.join("out/libspeaks.a");
    let program = script.folder.join("main");
    let links =
        std::process::Command::new("g++").arg(main).arg(archive).arg("-o").arg(program).status();
    assert!(links.expect("g++").success());
}

#[test]
fn sources_written_for_python_find_their_headers_and_name() {
    let script = Script::new("python", false);
    let header = "#define PYBIND11_MODULE(name, m) int name\n\
                  #ifndef TCH_EXTENSION_FEWER_HEADERS\n#error\n#endif\n";
    write(&script.folder.join("public/tch_extension/python/torch/extension.h"), header);
    // A header of Python's own, as it would be in a virtual environment.
    write(&script.folder.join("venv/torch/extension.h"), "#error\n");
    let public = script.folder.join("public").display().to_string();
    let script = script.with("DEP_TCH_EXTENSION_INCLUDE", &public);
    let text = "#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m);\n\
                int* f() { return &EXPECTED; }\n";
    let source = script.source("a.cpp", text);
    let extension = |name: &str, expected: &'static str| {
        let extension = Extension::new(name).source(&source).include(script.folder.join("venv"));
        extension.define("EXPECTED", expected)
    };
    let (_, lines) = extension("my-ops", "my_ops").build_in(&script).expect("a library");
    assert!(
        lines.contains(&"rustc-link-lib=static:+whole-archive=my-ops".to_string()),
        "{lines:?}"
    );
    let named = extension("b", "other").define("TORCH_EXTENSION_NAME", "other");
    named.build_in(&script).expect("the user's own name");
}

#[test]
fn flags_reach_their_compiler_and_only_it() {
    let script = Script::new("flags", true);
    let nvcc = fake_nvcc(&script.folder.join("toolkit"), "13.0");
    let script = script.with("NVCC", &nvcc.display().to_string());
    let source = script.source(
        "a.cpp",
        "#if !FOR_CXX || FOR_NVCC || !defined(BOTH) || !TCH_EXTENSION_CUDA || defined(NDEBUG)\n#error\n#endif\n",
    );
    let cuda = script.source(
        "a.cu",
        "#if FOR_CXX || !FOR_NVCC || !defined(BOTH) || !TCH_EXTENSION_CUDA || !defined(NDEBUG)\n#error\n#endif\n",
    );
    let extension = Extension::new("a")
        .sources([source])
        .cuda_sources([cuda])
        .define("BOTH", None)
        .flag("-DFOR_CXX=1")
        .flag("-UNDEBUG")
        .nvcc_flag("-DFOR_NVCC=1")
        .cuda_library("cublasLt")
        .archs("9.0a");
    let (built, lines) = extension.build_in(&script).expect("a library");
    assert!(built.cuda && lines.contains(&"rustc-cfg=tch_extension_cuda".to_string()), "{lines:?}");
    for library in ["libcudart.so.13", "libcublasLt.so.13"] {
        assert!(lines.contains(&format!("rustc-link-lib=dylib:+verbatim={library}")), "{lines:?}");
    }
    // A library whose name only begins with the wanted one is not found.
    let error = script.refusal(&extension.cuda_library("cublas"));
    assert_says(&error, &["libtorch wants libcublas.so.13, which is not in"]);
}

#[test]
fn a_mistyped_path_is_an_error_that_lists_what_is_there() {
    let script = Script::new("mistyped", false);
    let source = script.source("csrc/my_op.cpp", "");
    let nope = script.folder.join("csrc/nope.cpp");
    let error = script.refusal(&Extension::new("a").source(&source).source(nope));
    assert_says(&error, &["there is no source", "nope.cpp", "my_op.cpp"]);
    assert_says(
        &script.refusal(&Extension::new("a").source("nope.cpp")),
        &["nope.cpp", "package's folder"],
    );
    let error = script.refusal(&Extension::new("x").source_dir("no/such/folder"));
    assert_says(&error, &["no .cpp and no .cu in no/such/folder"]);
    let error = script.refusal(&Extension::new("x").source(&source).include("no/include"));
    assert_says(&error, &["include: there is no folder no/include"]);
    let error = script.refusal(&Extension::new("x").cuda_sources([&source]));
    assert_says(&error, &["my_op.cpp does not end in .cu"]);
}

#[test]
fn paths_that_are_no_text_are_refused_by_name() {
    let script = Script::new("odd", false);
    let odd = script.folder.join(OsStr::from_bytes(b"odd\xff"));
    let source = write(&odd.join("a.cpp"), "int a() { return 1; }\n");
    let plain = script.source("a.cpp", "int a() { return 1; }\n");
    for (extension, what) in [
        (Extension::new("a").source(source), "the source"),
        (Extension::new("a").source_dir(&odd), "the source folder"),
        (Extension::new("a").source(&plain).include(&odd), "the include folder"),
    ] {
        assert_says(&script.refusal(&extension), &[what, "odd\\xFF", "not UTF-8", "rename"]);
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    let script = Script::new("nonsense", false);
    let source = script.source("a.cpp", "");
    let error = script.refusal(&Extension::new("a").source(&source).standard("c++14"));
    assert_says(&error, &["c++14", "c++17, c++20 or c++23"]);
    assert_says(&script.refusal(&Extension::new("a")), &["has no source", "source_dir"]);
    let error = script.refusal(&Extension::new("a").source(script.source("a.h", "")));
    assert_says(&error, &["a.h is a header", "include"]);
    let error = script.refusal(&Extension::new("a/b").source(&source));
    assert_says(&error, &["a/b", "letters, digits"]);
    let error =
        script.refusal(&Extension::new("a").source(&source).flag("-D_GLIBCXX_USE_CXX11_ABI=0"));
    assert_says(&error, &["_GLIBCXX_USE_CXX11_ABI=0", "libtorch", "1"]);
}

#[test]
fn a_compile_error_begins_with_the_file_and_is_the_compilers() {
    let script = Script::new("broken", false);
    let source = script.source("broken.cpp", "int f() { return nowhere; }\n");
    let error = script.refusal(&Extension::new("a").source(&source));
    assert!(error.starts_with(&format!("{} does not compile", source.display())), "{error}");
    assert_says(&error, &["broken.cpp:1:18: error", "nowhere"]);
}

#[test]
fn no_libtorch_is_an_error_with_the_way_out() {
    let script = Script::new("no_libtorch", false).with("DEP_TCH_EXTENSION_LIBTORCH_LIB", "");
    let source = script.source("a.cpp", "");
    let extension = Extension::new("a").source(&source);
    assert_says(&script.refusal(&extension), &["add tch-extension", "[dependencies]"]);
    let script = script.with("DEP_TCH_EXTENSION_LIBTORCH_LIB", "/no/lib");
    assert_says(&script.refusal(&extension), &["no libtorch headers in /no/include", "LIBTORCH"]);
    let script = script.with("CARGO_CFG_TARGET_OS", "macos");
    assert_says(&script.refusal(&extension), &["Linux on x86-64 only"]);
}

#[test]
fn another_libtorch_or_abi_is_an_error() {
    let script = Script::new("another", false);
    let source = script.source("a.cpp", "");
    let extension = Extension::new("a").source(&source);
    // The mangled names of functions that take a std::string show which ABI they use.
    write(
        &script.folder.join("libtorch/lib/libc10.so"),
        "_ZN3c105ErrorC1ENSt7__cxx1112basic_stringE",
    );
    let script = script.with("LIBTORCH_CXX11_ABI", "0");
    assert_says(&script.refusal(&extension), &["LIBTORCH_CXX11_ABI=0", "built with 1"]);
    let script = script.with("LIBTORCH_CXX11_ABI", "");
    let version = script.folder.join("libtorch/include/torch/headeronly/version.h");
    write(
        &version,
        "#define TORCH_VERSION_MAJOR 1\n#define TORCH_VERSION_MINOR 2\n#define TORCH_VERSION_PATCH 3\n",
    );
    assert_says(
        &script.refusal(&extension),
        &[
            "libtorch 1.2.3",
            "needs 2.11.0 (with tch 0.24) or 2.13.0",
            "LIBTORCH_BYPASS_VERSION_CHECK",
        ],
    );
}

#[test]
fn no_nvcc_is_an_error_that_lists_what_was_tried() {
    let script = Script::new("no_nvcc", true)
        .with("TCH_EXTENSION_CUDA", "1")
        .with("NVCC", "/my/nvcc")
        .with("CUDA_HOME", "/my/cuda")
        .with("PATH", "/my/bin");
    let source = script.source("a.cu", "");
    let extension = Extension::new("a").source(&source);
    let tried = [
        "/my/nvcc (NVCC)",
        "/my/cuda/bin/nvcc (CUDA_HOME)",
        "/my/bin/nvcc (PATH)",
        "set CUDA_HOME",
    ];
    if Path::new("/usr/local/cuda/bin/nvcc").exists() {
        eprintln!("skipped: this machine has an nvcc where none is named");
        return;
    }
    assert_says(&script.refusal(&extension), &tried);
    let script = script.with("TCH_EXTENSION_CUDA", "maybe");
    assert_says(&script.refusal(&extension), &["TCH_EXTENSION_CUDA=maybe", "write 1"]);
    let cpu = Script::new("no_cuda", false).with("TCH_EXTENSION_CUDA", "1");
    assert_says(&cpu.refusal(&extension), &["is a CPU build", "set LIBTORCH"]);
}

#[test]
fn another_nvcc_or_arch_is_an_error() {
    let script = Script::new("nvcc", true);
    let nvcc =
        |version: &str| fake_nvcc(&script.folder.join(version), version).display().to_string();
    let (old, right) = (nvcc("12.8"), nvcc("13.0"));
    let source = script.source("a.cu", "");
    let script = script.with("NVCC", &old);
    let error = script.refusal(&Extension::new("a").source(&source));
    assert_says(&error, &["(from NVCC) is CUDA 12.8", "built for CUDA 13", "CUDA_HOME"]);
    let script = script.with("NVCC", &right).with("TORCH_CUDA_ARCH_LIST", "9.0b");
    let error = script.refusal(&Extension::new("a").source(&source));
    assert_says(&error, &["TORCH_CUDA_ARCH_LIST: `9.0b`", "8.0, 8.6", "Hopper", "native"]);
    let error = script.refusal(&Extension::new("a").source(&source).archs("Volta"));
    assert_says(&error, &["archs: `Volta`"]);
    let error = script.refusal(&Extension::new("a").source(&source).for_hopper("hopper/b.cu"));
    assert_says(&error, &["for_hopper(\"hopper/b.cu\"): no CUDA source", "that was added"]);
}

#[test]
fn a_folder_of_headers_for_some_sources_only() {
    let script = Script::new("include-for", false);
    script.source("headers/only.h", "#define ONLY 1\n");
    let with = script.source("with/a.cpp", "#include <only.h>\nint a() { return ONLY; }\n");
    let without = script.source(
        "without/b.cpp",
        "#if __has_include(<only.h>)\n#error\n#endif\nint b() { return 0; }\n",
    );
    let headers = script.folder.join("headers");
    let extension = || Extension::new("my_ops").sources([&with, &without]);
    let (folder, missing) = (script.folder.join("with"), script.folder.join("missing"));
    extension().include_for(&folder, &headers).build_in(&script).expect("a library");
    let message = script.refusal(&extension().include_for(&folder, &missing));
    assert_says(&message, &["include_for: there is no folder", "missing"]);
    let message = script.refusal(&extension().include_for(&missing, &headers));
    assert_says(&message, &["include_for: no source that was added before begins with"]);
}

#[test]
fn a_header_of_a_cuda_library_is_there_with_cuda_only() {
    let script = Script::new("cuda-header", true);
    let nvcc = fake_nvcc(&script.folder.join("toolkit"), "13.0");
    // Next to libtorch, as wheels have it.
    script.source("nvidia/some/include/probed.h", "#define PROBED 1\n");
    let text = "#if EXPECTED != __has_include(<probed.h>)\n#error\n#endif\nint a() { return 0; }\n";
    let source = script.source("a.cpp", text);
    let extension = |expected| Extension::new("a").source(&source).define("EXPECTED", expected);
    let folder = script.folder.clone();
    let of_all = |expected| extension(expected).cuda_header(&folder, "probed.h");
    let other = script.source("elsewhere/b.cpp", "int b() { return 0; }\n");
    let of_others = |expected| extension(expected).source(&other).cuda_header(&other, "probed.h");
    let (with, without, elsewhere) = (of_all("1"), of_all("0"), of_others("0"));
    let message = script.refusal(&extension("0").cuda_header("nowhere", "probed.h"));
    assert_says(&message, &["cuda_header: no source that was added before begins with nowhere"]);
    let script =
        script.with("NVCC", &nvcc.display().to_string()).with("TORCH_CUDA_ARCH_LIST", "9.0");
    assert!(with.build_in(&script).expect("a library").0.cuda);
    elsewhere.build_in(&script).expect("a library");
    let script = script.with("TCH_EXTENSION_CUDA", "0");
    assert!(!without.build_in(&script).expect("a library").0.cuda);
}

#[test]
fn a_build_that_only_checks_needs_neither_libtorch_nor_a_compiler() {
    let purpose = |vars: &[(&'static str, &str)]| {
        let script = Script {
            folder: PathBuf::new(),
            vars: HashMap::new(),
            warnings: Mutex::default(),
            read: Mutex::default(),
        };
        let script = vars.iter().fold(script, |script, (name, value)| script.with(name, value));
        Purpose::of(&script)
    };
    let check = ("TCH_EXTENSION_CHECK", "1");
    assert_eq!(purpose(&[]).unwrap(), Purpose::Link);
    assert_eq!(purpose(&[("TCH_EXTENSION_CHECK", "0")]).unwrap(), Purpose::Link);
    assert_eq!(purpose(&[check]).unwrap(), Purpose::Check { cuda: true });
    assert_eq!(
        purpose(&[check, ("TCH_EXTENSION_CUDA", "0")]).unwrap(),
        Purpose::Check { cuda: false }
    );
    // Lints select the feature `doc-only`, because torch-sys compiles C++ without it.
    for document in [("DOCS_RS", "1"), ("CARGO_FEATURE_DOC_ONLY", "1")] {
        assert_eq!(purpose(&[document]).unwrap(), Purpose::Document);
        assert_eq!(purpose(&[document, check]).unwrap(), Purpose::Check { cuda: true });
    }
    let error = purpose(&[("TCH_EXTENSION_CHECK", "yes")]).unwrap_err();
    assert_says(&format!("{error:#}"), &["TCH_EXTENSION_CHECK=yes", "write 1"]);
}
