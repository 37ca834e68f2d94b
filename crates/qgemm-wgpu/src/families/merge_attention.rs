//! `merge_attention`: partial attention results merged by their
//! log-sum-exp.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{FLAG_LSE, MergeAttentionShape, dtype_code};
use qgemm_hal::op::merge_attention::MOST_PARTS;
use qgemm_hal::{
    CheckedMergeAttention, Device, DeviceInfo, Families, Family, Geometry, HalError, HeadRows, Kernel, LaunchSequence,
    LaunchStep, MergeAttentionConfig, MergeAttentionOperand, MergeAttentionPlan, Operand, Operands, Operation, Stream,
    Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, stride, submit, too_large};
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{self, Shader};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `merge_attention`.
pub(super) const FAMILIES: Families<CheckedMergeAttention> = &[&MergeAttention];

/// Kernel interface: the operands of `shaders/merge_attention.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: "merge_attention", bindings: "rrww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "merge_attention";
/// Invocations of a workgroup.
const THREADS: u32 = 64;
/// Adjacent columns of an invocation.
const COLUMNS: usize = 2;
/// Invocations of a row: workgroup memory has the weights of the
/// others' rows.
const LEAST_ROW_THREADS: u32 = 8;
/// Bytes of workgroup memory: `var<workgroup>` of the shader.
const SHARED_BYTES: u32 = THREADS / LEAST_ROW_THREADS * MOST_PARTS as u32 * 4 + THREADS * 8;

const WRITTEN: &str = include_str!("../../shaders/norm_written.wgsl");
const TEXTS: [&str; 5] = [
    include_str!("../../shaders/generated/abi.wgsl"),
    include_str!("../../shaders/numbers.wgsl"),
    include_str!("../../shaders/half_of.wgsl"),
    include_str!("../../shaders/merge_attention.wgsl"),
    WRITTEN,
];

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(TEXTS));

/// `Params` of `shaders/merge_attention.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: MergeAttentionShape,
    part_stride: u32,
    token_stride: u32,
    head_stride: u32,
    d_token: u32,
    d_head: u32,
    lse_part: u32,
    partial_base: u32,
    partial_lse_base: u32,
    d_base: u32,
    lse_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct MergeAttention;

impl Family<CheckedMergeAttention> for MergeAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedMergeAttention, info: &DeviceInfo) -> Result<Vec<MergeAttentionConfig>, Unsupported> {
        part_tokens(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![MergeAttentionConfig { kernel: op.kernel_of(NAME, None), efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedMergeAttention,
        _: &MergeAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "a merge of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let part_tokens = part_tokens(op, device.info().max_buffer_bytes).map_err(refused)?;
        let compiled = Compiled::new(shared, &INTERFACE, NAME.to_owned(), compose())?;
        let kernel = MergeKernel { compiled, shared: shared.clone(), op: *op, part_tokens };
        let geometry =
            Geometry { grid: grid(op, part_tokens.min(op.tokens)), threads: THREADS, shared_bytes: SHARED_BYTES };
        let step = LaunchStep::new::<MergeAttentionOperand>(op.kernel_of(NAME, None), geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<MergeAttentionOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedMergeAttention, _: &MergeAttentionConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// The shader.
fn compose() -> Shader {
    let [abi, numbers, half_of, merge, written] = TEXTS;
    shader::compose_parts(THREADS, &[abi, numbers, half_of, &written.replace("TARGET", "d"), merge])
}

/// Invocations of a row of `dim` columns.
fn row_threads(dim: usize) -> u32 {
    (dim.div_ceil(COLUMNS) as u32).next_power_of_two().clamp(LEAST_ROW_THREADS, THREADS)
}

/// Workgroups for `tokens` tokens.
fn grid(op: &CheckedMergeAttention, tokens: usize) -> [u32; 3] {
    let groups = ((tokens * op.heads) as u32).div_ceil(THREADS / row_threads(op.dim));
    let x = groups.min(MAX_GROUPS);
    [x, groups.div_ceil(x), 1]
}

/// Elements from the first to the last of `tokens` tokens of all parts.
fn span(part: [u64; 2], tokens: usize, rows: &HeadRows, heads: usize, dim: usize) -> Option<u64> {
    let [part_stride, parts] = part;
    let last = |stride: u64, count: u64| stride.checked_mul(count - 1);
    let parts = last(part_stride, parts)?.checked_add(last(rows.token_stride, tokens as u64)?)?;
    parts.checked_add(last(rows.head_stride, heads as u64)?)?.checked_add(dim as u64)
}

/// Tokens of a dispatch, with bindings of at most `limit` bytes.
///
/// # Errors
/// The operand that exceeds the limit with a single token.
fn part_tokens(op: &CheckedMergeAttention, limit: u64) -> Result<usize, Unsupported> {
    let &CheckedMergeAttention { parts, tokens, heads, dim, dtype, d_dtype, .. } = op;
    let rows = op.rows() as u64;
    if rows >= 1 << 31 {
        return Err(Unsupported::new(format!("there are {rows} heads of tokens, and kernels count in 31 bits")));
    }
    let of_heads = HeadRows { token_stride: heads as u64, head_stride: 1, aligned: false };
    let touched = [
        ("the partial results", [op.part_stride, parts as u64], op.partial, dim, dtype),
        ("the partial log-sum-exps", [rows, parts as u64], of_heads, 1, DType::F32),
        ("d", [0, 1], op.d, dim, d_dtype),
    ];
    let mut fitting = tokens;
    for (name, part, layout, columns, dtype) in touched {
        let width = dtype.bytes() as u64;
        let one = span(part, 1, &layout, heads, columns).and_then(|elements| elements.checked_mul(width));
        let one = one.ok_or_else(|| Unsupported::new(format!("the extent of {name} overflows")))?;
        let room = limit.saturating_sub(MARGIN).checked_sub(one);
        let room = room.ok_or_else(|| too_large(&format!("a token of {name}, in all parts,"), one, limit))?;
        let stride = layout.token_stride.saturating_mul(width).max(1);
        fitting = fitting.min(usize::try_from(room / stride).unwrap_or(usize::MAX).saturating_add(1));
    }
    Ok(fitting)
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct MergeKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedMergeAttention,
    /// Tokens of a dispatch.
    part_tokens: usize,
}

impl MergeKernel {
    /// Bindings and parameters of the dispatch of `tokens`.
    fn dispatch<'a>(
        &'a self,
        tokens: Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, Params>, HalError> {
        use MergeAttentionOperand as O;
        let (op, shared, count) = (&self.op, &self.shared, tokens.len());
        let touched = |operand: O, part: [u64; 2], layout: &HeadRows, columns: usize, dtype: DType| {
            let first = tokens.start * layout.token_stride as usize;
            // `part_tokens` found the extents of all dispatches in range.
            let elements = span(part, count, layout, op.heads, columns).unwrap_or(0) as usize;
            let width = dtype.bytes();
            let bytes = first * width..(first + elements) * width;
            Touched { what: operand.name(), view: operands.get(operand), bytes, width }
        };
        let (parts, rows) = (op.parts as u64, op.rows() as u64);
        let of_heads = HeadRows { token_stride: op.heads as u64, head_stride: 1, aligned: false };
        let (partial, partial_lse, d, lse);
        let mut p = Params {
            shape: MergeAttentionShape {
                parts: op.parts as u32,
                rows: (count * op.heads) as u32,
                heads: op.heads as u32,
                dim: op.dim as u32,
                row_threads: row_threads(op.dim),
                flags: if op.lse { FLAG_LSE } else { 0 },
                dtype: dtype_code(op.dtype),
                d_dtype: dtype_code(op.d_dtype),
            },
            part_stride: stride(op.parts, op.part_stride),
            token_stride: stride(count, op.partial.token_stride),
            head_stride: stride(op.heads, op.partial.head_stride),
            d_token: stride(count, op.d.token_stride),
            d_head: stride(op.heads, op.d.head_stride),
            lse_part: rows as u32,
            ..Params::default()
        };
        let all = [op.part_stride, parts];
        (partial, p.partial_base) = touched(O::Partial, all, &op.partial, op.dim, op.dtype).bind(shared)?;
        (partial_lse, p.partial_lse_base) =
            touched(O::PartialLse, [rows, parts], &of_heads, 1, DType::F32).bind(shared)?;
        (d, p.d_base) = touched(O::D, [0, 1], &op.d, op.dim, op.d_dtype).bind_written(shared)?;
        let written = touched(O::Lse, [0, 1], &of_heads, 1, DType::F32);
        let written = if op.lse { written } else { Touched { bytes: 0..0, ..written } };
        (lse, p.lse_base) = written.bind_written(shared)?;
        Ok(Dispatch { params: p, bindings: vec![partial, partial_lse, d, lse], grid: grid(op, count) })
    }
}

impl Kernel for MergeKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let firsts = (0..self.op.tokens).step_by(self.part_tokens);
        let parts = firsts.map(|first| first..self.op.tokens.min(first + self.part_tokens));
        let dispatches: Vec<_> = parts.map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(part_stride: u64, partial: HeadRows) -> CheckedMergeAttention {
        CheckedMergeAttention {
            parts: 4,
            tokens: 100,
            heads: 2,
            dim: 64,
            dtype: DType::F16,
            part_stride,
            partial,
            d_dtype: DType::F16,
            d: HeadRows { token_stride: 128, head_stride: 64, aligned: true },
            lse: true,
        }
    }

    #[test]
    fn tokens_are_cut_into_bindings_and_rows_share_workgroups() {
        let of_part = op(12_800, HeadRows { token_stride: 128, head_stride: 64, aligned: true });
        assert_eq!(part_tokens(&of_part, 1 << 27).expect("fits"), 100);
        // The parts are further apart than a binding is long.
        let why = part_tokens(&of_part, 1 << 16).expect_err("too large").why;
        assert!(why.contains("partial results") && why.contains("65536"), "{why}");
        // Parts of a token lie together.
        let of_token = op(128, HeadRows { token_stride: 512, head_stride: 64, aligned: true });
        assert_eq!(part_tokens(&of_token, 1 << 16).expect("cut"), 63);
        assert_eq!([8, 64, 96, 576].map(row_threads), [8, 32, 64, 64]);
        assert_eq!(grid(&of_part, 100), [100, 1, 1]);
        assert_eq!(grid(&CheckedMergeAttention { heads: 70_000, ..of_part }, 2), [65_535, 2, 1]);
    }

    #[test]
    fn workgroup_memory_is_what_every_adapter_has() {
        const { assert!(SHARED_BYTES <= 16 << 10) };
    }
}
