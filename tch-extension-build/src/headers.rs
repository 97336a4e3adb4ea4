//! C++ declarations of the structs and enums that Rust and the kernels share, and of the functions
//! that Rust calls, generated from the Rust side by [cbindgen](https://docs.rs/cbindgen), so that
//! each is typed once.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

mod functions;

/// What to generate one header from.
pub struct Header {
    sources: Vec<PathBuf>,
    prefix: String,
    preamble: String,
    functions: Functions,
}

/// Which functions a header declares.
#[derive(Clone, Copy, PartialEq)]
enum Functions {
    /// Those that `kernels!` names.
    Kernels,
    /// Those of the files, after their types.
    Also,
    /// Those of the files, whose types C++ declares itself.
    Only,
}

/// A Rust type whose C++ declaration is somewhere else.
struct External {
    rust: &'static str,
    cpp: &'static str,
    /// The header that declares it, or a declaration.
    brought: &'static str,
}

/// What parameter structs may contain without declaring it.
const EXTERNALS: [External; 4] = [
    External {
        rust: "Strided",
        cpp: "tch_extension::Strided",
        brought: "tch_extension/accessor.h",
    },
    External {
        rust: "StridedMut",
        cpp: "tch_extension::StridedMut",
        brought: "tch_extension/accessor.h",
    },
    External {
        rust: "ColumnSums",
        cpp: "TchExtensionColumnSums",
        brought: "tch_extension/column_sums.h",
    },
    // Kernels get pointers only, and libtorch's header takes the compiler longer than they do.
    External { rust: "C_tensor", cpp: "at::Tensor", brought: "namespace at {\nclass Tensor;\n}" },
];

impl Header {
    /// The `#[repr(C)]` structs and `#[repr(i32)]` enums of these Rust files, and the functions that
    /// `kernels!` names. `prefix` goes in front of each type's name: with `Softcap`, the struct `Forward`
    /// is `SoftcapForward` in C++.
    pub fn new(sources: impl IntoIterator<Item = PathBuf>, prefix: impl Into<String>) -> Self {
        Header {
            sources: sources.into_iter().collect(),
            prefix: prefix.into(),
            preamble: String::new(),
            functions: Functions::Kernels,
        }
    }

    /// Declares the functions of the files' `extern "C"` blocks, too, under their own names. Those
    /// that end with `_cpu` throw nothing.
    #[doc(hidden)]
    #[must_use]
    pub fn functions(mut self) -> Self {
        self.functions = Functions::Also;
        self
    }

    /// Declares those functions and no types, whose names in C++ are `#[doc(alias)]`, or else the
    /// same after the prefix.
    #[doc(hidden)]
    #[must_use]
    pub fn only_functions(mut self) -> Self {
        self.functions = Functions::Only;
        self
    }

    /// The names of these functions, in their order.
    ///
    /// # Errors
    /// When a file cannot be read or is not Rust.
    #[doc(hidden)]
    pub fn function_names(&self) -> Result<Vec<String>> {
        functions::names(&self.sources)
    }

    /// A comment for the top of the header, each line beginning with `//`.
    #[must_use]
    pub fn preamble(mut self, text: impl Into<String>) -> Self {
        self.preamble = text.into();
        self
    }

    /// The header's text. `None` if the files declare nothing that C++ could see.
    ///
    /// # Errors
    /// When a file cannot be read, is not Rust, or declares a struct that C++ cannot have.
    pub fn generate(&self) -> Result<Option<String>> {
        let mut shared = Shared::default();
        for source in &self.sources {
            shared.read(source)?;
        }
        let renamed: Vec<_> = shared
            .types
            .iter()
            .map(|name| {
                let is_asked = self.functions == Functions::Only;
                let alias = shared.aliases.iter().find(|(rust, _)| is_asked && rust == name);
                let prefixed = || format!("{}{name}", self.prefix);
                (name.clone(), alias.map_or_else(prefixed, |(_, cpp)| cpp.clone()))
            })
            .collect();
        let has_types = !shared.types.is_empty() && self.functions != Functions::Only;
        let types = if has_types { Some(self.types(&shared, &renamed)?) } else { None };
        let functions = match self.functions {
            Functions::Kernels => functions::of_kernels(&self.sources, &renamed)?,
            functions => {
                functions::declarations(&self.sources, &renamed, functions == Functions::Only)?
            }
        };
        let Some(functions) = functions else { return Ok(types) };
        let before = types.unwrap_or_else(|| {
            let preamble = format!("{}\n\n", self.preamble);
            let preamble = preamble.trim_start();
            format!("{preamble}#pragma once\n\n#include <cstdint>\n")
        });
        let before = match mentions(&functions, "size_t") {
            true => before.replacen("#include <cst", "#include <cstddef>\n#include <cst", 1),
            false => before,
        };
        Ok(Some(format!("{before}\n{functions}")))
    }

    fn types(&self, shared: &Shared, renamed: &[(String, String)]) -> Result<String> {
        let names = &shared.types;
        let mut config = cbindgen::Config {
            header: Some(self.preamble.clone()).filter(|text| !text.is_empty()),
            pragma_once: true,
            ..config()
        };
        config.enumeration.enum_class = true;
        config.export.item_types = vec![cbindgen::ItemType::Enums, cbindgen::ItemType::Structs];
        config.export.include.clone_from(names);
        config.export.rename.extend(renamed.iter().cloned());
        let foreign = EXTERNALS.iter().filter(|external| !names.iter().any(|n| n == external.rust));
        for external in foreign {
            config.export.exclude.push(external.rust.to_string());
            config.export.rename.insert(external.rust.to_string(), external.cpp.to_string());
        }
        let builder = cbindgen::Builder::new().with_config(config);
        let builder = self.sources.iter().fold(builder, |builder, source| builder.with_src(source));
        let mut text = with_includes(&written(builder, &self.sources)?, names);
        // cbindgen leaves private constants out, and names them all the same.
        for (name, value) in &shared.constants {
            text = text.replace(&format!("[{name}]"), &format!("[{value}]"));
        }
        Ok(pointers_to_the_left(&text))
    }
}

/// What every run of cbindgen is told.
fn config() -> cbindgen::Config {
    cbindgen::Config {
        language: cbindgen::Language::Cxx,
        no_includes: true,
        documentation_style: cbindgen::DocumentationStyle::C99,
        usize_is_size_t: true,
        line_length: 100,
        ..Default::default()
    }
}

fn written(builder: cbindgen::Builder, sources: &[PathBuf]) -> Result<String> {
    let bindings = builder
        .generate()
        .with_context(|| format!("cbindgen cannot make a header of {}", display(sources)))?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).context("cbindgen wrote bytes that are no text")
}

/// Adds the includes that the declarations need, after `#pragma once`, in clang-format's order.
fn with_includes(text: &str, declared_here: &[String]) -> String {
    let needed = EXTERNALS.iter().filter(|external| {
        mentions(text, external.cpp) && !declared_here.iter().any(|name| name == external.rust)
    });
    let mut lines: Vec<&str> = needed.map(|external| external.brought).collect();
    lines.sort_unstable();
    lines.dedup();
    let (ours, declared): (Vec<&str>, Vec<&str>) =
        lines.into_iter().partition(|line| line.starts_with("tch_extension/"));
    let declared: String = declared.iter().map(|line| format!("\n{line}\n")).collect();
    let ours: String = ours.iter().map(|line| format!("#include \"{line}\"\n")).collect();
    let blank = if ours.is_empty() { "" } else { "\n" };
    let all = format!("#pragma once\n\n#include <cstdint>\n{blank}{ours}{declared}");
    text.replacen("#pragma once\n", &all, 1)
}

fn display(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

fn mentions(text: &str, name: &str) -> bool {
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let after = rest[at + name.len()..].chars().next();
        if !after.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            return true;
        }
        rest = &rest[at + name.len()..];
    }
    false
}

/// What some Rust files declare for C++.
#[derive(Default)]
struct Shared {
    /// The types that have a layout which C++ knows, in their order.
    types: Vec<String>,
    /// The names that some of them have in C++.
    aliases: Vec<(String, String)>,
    /// Constants with a literal for their value, which may be the length of an array.
    constants: Vec<(String, String)>,
}

impl Shared {
    /// Adds the items of one file. Modules within the file, such as tests, are left out.
    fn read(&mut self, source: &Path) -> Result<()> {
        let file = parsed(&text_of(source)?, source)?;
        for item in &file.items {
            let (attributes, name, expected) = match item {
                syn::Item::Struct(item) => (&item.attrs, &item.ident, "C"),
                syn::Item::Enum(item) => (&item.attrs, &item.ident, "i32"),
                syn::Item::Const(item) => {
                    self.constants.extend(literal(item));
                    continue;
                }
                _ => continue,
            };
            match representation(attributes)? {
                None => {}
                Some(found) if found == expected => {
                    if let syn::Item::Struct(item) = item {
                        refuse_options(item, source)?;
                    }
                    self.types.push(name.to_string());
                    self.aliases.extend(alias(attributes).map(|cpp| (name.to_string(), cpp)));
                }
                Some(found) if found == "transparent" => {}
                Some(other) => bail!(
                    "{}: {name} is repr({other}); structs for C++ are repr(C), and enums repr(i32)",
                    source.display()
                ),
            }
        }
        Ok(())
    }
}

/// Refuses a field that may be absent, about which the C++ compiler would only say that it knows no
/// such type.
fn refuse_options(item: &syn::ItemStruct, source: &Path) -> Result<()> {
    for field in &item.fields {
        let syn::Type::Path(path) = &field.ty else { continue };
        if path.path.segments.last().is_some_and(|last| last.ident == "Option") {
            let name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
            bail!(
                "{}: {}.{name} is an Option, which C++ does not have; pass a tensor of no elements, and a bool if one \
                 that is there may have none, too",
                source.display(),
                item.ident
            );
        }
    }
    Ok(())
}

fn text_of(source: &Path) -> Result<String> {
    std::fs::read_to_string(source).with_context(|| format!("cannot read {}", source.display()))
}

fn parsed(text: &str, source: &Path) -> Result<syn::File> {
    syn::parse_file(text)
        .with_context(|| format!("{} is not Rust that syn can parse", source.display()))
}

fn literal(item: &syn::ItemConst) -> Option<(String, String)> {
    match &*item.expr {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(value), .. }) => {
            Some((item.ident.to_string(), value.base10_digits().to_string()))
        }
        _ => None,
    }
}

/// What `#[doc(alias = "…")]` says, if it is a name with a namespace.
fn alias(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("doc")).find_map(|attribute| {
        let pair: syn::MetaNameValue = attribute.parse_args().ok()?;
        match pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(name), .. }) => {
                Some(name.value()).filter(|name| name.contains("::"))
            }
            _ => None,
        }
    })
}

fn is_for_tests(module: &syn::ItemMod) -> bool {
    module.attrs.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

/// What `#[repr(…)]` says.
fn representation(attributes: &[syn::Attribute]) -> Result<Option<String>> {
    let Some(repr) = attributes.iter().find(|attribute| attribute.path().is_ident("repr")) else {
        return Ok(None);
    };
    let ident: syn::Ident = repr.parse_args().context("repr with one word")?;
    Ok(Some(ident.to_string()))
}

/// `void *data` as `void* data`, as clang-format has it here. cbindgen has no option for that.
fn pointers_to_the_left(text: &str) -> String {
    let mut moved = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("//") {
            moved += line;
        } else {
            let mut rest = line;
            while let Some((before, after)) = rest.split_once(" *") {
                let name = after.trim_start_matches('*');
                moved += before;
                moved += &"*".repeat(1 + after.len() - name.len());
                if !name.starts_with([' ', ',', ')']) {
                    moved.push(' ');
                }
                rest = name;
            }
            moved += rest;
        }
        moved.push('\n');
    }
    moved
}

/// The prefix of a source's C++ names: the folder's, if it is not `src`, or else the file's, in
/// camel case. `src/row_norm/kernels.rs` and `src/row_norm.rs` give `RowNorm`.
pub fn prefix_of(source: &Path) -> String {
    let folder = source.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let stem = source.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    camel_case(folder.filter(|folder| *folder != "src").unwrap_or(stem))
}

/// `row_norm` as `RowNorm`.
pub fn camel_case(name: &str) -> String {
    let word = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase().to_string() + letters.as_str())
    };
    name.split('_').filter_map(word).collect()
}

#[cfg(test)]
mod tests;
