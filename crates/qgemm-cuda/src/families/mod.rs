//! The kernel families of the CUDA backend, and the list of all their kernels.

mod block_scaled;
mod gemm;
mod gemv;
mod instance;
mod kernel;
mod params;
mod prelude;
mod repack;
mod sliced_k;
mod staging;
mod sync_copy;
mod warpgroup;

use qgemm_formats::{DType, Format};
use qgemm_hal::{KernelFamily, Variant};

pub use block_scaled::{BlockScaledParams, block_scaled_geometry, block_scaled_spec};
pub use kernel::{GemmLaunch, launch_of};
pub use params::{EncodedMap, LaunchParams, XMap};
pub use staging::StageLaunch;

pub use repack::{Repack, RepackLaunch};

use crate::probe;
use crate::spec::KernelSpec;
pub use instance::class as pack_class;

use instance::Instance;

/// The families, in no particular order: the scheduler ranks what they offer.
pub static FAMILIES: &[&dyn KernelFamily] = &[&gemv::Gemv, &gemm::Gemm];

/// Every kernel that a device of `variant` may ask for: what `cargo xtask build-kernels` compiles.
pub fn manifest(variant: Variant) -> Vec<KernelSpec> {
    let instances = Format::all()
        .flat_map(|format| DType::ALL.into_iter().flat_map(move |x| instances(format, x, variant)))
        .map(|instance| instance.spec());
    let block_scaled = Format::all().filter(|_| variant == Variant::Sm120).filter_map(block_scaled_spec);
    let repacks = Format::all().filter_map(|format| Repack::new(format, variant)).map(|repack| repack.spec().clone());
    std::iter::once(probe::spec())
        .chain(repacks)
        .chain(staging::specs(variant))
        .chain(instances)
        .chain(block_scaled)
        .collect()
}

fn instances(format: Format, x: DType, variant: Variant) -> impl Iterator<Item = Instance> {
    gemv::instances(format, x, variant).into_iter().chain(gemm::instances(format, x, variant))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
    fn the_manifest_names_each_kernel_once_and_holds_hundreds() {
        for variant in Variant::ALL {
            let specs = manifest(variant);
            let names: BTreeSet<_> = specs.iter().map(|s| &s.name).collect();
            assert_eq!(names.len(), specs.len(), "{variant}");
            assert!((100..1000).contains(&specs.len()), "{variant}: {} kernels", specs.len());
        }
    }
}
