//! Parameter of MoE GEMM kernels, operand access,
//! and number of row tiles.

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::PackedLayout;
use qgemm_hal::abi::{ExpertGroups, expert_form_code};
use qgemm_hal::{CheckedExperts, ExpertForm, ExpertOperand, HalError, Operand, OperandDesc, Operands};

use crate::families::gemm::GemmParams;
use crate::families::kernel_launch::{Addresses, with_constants};

/// `GemmParams` in `sched/params.cuh`, for MoE GEMM.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct ProductParams {
    pub gemm: GemmParams,
    pub groups: ExpertGroups,
}

/// `INDEX_READY` in `sched/early_experts.cuh`: the bit
/// after the flags of `gemm`.
const INDEX_READY: u32 = 1 << 31;

impl ProductParams {
    /// Parameter without addresses. `early` allows the kernel to prefetch W
    /// before it waits for earlier work.
    pub fn new(gemm: GemmParams, groups: ExpertGroups, early: bool) -> Self {
        let mut params = Self { gemm, groups };
        params.gemm.shape.flags |= if early { INDEX_READY } else { 0 };
        params
    }

    /// Fills in the operands' addresses. The slots begin at
    /// byte `list` of the lists.
    pub fn find(&mut self, operands: &Operands<'_>, places: &Addresses<'_>, list: usize) -> Result<(), HalError> {
        use ExpertOperand as O;
        let at = &mut self.gemm.at;
        at.x = places.of(operands, O::X)?;
        at.w = places.of(operands, O::W)?;
        at.row_scale = places.of(operands, O::RowScale)?;
        at.k_order = places.of(operands, O::KOrder)?;
        at.c = places.of(operands, O::C)?;
        at.bias = places.of(operands, O::Bias)?;
        at.token_scale = places.of(operands, O::TokenScale)?;
        at.residual = places.of(operands, O::Residual)?;
        at.d = places.of(operands, O::D)?;
        let groups = &mut self.groups;
        groups.index = places.of(operands, O::Index)?;
        groups.router_weights = places.of(operands, O::RouterWeights)?;
        groups.status = places.of(operands, O::Status)?;
        groups.offsets = places.of(operands, O::Lists)?;
        if groups.form != expert_form_code(ExpertForm::Masked { capacity: 0 }) {
            groups.rows = operands.rows(groups.rows as usize) as u32;
        }
        groups.list = if groups.offsets == 0 { 0 } else { groups.offsets + list as u64 };
        Ok(())
    }
}

/// Expert description for a kernel, without addresses.
pub(super) fn groups(op: &CheckedExperts, layout: &PackedLayout) -> ExpertGroups {
    let each = &op.each;
    let k_tiles = layout.k_tiles(each.stored_k);
    ExpertGroups {
        w_bytes: layout.bytes(op.row_pitch, each.stored_k) as u64,
        bias_bytes: each.bias.filter(|_| op.row_pitch > 0).map_or(0, |dtype| each.bias_len() * dtype.bytes()) as u64,
        row_pitch: op.row_pitch as u32,
        k_order_len: if op.row_pitch > 0 { (k_tiles * layout.k_tile) as u32 } else { 0 },
        experts: op.experts as u32,
        form: expert_form_code(op.form),
        rows: rows(op),
        x_sharers: match op.form {
            ExpertForm::Indexed { top_k, x_per_slot: false } => top_k as u32,
            _ => 1,
        },
        ..ExpertGroups::default()
    }
}

/// Row count for kernels; with a capacity, that of one expert.
fn rows(op: &CheckedExperts) -> u32 {
    match op.form {
        ExpertForm::Masked { capacity } => capacity as u32,
        _ => op.each.m as u32,
    }
}

/// Operand access when the index is ready before launch: index and
/// lists are constant, like weights.
pub(super) static READY_OPERANDS: [OperandDesc; ExpertOperand::ALL.len()] =
    with_constants(ExpertOperand::ALL, &[ExpertOperand::Index as usize, ExpertOperand::Lists as usize]);

/// Maximum number of row tiles.
pub(super) fn places(op: &CheckedExperts, tile_m: usize, grouped: bool) -> usize {
    let m = op.each.m;
    match op.form {
        ExpertForm::Indexed { .. } if !grouped => m,
        ExpertForm::Masked { capacity } => op.experts * capacity.div_ceil(tile_m),
        // Each expert with rows may have a partial tile.
        _ => (m + op.experts.min(m) * (tile_m - 1)) / tile_m,
    }
}
