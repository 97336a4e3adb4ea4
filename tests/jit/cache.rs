//! Tests of when the compilers run and when they do not.

use super::*;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

#[test]
fn the_second_load_takes_milliseconds_and_runs_no_compiler() {
    let folder = scratch();
    let load = || Extension::new("second").cpp(ANSWER).cache(folder.path()).load().unwrap();
    let first = load();
    let timed = || {
        let started = Instant::now();
        let again = load();
        assert_eq!((first.path(), first.name()), (again.path(), "second"));
        started.elapsed()
    };
    // The fastest of several runs, because the machine may be busy.
    let took = (0..5).map(|_| timed()).min().unwrap();
    assert!(took < Duration::from_millis(50), "{took:?}");
    assert_eq!(builds(folder.path()), 1);
}

#[test]
fn a_changed_header_is_seen() {
    let folder = scratch();
    let include = folder.path().join("include");
    std::fs::create_dir(&include).unwrap();
    let header = |value: i32| {
        std::fs::write(include.join("value.h"), format!("#define VALUE {value}\n")).unwrap()
    };
    let cache = folder.path().join("cache");
    let load = || {
        let text = "#include \"value.h\"\nextern \"C\" int value() { return VALUE; }";
        Extension::new("with_header").cpp(text).include(&include).cache(&cache).load().unwrap()
    };
    header(1);
    let first = load();
    assert_eq!(load().path(), first.path());
    assert_eq!(builds(&cache), 1);
    header(2);
    let second = load();
    assert_eq!((number(&first, "value").unwrap(), number(&second, "value").unwrap()), (1, 2));
    assert_eq!(second.name(), "with_header_v1", "the first one stays loaded");
    assert_eq!(load().path(), second.path());
    assert_eq!(builds(&cache), 2);
}

#[test]
fn changed_sources_get_a_new_name() {
    let load = |value: i32| {
        let text = format!(
            "#define TEXT(name) #name\n#define NAME(name) TEXT(name)\n\
             extern \"C\" int value() {{ return {value}; }}\n\
             extern \"C\" const char* name() {{ return NAME(TORCH_EXTENSION_NAME); }}"
        );
        extension("changing").cpp(text).load().unwrap()
    };
    let modules = [load(1), load(2), load(1), load(3)];
    let names: Vec<_> = modules.iter().map(Module::name).collect();
    assert_eq!(names, ["changing", "changing_v1", "changing", "changing_v2"]);
    let values: Vec<_> = modules.iter().map(|module| number(module, "value").unwrap()).collect();
    assert_eq!(values, [1, 2, 1, 3]);
    for module in &modules {
        // SAFETY: the type is that of the function in the source text, and the string is a literal,
        // so it lives as long as the library.
        let name = unsafe {
            let name = module.symbol::<extern "C" fn() -> *const std::ffi::c_char>("name").unwrap();
            std::ffi::CStr::from_ptr(name())
        };
        assert_eq!(name.to_str().unwrap(), module.name());
    }
}

#[test]
fn flags_and_macros_count() {
    let folder = scratch();
    let base = || {
        Extension::new("flags")
            .cpp("extern \"C\" int value() { return VALUE; }")
            .cache(folder.path())
    };
    let one = base().define("VALUE", "1").load().unwrap();
    let two = base().flag("-DVALUE=2").load().unwrap();
    assert_eq!((number(&one, "value").unwrap(), number(&two, "value").unwrap()), (1, 2));
    let verbose = base().define("VALUE", "1").verbose(true).load().unwrap();
    assert_eq!(verbose.path(), one.path(), "what is printed changes nothing");
    assert_eq!(builds(folder.path()), 2);
}

#[test]
fn two_threads_build_once() {
    let folder = scratch();
    let load = || Extension::new("threads").cpp(ANSWER).cache(folder.path()).load().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(load)).collect();
        for thread in threads {
            assert_eq!(number(&thread.join().unwrap(), "answer").unwrap(), 42);
        }
    });
    assert_eq!(builds(folder.path()), 1);
}

#[test]
fn the_library_finds_libtorch_by_itself() {
    let text = "#include <ATen/ops/zeros.h>\nextern \"C\" int answer() { return at::zeros({42}).numel(); }";
    let module = extension("needs").cpp(text).load().unwrap();
    assert_eq!(number(&module, "answer").unwrap(), 42);
    let bytes = std::fs::read(module.path()).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("libtorch_cpu.so"), "a library that is needed has its name in it");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libtorch = maps.lines().find_map(|line| line.strip_suffix("/libtorch_cpu.so")).unwrap();
    let folder = &libtorch[libtorch.find('/').unwrap()..];
    assert!(text.contains(folder), "{folder} should be its rpath");
}

#[test]
fn contents_count_and_times_do_not() {
    let folder = scratch();
    // The folder's name has characters that are escaped in make's syntax, in which compilers list
    // headers.
    let sources = folder.path().join("a #$ b");
    std::fs::create_dir(&sources).unwrap();
    let source = sources.join("timed.cpp");
    std::fs::write(&source, "#include \"timed.h\"\nextern \"C\" int value() { return VALUE; }")
        .unwrap();
    let header = |value: i32, seconds: u64| {
        let path = sources.join("timed.h");
        std::fs::write(&path, format!("#define VALUE {value}\n")).unwrap();
        let time = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
        std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    };
    let cache = folder.path().join("cache");
    let load = || {
        let module = Extension::new("timed").source(&source).cache(&cache).load().unwrap();
        (number(&module, "value").unwrap(), builds(&cache))
    };
    let (past, future) = (1_000_000_000, 10_000_000_000);
    header(1, future);
    assert_eq!([load(), load()], [(1, 1); 2], "a file from the future is not always new");
    header(1, past);
    assert_eq!(load(), (1, 1), "the same contents are the same source");
    header(2, past);
    assert_eq!(load(), (2, 2), "size and time say nothing of contents");
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// The only folder or file of a folder whose name begins like this.
fn entry(folder: &Path, prefix: &str) -> PathBuf {
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(prefix);
    let entries = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    let found: Vec<PathBuf> = entries.filter(name).collect();
    assert_eq!(found.len(), 1, "{prefix}");
    found[0].clone()
}

/// The group of a folder may be one of which others are members.
#[test]
fn a_folder_that_others_may_write_is_not_trusted() {
    let folder = scratch();
    let load = || Extension::new("distrust").cpp("not C++").cache(folder.path()).load();
    assert_says(&message(load()), &["does not compile"]);
    let entries = ["distrust-", "include-"].map(|prefix| entry(folder.path(), prefix));
    for path in entries.iter().chain([&folder.path().to_path_buf()]) {
        for (mode, who) in [(0o770, "g"), (0o702, "o"), (0o777, "go")] {
            set_mode(path, mode);
            let name = path.file_name().unwrap().to_string_lossy();
            let way_out = [format!("run `chmod {who}-w /"), format!("/{name}`")];
            assert_says(
                &message(load()),
                &["distrust", "others may write", &way_out[0], &way_out[1], "TCH_EXTENSION_CACHE"],
            );
        }
        set_mode(path, 0o755);
        assert_says(&message(load()), &["does not compile"]);
    }
}

/// Opening the lock would otherwise make a file, or change one, wherever the link leads.
#[test]
fn a_lock_that_is_a_link_is_never_followed() {
    let folder = scratch();
    let load = || Extension::new("lock_link").cpp("not C++").cache(folder.path()).load();
    assert_says(&message(load()), &["does not compile"]);
    let (entry, aim) = (entry(folder.path(), "lock_link-"), folder.path().join("aim"));
    std::fs::remove_file(entry.join("lock")).unwrap();
    std::os::unix::fs::symlink(&aim, entry.join("lock")).unwrap();
    for mode in [0o770, 0o700] {
        set_mode(&entry, mode);
        assert_says(&message(load()), &["lock_link-"]);
        assert!(!aim.exists(), "{mode:o}");
    }
    assert_says(&message(load()), &["lock may contain code of another user's: it is a link"]);
}

#[test]
fn an_entry_that_is_a_link_is_not_trusted() {
    let (folder, elsewhere) = (scratch(), scratch());
    let load = || Extension::new("entry_link").cpp("not C++").cache(folder.path()).load();
    assert_says(&message(load()), &["does not compile"]);
    for prefix in ["entry_link-", "include-"] {
        let (path, moved) = (entry(folder.path(), prefix), elsewhere.path().join(prefix));
        std::fs::rename(&path, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        assert_says(&message(load()), &[prefix, "it is a link"]);
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&moved, &path).unwrap();
    }
    assert_says(&message(load()), &["does not compile"]);
}

#[test]
fn the_cache_may_be_a_link() {
    let folder = scratch();
    let (real, link) = (folder.path().join("real"), folder.path().join("link"));
    std::fs::create_dir(&real).unwrap();
    set_mode(&real, 0o700);
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let module = Extension::new("by_a_link").cpp(ANSWER).cache(&link).load().unwrap();
    assert!(module.path().starts_with(real.canonicalize().unwrap()), "{:?}", module.path());
    set_mode(&real, 0o770);
    let other = Extension::new("by_a_link_of_others").cpp(ANSWER).cache(&link);
    assert_says(&message(other.load()), &["others may write"]);
}

/// Only root can give files away.
#[test]
fn what_another_user_owns_is_not_trusted() {
    use std::os::unix::fs::{chown, lchown};
    const OTHER: u32 = 54321;
    let folder = scratch();
    let cache = folder.path().join("cache");
    let load = |name: &str| Extension::new(name).cpp("not C++").cache(&cache).load();
    assert_says(&message(load("owned")), &["does not compile"]);
    let entry = entry(&cache, "owned-");
    if chown(&entry, Some(OTHER), None).is_err() {
        eprintln!("skipped: only root can make a folder of another user's");
        return;
    }
    assert_says(&message(load("owned")), &["owned-", "it belongs to user 54321"]);
    // A folder that another user made, with an entry of this user's.
    chown(&cache, Some(OTHER), None).unwrap();
    let before = std::fs::read_dir(&cache).unwrap().count();
    let text = message(load("owned_by_its_root"));
    let real = cache.canonicalize().unwrap();
    let says = format!("{} may contain code of another user's", real.display());
    assert_says(&text, &["owned_by_its_root", &says, "it belongs to user 54321"]);
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), before, "nothing was written");
    // A link of another user's could lead elsewhere when the library is loaded.
    chown(&cache, Some(0), None).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&cache, &link).unwrap();
    let load = || Extension::new("owned_link").cpp("not C++").cache(&link).load();
    assert_says(&message(load()), &["does not compile"]);
    lchown(&link, Some(OTHER), None).unwrap();
    assert_says(&message(load()), &["owned_link", "link may contain", "it belongs to user 54321"]);
}

/// The level of the headers is a macro that only a first attempt has, level 2 is that of the
/// precompiled ones, and an attempt that they do not fit fails.
#[test]
fn precompiled_headers_are_made_once_and_used() {
    let text = "#include <torch/extension.h>
                #if TCH_EXTENSION_FEWER_HEADERS != 2
                #error other headers were read
                #endif
                extern \"C\" int answer() { return int(torch::full({1}, NUMBER).item<double>()); }";
    let load = |name: &str, number: &str| {
        extension(name).cpp(text).define("NUMBER", number).load().unwrap()
    };
    // How often headers were compiled in this cache.
    let made = || {
        let entries = std::fs::read_dir(shared_cache()).unwrap().flatten();
        let entries =
            entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("precompiled-"));
        let logs =
            entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("log")).ok());
        logs.map(|log| log.lines().count()).sum::<usize>()
    };
    let first = load("precompiled_1", "41");
    let before = made();
    let second = load("precompiled_2", "42");
    assert_eq!((number(&first, "answer").unwrap(), number(&second, "answer").unwrap()), (41, 42));
    assert!(before >= 1 && made() == before, "{before}, then {}", made());
}

/// Most of what `torch/extension.h` includes is left out, which halves the time.
fn few_headers(folder: &Path) {
    let torch = folder.join("torch");
    std::fs::create_dir_all(&torch).unwrap();
    for name in ["autograd", "cuda", "enum", "fft", "nested", "sparse", "special", "utils"] {
        std::fs::write(torch.join(name).with_extension("h"), "").unwrap();
    }
    std::fs::write(torch.join("types.h"), "#include <ATen/core/TensorBody.h>\n").unwrap();
}

#[test]
fn a_source_for_which_precompiled_headers_are_not_enough_reads_all() {
    let folder = scratch();
    few_headers(&folder.path().join("headers"));
    std::fs::write(folder.path().join("headers/torch/all.h"), "#define REST 7\n").unwrap();
    let module = Extension::new("rest")
        .cpp("#include <torch/extension.h>\nextern \"C\" int answer() { return REST; }")
        .include(folder.path().join("headers"))
        .flag("-O0")
        .cache(folder.path().join("cache"))
        .use_pch(true)
        .load()
        .unwrap();
    assert_eq!(number(&module, "answer").unwrap(), 7);
}

#[test]
fn a_change_inside_precompiled_headers_is_seen() {
    let folder = scratch();
    let config = folder.path().join("config.h");
    let write = |text: &str| std::fs::write(&config, text).unwrap();
    few_headers(&folder.path().join("headers"));
    let load = || {
        Extension::new("inside")
            .cpp("#include <torch/extension.h>\nextern \"C\" int answer() { return VALUE; }")
            .include(folder.path().join("headers"))
            .flag("-O0")
            .flag("-include")
            .flag(config.to_str().unwrap())
            .cache(folder.path().join("cache"))
            .use_pch(true)
            .load()
            .unwrap()
    };
    write("#pragma once\n#define VALUE 1\n");
    assert_eq!(number(&load(), "answer").unwrap(), 1);
    // Nor do the headers compile by themselves any more, because they are no extension.
    write("#ifndef TORCH_EXTENSION_NAME\n#include <absent.h>\n#endif\n#define VALUE 2\n");
    assert_eq!(number(&load(), "answer").unwrap(), 2);
}
