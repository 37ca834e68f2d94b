//! MoE GEMM on Hopper with weights decoded to bytes
//! and quantized X: kernels of `gemm` whose CTAs take
//! tiles of all experts in turn.

use bytemuck::{Pod, Zeroable};
use qgemm_formats::{Format, XFormat};
use qgemm_hal::abi::XPlanePointers;
use qgemm_hal::{HalError, KernelId, Variant, XPlanes};

use super::super::gemm::{FAULTS, Fp8Matrix, Instance, STAGE_K, XAccess, of_planes, plane_pointers};
use super::super::kernel_launch::Addresses;
use super::super::launch_params::LaunchParams;
use super::params::ProductParams;
use super::{constants_of, product_id};
use crate::spec::KernelSpec;
use crate::tensor_map::{EncodedMap, MapElement, TileMap};

/// Maximum tokens of a tile. Beyond it, consumers lack registers, because
/// producers must also look up tiles.
const MOST_TOKENS: u32 = 128;
/// `sizeof(WorkTileInfo)`. There is one more of them than stages.
const TILE_INFO: u32 = 48;
/// End-of-tile flag shared by a CTA's threads, padded to the alignment.
const FLAG: u32 = 16;

/// A kernel.
#[derive(Clone, Debug)]
pub(super) struct DecodedKernel(Instance);

/// `W4A8Params` in `mainloop/sm90/w4a8_pipeline.cuh`,
/// of products with experts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    product: ProductParams,
    x: XPlanePointers,
    padding: [u64; PADDING],
    x_map: EncodedMap,
    w_map: EncodedMap,
}

const UNPADDED: usize = size_of::<ProductParams>() + size_of::<XPlanePointers>();
const PADDING: usize = (UNPADDED.next_multiple_of(64) - UNPADDED) / 8;

impl DecodedKernel {
    /// Kernels for weights of `format` and activations of `x`.
    pub fn all(format: Format, x: XFormat, variant: Variant) -> impl Iterator<Item = Self> {
        let of_x = of_planes(format, variant).iter().filter(move |i| i.x_format == x);
        let all = of_x.filter(|i| i.main_loop.x_access == XAccess::TmaOfPlanes && i.tile_m <= MOST_TOKENS);
        all.map(|instance| {
            let shared_bytes = instance.shared_bytes - FLAG + (instance.stages + 1) * TILE_INFO + FAULTS;
            Self(Instance { shared_bytes, ..instance.clone() })
        })
    }

    pub fn instance(&self) -> &Instance {
        &self.0
    }

    pub fn id(&self) -> KernelId {
        product_id(&self.0)
    }

    pub fn spec(&self) -> KernelSpec {
        self.0.spec_with(self.id(), constants_of(&self.0, true))
    }

    /// Kernel parameter for quantized X `x`, with the address `scales` of
    /// its scales and the weights' map `w_map` without address.
    ///
    /// # Errors
    /// Errors of encoding maps.
    pub fn params(
        &self,
        product: ProductParams,
        x: &Fp8Matrix,
        planes: &XPlanes,
        scales: u64,
        w_map: &TileMap,
        at: &Addresses<'_>,
    ) -> Result<LaunchParams, HalError> {
        let tile = [STAGE_K, self.0.tile_m];
        let x_map = TileMap::matrix(x.address, MapElement::Byte, [x.columns, x.rows], x.row_bytes, tile);
        let w_map = TileMap { address: product.gemm.at.w, ..*w_map };
        Ok(LaunchParams::of(&MappedParams {
            product,
            x: XPlanePointers { scales, ..plane_pointers(planes) },
            x_map: (at.encode)(&x_map)?,
            w_map: (at.encode)(&w_map)?,
            ..MappedParams::zeroed()
        }))
    }
}
