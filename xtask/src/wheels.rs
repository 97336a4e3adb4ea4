//! Installs a set of pinned wheels into a folder of `.venv`: completely or not at all.

use crate::pip::Pip;
use crate::programs;
use crate::repo::Repo;
use crate::report::{say, trouble};
use anyhow::{Context, Result, bail};
use std::fs::{File, TryLockError};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Wheels that are installed together.
pub struct Set {
    /// What the wheels are, for messages.
    pub name: &'static str,
    /// The file with their pins, relative to the repository.
    pub pins: &'static str,
    /// The folder that they are installed into, below `.venv`.
    pub folder: &'static str,
    /// Links to make below `.venv`: each link's name and target.
    pub links: &'static [(&'static str, &'static str)],
    /// One file of each part, below `.venv`. They are checked in case somebody removed something.
    pub key_files: &'static [&'static str],
    /// The size, for the line that announces the install.
    pub size: &'static str,
    /// The free space that the install needs: for the wheels and what is unpacked from them.
    pub needs_gib: f64,
}

/// libtorch with CUDA, and nvcc.
pub const LIBTORCH: Set = Set {
    name: "libtorch and nvcc",
    pins: "xtask/libtorch.txt",
    folder: "site",
    links: &[("libtorch", "site/torch"), ("cuda", "site/nvidia/cu13")],
    key_files: &[
        "libtorch/lib/libtorch.so",
        "libtorch/lib/libtorch_cpu.so",
        "libtorch/lib/libtorch_cuda.so",
        "libtorch/include/torch/csrc/api/include/torch/all.h",
        "cuda/bin/nvcc",
        "cuda/nvvm/bin/cicc",
        "cuda/include/cuda_runtime.h",
        "cuda/lib/libcudart.so.13",
    ],
    size: "about 2.6 GB to download, 4.1 GB on disk",
    needs_gib: 10.0,
};

/// libtorch with CUDA, and nvcc, for tch 0.26. They are installed next to [`LIBTORCH`].
pub const LIBTORCH_2_13: Set = Set {
    name: "libtorch 2.13 and nvcc",
    pins: "xtask/libtorch-2.13.txt",
    folder: "site-2.13",
    links: &[("libtorch-2.13", "site-2.13/torch"), ("cuda-2.13", "site-2.13/nvidia/cu13")],
    key_files: &[
        "libtorch-2.13/lib/libtorch.so",
        "libtorch-2.13/lib/libtorch_cpu.so",
        "libtorch-2.13/lib/libtorch_cuda.so",
        "libtorch-2.13/include/torch/csrc/api/include/torch/all.h",
        "cuda-2.13/bin/nvcc",
        "cuda-2.13/nvvm/bin/cicc",
        "cuda-2.13/include/cuda_runtime.h",
        "cuda-2.13/lib/libcudart.so.13",
    ],
    size: "about 2.6 GB to download, 4.1 GB on disk",
    needs_gib: 10.0,
};

/// The tools that `ci` needs in addition to cargo's.
pub const TOOLS: Set = Set {
    name: "clang-format",
    pins: "xtask/tools.txt",
    folder: "tools",
    links: &[],
    key_files: &["tools/clang_format/data/bin/clang-format"],
    size: "2 MB",
    needs_gib: 0.1,
};

/// Operators from other projects, which the tests of `library` and `tvm_ffi` load and call.
pub const VISION: Set = Set {
    name: "torchvision and TVM FFI",
    pins: "xtask/vision.txt",
    folder: "vision",
    links: &[],
    key_files: &["vision/torchvision/_C.so", "vision/tvm_ffi/lib/libtvm_ffi.so"],
    size: "11 MB",
    needs_gib: 0.1,
};

/// What loads exported models and adapters in tests of examples/llm.
pub const TRANSFORMERS: Set = Set {
    name: "transformers",
    pins: "xtask/transformers.txt",
    folder: "transformers",
    links: &[],
    key_files: &["transformers/transformers/__init__.py", "transformers/peft/__init__.py"],
    size: "60 MB to download, 280 MB on disk",
    needs_gib: 0.5,
};

/// What `import torch` and torch.compile need, for tests that start Python.
pub const PYTHON: Set = Set {
    name: "what torch needs of Python",
    pins: "xtask/python.txt",
    folder: "python",
    links: &[],
    key_files: &["python/sympy/__init__.py", "python/numpy/__init__.py"],
    size: "30 MB to download, 150 MB on disk",
    needs_gib: 0.5,
};

/// The tools that pack and check the wheel of tch-extension-python.
pub const WHEEL_TOOLS: Set = Set {
    name: "auditwheel and wheel",
    pins: "xtask/wheel.txt",
    folder: "wheel-tools",
    links: &[],
    key_files: &["wheel-tools/auditwheel/__init__.py", "wheel-tools/wheel/__init__.py"],
    size: "1 MB",
    needs_gib: 0.1,
};

/// The file that marks a folder as complete when it holds the expected text. It is written last,
/// before the folder gets its name.
const STAMP: &str = ".stamp";

impl Set {
    /// What is missing from the set; `None` when it is complete.
    pub fn missing(&self, repo: &Repo) -> Result<Option<String>> {
        let venv = repo.venv();
        let wanted = stamp(&self.read_pins(repo)?);
        match std::fs::read_to_string(venv.join(self.folder).join(STAMP)) {
            Err(_) => return Ok(Some("it is not installed yet, or was interrupted".to_string())),
            Ok(found) if found != wanted => {
                return Ok(Some(format!("{} has changed since", self.pins)));
            }
            Ok(_) => {}
        }
        for (link, target) in self.links {
            if std::fs::read_link(venv.join(link)).ok().as_deref() != Some(Path::new(target)) {
                return Ok(Some(format!("the link .venv/{link} is missing")));
            }
        }
        let gone = self.key_files.iter().find(|file| !venv.join(file).exists());
        Ok(gone.map(|file| format!(".venv/{file} is missing")))
    }

    fn read_pins(&self, repo: &Repo) -> Result<String> {
        let path = repo.root.join(self.pins);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Installs the set unless it is already there.
    pub fn ensure(&self, repo: &Repo) -> Result<()> {
        if self.missing(repo)?.is_none() {
            return Ok(());
        }
        let venv = repo.venv();
        std::fs::create_dir_all(&venv)
            .with_context(|| format!("cannot make {}", venv.display()))?;
        let lock = lock(&venv)?;
        // Another process may have installed it while this one waited for the lock.
        if self.missing(repo)?.is_none() {
            return Ok(());
        }
        if !self.is_whole(repo)? {
            self.install(repo, &lock)?;
        }
        self.make_links(&venv)?;
        match self.missing(repo)? {
            None => Ok(()),
            Some(why) => bail!("{} was installed, yet {why}; please report this", self.name),
        }
    }

    /// Whether the folder is complete and needs no new install. Missing links can be made without
    /// one.
    fn is_whole(&self, repo: &Repo) -> Result<bool> {
        let folder = repo.venv().join(self.folder);
        let stamped =
            std::fs::read_to_string(folder.join(STAMP)).ok() == Some(stamp(&self.read_pins(repo)?));
        Ok(stamped && self.key_files.iter().all(|file| self.resolved(repo, file).exists()))
    }

    /// A key file's path without the links.
    fn resolved(&self, repo: &Repo, file: &str) -> PathBuf {
        let direct = self.links.iter().find_map(|(link, target)| {
            let rest = file.strip_prefix(link)?;
            rest.starts_with('/').then(|| format!("{target}{rest}"))
        });
        repo.venv().join(direct.as_deref().unwrap_or(file))
    }

    fn install(&self, repo: &Repo, lock: &File) -> Result<()> {
        let venv = repo.venv();
        let pip = Pip::find_or_make(&venv.join("pip"))?;
        let (fresh, old, tmp) =
            (self.sibling(&venv, "new"), self.sibling(&venv, "old"), venv.join("tmp"));
        // Remove what an interrupted run left.
        for folder in [&fresh, &old, &tmp] {
            remove(folder)?;
        }
        check_space(&venv, self.needs_gib, self.name)?;
        std::fs::create_dir_all(&tmp).with_context(|| format!("cannot make {}", tmp.display()))?;
        say(format_args!(
            "Installing {} into {} ({})",
            self.name,
            venv.join(self.folder).display(),
            self.size
        ));
        pip.install(&repo.root.join(self.pins), &fresh, &tmp, lock)?;
        std::fs::write(fresh.join(STAMP), stamp(&self.read_pins(repo)?))
            .context("cannot write the stamp")?;
        let place = venv.join(self.folder);
        if place.exists() {
            std::fs::rename(&place, &old).context("cannot move the former install aside")?;
        }
        std::fs::rename(&fresh, &place).context("cannot move the install into place")?;
        remove(&old)?;
        remove(&tmp)
    }

    fn sibling(&self, venv: &Path, ending: &str) -> PathBuf {
        venv.join(format!("{}.{ending}", self.folder))
    }

    fn make_links(&self, venv: &Path) -> Result<()> {
        for (link, target) in self.links {
            let (place, fresh) = (venv.join(link), venv.join(format!("{link}.new")));
            let _ = std::fs::remove_file(&fresh);
            // Make the link under another name and move it, so that there is a working link at
            // every moment.
            symlink(target, &fresh).and_then(|()| std::fs::rename(&fresh, &place)).with_context(
                || {
                    format!(
                        "cannot make the link {}; if something else is there, remove it",
                        place.display()
                    )
                },
            )?;
        }
        Ok(())
    }
}

/// The pins without their comments, so that editing a comment downloads nothing.
fn stamp(pins: &str) -> String {
    let lines = pins.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let mut text: String =
        lines.filter(|line| !line.is_empty()).flat_map(|line| [line, "\n"]).collect();
    text.insert_str(0, "tch-extension 1\n");
    text
}

/// Lets only one set-up run at a time. The lock is released when the last process that has the file
/// open ends, even if it is killed.
fn lock(venv: &Path) -> Result<File> {
    let path = venv.join(".lock");
    let file = File::options().create(true).read(true).append(true).open(&path);
    let file = file.with_context(|| format!("cannot write in {}", venv.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            say("note: another set-up is running in this checkout; waiting for it");
            file.lock().context("cannot wait for the other set-up")?;
        }
        // Some network file systems have no locks. A user who runs one command at a time needs
        // none.
        Err(TryLockError::Error(_)) => {}
    }
    Ok(file)
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn check_space(folder: &Path, needs: f64, name: &str) -> Result<()> {
    match programs::free_gib(folder) {
        Some(free) if free < needs => Err(not_enough_space(folder, free, needs, name)),
        _ => Ok(()),
    }
}

fn not_enough_space(folder: &Path, free: f64, needs: f64, name: &str) -> anyhow::Error {
    trouble(
        format_args!(
            "installing {name} takes {needs} GiB, and {free:.1} GiB are free in {}",
            folder.display()
        ),
        "free some space, make `.venv` a link to a folder on a larger disk, or set \
         LIBTORCH=/path/to/libtorch",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stamp_holds_pins_and_no_comments() {
        let one = stamp("# why\ntorch==1\n\nnvcc==2 # because\n");
        assert_eq!(one, stamp("torch==1\nnvcc==2\n# other words\n"));
        assert_ne!(one, stamp("torch==1\nnvcc==3\n"));
        assert!(!one.contains("why"));
    }

    #[test]
    fn a_key_file_is_found_without_its_link() {
        let repo = Repo { root: PathBuf::from("/repo") };
        let direct = |file| LIBTORCH.resolved(&repo, file);
        assert_eq!(direct("cuda/bin/nvcc"), PathBuf::from("/repo/.venv/site/nvidia/cu13/bin/nvcc"));
        assert_eq!(direct("libtorch/lib/x"), PathBuf::from("/repo/.venv/site/torch/lib/x"));
        assert_eq!(direct("cudaother/x"), PathBuf::from("/repo/.venv/cudaother/x"));
    }

    #[test]
    fn a_full_disk_is_named_with_both_numbers() {
        let message = not_enough_space(Path::new("/repo"), 3.25, 10.0, "libtorch").to_string();
        assert!(message.contains("10 GiB") && message.contains("3.2 GiB"), "{message}");
        assert!(message.contains("way out"), "{message}");
    }
}
