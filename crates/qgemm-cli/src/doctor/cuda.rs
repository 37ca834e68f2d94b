//! NVIDIA driver, GPUs, compiler, kernel cache and bundles.

use std::path::{Path, PathBuf};

use qgemm_api::cuda::{BundleContents, CacheFolder, Compiler, Installation, installation};
use qgemm_api::{DeviceInfo, DeviceKind, DeviceListing};

use super::finding::Finding;
use crate::contention::{Gpu, gpus};
use crate::table::bytes;

/// Present when NVIDIA's kernel driver is loaded (Linux).
const KERNEL_DRIVER: &str = "/proc/driver/nvidia/version";
/// Share of time that others' kernels may run without a remark.
const BUSY: f64 = 0.05;
/// Size from which a kernel cache deserves a remark.
const LARGE_CACHE: u64 = 4 << 30;

/// Findings about CUDA.
pub fn findings(listed: &[DeviceListing]) -> Vec<Finding> {
    let Installation { driver, nvrtc, cache, bundles, .. } = installation();
    let devices: Vec<&DeviceInfo> = listed.iter().filter_map(cuda_device).collect();
    let mut all = vec![driver_finding(&driver, Path::new(KERNEL_DRIVER).exists())];
    let unusable = listed.iter().find_map(|listing| match listing {
        DeviceListing::Absent { kind: DeviceKind::Cuda, why } if driver.is_ok() => Some(why),
        _ => None,
    });
    all.extend(unusable.map(|why| Finding::fail("gpu", why, "the driver runs, but qgemm can use no GPU")));
    let states = if devices.is_empty() { Vec::new() } else { gpus() };
    all.extend(devices.iter().map(|info| gpu(info, &states)));
    let has_bundle = bundles.iter().any(|(_, bundle)| bundle.is_ok());
    let is_named = std::env::var_os("QGEMM_NVRTC").is_some();
    all.push(compiler(&nvrtc, is_named, !devices.is_empty(), has_bundle));
    all.push(cache_finding(&cache));
    all.extend(bundles.iter().map(bundle));
    all
}

fn cuda_device(listing: &DeviceListing) -> Option<&DeviceInfo> {
    match listing {
        DeviceListing::Found(info) if info.id.kind == DeviceKind::Cuda => Some(info),
        _ => None,
    }
}

fn driver_finding(driver: &Result<String, String>, is_loaded: bool) -> Finding {
    match driver {
        Ok(version) => Finding::ok("nvidia driver", format!("supports CUDA {version}")),
        Err(why) if is_loaded => Finding::fail(
            "nvidia driver",
            why,
            "the kernel driver is loaded: a container lacks its library (`--gpus all`), or versions differ",
        ),
        Err(why) => Finding::ok("nvidia driver", format!("{why}: needed for NVIDIA GPUs alone")),
    }
}

fn gpu(info: &DeviceInfo, states: &[Gpu]) -> Finding {
    let variant = info.variant.map_or_else(|| "-".to_owned(), |variant| variant.to_string());
    let mut found =
        format!("{}: {} ({}, kernels {variant}, {})", info.id, info.name, info.arch, bytes(info.memory_bytes));
    // `nvidia-smi` numbers devices differently, so that only names can be compared.
    let same: Vec<&Gpu> = states.iter().filter(|state| state.name == info.name).collect();
    if let [state] = same[..]
        && let (Some(clock), Some(most)) = (state.sm_mhz, state.most_sm_mhz)
    {
        found += &format!(", {clock:.0} of {most:.0} MHz");
    }
    let busy = |state: &&&Gpu| state.utilization.is_some_and(|share| share > BUSY);
    let busy = same.iter().find(busy).map(|state| format!("GPU {} of nvidia-smi is busy", state.index));
    match same.iter().find_map(|state| state.contention()).or(busy) {
        Some(text) => Finding::warn("gpu", found, format!("{text}: measurements are slower than the GPU is")),
        None => Finding::ok("gpu", found),
    }
}

fn compiler(nvrtc: &Result<Compiler, String>, is_named: bool, has_gpu: bool, has_bundle: bool) -> Finding {
    match nvrtc {
        Ok(compiler) => {
            let path =
                compiler.path.as_ref().map_or("found by the system's loader".into(), |path| path.display().to_string());
            Finding::ok("nvrtc", format!("{} ({path})", compiler.version))
        }
        Err(why) if is_named => Finding::fail("nvrtc", why, "correct or unset QGEMM_NVRTC"),
        Err(why) if has_gpu && !has_bundle => {
            Finding::fail("nvrtc", why, "no CUDA kernel can be compiled, and there is no bundle of compiled ones")
        }
        Err(why) if has_gpu => Finding::warn("nvrtc", why, "kernels that no bundle holds cannot be compiled"),
        Err(_) => Finding::ok("nvrtc", "not found: needed for NVIDIA GPUs alone"),
    }
}

fn cache_finding(cache: &CacheFolder) -> Finding {
    let Some(path) = &cache.path else {
        let advice = "every process compiles its kernels again: set QGEMM_CACHE or HOME";
        return Finding::warn("kernel cache", "there is no folder for it", advice);
    };
    let found = format!("{}: {} files, {}", path.display(), cache.files, bytes(cache.bytes));
    match &cache.refusal {
        Some(why) => {
            let advice = format!("every process compiles its kernels again, because {why}");
            Finding::warn("kernel cache", found, advice)
        }
        None if !cache.exists => Finding::ok("kernel cache", format!("{}: made when needed", path.display())),
        None if cache.bytes > LARGE_CACHE => {
            Finding::warn("kernel cache", found, "its files may be deleted: they are compiled again when needed")
        }
        None => Finding::ok("kernel cache", found),
    }
}

fn bundle((path, contents): &(PathBuf, Result<BundleContents, String>)) -> Finding {
    match contents {
        Ok(contents) => {
            let found = format!("{}: {} kernels for {}", path.display(), contents.kernels, contents.target);
            Finding::ok("bundle", found)
        }
        Err(why) => Finding::fail("bundle", why, "its kernels are not used: build it again, or correct QGEMM_KERNELS"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Status;
    use super::*;

    #[test]
    fn what_a_machine_without_gpu_lacks_is_no_failure() {
        let missing = || Err("not found".to_owned());
        assert_eq!(driver_finding(&missing(), false).status, Status::Ok);
        assert_eq!(driver_finding(&missing(), true).status, Status::Fail);
        assert_eq!(driver_finding(&Ok("12.9".into()), true).found, "supports CUDA 12.9");
        let statuses = [(false, false, false), (false, true, true), (false, true, false), (true, false, false)]
            .map(|(named, gpu, bundle)| compiler(&Err("none".into()), named, gpu, bundle).status);
        assert_eq!(statuses, [Status::Ok, Status::Warn, Status::Fail, Status::Fail]);
    }
}
