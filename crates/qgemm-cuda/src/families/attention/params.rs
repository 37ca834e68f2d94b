//! Parameters of the attention kernels.

use std::f32::consts::LOG2_E;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, AttentionBits, AttentionPointers, AttentionShape, dtype_code};
use qgemm_hal::{
    AttentionOperand, CheckedAttention, HalError, KvAddressing, KvFormat, KvFormats, MaskBits, Operand, OperandDesc,
    Operands, Paging, QueryLengths,
};

use super::super::kernel_launch::{Addresses, Params, with_constants};
use super::super::launch_params::LaunchParams;

/// Operand access where keys are ready before the launch: those of earlier tokens, and
/// their indices, are constant, like weights.
static READY_OPERANDS: [OperandDesc; AttentionOperand::ALL.len()] = {
    use AttentionOperand as O;
    let ready = [
        O::K as usize,
        O::V as usize,
        O::KScales as usize,
        O::VScales as usize,
        O::KFactors as usize,
        O::VFactors as usize,
        O::QOffsets as usize,
        O::KvOffsets as usize,
        O::KvLengths as usize,
        O::BlockTable as usize,
    ];
    with_constants(O::ALL, &ready)
};

/// Operand access of a kernel that may read keys before `griddepcontrol.wait`, if they are ready.
pub(super) fn operands(op: &CheckedAttention) -> &'static [OperandDesc] {
    if op.keys_ready { &READY_OPERANDS } else { AttentionOperand::ALL }
}

/// `AttentionParams` in `attention/problem.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(in crate::families) struct AttentionParams {
    pub shape: AttentionShape,
    pub at: AttentionPointers,
}

impl AttentionParams {
    /// Fills in the operands' addresses.
    pub fn at(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<Self, HalError> {
        use AttentionOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.q, O::Q),
            (&mut params.at.k, O::K),
            (&mut params.at.v, O::V),
            (&mut params.at.k_factors, O::KFactors),
            (&mut params.at.v_factors, O::VFactors),
            (&mut params.at.k_scales, O::KScales),
            (&mut params.at.v_scales, O::VScales),
            (&mut params.at.q_offsets, O::QOffsets),
            (&mut params.at.kv_offsets, O::KvOffsets),
            (&mut params.at.kv_lengths, O::KvLengths),
            (&mut params.at.block_table, O::BlockTable),
            (&mut params.at.sinks, O::Sinks),
            (&mut params.at.gate, O::Gate),
            (&mut params.at.d, O::D),
            (&mut params.at.lse, O::Lse),
            (&mut params.at.workspace, O::Workspace),
        ];
        for (pointer, operand) in pointers {
            *pointer = at.of(operands, operand)?;
        }
        Ok(params)
    }
}

impl Params for AttentionParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&self.at(operands, at)?))
    }
}

/// `KernelParams` in `attention/mask.cuh`,
/// for kernels with a mask.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct MaskedParams {
    attention: AttentionParams,
    bits: AttentionBits,
}

impl MaskedParams {
    /// Adds the layout of `mask`, without its address.
    pub fn new(attention: AttentionParams, op: &CheckedAttention, mask: MaskBits) -> Self {
        let row_words = MaskBits::words(op.most_keys);
        let head_words = if mask.is_per_head { mask.rows(&op.addressing()) * row_words } else { 0 };
        let bits = AttentionBits {
            address: 0,
            head_words: head_words as u64,
            row_words: row_words as u32,
            is_shared: mask.is_shared.into(),
        };
        Self { attention, bits }
    }

    pub fn attention(&self) -> &AttentionParams {
        &self.attention
    }

    /// Fills in the operands' addresses.
    pub fn at(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<Self, HalError> {
        let address = at.of(operands, AttentionOperand::Mask)?;
        Ok(Self { attention: self.attention.at(operands, at)?, bits: AttentionBits { address, ..self.bits } })
    }
}

impl Params for MaskedParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&self.at(operands, at)?))
    }
}

/// Parameter of an attention kernel, with the
/// mask if `op` has one.
pub(super) fn for_attend(op: &CheckedAttention, attention: AttentionParams) -> Arc<dyn Params> {
    match op.mask {
        Some(mask) => Arc::new(MaskedParams::new(attention, op, mask)),
        None => Arc::new(attention),
    }
}

/// Number of a KV format in kernels.
pub(in crate::families) fn kv_code(kv: KvFormat) -> u32 {
    match kv {
        KvFormat::Plain(dtype) => dtype_code(dtype),
        KvFormat::Q8_0 => 4,
        KvFormat::Q4_0 => 5,
        _ => 3,
    }
}

impl AttentionParams {
    /// `parts` split-KV parts of `part_keys` keys, and `row_ctas` CTAs for
    /// the rows of a sequence and KV head.
    pub fn new(op: &CheckedAttention, parts: u32, part_keys: u32, row_ctas: u32) -> Self {
        let Paging { pages, page_size, width } = op.paging();
        let flags = [
            (abi::FLAG_CAUSAL, op.causal),
            (abi::FLAG_SOFT_CAP, op.soft_cap.is_some()),
            (abi::FLAG_Q_OFFSETS, matches!(op.queries, QueryLengths::Offsets { .. })),
            (abi::FLAG_KV_OFFSETS, matches!(op.places, KvAddressing::Offsets { .. })),
            (abi::FLAG_KV_LENGTHS, width > 0 || matches!(op.places, KvAddressing::Pages { lengths: true, .. })),
            (abi::FLAG_KEYS_READY, op.keys_ready),
            (abi::FLAG_LSE, op.lse),
            (abi::FLAG_Q_ALIGNED, op.q.aligned),
            (abi::FLAG_KV_ALIGNED, op.k.rows.aligned && op.v.rows.aligned),
            (abi::FLAG_D_ALIGNED, op.d.aligned),
            (abi::FLAG_GATE_ALIGNED, op.gate.is_some_and(|gate| gate.aligned)),
        ];
        let shape = AttentionShape {
            sequences: op.sequences as u32,
            tokens: op.tokens as u32,
            most_queries: op.most_queries() as u32,
            most_keys: op.most_keys as u32,
            heads: op.heads as u32,
            kv_heads: op.kv_heads as u32,
            qk_dim: op.qk_dim as u32,
            v_dim: op.v_dim as u32,
            pages: pages as u32,
            page_size: page_size as u32,
            table_width: width as u32,
            window: op.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            dtype: dtype_code(op.dtype),
            // Factor of the tanh argument, or of the base-2 exponent.
            factor: op.soft_cap.map_or(op.scale * LOG2_E, |cap| op.scale / cap),
            soft_cap: op.soft_cap.map_or(0.0, |cap| cap * LOG2_E),
        };
        let page_shift = if page_size.is_power_of_two() { page_size.trailing_zeros() } else { 32 };
        let at = AttentionPointers {
            q_token: op.q.token_stride,
            q_head: op.q.head_stride,
            k_page: op.k.page_stride,
            k_token: op.k.rows.token_stride,
            k_head: op.k.rows.head_stride,
            v_page: op.v.page_stride,
            v_token: op.v.rows.token_stride,
            v_head: op.v.rows.head_stride,
            d_token: op.d.token_stride,
            d_head: op.d.head_stride,
            gate_token: op.gate.map_or(0, |gate| gate.token_stride),
            gate_head: op.gate.map_or(0, |gate| gate.head_stride),
            parts,
            part_keys,
            row_ctas,
            page_shift,
            ..AttentionPointers::default()
        };
        Self { shape, at }
    }
}

/// Whether Q, K and V all have type `dtype`.
pub(super) fn is_all(op: &CheckedAttention, dtype: DType) -> bool {
    op.dtype == dtype && op.kv == KvFormats::both(KvFormat::Plain(dtype))
}
