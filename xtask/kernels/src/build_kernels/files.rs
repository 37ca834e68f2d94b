//! Bundle files of a chip: one for each weight format, and one for each operation
//! without weights, so that a program carries what it needs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context;
use qgemm_cuda::{Artifact, BUNDLE_EXTENSION, Bundle, KernelSpec, Target};
use qgemm_hal::KernelId;

/// Kernels built for a target.
pub(super) struct Built {
    pub target: Target,
    pub kernels: Vec<(KernelSpec, Artifact)>,
}

/// Checks that files can be created in the folder, which
/// is created if necessary.
pub(super) fn writable(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)
        .and_then(|()| tempfile::tempfile_in(folder))
        .map(drop)
        .with_context(|| format!("bundles cannot be written to {}", folder.display()))
}

/// Writes the bundles of a chip, and prints their sizes.
///
/// # Errors
/// When a file cannot be written.
pub(super) fn write(out: &Path, version: &str, Built { target, kernels }: &Built) -> anyhow::Result<()> {
    let mut parts = BTreeMap::<String, Vec<(KernelSpec, Artifact)>>::new();
    for (spec, artifact) in kernels {
        parts.entry(part(&spec.name)).or_default().push((spec.clone(), artifact.clone()));
    }
    let (mut all, mut all_unpacked) = (0, 0);
    for (part, kernels) in &parts {
        let path = out.join(format!("{target}-{part}.{BUNDLE_EXTENSION}"));
        let bytes = Bundle::write(&path, *target, version, kernels)?;
        let unpacked: usize = kernels.iter().map(|(_, artifact)| artifact.image.len()).sum();
        print(&path.display().to_string(), kernels.len(), bytes, unpacked);
        (all, all_unpacked) = (all + bytes, all_unpacked + unpacked);
    }
    print(&format!("{target}, {} files", parts.len()), kernels.len(), all, all_unpacked);
    Ok(())
}

fn print(what: &str, kernels: usize, bytes: u64, unpacked: usize) {
    println!("{what}: {kernels} kernels, {:.2} MB ({:.1} MB unpacked)", bytes as f64 / 1e6, unpacked as f64 / 1e6);
}

/// File of a kernel: the format of the weights that it reads, or its operation.
pub fn part(name: &str) -> String {
    let id = name.parse::<KernelId>();
    let part = id.map(|id| id.spec.weight().map_or(id.operation(), |weight| weight.name).to_owned());
    part.unwrap_or_else(|_| name.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use qgemm_cuda::manifest;
    use qgemm_hal::Variant;

    use super::*;

    #[test]
    fn each_format_and_each_other_operation_has_a_file() {
        let parts: BTreeSet<String> = manifest(Variant::Sm90).iter().map(|spec| part(&spec.name)).collect();
        for expected in ["q4_k", "int4_g128", "attention", "norm"] {
            assert!(parts.contains(expected), "{expected}");
        }
        assert!(parts.iter().all(|part| !part.contains([':', '/'])));
    }
}
