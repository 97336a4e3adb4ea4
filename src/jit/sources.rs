//! What to compile, and how.

use std::io::Result;
use std::path::{Path, PathBuf};

/// Everything that a user states about an extension except its name.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub files: Vec<PathBuf>,
    pub cpp: Vec<String>,
    pub cuda: Vec<String>,
    pub functions: Vec<String>,
    pub includes: Vec<PathBuf>,
    pub defines: Vec<(String, Option<String>)>,
    pub flags: Vec<String>,
    pub nvcc_flags: Vec<String>,
    pub link_flags: Vec<String>,
    pub archs: Option<String>,
    pub standard: String,
    pub use_pch: bool,
    pub verbose: bool,
}

impl Default for Sources {
    fn default() -> Self {
        Sources {
            files: Vec::new(),
            cpp: Vec::new(),
            cuda: Vec::new(),
            functions: Vec::new(),
            includes: Vec::new(),
            defines: Vec::new(),
            flags: Vec::new(),
            nvcc_flags: Vec::new(),
            link_flags: Vec::new(),
            archs: None,
            standard: "c++17".to_string(),
            use_pch: false,
            verbose: false,
        }
    }
}

impl Sources {
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.cpp.is_empty() && self.cuda.is_empty()
    }

    /// Makes all paths absolute, so that the current folder no longer matters.
    pub fn absolute(mut self) -> Result<Self> {
        for path in self.files.iter_mut().chain(&mut self.includes) {
            *path = std::path::absolute(&*path)?;
        }
        Ok(self)
    }

    /// Everything that determines the library, as one text. `verbose` and `use_pch` do not, so they
    /// are left out.
    pub fn text(&self) -> String {
        format!("{:#?}", Sources { verbose: false, use_pch: false, ..self.clone() })
    }

    /// What determines a precompiled header: no sources, and no macros, because a compiler leaves a
    /// precompiled header out if a macro changes something in it.
    pub fn of_headers(&self) -> Sources {
        Sources {
            includes: self.includes.clone(),
            flags: self.flags.clone(),
            standard: self.standard.clone(),
            verbose: self.verbose,
            ..Sources::default()
        }
    }

    /// Writes the inline sources to `folder`, and returns the paths of all sources.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut files = self.files.clone();
        for (name, text) in [("main.cpp", self.cpp_text()), ("main.cu", self.cuda_text())] {
            if let Some(text) = text {
                let path = folder.join(name);
                std::fs::write(&path, text)?;
                files.push(path);
            }
        }
        Ok(files)
    }

    fn cpp_text(&self) -> Option<String> {
        (!self.cpp.is_empty() || !self.functions.is_empty()).then(|| self.with_module(&self.cpp))
    }

    fn cuda_text(&self) -> Option<String> {
        (!self.cuda.is_empty()).then(|| joined(&self.cuda))
    }

    /// The texts, followed by the module of the requested functions.
    fn with_module(&self, texts: &[String]) -> String {
        if self.functions.is_empty() {
            return joined(texts);
        }
        let lines: String =
            self.functions.iter().map(|name| format!("  m.def(\"{name}\", &{name});\n")).collect();
        format!(
            "#include <torch/extension.h>\n{}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{\n{lines}}}\n",
            joined(texts)
        )
    }
}

/// Joins all texts to one translation unit. Byte order marks, which editors put at the start of a
/// file, are removed, because they are an error anywhere else.
fn joined(texts: &[String]) -> String {
    let texts: Vec<_> = texts.iter().map(|text| text.trim_start_matches('\u{feff}')).collect();
    texts.join("\n")
}
