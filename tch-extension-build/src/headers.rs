//! C++ declarations of the structs and enums that Rust and the kernels share, generated from the
//! Rust side by [cbindgen](https://docs.rs/cbindgen), so that each is typed once.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// What to generate one header from.
pub struct Header {
    sources: Vec<PathBuf>,
    prefix: String,
    preamble: String,
}

/// A Rust type whose C++ declaration is somewhere else.
struct External {
    rust: &'static str,
    cpp: &'static str,
    include: &'static str,
}

/// What parameter structs may contain without declaring it.
const EXTERNALS: [External; 4] = [
    External {
        rust: "Strided",
        cpp: "tch_extension::Strided",
        include: "tch_extension/accessor.h",
    },
    External {
        rust: "StridedMut",
        cpp: "tch_extension::StridedMut",
        include: "tch_extension/accessor.h",
    },
    External {
        rust: "ColumnSums",
        cpp: "TchExtensionColumnSums",
        include: "tch_extension/column_sums.h",
    },
    External { rust: "C_tensor", cpp: "at::Tensor", include: "ATen/core/Tensor.h" },
];

impl Header {
    /// The `#[repr(C)]` structs and `#[repr(i32)]` enums of these Rust files. `prefix` goes in front
    /// of each name: with `Softcap`, the struct `Forward` is `SoftcapForward` in C++.
    pub fn new(sources: impl IntoIterator<Item = PathBuf>, prefix: impl Into<String>) -> Self {
        Header {
            sources: sources.into_iter().collect(),
            prefix: prefix.into(),
            preamble: String::new(),
        }
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
        if shared.types.is_empty() {
            return Ok(None);
        }
        let mut text = self.run_cbindgen(&shared.types)?;
        // cbindgen leaves private constants out, and names them all the same.
        for (name, value) in &shared.constants {
            text = text.replace(&format!("[{name}]"), &format!("[{value}]"));
        }
        Ok(Some(pointers_to_the_left(&text)))
    }

    fn run_cbindgen(&self, names: &[String]) -> Result<String> {
        let mut config = cbindgen::Config {
            language: cbindgen::Language::Cxx,
            header: Some(self.preamble.clone()).filter(|text| !text.is_empty()),
            pragma_once: true,
            no_includes: true,
            documentation_style: cbindgen::DocumentationStyle::C99,
            usize_is_size_t: true,
            line_length: 100,
            ..Default::default()
        };
        config.enumeration.enum_class = true;
        config.export.item_types = vec![cbindgen::ItemType::Enums, cbindgen::ItemType::Structs];
        config.export.include = names.to_vec();
        for name in names {
            config.export.rename.insert(name.clone(), format!("{}{name}", self.prefix));
        }
        let foreign = EXTERNALS.iter().filter(|external| !names.iter().any(|n| n == external.rust));
        for external in foreign {
            config.export.exclude.push(external.rust.to_string());
            config.export.rename.insert(external.rust.to_string(), external.cpp.to_string());
        }
        let sources = self.sources.iter();
        let builder =
            sources.fold(cbindgen::Builder::new(), |builder, source| builder.with_src(source));
        let bindings = builder.with_config(config).generate().with_context(|| {
            format!("cbindgen cannot make a header of {}", display(&self.sources))
        })?;
        let mut text = Vec::new();
        bindings.write(&mut text);
        let text = String::from_utf8(text).context("cbindgen wrote bytes that are no text")?;
        Ok(with_includes(&text, names))
    }
}

/// Adds the includes that the declarations need, after `#pragma once`, in clang-format's order.
fn with_includes(text: &str, declared_here: &[String]) -> String {
    let needed = EXTERNALS.iter().filter(|external| {
        mentions(text, external.cpp) && !declared_here.iter().any(|name| name == external.rust)
    });
    let mut lines: Vec<&str> = needed.map(|external| external.include).collect();
    lines.sort_unstable();
    lines.dedup();
    let (ours, others): (Vec<&str>, Vec<&str>) =
        lines.into_iter().partition(|line| line.starts_with("tch_extension/"));
    let others: String = others.iter().map(|line| format!("\n#include <{line}>\n")).collect();
    let ours: String = ours.iter().map(|line| format!("#include \"{line}\"\n")).collect();
    let blank = if ours.is_empty() { "" } else { "\n" };
    let all = format!("#pragma once\n{others}\n#include <cstdint>\n{blank}{ours}");
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
    /// Constants with a literal for their value, which may be the length of an array.
    constants: Vec<(String, String)>,
}

impl Shared {
    /// Adds the items of one file. Modules within the file, such as tests, are left out.
    fn read(&mut self, source: &Path) -> Result<()> {
        let text = std::fs::read_to_string(source)
            .with_context(|| format!("cannot read {}", source.display()))?;
        let file = syn::parse_file(&text)
            .with_context(|| format!("{} is not Rust that syn can parse", source.display()))?;
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
                Some(found) if found == expected => self.types.push(name.to_string()),
                Some(other) => bail!(
                    "{}: {name} is repr({other}); structs for C++ are repr(C), and enums repr(i32)",
                    source.display()
                ),
            }
        }
        Ok(())
    }
}

fn literal(item: &syn::ItemConst) -> Option<(String, String)> {
    match &*item.expr {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(value), .. }) => {
            Some((item.ident.to_string(), value.base10_digits().to_string()))
        }
        _ => None,
    }
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
    let line = |line: &str| match line.trim_start().starts_with("//") {
        true => format!("{line}\n"),
        false => format!("{}\n", line.replace(" *", "* ").replace("*  ", "* ")),
    };
    text.lines().map(line).collect()
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
mod tests {
    use super::*;

    fn generated(rust: &str) -> Result<Option<String>> {
        let folder = std::env::temp_dir().join(format!(
            "tch-extension-headers-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let source = folder.join("src/soft_cap/kernels.rs");
        std::fs::create_dir_all(source.parent().unwrap()).unwrap();
        std::fs::write(&source, rust).unwrap();
        let header = Header::new([source.clone()], prefix_of(&source)).generate();
        std::fs::remove_dir_all(folder).unwrap();
        header
    }

    #[test]
    fn structs_and_enums_are_declared_with_their_comments() {
        let header = generated(
            "/// Which kernel.
            #[repr(i32)]
            #[derive(Default)]
            pub enum Way { #[default] Automatic, /// A warp a row.
                Warp }
            /// The forward pass.
            #[repr(C)]
            struct Forward<'a> {
                /// x, `[N]`.
                x: Strided<'a, 1>,
                y: StridedMut<'a, 1>,
                way: Way,
                cap: f64,
                /// `[N]`, null if nobody needs it.
                mean: *mut c_void,
                input: *const C_tensor,
                sizes: [i64; DIMS],
            }
            const DIMS: usize = 6;
            struct NotForC { a: String }
            #[cfg(test)]
            mod tests { #[repr(C)] struct OfATest { a: i32 } }",
        );
        let expected = "#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include \"tch_extension/accessor.h\"

// Which kernel.
enum class SoftCapWay : int32_t {
  Automatic,
  // A warp a row.
  Warp,
};

// The forward pass.
struct SoftCapForward {
  // x, `[N]`.
  tch_extension::Strided<1> x;
  tch_extension::StridedMut<1> y;
  SoftCapWay way;
  double cap;
  // `[N]`, null if nobody needs it.
  void* mean;
  const at::Tensor* input;
  int64_t sizes[6];
};
";
        assert_eq!(header.unwrap().unwrap(), expected);
    }

    #[test]
    fn what_c_plus_plus_cannot_have_is_refused() {
        assert!(generated("struct NotForC { a: String }").unwrap().is_none());
        let error = generated("#[repr(u8)] enum Way { A }").unwrap_err().to_string();
        assert!(error.contains("Way is repr(u8); structs for C++ are repr(C)"), "{error}");
        let error = generated("struct").unwrap_err().to_string();
        assert!(error.contains("kernels.rs is not Rust"), "{error}");
    }

    #[test]
    fn prefixes_come_from_the_path() {
        for (path, prefix) in [
            ("src/soft_cap/kernels.rs", "SoftCap"),
            ("src/soft_cap.rs", "SoftCap"),
            ("softcap.rs", "Softcap"),
        ] {
            assert_eq!(prefix_of(Path::new(path)), prefix);
        }
    }
}
