//! Prefix of a bundle. The library and its build script share this file.

/// Bundles to embed with the feature `embed-kernels`: folders and
/// files, separated as in `PATH`.
pub const EMBED_VARIABLE: &str = "QGEMM_EMBED_KERNELS";
/// Extension of bundle files.
pub const EXTENSION: &str = "qgk";

/// Format version that this library reads and writes.
pub const FORMAT_VERSION: u32 = 5;
/// Bytes before the header.
pub const PREFIX_BYTES: usize = 24;
/// Magic number: the first bytes of a bundle.
pub const MAGIC: &[u8; 8] = b"QGBUNDLE";

/// Prefix of a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Format version.
    pub version: u32,
    /// Length of the header in bytes. The hash of the header follows it.
    pub header: u32,
    /// Length of the frames in bytes, up to the end of the file.
    pub frames: u64,
}

impl Prefix {
    /// Parses a prefix. `None` for other files.
    pub fn parse(bytes: &[u8; PREFIX_BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_at(MAGIC.len());
        let (version, rest) = rest.split_at(4);
        let (header, frames) = rest.split_at(4);
        (magic == MAGIC).then_some(Self {
            version: u32::from_le_bytes(version.try_into().ok()?),
            header: u32::from_le_bytes(header.try_into().ok()?),
            frames: u64::from_le_bytes(frames.try_into().ok()?),
        })
    }

    /// Length of the bundle.
    pub fn file_bytes(self) -> u64 {
        (PREFIX_BYTES as u64 + u64::from(self.header) + 32).saturating_add(self.frames)
    }
}
