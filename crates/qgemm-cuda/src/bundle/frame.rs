//! Zstandard frames of bundles: where they are, how long their contents may be, and how they are unpacked, by a decoder in
//! Rust, so that programs need no C.

use std::fmt;
use std::path::Path;

use ruzstd::decoding::{Dictionary, FrameDecoder};

use super::error::BundleError;
use crate::binary::Reader;
#[cfg(any(test, feature = "write-bundles"))]
use crate::binary::Writer;
use crate::hash::Sha256Hash;

/// A frame of an open bundle.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// Where it begins: in the file, in its header counted from the end of that.
    pub offset: u64,
    /// Its length.
    pub stored: u64,
    /// Hash of its bytes.
    pub hash: Sha256Hash,
    /// Length of its contents.
    pub len: u64,
}

impl Frame {
    /// Reads the header's fields; `first` is where frames begin.
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

/// What a frame holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Dictionary,
    Kernels,
}

impl Part {
    /// The most bytes that its contents may have: a header is no reason to allocate more.
    pub(super) fn limit(self) -> u64 {
        match self {
            Self::Dictionary => 2 << 20,
            Self::Kernels => 16 << 20,
        }
    }

    /// What messages call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Dictionary => "the dictionary",
            Self::Kernels => "kernels",
        }
    }

    /// Refuses contents of more than [`Part::limit`] bytes in the bundle `path`.
    pub(super) fn check(self, len: u64, path: &Path) -> Result<(), BundleError> {
        let limit = self.limit();
        if len > limit {
            return Err(BundleError::TooLarge { path: path.to_path_buf(), part: self.name(), limit, got: len });
        }
        Ok(())
    }
}

/// Unpacks frames with the dictionary that they share.
pub(super) struct Unpacker(FrameDecoder);

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}

impl Unpacker {
    /// From the frame of the dictionary, whose contents have `len` bytes; none when it has 0. `None` when it is damaged.
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

    /// The `len` bytes that the frame holds, a length that [`Part::check`] has seen. `None` when it is damaged.
    pub(super) fn unpack(&mut self, frame: &[u8], len: u64) -> Option<Vec<u8>> {
        let mut contents = vec![0; usize::try_from(len).ok()?];
        let got = self.0.decode_all(frame, &mut contents).ok()?;
        (got == contents.len()).then_some(contents)
    }
}
