//! One operator, one room: what belongs to an operator has its name everywhere.

use std::path::PathBuf;

/// Folders of csrc that hold no operator.
const SHARED: [&str; 11] = [
    "include",
    "amp",
    "autograd",
    "library",
    "cuda",
    "gemm",
    "norm",
    "hopper",
    "recurrent",
    "tensor",
    "testing",
];

fn root() -> PathBuf {
    // Set by cargo, and by the bundle's script where there is no cargo.
    std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

fn names(folder: &str) -> Vec<String> {
    let entries =
        std::fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn every_operator_has_all_its_twins() {
    let is_operator =
        |name: &String| !SHARED.contains(&name.as_str()) && root().join("csrc").join(name).is_dir();
    let from_csrc = names("csrc").into_iter().filter(is_operator);
    let has_plan_or_function = |name: &String| {
        !SHARED.contains(&name.as_str()) && root().join("src/ops").join(name).is_dir()
    };
    let from_ops = names("src/ops").into_iter().filter(has_plan_or_function);
    let mut operators: Vec<String> = from_csrc.chain(from_ops).collect();
    operators.sort();
    operators.dedup();
    assert!(!operators.is_empty());
    for operator in operators {
        let twins = [
            format!("csrc/{operator}/cpu.cpp"),
            format!("csrc/{operator}/cuda.cu"),
            format!("csrc/{operator}/{operator}.h"),
            format!("src/ops/{operator}/mod.rs"),
            format!("tests/{operator}/main.rs"),
            format!("benches/{operator}.rs"),
        ];
        for twin in twins {
            assert!(root().join(&twin).exists(), "{operator} has no {twin}");
        }
    }
}

#[test]
fn unsafe_stays_where_it_belongs() {
    // Also the `kernels` of an operator, and the macros that declare kernels. Everything else is
    // safe Rust.
    let allowed = ["src/ffi/", "src/autograd/", "src/cuda/", "src/jit/", "src/kernels.rs"];
    let is_allowed = |path: &str| {
        let calls_kernels = path.starts_with("src/ops/") && path.contains("/kernels");
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
