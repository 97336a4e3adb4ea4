//! The command that compiles one source: its compiler, flags, macros and folders of headers.

use crate::arch::flags_of;
use crate::compile::{Job, Language, Object};
use crate::environment::Environment;
use crate::fewer;
use crate::objects;
use crate::toolchain::{Cuda, Options, Toolchain, takes_precompiled, text_of};
use anyhow::{Context, Result};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

/// One source and everything that decides how it is compiled.
pub struct Unit<'a> {
    pub toolchain: &'a Toolchain,
    pub source: &'a Path,
    pub options: &'a Options,
    pub folder: PathBuf,
}

impl Unit<'_> {
    /// The job that compiles the source with the C++ compiler: for one CPU instruction set, or for
    /// none in particular.
    pub fn with_cxx(&self, isa: Option<(&str, &str)>) -> Result<Job> {
        let options = self.options;
        let command = self.toolchain.cxx.command();
        let mut arguments: Vec<String> =
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        arguments.extend(
            ["-O3", "-fPIC"].iter().chain(self.toolchain.cxx.openmp()).map(|flag| flag.to_string()),
        );
        let warnings: &[&str] = if options.warnings { &["-Wall", "-Wextra"] } else { &["-w"] };
        arguments.extend(warnings.iter().map(|flag| flag.to_string()));
        if !options.export_symbols {
            arguments
                .extend(["-fvisibility=hidden", "-fvisibility-inlines-hidden"].map(String::from));
        }
        if let Some((isa, flags)) = isa {
            arguments.push(format!("-DCPU_CAPABILITY={isa}"));
            arguments.push(format!("-DCPU_CAPABILITY_{isa}"));
            arguments.extend(flags.split_whitespace().map(String::from));
        }
        self.add_common(&mut arguments, self.toolchain.define_for_cxx);
        if let Some(folder) = self.toolchain.cuda_headers() {
            add_system_include(&mut arguments, &folder);
        }
        arguments.extend(options.cxx_flags.iter().cloned());
        let roots = self.roots();
        if !arguments.iter().any(|flag| objects::is_for_debuggers(flag)) {
            arguments.extend(roots.iter().map(|(_, root)| objects::without_place(root)));
        }
        let (program, compiler) = (command.get_program().into(), self.toolchain.cxx.path.clone());
        self.job(Language::Cxx, program, compiler, arguments, roots)
    }

    /// The job that compiles the source with nvcc. Each source is compiled alone: two in one call
    /// would turn on relocatable device code, which prevents inlining between files.
    pub fn with_nvcc(&self, cuda: &Cuda, env: &dyn Environment) -> Result<Job> {
        let options = self.options;
        // Compression makes the kernels a seventh of the size; every program that links them
        // contains them.
        let mut arguments: Vec<String> =
            ["-O3", "-lineinfo", "--compress-mode=size", "--expt-relaxed-constexpr", "-Xcompiler"]
                .map(String::from)
                .to_vec();
        arguments
            .push(if options.warnings { "-fPIC,-Wall,-Wextra" } else { "-fPIC,-w" }.to_string());
        if !options.warnings {
            arguments.push("-w".to_string());
        }
        if !options.export_symbols {
            arguments.extend(["-Xcompiler", "-fvisibility=hidden"].map(String::from));
        }
        // As in PyTorch, a flag that names an architecture replaces the whole list.
        if !options.nvcc_flags.iter().any(|flag| flag.contains("arch") || flag.contains("-gencode"))
        {
            let is_named = options.for_hopper.iter().any(|end| self.source.ends_with(end));
            let for_hopper = is_named || is_for_hopper(self.source);
            arguments.extend(flags_of(&cuda.archs, for_hopper));
        }
        if text_of(self.source).is_ok_and(|text| is_written_for_torch(&text)) {
            arguments.extend(WITHOUT_HALF_OPERATORS.map(|name| format!("-D{name}")));
        }
        self.add_common(&mut arguments, None);
        if let Some(host) = env.var("NVCC_CCBIN") {
            arguments.push(format!("-ccbin={host}"));
        } else if env.var("CXX").is_some() {
            arguments.push(format!("-ccbin={}", self.toolchain.cxx.path.display()));
        }
        arguments.extend(options.nvcc_flags.iter().cloned());
        let nvcc = &cuda.nvcc.path;
        self.job(Language::Cuda, nvcc.clone(), nvcc.clone(), arguments, self.roots())
    }

    /// The folders of headers that the commands name by their whole paths.
    fn roots(&self) -> Vec<(&'static str, PathBuf)> {
        let libtorch = self.toolchain.libtorch.includes.iter().take(1);
        let libtorch = libtorch.map(|root| (objects::LIBTORCH, root.clone()));
        let headers = self.toolchain.cuda_headers();
        let toolkit = headers.iter().filter_map(|folder| folder.parent());
        let toolkit: Vec<_> =
            toolkit.map(|toolkit| (objects::TOOLKIT, toolkit.to_path_buf())).collect();
        let named = self.includes().filter(|folder| folder.is_absolute()).cloned();
        let roots = libtorch.chain(toolkit).chain(objects::FOLDERS.into_iter().zip(named));
        roots.filter(|(_, root)| root.parent().is_some() && root.is_absolute()).collect()
    }

    /// The folders that `#include` searches before libtorch's.
    fn includes(&self) -> impl Iterator<Item = &PathBuf> {
        let options = self.options;
        let own = options.includes_for.iter().filter(|(path, _)| self.source.starts_with(path));
        own.map(|(_, folder)| folder).chain(&options.includes)
    }

    /// Adds the arguments that are the same for both compilers, and one more macro.
    fn add_common(&self, arguments: &mut Vec<String>, define: Option<&str>) {
        let options = self.options;
        let libtorch = &self.toolchain.libtorch;
        arguments.push(format!("-std={}", options.standard));
        arguments.push(format!("-D_GLIBCXX_USE_CXX11_ABI={}", libtorch.cxx11_abi));
        // libtorch itself is built with NDEBUG. Without it, the inline functions of libtorch's
        // headers contain assertions, and the program's copies of these functions replace those in
        // libtorch.
        arguments.push("-DNDEBUG".to_string());
        if self.toolchain.cuda_headers().is_some() {
            arguments.push(objects::CUDA_MACRO.to_string());
        }
        arguments.extend(options.defines.iter().map(|(name, value)| match value {
            Some(value) => format!("-D{name}={value}"),
            None => format!("-D{name}"),
        }));
        arguments.extend(define.map(|name| format!("-D{name}")));
        arguments.extend(self.includes().map(|folder| format!("-I{}", folder.display())));
        for folder in &libtorch.includes {
            add_system_include(arguments, folder);
        }
    }

    fn job(
        &self,
        language: Language,
        program: PathBuf,
        compiler: PathBuf,
        arguments: Vec<String>,
        roots: Vec<(&'static str, PathBuf)>,
    ) -> Result<Job> {
        std::fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot create {}", self.folder.display()))?;
        let path = self.folder.join(object_name(self.source));
        let object = Object { path, source: self.source.to_path_buf() };
        let first = self.first()?;
        let built_for = self.toolchain.identity();
        Ok(Job { language, program, compiler, arguments, roots, built_for, first, object })
    }

    /// The arguments of a first attempt with fewer headers.
    fn first(&self) -> Result<Vec<String>> {
        if !self.options.fewer_headers {
            return Ok(Vec::new());
        }
        let precompiled = self.options.precompiled.as_ref();
        if let Some(header) = precompiled.filter(|_| takes_precompiled(self.source)) {
            let header = header.with_extension("").display().to_string();
            return Ok(vec![fewer::argument(fewer::AUTOGRAD), "-include".to_string(), header]);
        }
        let level = fewer::level_for(&text_of(self.source)?);
        Ok(level.map(fewer::argument).into_iter().collect())
    }
}

/// Whether one of the words of a source's name is `hopper`. Underscores separate the words.
fn is_for_hopper(source: &Path) -> bool {
    let name = source.file_stem().unwrap_or_default().to_string_lossy();
    name.split('_').any(|word| word == "hopper")
}

/// The macros that `torch.utils.cpp_extension` defines for every CUDA source. Without them, CUDA's
/// operators for the half kinds would make those of `at::Half` ambiguous.
const WITHOUT_HALF_OPERATORS: [&str; 4] = [
    "__CUDA_NO_HALF_OPERATORS__",
    "__CUDA_NO_HALF_CONVERSIONS__",
    "__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "__CUDA_NO_HALF2_OPERATORS__",
];

/// Whether a CUDA source uses the half types of libtorch's headers. Kernels that include
/// `tch_extension/launch.h` compute in CUDA's own types.
fn is_written_for_torch(text: &str) -> bool {
    let includes = |folder: &str| {
        text.contains(&format!("<{folder}/")) || text.contains(&format!("\"{folder}/"))
    };
    ["torch", "ATen", "THC"].iter().any(|folder| includes(folder)) && !includes("tch_extension")
}

/// Adds a folder of system headers, in which compilers report no warnings.
fn add_system_include(arguments: &mut Vec<String>, folder: &Path) {
    arguments.extend(["-isystem".to_string(), folder.display().to_string()]);
}

/// The name of a source's object. An archive keeps only file names, and every operator has a
/// `cpu.cpp`, so the name contains a hash of the whole path. It may differ between Rust releases,
/// which costs one build.
fn object_name(source: &Path) -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    source.hash(&mut hasher);
    let stem = source.file_name().unwrap_or_default().to_string_lossy();
    format!("{stem}-{:016x}.o", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_torch_s_kinds_are_told_from_others() {
        for text in
            ["#include <torch/extension.h>", "#include \"ATen/ATen.h\"", "#include <THC/THC.h>"]
        {
            assert!(is_written_for_torch(text), "{text}");
            let mixed = format!("{text}\n#include <tch_extension/launch.h>\n");
            assert!(!is_written_for_torch(&mixed), "{mixed}");
        }
        assert!(!is_written_for_torch("#include <cuda_fp16.h>\n// torch/extension.h"));
    }

    #[test]
    fn the_word_hopper_in_a_name_asks_for_9_0a() {
        let is = |path: &str| is_for_hopper(Path::new(path));
        for path in ["hopper.cu", "csrc/a/hopper_forward.cu", "a_hopper.cu", "a/a_hopper_b.cu"] {
            assert!(is(path), "{path}");
        }
        for path in ["hopper/a.cu", "csrc/a/cuda.cu", "grasshopper.cu", "a_hoppers.cu", "Hopper.cu"]
        {
            assert!(!is(path), "{path}");
        }
    }

    #[test]
    fn objects_of_different_sources_have_different_names() {
        let names = ["csrc/a/b_c.cpp", "csrc/a_b/c.cpp", "csrc/a/c.cpp"]
            .map(|path| object_name(Path::new(path)));
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2], "{names:?}");
    }
}
