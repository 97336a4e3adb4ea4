//! C++ declarations of the functions in Rust's `extern "C"` blocks.

use super::{External, camel_case, mentions};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// What functions may name without declaring it. A forward declaration is enough for them, so that
/// no kernel includes torch's headers.
const EXTERNALS: [External; 3] = [
    External { rust: "C_tensor", cpp: "at::Tensor", brought: "namespace at { class Tensor; }" },
    External {
        rust: "LaunchStatus",
        cpp: "tch_extension::LaunchStatus",
        brought: "namespace tch_extension { struct LaunchStatus; }",
    },
    External {
        rust: "cudaStream_t",
        cpp: "cudaStream_t",
        brought: "using cudaStream_t = struct CUstream_st*;",
    },
];

/// The declarations, after the names of the types that they need; those of these files only if
/// `announces` is set. `types` are the names of these files' types in Rust and in C++. `None` if there
/// are no functions.
pub(super) fn declarations(
    sources: &[PathBuf],
    types: &[(String, String)],
    announces: bool,
) -> Result<Option<String>> {
    let units = read(sources)?;
    if units.iter().all(|unit| unit.names.is_empty()) {
        return Ok(None);
    }
    let mut config = super::config();
    config.export.item_types = vec![cbindgen::ItemType::Functions, cbindgen::ItemType::Typedefs];
    config.export.exclude = units.iter().flat_map(|unit| unit.others.clone()).collect();
    let imported = units.iter().flat_map(|unit| &unit.imported);
    let known = EXTERNALS.iter().map(|known| (known.rust.to_string(), known.cpp.to_string()));
    for (rust, cpp) in imported.clone().cloned().chain(known).chain(types.iter().cloned()) {
        config.export.rename.insert(rust, cpp);
    }
    let scratch = Scratch::new()?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for (index, unit) in units.iter().enumerate() {
        builder = builder.with_src(scratch.file(&format!("part_{index}.rs"), &unit.text)?);
    }
    let text = super::written(builder, sources)?;
    let declarations = tidied(&super::pointers_to_the_left(&text));
    if let Some(name) = names_of(&units).find(|name| !mentions(&declarations, name)) {
        bail!("cbindgen cannot declare {name} of {}", super::display(sources));
    }
    let known = EXTERNALS.iter().map(|known| (known.cpp, known.brought.to_string()));
    let own = types.iter().filter(|_| announces).chain(imported).map(|(_, cpp)| {
        let (space, name) = cpp.rsplit_once("::").unwrap_or(("", cpp));
        let line = format!("struct {name};");
        let in_space = format!("namespace {space} {{ {line} }}");
        (cpp.as_str(), if space.is_empty() { line } else { in_space })
    });
    let is_declared = |cpp: &str| !announces && types.iter().any(|own| own.1 == cpp);
    let mut announced: Vec<String> = known
        .chain(own)
        .filter(|(cpp, _)| mentions(&declarations, cpp) && !is_declared(cpp))
        .map(|(_, line)| format!("{line}\n"))
        .collect();
    announced.sort();
    announced.dedup();
    let announced = announced.concat();
    let declarations = exported(&declarations, names_of(&units));
    Ok(Some(format!("// clang-format off\n{announced}{declarations}// clang-format on\n")))
}

/// The kernels that a user's `kernels!` names, so that the compiler compares them with their definitions.
/// `types` are as in [`declarations`]; a struct that is not among them is refused. `None` if there are
/// none.
pub(super) fn of_kernels(
    sources: &[PathBuf],
    types: &[(String, String)],
) -> Result<Option<String>> {
    let mut lines = String::new();
    for source in sources {
        let file = super::parsed(&super::text_of(source)?, source)?;
        for item in &file.items {
            let syn::Item::Macro(call) = item else { continue };
            if call.mac.path.segments.last().is_none_or(|last| last.ident != "kernels") {
                continue;
            }
            // If the macro cannot read it either, rustc's error points to the line.
            let Ok(Pairs(pairs)) = call.mac.parse_body() else { continue };
            for Pair { params, cpu, cuda } in pairs {
                let name = params.to_string();
                let Some((_, cpp)) = types.iter().find(|(rust, _)| *rust == name) else {
                    bail!(
                        "{}: `kernels!` names {name}, which is no struct with #[repr(C)] in this file",
                        source.display()
                    );
                };
                lines += &format!("void {cpu}(const {cpp}* params) noexcept;\n");
                lines += &format!(
                    "tch_extension::LaunchStatus {cuda}(const {cpp}* params, cudaStream_t stream);\n"
                );
            }
        }
    }
    if lines.is_empty() {
        return Ok(None);
    }
    Ok(Some(format!(
        "// clang-format off\nnamespace tch_extension {{ struct LaunchStatus; }}\n\
         using cudaStream_t = struct CUstream_st*;\n#pragma GCC visibility push(default)\n\
         extern \"C\" {{\n{lines}}}  // extern \"C\"\n#pragma GCC visibility pop\n// clang-format on\n"
    )))
}

/// How the name of a function in a CUDA object ends.
const IN_CUDA: &str = "_cuda";

/// The declarations. If one of the functions is in a CUDA object, all names are visible, although sources
/// are compiled with hidden ones: the kernel library must export it. The others are in an archive, from
/// which a program or library of Rust exports nothing.
fn exported<'u>(declarations: &str, mut names: impl Iterator<Item = &'u String>) -> String {
    if !names.any(|name| name.ends_with(IN_CUDA)) {
        return declarations.to_string();
    }
    format!("#pragma GCC visibility push(default)\n{declarations}#pragma GCC visibility pop\n")
}

/// The names of the functions, in their order.
pub(super) fn names(sources: &[PathBuf]) -> Result<Vec<String>> {
    Ok(read(sources)?.into_iter().flat_map(|unit| unit.names).collect())
}

fn names_of(units: &[Unit]) -> impl Iterator<Item = &String> {
    units.iter().flat_map(|unit| &unit.names)
}

fn read(sources: &[PathBuf]) -> Result<Vec<Unit>> {
    sources.iter().map(|source| Unit::read(source)).collect()
}

/// One Rust file, as cbindgen can read it.
#[derive(Default)]
struct Unit {
    text: String,
    /// The functions that it declares.
    names: Vec<String>,
    /// Functions of other libraries, which have headers of their own.
    others: Vec<String>,
    /// The types that it imports from another folder of `crate::ops`, and their names in C++.
    imported: Vec<(String, String)>,
}

impl Unit {
    fn read(source: &Path) -> Result<Unit> {
        // syn 2, which cbindgen uses, knows no safe functions in such a block.
        let text = super::text_of(source)?.replace(" safe fn ", " fn ");
        // cbindgen reads a copy, which has no other file next to it.
        let is_path = |line: &str| line.trim_start().starts_with("#[path = ");
        let text: String = text.split_inclusive('\n').filter(|line| !is_path(line)).collect();
        let mut text = declared_for_tests_too(&text);
        let file = super::parsed(&text, source)?;
        let mut unit = Unit::default();
        let mut blocks = 0;
        let mut expanded = String::new();
        unit.add(&file.items, &mut blocks, &mut expanded)
            .with_context(|| source.display().to_string())?;
        // cbindgen sees no block in a function.
        if text.matches("unsafe extern \"C\" {").count() != blocks {
            bail!(
                "{}: an extern block is inside of a function or of tests; move it out, where its functions can be \
                 declared for C++",
                source.display()
            );
        }
        text += &expanded;
        Ok(Unit { text, ..unit })
    }

    fn add(
        &mut self,
        items: &[syn::Item],
        blocks: &mut usize,
        expanded: &mut String,
    ) -> Result<()> {
        for item in items {
            match item {
                syn::Item::Mod(module) if !super::is_for_tests(module) => {
                    let inside = module.content.as_ref();
                    self.add(inside.map_or(&[], |(_, items)| items), blocks, expanded)?;
                }
                syn::Item::ForeignMod(block) => {
                    *blocks += 1;
                    for item in &block.items {
                        let syn::ForeignItem::Fn(function) = item else { continue };
                        let name = function.sig.ident.to_string();
                        let is_ours = name.starts_with("tch_extension_");
                        if is_ours { &mut self.names } else { &mut self.others }.push(name);
                    }
                }
                syn::Item::Type(item) => {
                    // Such an alias stands for a type of C++'s, about which Rust knows nothing.
                    if let Some(cpp) = super::alias(&item.attrs) {
                        self.imported.push((item.ident.to_string(), cpp));
                        self.others.push(item.ident.to_string());
                    }
                }
                syn::Item::Use(import) => self.import(&import.tree, &mut Vec::new()),
                syn::Item::Macro(call) => {
                    if call.mac.path.segments.last().is_some_and(|last| last.ident == "raw_kernels")
                    {
                        let pairs: Pairs = call.mac.parse_body()?;
                        for Pair { params, cpu, cuda } in pairs.0 {
                            *expanded += &format!(
                                "unsafe extern \"C\" {{ fn {cpu}(params: *const {params}); \
                                 fn {cuda}(params: *const {params}, stream: cudaStream_t) -> LaunchStatus; }}\n"
                            );
                            self.names.extend([cpu.to_string(), cuda.to_string()]);
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds what a `use` brings of `crate::ops::<folder>`, whose C++ names begin with the folder's.
    fn import(&mut self, tree: &syn::UseTree, path: &mut Vec<String>) {
        match tree {
            syn::UseTree::Path(step) => {
                path.push(step.ident.to_string());
                self.import(&step.tree, path);
                path.pop();
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, path));
            }
            syn::UseTree::Name(name) => {
                if let [_crate, ops, folder, ..] = path.as_slice() {
                    if ops == "ops" {
                        let name = name.ident.to_string();
                        let cpp = format!("{}{name}", camel_case(folder));
                        self.imported.push((name, cpp));
                    }
                }
            }
            syn::UseTree::Rename(_) | syn::UseTree::Glob(_) => {}
        }
    }
}

/// The text with blocks that are only for tests in every build, because cbindgen leaves out what is
/// for tests, while C++ defines these functions always.
fn declared_for_tests_too(text: &str) -> String {
    const FOR_TESTS: &str = "#[cfg(test)]";
    let mut parts = text.split(FOR_TESTS);
    let mut kept = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let is_block = part.trim_start().starts_with("unsafe extern \"C\" {");
        kept += if is_block { "" } else { FOR_TESTS };
        kept += part;
    }
    kept
}

/// `fn name(Params) = symbol_cpu, symbol_cuda;` of `raw_kernels!`, or `pub unsafe fn name(Params { x, y }) = …`
/// of `kernels!`.
struct Pair {
    params: syn::Ident,
    cpu: syn::Ident,
    cuda: syn::Ident,
}

impl syn::parse::Parse for Pair {
    fn parse(input: syn::parse::ParseStream<'_>) -> syn::Result<Self> {
        input.call(syn::Attribute::parse_outer)?;
        input.parse::<syn::Visibility>()?;
        input.parse::<Option<syn::Token![unsafe]>>()?;
        input.parse::<syn::Token![fn]>()?;
        input.parse::<syn::Ident>()?;
        let inside;
        syn::parenthesized!(inside in input);
        let params = match syn::Pat::parse_single(&inside)? {
            syn::Pat::Struct(pattern) => pattern.path.require_ident()?.clone(),
            syn::Pat::Ident(pattern) => pattern.ident,
            _ => return Err(inside.error("the name of a struct")),
        };
        input.parse::<syn::Token![=]>()?;
        let cpu = input.parse()?;
        input.parse::<syn::Token![,]>()?;
        let cuda = input.parse()?;
        input.parse::<syn::Token![;]>()?;
        Ok(Pair { params, cpu, cuda })
    }
}

/// All of one of these macros, after the operator's name.
struct Pairs(Vec<Pair>);

impl syn::parse::Parse for Pairs {
    fn parse(input: syn::parse::ParseStream<'_>) -> syn::Result<Self> {
        input.parse::<syn::Expr>()?;
        if input.parse::<Option<syn::Token![:]>>()?.is_none() {
            input.parse::<syn::Token![;]>()?;
        }
        let mut pairs = Vec::new();
        while !input.is_empty() {
            pairs.push(input.parse()?);
        }
        Ok(Pairs(pairs))
    }
}

/// Leaves out the word `extern`, which the block around them says, and writes that the CPU kernels
/// throw nothing, as their definitions do. cbindgen can neither.
fn tidied(text: &str) -> String {
    const EXTERN: &str = "extern ";
    let mut is_cpu = false;
    let mut tidy = String::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let line = match line.strip_prefix(EXTERN).filter(|rest| !rest.starts_with('"')) {
            Some(first) => {
                is_cpu = first.split('(').next().is_some_and(|head| head.ends_with("_cpu"));
                first
            }
            // Arguments stay below one another.
            None if line.starts_with(' ') => line.get(EXTERN.len()..).unwrap_or(line),
            None => line,
        };
        match line.strip_suffix(");").filter(|_| is_cpu) {
            Some(before) => tidy += &format!("{before}) noexcept;\n"),
            None => tidy += &format!("{line}\n"),
        }
    }
    tidy
}

/// A folder of its own for what cbindgen, which reads files only, shall read.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch> {
        let (base, id) = (std::env::temp_dir(), std::process::id());
        // Whoever has a folder of that name already may keep it.
        for attempt in 0.. {
            let folder = base.join(format!("tch-extension-functions-{id}-{attempt}"));
            match std::fs::create_dir(&folder) {
                Ok(()) => return Ok(Scratch(folder)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot create {}", folder.display()));
                }
            }
        }
        bail!("cannot create a folder in {}", base.display())
    }

    fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
