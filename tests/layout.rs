//! One operator, one room: what belongs to an operator has its name everywhere.

#[macro_use]
#[path = "../src/ops/list.rs"]
mod list;

use support::root;

/// An entry of the list of operators, as far as files are concerned.
struct Operator {
    name: &'static str,
    family: &'static str,
    files: &'static [&'static str],
}

macro_rules! entries {
    ($($name:ident of $family:literal {
        functions: [$($function:ident),*],
        way: [$($way:ident)?],
        files: [$($file:literal),* $(,)?],
    })*) => {
        &[$(Operator {
            name: stringify!($name),
            family: $family,
            files: &[$($file),*],
        }),*]
    };
}

const OPERATORS: &[Operator] = operators!(entries);

/// Folders of csrc that belong neither to an operator nor to a family of operators.
const SHARED: [&str; 11] = [
    "include",
    "amp",
    "autograd",
    "library",
    "cuda",
    "distributed",
    "hopper",
    "nn",
    "optim",
    "tensor",
    "testing",
];

fn names(folder: &str) -> Vec<String> {
    let entries =
        std::fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect()
}

/// The names of the folders inside a folder.
fn folders(folder: &str) -> Vec<String> {
    names(folder).into_iter().filter(|name| root().join(folder).join(name).is_dir()).collect()
}

fn has_line(file: &str, line: &str) -> bool {
    let text = std::fs::read_to_string(root().join(file)).expect("a source file");
    text.lines().any(|found| found == line)
}

#[test]
fn every_operator_has_all_its_twins() {
    assert!(!OPERATORS.is_empty());
    for Operator { name, files, .. } in OPERATORS {
        // An operator without a folder in csrc has its kernels in that of its family.
        let has_kernels = root().join("csrc").join(name).exists();
        assert!(has_kernels || !files.is_empty(), "{name} has no kernels");
        let kernels = has_kernels.then(|| {
            ["cpu.cpp", "cuda.cu", &format!("{name}.h")].map(|file| format!("csrc/{name}/{file}"))
        });
        let twins = [
            format!("src/ops/{name}/mod.rs"),
            format!("tests/{name}/main.rs"),
            format!("benches/{name}.rs"),
        ];
        let files = files.iter().map(|file| format!("csrc/{file}"));
        for twin in twins.into_iter().chain(kernels.into_iter().flatten()).chain(files) {
            assert!(root().join(&twin).exists(), "{name} has no {twin}");
        }
        // rustfmt formats only modules that are declared outside of macros.
        for file in ["src/ops/mod.rs", "benches/main.rs"] {
            let line = format!("mod {name};");
            assert!(has_line(file, &line), "{file} lacks `{line}`");
        }
    }
}

#[test]
fn every_operator_is_in_the_list() {
    let is_known = |folder: &str| {
        OPERATORS.iter().any(|operator| [operator.name, operator.family].contains(&folder))
    };
    for folder in folders("src/ops") {
        assert!(is_known(&folder), "src/ops/list.rs lacks {folder}");
    }
    for folder in folders("csrc") {
        let is_shared = SHARED.contains(&folder.as_str());
        assert!(is_shared || is_known(&folder), "src/ops/list.rs lacks {folder}");
    }
}

#[test]
fn every_test_program_is_in_the_manifest() {
    let mut programs: Vec<_> = names("tests")
        .into_iter()
        .map(|name| if name.ends_with(".rs") { name } else { format!("{name}/main.rs") })
        .filter(|path| path != "build.rs" && root().join("tests").join(path).exists())
        .collect();
    programs.retain(|path| !has_line("tests/Cargo.toml", &format!("path = {path:?}")));
    assert!(programs.is_empty(), "tests/Cargo.toml lacks {programs:?}");
}

/// Parts of families that are no ways.
const HELPERS: [&str; 7] = [
    "gemm/skinny_columns.cu",
    "norm/finish.cu",
    "recurrent/biases.cu",
    "recurrent/cells",
    "recurrent/columns.cu",
    "recurrent/device_hopper.cu",
    "recurrent/scale_rows.cu",
];

/// A way is a kernel's source or a folder, of an operator or its family, or a header of `csrc/norm`
/// that each of its operators (of rows that are sums, or of other rows) compiles in a source of the
/// same name. What is not in the list is an
/// entry's `cpu.cpp` or `cuda.cu`, or no way.
#[test]
fn every_way_is_in_the_list() {
    let is_listed = |path: &str| OPERATORS.iter().any(|operator| operator.files.contains(&path));
    let mut seen = 0;
    for Operator { name, family, files } in OPERATORS {
        let is_there = |folder: &&str| root().join("csrc").join(folder).exists();
        for folder in [*name, *family].iter().filter(|folder| is_there(folder)) {
            for file in names(&format!("csrc/{folder}")) {
                let path = format!("{folder}/{file}");
                let is_source = file.ends_with(".cu")
                    || file.starts_with("cpu_") && file.ends_with(".cpp")
                    || root().join("csrc").join(&path).is_dir();
                let is_entry = folder == name && file == "cuda.cu";
                if is_source && !is_entry && !HELPERS.contains(&path.as_str()) {
                    assert!(is_listed(&path), "src/ops/list.rs lacks the file {path:?}");
                    seen += 1;
                }
                let prefixes = match name.starts_with("add_") {
                    true => ["add_forward", "add_backward"],
                    false => ["forward_", "backward_"],
                };
                let is_header = prefixes.iter().any(|prefix| file.starts_with(prefix));
                if let Some(stem) = file.strip_suffix(".h").filter(|_| is_header) {
                    let source = format!("{name}/{stem}.cu");
                    assert!(files.contains(&&source[..]), "{name} does not compile csrc/{path}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 0, "the search finds nothing at all");
}

#[test]
fn unsafe_stays_where_it_belongs() {
    // Also the `kernels` of an operator and of the optimizers, and the macros that declare kernels. Everything else is
    // safe Rust.
    let allowed = ["src/ffi/", "src/autograd/", "src/cuda/", "src/jit/", "src/kernels.rs"];
    let is_allowed = |path: &str| {
        let has_kernels = path.starts_with("src/ops/") || path.starts_with("src/optim/");
        let calls_kernels = has_kernels && path.contains("/kernels");
        calls_kernels || allowed.iter().any(|place| path.starts_with(place))
    };
    let mut folders = vec!["src".to_string()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for name in names(&folder) {
            let path = format!("{folder}/{name}");
            if root().join(&path).is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(root().join(&path)).expect("a source file");
            let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            let has_unsafe = code.into_iter().any(|line| {
                line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
            });
            seen += usize::from(has_unsafe);
            assert!(!has_unsafe || is_allowed(&path), "unsafe in {path}");
        }
    }
    assert!(seen > 0, "the search finds nothing at all");
}
