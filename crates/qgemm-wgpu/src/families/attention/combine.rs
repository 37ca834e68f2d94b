//! Split-KV combine: a workgroup adds up the partial results
//! of a query of a head, and finishes the row.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    AttentionOperand, AttentionStep, CheckedAttention, Geometry, HalError, Kernel, LaunchStep, Operand, Operands,
    Stream, WorkspaceLayout,
};

use super::launch::{THREADS, WORD, gate_bytes, has_q_offsets, kernel_id, token_bytes};
use super::split::Split;
use crate::event::WgpuStream;
use crate::families::dispatch::{Dispatch, MAX_GROUPS, submit};
use crate::families::operands::{Bound, Touched};
use crate::pipeline::{Compiled, Interface};
use crate::shader::{Shader, compose_attention_combine};
use crate::shared::Shared;

/// Kernel interface: the operands of `shaders/attention_combine.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: "attention_combine", bindings: "rrrrww", params_bytes: size_of::<Params>() as u32 };

/// `Params` of `shaders/attention_combine.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    sequences: u32,
    tokens: u32,
    most_queries: u32,
    partials_base: u32,
    q_offsets_base: u32,
    sinks_base: u32,
    gate_base: u32,
    d_base: u32,
    lse_base: u32,
}

/// The kernel of one operation. A launch allocates no device memory.
#[derive(Debug)]
struct CombineKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedAttention,
    split: Split,
    grid: [u32; 3],
}

/// The launch that combines the parts of `op`.
pub(super) fn step(shared: &Arc<Shared>, op: &CheckedAttention, split: Split) -> Result<LaunchStep, HalError> {
    use AttentionOperand as O;
    let groups = (op.sequences * op.most_queries() * op.heads) as u32;
    let x = groups.min(MAX_GROUPS);
    let grid = [x, groups.div_ceil(x.max(1)), 1];
    let compiled = Compiled::new(shared, &INTERFACE, "attention_combine".to_owned(), shader(op, split))?;
    let kernel = CombineKernel { compiled, shared: shared.clone(), op: op.clone(), split, grid };
    let geometry = Geometry { grid, threads: THREADS, shared_bytes: 0 };
    let step = LaunchStep::new::<O>(kernel_id(op, AttentionStep::Combine), geometry, Arc::new(kernel));
    let step = step.bind_all([O::QOffsets, O::Sinks, O::Gate, O::D, O::Lse]);
    Ok(step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..split.workspace_bytes(op)))
}

/// The shader of `op`.
pub(super) fn shader(op: &CheckedAttention, split: Split) -> Shader {
    let (gate_token, gate_head) = op.gate.map_or((0, 0), |gate| (gate.token_stride, gate.head_stride));
    let words = [
        ("THREADS", THREADS),
        ("PARTS", split.parts as u32),
        ("HEADS", op.heads as u32),
        ("V_DIM", op.v_dim as u32),
        ("DTYPE", dtype_code(op.dtype)),
        ("D_TOKEN", op.d.token_stride as u32),
        ("D_HEAD", op.d.head_stride as u32),
        ("GATE_TOKEN", gate_token as u32),
        ("GATE_HEAD", gate_head as u32),
    ];
    let choices =
        [("Q_OFFSETS", has_q_offsets(op)), ("SINKS", op.sinks), ("GATED", op.gate.is_some()), ("LSE", op.lse)];
    compose_attention_combine(&words, &choices)
}

impl CombineKernel {
    fn dispatch<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use AttentionOperand as O;
        let (op, shared) = (&self.op, &self.shared);
        let mut p = Params {
            sequences: op.sequences as u32,
            tokens: op.tokens as u32,
            most_queries: op.most_queries() as u32,
            ..Params::default()
        };
        let touched = |operand: O, bytes: Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let words = |operand: O, count: usize, is_used: bool| -> Result<Bound<'a>, HalError> {
            touched(operand, 0..if is_used { count * WORD } else { 0 }, WORD).bind(shared)
        };
        let (partials, q_offsets, sinks, gate, d, lse);
        (partials, p.partials_base) = words(O::Workspace, self.split.bytes(op) / WORD, true)?;
        (q_offsets, p.q_offsets_base) = words(O::QOffsets, op.sequences + 1, has_q_offsets(op))?;
        (sinks, p.sinks_base) = words(O::Sinks, op.heads, op.sinks)?;
        (gate, p.gate_base) = touched(O::Gate, 0..gate_bytes(op), op.dtype.bytes()).bind(shared)?;
        (d, p.d_base) = touched(O::D, 0..token_bytes(op, &op.d, op.v_dim), op.dtype.bytes()).bind_written(shared)?;
        let lse_bytes = if op.lse { op.tokens * op.heads * WORD } else { 0 };
        (lse, p.lse_base) = touched(O::Lse, 0..lse_bytes, WORD).bind_written(shared)?;
        Ok(Dispatch { params: p, bindings: vec![partials, q_offsets, sinks, gate, d, lse], grid: self.grid })
    }
}

impl Kernel for CombineKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatch = self.dispatch(&operands)?;
        submit(&self.shared, &INTERFACE, &self.compiled, &[dispatch])
    }
}
