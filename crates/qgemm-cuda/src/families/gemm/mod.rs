//! GEMM kernels, one file for each main loop; the kernel
//! list; launch parameters.

mod common;
mod families;
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

use qgemm_formats::{DType, Format, XFormat};
use qgemm_hal::Variant;

use crate::spec::KernelSpec;

pub(super) use common::{FAULTS, K_BLOCK, STAGE_K};
pub(super) use families::FAMILIES;
pub(super) use fp8::{Fp8Kernel, Fp8Matrix};
pub(super) use fp8_kernels::{fp8_kernels, serving};
pub(super) use gemv::for_experts;
pub(super) use instance::Instance;
pub(super) use instances::{Key, ListedKernels, ask_registers, instances, instances_for_experts, of_planes};
pub(super) use main_loop::{EarlyPrefetch, ExpertCtas, XAccess};
pub(super) use params::{Cut, GemmParams, params, plane_pointers};
pub(super) use projection::{ask_registers_of_projections, projection_specs};
pub(super) use sequence::sequence;
pub(super) use sm90_bulk_stream::counts_row_tiles;
pub(super) use sm120_block_scaled::{BlockScaledKernel, BlockScaledX, block_scaled_kernels};
pub(super) use spills::{fits_registers_as, key as spills_key};
pub(super) use types::Types;
pub(super) use x_prologue::x_prologue;

/// All GEMM kernels for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_x = move |format| DType::ALL.into_iter().flat_map(move |x| instances(format, x, variant));
    let instances = Format::all().flat_map(of_x);
    let instances = instances.chain(Format::all().flat_map(move |format| of_planes(format, variant)));
    // A kernel that serves several formats of X is listed with the first.
    let fp8_of =
        move |(format, x)| fp8_kernels(format, x, variant).into_iter().filter(move |i| i.config().x_format == x);
    let of_quantized_x = |format| XFormat::ALL.into_iter().map(move |x| (format, x));
    let fp8 = Format::all().flat_map(of_quantized_x).flat_map(fp8_of).map(|kernel| kernel.spec());
    let block_scaled = Format::all()
        .flat_map(move |format| XFormat::ALL.into_iter().flat_map(move |x| block_scaled_kernels(format, x, variant)))
        .map(|kernel| kernel.spec());
    let instances = instances.map(Instance::spec);
    instances.chain(projection_specs(variant)).chain(fp8).chain(block_scaled)
}
