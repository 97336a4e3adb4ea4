//! Tests of the compile cache: what it finds, and what it must not find.

mod support;

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Mutex;
use support::{fake_headers, fake_nvcc, scratch, write};
use tch_extension_build::LIBTORCH_VERSIONS;
use tch_extension_build::arch::Arch;
use tch_extension_build::environment::{Environment, Process};
use tch_extension_build::probe::{CudaVersion, Nvcc};
use tch_extension_build::toolchain::{Cuda, CudaMode, Libtorch, Options, Reuse, Toolchain};

/// Counts compilers, and keeps warnings.
#[derive(Default)]
struct Recorder {
    runs: Mutex<usize>,
    warnings: Mutex<Vec<String>>,
    variables: HashMap<&'static str, &'static str>,
}

impl Environment for Recorder {
    fn var(&self, name: &str) -> Option<String> {
        self.variables.get(name).map(|value| value.to_string()).or_else(|| Process.var(name))
    }

    fn runs(&self, _command: &str) {
        *self.runs.lock().unwrap() += 1;
    }

    fn warns(&self, line: &str) {
        self.warnings.lock().unwrap().push(line.to_string());
    }
}

/// A folder with sources, a cache, a libtorch and an nvcc.
struct Scene {
    folder: PathBuf,
    toolchain: Toolchain,
    options: Options,
    recorder: Recorder,
    builds: usize,
}

impl Scene {
    fn new(name: &str) -> Self {
        let folder = scratch(&format!("cache-{name}"));
        let lib = fake_headers(&folder.join("libtorch"), LIBTORCH_VERSIONS[0].0);
        let libtorch = Libtorch::at(lib, &Process).unwrap();
        let toolchain = Toolchain::find(libtorch, CudaMode::Off, None, &Process).unwrap();
        let options = Options {
            includes: vec![folder.join("first"), folder.join("second")],
            reuse: Reuse::Cache(folder.join("cache")),
            ..Options::default()
        };
        Scene { folder, toolchain, options, recorder: Recorder::default(), builds: 0 }
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        write(&self.folder.join(name), text)
    }

    /// Compiles the source in a new folder, and returns how many compilers ran and the object.
    #[track_caller]
    fn build(&mut self, source: &str) -> (usize, Vec<u8>) {
        self.builds += 1;
        let out = self.folder.join(format!("out-{}", self.builds));
        // What was written within the tick of a clock before the compiler ran is not kept.
        std::thread::sleep(std::time::Duration::from_millis(30));
        *self.recorder.runs.lock().unwrap() = 0;
        let sources = [self.folder.join(source)];
        let objects =
            self.toolchain.compile(&sources, &self.options, &out, 1, &self.recorder).unwrap();
        let object = std::fs::read(&objects[0].path).unwrap();
        let runs = *self.recorder.runs.lock().unwrap();
        // Nothing is compiled twice in one folder.
        self.toolchain.compile(&sources, &self.options, &out, 1, &self.recorder).unwrap();
        (runs, object)
    }

    #[track_caller]
    fn assert_compiled(&mut self, source: &str, times: usize, why: &str) {
        assert_eq!(self.build(source).0, times, "{why}");
    }

    fn entries(&self) -> PathBuf {
        self.folder.join("cache/objects")
    }

    /// The files of all entries that are no locks.
    fn files(&self) -> Vec<PathBuf> {
        let inside = |folder: PathBuf| {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let files =
            inside(self.entries()).into_iter().filter(|path| path.is_dir()).flat_map(inside);
        files.filter(|path| !path.ends_with("lock")).collect()
    }

    /// Compiles CUDA with a script, which runs `meanwhile` before it compiles.
    fn with_nvcc(&mut self, meanwhile: &str) {
        let path = fake_nvcc(&self.folder.join("toolkit"), "13.0");
        let script = std::fs::read_to_string(&path).unwrap();
        let meanwhile = format!("case \"$*\" in *-MD*) {meanwhile};; esac\nexec g++");
        std::fs::write(&path, script.replace("exec g++", &meanwhile)).unwrap();
        let version = CudaVersion { major: 13, minor: 0 };
        let nvcc = Nvcc { path, version, source: "a test".into() };
        let archs = vec![Arch { number: "90".into(), ptx: false }];
        self.toolchain.cuda = Some(Cuda { nvcc, archs });
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn another_folder_gets_the_same_object_and_its_warnings() {
    let mut scene = Scene::new("same");
    scene.write("a.cpp", "int f(int unused) { return 1; }\n");
    let (runs, object) = scene.build("a.cpp");
    let warnings = std::mem::take(&mut *scene.recorder.warnings.lock().unwrap());
    assert!(runs == 1 && warnings.iter().any(|line| line.contains("unused")), "{warnings:?}");
    assert_eq!(scene.build("a.cpp"), (0, object));
    assert_eq!(*scene.recorder.warnings.lock().unwrap(), warnings);
}

#[test]
fn what_was_changed_to_and_fro_is_found() {
    let mut scene = Scene::new("fro");
    scene.write("a.cpp", "#include <a.h>\nint f() { return VALUE; }\n");
    for (value, runs) in [(1, 1), (2, 1), (1, 0), (2, 0), (3, 1)] {
        scene.write("second/a.h", &format!("#define VALUE {value}\n"));
        scene.assert_compiled("a.cpp", runs, &format!("{value}"));
    }
    scene.options.defines.push(("A".into(), None));
    scene.assert_compiled("a.cpp", 1, "another macro");
    scene.options.cxx_flags.push("-O1".into());
    scene.assert_compiled("a.cpp", 1, "another flag");
    scene.recorder.variables.insert("CPATH", "/somewhere");
    scene.assert_compiled("a.cpp", 1, "a variable that compilers read");
    scene.recorder.variables.insert("NVCC_APPEND_FLAGS", "-Xcicc -O1");
    scene.assert_compiled("a.cpp", 0, "a variable that g++ does not read");
}

/// Packages unpack files with the times that they had elsewhere.
#[test]
fn a_header_of_libtorch_s_counts_by_its_text() {
    let mut scene = Scene::new("libtorch");
    scene.write("a.cpp", "#include <ATen/a.h>\nint f() { return VALUE; }\n");
    for value in [1, 2] {
        let header = format!("#define VALUE {value}\n");
        let path = scene.write("libtorch/include/ATen/a.h", &header);
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        scene.assert_compiled("a.cpp", 1, &header);
    }
    // Nor is it only the folder with the object that sees it.
    let out = scene.folder.join("out");
    let (sources, options) = ([scene.folder.join("a.cpp")], &scene.options);
    let objects = scene.toolchain.compile(&sources, options, &out, 1, &scene.recorder).unwrap();
    let own = objects[0].dependencies();
    assert_eq!(own, sources, "cargo need not know libtorch's headers");
    write(&scene.folder.join("libtorch/include/ATen/a.h"), "#define VALUE 3\n");
    std::thread::sleep(std::time::Duration::from_millis(30));
    *scene.recorder.runs.lock().unwrap() = 0;
    scene.toolchain.compile(&sources, options, &out, 1, &scene.recorder).unwrap();
    assert_eq!(*scene.recorder.runs.lock().unwrap(), 1);
}

#[test]
fn a_new_header_that_hides_another_is_seen() {
    let mut scene = Scene::new("hides");
    scene.write("a.cpp", "#include <part/a.h>\n#include \"b.h\"\nint f() { return A + B; }\n");
    scene.write("second/part/a.h", "#define A 1\n");
    scene.write("second/b.h", "#define B 1\n");
    let (_, before) = scene.build("a.cpp");
    scene.write("first/unrelated.h", "");
    assert_eq!(scene.build("a.cpp"), (0, before.clone()));
    for (name, text) in [("first/part/a.h", "#define A 2\n"), ("b.h", "#define B 4\n")] {
        let path = scene.write(name, text);
        let (runs, object) = scene.build("a.cpp");
        assert!(runs == 1 && object != before, "{name}");
        std::fs::remove_file(path).unwrap();
        assert_eq!(scene.build("a.cpp"), (0, before.clone()));
    }
}

#[test]
fn what_has_include_would_find_is_seen() {
    let mut scene = Scene::new("has");
    let text = "#if __has_include(<more.h>)\nint more;\n#endif\nint f() { return 1; }\n";
    scene.write("a.cpp", text);
    let (_, before) = scene.build("a.cpp");
    let more = scene.write("second/more.h", "");
    let (runs, object) = scene.build("a.cpp");
    assert!(runs == 1 && object != before);
    std::fs::remove_file(more).unwrap();
    assert_eq!(scene.build("a.cpp"), (0, before));
}

#[test]
fn what_no_list_of_headers_shows_is_compiled_each_time() {
    let mut scene = Scene::new("hidden");
    scene.write("second/a.h", "");
    for (text, why) in [
        ("const char* built() { return __TIME__; }\n", "the time"),
        ("asm(\".incbin \\\"/etc/hostname\\\"\");\n", "a file of the assembler's"),
        ("#define NAME <a.h>\n#include NAME\n", "a name that macros make"),
        ("#define HAS(x) __has_include(x)\n#if HAS(<a.h>)\n#endif\n", "the same of a question"),
    ] {
        scene.write("a.cpp", text);
        assert_eq!([scene.build("a.cpp").0, scene.build("a.cpp").0], [1, 1], "{why}");
    }
    scene.write("a.cpp", "int f() { return 1; }\n");
    let header = scene.write("forced.h", "");
    scene.options.cxx_flags = vec!["-include".into(), header.display().to_string()];
    assert_eq!([scene.build("a.cpp").0, scene.build("a.cpp").0], [1, 1], "a forced header");
}

#[test]
fn one_damaged_byte_is_noticed() {
    let mut scene = Scene::new("damaged");
    scene.write("a.cpp", "int f() { return 1; }\n");
    let (_, object) = scene.build("a.cpp");
    let [file] = &scene.files()[..] else { panic!("one object") };
    let whole = std::fs::read(file).unwrap();
    for place in [3, 20, 60, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[place] ^= 1;
        std::fs::write(file, damaged).unwrap();
        assert_eq!(scene.build("a.cpp"), (1, object.clone()), "byte {place}");
        assert_eq!(scene.build("a.cpp"), (0, object.clone()), "it was replaced");
    }
    std::fs::write(file, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(scene.build("a.cpp"), (1, object), "half of it");
}

/// The test may run as root, who may write everywhere.
#[test]
fn a_cache_that_cannot_be_used_costs_one_warning() {
    use std::os::unix::fs::chown;
    let mut scene = Scene::new("unusable");
    scene.write("a.cpp", "int a() { return 1; }\n");
    let warnings = |scene: &mut Scene| {
        scene.assert_compiled("a.cpp", 1, "it is compiled");
        let warnings = std::mem::take(&mut *scene.recorder.warnings.lock().unwrap());
        // One for each call.
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        for part in ["cannot be used", "TCH_EXTENSION_CACHE", "TCH_EXTENSION_COMPILE_CACHE=0"] {
            assert!(warnings[0].contains(part), "{warnings:?}");
        }
        warnings[0].clone()
    };
    let cache = scene.write("cache", "a file");
    assert!(warnings(&mut scene).contains("cannot create"));
    std::fs::remove_file(&cache).unwrap();
    std::fs::create_dir(&cache).unwrap();
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(warnings(&mut scene).contains("others may write"));
    std::fs::set_permissions(&cache, PermissionsExt::from_mode(0o700)).unwrap();
    std::os::unix::fs::symlink(&scene.folder, scene.entries()).unwrap();
    assert!(warnings(&mut scene).contains("it is a link"));
    std::fs::remove_file(scene.entries()).unwrap();
    if chown(&cache, Some(54321), None).is_err() {
        eprintln!("skipped: only root can make a folder of another user's");
        return;
    }
    assert!(warnings(&mut scene).contains("it belongs to user 54321"));
    chown(&cache, Some(0), None).unwrap();
    scene.assert_compiled("a.cpp", 1, "nothing was kept before");
    scene.assert_compiled("a.cpp", 0, "it can be used again");
}

#[test]
fn a_cache_that_is_emptied_during_a_build_is_filled_again() {
    let mut scene = Scene::new("emptied");
    scene.with_nvcc(&format!("rm -r '{}'", scene.entries().display()));
    scene.write("a.cu", "int a() { return 1; }\n");
    let (runs, object) = scene.build("a.cu");
    assert_eq!(runs, 1);
    assert_eq!(scene.build("a.cu"), (0, object));
    assert!(scene.recorder.warnings.lock().unwrap().is_empty());
}

#[test]
fn an_interrupted_build_leaves_nothing_that_counts() {
    let mut scene = Scene::new("interrupted");
    scene.with_nvcc("echo half > \"$(eval echo \\${$#})\"; kill -9 $$");
    scene.write("a.cu", "int a() { return 1; }\n");
    let sources = [scene.folder.join("a.cu")];
    let out = scene.folder.join("out");
    let killed = scene.toolchain.compile(&sources, &scene.options, &out, 1, &scene.recorder);
    assert!(killed.is_err());
    scene.with_nvcc(":");
    let objects =
        scene.toolchain.compile(&sources, &scene.options, &out, 1, &scene.recorder).unwrap();
    assert_eq!(std::fs::read(&objects[0].path).unwrap()[..4], *b"\x7fELF");
    // A builder that was killed while it published.
    let entry = scene.files()[0].parent().unwrap().to_path_buf();
    write(&entry.join("part-1-2-3"), "half an object");
    scene.assert_compiled("a.cu", 0, "the whole one is there");
}

#[test]
fn two_builds_at_once_compile_once() {
    let mut scene = Scene::new("two");
    scene.with_nvcc("sleep 0.5");
    scene.write("a.cu", "int a() { return 1; }\n");
    std::thread::sleep(std::time::Duration::from_millis(30));
    let sources = [scene.folder.join("a.cu")];
    std::thread::scope(|scope| {
        for build in 0..3 {
            let (scene, sources) = (&scene, &sources);
            scope.spawn(move || {
                let out = scene.folder.join(format!("out-{build}"));
                scene.toolchain.compile(sources, &scene.options, &out, 1, &scene.recorder).unwrap();
            });
        }
    });
    assert_eq!(*scene.recorder.runs.lock().unwrap(), 1);
}

#[test]
fn another_compiler_at_the_same_place_is_another() {
    let mut scene = Scene::new("compiler");
    scene.with_nvcc(":");
    scene.write("a.cu", "int a() { return 1; }\n");
    scene.assert_compiled("a.cu", 1, "the first time");
    scene.assert_compiled("a.cu", 0, "the same");
    let nvcc = scene.toolchain.cuda.as_ref().unwrap().nvcc.path.clone();
    let script = std::fs::read_to_string(&nvcc).unwrap();
    let time = nvcc.metadata().unwrap().modified().unwrap();
    for (old, new, why) in [
        ("V13.0.88", "V13.0.89", "another version"),
        ("-x c++ $words", "-x c++ $words -mavx2", "a processor with other features"),
    ] {
        assert!(script.contains(old), "{script}");
        std::fs::write(&nvcc, script.replace(old, new)).unwrap();
        std::fs::File::options().write(true).open(&nvcc).unwrap().set_modified(time).unwrap();
        scene.assert_compiled("a.cu", 1, why);
    }
}

#[test]
fn cpp_does_not_depend_on_cuda() {
    let mut scene = Scene::new("cpp");
    scene.write("a.cpp", "int a() { return 1; }\n");
    scene.write("b.cpp", "#ifdef TCH_EXTENSION_CUDA\nint b;\n#endif\n");
    for source in ["a.cpp", "b.cpp"] {
        scene.assert_compiled(source, 1, source);
    }
    scene.with_nvcc(":");
    scene.assert_compiled("a.cpp", 0, "it does not ask whether there is CUDA");
    scene.assert_compiled("b.cpp", 1, "it asks");
    let archs = vec![Arch { number: "80".into(), ptx: true }];
    scene.toolchain.cuda.as_mut().unwrap().archs = archs;
    for source in ["a.cpp", "b.cpp"] {
        scene.assert_compiled(source, 0, source);
    }
    scene.toolchain.cuda = None;
    scene.assert_compiled("b.cpp", 0, "as at first");
}

/// g++ lists the shorter one of a system header's two paths, so the list may have the whole path of
/// another libtorch's header, which is still there.
#[test]
fn a_libtorch_whose_folder_is_a_link_is_not_taken_for_another() {
    let mut scene = Scene::new("links");
    scene.write("a.cpp", "#include <ATen/b.h>\nint a() { return B; }\n");
    for (number, name) in ["a", "b"].into_iter().enumerate() {
        let version = LIBTORCH_VERSIONS[number].0;
        fake_headers(&scene.folder.join(name), version);
        scene.write(&format!("{name}/include/ATen/b.h"), &format!("#define B {number}\n"));
        let link = scene.folder.join(format!("a/long/way/to/{name}"));
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(scene.folder.join(name), &link).unwrap();
        scene.toolchain.libtorch = Libtorch::at(link.join("lib"), &Process).unwrap();
        scene.assert_compiled("a.cpp", 1, name);
    }
}

#[test]
fn cuda_does_not_depend_on_a_libtorch_that_it_does_not_include() {
    let mut scene = Scene::new("cu");
    scene.with_nvcc(":");
    scene.write("a.cu", "int a() { return 1; }\n");
    scene.write("b.cu", "#include <ATen/b.h>\nint b() { return B; }\n");
    scene.write("libtorch/include/ATen/b.h", "#define B 1\n");
    for source in ["a.cu", "b.cu"] {
        scene.assert_compiled(source, 1, source);
    }
    let other = fake_headers(&scene.folder.join("other"), LIBTORCH_VERSIONS[1].0);
    scene.write("other/include/ATen/b.h", "#define B 2\n");
    scene.toolchain.libtorch = Libtorch::at(other, &Process).unwrap();
    scene.assert_compiled("a.cu", 0, "it includes nothing of libtorch");
    scene.assert_compiled("b.cu", 1, "it includes a header");
}

#[test]
fn another_checkout_gets_the_same_object() {
    let mut scene = Scene::new("checkouts");
    let source = "#include <where.h>\nconst char* a() { return where(); }\n";
    for checkout in ["one", "another/of/them"] {
        scene.write(&format!("{checkout}/a.cpp"), source);
        let header = "inline const char* where() { return __FILE__; }\n";
        scene.write(&format!("{checkout}/include/where.h"), header);
        scene.write(&format!("{checkout}/libtorch/include/x.h"), "");
    }
    let mut objects = Vec::new();
    for checkout in ["one", "another/of/them"] {
        let folder = scene.folder.join(checkout);
        scene.options.includes = vec![folder.join("include"), folder.clone()];
        objects.push(scene.build(&format!("{checkout}/a.cpp")));
        let debug = ["-g".to_string()];
        scene.options.cxx_flags = debug.to_vec();
        scene.assert_compiled(&format!("{checkout}/a.cpp"), 1, "debuggers need its place");
        scene.options.cxx_flags.clear();
    }
    assert_eq!([objects[0].0, objects[1].0], [1, 0]);
    let text = String::from_utf8_lossy(&objects[0].1).into_owned();
    assert!(!text.contains("cache-checkouts"), "no place is in it");
    assert!(text.contains("where.h"));
}
