//! Lists of key tiles with visible keys for each row
//! tile, from a bit mask. A launch writes them
//! before the attention kernel.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::{
    AttentionOperand, AttentionSpec, AttentionStep, CheckedAttention, Geometry, HalError, KernelId, KvFormat,
    KvFormats, LaunchStep, MaskBits, Operand, Operands, Spec, Unsupported, Variant,
};

use super::super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::params::{AttentionParams, MaskedParams};
use super::simt::ctas;
use crate::spec::KernelSpec;

/// Threads of a CTA: sixteen warps, one key tile each.
const THREADS: u32 = 512;
/// `SharedStorage` of `entry/attention_list_tiles.cu`:
/// visibility flags of the tiles.
const SHARED_BYTES: u32 = 1024;
/// Maximum bytes of the lists.
const MOST_BYTES: usize = 1 << 28;

/// The kernel that lists tiles of `keys` keys for `rows` queries.
pub(super) fn spec_of(rows: u32, keys: u32) -> AttentionSpec {
    let kv = KvFormats::both(KvFormat::Plain(DType::F16));
    AttentionSpec { step: AttentionStep::ListTiles, masked: true, ..AttentionSpec::attend(kv, [0; 2], rows, keys) }
}

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(super::wgmma::NAME, Some(variant), Spec::Attention(spec))
}

pub(super) fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/attention_list_tiles.cu";
    let prelude = Prelude {
        threads: Some(THREADS),
        rows: Some(spec.rows),
        keys: Some(spec.keys),
        bits: Some(spec.masked.into()),
        shared_bytes: Some(SHARED_BYTES),
        ..Prelude::of(variant)
    };
    let (name, symbol) = (id(spec, variant).to_string(), "qg_attention_list_tiles");
    KernelSpec { name, entry, text: crate::source::entry(entry), symbol, prelude: prelude.text(), arch_specific: false }
}

/// `ListedParams` in `attention/mask_tile_list.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct ListedParams {
    masked: MaskedParams,
    list_words: u32,
    padding: u32,
}

impl ListedParams {
    pub fn attention(&self) -> &AttentionParams {
        self.masked.attention()
    }

    /// Fills in the operands' addresses.
    pub fn at(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<Self, HalError> {
        Ok(Self { masked: self.masked.at(operands, at)?, ..*self })
    }
}

impl Params for ListedParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&self.at(operands, at)?))
    }
}

/// Tile lists of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileLists {
    spec: AttentionSpec,
    /// Number of lists; each has a CTA.
    count: usize,
    /// Words of a list: the count, then the tile numbers.
    words: usize,
}

impl TileLists {
    /// Lists for the kernel `attend`.
    pub fn new(op: &CheckedAttention, mask: MaskBits, attend: &AttentionSpec) -> Self {
        let heads = if mask.is_per_head { op.heads } else { 1 };
        let row_tiles = op.most_queries().div_ceil(attend.rows as usize);
        Self {
            spec: spec_of(attend.rows, attend.keys),
            count: op.sequences.saturating_mul(heads).saturating_mul(row_tiles),
            words: 1 + op.most_keys.div_ceil(attend.keys as usize),
        }
    }

    /// Refuses lists that are too large.
    pub fn check(self) -> Result<Self, Unsupported> {
        ctas(&[self.count])?;
        match self.bytes() <= MOST_BYTES {
            true => Ok(self),
            false => Err(Unsupported::new(format!(
                "lists the tiles of keys that a mask leaves in {MOST_BYTES} bytes, which are too few"
            ))),
        }
    }

    pub fn bytes(&self) -> usize {
        self.count.saturating_mul(self.words).saturating_mul(4)
    }

    /// Parameter of the list kernel and of the attention kernel.
    pub fn params(&self, op: &CheckedAttention, mask: MaskBits, attention: AttentionParams) -> ListedParams {
        ListedParams { masked: MaskedParams::new(attention, op, mask), list_words: self.words as u32, padding: 0 }
    }

    /// The launch that writes the lists to `workspace`.
    pub fn step(
        &self,
        params: ListedParams,
        variant: Variant,
        workspace: Range<usize>,
        make: &mut MakeKernel<'_>,
    ) -> Result<LaunchStep, HalError> {
        use AttentionOperand as O;
        let launch = KernelLaunch {
            id: id(self.spec, variant),
            spec: source(self.spec, variant),
            geometry: Geometry { grid: [self.count as u32, 1, 1], threads: THREADS, shared_bytes: SHARED_BYTES },
            // The kernel calls `griddepcontrol_wait` itself (atoms/sync.cuh).
            starts_early: true,
            operands: O::ALL,
            updated: None,
            params: Arc::new(params),
        };
        let step = launch.step::<O>(make)?;
        let read = [O::QOffsets, O::KvOffsets, O::KvLengths, O::Mask];
        let step = read.into_iter().fold(step, |step, operand| step.bind(operand, operand));
        Ok(step.bind_part(O::Workspace, O::Workspace, workspace))
    }
}
