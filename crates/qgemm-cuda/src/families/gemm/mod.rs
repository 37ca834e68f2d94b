//! GEMM kernels, one file for each main loop; the kernel
//! list; launch parameters.

mod common;
mod fp8;
mod fp8_kernels;
mod gemm_simt;
mod gemm_sliced_k;
mod gemv;
mod instance;
mod instances;
mod main_loop;
mod params;
mod projection;
mod sequence;
mod shares;
mod sm120_block_scaled;
mod sm120_tma_ws;
mod sm70_s8_two_stage;
mod sm70_two_stage;
mod sm80_cp_async;
mod sm80_s8_cp_async;
mod sm89_fp8_cp_async;
mod sm90_bulk_sliced_k;
mod sm90_bulk_stream;
mod sm90_fp8_wgmma_ws;
mod sm90_s8_groups_wgmma_ws;
mod sm90_s8_wgmma_ws;
mod sm90_w4a8_wgmma_ws;
mod sm90_wgmma_ws;
mod spills;
mod types;
mod x_prologue;

pub(super) use common::{FAULTS, K_BLOCK, STAGE_K};
pub(super) use fp8::{Fp8Kernel, Fp8Matrix};
pub(super) use fp8_kernels::{fp8_kernels, serving};
pub(super) use gemv::for_experts;
pub(super) use instance::Instance;
pub(super) use instances::{Key, ListedKernels, ask_registers, instances, instances_for_experts, of_planes};
pub(super) use main_loop::{EarlyPrefetch, ExpertCtas, MainLoopKind, XAccess};
pub(super) use params::{Cut, GemmParams, params, plane_pointers};
pub(super) use projection::{
    NAME as PROJECTION, ask_registers_of_projections, projection_configs, projection_source_hash, projection_specs,
};
pub use sequence::gemm_sequence;
pub(super) use sm90_bulk_stream::counts_row_tiles;
pub(super) use sm120_block_scaled::{BlockScaledKernel, BlockScaledX, block_scaled_kernels};
pub(super) use spills::{fits_registers_as, key as spills_key};
pub(super) use types::Types;
pub(super) use x_prologue::{gathers, x_prologue};
