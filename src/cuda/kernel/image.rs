//! What an image is, and whether all of it is there.

/// The images that CUDA loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Image {
    /// Machine code for a compute capability, such as 90.
    Cubin(u32),
    /// Images for several architectures.
    Fatbin,
    /// Assembly text, which the driver compiles.
    Ptx,
}

const ELF: [u8; 4] = *b"\x7fELF";
/// `EM_CUDA`.
const MACHINE: u64 = 190;
const FATBIN: u64 = 0xba55_ed50;
/// The first version of the ELF ABI that has the architecture in bits 8 to 15 of the flags. Earlier
/// ones have it in bits 0 to 7.
const WIDE_FLAGS: u64 = 8;

impl Image {
    /// Recognises an image. CUDA gets its address without its size, so a file that was cut off is
    /// refused here: CUDA would read beyond its end.
    pub(super) fn of(bytes: &[u8]) -> Result<Self, String> {
        if bytes.starts_with(&ELF) {
            return cubin(bytes).ok_or_else(|| {
                "the image is an ELF file, but no cubin, or it was cut off".to_string()
            });
        }
        if number(bytes, 0, 4) == Some(FATBIN) {
            return fatbin(bytes).ok_or_else(|| "the image is a fatbin that was cut off".into());
        }
        if std::str::from_utf8(bytes).is_ok_and(|text| text.contains(".version")) {
            return Ok(Image::Ptx);
        }
        let start = &bytes[..bytes.len().min(4)];
        Err(format!(
            "the image is neither a cubin nor a fatbin nor PTX: {} bytes that begin with {start:02x?}",
            bytes.len()
        ))
    }
}

impl std::fmt::Display for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Image::Cubin(arch) => write!(f, "a cubin for sm_{arch}"),
            Image::Fatbin => f.write_str("a fatbin"),
            Image::Ptx => f.write_str("PTX"),
        }
    }
}

/// The little-endian number of `size` bytes at an offset.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Whether `size` bytes at `at` are inside the image.
fn has(bytes: &[u8], at: u64, size: u64) -> bool {
    at.checked_add(size).is_some_and(|end| end <= bytes.len() as u64)
}

/// A 64-bit ELF file for CUDA whose headers and sections are inside the image.
fn cubin(bytes: &[u8]) -> Option<Image> {
    /// Of a section that has no bytes in the file.
    const NOBITS: u64 = 8;
    let field = |at, size| number(bytes, at, size);
    if field(4, 2)? != 0x0102 || field(18, 2)? != MACHINE {
        return None;
    }
    let (programs, program_size, program_count) = (field(32, 8)?, field(54, 2)?, field(56, 2)?);
    let (sections, section_size, section_count) = (field(40, 8)?, field(58, 2)?, field(60, 2)?);
    if !has(bytes, programs, program_size * program_count)
        || !has(bytes, sections, section_size * section_count)
        || (section_count > 0 && section_size < 64)
    {
        return None;
    }
    for section in 0..section_count {
        let at = usize::try_from(sections + section * section_size).ok()?;
        let (kind, start, size) = (field(at + 4, 4)?, field(at + 24, 8)?, field(at + 32, 8)?);
        if kind != NOBITS && !has(bytes, start, size) {
            return None;
        }
    }
    let flags = field(48, 4)?;
    let shift = if field(8, 1)? >= WIDE_FLAGS { 8 } else { 0 };
    Some(Image::Cubin((flags >> shift & 0xff) as u32))
}

/// A fatbin whose header's extent is inside the image.
fn fatbin(bytes: &[u8]) -> Option<Image> {
    let (header, rest) = (number(bytes, 6, 2)?, number(bytes, 8, 8)?);
    has(bytes, header, rest).then_some(Image::Fatbin)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of `tests/cuda/images`.
    fn image(name: &str) -> Vec<u8> {
        // Set by cargo, and by the bundle's script where there is no cargo.
        let root = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), std::path::PathBuf::from);
        let path = root.join("tests/cuda/images").join(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    const IMAGES: [(&str, Image); 3] = [
        ("add_sm_75.cubin", Image::Cubin(75)),
        ("add_sm_90a.cubin", Image::Cubin(90)),
        ("add.fatbin", Image::Fatbin),
    ];

    #[test]
    fn images_are_recognised() {
        for (name, expected) in IMAGES {
            assert_eq!(Image::of(&image(name)), Ok(expected), "{name}");
        }
        assert_eq!(Image::of(b"// text\n.version 7.0\n.target sm_75\n"), Ok(Image::Ptx));
    }

    #[test]
    fn an_image_that_was_cut_off_is_refused() {
        // Its last bytes may be alignment, which nothing refers to.
        for image in IMAGES.map(|(name, _)| image(name)) {
            for kept in (0..image.len() - 16).step_by(7) {
                assert!(Image::of(&image[..kept]).is_err(), "{kept} of {} bytes", image.len());
            }
        }
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let program = std::fs::read("/proc/self/exe").expect("this test");
        assert!(Image::of(&program).is_err(), "an ELF file for the CPU");
        for bytes in [&b""[..], b"\0", b"\x7fEL", b"hello", b"\xff .version 7.0"] {
            assert!(Image::of(bytes).is_err(), "{bytes:?}");
        }
        // Offsets near the largest number do not wrap around.
        let mut image = image("add_sm_90a.cubin");
        image[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Image::of(&image).is_err());
    }
}
