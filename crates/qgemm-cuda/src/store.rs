//! Kernel sources of a device: bundles, then the disk cache, then the compiler.
//! Each kernel is loaded once per device.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use qgemm_hal::HalError;

use crate::artifact::Artifact;
use crate::bundle::{self, Bundles};
use crate::cache::{self, Cache, CacheKey};
use crate::driver::DeviceContext;
use crate::function::Function;
use crate::hash::Sha256Hash;
use crate::jit;
use crate::nvrtc::{self, Nvrtc, NvrtcError};
use crate::spec::KernelSpec;
use crate::target::Target;

/// Kernels of one device.
#[derive(Debug)]
pub(crate) struct KernelStore {
    chip: u32,
    target: Target,
    cache: Cache,
    bundles: OnceLock<Bundles>,
    /// Locked only to find a slot. Loading and compiling happen in the slot.
    loaded: Mutex<HashMap<(Sha256Hash, Target), Slot>>,
}

/// Kernel, once loaded.
type Slot = Arc<OnceCell<Function>>;

impl KernelStore {
    /// Store of a device with compute capability `chip`, whose kernels
    /// are compiled for `target`.
    pub(crate) fn new(chip: u32, target: Target, cache: Cache) -> Self {
        Self { chip, target, cache, bundles: OnceLock::new(), loaded: Mutex::default() }
    }

    /// Kernel `spec`, loaded in `context` with up to `shared_bytes` of shared memory.
    /// It is compiled for exactly `target` if given, else in any form that the device runs.
    ///
    /// # Errors
    /// [`HalError::Compile`], [`HalError::KernelUnavailable`] or a driver error.
    pub(crate) fn get(
        &self,
        context: &Arc<DeviceContext>,
        shared_bytes: u32,
        spec: &KernelSpec,
        target: Option<Target>,
    ) -> Result<Function, HalError> {
        let slot = {
            // A panic under the lock cannot leave the map inconsistent.
            let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
            loaded.entry((spec.key(), target.unwrap_or(self.target))).or_default().clone()
        };
        let function = slot.get_or_try_init(|| {
            let artifact = self.artifact(spec, target)?;
            Function::load(context, spec, &artifact, shared_bytes)
        })?;
        Ok(function.clone())
    }

    /// Compiled kernel `spec`. Bundles serve requests without a target.
    fn artifact(&self, spec: &KernelSpec, target: Option<Target>) -> Result<Artifact, HalError> {
        let bundles = self.bundles.get_or_init(|| Bundles::of_user(self.chip));
        if target.is_none()
            && let Some(artifact) = bundles.find(spec, self.chip)
        {
            return Ok(artifact);
        }
        let target = jit::target_of(spec, target.unwrap_or(self.target));
        let obtained = obtain(&self.cache, spec, target).map_err(|error| match error {
            HalError::KernelUnavailable { kernel, target, why } => {
                HalError::KernelUnavailable { kernel, target, why: self.what_to_provide(&why, bundles) }
            }
            other => other,
        })?;
        if let Err(error) = obtained.cached {
            tracing::warn!(kernel = spec.name, folder = ?self.cache.folder(), %error, "a kernel cannot be cached");
        }
        Ok(obtained.artifact)
    }

    fn what_to_provide(&self, why: &str, bundles: &Bundles) -> String {
        let arch = self.target.arch();
        let flag = if self.target.is_ptx() { " --ptx" } else { "" };
        let cache = self.cache.folder().map_or_else(|| "no folder".into(), |f| f.display().to_string());
        let mut text = format!(
            "{why}. Provide one of: a bundle in `{}` (`cargo xtask build-kernels --arch {arch}{flag}` makes it), a \
             cache that holds the kernel in `{}` (now {cache}), or the compiler in `{}`",
            bundle::BUNDLES_VARIABLE,
            cache::CACHE_VARIABLE,
            nvrtc::LIBRARY_VARIABLE,
        );
        for refused in bundles.refused() {
            text.push_str("; bundle not used: ");
            text.push_str(refused);
        }
        text
    }
}

/// Kernel from the cache or the compiler.
#[derive(Debug)]
pub(crate) struct Obtained {
    /// Compiled kernel.
    pub artifact: Artifact,
    /// Compile time. `None` for a cache hit.
    pub compiled_in: Option<Duration>,
    /// Whether the cache has it now.
    pub cached: io::Result<()>,
}

/// Kernel `spec` for `target` from the cache, or compiled and added to it.
///
/// # Errors
/// [`HalError::Compile`], or [`HalError::KernelUnavailable`] when there is no
/// compiler for the target.
pub(crate) fn obtain(cache: &Cache, spec: &KernelSpec, target: Target) -> Result<Obtained, HalError> {
    let key = CacheKey::new(spec, target);
    let found = |artifact| Obtained { artifact, compiled_in: None, cached: Ok(()) };
    let version = compiler_version(cache);
    let known = version.as_ref().map(String::as_str);
    if let Some(artifact) = cache.read(key, known.ok()) {
        return Ok(found(artifact));
    }
    let unavailable = |why: &NvrtcError| HalError::KernelUnavailable {
        kernel: spec.name.clone(),
        target: target.to_string(),
        why: why.to_string(),
    };
    let nvrtc = Nvrtc::get().map_err(|e| unavailable(&e))?;
    // One process compiles the kernel; others then find it.
    let _turn = cache.turn(key);
    if let Some(artifact) = cache.read(key, Some(nvrtc.version())) {
        return Ok(found(artifact));
    }
    let start = Instant::now();
    let artifact = jit::compile(nvrtc, spec, target)?;
    let compiled_in = Some(start.elapsed());
    let cached = cache.write(key, &artifact);
    Ok(Obtained { artifact, compiled_in, cached })
}

/// Compiler version. Taken from the cache's note if possible,
/// without loading the compiler.
fn compiler_version(cache: &Cache) -> Result<String, NvrtcError> {
    let path = Nvrtc::path();
    if let Some(version) = path.and_then(|path| cache.noted_version(path)) {
        return Ok(version);
    }
    let version = Nvrtc::get()?.version();
    if let Some(path) = path {
        cache.note_version(path, version);
    }
    Ok(version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::tests::{nvrtc_or_skip, probe};

    #[test]
    fn a_kernel_is_compiled_once_and_then_read() {
        if nvrtc_or_skip("a_kernel_is_compiled_once_and_then_read").is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let target = Target::Cubin { arch: 80, specific: false };
        let first = obtain(&cache, &probe(""), target).unwrap();
        assert!(first.compiled_in.is_some() && first.cached.is_ok());
        let second = obtain(&cache, &probe(""), target).unwrap();
        assert!(second.compiled_in.is_none() && second.artifact == first.artifact);
        assert!(obtain(&cache, &probe("// changed\n"), target).unwrap().compiled_in.is_some());
    }

    #[test]
    fn a_damaged_entry_is_compiled_again() {
        if nvrtc_or_skip("a_damaged_entry_is_compiled_again").is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let target = Target::Ptx { arch: 80, specific: false };
        let first = obtain(&cache, &probe(""), target).unwrap();
        let files = folder.path().read_dir().unwrap().map(|e| e.unwrap().path());
        let entries: Vec<_> = files.filter(|f| f.extension().is_some_and(|e| e == "qgc")).collect();
        assert_eq!(entries.len(), 1);
        let whole: Vec<_> = entries.iter().map(|entry| std::fs::read(entry).unwrap()).collect();
        for keep in [0, 100, usize::MAX] {
            for (entry, whole) in entries.iter().zip(&whole) {
                let mut damaged = whole[..keep.min(whole.len() - 1)].to_vec();
                damaged.extend(whole.last().filter(|_| keep == usize::MAX).map(|byte| byte ^ 1));
                std::fs::write(entry, damaged).unwrap();
            }
            let again = obtain(&cache, &probe(""), target).unwrap();
            assert!(again.compiled_in.is_some() && again.artifact == first.artifact, "{keep} bytes kept");
            assert!(obtain(&cache, &probe(""), target).unwrap().compiled_in.is_none());
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_costs_time_only() {
        if nvrtc_or_skip("a_cache_that_cannot_be_written_costs_time_only").is_none() {
            return;
        }
        // A file instead of the folder fails for every user, even root.
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let target = Target::Ptx { arch: 80, specific: false };
        let cache = Cache::at(&file);
        let obtained = obtain(&cache, &probe(""), target).unwrap();
        assert!(obtained.compiled_in.is_some() && obtained.cached.is_err());
        let again = obtain(&cache, &probe(""), target).unwrap();
        assert!(again.compiled_in.is_none() && again.artifact == obtained.artifact, "it is kept in memory");
        assert!(obtain(&Cache::at(&file), &probe(""), target).unwrap().compiled_in.is_some());
    }

    #[test]
    fn what_is_missing_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target::Ptx { arch: 70, specific: false };
        let store = KernelStore::new(90, target, Cache::at(folder.path()));
        let bundles = Bundles::at([folder.path().join("none.qgk")].into_iter(), 90);
        let text = store.what_to_provide("no NVRTC", &bundles);
        for part in ["QGEMM_KERNELS", "--arch 70 --ptx", "QGEMM_CACHE", "QGEMM_NVRTC", "none.qgk"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
