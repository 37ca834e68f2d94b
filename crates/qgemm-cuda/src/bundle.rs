//! Bundles: files of kernels compiled ahead, for machines without a compiler. One file a target, written by
//! `cargo xtask build-kernels`.
//!
//! ```text
//! magic | format version | header length | header | hash of the header | images
//! header = source hash | NVRTC version | target | count | entries
//! entry  = kernel hash | name | target | resources | offset of the image | length | hash of the image
//! ```

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::artifact::{Artifact, Resources};
use crate::binary::{Reader, Writer};
use crate::cache;
use crate::hash::Sha256Hash;
use crate::source;
use crate::spec::KernelSpec;
use crate::target::Target;

/// Folders and files of bundles, separated as in `PATH`.
pub const BUNDLES_VARIABLE: &str = "QGEMM_KERNELS";
/// Extension of bundle files.
pub const EXTENSION: &str = "qgk";

const MAGIC: &[u8; 8] = b"QGBUNDLE";
const FORMAT_VERSION: u32 = 1;
/// Bytes before the header: magic, format version, header length.
const PREFIX_BYTES: usize = 16;
/// More than the header of any bundle; a length beyond it is damage, not a reason to allocate.
const MAX_HEADER_BYTES: u32 = 1 << 28;

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
    len: u64,
    hash: Sha256Hash,
}

/// An open bundle. Images are read when they are asked for.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    target: Target,
    nvrtc: String,
    entries: Vec<Entry>,
}

impl Bundle {
    /// Writes the bundle of `target` to `path`, in one step: an interrupted write leaves no file.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn write(
        path: &Path,
        target: Target,
        nvrtc: &str,
        kernels: &[(KernelSpec, Artifact)],
    ) -> Result<(), BundleError> {
        let mut header = Writer::default();
        header.hash(source::source_hash());
        header.text(nvrtc);
        header.text(&target.to_string());
        header.u32(kernels.len() as u32);
        let mut offset = 0u64;
        for (spec, artifact) in kernels {
            header.hash(spec.key());
            header.text(&spec.name);
            header.text(&artifact.target.to_string());
            header.u32(u32::from(artifact.resources.is_some()));
            artifact.resources.unwrap_or_default().write(&mut header);
            header.u64(offset);
            header.u64(artifact.image.len() as u64);
            header.hash(Sha256Hash::of(&artifact.image));
            offset += artifact.image.len() as u64;
        }
        let mut file = Writer::default();
        file.bytes.extend_from_slice(MAGIC);
        file.u32(FORMAT_VERSION);
        file.u32(header.bytes.len() as u32);
        file.bytes.extend_from_slice(&header.bytes);
        file.hash(Sha256Hash::of(&header.bytes));
        for (_, artifact) in kernels {
            file.bytes.extend_from_slice(&artifact.image);
        }
        cache::replace(path, &file.bytes).map_err(|error| BundleError::Io { path: path.to_path_buf(), error })
    }

    /// Opens a bundle and checks its index.
    ///
    /// # Errors
    /// A [`BundleError`].
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let io = |error| BundleError::Io { path: path.to_path_buf(), error };
        let damaged = |what| BundleError::Damaged { path: path.to_path_buf(), what };
        let mut file = File::open(path).map_err(io)?;
        let mut prefix = [0u8; PREFIX_BYTES];
        file.read_exact(&mut prefix).map_err(|_| damaged("shorter than a bundle's first bytes"))?;
        let mut reader = Reader(&prefix);
        if reader.take(MAGIC.len()) != Some(MAGIC.as_slice()) {
            return Err(damaged("not a kernel bundle"));
        }
        if reader.u32() != Some(FORMAT_VERSION) {
            return Err(damaged("of another version of the bundle format"));
        }
        let len = reader.u32().filter(|&len| len <= MAX_HEADER_BYTES).ok_or_else(|| damaged("header length"))? as usize;
        let mut header = Vec::new();
        file.take(len as u64 + 32).read_to_end(&mut header).map_err(io)?;
        if header.len() != len + 32 {
            return Err(damaged("ends within its header"));
        }
        let (header, checksum) = header.split_at(len);
        if Sha256Hash::of(header).0 != checksum {
            return Err(damaged("wrong checksum of its header"));
        }
        let (sources, bundle) = Self::parse(path, header).ok_or_else(|| damaged("header does not parse"))?;
        let expected = source::source_hash();
        if sources != expected {
            return Err(BundleError::OtherSources { path: path.to_path_buf(), expected, got: sources });
        }
        Ok(bundle)
    }

    fn parse(path: &Path, header: &[u8]) -> Option<(Sha256Hash, Self)> {
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
            let resources = Resources::read(&mut reader)?;
            let offset = images.checked_add(reader.u64()?)?;
            let (len, hash) = (reader.u64()?, reader.hash()?);
            entries.push(Entry { key, target, resources: has_resources.then_some(resources), offset, len, hash });
        }
        Some((sources, Self { path: path.to_path_buf(), target, nvrtc, entries }))
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
        let io = |error| BundleError::Io { path: self.path.clone(), error };
        let mut file = File::open(&self.path).map_err(io)?;
        file.seek(SeekFrom::Start(entry.offset)).map_err(io)?;
        let mut image = Vec::new();
        file.take(entry.len).read_to_end(&mut image).map_err(io)?;
        if image.len() as u64 != entry.len || Sha256Hash::of(&image) != entry.hash {
            return Err(BundleError::Damaged { path: self.path.clone(), what: "wrong checksum of a kernel" });
        }
        Ok(Some(Artifact { target: entry.target, nvrtc: self.nvrtc.clone(), resources: entry.resources, image }))
    }
}

/// The bundles that the user named, best for a chip first, and why others are not used.
#[derive(Debug, Default)]
pub(crate) struct Bundles {
    open: Vec<Bundle>,
    refused: Vec<String>,
}

impl Bundles {
    /// Opens those in `QGEMM_KERNELS` that `chip` can run.
    pub(crate) fn of_user(chip: u32) -> Self {
        let named = std::env::var_os(BUNDLES_VARIABLE).unwrap_or_default();
        Self::at(std::env::split_paths(&named).filter(|p| !p.as_os_str().is_empty()), chip)
    }

    pub(crate) fn at(paths: impl Iterator<Item = PathBuf>, chip: u32) -> Self {
        let mut bundles = Self::default();
        for path in paths {
            match files(&path) {
                Ok(files) => files.iter().for_each(|file| bundles.add(file, chip)),
                Err(error) => bundles.refuse(&BundleError::Io { path, error }),
            }
        }
        // This chip's machine code, then that of its family, then PTX; the newest first.
        bundles.open.sort_by_key(|b| (b.target.is_ptx(), std::cmp::Reverse(b.target.arch())));
        bundles
    }

    fn add(&mut self, file: &Path, chip: u32) {
        match Bundle::open(file) {
            Ok(bundle) if bundle.target.runs_on(chip) => self.open.push(bundle),
            Ok(bundle) => tracing::debug!(path = %file.display(), target = %bundle.target, "a bundle for other chips"),
            Err(error) => self.refuse(&error),
        }
    }

    fn refuse(&mut self, error: &BundleError) {
        tracing::warn!(%error, "a kernel bundle is not used");
        self.refused.push(error.to_string());
    }

    /// The kernel `spec` from the first bundle that has it. Damage is reported and passed over.
    pub(crate) fn find(&self, spec: &KernelSpec, chip: u32) -> Option<Artifact> {
        self.open.iter().find_map(|bundle| {
            bundle.read(spec, chip).unwrap_or_else(|error| {
                tracing::warn!(kernel = spec.name, %error, "a bundled kernel is not used");
                None
            })
        })
    }

    /// Why named bundles are not used.
    pub(crate) fn refused(&self) -> &[String] {
        &self.refused
    }
}

/// The bundle at `path`, or all in the folder `path`.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = Vec::new();
    for entry in path.read_dir()? {
        let file = entry?.path();
        if file.extension().is_some_and(|e| e == EXTENSION) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::tests::probe;

    fn kernel(prelude: &str, target: &str) -> (KernelSpec, Artifact) {
        let artifact = Artifact {
            target: target.parse().unwrap(),
            nvrtc: "12.9".into(),
            resources: Some(Resources { registers: 32, ..Default::default() }),
            image: format!("{prelude} for {target}").into_bytes(),
        };
        (probe(prelude), artifact)
    }

    fn write(folder: &Path, target: &str, kernels: &[(KernelSpec, Artifact)]) -> PathBuf {
        let path = folder.join(format!("{target}.{EXTENSION}"));
        Bundle::write(&path, target.parse().unwrap(), "12.9", kernels).unwrap();
        path
    }

    fn bundles(folder: &Path, chip: u32) -> Bundles {
        Bundles::at([folder.to_path_buf()].into_iter(), chip)
    }

    #[test]
    fn kernels_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let kernels = [kernel("A", "sm_90"), kernel("B", "sm_90a")];
        let bundle = Bundle::open(&write(folder.path(), "sm_90", &kernels)).unwrap();
        assert_eq!((bundle.target().to_string().as_str(), bundle.len()), ("sm_90", 2));
        for (spec, artifact) in &kernels {
            assert_eq!(bundle.read(spec, 90).unwrap().as_ref(), Some(artifact));
        }
        assert_eq!(bundle.read(&probe("C"), 90).unwrap(), None);
        assert_eq!(bundle.read(&kernels[0].0, 80).unwrap(), None, "another chip");
    }

    #[test]
    fn machine_code_of_the_chip_comes_before_ptx() {
        let folder = tempfile::tempdir().unwrap();
        for target in ["compute_70", "compute_80", "sm_80", "sm_86"] {
            write(folder.path(), target, &[kernel("A", target)]);
        }
        let best = |chip| bundles(folder.path(), chip).find(&probe("A"), chip).map(|a| a.target.to_string());
        assert_eq!(best(86).as_deref(), Some("sm_86"));
        assert_eq!(best(80).as_deref(), Some("sm_80"));
        assert_eq!(best(90).as_deref(), Some("compute_80"));
        assert_eq!(best(75).as_deref(), Some("compute_70"));
        assert_eq!(bundles(folder.path(), 86).find(&probe("B"), 86), None);
    }

    #[test]
    fn a_bundle_of_other_sources_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[PREFIX_BYTES] ^= 1;
        let len = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
        let checksum = Sha256Hash::of(&bytes[PREFIX_BYTES..PREFIX_BYTES + len]);
        bytes[PREFIX_BYTES + len..PREFIX_BYTES + len + 32].copy_from_slice(&checksum.0);
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(Bundle::open(&path), Err(BundleError::OtherSources { .. })));
        let bundles = bundles(folder.path(), 90);
        assert_eq!(bundles.find(&probe("A"), 90), None);
        assert!(bundles.refused()[0].contains("build it again"), "{:?}", bundles.refused());
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "sm_90", &[kernel("A", "sm_90")]);
        let good = std::fs::read(&path).unwrap();
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Bundle::open(&path).and_then(|b| b.read(&probe("A"), 90))
        };
        assert!(read(&good).unwrap().is_some());
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(matches!(read(&bad), Err(BundleError::Damaged { .. })), "byte {at}");
        }
        for len in 0..good.len() {
            assert!(matches!(read(&good[..len]), Err(BundleError::Damaged { .. })), "cut to {len}");
        }
    }

    #[test]
    fn a_named_path_that_does_not_exist_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("none.qgk");
        let bundles = Bundles::at([missing].into_iter(), 90);
        assert!(bundles.refused()[0].contains("none.qgk"));
    }
}
