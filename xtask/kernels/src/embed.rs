//! Test of qgemm-cuda's feature `embed-kernels`: a program
//! builds with a bundle, and does not build when the
//! bundle is missing or unusable.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail, ensure};
use qgemm_cuda::{BUNDLE_EXTENSION, Bundle, EMBED_VARIABLE, KernelSpec, Target, build, manifest};
use qgemm_hal::Variant;
use xtask::workspace;

const TARGET: Target = Target::Cubin { arch: 80, specific: false };

/// Runs the test.
///
/// # Errors
/// When a build does not end as expected.
pub fn run() -> anyhow::Result<()> {
    let kernels = workspace::target_folder()?.join("kernels");
    let folder = kernels.join("embed-test");
    let bundle = folder.join(format!("{TARGET}.{BUNDLE_EXTENSION}"));
    let spec = kernel()?;
    let artifact = build::compile(&kernels.join("cache"), &spec, TARGET)?.artifact;
    Bundle::write(&bundle, TARGET, &artifact.nvrtc, &[(spec, artifact.clone())])?;
    let good = fs::read(&bundle)?;

    // The tests of this crate that the feature enables,
    // at the end of this file.
    let status = workspace::cargo()
        .args(["test", "--package", "xtask-kernels", "--features", "embed-kernels", "embedded"])
        .env(EMBED_VARIABLE, &folder)
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "the program with a bundle in it: {status}");

    refused(None, EMBED_VARIABLE)?;
    refused(Some(Path::new("kernels")), "absolute")?;
    refused(Some(&folder.join("none")), "none")?;
    let mut old = good.clone();
    // The format version, after eight bytes of magic.
    old[8] -= 1;
    for (bytes, why) in [(old, "build it again"), (good[..good.len() - 1].to_vec(), "cut off")] {
        fs::write(&bundle, bytes)?;
        refused(Some(&folder), why)?;
    }
    fs::remove_dir_all(&folder)?;
    println!("a bundle is embedded, and refused with the reason where it cannot be");
    Ok(())
}

/// A kernel that compiles quickly.
fn kernel() -> anyhow::Result<KernelSpec> {
    let probe = manifest(Variant::Sm80).into_iter().find(|spec| spec.symbol == "read_probe");
    probe.context("no kernel has the symbol read_probe")
}

/// Checks that the crate does not build with `bundles`, and
/// that the error contains `why`.
fn refused(bundles: Option<&Path>, why: &str) -> anyhow::Result<()> {
    let mut command: Command = workspace::cargo();
    command.args(["check", "--package", "xtask-kernels", "--features", "embed-kernels"]).env_remove(EMBED_VARIABLE);
    command.envs(bundles.map(|path| (EMBED_VARIABLE, path)));
    let output = command.output().context("starting cargo")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        bail!("{EMBED_VARIABLE}={bundles:?} was accepted, and should not be: {why}");
    }
    let sentence = said.lines().find(|line| line.starts_with("error: ") && line.contains("embed-kernels"));
    ensure!(sentence.is_some_and(|s| s.contains(why)), "{EMBED_VARIABLE}={bundles:?} should say `{why}`:\n{said}");
    Ok(())
}

#[cfg(all(test, feature = "embed-kernels"))]
mod tests {
    use super::*;

    #[test]
    fn embedded_kernels_are_those_of_the_bundle() {
        let bundles = Bundle::embedded().unwrap();
        let [bundle] = bundles.as_slice() else { panic!("{} bundles", bundles.len()) };
        assert_eq!((bundle.target(), bundle.len()), (TARGET, 1));
        let artifact = bundle.read(&kernel().unwrap(), 86).unwrap().unwrap();
        assert!(artifact.image.starts_with(b"\x7fELF"));
        assert!(artifact.resources.unwrap().registers > 8);
    }
}
