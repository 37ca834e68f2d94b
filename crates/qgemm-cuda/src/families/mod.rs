//! Kernel families of the CUDA backend, and the
//! list of all their kernels.

mod attention;
mod catalog;
mod convert;
mod dequantize;
mod experts;
mod gemm;
mod indexer;
mod kernel_launch;
mod kv_append;
mod launch_params;
mod matmul;
mod norm;
mod optimizer;
mod prelude;
mod quantize;
mod repack;
mod routing;
mod unpack;

use qgemm_formats::{DType, Format, XFormat};
use qgemm_hal::Variant;

pub use attention::attention_sequence;
pub use catalog::CATALOG;
pub use convert::convert_sequence;
pub use dequantize::dequantize_sequence;
pub use experts::experts_sequence;
pub use gemm::gemm_sequence;
pub use indexer::indexer_sequence;
pub use kernel_launch::{KernelLaunch, MakeKernel, Places};
pub use kv_append::kv_append_sequence;
pub use launch_params::LaunchParams;
pub use matmul::matmul_sequence;
pub use norm::norm_sequence;
pub use optimizer::optimizer_sequence;
pub use quantize::quantize_sequence;
pub use repack::{Repack, RepackLaunch, repack_bandwidth};
pub use routing::routing_sequence;
pub use unpack::unpack_sequence;

use crate::probe;
use crate::spec::KernelSpec;

/// All kernels that a device of `variant` may load: what
/// `cargo xtask build-kernels` compiles.
pub fn manifest(variant: Variant) -> Vec<KernelSpec> {
    let instances = Format::all()
        .flat_map(|format| DType::ALL.into_iter().flat_map(move |x| gemm::instances(format, x, variant)))
        .chain(Format::all().flat_map(|format| gemm::of_planes(format, variant)))
        .map(|instance| instance.spec());
    let fp8 = Format::all()
        .flat_map(|format| XFormat::ALL.into_iter().flat_map(move |x| gemm::fp8_kernels(format, x, variant)))
        .map(|kernel| kernel.spec());
    let block_scaled = Format::all()
        .flat_map(|format| XFormat::ALL.into_iter().flat_map(move |x| gemm::block_scaled_kernels(format, x, variant)))
        .map(|kernel| kernel.spec());
    let repacks = Format::all().filter_map(|format| Repack::new(format, variant)).map(|repack| repack.spec().clone());
    std::iter::once(probe::spec())
        .chain(repacks)
        .chain(convert::specs(variant))
        .chain(routing::specs(variant))
        .chain(matmul::specs(variant))
        .chain(quantize::specs(variant))
        .chain(dequantize::specs(variant))
        .chain(attention::specs(variant))
        .chain(norm::specs(variant))
        .chain(optimizer::specs(variant))
        .chain(kv_append::specs(variant))
        .chain(indexer::specs(variant))
        .chain(unpack::specs(variant))
        .chain(instances)
        .chain(gemm::projection_specs(variant))
        .chain(experts::specs(variant))
        .chain(fp8)
        .chain(block_scaled)
        .collect()
}

/// Asks `fits` whether each candidate kernel of `variant` fits in
/// registers, as far as earlier answers require.
/// `cargo xtask spills` writes `kernels.spills` from the answers.
/// The text is a kernel's line in that file.
pub fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    gemm::ask_registers(variant, &|line, instance| fits(line, instance.spec()));
    gemm::ask_registers_of_projections(variant, fits);
    experts::ask_registers(variant, fits);
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
    fn the_manifest_names_each_kernel_once_and_preludes_are_complete() {
        for variant in Variant::ALL {
            let specs = manifest(variant);
            let names: BTreeSet<_> = specs.iter().map(|s| &s.name).collect();
            assert_eq!(names.len(), specs.len(), "{variant}");
            for spec in &specs {
                assert_eq!(source::undefined_name(&spec.prelude, spec.text), None, "{}", spec.name);
            }
            assert!((100..2600).contains(&specs.len()), "{variant}: {} kernels", specs.len());
        }
    }
}
