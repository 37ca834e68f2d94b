//! Bundles: files of kernels compiled ahead, for machines without a compiler. One file a target, written by
//! `cargo xtask build-kernels`, read where it lies or embedded in the program.
//!
//! ```text
//! magic | format version | header length | length of the images | header | hash of the header | images
//! header = source hash | NVRTC version | target | count | entries
//! entry  = kernel hash | name | target | resources | offset | stored length | hash of the stored bytes | length
//! ```
//!
//! Each image is compressed on its own (DEFLATE), so that loading one kernel reads and unpacks that one.

mod embedded;
mod layout;
mod set;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use miniz_oxide::{deflate, inflate};

use crate::artifact::{Artifact, Resources};
use crate::binary::{Reader, Writer};
use crate::hash::Sha256Hash;
use crate::replace;
use crate::source;
use crate::spec::KernelSpec;
use crate::target::Target;

pub use layout::{EMBED_VARIABLE, EXTENSION};
pub use set::BUNDLES_VARIABLE;
pub(crate) use set::Bundles;

use layout::{FORMAT_VERSION, MAGIC, PREFIX_BYTES, Prefix};

/// Compression levels above this one save 1 % and take three times as long.
const COMPRESSION_LEVEL: u8 = 6;

/// Why a bundle is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// The file is no bundle, is cut off, or was changed.
    #[error("{}: damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// The file was written by another version of this library, in another format.
    #[error("{}: of version {got} of the bundle format, this library reads {expected}: build it again", path.display())]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// The version that this library reads.
        expected: u32,
        /// The file's.
        got: u32,
    },
    /// The kernels were compiled from other sources than those of this library.
    #[error("{}: built from kernel sources {got}, this library has {expected}: build it again", path.display())]
    OtherSources {
        /// The file.
        path: PathBuf,
        /// Hash of this library's sources.
        expected: Sha256Hash,
        /// Hash of the bundle's.
        got: Sha256Hash,
    },
}

/// A kernel in an open bundle.
#[derive(Clone, Debug)]
struct Entry {
    key: Sha256Hash,
    target: Target,
    resources: Option<Resources>,
    offset: u64,
    stored: u64,
    hash: Sha256Hash,
    len: u64,
}

/// Where the bytes of a bundle are.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In the file of the bundle's path.
    File,
    /// In the program.
    Program(&'static [u8]),
}

/// An open bundle. Images are read when they are asked for.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    place: Place,
    target: Target,
    nvrtc: String,
    entries: Vec<Entry>,
}

impl Bundle {
    /// Writes the bundle of `target` to `path`, in one step: a failed or interrupted write leaves what was there
    /// before. Returns the file's length.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn write(
        path: &Path,
        target: Target,
        nvrtc: &str,
        kernels: &[(KernelSpec, Artifact)],
    ) -> Result<u64, BundleError> {
        let images: Vec<Vec<u8>> =
            kernels.iter().map(|(_, a)| deflate::compress_to_vec(&a.image, COMPRESSION_LEVEL)).collect();
        let mut header = Writer::default();
        header.hash(source::source_hash());
        header.text(nvrtc);
        header.text(&target.to_string());
        header.u32(kernels.len() as u32);
        let mut offset = 0u64;
        for ((spec, artifact), image) in kernels.iter().zip(&images) {
            header.hash(spec.key());
            header.text(&spec.name);
            header.text(&artifact.target.to_string());
            header.u32(u32::from(artifact.resources.is_some()));
            artifact.resources.unwrap_or_default().write(&mut header);
            header.u64(offset);
            header.u64(image.len() as u64);
            header.hash(Sha256Hash::of(image));
            header.u64(artifact.image.len() as u64);
            offset += image.len() as u64;
        }
        let mut head = Writer::default();
        head.bytes.extend_from_slice(MAGIC);
        head.u32(FORMAT_VERSION);
        head.u32(header.bytes.len() as u32);
        head.u64(offset);
        head.bytes.extend_from_slice(&header.bytes);
        head.hash(Sha256Hash::of(&header.bytes));
        replace::durably(path, |file| {
            file.write_all(&head.bytes)?;
            images.iter().try_for_each(|image| file.write_all(image))
        })
        .map_err(|error| BundleError::Io { path: path.to_path_buf(), error })?;
        Ok(head.bytes.len() as u64 + offset)
    }

    /// Opens a bundle and checks its index.
    ///
    /// # Errors
    /// A [`BundleError`].
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let io = |error| BundleError::Io { path: path.to_path_buf(), error };
        let file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        Self::index(path, Place::File, file, len)
    }

    /// The bundles that were embedded by the feature `embed-kernels`; none without it.
    ///
    /// # Errors
    /// A [`BundleError`].
    pub fn embedded() -> Result<Vec<Self>, BundleError> {
        embedded::BUNDLES.iter().map(|(name, bytes)| Self::of_program(name, bytes)).collect()
    }

    /// The bundle `bytes`, called `name` in messages.
    fn of_program(name: &str, bytes: &'static [u8]) -> Result<Self, BundleError> {
        Self::index(Path::new(&format!("embedded {name}")), Place::Program(bytes), bytes, bytes.len() as u64)
    }

    /// Reads the index of the bundle whose `file_len` bytes `contents` yields.
    fn index(path: &Path, place: Place, mut contents: impl Read, file_len: u64) -> Result<Self, BundleError> {
        let io = |error| BundleError::Io { path: path.to_path_buf(), error };
        let damaged = |what| BundleError::Damaged { path: path.to_path_buf(), what };
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

    fn parse(path: &Path, place: Place, header: &[u8]) -> Option<(Sha256Hash, Self)> {
        let images = (PREFIX_BYTES + header.len() + 32) as u64;
        let mut reader = Reader(header);
        let sources = reader.hash()?;
        let nvrtc = reader.text()?.to_owned();
        let target = reader.text()?.parse().ok()?;
        let count = reader.u32()?;
        let mut entries = Vec::new();
        for _ in 0..count {
            let key = reader.hash()?;
            reader.text()?;
            let target = reader.text()?.parse().ok()?;
            let has_resources = reader.u32()? != 0;
            let resources = Some(Resources::read(&mut reader)?).filter(|_| has_resources);
            let offset = images.checked_add(reader.u64()?)?;
            let (stored, hash, len) = (reader.u64()?, reader.hash()?, reader.u64()?);
            entries.push(Entry { key, target, resources, offset, stored, hash, len });
        }
        Some((sources, Self { path: path.to_path_buf(), place, target, nvrtc, entries }))
    }

    /// What the bundle was built for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// Number of kernels.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it holds no kernel.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The kernel `spec`, in a form that `chip` runs; `None` when the bundle has none.
    ///
    /// # Errors
    /// A [`BundleError`] when the image cannot be read or was changed.
    pub fn read(&self, spec: &KernelSpec, chip: u32) -> Result<Option<Artifact>, BundleError> {
        let key = spec.key();
        let Some(entry) = self.entries.iter().find(|e| e.key == key && e.target.runs_on(chip)) else {
            return Ok(None);
        };
        let damaged = |what| BundleError::Damaged { path: self.path.clone(), what };
        let stored = self.stored(entry).map_err(|error| BundleError::Io { path: self.path.clone(), error })?;
        if stored.len() as u64 != entry.stored || Sha256Hash::of(&stored) != entry.hash {
            return Err(damaged("wrong checksum of a kernel"));
        }
        let len = usize::try_from(entry.len).map_err(|_| damaged("length of a kernel"))?;
        let image = inflate::decompress_to_vec_with_limit(&stored, len)
            .ok()
            .filter(|image| image.len() == len)
            .ok_or_else(|| damaged("a kernel that does not unpack"))?;
        Ok(Some(Artifact { target: entry.target, nvrtc: self.nvrtc.clone(), resources: entry.resources, image }))
    }

    /// The stored bytes of `entry`; fewer where the bundle ends.
    fn stored(&self, entry: &Entry) -> io::Result<Vec<u8>> {
        let mut stored = Vec::new();
        match self.place {
            Place::File => {
                let mut file = File::open(&self.path)?;
                file.seek(SeekFrom::Start(entry.offset))?;
                file.take(entry.stored).read_to_end(&mut stored)?;
            }
            Place::Program(bytes) => {
                let from = usize::try_from(entry.offset).unwrap_or(usize::MAX).min(bytes.len());
                bytes[from..].take(entry.stored).read_to_end(&mut stored)?;
            }
        }
        Ok(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::tests::probe;

    pub(super) fn kernel(prelude: &str, target: &str) -> (KernelSpec, Artifact) {
        let artifact = Artifact {
            target: target.parse().unwrap(),
            nvrtc: "12.9".into(),
            resources: Some(Resources { registers: 32, ..Default::default() }),
            image: format!("{prelude} for {target}").repeat(20).into_bytes(),
        };
        (probe(prelude), artifact)
    }

    pub(super) fn write(folder: &Path, target: &str, kernels: &[(KernelSpec, Artifact)]) -> PathBuf {
        let path = folder.join(format!("{target}.{EXTENSION}"));
        let len = Bundle::write(&path, target.parse().unwrap(), "12.9", kernels).unwrap();
        assert_eq!(len, path.metadata().unwrap().len());
        path
    }

    #[test]
    fn kernels_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let kernels = [kernel("A", "sm_90"), kernel("B", "sm_90a")];
        let path = write(folder.path(), "sm_90", &kernels);
        let program: &[u8] = std::fs::read(&path).unwrap().leak();
        for bundle in [Bundle::open(&path).unwrap(), Bundle::of_program("sm_90.qgk", program).unwrap()] {
            assert_eq!((bundle.target().to_string().as_str(), bundle.len()), ("sm_90", 2));
            for (spec, artifact) in &kernels {
                assert_eq!(bundle.read(spec, 90).unwrap().as_ref(), Some(artifact));
            }
            assert_eq!(bundle.read(&probe("C"), 90).unwrap(), None);
            assert_eq!(bundle.read(&kernels[0].0, 80).unwrap(), None, "another chip");
        }
    }

    #[test]
    fn images_are_compressed() {
        let folder = tempfile::tempdir().unwrap();
        let (spec, artifact) = kernel("A", "sm_90");
        let big = Artifact { image: artifact.image.repeat(1000), ..artifact };
        let path = write(folder.path(), "sm_90", &[(spec.clone(), big.clone())]);
        assert!(path.metadata().unwrap().len() < big.image.len() as u64 / 20);
        assert_eq!(Bundle::open(&path).unwrap().read(&spec, 90).unwrap(), Some(big));
    }

    #[test]
    fn a_bundle_of_other_sources_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[PREFIX_BYTES] ^= 1;
        let prefix = Prefix::parse(bytes[..PREFIX_BYTES].try_into().unwrap()).unwrap();
        let len = prefix.header as usize;
        let checksum = Sha256Hash::of(&bytes[PREFIX_BYTES..PREFIX_BYTES + len]);
        bytes[PREFIX_BYTES + len..PREFIX_BYTES + len + 32].copy_from_slice(&checksum.0);
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(Bundle::open(&path), Err(BundleError::OtherSources { .. })));
        let bundles = Bundles::at([path].into_iter(), 90);
        assert_eq!(bundles.find(&probe("A"), 90), None);
        assert!(bundles.refused()[0].contains("build it again"), "{:?}", bundles.refused());
    }

    #[test]
    fn a_bundle_of_another_version_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
        let good = std::fs::read(&path).unwrap();
        for version in [1u32, FORMAT_VERSION + 1] {
            let mut bytes = good.clone();
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            std::fs::write(&path, bytes).unwrap();
            let error = Bundle::open(&path).unwrap_err();
            assert!(matches!(error, BundleError::OtherVersion { got, .. } if got == version), "{error}");
            assert!(error.to_string().contains("build it again"), "{error}");
        }
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
        let good = std::fs::read(&path).unwrap();
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let from_file = Bundle::open(&path).and_then(|b| b.read(&probe("A"), 90));
            let from_program = Bundle::of_program("A", bytes.to_vec().leak()).and_then(|b| b.read(&probe("A"), 90));
            assert_eq!(from_file.as_ref().ok(), from_program.as_ref().ok());
            from_file
        };
        assert!(read(&good).unwrap().is_some());
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            let refused = match read(&bad) {
                Err(BundleError::Damaged { .. }) => true,
                // The version's own bytes are under no checksum.
                Err(BundleError::OtherVersion { .. }) => (8..12).contains(&at),
                _ => false,
            };
            assert!(refused, "byte {at}");
        }
        for len in 0..good.len() {
            assert!(matches!(read(&good[..len]), Err(BundleError::Damaged { .. })), "cut to {len}");
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error_with_its_name() {
        // A file where the folder should be fails for every user, root included.
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let path = file.join("sm_90.qgk");
        let error = Bundle::write(&path, "sm_90".parse().unwrap(), "12.9", &[kernel("A", "sm_90")]).unwrap_err();
        assert!(error.to_string().contains("sm_90.qgk: "), "{error}");
    }
}
