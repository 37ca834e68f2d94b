//! Products with experts whose integer weights are multiplied with signed bytes of X by integer instructions, both through shared memory: kernels
//! of `gemm` whose CTAs each find the rows of one expert.

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{Format, XFormat};
use qgemm_hal::abi::XPlanePointers;
use qgemm_hal::{CheckedExperts, KernelId, Variant, XPlanes};

use super::super::gemm::{Instance, XAccess, fits_registers_as, of_planes, plane_pointers, spills_key};
use super::super::launch_params::LaunchParams;
use super::params::{ProductParams, places};
use super::{EXPERTS_MACRO, product_id, two_dimensions};
use crate::spec::KernelSpec;

/// A kernel.
#[derive(Clone, Debug)]
pub(super) struct StagedKernel(Instance);

/// `SignedByteParams` in `mainloop/signed_byte_sums.cuh`, of products with experts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct SignedByteParams {
    product: ProductParams,
    x: XPlanePointers,
}

impl StagedKernel {
    /// Those for weights of `format` and activations of `x`.
    pub fn all(format: Format, x: XFormat, variant: Variant) -> impl Iterator<Item = Self> {
        let codes = match x {
            // Scales are found by a shift, and X's own sums are not read.
            XFormat::Q8 { .. } | XFormat::Q8_1 => Some(XFormat::Q8 { block: 32 }),
            XFormat::Int8Token => Some(x),
            _ => None,
        };
        candidates(format, variant).filter(move |kernel| Some(kernel.0.x_format) == codes && kernel.fits_registers())
    }

    pub fn instance(&self) -> &Instance {
        &self.0
    }

    pub fn id(&self) -> KernelId {
        product_id(&self.0)
    }

    pub fn spec(&self) -> KernelSpec {
        self.0.spec_with(self.id(), EXPERTS_MACRO)
    }

    fn fits_registers(&self) -> bool {
        fits_registers_as(self.id(), &self.0)
    }

    /// The grid: tiles of W, and tiles of rows, of which there are fewer than 2^31, behind which one more place looks for faults.
    pub fn grid(&self, op: &CheckedExperts, n_tiles: u32) -> [u32; 3] {
        let [y, z] = two_dimensions(places(op, self.0.tile_m as usize, true) + 1);
        [n_tiles, y, z]
    }

    /// The parameter for codes in `planes`, of which `scales` is the address of scales.
    pub fn params(&self, product: ProductParams, planes: &XPlanes, scales: u64) -> LaunchParams {
        LaunchParams::of(&SignedByteParams { product, x: XPlanePointers { scales, ..plane_pointers(planes) } })
    }
}

/// Every kernel, whether it fits in registers or not: those of each number of tokens whose tiles of W are largest, as fewer CTAs then copy X.
fn candidates(format: Format, variant: Variant) -> impl Iterator<Item = StagedKernel> {
    let all = of_planes(format, variant).iter().filter(|i| i.main_loop.x_access == XAccess::Planes);
    let is_largest = move |i: &&Instance| {
        let mut same = of_planes(format, variant).iter().filter(|other| {
            other.main_loop.x_access == XAccess::Planes && (other.tile_m, other.x_format) == (i.tile_m, i.x_format)
        });
        same.all(|other| (other.tile_n, other.stages) <= (i.tile_n, i.stages))
    };
    all.filter(is_largest).map(|instance| StagedKernel(instance.clone()))
}

/// Asks of each kernel whether it fits in registers, by its line of `kernels.spills`.
pub(super) fn ask_registers(variant: Variant, fits: &dyn Fn(String, KernelSpec) -> bool) {
    for kernel in Format::all().flat_map(|format| candidates(format, variant)) {
        fits(spills_key(kernel.id(), &kernel.0), kernel.spec());
    }
}
