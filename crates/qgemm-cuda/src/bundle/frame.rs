//! Zstandard frames of bundles: position, size limits and decompression. The decoder is
//! in Rust, so that programs need no C.

use std::fmt;
use std::path::Path;

use ruzstd::decoding::{Dictionary, FrameDecoder};

use super::error::BundleError;
use crate::binary::Reader;
#[cfg(any(test, feature = "write-bundles"))]
use crate::binary::Writer;
use crate::hash::Sha256Hash;

/// Frame of an open bundle.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// Offset in the file. In the header, it counts from the end of the header.
    pub offset: u64,
    /// Stored length.
    pub stored: u64,
    /// Hash of the stored bytes.
    pub hash: Sha256Hash,
    /// Decompressed length.
    pub len: u64,
}

impl Frame {
    /// Parses the fields of a frame. Frames begin at `first`.
    pub(super) fn read(reader: &mut Reader<'_>, first: u64) -> Option<Self> {
        let offset = first.checked_add(reader.u64()?)?;
        Some(Self { offset, stored: reader.u64()?, hash: reader.hash()?, len: reader.u64()? })
    }

    #[cfg(any(test, feature = "write-bundles"))]
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.u64(self.offset);
        writer.u64(self.stored);
        writer.hash(self.hash);
        writer.u64(self.len);
    }
}

/// Kind of a frame's contents.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Dictionary,
    Kernels,
}

impl Part {
    /// Limit of the decompressed length, which bounds allocations by a forged header.
    pub(super) fn limit(self) -> u64 {
        match self {
            Self::Dictionary => 2 << 20,
            Self::Kernels => 16 << 20,
        }
    }

    /// Name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Dictionary => "the dictionary",
            Self::Kernels => "kernels",
        }
    }

    /// Refuses contents beyond [`Part::limit`] in the bundle `path`.
    pub(super) fn check(self, len: u64, path: &Path) -> Result<(), BundleError> {
        let limit = self.limit();
        if len > limit {
            return Err(BundleError::TooLarge { path: path.to_path_buf(), part: self.name(), limit, got: len });
        }
        Ok(())
    }
}

/// Decoder with the common dictionary.
pub(super) struct Unpacker(FrameDecoder);

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}

impl Unpacker {
    /// Decoder with the dictionary in a frame, `len` bytes decompressed. No dictionary if
    /// `len` is 0. `None` when damaged.
    pub(super) fn new(dictionary: &[u8], len: u64) -> Option<Self> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(Part::Kernels.limit());
        let mut unpacker = Self(decoder);
        if len > 0 {
            let dictionary = unpacker.unpack(dictionary, len)?;
            unpacker.0.add_dict(Dictionary::decode_dict(&dictionary).ok()?).ok()?;
        }
        Some(unpacker)
    }

    /// Decompresses a frame to `len` bytes, which [`Part::check`] has
    /// bounded. `None` when damaged.
    pub(super) fn unpack(&mut self, frame: &[u8], len: u64) -> Option<Vec<u8>> {
        let mut contents = vec![0; usize::try_from(len).ok()?];
        let got = self.0.decode_all(frame, &mut contents).ok()?;
        (got == contents.len()).then_some(contents)
    }
}
