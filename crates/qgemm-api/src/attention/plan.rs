//! [`AttentionPlan`]: kernels made ready for one attention.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALES};
use qgemm_hal::{
    AttentionOperand, AttentionPlan as Launch, BufferMut, BufferRef, CheckedAttention, Device, DeviceId, KernelId,
    KvFormat, LaunchSequence, Operands, Operation, Stream,
};
use qgemm_sched::Offered;
use qgemm_sched::attention::{candidates, choose};

use super::description::{Attention, extent_bytes};
use crate::error::Error;
use crate::operand::{Checks, Extent, WIDE_ACCESS};
use crate::plan_cache::{PlanCaches, Ready};
use crate::workspace::Workspace;

/// Kernels chosen and made ready for one [`Attention`]; made by [`Context::plan_attention`](crate::Context::plan_attention). Its text
/// says what a run launches.
#[derive(Debug)]
pub struct AttentionPlan {
    op: CheckedAttention,
    device: DeviceId,
    extents: Extents,
    /// None where there is no query.
    ready: Option<Arc<Ready<CheckedAttention>>>,
}

/// What a run asks of its buffers.
#[derive(Debug)]
struct Extents {
    q: Extent,
    k: Extent,
    v: Extent,
    /// Scales of K and of V, where the format has some.
    scales: Option<[Extent; 2]>,
    d: Extent,
}

/// What one run of an [`AttentionPlan`] reads and writes.
#[derive(Debug)]
pub struct AttentionArgs<'a> {
    /// Queries.
    pub q: BufferRef<'a>,
    /// Keys.
    pub k: BufferRef<'a>,
    /// Values.
    pub v: BufferRef<'a>,
    /// Written: the results.
    pub d: BufferMut<'a>,
    /// An f32 a head of keys, for formats that have factors: what keys are multiplied with.
    pub k_factors: Option<BufferRef<'a>>,
    /// An f32 a head of keys, for formats that have factors: what values are multiplied with.
    pub v_factors: Option<BufferRef<'a>>,
    /// Scales of the keys, for formats that have some: an f16 for every 32 features, in the order of the features, gaps of strides included:
    /// the scale of element `i` of the keys is element `i / 32`.
    pub k_scales: Option<BufferRef<'a>>,
    /// The same of the values.
    pub v_scales: Option<BufferRef<'a>>,
    /// Where the query tokens of each sequence begin, and where the last end, for [`Queries::offsets`](crate::Queries::offsets): u32.
    pub q_offsets: Option<BufferRef<'a>>,
    /// Where the keys of each sequence begin, and where the last end, for [`Keys::offsets`](crate::Keys::offsets): u32.
    pub kv_offsets: Option<BufferRef<'a>>,
    /// How many keys each sequence has, for [`Keys::lengths`](crate::Keys::lengths) and [`Keys::paged`](crate::Keys::paged): u32.
    pub kv_lengths: Option<BufferRef<'a>>,
    /// The pages of each sequence, for [`Keys::paged`](crate::Keys::paged): u32.
    pub block_table: Option<BufferRef<'a>>,
    /// Which keys each query sees, for [`Attention::mask`]: u32.
    pub mask: Option<BufferRef<'a>>,
    /// Written when the attention has a [log-sum-exp](Attention::log_sum_exp): f32, tokens × heads.
    pub lse: Option<BufferMut<'a>>,
    /// At least [`AttentionPlan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> AttentionArgs<'a> {
    /// What every run has; the others are fields to set.
    pub fn new(
        q: impl Into<BufferRef<'a>>,
        k: impl Into<BufferRef<'a>>,
        v: impl Into<BufferRef<'a>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            d: d.into(),
            k_factors: None,
            v_factors: None,
            k_scales: None,
            v_scales: None,
            q_offsets: None,
            kv_offsets: None,
            kv_lengths: None,
            block_table: None,
            mask: None,
            lse: None,
            workspace: None,
        }
    }
}

impl AttentionPlan {
    pub(crate) fn new(device: &dyn Device, caches: &PlanCaches, attention: &Attention) -> Result<Self, Error> {
        let op = attention.check()?;
        let make = || {
            let CheckedAttention { sequences, tokens, most_keys, .. } = op;
            let _span = tracing::info_span!("plan", sequences, tokens, most_keys).entered();
            let families = attention.families(device.info(), device.catalog().attention)?;
            let (family, plan) = choose(&op, device.info(), &families)?;
            Ready::prepare(device, &op, family, plan, plan.config.math)
        };
        // Plans of one family are for measurements, and not kept.
        let ready = match (!op.is_nothing(), attention.is_unrestricted()) {
            (false, _) => None,
            (true, true) => Some(caches.attention.get_or_make(&op, make)?),
            (true, false) => Some(Arc::new(make()?)),
        };
        Ok(Self { device: device.info().id, extents: extents(&op), ready, op })
    }

    pub(crate) fn every_way(device: &dyn Device, attention: &Attention) -> Result<Vec<Self>, Error> {
        let op = attention.check()?;
        let families = attention.families(device.info(), device.catalog().attention)?;
        let ways = if !op.is_nothing() { candidates(&op, device.info(), &families).offered } else { Vec::new() };
        let of_way = |Offered { family, plan, .. }: Offered<'static, CheckedAttention>| {
            let ready = Some(Arc::new(Ready::prepare(device, &op, family, plan, plan.config.math)?));
            Ok(Self { device: device.info().id, extents: extents(&op), ready, op: op.clone() })
        };
        ways.into_iter().map(of_way).collect()
    }

    /// Bytes of workspace that [`AttentionPlan::run`] needs; 0 where the keys of a sequence are not cut into parts.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |launch| launch.config.workspace_bytes)
    }

    /// Name of the chosen kernels.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the kernel that attends; none where there is no query.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|launch| launch.config.kernel)
    }

    /// The chosen configuration; none where there is no query.
    pub fn launch(&self) -> Option<&Launch> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; none where there is no query.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedAttention {
        &self.op
    }

    /// Bytes that a run moves at least, where all sequences are as long as they may be.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// Floating-point operations of a run, where all sequences are as long as they may be.
    pub fn flops(&self) -> f64 {
        2.0 * self.op.macs()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the attention to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA
    /// graph; lengths, offsets and tables are read on the device when it runs.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the attention, or a device error.
    /// Nothing has been written then.
    pub fn run(&self, stream: &Stream, mut args: AttentionArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`AttentionPlan::run`] with a workspace that may be part of another buffer, in place of that of `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: AttentionArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use AttentionOperand as O;
        let AttentionArgs {
            q,
            k,
            v,
            d,
            k_factors,
            v_factors,
            q_offsets,
            kv_offsets,
            kv_lengths,
            block_table,
            mask,
            ..
        } = args;
        let (op, extents) = (&self.op, &self.extents);
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        checks.view("q", q, extents.q)?;
        checks.view("k", k, extents.k)?;
        checks.view("v", v, extents.v)?;
        checks.view("d", d.view(), extents.d)?;
        let used = op.operands();
        let of = |operand: O, element: ElementType, count: usize| {
            used.contains(&operand).then(|| Extent::of_values(element, count))
        };
        let (word, number) = (ElementType::Int32, ElementType::from(DType::F32));
        let factors = "the format of the keys and values has a factor a head";
        let of_queries = "the attention finds queries by offsets";
        let of_keys = "the attention finds keys by offsets";
        let of_lengths = "keys are as many as lengths say";
        let of_table = "the attention finds keys by a table";
        let of_mask = "the attention has a mask of bits";
        let index = [
            (O::KFactors, "k factors", k_factors, number, op.kv_heads, factors),
            (O::VFactors, "v factors", v_factors, number, op.kv_heads, factors),
            (O::QOffsets, "q offsets", q_offsets, word, op.sequences + 1, of_queries),
            (O::KvOffsets, "kv offsets", kv_offsets, word, op.sequences + 1, of_keys),
            (O::KvLengths, "kv lengths", kv_lengths, word, op.sequences, of_lengths),
            (O::BlockTable, "block table", block_table, word, op.sequences * op.paging().width, of_table),
            (O::Mask, "mask", mask, word, op.mask_words(), of_mask),
        ];
        let of_blocks = "the format of the keys and values has scales of blocks";
        let [k_extent, v_extent] = extents.scales.map_or([None; 2], |both| both.map(Some));
        let mut operands = Operands::new();
        operands.read_if_any(O::KScales, checks.optional("k scales", args.k_scales, k_extent, of_blocks)?);
        operands.read_if_any(O::VScales, checks.optional("v scales", args.v_scales, v_extent, of_blocks)?);
        for (operand, view) in [(O::Q, q), (O::K, k), (O::V, v)] {
            operands.read(operand, view);
        }
        for (operand, name, view, element, count, why) in index {
            operands.read_if_any(operand, checks.optional(name, view, of(operand, element, count), why)?);
        }
        let lse =
            checks.optional("lse", args.lse, of(O::Lse, number, op.tokens * op.heads), "the attention writes it")?;
        operands.write(O::D, d);
        if let Some(lse) = lse {
            operands.write(O::Lse, lse);
        }
        let why = "the plan keeps results of parts of the keys";
        if let Some(workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? {
            operands.write(O::Workspace, workspace);
        }
        let Some(ready) = &self.ready else { return Ok(()) };
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

fn extents(op: &CheckedAttention) -> Extents {
    let paging = op.paging();
    let of = |strides, counts, columns, format: KvFormat, alignment| {
        // `Attention::check` found that they fit the address space.
        let bytes = extent_bytes(strides, counts, columns, format).unwrap_or(u64::MAX) as usize;
        Extent::new(format.element(), bytes, alignment)
    };
    let of_tokens = |rows: &qgemm_hal::HeadRows, columns| {
        let width = op.dtype.bytes();
        let alignment = if rows.aligned { WIDE_ACCESS } else { width };
        of(
            [0, rows.token_stride, rows.head_stride],
            [1, op.tokens, op.heads],
            columns,
            KvFormat::Plain(op.dtype),
            alignment,
        )
    };
    let of_keys = |rows: &qgemm_hal::KvRows, columns| {
        let alignment = if rows.rows.aligned { op.kv.vector_bytes() } else { op.kv.width() };
        let strides = [rows.page_stride, rows.rows.token_stride, rows.rows.head_stride];
        of(strides, [paging.pages, paging.page_size, op.kv_heads], columns, op.kv, alignment)
    };
    let scales = |of: Extent| Extent::of_values(KV_SCALES, of.bytes() * 8 / op.kv.bits() / KV_BLOCK);
    let (of_k, of_v) = (of_keys(&op.k, op.qk_dim), of_keys(&op.v, op.v_dim));
    Extents {
        scales: op.kv.has_scales().then(|| [scales(of_k), scales(of_v)]),
        q: of_tokens(&op.q, op.qk_dim),
        k: of_k,
        v: of_v,
        d: of_tokens(&op.d, op.v_dim),
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for AttentionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedAttention { sequences, tokens, heads, kv_heads, most_keys, .. } = self.op;
        write!(
            f,
            "{} for {tokens} tokens of {sequences} sequences, {heads} heads over {kv_heads}, ",
            self.kernel_name()
        )?;
        write!(f, "up to {most_keys} keys, on {}", self.device)?;
        let Some(ready) = &self.ready else { return f.write_str(", nothing to do") };
        let Launch { config, estimate } = ready.plan;
        let mut given = self.op.operands();
        if config.workspace_bytes > 0 {
            given.push(AttentionOperand::Workspace);
        }
        writeln!(f, ", {} bytes of workspace, expected to take {:.1} µs", config.workspace_bytes, estimate * 1e6)?;
        ready.sequence.display_with(&given).fmt(f)
    }
}
