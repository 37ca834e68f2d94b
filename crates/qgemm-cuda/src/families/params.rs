//! What a kernel is launched with: numbers and addresses, and X once more for TMA.

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{GemmPointers, GemmShape, TileSchedule};

use crate::tensor_map::EncodedMap;

/// The kernels' parameter (`GemmParams` in `sched/params.cuh`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct GemmParams {
    pub shape: GemmShape,
    pub at: GemmPointers,
    pub tiles: TileSchedule,
}

/// Alignment of a tensor map in a kernel's parameter.
const MAP_ALIGNMENT: usize = 64;
const PADDING: usize = (size_of::<GemmParams>().next_multiple_of(MAP_ALIGNMENT) - size_of::<GemmParams>()) / 8;

/// `FedGemmParams` in `mainloop/fed_params.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    gemm: GemmParams,
    padding: [u64; PADDING],
    x_maps: [EncodedMap; 2],
}

/// The parameter of one launch.
#[derive(Clone, Copy, Debug)]
pub struct LaunchParams {
    params: MappedParams,
    /// Bytes of it that the kernel takes.
    len: usize,
}

impl LaunchParams {
    pub(super) fn plain(gemm: GemmParams) -> Self {
        Self { params: MappedParams { gemm, ..MappedParams::zeroed() }, len: size_of::<GemmParams>() }
    }

    /// With the maps of X for whole tiles of tokens and for the last.
    pub(super) fn with_maps(gemm: GemmParams, x_maps: [EncodedMap; 2]) -> Self {
        let params = MappedParams { gemm, x_maps, ..MappedParams::zeroed() };
        Self { params, len: size_of::<MappedParams>() }
    }

    /// As the kernel sees it.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::bytes_of(&self.params)[..self.len]
    }
}
