//! Kernel bundles: files of precompiled kernels, for machines without a compiler.
//! `cargo xtask build-kernels` writes one file per target. They are read as files,
//! or embedded in the program.
//!
//! ```text
//! magic | format version | header length | length of the frames | header | hash of the header | frames
//! header = source hash | NVRTC version | target | dictionary | count | frames | count | entries
//! entry  = half the kernel's hash | name | target | resources | number of its frame | offset and length in there | check
//! check  = half of a hash of the kernel's hash, target, NVRTC version, resources and image
//! dictionary, frame = offset | stored length | hash of the stored bytes | length
//! ```
//!
//! A Zstandard frame has a few similar kernels, so loading one decompresses few
//! others. The last decompressed frame is cached, because a plan's kernels are often
//! neighbours. Kernels of a chip have most text in common. One dictionary, stored in
//! a frame of its own, therefore serves all frames. It is decompressed for the first
//! kernel. PTX is transformed before compression (`registers.rs`).
//!
//! Hashes of frames detect damage. The check of an entry binds an image to its kernel:
//! even a forged header with a correct hash cannot give a kernel the image of another.

mod embedded;
mod error;
mod frame;
mod layout;
mod registers;
mod set;
#[cfg(any(test, feature = "write-bundles"))]
mod write;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::artifact::{Artifact, Resources};
use crate::binary::{Reader, Writer};
use crate::hash::{Hasher, Sha256Hash};
use crate::source;
use crate::spec::KernelSpec;
use crate::target::Target;

pub use error::BundleError;
pub use layout::{EMBED_VARIABLE, EXTENSION};
pub use set::BUNDLES_VARIABLE;
pub(crate) use set::{Bundles, files};

use frame::{Frame, Part, Unpacker};
use layout::{FORMAT_VERSION, PREFIX_BYTES, Prefix};

/// Kernel in an open bundle.
#[derive(Clone, Debug)]
struct Entry {
    /// First half of the kernel's hash.
    key: Half,
    target: Target,
    resources: Option<Resources>,
    /// Index of its frame.
    frame: usize,
    /// Range within the frame.
    span: Range<usize>,
    check: Half,
}

/// First half of a hash, enough to find and to compare.
type Half = [u8; 16];

fn half(hash: Sha256Hash) -> Half {
    std::array::from_fn(|i| hash.0[i])
}

/// Check that binds `artifact` to the kernel with hash `key`.
fn check(key: Sha256Hash, artifact: &Artifact) -> Half {
    let mut resources = Writer::default();
    resources.u32(u32::from(artifact.resources.is_some()));
    artifact.resources.unwrap_or_default().write(&mut resources);
    let mut hasher = Hasher::new();
    let (target, nvrtc) = (artifact.target.to_string(), artifact.nvrtc.as_bytes());
    [&key.0[..], target.as_bytes(), nvrtc, &resources.bytes, &artifact.image]
        .iter()
        .for_each(|field| hasher.field(field));
    half(hasher.finish())
}

/// Location of a bundle's bytes.
#[derive(Clone, Copy, Debug)]
enum Location {
    /// File at the bundle's path.
    File,
    /// Embedded in the program.
    Program(&'static [u8]),
}

/// Open bundle. Images are read on demand.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    place: Location,
    target: Target,
    nvrtc: String,
    /// Dictionary. Empty if the kernels have none.
    dictionary: Frame,
    frames: Vec<Frame>,
    entries: Vec<Entry>,
    /// Created for the first kernel. Absent during decompression, so that a
    /// failed decoder is not reused.
    unpacked: Mutex<Option<Unpacked>>,
}

/// Decoder, and the last decompressed frame.
#[derive(Debug)]
struct Unpacked {
    unpacker: Unpacker,
    frame: usize,
    contents: Vec<u8>,
}

impl Bundle {
    /// Opens a bundle and checks its index.
    ///
    /// # Errors
    /// A [`BundleError`].
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let io = |error| BundleError::Io { path: path.to_path_buf(), error };
        // Opening a pipe would wait for its other end.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(BundleError::Damaged { path: path.to_path_buf(), what: "not a regular file".into() });
        }
        let file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        Self::index(path, Location::File, file, len)
    }

    /// Embedded bundles of the feature `embed-kernels`. None without it.
    ///
    /// # Errors
    /// A [`BundleError`].
    pub fn embedded() -> Result<Vec<Self>, BundleError> {
        embedded::BUNDLES.iter().map(|(name, bytes)| Self::of_program(name, bytes)).collect()
    }

    /// Bundle in the bytes `bytes`, called `name` in messages.
    fn of_program(name: &str, bytes: &'static [u8]) -> Result<Self, BundleError> {
        Self::index(Path::new(&format!("embedded {name}")), Location::Program(bytes), bytes, bytes.len() as u64)
    }

    /// Reads the index of a bundle. `contents` yields its `file_len` bytes.
    fn index(path: &Path, place: Location, mut contents: impl Read, file_len: u64) -> Result<Self, BundleError> {
        let io = |error| BundleError::Io { path: path.to_path_buf(), error };
        let damaged = |what: &str| BundleError::Damaged { path: path.to_path_buf(), what: what.into() };
        let mut prefix = [0u8; PREFIX_BYTES];
        contents.read_exact(&mut prefix).map_err(|_| damaged("shorter than a bundle's first bytes"))?;
        let prefix = Prefix::parse(&prefix).ok_or_else(|| damaged("not a kernel bundle"))?;
        if prefix.version != FORMAT_VERSION {
            let (path, got) = (path.to_path_buf(), prefix.version);
            return Err(BundleError::OtherVersion { path, expected: FORMAT_VERSION, got });
        }
        if prefix.file_bytes() != file_len {
            return Err(damaged("cut off, or longer than it says"));
        }
        let len = prefix.header as usize;
        let mut header = Vec::new();
        contents.take(len as u64 + 32).read_to_end(&mut header).map_err(io)?;
        if header.len() != len + 32 {
            return Err(damaged("ends within its header"));
        }
        let (header, checksum) = header.split_at(len);
        if Sha256Hash::of(header).0 != checksum {
            return Err(damaged("wrong checksum of its header"));
        }
        let (sources, bundle) = Self::parse(path, place, header).ok_or_else(|| damaged("header does not parse"))?;
        let expected = source::source_hash();
        if sources != expected {
            return Err(BundleError::OtherSources { path: path.to_path_buf(), expected, got: sources });
        }
        Ok(bundle)
    }

    fn parse(path: &Path, place: Location, header: &[u8]) -> Option<(Sha256Hash, Self)> {
        let frames = (PREFIX_BYTES + header.len() + 32) as u64;
        let mut reader = Reader(header);
        let sources = reader.hash()?;
        let nvrtc = reader.text()?.to_owned();
        let target = reader.text()?.parse().ok()?;
        let dictionary = Frame::read(&mut reader, frames)?;
        let count = reader.u32()?;
        let mut kernels = Vec::new();
        for _ in 0..count {
            kernels.push(Frame::read(&mut reader, frames)?);
        }
        let count = reader.u32()?;
        let mut entries = Vec::new();
        for _ in 0..count {
            let key = reader.take(size_of::<Half>())?.try_into().ok()?;
            reader.text()?;
            let target = reader.text()?.parse().ok()?;
            let has_resources = reader.u32()? != 0;
            let resources = Some(Resources::read(&mut reader)?).filter(|_| has_resources);
            let frame = reader.u32()? as usize;
            let (offset, len) = (reader.u64()?, reader.u64()?);
            let end =
                offset.checked_add(len).filter(|&end| kernels.get(frame).is_some_and(|frame| end <= frame.len))?;
            let span = usize::try_from(offset).ok()?..usize::try_from(end).ok()?;
            let check = reader.take(size_of::<Half>())?.try_into().ok()?;
            entries.push(Entry { key, target, resources, frame, span, check });
        }
        let path = path.to_path_buf();
        let (frames, unpacked) = (kernels, Mutex::default());
        Some((sources, Self { path, place, target, nvrtc, dictionary, frames, entries, unpacked }))
    }

    /// Its file, or the name of an embedded bundle.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Target of the bundle.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Number of kernels.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has no kernels.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Reads the kernel `spec` in a form that runs on `chip`. `None`
    /// when the bundle has none.
    ///
    /// # Errors
    /// A [`BundleError`] when the image cannot be read or was changed.
    pub fn read(&self, spec: &KernelSpec, chip: u32) -> Result<Option<Artifact>, BundleError> {
        let key = spec.key();
        let Some(entry) = self.entries.iter().find(|e| e.key == half(key) && e.target.runs_on(chip)) else {
            return Ok(None);
        };
        let contents = self.contents(entry)?;
        let image = match entry.target.is_ptx() {
            true => registers::unpack(&contents).ok_or_else(|| self.does_not_unpack(Part::Kernels))?,
            false => contents,
        };
        let (target, nvrtc, resources) = (entry.target, self.nvrtc.clone(), entry.resources);
        let artifact = Artifact { target, nvrtc, resources, image };
        if check(key, &artifact) != entry.check {
            let what = format!("an image that is not that of kernel {}", spec.name);
            return Err(BundleError::Damaged { path: self.path.clone(), what });
        }
        Ok(Some(artifact))
    }

    /// Decompressed bytes of `entry`.
    fn contents(&self, entry: &Entry) -> Result<Vec<u8>, BundleError> {
        let mut kept = self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
        let unpacked = match kept.take_if(|unpacked| unpacked.frame == entry.frame) {
            Some(unpacked) => unpacked,
            None => {
                let frame = &self.frames[entry.frame];
                let stored = self.stored(frame, Part::Kernels)?;
                let mut unpacker = match kept.take() {
                    Some(unpacked) => unpacked.unpacker,
                    None => self.unpacker()?,
                };
                let contents = unpacker.unpack(&stored, frame.len);
                let contents = contents.ok_or_else(|| self.does_not_unpack(Part::Kernels))?;
                Unpacked { unpacker, frame: entry.frame, contents }
            }
        };
        let own = unpacked.contents[entry.span.clone()].to_vec();
        *kept = Some(unpacked);
        Ok(own)
    }

    /// Decoder of this bundle.
    fn unpacker(&self) -> Result<Unpacker, BundleError> {
        let stored = self.stored(&self.dictionary, Part::Dictionary)?;
        let unpacker = Unpacker::new(&stored, self.dictionary.len);
        unpacker.ok_or_else(|| self.does_not_unpack(Part::Dictionary))
    }

    fn does_not_unpack(&self, part: Part) -> BundleError {
        BundleError::Damaged { path: self.path.clone(), what: format!("{} that does not unpack", part.name()) }
    }

    /// Stored bytes of `frame`, with verified hash and size limit.
    fn stored(&self, frame: &Frame, part: Part) -> Result<Vec<u8>, BundleError> {
        part.check(frame.len, &self.path)?;
        let stored = self.stored_bytes(frame).map_err(|error| BundleError::Io { path: self.path.clone(), error })?;
        if stored.len() as u64 != frame.stored || Sha256Hash::of(&stored) != frame.hash {
            let what = format!("wrong checksum of {}", part.name());
            return Err(BundleError::Damaged { path: self.path.clone(), what });
        }
        Ok(stored)
    }

    /// Stored bytes of `frame`. Fewer when the bundle is truncated.
    fn stored_bytes(&self, frame: &Frame) -> io::Result<Vec<u8>> {
        let mut stored = Vec::new();
        match self.place {
            Location::File => {
                let mut file = File::open(&self.path)?;
                file.seek(SeekFrom::Start(frame.offset))?;
                file.take(frame.stored).read_to_end(&mut stored)?;
            }
            Location::Program(bytes) => {
                let from = usize::try_from(frame.offset).unwrap_or(usize::MAX).min(bytes.len());
                bytes[from..].take(frame.stored).read_to_end(&mut stored)?;
            }
        }
        Ok(stored)
    }
}

#[cfg(test)]
mod tests;
