//! `metadata.json` of a build variant: what the builder of kernels says about it.

use super::variants::Version;
use serde_json::Value;
use sha2::{Digest, Sha256, Sha512};
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path};

pub(super) const FILE: &str = "metadata.json";

/// The largest file that is read, in bytes. Real ones have a few thousand.
const LARGEST: u64 = 1 << 20;

pub(super) struct Metadata(Value);

impl Metadata {
    /// Reads the file of a variant for `backend`, `cpu` or `cuda`.
    pub fn read(folder: &Path, backend: &str) -> Result<Metadata, String> {
        let named = |reason: String| format!("{FILE}: {reason}");
        let mut bytes = Vec::new();
        let file = open(&folder.join(FILE)).map_err(named)?;
        file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| named(error.to_string()))?;
        if bytes.len() as u64 > LARGEST {
            return Err(named(format!("it is larger than {LARGEST} bytes")));
        }
        let json = serde_json::from_slice(&bytes).map_err(|error| named(error.to_string()))?;
        let metadata = Metadata(json);
        let id = metadata.id();
        let is_letter = |byte: u8| byte == b'_' || byte.is_ascii_alphabetic();
        let is_name = id.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit());
        if !is_name || !id.bytes().next().is_some_and(is_letter) {
            return Err(metadata.wrong("id", "a name of letters, digits and _"));
        }
        if metadata.field("version").as_u64().is_none() {
            return Err(metadata.wrong("version", "a natural number"));
        }
        if metadata.field("backend.type") != backend {
            return Err(metadata.wrong("backend.type", backend));
        }
        Ok(metadata)
    }

    pub fn id(&self) -> &str {
        self.field("id").as_str().unwrap_or_default()
    }

    pub fn version(&self) -> u64 {
        self.field("version").as_u64().unwrap_or_default()
    }

    /// Compares the files with their digests, if there are any. They must include that of `library`.
    pub fn check_files(&self, folder: &Path, library: &str) -> Result<(), String> {
        if self.field("digest").is_null() {
            return Ok(());
        }
        let hash = match self.field("digest.algorithm").as_str() {
            Some("sha256") => hash::<Sha256>,
            Some("sha512") => hash::<Sha512>,
            _ => return Err(self.wrong("digest.algorithm", "sha256 or sha512")),
        };
        let files = self.field("digest.files").as_object();
        let files = files.filter(|files| files.contains_key(library));
        let files = files
            .ok_or_else(|| self.wrong("digest.files", &format!("files, {library} among them")))?;
        for (name, digest) in files {
            let is_inside = |part: Component<'_>| matches!(part, Component::Normal(_));
            if name.is_empty() || !Path::new(name).components().all(is_inside) {
                return Err(format!("{FILE}: digest.files: {name:?} is outside of its folder"));
            }
            let found = hash(&folder.join(name)).map_err(|error| format!("{name}: {error}"))?;
            if *digest != found {
                return Err(format!(
                    "{name}: its digest is {found}, and {FILE} says {}: it is damaged or was \
                     changed, so fetch it again",
                    shortened(digest)
                ));
            }
        }
        Ok(())
    }

    /// Refuses a variant that a GPU of this compute capability cannot run, as far as it is known.
    pub fn check_capability(&self, capability: Version) -> Result<(), String> {
        let archs = match self.field("backend.archs") {
            Value::Null => return Ok(()),
            Value::Array(archs) => archs.iter().map(Value::as_str).collect(),
            _ => None,
        };
        let archs: Vec<&str> =
            archs.ok_or_else(|| self.wrong("backend.archs", "a list of texts"))?;
        let known: Vec<bool> = archs.iter().filter_map(|arch| runs(arch, capability)).collect();
        if known.is_empty() || known.contains(&true) {
            return Ok(());
        }
        let (major, minor) = capability;
        let archs = archs.join(", ");
        Err(format!("it is for compute capability {archs}, and this GPU has {major}.{minor}"))
    }

    /// The value at a path such as `backend.type`; null if there is none.
    fn field(&self, path: &str) -> &Value {
        path.split('.').fold(&self.0, |value, key| &value[key])
    }

    fn wrong(&self, path: &str, expected: &str) -> String {
        let found = match self.field(path) {
            Value::Null => "nothing".to_string(),
            value => shortened(value),
        };
        format!("{FILE}: {path}: expected {expected}, got {found}")
    }
}

/// Whether code for `arch`, such as `9.0a` or `8.0+PTX`, runs on a GPU of this compute capability.
/// `None` if `arch` cannot be read.
fn runs(arch: &str, (major, minor): Version) -> Option<bool> {
    let (number, has_ptx) = match arch.strip_suffix("+PTX") {
        Some(number) => (number, true),
        None => (arch, false),
    };
    let (first, second) = number.split_once('.')?;
    let digits = second.trim_end_matches(['a', 'f']);
    let built = (first.parse().ok()?, digits.parse().ok()?);
    Some(match &second[digits.len()..] {
        "a" => (major, minor) == built,
        "" if has_ptx => (major, minor) >= built,
        "" | "f" => major == built.0 && minor >= built.1,
        _ => return None,
    })
}

/// Opens a regular file. Opening anything else, such as a pipe, might wait for ever.
fn open(path: &Path) -> Result<File, String> {
    let is_file = path.metadata().map_err(|error| error.to_string())?.is_file();
    if !is_file {
        return Err("it is not a regular file".to_string());
    }
    File::open(path).map_err(|error| error.to_string())
}

fn hash<D: Digest>(path: &Path) -> Result<String, String> {
    let (mut file, mut hasher, mut buffer) = (open(path)?, D::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer).map_err(|error| error.to_string())? {
            0 => return Ok(base64(&hasher.finalize())),
            len => hasher.update(&buffer[..len]),
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let quads = bytes.chunks(3).flat_map(|chunk| {
        let byte = |index: usize| usize::from(chunk.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        (0..4).map(move |place| match place <= chunk.len() {
            true => char::from(LETTERS[bits >> (18 - 6 * place) & 63]),
            false => '=',
        })
    });
    quads.collect()
}

/// A value as JSON, cut if it is long.
fn shortened(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_for_other_gpus_is_refused() {
        let check = |archs: Value| {
            let json = serde_json::json!({ "backend": { "type": "cuda", "archs": archs } });
            Metadata(json).check_capability((9, 0))
        };
        for archs in [Value::Null, [""; 0].into(), ["8.0", "9.0a"].into(), ["new"].into()] {
            assert_eq!(check(archs.clone()), Ok(()), "{archs}");
        }
        let refused = check(["8.0", "10.0a", "new"].into()).unwrap_err();
        assert_eq!(refused, "it is for compute capability 8.0, 10.0a, new, and this GPU has 9.0");
        for archs in [Value::from(9.0), [9].into(), "9.0".into()] {
            let refused = check(archs).unwrap_err();
            assert!(refused.contains("backend.archs: expected a list of texts"), "{refused}");
        }
    }

    #[test]
    fn base64_is_that_of_its_specification() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }

    #[test]
    fn code_runs_on_gpus_as_the_python_package_says() {
        for (arch, capability, expected) in [
            ("8.0", (8, 6), Some(true)),
            ("8.0", (9, 0), Some(false)),
            ("8.6", (8, 0), Some(false)),
            ("8.0+PTX", (9, 0), Some(true)),
            ("9.0+PTX", (8, 9), Some(false)),
            ("9.0a", (9, 0), Some(true)),
            ("10.0a", (10, 3), Some(false)),
            ("10.0f", (10, 3), Some(true)),
            ("12.0f", (10, 3), Some(false)),
            ("9.0a+PTX", (10, 0), Some(false)),
            ("10.0f+PTX", (11, 0), Some(false)),
            ("sm_90", (9, 0), None),
            ("9.0x", (9, 0), None),
            ("9", (9, 0), None),
            ("99999999999.0", (9, 0), None),
        ] {
            assert_eq!(runs(arch, capability), expected, "{arch} on {capability:?}");
        }
    }
}
