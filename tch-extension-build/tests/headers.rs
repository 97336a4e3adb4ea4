//! Compiles each public header alone: it must include everything that it needs, and no torch header
//! if it says so.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use tch_extension_build::LIBTORCH_VERSIONS;
use tch_extension_build::environment::Process;
use tch_extension_build::probe;

/// The public headers and what their comments say they need. The folders next to them hold
/// replacements for Python's headers, which nobody includes under these paths.
fn headers() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../csrc/include/tch_extension");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = entries.filter(|path| path.is_file()).collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            let needs = text.lines().find_map(|line| line.strip_prefix("// Needs: "));
            let needs =
                needs.unwrap_or_else(|| panic!("{} does not say what it needs", path.display()));
            (path.clone(), needs.to_string())
        })
        .collect()
}

/// The files that a header includes, with itself; or the compiler's message if the header does not
/// compile alone.
fn included(compiler: &Path, header: &Path, flags: &[String]) -> Result<String, String> {
    let folder = std::env::temp_dir().join(format!("tch-extension-header-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let is_cuda = compiler.ends_with("nvcc");
    let name = header.file_name().unwrap().to_string_lossy();
    let source = folder.join(format!("{name}.{}", if is_cuda { "cu" } else { "cpp" }));
    std::fs::write(&source, format!("#include \"tch_extension/{name}\"\n")).unwrap();
    let root = header.parent().unwrap().parent().unwrap();
    let run = |mode: &[&str]| {
        let output = Command::new(compiler)
            .args(["-std=c++17", "-I"])
            .arg(root)
            .args(flags)
            .args(mode)
            .arg(&source)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    };
    // Compile the header, because preprocessing alone would miss errors.
    let object = folder.join(format!("{name}.{}.o", if is_cuda { "nvcc" } else { "cxx" }));
    run(&["-c", "-o", &object.display().to_string()])?;
    run(&["-M"])
}

fn assert_no_torch(header: &Path, files: &str) {
    for part in ["/torch/", "/ATen/", "/c10/"] {
        assert!(!files.contains(part), "{} brings in a file in {part}: {files}", header.display());
    }
}

#[test]
fn each_compiles_alone_and_without_torch_if_it_says_so() {
    let mut seen = [0; 3];
    for (header, needs) in headers() {
        let cxx = Path::new("g++");
        if needs == "nothing." {
            let files = included(cxx, &header, &["-Wall".into(), "-Werror".into()]).unwrap();
            assert_no_torch(&header, &files);
            seen[0] += 1;
        } else if needs == "the CUDA toolkit; no torch header." {
            seen[1] += 1;
        } else {
            assert_eq!(needs, "torch's headers.", "{}", header.display());
            seen[2] += 1;
            let Some(libtorch) = std::env::var_os("LIBTORCH").map(PathBuf::from) else {
                eprintln!("skipped: {} needs a LIBTORCH", header.display());
                continue;
            };
            let mut flags = vec![
                "-DCPU_CAPABILITY=DEFAULT".to_string(),
                "-DCPU_CAPABILITY_DEFAULT".to_string(),
            ];
            for folder in ["include", "include/torch/csrc/api/include"] {
                flags.extend(["-isystem".to_string(), libtorch.join(folder).display().to_string()]);
            }
            included(cxx, &header, &flags).unwrap();
        }
    }
    assert!(seen.iter().all(|&count| count >= 3), "headers of each sort: {seen:?}");
}

#[test]
fn kernels_headers_compile_with_nvcc_and_without_torch() {
    let var = |name: &str| tch_extension_build::environment::Environment::var(&Process, name);
    let lib =
        var("LIBTORCH").map_or_else(PathBuf::new, |libtorch| Path::new(&libtorch).join("lib"));
    let Some(nvcc) = probe::find_nvcc(&lib, &var) else {
        eprintln!("skipped: there is no nvcc");
        return;
    };
    for (header, needs) in headers() {
        if needs != "torch's headers." {
            let flags = ["-arch=sm_90", "--expt-relaxed-constexpr"].map(String::from);
            assert_no_torch(&header, &included(&nvcc.path, &header, &flags).unwrap());
        }
    }
}

/// The linker keeps one copy of each weak function. If it keeps one from an AVX-512 object, the
/// program crashes on an older processor.
#[test]
fn a_unit_for_an_instruction_set_lends_no_function_of_theirs() {
    let folder = std::env::temp_dir().join(format!("tch-extension-unit-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, object) = (folder.join("unit.cpp"), folder.join("unit.o"));
    let text = "
        #include \"tch_extension/accessor.h\"
        #include \"tch_extension/scalar_math.h\"
        using namespace tch_extension;
        extern \"C\" void f(const Strided<2>* from, const StridedMut<2>* to, int64_t i) {
          const auto x = from->of<float>();
          const auto y = to->of<float>();
          y[i][0] = gelu_tanh_grad(x(i, 0)) + softplus_grad(x[i][1]) + silu_grad(gelu_grad(elu_grad(x(i, 2))));
        }";
    std::fs::write(&source, text).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../csrc/include");
    for macros in ["-DTCH_EXTENSION_DEBUG", "-UTCH_EXTENSION_DEBUG"] {
        let mut compiler = Command::new("g++");
        compiler
            .args(["-std=c++17", "-O1", "-mavx512f", "-DCPU_CAPABILITY=AVX512", macros, "-I"])
            .arg(&root);
        assert!(compiler.arg("-c").arg(&source).arg("-o").arg(&object).status().unwrap().success());
        let listing = Command::new("nm").arg("-C").arg(&object).output().unwrap();
        let listing = String::from_utf8_lossy(&listing.stdout).into_owned();
        assert!(listing.contains(" T f"), "{listing}");
        let lent: Vec<_> = listing
            .lines()
            .filter(|line| [" W ", " V ", " u "].iter().any(|weak| line.contains(weak)))
            .filter(|line| !line.contains("DW.ref."))
            .collect();
        assert!(lent.is_empty(), "{macros}: {lent:#?}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// As `TCH_EXTENSION_ISAS=native` compiles it: one copy with the kernel, and one that calls it.
#[test]
fn a_program_for_one_instruction_set_says_that_the_cpu_lacks_it() {
    let Some(libtorch) = std::env::var_os("LIBTORCH").map(PathBuf::from) else {
        eprintln!("skipped: there is no LIBTORCH");
        return;
    };
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        eprintln!("skipped: this CPU has no AVX2");
        return;
    }
    let scratch = support::scratch("only");
    let source = scratch.join("cpu.cpp");
    let text = "
        #include \"tch_extension/cpu.h\"
        struct Twice { float* values; int64_t count; };
        namespace tch_extension { inline namespace CPU_CAPABILITY {
        static int64_t items(const Twice& twice) { return twice.count; }
        static int64_t grain(const Twice&) { return 1; }
        static float doubled(float value) { return 2 * value; }
        static void run(const Twice& twice, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) twice.values[i] = doubled(twice.values[i]);
        }
        } }
        TCH_EXTENSION_CPU_KERNEL(twice, run, Twice, items, grain)
        #if defined(CPU_CAPABILITY_DEFAULT)
        #include <cstdio>
        int main() {
          float values[] = {1, 2, 3};
          Twice twice{values, 3};
          twice_cpu(&twice);
          std::printf(\"%g %g %g\\n\", values[0], values[1], values[2]);
        }
        #endif\n";
    std::fs::write(&source, text).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../csrc/include");
    let compile = |object: &str, flags: &[&str]| {
        let object = scratch.join(object);
        let output = Command::new("g++")
            .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp", "-I"])
            .arg(&root)
            .arg("-isystem")
            .arg(libtorch.join("include"))
            .args(flags)
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(&object)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        object
    };
    let avx2 = ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"];
    let kernel = compile("kernel.o", &avx2);
    let only =
        ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT", "-DTCH_EXTENSION_ONLY_ISA=AVX2"];
    let run = |object: PathBuf| {
        let (program, lib) = (object.with_extension(""), libtorch.join("lib"));
        let mut linker = Command::new("g++");
        linker.arg(&object).arg(&kernel).arg("-fopenmp").arg("-L").arg(&lib);
        linker.arg(format!("-Wl,-rpath,{}", lib.display())).args(["-ltorch_cpu", "-lc10"]);
        assert!(linker.arg("-o").arg(&program).status().unwrap().success());
        Command::new(&program).output().unwrap()
    };
    let done = run(compile("here.o", &only));
    assert_eq!(String::from_utf8_lossy(&done.stdout), "2 4 6\n");
    // A compiler's macro stands in for a CPU that has nothing.
    let older = [&only[..], &["-D__builtin_cpu_supports(name)=0"]].concat();
    let done = run(compile("older.o", &older));
    assert_eq!((done.status.code(), done.stdout.len()), (Some(1), 0));
    let expected = "error: this program's kernels were compiled for AVX2 only (TCH_EXTENSION_ISAS=native), \
                    which this CPU lacks; build it here after `cargo clean`, or without that variable\n";
    assert_eq!(String::from_utf8_lossy(&done.stderr), expected);
    std::fs::remove_dir_all(scratch).unwrap();
}
