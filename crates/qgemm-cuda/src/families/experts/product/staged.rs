//! MoE GEMM with integer weights and INT8 activations, both
//! staged in shared memory: kernels of `gemm` with one CTA for
//! each tile of an expert's rows.

use std::cmp::Reverse;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{Format, XFormat};
use qgemm_hal::abi::XPlanePointers;
use qgemm_hal::{CheckedExperts, KernelId, Variant, XPlanes};

use super::super::grid::two_dimensions;
use super::identity::{constants_of, product_id};
use super::params::{ProductParams, places};
use crate::families::gemm::{Instance, XAccess, fits_registers_as, of_planes, plane_pointers, spills_key};
use crate::families::launch_params::LaunchParams;
use crate::spec::KernelSpec;

/// Supported formats of X: block scales and token scales.
const CODES: [XFormat; 2] = [XFormat::Q8_0, XFormat::Int8Token];

/// A kernel.
#[derive(Clone, Debug)]
pub(super) struct StagedKernel(Instance);

/// `SignedByteParams` in `mainloop/signed_byte_sums.cuh`,
/// of products with experts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct SignedByteParams {
    product: ProductParams,
    x: XPlanePointers,
}

impl StagedKernel {
    /// Kernels for weights of `format` and activations of `x`.
    pub fn all(format: Format, x: XFormat, variant: Variant) -> impl Iterator<Item = Self> {
        let codes = match x {
            // A shift finds the scale, and X block
            // sums are not read.
            XFormat::Q8_0 | XFormat::Q8_256 | XFormat::Q8_1 => Some(CODES[0]),
            XFormat::Int8Token => Some(CODES[1]),
            _ => None,
        };
        let fits = |kernel: &Self| fits_registers_as(kernel.id(), &kernel.0);
        codes.into_iter().flat_map(move |codes| best(format, codes, variant, &fits))
    }

    pub fn instance(&self) -> &Instance {
        &self.0
    }

    pub fn id(&self) -> KernelId {
        product_id(&self.0)
    }

    pub fn spec(&self) -> KernelSpec {
        self.0.spec_with(self.id(), constants_of(&self.0, false))
    }

    /// Grid: W tiles, and row tiles (fewer than 2^31) plus one
    /// place that checks for index faults.
    pub fn grid(&self, op: &CheckedExperts, n_tiles: u32) -> [u32; 3] {
        let [y, z] = two_dimensions(places(op, self.0.tile_m as usize, true) + 1);
        [n_tiles, y, z]
    }

    /// Kernel parameter for X in `planes`, with the
    /// address `scales` of its scales.
    pub fn params(&self, product: ProductParams, planes: &XPlanes, scales: u64) -> LaunchParams {
        LaunchParams::of(&SignedByteParams { product, x: XPlanePointers { scales, ..plane_pointers(planes) } })
    }
}

/// For each number of tokens, the kernel with the largest W
/// tile that fits in registers, because fewer CTAs then copy X.
/// Narrowing the problem to one expert takes registers (`kernels.lock`).
fn best(format: Format, codes: XFormat, variant: Variant, fits: &dyn Fn(&StagedKernel) -> bool) -> Vec<StagedKernel> {
    let is_staged = |i: &&Instance| i.main_loop.x_access == XAccess::Planes && i.x_format == codes;
    let mut all: Vec<&Instance> = of_planes(format, variant).iter().filter(is_staged).collect();
    all.sort_by_key(|i| (i.tile_m, Reverse((i.tile_n, i.stages))));
    let same_tokens = all.chunk_by(|a, b| a.tile_m == b.tile_m).rev();
    let fitting = same_tokens.filter_map(|all| all.iter().map(|&i| StagedKernel(i.clone())).find(fits));
    // On Hopper f16 kernels are faster than these, so
    // the bundle keeps only one.
    fitting.take(if variant == Variant::Sm90 { 1 } else { usize::MAX }).collect()
}

/// Checks whether each kernel fits in registers, using its
/// line of `kernels.spills`.
pub(super) fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    let fits = |kernel: &StagedKernel| fits(spills_key(kernel.id(), &kernel.0), kernel.spec());
    for (format, codes) in Format::all().flat_map(|format| CODES.map(|codes| (format, codes))) {
        best(format, codes, variant, &fits);
    }
}
