//! Tests the kernel library with g++ in the place of nvcc.

use super::*;
use crate::extension::build::from_library;
use crate::toolchain::Libtorch;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

const NODE: &str = "TCH_EXTENSION_0123";

/// A script with one kernel of `loss` and C++ that calls it.
fn script(name: &str) -> Script {
    script_with(name, NODE, "int tch_extension_loss_cuda() { return 1; }")
}

fn script_with(name: &str, node: &str, kernel: &str) -> Script {
    let script = Script::new(name, true);
    let nvcc = fake_nvcc(&script.folder.join("toolkit"), "13.0");
    script.source(
        "csrc/exports.map",
        &format!(
            "/* Generated. */\n{node} {{\n  global:\n    tch_extension_loss_cuda;\n    \
             tch_extension_rope_cuda;\n  local:\n    *;\n}};\n"
        ),
    );
    let declaration = "#pragma GCC visibility push(default)\nextern \"C\" int tch_extension_loss_cuda();\n\
                       #pragma GCC visibility pop\n";
    script.source("csrc/loss/cuda.cu", &format!("{declaration}void helper() {{}}\n{kernel}\n"));
    script.source(
        "csrc/loss/call.cpp",
        &format!("{declaration}int call() {{ return tch_extension_loss_cuda(); }}\n"),
    );
    script
        .with("NVCC", &nvcc.display().to_string())
        .with("TORCH_CUDA_ARCH_LIST", "9.0a")
        .with("CARGO_PKG_VERSION", "0.1.0")
        .with("TCH_EXTENSION_KERNELS", "shared")
}

fn extension(script: &Script) -> Extension {
    let sources = ["call.cpp", "cuda.cu"].map(|file| script.folder.join("csrc/loss").join(file));
    Extension::new("ops").sources(sources).kernel_library(script.folder.join("csrc/exports.map"))
}

/// What a build tells cargo.
fn lines(script: &Script) -> Vec<String> {
    extension(script).build_in(script).expect("it builds").1
}

fn value(lines: &[String], start: &str) -> String {
    let found = lines.iter().find_map(|line| line.strip_prefix(start));
    found.unwrap_or_else(|| panic!("no {start} in {lines:?}")).to_string()
}

fn library(lines: &[String]) -> PathBuf {
    let name = value(lines, "rustc-link-lib=dylib:+verbatim=libtch_extension_kernels-");
    let folders = lines.iter().filter_map(|line| line.strip_prefix("rustc-link-search=native="));
    let mut paths =
        folders.map(|folder| Path::new(folder).join(format!("libtch_extension_kernels-{name}")));
    paths.find(|path| path.exists()).unwrap_or_else(|| panic!("no library in {lines:?}"))
}

const KERNELS: &str = "metadata=kernels=";

/// Links a program with what the lines say, as cargo and `link_args` would.
fn program(script: &Script, lines: &[String]) -> PathBuf {
    let main = script.source("main.cpp", "int call();\nint main() { return call(); }\n");
    let out = script.folder.join("out");
    let program = script.folder.join("program");
    let folders = value(lines, KERNELS);
    let status = Command::new("g++")
        .arg(main)
        .arg(out.join("libops.a"))
        .arg(library(lines))
        .arg(format!("-Wl,-rpath,{folders}:{}", script.folder.join("libtorch/lib").display()))
        .arg(format!("-L{}", script.folder.join("libtorch/lib").display()))
        .args(["-Wl,--no-as-needed", "-l:libcudart.so.13"])
        .arg("-o")
        .arg(&program)
        .status();
    assert!(status.unwrap().success());
    program
}

fn run(program: &Path) -> Output {
    Command::new(program).output().unwrap()
}

#[test]
fn a_library_of_kernels_outlives_the_target_folder_or_the_cache() {
    let script = script("kernels");
    let lines = lines(&script);
    let members = Command::new("ar").arg("t").arg(script.folder.join("out/libops.a")).output();
    let members = String::from_utf8(members.unwrap().stdout).unwrap();
    assert!(members.contains("call.cpp") && !members.contains("cuda.cu"), "{members}");
    let exported = Command::new("nm").args(["-D", "--defined-only"]).arg(library(&lines)).output();
    let exported = String::from_utf8(exported.unwrap().stdout).unwrap();
    assert!(exported.contains(&format!("tch_extension_loss_cuda@@{NODE}")), "{exported}");
    assert!(!exported.contains("helper"), "{exported}");

    let program = program(&script, &lines);
    assert_eq!(run(&program).status.code(), Some(1));
    std::fs::remove_dir_all(script.folder.join("out/kernels")).unwrap();
    assert_eq!(run(&program).status.code(), Some(1), "the cache has it");
    assert_eq!(super::kernels::lines(&script), lines, "the same library again");
    std::fs::remove_dir_all(script.folder.join("cache/kernels")).unwrap();
    assert_eq!(run(&program).status.code(), Some(1), "the target folder has it");
    std::fs::remove_dir_all(script.folder.join("out/kernels")).unwrap();
    let text = String::from_utf8(run(&program).stderr).unwrap();
    assert!(text.contains("libtch_extension_kernels-"), "{text}");
}

#[test]
fn a_library_with_other_parameters_does_not_load() {
    let (here, other) = (
        script("node"),
        script_with(
            "other-node",
            "TCH_EXTENSION_4567",
            "int tch_extension_loss_cuda() { return 2; }",
        ),
    );
    let (lines, others) = (lines(&here), lines(&other));
    let program = program(&here, &lines);
    let kept = here.folder.join("cache/kernels").join(library(&lines).file_name().unwrap());
    std::fs::copy(library(&others), kept).unwrap();
    let output = run(&program);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains(NODE), "{text}");
}

#[test]
fn a_function_that_is_hidden_is_refused_by_name() {
    let kernel = "#pragma GCC visibility push(hidden)\nnamespace n { extern \"C\" int tch_extension_loss_cuda() \
                  { return 1; } }";
    let script = script_with("hidden", NODE, kernel);
    let cuda = script.folder.join("csrc/loss/cuda.cu");
    assert_says(
        &script.refusal(&extension(&script)),
        &[&format!("{} hides tch_extension_loss_cuda; include its declaration", cuda.display())],
    );
}

#[test]
fn two_versions_in_one_program_call_their_own() {
    let (here, other) = (
        script("one"),
        script_with("two", "TCH_EXTENSION_4567", "int tch_extension_loss_cuda() { return 2; }"),
    );
    let callers = [&here, &other].map(|script| {
        let (lines, caller) = (lines(script), script.folder.join("caller.so"));
        let folder = library(&lines).parent().unwrap().display().to_string();
        let mut command = Command::new("g++");
        command.args(["-shared", "-fPIC"]).arg(script.folder.join("csrc/loss/call.cpp"));
        command.arg(library(&lines)).arg(format!("-Wl,-rpath,{folder}")).arg("-o").arg(&caller);
        assert!(command.status().unwrap().success());
        caller
    });
    let main = here.source(
        "both.cpp",
        "#include <dlfcn.h>\nint main(int, char** paths) {\n  int sum = 0;\n  void* callers[2];\n\
         for (int i = 0; i < 2; ++i) {\n    callers[i] = dlopen(paths[i + 1], RTLD_NOW | RTLD_GLOBAL);\n\
         if (!callers[i]) return 9;\n  }\n  for (void* caller : callers)\n\
         sum = 3 * sum + reinterpret_cast<int (*)()>(dlsym(caller, \"_Z4callv\"))();\n  return sum;\n}\n",
    );
    let both = here.folder.join("both");
    let built = Command::new("g++").arg(main).arg("-o").arg(&both).arg("-ldl").status();
    assert!(built.unwrap().success());
    assert_eq!(Command::new(both).args(callers).status().unwrap().code(), Some(5));
}

#[test]
fn other_kernels_are_another_library() {
    let script = script("names");
    let first = library(&lines(&script));
    assert_eq!(library(&lines(&script)), first);
    let source = script.folder.join("csrc/loss/cuda.cu");
    let text = std::fs::read_to_string(&source).unwrap();
    std::fs::write(&source, text.replace("return 1", "return 3")).unwrap();
    let second = library(&lines(&script));
    assert_ne!(second, first);
    assert!(!first.exists() && second.exists(), "only the last one is in the target folder");
    let kept = script.folder.join("cache/kernels").join(first.file_name().unwrap());
    assert!(kept.exists(), "older programs need it");
    // It loads the runtime by its name.
    let runtime = script.folder.join("libtorch/lib/libcudart.so.13");
    std::fs::rename(&runtime, runtime.with_file_name("libcudart-01.so.13")).unwrap();
    assert_ne!(library(&lines(&script)).file_name(), second.file_name());
}

#[test]
fn debug_builds_share_the_kernels() {
    let kernel =
        "int tch_extension_loss_cuda() {\n#ifdef TCH_EXTENSION_DEBUG\n#error\n#endif\nreturn 1; }";
    let script = script_with("debug", NODE, kernel);
    let call = script.folder.join("csrc/loss/call.cpp");
    let text = std::fs::read_to_string(&call).unwrap();
    write(&call, &format!("{text}\n#ifdef TCH_EXTENSION_DEBUG\nint debug;\n#endif\n"));
    let release = library(&lines(&script));
    let compiled = |script: &Script| {
        let log = std::fs::read_to_string(script.folder.join("cache/objects/log")).unwrap();
        log.lines().last().unwrap().split_once("compiled=").unwrap().1.to_string()
    };
    let script = script.with("PROFILE", "debug");
    assert_eq!(library(&lines(&script)), release);
    assert_eq!(compiled(&script), "1", "only C++");
    let script = script.with("TCH_EXTENSION_KERNELS", "static");
    lines(&script);
    // Kernels of other extensions may check indices.
    let own = Extension::new("own").source(script.folder.join("csrc/loss/cuda.cu"));
    assert_says(&script.refusal(&own), &["#error"]);
}

/// The path of a library, and a script that is given it.
fn with_prebuilt(name: &str) -> (String, Script) {
    let builder = script(name);
    let built = library(&lines(&builder));
    let user = script(&format!("{name}-user"));
    let path = user.folder.join("prebuilt").join(built.file_name().unwrap());
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    std::fs::copy(&built, &path).unwrap();
    let path = path.canonicalize().unwrap().display().to_string();
    let user = user.with("TCH_EXTENSION_KERNELS", &path);
    write_headers(&user, 13);
    (path, user)
}

/// Writes a header of CUDA's next to libtorch.
fn write_headers(script: &Script, major: u32) {
    let text = format!("#define CUDART_VERSION {major}020\n");
    write(&script.folder.join("libtorch/include/cuda_runtime_api.h"), &text);
}

#[test]
fn a_prebuilt_library_needs_no_nvcc() {
    let (path, user) = with_prebuilt("prebuilt");
    let user = user.with("NVCC", "").with("PATH", "").with("TCH_EXTENSION_CUDA", "1");
    let (built, lines) = extension(&user).build_in(&user).expect("it builds");
    assert!(built.cuda && lines.contains(&"rustc-cfg=tch_extension_cuda".to_string()));
    assert_eq!(library(&lines).display().to_string(), path);
    let log = std::fs::read_to_string(user.folder.join("cache/objects/log")).unwrap();
    assert!(log.ends_with("current=0 found=0 compiled=1\n"), "{log}");
    assert_eq!(run(&program(&user, &lines)).status.code(), Some(1));
    let without = user.with("TCH_EXTENSION_CUDA", "0");
    let (built, lines) = extension(&without).build_in(&without).expect("it builds");
    assert!(!built.cuda && !lines.iter().any(|line| line.contains("kernels")), "{lines:?}");
}

#[test]
fn a_prebuilt_library_that_does_not_fit_is_refused_by_name() {
    let (path, mut user) = with_prebuilt("misfit");
    let mut refused = |name: &'static str, value: &str, reason: &str| {
        let before = user.vars.insert(name, value.to_string()).unwrap_or_default();
        let error = user.refusal(&extension(&user));
        user.vars.insert(name, before);
        assert!(error.starts_with(&format!("the kernel library {path} {reason}")), "{error}");
        assert!(error.contains("; unset TCH_EXTENSION_KERNELS to compile the kernels"), "{error}");
        let names_list = error.ends_with(", or set TORCH_CUDA_ARCH_LIST to what the library has");
        assert_eq!(names_list, name == "TORCH_CUDA_ARCH_LIST", "{error}");
    };
    refused(
        "CARGO_PKG_VERSION",
        "0.2.0",
        "belongs to tch-extension 0.1.0, this is 0.2.0; install the matching wheel",
    );
    refused("TORCH_CUDA_ARCH_LIST", "8.0", "has kernels for 9.0a, and you ask for 8.0");
    refused("TORCH_CUDA_ARCH_LIST", "9.0+PTX", "has kernels for 9.0a, and you ask for 9.0+PTX");
    refused("NVCC_APPEND_FLAGS", "-O1", "was compiled with \"\" in NVCC_APPEND_FLAGS");

    let map = user.folder.join("csrc/exports.map");
    let text = std::fs::read_to_string(&map).unwrap();
    std::fs::write(&map, text.replace(NODE, "TCH_EXTENSION_89ab")).unwrap();
    assert_says(&user.refusal(&extension(&user)), &["has functions with other parameters"]);
    std::fs::write(&map, text).unwrap();
    let rope = user.source("csrc/rope/cuda.cu", "");
    assert_says(&user.refusal(&extension(&user).source(rope)), &["has no kernels of `rope`"]);
    for (path, reason) in [
        ("kernels.so", "kernels.so: write shared, static, or the absolute path"),
        ("/nowhere.so", "/nowhere.so: there is no such file; write shared"),
    ] {
        user.vars.insert("TCH_EXTENSION_KERNELS", path.to_string());
        assert_says(&user.refusal(&extension(&user)), &[reason]);
    }
    user.vars.insert("TCH_EXTENSION_CUDA", "off".to_string());
    assert_says(&user.refusal(&extension(&user)), &["TCH_EXTENSION_CUDA=off: write 1"]);
    user.vars.insert("TCH_EXTENSION_CUDA", "0".to_string());
    assert!(!extension(&user).build_in(&user).expect("no path matters").0.cuda);
    user.vars.remove("TCH_EXTENSION_CUDA");
    let other = user.folder.join("libtorch/lib/libtorch.so").display().to_string();
    let user = user.with("TCH_EXTENSION_KERNELS", &other);
    assert_says(&user.refusal(&extension(&user)), &["is no library of tch-extension's kernels"]);
    let lib = fake_libtorch(&user.folder.join("cpu"), false).display().to_string();
    let user = user.with("DEP_TCH_EXTENSION_LIBTORCH_LIB", &lib);
    assert_says(&user.refusal(&extension(&user)), &["is a CPU build; unset it"]);
}

#[test]
fn a_prebuilt_library_has_its_own_name_and_the_runtime_of_libtorch() {
    let kernel =
        "extern \"C\" int cuda_call();\nint tch_extension_loss_cuda() { return cuda_call(); }";
    let builder = script_with("runtime", NODE, kernel);
    let runtime = builder.folder.join("libtorch/lib/libcudart.so.13");
    let source = builder.source("runtime.cpp", "extern \"C\" int cuda_call() { return 1; }\n");
    let mut command = Command::new("g++");
    command.args(["-shared", "-fPIC", "-Wl,-soname,libcudart.so.13"]).arg(source);
    assert!(command.arg("-o").arg(&runtime).status().unwrap().success());
    let built = library(&lines(&builder)).canonicalize().unwrap();

    let user = script("runtime-user").with("TCH_EXTENSION_KERNELS", &built.display().to_string());
    write_headers(&user, 13);
    assert_eq!(library(&lines(&user)), built);
    let renamed = built.with_file_name("kernels.so");
    std::fs::copy(&built, &renamed).unwrap();
    let user = user.with("TCH_EXTENSION_KERNELS", &renamed.display().to_string());
    let name = built.file_name().unwrap().to_str().unwrap();
    let expected = ["kernels.so must have the name ", name, ", which programs look for; unset"];
    assert_says(&user.refusal(&extension(&user)), &expected);
    // A link by another name does no harm. It may point elsewhere tomorrow.
    std::fs::remove_file(&renamed).unwrap();
    std::os::unix::fs::symlink(&built, &renamed).unwrap();
    assert_eq!(library(&lines(&user)), built);
    let read = user.read.lock().unwrap().clone();
    assert!(read.contains(&built) && read.contains(&renamed), "{read:?}");

    let own = user.folder.join("libtorch/lib/libcudart-01.so.13");
    std::fs::rename(own.with_file_name("libcudart.so.13"), &own).unwrap();
    let expected = ["needs libcudart.so.13, and libtorch has ", "libcudart-01.so.13; unset"];
    assert_says(&user.refusal(&extension(&user)), &expected);
}

#[test]
fn a_path_that_is_no_text_is_refused_by_name() {
    let script = script("no-text").with("TCH_EXTENSION_KERNELS", "");
    let variable = "TCH_EXTENSION_KERNELS";
    if std::env::var_os(variable).is_some_and(|value| value.as_bytes() == b"/odd\xff") {
        let expected = [variable, "odd\\xFF", "is not UTF-8"];
        assert_says(&script.refusal(&extension(&script)), &expected);
        return;
    }
    // The variable is the whole process's.
    let name = "extension::tests::kernels::a_path_that_is_no_text_is_refused_by_name";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name]).env(variable, OsStr::from_bytes(b"/odd\xff"));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn headers_of_cuda_are_those_of_libtorch_s_version() {
    let script = Script::new("cuda-headers", true);
    let libtorch = Libtorch::at(script.vars["DEP_TCH_EXTENSION_LIBTORCH_LIB"].clone(), &script);
    let libtorch = libtorch.unwrap();
    let of = |cuda: u32, script: &Script| crate::kernels::headers(&libtorch, cuda, script);
    write_headers(&script, 98);
    let next = script.folder.join("libtorch/include");
    assert_eq!(of(98, &script).unwrap(), next);
    let toolkit = script.folder.join("toolkit");
    write(&toolkit.join("include/cuda_runtime_api.h"), "#define CUDART_VERSION  99000\n");
    let error = of(99, &script).unwrap_err().to_string();
    let tried = format!("Tried: {}, ", next.display());
    assert_says(&error, &["no headers of CUDA 99", "set CUDA_HOME", &tried]);
    for (name, value) in [
        ("CUDA_HOME", toolkit.clone()),
        ("CUDA_PATH", toolkit.clone()),
        ("NVCC", toolkit.join("bin/nvcc")),
        ("PATH", fake_nvcc(&toolkit, "99.0").parent().unwrap().to_path_buf()),
    ] {
        let mut env = Script::new("cuda-headers-of", true);
        env = env.with(name, &value.display().to_string());
        assert_eq!(of(99, &env).unwrap(), toolkit.join("include"), "{name}");
    }
    std::fs::remove_file(next.join("cuda_runtime_api.h")).unwrap();
    assert!(of(98, &script).is_err());
}

#[test]
fn programs_look_into_the_cache_first_and_not_where_anyone_can_write() {
    let script = script("places");
    let (cache, own) = (script.folder.join("cache/kernels"), script.folder.join("out/kernels"));
    let searched = |script: &Script| value(&lines(script), KERNELS);
    assert_eq!(searched(&script), format!("{}:{}", cache.display(), own.display()));
    let temporary = script.folder.display().to_string();
    let script = script.with("TMPDIR", &temporary);
    assert_eq!(searched(&script), cache.display().to_string(), "as with cargo install");
    assert!(script.warnings.lock().unwrap().is_empty());

    // There is no other place.
    let colon = script.folder.join("a:b").display().to_string();
    let script = script.with("TCH_EXTENSION_CACHE", &colon);
    assert_eq!(searched(&script), own.display().to_string());
    assert_says(&script.warnings.lock().unwrap().concat(), &[&colon, "whose name has a colon"]);
    let file = script.source("file", "").display().to_string();
    let script = script.with("TCH_EXTENSION_CACHE", &file);
    assert_eq!(searched(&script), own.display().to_string());
    let expected = ["the cache does not keep the kernel library", "only in", &file];
    assert_says(&script.warnings.lock().unwrap().concat(), &expected);
}

#[test]
fn a_library_keeps_what_it_is_for_whatever_the_flags() {
    let flags = "-DA=\")facts\"\n-O1";
    let script = script("facts").with("NVCC_APPEND_FLAGS", flags);
    let built = library(&lines(&script)).canonicalize().unwrap();
    // As a wheel links it once more.
    let link = std::fs::read_to_string(script.folder.join("out/kernels/link")).unwrap();
    let mut command = Command::new("g++");
    command.args(link.lines()).args(["-Wl,--gc-sections,--strip-all", "-o"]).arg(&built);
    assert!(command.status().unwrap().success());
    let exported = Command::new("nm").arg("-D").arg(&built).output().unwrap().stdout;
    assert!(!String::from_utf8_lossy(&exported).contains("facts"));

    let user = super::kernels::script("facts-user").with("NVCC_APPEND_FLAGS", flags);
    write_headers(&user, 13);
    let user = user.with("TCH_EXTENSION_KERNELS", &built.display().to_string());
    assert_eq!(library(&lines(&user)), built);
    let user = user.with("NVCC_APPEND_FLAGS", "");
    assert_says(&user.refusal(&extension(&user)), &["was compiled with ", "\\n-O1\" in NVCC"]);
}

#[test]
fn the_cache_keeps_new_libraries_and_some_old_ones() {
    let script = script("bound");
    let kept = script.folder.join("cache/kernels");
    lines(&script);
    let now = SystemTime::now();
    let day = Duration::from_secs(24 * 60 * 60);
    // The one that was just built is a seventeenth.
    for index in 1..=20 {
        let age = if index <= 10 { day } else { 90 * day + index * day };
        let file = std::fs::File::create(kept.join(format!("{index}.so"))).unwrap();
        file.set_modified(now - age).unwrap();
    }
    lines(&script);
    let mut left: Vec<u32> = Vec::new();
    for entry in std::fs::read_dir(&kept).unwrap() {
        left.extend(entry.unwrap().path().file_stem().unwrap().to_str().unwrap().parse::<u32>());
    }
    left.sort();
    assert_eq!(left, (1..=15).collect::<Vec<_>>());
    for index in 1..=20 {
        std::fs::File::create(kept.join(format!("{index}.so"))).unwrap();
    }
    lines(&script);
    assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 21, "none is old");
}

#[test]
fn folders_may_have_commas() {
    let mut script = script("commas");
    let out = script.folder.join("a,b");
    std::fs::create_dir(&out).unwrap();
    script = script.with("OUT_DIR", &out.display().to_string());
    assert!(library(&lines(&script)).starts_with(out));
}

#[test]
fn a_library_for_python_looks_next_to_itself_and_where_the_kernels_are() {
    let out_dir = Path::new("/t/debug/build/my-01/out");
    let look = |folders: &[&str]| {
        let folders: Vec<PathBuf> = folders.iter().map(PathBuf::from).collect();
        from_library(&folders, out_dir).join(":")
    };
    assert_eq!(look(&[]), "");
    assert_eq!(
        look(&["/cache/kernels", "/t/debug/build/tch-extension-02/out/kernels"]),
        "$ORIGIN:$ORIGIN/build/tch-extension-02/out/kernels:$ORIGIN/../build/tch-extension-02/out/kernels"
    );
    assert_eq!(look(&["/site/tch_extension"]), "$ORIGIN:/site/tch_extension");
}

#[test]
fn without_a_cache_the_target_folder_has_it() {
    let script = script("no-cache").with("TCH_EXTENSION_COMPILE_CACHE", "0");
    let folders = value(&lines(&script), KERNELS);
    assert_eq!(folders, script.folder.join("out/kernels").display().to_string());
}

#[test]
fn static_kernels_are_those_of_the_library_and_stay_in_the_archive() {
    let kernel =
        "int tch_extension_loss_cuda() {\n#ifdef TCH_EXTENSION_DEBUG\n#error\n#endif\nreturn 1; }";
    let script = script_with("static", NODE, kernel).with("PROFILE", "debug");
    let sources = [script.folder.join("csrc/loss/cuda.cu")];
    let extension = || Extension::new("ops").sources(&sources);
    let lines = extension().static_kernels().build_in(&script).expect("it builds").1;
    assert!(lines.contains(&"rustc-link-lib=static=ops".to_string()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.contains("tch_extension_kernels-")), "{lines:?}");
    assert!(extension().build_in(&script).is_err(), "others have the macro of debug builds");
}

#[test]
fn other_extensions_stay_archives() {
    let script = script("own");
    let own = Extension::new("my_ops").source(script.folder.join("csrc/loss/cuda.cu"));
    let lines = own.build_in(&script).expect("it builds").1;
    assert!(!lines.iter().any(|line| line.contains("kernels")), "{lines:?}");
    // Nor is there a library without a CUDA source.
    let cpp = Extension::new("ops")
        .source(script.folder.join("csrc/loss/call.cpp"))
        .kernel_library(script.folder.join("csrc/exports.map"));
    let (built, lines) = cpp.build_in(&script).expect("it builds");
    assert!(built.cuda && !lines.iter().any(|line| line.contains("kernels")), "{lines:?}");
}

#[test]
fn another_form_leaves_no_library_behind() {
    let (path, mut script) = with_prebuilt("forms");
    for (name, value) in [
        ("TCH_EXTENSION_KERNELS", "static"),
        ("TCH_EXTENSION_CUDA", "0"),
        ("TCH_EXTENSION_KERNELS", &path),
    ] {
        script = script.with("TCH_EXTENSION_KERNELS", "shared").with("TCH_EXTENSION_CUDA", "1");
        let built = library(&lines(&script));
        assert!(built.exists(), "{}", built.display());
        script = script.with(name, value);
        let lines = lines(&script);
        assert!(!script.folder.join("out/kernels").exists(), "{name}={value}");
        let is_prebuilt = lines.iter().any(|line| line.contains("kernels"));
        assert_eq!(is_prebuilt, value == path, "{lines:?}");
    }
}
