//! Attention over quantized keys and values by the kernels for plain
//! ones: a launch in front dequantizes the keys and values that
//! the step attends to into the workspace. Where only one of them
//! is quantized, the other is copied, so that both find their rows
//! alike.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::AttentionPlainKv;
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, AttentionStep, CheckedAttention, DeviceInfo,
    Geometry, HalError, HeadRows, KernelId, KvAddressing, KvFormat, KvFormats, KvRows, LaunchSequence, LaunchStep,
    Operand, Operands, Paging, Placed, Spec, Unsupported, Variant, WorkspaceLayout,
};

use super::super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::params::{AttentionParams, kv_code};
use super::simt::ctas;
use crate::spec::KernelSpec;

/// Family name of the kernel.
const NAME: &str = "attention_dequantize";
/// Threads of a CTA.
const THREADS: u32 = 256;
/// CTAs per SM that share the sequences.
const CTAS_A_UNIT: usize = 8;
/// Keys and values, which different CTAs take.
const SIDES: usize = 2;
/// Keys that a CTA takes at once, as the kernel does.
const TILE_KEYS: usize = 8;
/// Maximum bytes of dequantized keys and values.
pub(super) const MOST_BYTES: usize = 1 << 30;
/// Alignment of regions in the workspace.
const ALIGNMENT: usize = 256;

/// An attention over quantized keys and values as one over
/// plain ones, with their place in the workspace.
#[derive(Debug)]
pub(super) struct Dequantized {
    /// The attention over plain keys and values.
    pub op: CheckedAttention,
    keys: usize,
    values: usize,
    table: usize,
    sequence_rows: usize,
}

/// Rows of plain keys, and how sequences find theirs.
fn plain_rows(op: &CheckedAttention) -> (KvAddressing, usize) {
    match op.places {
        KvAddressing::Offsets { rows } => (op.places, rows),
        KvAddressing::Table { page_size, .. } => {
            let width = op.most_keys.div_ceil(page_size);
            let pages = op.sequences.saturating_mul(width);
            (KvAddressing::Table { pages, page_size, width }, pages.saturating_mul(page_size))
        }
        _ => {
            let has_lengths = matches!(op.places, KvAddressing::Pages { lengths: true, .. });
            let places = KvAddressing::Pages { capacity: op.most_keys, lengths: has_lengths };
            (places, op.sequences.saturating_mul(op.most_keys))
        }
    }
}

/// Rows of all heads, one after another.
fn contiguous(op: &CheckedAttention, dim: usize, page_rows: usize) -> KvRows {
    let token_stride = (op.kv_heads * dim) as u64;
    let rows = HeadRows { token_stride, head_stride: dim as u64, aligned: true };
    KvRows { page_stride: token_stride.saturating_mul(page_rows as u64), rows }
}

impl Dequantized {
    /// The attention `op` with keys and values in Q's type; `None`
    /// if they are not quantized.
    ///
    /// # Errors
    /// Why they are not dequantized in front.
    pub fn of(op: &CheckedAttention) -> Result<Option<Self>, Unsupported> {
        if op.kv.are_plain() {
            return Ok(None);
        }
        if !matches!(op.dtype, DType::F16 | DType::BF16) {
            return Err(Unsupported::new("dequantizes keys and values for Q of f16 or bf16"));
        }
        // The workspace grows with the batch.
        if op.batch_invariant {
            return Err(Unsupported::new("dequantizes no keys and values where bits may not depend on the batch"));
        }
        let (places, rows) = plain_rows(op);
        let bytes = |dim: usize| {
            let row = op.kv_heads * dim * op.dtype.bytes();
            rows.saturating_mul(row).min(isize::MAX as usize).next_multiple_of(ALIGNMENT)
        };
        let columns = match places {
            KvAddressing::Table { width, .. } => op.sequences.saturating_mul(width),
            _ => 0,
        };
        let table = columns.saturating_mul(4).min(isize::MAX as usize).next_multiple_of(ALIGNMENT);
        let (keys, values) = (bytes(op.qk_dim), bytes(op.v_dim));
        if keys.saturating_add(values).saturating_add(table) > MOST_BYTES {
            return Err(Unsupported::new(format!(
                "dequantizes keys and values to at most {MOST_BYTES} bytes, too few for {rows} rows"
            )));
        }
        let sequence_rows = if matches!(places, KvAddressing::Offsets { .. }) { 0 } else { rows / op.sequences.max(1) };
        let kv = KvFormats::both(KvFormat::Plain(op.dtype));
        // The launch ahead writes what this one reads.
        let plain = CheckedAttention { places, kv, keys_ready: false, ..op.clone() };
        let page_rows = plain.paging().page_size;
        let (k, v) = (contiguous(op, op.qk_dim, page_rows), contiguous(op, op.v_dim, page_rows));
        Ok(Some(Self { op: CheckedAttention { k, v, ..plain }, keys, values, table, sequence_rows }))
    }

    /// Bytes of keys, values and block table.
    fn bytes(&self) -> usize {
        self.keys + self.values + self.table
    }

    /// Configs of the whole: those over plain keys and
    /// values, behind the launch.
    fn behind(&self, config: AttentionConfig) -> AttentionConfig {
        let own = config.workspace_bytes.max(WorkspaceLayout::RESERVED).next_multiple_of(ALIGNMENT);
        AttentionConfig {
            launches: config.launches + 1,
            workspace_bytes: own + self.bytes(),
            dequantized_bytes: self.bytes(),
            ..config
        }
    }

    /// Byte ranges of keys, values and block table behind the
    /// workspace of the attention itself.
    fn regions(&self, config: &AttentionConfig) -> [Range<usize>; 3] {
        let keys = config.workspace_bytes - self.bytes();
        let values = keys + self.keys;
        let table = values + self.values;
        [keys..values, values..table, table..table + self.table]
    }
}

/// Configs for `op`, by `of_plain` for plain keys and values.
pub(super) fn configs(
    op: &CheckedAttention,
    of_plain: impl FnOnce(&CheckedAttention) -> Result<Vec<AttentionConfig>, Unsupported>,
) -> Result<Vec<AttentionConfig>, Unsupported> {
    let Some(dequantized) = Dequantized::of(op)? else { return of_plain(op) };
    let configs = of_plain(&dequantized.op)?;
    ctas(&[op.sequences, CTAS_A_UNIT, 1 << 16])?;
    Ok(configs.into_iter().map(|config| dequantized.behind(config)).collect())
}

fn spec() -> AttentionSpec {
    let plain = AttentionSpec::attend(KvFormats::both(KvFormat::Plain(DType::F16)), [0; 2], 1, TILE_KEYS as u32);
    AttentionSpec { step: AttentionStep::Dequantize, ..plain }
}

/// The kernel, for every format and type.
pub(super) fn source(variant: Variant) -> KernelSpec {
    let (entry, symbol) = ("entry/attention_dequantize.cu", "qg_attention_dequantize");
    let name = KernelId::new(NAME, Some(variant), Spec::Attention(spec())).to_string();
    let prelude = Prelude { threads: Some(THREADS), ..Prelude::of(variant) }.text();
    KernelSpec { name, entry, text: crate::source::entry(entry), symbol, prelude, arch_specific: false }
}

/// `DequantizeParams` in `entry/attention_dequantize.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct DequantizeParams {
    attention: AttentionParams,
    plain: AttentionPlainKv,
}

impl Params for DequantizeParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&Self { attention: self.attention.at(operands, at)?, ..*self }))
    }
}

/// The launch that dequantizes keys and values of `op`.
fn step(
    op: &CheckedAttention,
    dequantized: &Dequantized,
    [keys, values, table]: &[Range<usize>; 3],
    info: &DeviceInfo,
    variant: Variant,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchStep, HalError> {
    use AttentionOperand as O;
    let Paging { width, .. } = dequantized.op.paging();
    let tiles = op.most_keys.div_ceil(TILE_KEYS).max(1);
    let sequence_ctas = (CTAS_A_UNIT * info.units.max(1) as usize).div_ceil(SIDES * op.sequences).min(tiles);
    let plain = AttentionPlainKv {
        keys: 0,
        values: (values.start - keys.start) as u64,
        table: (table.start - keys.start) as u64,
        sequence_rows: dequantized.sequence_rows as u64,
        table_width: width as u32,
        key_format: kv_code(op.kv.k),
        value_format: kv_code(op.kv.v),
        sequence_ctas: sequence_ctas as u32,
    };
    let launch = KernelLaunch {
        id: KernelId::new(NAME, Some(variant), Spec::Attention(spec())),
        spec: source(variant),
        geometry: Geometry {
            grid: [(op.sequences * sequence_ctas) as u32, SIDES as u32, 1],
            threads: THREADS,
            shared_bytes: 0,
        },
        // The kernel calls `griddepcontrol_wait` itself (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: O::ALL,
        updated: None,
        params: Arc::new(DequantizeParams { attention: AttentionParams::new(op, 1, op.most_keys as u32, 1), plain }),
    };
    let read = [O::K, O::V, O::KFactors, O::VFactors, O::KScales, O::VScales];
    let found_by = [O::QOffsets, O::KvOffsets, O::KvLengths, O::BlockTable];
    let step = launch.step::<O>(make)?.bind_all(read.into_iter().chain(found_by));
    Ok(step.bind_part(O::Workspace, O::Workspace, keys.start..table.end))
}

/// Launch sequence of a plan over dequantized keys and values:
/// `of_plain` behind the launch that dequantizes.
pub(super) fn sequence(
    op: &CheckedAttention,
    dequantized: &Dequantized,
    plan: &AttentionPlan,
    info: &DeviceInfo,
    variant: Variant,
    make: &mut MakeKernel<'_>,
    of_plain: impl FnOnce(&CheckedAttention, &AttentionPlan, &mut MakeKernel<'_>) -> Result<LaunchSequence, HalError>,
) -> Result<LaunchSequence, HalError> {
    use AttentionOperand as O;
    let regions = dequantized.regions(&plan.config);
    let first = step(op, dequantized, &regions, info, variant, make)?;
    let [keys, values, table] = regions;
    let config = AttentionConfig { workspace_bytes: keys.start, dequantized_bytes: 0, ..plan.config };
    let attend = of_plain(&dequantized.op, &AttentionPlan { config, ..*plan }, make)?;
    // The plain keys and values have neither factors nor scales.
    let attend = [O::KFactors, O::VFactors, O::KScales, O::VScales].into_iter().fold(attend, LaunchSequence::unbind);
    let mut places = vec![Placed::part(O::K, O::Workspace, keys), Placed::part(O::V, O::Workspace, values)];
    if !table.is_empty() {
        places.push(Placed::part(O::BlockTable, O::Workspace, table));
    }
    let name = format!("{}_over_{}", attend.name(), op.kv);
    let first = LaunchSequence::new::<O>(name.clone(), vec![first]);
    Ok(attend.behind::<O>(first, &[], &places).named(name))
}
