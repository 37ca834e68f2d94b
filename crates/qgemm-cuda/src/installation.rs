//! State of the CUDA installation, for diagnosis: driver,
//! compiler, kernel cache and bundles.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::bundle::{BUNDLES_VARIABLE, Bundle, files};
use crate::cache::cache_folder;
use crate::driver;
use crate::nvrtc::Nvrtc;
use crate::private::check_folder;

/// Parts of a machine that CUDA kernels need.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Installation {
    /// Newest CUDA version that the driver supports, or why no driver starts.
    pub driver: Result<String, String>,
    /// The run-time compiler, or why there is none.
    pub nvrtc: Result<Compiler, String>,
    /// Folder of compiled kernels.
    pub cache: CacheFolder,
    /// Every bundle of kernels, the user's first, or why it is not used.
    pub bundles: Vec<(PathBuf, Result<BundleContents, String>)>,
}

/// NVIDIA's run-time compiler.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Compiler {
    /// Its file; `None` if the system's loader found it.
    pub path: Option<PathBuf>,
    /// Version: `12.9`.
    pub version: String,
}

/// Folder of compiled kernels.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CacheFolder {
    /// The folder; `None` if neither `QGEMM_CACHE` nor a home folder is set.
    pub path: Option<PathBuf>,
    /// Whether the folder exists.
    pub exists: bool,
    /// Why its kernels are not used, such as others' permission to write.
    pub refusal: Option<String>,
    /// Number of files, with those of the emulator.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
}

/// Contents of a bundle.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BundleContents {
    /// Target: `sm_90a`.
    pub target: String,
    /// Number of kernels.
    pub kernels: usize,
}

/// Looks for the parts of the installation. The compiler is
/// loaded, but nothing is compiled, and no device is opened.
pub fn installation() -> Installation {
    let nvrtc = Nvrtc::get().map_err(|error| error.to_string());
    Installation {
        driver: driver::init().map(|()| driver::version()).map_err(|error| error.to_string()),
        nvrtc: nvrtc
            .map(|nvrtc| Compiler { path: Nvrtc::path().map(Path::to_owned), version: nvrtc.version().to_owned() }),
        cache: cache_folder().map_or_else(CacheFolder::default, |path| folder(&path)),
        bundles: bundles(),
    }
}

fn folder(path: &Path) -> CacheFolder {
    let (exists, refusal) = match check_folder(path) {
        Ok(()) => (true, None),
        Err(error) if error.kind() == ErrorKind::NotFound => (false, None),
        Err(error) => (true, Some(error.to_string())),
    };
    let sizes = sizes(path, 1);
    CacheFolder { path: Some(path.to_owned()), exists, refusal, files: sizes.len(), bytes: sizes.iter().sum() }
}

/// Sizes of the files in a folder, and in folders in it.
fn sizes(path: &Path, deeper: usize) -> Vec<u64> {
    let mut all = Vec::new();
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_file() => all.push(metadata.len()),
            Ok(metadata) if metadata.is_dir() && deeper > 0 => all.extend(sizes(&entry.path(), deeper - 1)),
            _ => {}
        }
    }
    all
}

fn bundles() -> Vec<(PathBuf, Result<BundleContents, String>)> {
    let named = env::var_os(BUNDLES_VARIABLE).unwrap_or_default();
    let mut all = Vec::new();
    for path in env::split_paths(&named).filter(|path| !path.as_os_str().is_empty()) {
        match files(&path) {
            Ok(found) => all.extend(found.into_iter().map(|file| {
                let opened = Bundle::open(&file).map(|bundle| contents(&bundle));
                (file, opened.map_err(|error| error.to_string()))
            })),
            Err(error) => all.push((path, Err(error.to_string()))),
        }
    }
    match Bundle::embedded() {
        Ok(embedded) => all.extend(embedded.iter().map(|bundle| (bundle.path().to_owned(), Ok(contents(bundle))))),
        Err(error) => all.push(("embedded".into(), Err(error.to_string()))),
    }
    all
}

fn contents(bundle: &Bundle) -> BundleContents {
    BundleContents { target: bundle.target().to_string(), kernels: bundle.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_folder_is_counted_and_its_permissions_are_judged() {
        use std::os::unix::fs::PermissionsExt as _;
        let parent = tempfile::tempdir().unwrap();
        let (path, emu) = (parent.path().join("kernels"), parent.path().join("kernels/emu"));
        assert!(!folder(&path).exists);
        fs::create_dir_all(&emu).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(path.join("a.qgc"), [0; 10]).unwrap();
        fs::write(emu.join("b.so"), [0; 5]).unwrap();
        let found = folder(&path);
        assert!(found.exists && found.refusal.is_none(), "{found:?}");
        assert_eq!((found.files, found.bytes), (2, 15));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(folder(&path).refusal.is_some_and(|why| why.contains("mode 777")));
    }
}
