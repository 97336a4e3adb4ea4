//! One operator, one room: what belongs to an operator has its name everywhere.

#[macro_use]
#[path = "../src/ops/list.rs"]
mod list;

use std::collections::BTreeSet;
use support::root;

/// An entry of the list of operators, as far as files are concerned.
struct Operator {
    name: &'static str,
    family: &'static str,
    files: &'static [&'static str],
}

macro_rules! entries {
    ($($name:ident of $family:literal {
        operator: [$operator:ident, $tensors:ident],
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

/// Folders of `src/ops` that all operators share, and that of the kernel of `nn::KvCache`.
const SHARED_BY_PLANS: [&str; 3] = ["costs", "tune", "attention"];

/// Folders of csrc that belong neither to an operator nor to a family of operators.
const SHARED: [&str; 13] = [
    "include",
    "amp",
    "attention",
    "autograd",
    "library",
    "cuda",
    "distributed",
    "hopper",
    "nn",
    "optim",
    "tensor",
    "testing",
    "tvm_ffi",
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
        let kernels = has_kernels
            .then(|| ["cpu.cpp", "cuda.cu", "params.h"].map(|file| format!("csrc/{name}/{file}")));
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
            let is_there = has_line(file, &line) || has_line(file, &format!("pub(crate) {line}"));
            assert!(is_there, "{file} lacks `{line}`");
        }
    }
}

#[test]
fn every_operator_is_in_the_list() {
    let is_known = |folder: &str| {
        OPERATORS.iter().any(|operator| [operator.name, operator.family].contains(&folder))
    };
    for folder in folders("src/ops") {
        let is_shared = SHARED_BY_PLANS.contains(&folder.as_str());
        assert!(is_shared || is_known(&folder), "src/ops/list.rs lacks {folder}");
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
    // Also the `kernels` of an operator, of layers and of the optimizers, and the macros that declare kernels. Everything else is
    // safe Rust.
    let allowed =
        ["src/ffi/", "src/autograd/", "src/cuda/", "src/jit/", "src/open/", "src/kernels.rs"];
    let is_allowed = |path: &str| {
        let has_kernels =
            ["src/ops/", "src/nn/", "src/optim/"].iter().any(|of| path.starts_with(of));
        let calls_kernels =
            has_kernels && ["/kernels", "/tensors"].iter().any(|of| path.contains(of));
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

/// The modules of the library, the lowest layer first. Each imports only those before it.
const LAYERS: [&str; 23] = [
    "error",
    "overlap",
    "python",
    "ffi",
    "cuda",
    "check",
    "dispatch",
    "strided",
    "view",
    "kernels",
    "amp",
    "autograd",
    "library",
    "operator",
    "state_dict",
    "ops",
    "open",
    "optim",
    "nn",
    "train",
    "distributed",
    "jit",
    "testing",
];

/// The modules of a path that other files import it by: `ops`, `norm` and so on.
fn module(path: &str) -> Vec<String> {
    let path = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').map(str::to_string).collect()
}

/// The items of a list in braces, which may have lists in them; `list` begins after the brace.
fn items(list: &str) -> Vec<String> {
    let (mut depth, mut found) = (0, vec![String::new()]);
    for letter in list.chars() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => found.push(String::new()),
            _ => {}
        }
        if let Some(item) = found.last_mut() {
            item.push(letter);
        }
    }
    found.iter().map(|item| item.trim_start_matches(',').trim().to_string()).collect()
}

#[test]
fn lists_in_lists_are_items() {
    assert_eq!(items("a::{B, C}, d, e::{f::{G}, H}}; use x"), ["a::{B, C}", "d", "e::{f::{G}, H}"]);
}

/// The modules that a file names by `crate::…` and `super::…`, outside of its tests and comments.
fn imports(path: &str, text: &str) -> Vec<Vec<String>> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code: Vec<&str> =
        text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    for (prefix, is_crate) in [("crate::", true), ("super::", false)] {
        for (at, _) in code.match_indices(prefix) {
            // `super::super::a` is looked at from its first `super`; macros name `$crate`.
            let before = &code[..at];
            if before.ends_with("::") || before.ends_with(|c: char| c.is_alphanumeric() || c == '$')
            {
                continue;
            }
            let mut base = module(path);
            if is_crate {
                base.clear();
            }
            let mut rest = &code[at..];
            while let Some(after) = rest.strip_prefix("super::") {
                base.pop();
                rest = after;
            }
            rest = rest.strip_prefix("crate::").unwrap_or(rest);
            if let Some(list) = rest.strip_prefix('{') {
                for item in items(list) {
                    let item = item.trim().split("::").next().unwrap_or_default();
                    found.push(base.iter().cloned().chain([item.to_string()]).collect());
                }
                continue;
            }
            let words = rest.split("::").take(3).map(|word| {
                let end = word.find(|c: char| !c.is_alphanumeric() && c != '_');
                word[..end.unwrap_or(word.len())].to_string()
            });
            found.push(base.into_iter().chain(words).collect());
        }
    }
    found
}

/// Every file of the library but those that are tests, with its text.
fn sources() -> Vec<(String, String)> {
    let mut folders = vec!["src".to_string()];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for name in names(&folder) {
            let path = format!("{folder}/{name}");
            if root().join(&path).is_dir() {
                folders.push(path);
            } else if !["tests.rs", "ways.rs", "lib.rs"].contains(&name.as_str()) {
                let text = std::fs::read_to_string(root().join(&path)).expect("a source file");
                found.push((path, text));
            }
        }
    }
    found
}

#[test]
fn imports_run_downward() {
    let rank = |module: &str| LAYERS.iter().position(|layer| *layer == module);
    let families: Vec<&str> = OPERATORS.iter().map(|operator| operator.family).collect();
    let is_member = |name: &str| OPERATORS.iter().any(|operator| operator.name == name);
    let mut seen = [0; 2];
    let mut among_ops = BTreeSet::new();
    for (path, text) in sources() {
        let from = module(&path);
        let here = rank(&from[0]).unwrap_or_else(|| panic!("{path} is in no layer"));
        for import in imports(&path, &text) {
            let Some(there) = import.first().and_then(|module| rank(module)) else { continue };
            seen[0] += 1;
            assert!(there <= here, "{path} imports {}, which is above it", import.join("::"));
            let [ops, room, ..] = &from[..] else { continue };
            let target = import.get(1).filter(|_| ops == "ops" && import[0] == "ops");
            among_ops.extend(target.map(|target| (room.clone(), target.clone())));
            if let Some(target) = target.filter(|_| families.contains(&room.as_str())) {
                seen[1] += 1;
                let is_own = target == room;
                assert!(is_own || !is_member(target), "{path} imports {target}, which imports it");
            }
        }
    }
    assert!(seen[0] > 100 && seen[1] > 10, "the search finds next to nothing: {seen:?}");
    // What imports nothing that is left goes, again and again; what remains is in a circle.
    among_ops.retain(|(from, to)| from != to);
    loop {
        let importers: BTreeSet<String> = among_ops.iter().map(|(from, _)| from.clone()).collect();
        let count = among_ops.len();
        among_ops.retain(|(_, to)| importers.contains(to));
        if among_ops.len() == count {
            break;
        }
    }
    assert!(among_ops.is_empty(), "operators import one another in a circle: {among_ops:?}");
}

/// Plans can serve programs without tch.
#[test]
fn plans_name_no_tch_type() {
    fn sources(folder: &str) -> Vec<String> {
        let within = |name: String| match root().join(folder).join(&name).is_dir() {
            true => sources(&format!("{folder}/{name}")),
            false => vec![format!("{folder}/{name}")],
        };
        names(folder).into_iter().flat_map(within).collect()
    }
    let is_plan = |file: &String| {
        let is_cost = file.starts_with("src/ops/costs/") && !file.ends_with("/mod.rs");
        is_cost || file.ends_with("/plan.rs") || file.contains("/plan/")
    };
    let plans: Vec<String> = sources("src/ops").into_iter().filter(is_plan).collect();
    assert!(plans.len() > 20, "{plans:?}");
    for plan in plans {
        let text = std::fs::read_to_string(root().join(&plan)).expect("a source file");
        let code = |line: &&str| !line.trim_start().starts_with("//");
        let is_type = |line: &&str| {
            let mut words = line.split(|c: char| !c.is_alphanumeric());
            line.contains("tch::") || words.any(|word| word == "Tensor")
        };
        let named = text.lines().filter(code).find(is_type);
        assert_eq!(named, None, "{plan}: `ops::kinds` has kinds and devices for plans");
    }
}
