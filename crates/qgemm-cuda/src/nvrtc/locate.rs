//! Search for the NVRTC library: a path of the user, next
//! to the executable, CUDA toolkits, Python packages.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names the library or its folder.
pub const LIBRARY_VARIABLE: &str = "QGEMM_NVRTC";

/// File names, preferred first. CUDA 12 supports all chips since
/// Volta, CUDA 13 since Turing.
pub(super) const LIBRARY_NAMES: [&str; 5] =
    ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so", "nvrtc64_120_0.dll", "nvrtc64_130_0.dll"];

/// Subfolders of a toolkit or `target` folder
/// that may hold the library.
const SUBFOLDERS: [&str; 7] =
    ["", "lib64", "lib", "bin", "nvidia/cuda_nvrtc/lib", "nvidia/cuda_nvrtc/bin", "nvidia/cu13/lib"];

/// The library file; `None` when only the
/// system's loader may find it.
///
/// # Errors
/// A message, when the user named a path without the library.
pub(super) fn library() -> Result<Option<&'static Path>, String> {
    static FOUND: OnceLock<Result<Option<PathBuf>, String>> = OnceLock::new();
    match FOUND.get_or_init(search) {
        Ok(path) => Ok(path.as_deref()),
        Err(why) => Err(why.clone()),
    }
}

/// Searches again, without the cached result of [`library`].
pub(super) fn search() -> Result<Option<PathBuf>, String> {
    match env::var_os(LIBRARY_VARIABLE).filter(|v| !v.is_empty()) {
        Some(named) => in_named(Path::new(&named)).map(Some),
        None => Ok(roots().iter().find_map(|root| in_root(root))),
    }
}

/// Message when no library was found.
pub(super) fn not_found() -> String {
    format!(
        "{} is neither in `{LIBRARY_VARIABLE}`, nor in `nvrtc` beside the executable, nor in a CUDA toolkit, nor in Python's \
         packages (`pip install nvidia-cuda-nvrtc-cu12==12.9.86` installs it there)",
        LIBRARY_NAMES[0]
    )
}

/// The library at a user path: the file
/// itself, or within a folder.
fn in_named(named: &Path) -> Result<PathBuf, String> {
    if named.is_file() {
        return Ok(named.to_path_buf());
    }
    in_root(named).ok_or_else(|| format!("{LIBRARY_VARIABLE}={} holds no {}", named.display(), LIBRARY_NAMES[0]))
}

fn in_root(root: &Path) -> Option<PathBuf> {
    LIBRARY_NAMES
        .iter()
        .flat_map(|name| SUBFOLDERS.iter().map(move |folder| root.join(folder).join(name)))
        .find(|file| file.is_file())
}

/// Folders to search, in order.
fn roots() -> Vec<PathBuf> {
    let beside = env::current_exe().ok().and_then(|program| beside(&program));
    beside.into_iter().chain(toolkits()).collect()
}

/// `nvrtc` in the folder of `program`. Folders above are not searched,
/// because anybody may be able to put a library there (for
/// example `/tmp` for a program in `/tmp/demo`).
fn beside(program: &Path) -> Option<PathBuf> {
    program.parent().map(|folder| folder.join("nvrtc"))
}

/// Folders of CUDA toolkits and of Python packages
/// that contain parts of them.
pub fn toolkits() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].into_iter().filter_map(env::var_os).map(PathBuf::from).collect();
    folders.push("/usr/local/cuda".into());
    folders.extend(python_prefixes().iter().flat_map(|prefix| site_packages(prefix)));
    folders
}

/// Python installations: active environments, user packages,
/// and `python3` on the path.
fn python_prefixes() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from).collect();
    prefixes.extend(env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).filter(|folder| folder.join("python3").is_file());
    prefixes.extend(on_path.filter_map(|folder| folder.parent().map(Path::to_path_buf)));
    prefixes
}

/// `lib/python3.*/site-packages` and `dist-packages` below `prefix`.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = prefix.join("lib").read_dir() else { return Vec::new() };
    let mut folders: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")))
        .flat_map(|path| [path.join("site-packages"), path.join("dist-packages")])
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"").unwrap();
    }

    #[test]
    fn a_named_path_is_the_library_or_a_folder_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        touch(&file);
        assert_eq!(in_named(&file).unwrap(), file);
        assert_eq!(in_named(folder.path()).unwrap(), file);
        assert_eq!(in_named(file.parent().unwrap()).unwrap(), file);
    }

    #[test]
    fn cuda_12_is_preferred_to_13() {
        let folder = tempfile::tempdir().unwrap();
        touch(&folder.path().join("lib64/libnvrtc.so.13"));
        touch(&folder.path().join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"));
        assert!(in_root(folder.path()).unwrap().ends_with("libnvrtc.so.12"));
    }

    #[test]
    fn a_named_path_without_it_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let why = in_named(folder.path()).unwrap_err();
        assert!(why.contains(LIBRARY_VARIABLE) && why.contains("libnvrtc.so.12"), "{why}");
    }

    #[test]
    fn beside_a_program_is_its_own_folder_and_none_above() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("target/debug/program");
        touch(&folder.path().join("target/nvrtc/libnvrtc.so.12"));
        touch(&folder.path().join("nvrtc/libnvrtc.so.12"));
        let root = beside(&program).unwrap();
        assert_eq!(in_root(&root), None);
        touch(&folder.path().join("target/debug/nvrtc/libnvrtc.so.12"));
        assert_eq!(in_root(&root).unwrap(), folder.path().join("target/debug/nvrtc/libnvrtc.so.12"));
    }

    #[test]
    fn python_packages_are_searched() {
        let prefix = tempfile::tempdir().unwrap();
        let file = prefix.path().join("lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        touch(&file);
        let found = site_packages(prefix.path()).iter().find_map(|root| in_root(root));
        assert_eq!(found.as_deref(), Some(file.as_path()));
    }
}
