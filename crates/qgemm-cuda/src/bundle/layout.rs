//! What a bundle begins with: shared by the library and by its build script, which checks the bundles that it embeds.

/// Names folders and files of bundles to embed, separated as in `PATH`, when the feature `embed-kernels` is built.
pub const EMBED_VARIABLE: &str = "QGEMM_EMBED_KERNELS";
/// Extension of bundle files.
pub const EXTENSION: &str = "qgk";

/// The version of the format that this library reads and writes.
pub const FORMAT_VERSION: u32 = 5;
/// Bytes before the header.
pub const PREFIX_BYTES: usize = 24;
/// The first bytes of a bundle.
pub const MAGIC: &[u8; 8] = b"QGBUNDLE";

/// What a bundle begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Version of the format.
    pub version: u32,
    /// Bytes of the header, which the hash of the header follows.
    pub header: u32,
    /// Bytes of the frames, to the file's end.
    pub frames: u64,
}

impl Prefix {
    /// Reads `bytes`; `None` when they do not begin a bundle.
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
