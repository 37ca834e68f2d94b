//! Disk cache of compiled kernels. An entry is one file, named by a hash of its inputs.
//!
//! It is written under a temporary name and renamed. It is trusted only with a correct
//! checksum and if no other user can have written it. Cache failures cost time, never
//! correctness: entries that cannot be written stay in memory.

mod turn;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, UNIX_EPOCH};
use std::{env, fs, io};

use etcetera::BaseStrategy;

use crate::artifact::{Artifact, Resources};
use crate::binary::{Reader, Writer};
use crate::hash::{self, Hasher, Sha256Hash};
use crate::jit;
use crate::private::{check_folder, make_private_folder, read_private};
use crate::replace;
use crate::source;
use crate::spec::KernelSpec;
use crate::target::Target;

pub(crate) use turn::Turn;

/// Folder of the cache.
pub const CACHE_VARIABLE: &str = "QGEMM_CACHE";

const MAGIC: &[u8; 8] = b"QGKERNEL";
const FORMAT_VERSION: u32 = 1;
const EXTENSION: &str = "qgc";
/// Maximum wait for another process that compiles the same kernel,
/// far beyond a compilation.
const PATIENCE: Duration = Duration::from_secs(10);

/// Hash of all inputs of a compilation except the compiler version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey(Sha256Hash);

impl CacheKey {
    pub(crate) fn new(spec: &KernelSpec, target: Target) -> Self {
        let mut hasher = Hasher::new();
        hasher.field(&spec.key().0);
        let included = source::included(&spec.prelude, spec.text);
        hasher.field(&hash::of_sources(included.into_iter()).0);
        hasher.field(target.to_string().as_bytes());
        for option in jit::options(target) {
            hasher.field(option.as_bytes());
        }
        Self(hasher.finish())
    }
}

/// Folder of compiled kernels.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
    /// Entries that the folder could not store, for the life of the process.
    memory: Arc<Mutex<HashMap<CacheKey, Artifact>>>,
}

/// Folder of the user's cache: `QGEMM_CACHE`, else `qgemm/kernels` in the system's
/// cache folder. `None` without either.
pub fn cache_folder() -> Option<PathBuf> {
    let named = env::var_os(CACHE_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    named.or_else(|| etcetera::choose_base_strategy().ok().map(|s| s.cache_dir().join("qgemm").join("kernels")))
}

impl Cache {
    /// User's cache in [`cache_folder`]. All devices share it.
    pub(crate) fn of_user() -> Self {
        static CACHE: OnceLock<Cache> = OnceLock::new();
        CACHE.get_or_init(|| Self { folder: cache_folder(), memory: Arc::default() }).clone()
    }

    /// Cache in `folder`.
    pub(crate) fn at(folder: &Path) -> Self {
        Self { folder: Some(folder.to_path_buf()), memory: Arc::default() }
    }

    /// Folder, for messages.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Reads the entry `key` of NVRTC `version`, or of any version without a compiler.
    /// A damaged entry is reported and counts as absent.
    pub(crate) fn read(&self, key: CacheKey, version: Option<&str>) -> Option<Artifact> {
        if let Some(artifact) = self.remembered(key, version) {
            return Some(artifact);
        }
        let folder = self.folder.as_deref()?;
        match check_folder(folder) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(folder = %folder.display(), %error, "cached kernels are not used");
                return None;
            }
        }
        let path = match version {
            Some(version) => entry_path(folder, key, version),
            None => newest_entry(folder, key)?,
        };
        let bytes = match read_private(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a cached kernel cannot be read");
                return None;
            }
        };
        let artifact = decode(&bytes, key);
        if artifact.is_none() {
            tracing::warn!(path = %path.display(), "a cached kernel is damaged and will be compiled again");
        }
        artifact
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// When the folder cannot be written or trusted. The entry then stays in memory.
    pub(crate) fn write(&self, key: CacheKey, artifact: &Artifact) -> io::Result<()> {
        let written = self.write_file(key, artifact);
        if written.is_err() {
            // A panic under the lock cannot leave the map inconsistent.
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            memory.insert(key, artifact.clone());
        }
        written
    }

    fn write_file(&self, key: CacheKey, artifact: &Artifact) -> io::Result<()> {
        let Some(folder) = &self.folder else { return Err(io::Error::other("there is no folder for it")) };
        make_private_folder(folder)?;
        replace::with(&entry_path(folder, key, &artifact.nvrtc), &encode(key, artifact))
    }

    fn remembered(&self, key: CacheKey, version: Option<&str>) -> Option<Artifact> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.get(&key).filter(|artifact| version.is_none_or(|version| version == artifact.nvrtc)).cloned()
    }

    /// Turn to compile `key`. Other processes wait for the entry meanwhile.
    pub(crate) fn turn(&self, key: CacheKey) -> Option<Turn> {
        let folder = self.folder.as_deref()?;
        make_private_folder(folder).ok()?;
        Some(Turn::take(&folder.join(format!("{}.lock", key.0)), PATIENCE))
    }

    /// Noted version of the compiler at `library`, while the file is
    /// unchanged ([`Cache::note_version`]). It avoids loading a 100 MB library
    /// when all kernels are cached.
    pub(crate) fn noted_version(&self, library: &Path) -> Option<String> {
        check_folder(self.folder.as_deref()?).ok()?;
        let text = String::from_utf8(read_private(&self.note_path(library)?).ok()?).ok()?;
        let well_formed = text.split('.').count() == 2 && text.split('.').all(|n| n.parse::<u32>().is_ok());
        well_formed.then_some(text)
    }

    /// Notes the version of the compiler at `library`.
    pub(crate) fn note_version(&self, library: &Path, version: &str) {
        let (Some(folder), Some(path)) = (self.folder.as_deref(), self.note_path(library)) else { return };
        if let Err(error) = make_private_folder(folder).and_then(|()| replace::with(&path, version.as_bytes())) {
            tracing::debug!(path = %path.display(), %error, "the compiler's version cannot be noted");
        }
    }

    fn note_path(&self, library: &Path) -> Option<PathBuf> {
        let metadata = fs::metadata(library).ok()?;
        let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let mut hasher = Hasher::new();
        hasher.field(library.as_os_str().as_encoded_bytes());
        hasher.field(&metadata.len().to_le_bytes());
        hasher.field(&modified.as_nanos().to_le_bytes());
        Some(self.folder.as_ref()?.join(format!("nvrtc-{}.version", hasher.finish())))
    }
}

fn entry_path(folder: &Path, key: CacheKey, version: &str) -> PathBuf {
    folder.join(format!("{}-{version}.{EXTENSION}", key.0))
}

/// Entry of the newest compiler.
fn newest_entry(folder: &Path, key: CacheKey) -> Option<PathBuf> {
    let (prefix, suffix) = (format!("{}-", key.0), format!(".{EXTENSION}"));
    let version = |path: &Path| -> Option<(u32, u32)> {
        let name = path.file_name()?.to_str()?;
        let (major, minor) = name.strip_prefix(&prefix)?.strip_suffix(&suffix)?.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let entries = folder.read_dir().ok()?.filter_map(|entry| entry.ok().map(|e| e.path()));
    entries.filter_map(|path| Some((version(&path)?, path))).max().map(|(_, path)| path)
}

/// Encodes magic, format version, key, target, NVRTC version, resources,
/// image; then a hash of all.
fn encode(key: CacheKey, artifact: &Artifact) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.bytes.extend_from_slice(MAGIC);
    writer.u32(FORMAT_VERSION);
    writer.hash(key.0);
    writer.text(&artifact.target.to_string());
    writer.text(&artifact.nvrtc);
    writer.u32(u32::from(artifact.resources.is_some()));
    artifact.resources.unwrap_or_default().write(&mut writer);
    writer.u64(artifact.image.len() as u64);
    writer.bytes.extend_from_slice(&artifact.image);
    let checksum = Sha256Hash::of(&writer.bytes);
    writer.hash(checksum);
    writer.bytes
}

fn decode(bytes: &[u8], key: CacheKey) -> Option<Artifact> {
    let (body, checksum) = bytes.split_at_checked(bytes.len().checked_sub(32)?)?;
    if Sha256Hash::of(body).0 != checksum {
        return None;
    }
    let mut reader = Reader(body);
    if reader.take(MAGIC.len())? != MAGIC || reader.u32()? != FORMAT_VERSION || reader.hash()? != key.0 {
        return None;
    }
    let target = reader.text()?.parse().ok()?;
    let nvrtc = reader.text()?.to_owned();
    let has_resources = reader.u32()? != 0;
    let resources = Resources::read(&mut reader)?;
    let len = usize::try_from(reader.u64()?).ok()?;
    let image = reader.take(len)?.to_vec();
    Some(Artifact { target, nvrtc, resources: has_resources.then_some(resources), image })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::tests::probe;

    const TARGET: Target = Target::Cubin { arch: 90, specific: true };

    fn artifact(nvrtc: &str) -> Artifact {
        let resources = Resources { registers: 40, spill_bytes: 0, stack_bytes: 8, shared_bytes: 1024 };
        let image = (0..5000u32).map(|i| i as u8).collect();
        Artifact { target: TARGET, nvrtc: nvrtc.into(), resources: Some(resources), image }
    }

    fn the_entry(folder: &Path) -> PathBuf {
        let mut entries = folder.read_dir().unwrap().map(|e| e.unwrap().path());
        let entry = entries.next().unwrap();
        assert!(entries.next().is_none());
        entry
    }

    #[test]
    fn an_entry_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(&folder.path().join("made/when/needed"));
        let key = CacheKey::new(&probe(""), TARGET);
        assert_eq!(cache.read(key, Some("12.9")), None);
        cache.write(key, &artifact("12.9")).unwrap();
        assert_eq!(cache.read(key, Some("12.9")), Some(artifact("12.9")));
        assert_eq!(cache.read(key, Some("13.0")), None, "another compiler's kernel");
        assert_eq!(
            cache.read(CacheKey::new(&probe(""), Target::Ptx { arch: 90, specific: false }), Some("12.9")),
            None
        );
        assert_eq!(cache.read(CacheKey::new(&probe("#define A"), TARGET), Some("12.9")), None);
    }

    #[test]
    fn without_a_compiler_the_newest_entry_serves() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = CacheKey::new(&probe(""), TARGET);
        assert_eq!(cache.read(key, None), None);
        for version in ["12.9", "13.0", "12.10"] {
            cache.write(key, &artifact(version)).unwrap();
        }
        assert_eq!(cache.read(key, None), Some(artifact("13.0")));
    }

    #[test]
    fn damaged_entries_are_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = CacheKey::new(&probe(""), TARGET);
        cache.write(key, &artifact("12.9")).unwrap();
        let path = the_entry(folder.path());
        let good = fs::read(&path).unwrap();
        for at in [0, 8, 20, 60, good.len() / 2, good.len() - 40, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, bad).unwrap();
            assert_eq!(cache.read(key, Some("12.9")), None, "byte {at}");
        }
        for len in [0, 7, 31, 32, 100, good.len() - 1] {
            fs::write(&path, &good[..len]).unwrap();
            assert_eq!(cache.read(key, Some("12.9")), None, "cut to {len}");
        }
        cache.write(key, &artifact("12.9")).unwrap();
        assert_eq!(cache.read(key, Some("12.9")), Some(artifact("12.9")), "replaced");
    }

    #[test]
    fn an_entry_of_another_kernel_under_this_name_is_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let (key, other) = (CacheKey::new(&probe(""), TARGET), CacheKey::new(&probe("#define A"), TARGET));
        cache.write(other, &artifact("12.9")).unwrap();
        fs::rename(the_entry(folder.path()), entry_path(folder.path(), key, "12.9")).unwrap();
        assert_eq!(cache.read(key, Some("12.9")), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_survived() {
        // A file instead of the folder fails for every user, even root.
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = Cache::at(&file);
        let key = CacheKey::new(&probe(""), TARGET);
        assert!(cache.turn(key).is_none());
        assert_eq!(cache.read(key, Some("12.9")), None);
        assert!(cache.write(key, &artifact("12.9")).is_err());
        // Kept in memory by this cache and its clones.
        assert_eq!(cache.clone().read(key, Some("12.9")), Some(artifact("12.9")));
        assert_eq!(cache.read(key, None), Some(artifact("12.9")));
        assert_eq!(cache.read(key, Some("13.0")), None);
        assert_eq!(Cache::at(&file).read(key, None), None);
        cache.note_version(&file, "12.9");
        assert_eq!(cache.noted_version(&file), None);
    }

    #[cfg(unix)]
    #[test]
    fn nothing_is_loaded_from_where_others_can_write() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (path, library) = (folder.path().join("cache"), folder.path().join("libnvrtc.so.12"));
        fs::write(&library, b"one").unwrap();
        let key = CacheKey::new(&probe(""), TARGET);
        let cache = Cache::at(&path);
        cache.write(key, &artifact("12.9")).unwrap();
        let entry = the_entry(&path);
        cache.note_version(&library, "12.9");
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        let trusted = || (cache.read(key, Some("12.9")).is_some(), cache.read(key, None).is_some());
        assert_eq!((trusted(), cache.noted_version(&library).is_some()), ((true, true), true));
        set_mode(&entry, 0o666);
        assert_eq!(trusted(), (false, false), "a file that anybody can write");
        set_mode(&entry, 0o600);
        set_mode(&path, 0o777);
        assert_eq!(
            (trusted(), cache.noted_version(&library)),
            ((false, false), None),
            "a folder that anybody can write"
        );
        let error = cache.write(key, &artifact("12.9")).unwrap_err();
        assert!(error.to_string().contains("mode 777"), "{error}");
        assert!(cache.turn(key).is_none());
    }

    #[test]
    fn many_writers_of_one_entry_do_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = CacheKey::new(&probe(""), TARGET);
        cache.write(key, &artifact("12.9")).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        cache.write(key, &artifact("12.9")).unwrap();
                        assert_eq!(cache.read(key, Some("12.9")), Some(artifact("12.9")));
                    }
                });
            }
        });
        the_entry(folder.path());
    }

    #[test]
    fn the_compilers_version_is_noted_until_its_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnvrtc.so.12");
        fs::write(&library, b"one").unwrap();
        let cache = Cache::at(&folder.path().join("cache"));
        assert_eq!(cache.noted_version(&library), None);
        cache.note_version(&library, "12.9");
        assert_eq!(cache.noted_version(&library).as_deref(), Some("12.9"));
        fs::write(the_entry(&folder.path().join("cache")), b"12.").unwrap();
        assert_eq!(cache.noted_version(&library), None, "damaged note");
        cache.note_version(&library, "12.9");
        fs::write(&library, b"another").unwrap();
        assert_eq!(cache.noted_version(&library), None, "updated library");
    }
}
