//! Kernel families of the CUDA backend, and the
//! list of all their kernels.

mod attention;
mod catalog;
mod convert;
mod dequantize;
mod experts;
mod gather_rows;
mod gemm;
mod indexer;
mod kernel_launch;
mod kv_append;
mod launch_params;
mod linear_attention;
mod matmul;
mod merge_attention;
mod norm;
pub(crate) mod one_shot;
mod optimizer;
mod prelude;
mod quantize;
mod repack;
mod routing;
mod sampling;
mod short_conv;
mod unpack;

use qgemm_formats::Format;
use qgemm_hal::{KernelId, Variant};

pub use catalog::{CATALOG, CudaOperation};
pub use kernel_launch::{Addresses, KernelLaunch, MakeKernel};
pub use launch_params::LaunchParams;
pub use repack::{Repack, RepackLaunch, repack_bandwidth};

use crate::probe;
use crate::spec::KernelSpec;

/// All kernels that a device of `variant` may load.
pub fn all_kernels(variant: Variant) -> Vec<KernelSpec> {
    let repacks = Format::all().filter_map(|format| Repack::new(format, variant)).map(|repack| repack.spec().clone());
    [probe::spec(), one_shot::spec(variant)].into_iter().chain(repacks).chain(catalog::specs(variant)).collect()
}

/// Kernels that bundles have: all but those of rare formats, which are
/// compiled on first use.
pub fn manifest(variant: Variant) -> Vec<KernelSpec> {
    all_kernels(variant).into_iter().filter(|spec| !is_rare(spec)).collect()
}

/// Whether a kernel reads weights of a rare format.
fn is_rare(spec: &KernelSpec) -> bool {
    let id = spec.name.parse::<KernelId>().ok();
    id.and_then(|id| id.spec.weight()).is_some_and(|weight| weight.is_rare)
}

/// Asks `fits` whether each candidate kernel of `variant` fits in
/// registers, as far as earlier answers require. Kernels of rare
/// formats are assumed to fit.
/// `cargo xtask spills` writes `kernels.spills` from the answers.
/// The text is a kernel's line in that file.
pub fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    let fits = |line, spec| is_rare(&spec) || fits(line, spec);
    gemm::ask_registers(variant, &|line, instance| fits(line, instance.spec()));
    gemm::ask_registers_of_projections(variant, &fits);
    experts::ask_registers(variant, &fits);
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::source;

    #[test]
    fn every_format_has_its_dequantization_source() {
        for format in Format::all() {
            let path = format!("dequant/{}.cuh", format.dequant);
            assert!(source::find(&path).is_some(), "{path} is missing");
        }
    }

    #[test]
    fn the_manifest_names_each_kernel_once_and_preludes_are_complete() {
        for variant in Variant::ALL {
            let specs = manifest(variant);
            let names: BTreeSet<_> = specs.iter().map(|s| &s.name).collect();
            assert_eq!(names.len(), specs.len(), "{variant}");
            for spec in &specs {
                assert_eq!(source::undefined_name(&spec.prelude, spec.text), None, "{}", spec.name);
            }
            assert!((100..2700).contains(&specs.len()), "{variant}: {} kernels", specs.len());
            assert!(all_kernels(variant).len() > specs.len() + 100, "{variant}: rare formats have kernels");
        }
    }

    /// Kernels that pack or read rows have a name for each format, and may be the same.
    #[test]
    fn no_two_products_are_the_same_code() {
        for variant in Variant::ALL {
            let mut names = BTreeMap::new();
            let is_product = |spec: &KernelSpec| ["gemm:", "experts:"].iter().any(|op| spec.name.starts_with(op));
            for spec in all_kernels(variant).into_iter().filter(is_product) {
                let earlier = names.insert((spec.entry, spec.symbol, spec.prelude), spec.name.clone());
                assert_eq!(earlier, None, "{variant} {}", spec.name);
            }
        }
    }
}
