//! [`KvAppendPlan`]: a kernel made ready for one [`KvAppend`].

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALES};
use qgemm_hal::{
    Buffer, BufferMut, BufferRef, CheckedKvAppend, CheckedRotary, DeviceId, HeadRows, KernelId, KvAppendLaunch,
    KvAppendOperand, KvFormat, KvRows, LaunchSequence, Operands, Operation, RotaryAngles, Stream,
};
use qgemm_sched::memory_bound::choose;

use super::description::KvAppend;
use crate::attention::extent_bytes;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent, WIDE_ACCESS};
use crate::plan_cache::{PlanCaches, Ready};

/// A kernel chosen and made ready for one [`KvAppend`]; made by [`Context::plan_kv_append`]. Its text says what a run launches.
#[derive(Debug)]
pub struct KvAppendPlan {
    op: CheckedKvAppend,
    device: DeviceId,
    extents: Extents,
    /// Of the rotary embedding, on the device.
    frequencies: Option<Buffer>,
    /// None where there is no token.
    ready: Option<Arc<Ready<CheckedKvAppend>>>,
}

/// What a run asks of its buffers.
#[derive(Debug)]
struct Extents {
    q: Option<Extent>,
    new_k: Extent,
    new_v: Extent,
    k: Extent,
    v: Extent,
    /// Scales of K and of V, where the format has some.
    scales: Option<[Extent; 2]>,
}

/// What one run of a [`KvAppendPlan`] reads and writes.
#[derive(Debug)]
#[non_exhaustive]
pub struct KvAppendArgs<'a> {
    /// Turned in place: the queries, where there are heads of them.
    pub q: Option<BufferMut<'a>>,
    /// New keys.
    pub new_k: BufferRef<'a>,
    /// New values.
    pub new_v: BufferRef<'a>,
    /// Written: the keys of the cache.
    pub k: BufferMut<'a>,
    /// Written: the values of the cache.
    pub v: BufferMut<'a>,
    /// An f32 a head of keys, for formats that have factors: what cached keys are multiplied with when they are read.
    pub k_factors: Option<BufferRef<'a>>,
    /// An f32 a head of keys, for formats that have factors: what cached values are multiplied with when they are read.
    pub v_factors: Option<BufferRef<'a>>,
    /// Written: scales of the cached keys, for formats that have some: an f16 for every 32 features; the scale of element `i` of the keys is
    /// element `i / 32`.
    pub k_scales: Option<BufferMut<'a>>,
    /// Written: the same of the cached values.
    pub v_scales: Option<BufferMut<'a>>,
    /// Where the tokens of each sequence begin, and where the last end, for [`Queries::offsets`](crate::Queries::offsets): u32.
    pub q_offsets: Option<BufferRef<'a>>,
    /// Where the keys of each sequence begin, and where the last end, for [`Keys::offsets`](crate::Keys::offsets): u32.
    pub kv_offsets: Option<BufferRef<'a>>,
    /// How many keys each sequence has, the new ones among them, for [`Keys::lengths`](crate::Keys::lengths) and
    /// [`Keys::paged`](crate::Keys::paged): u32.
    pub kv_lengths: Option<BufferRef<'a>>,
    /// The pages of each sequence, for [`Keys::paged`](crate::Keys::paged): u32.
    pub block_table: Option<BufferRef<'a>>,
    /// Position of each token, for [`KvAppend::positions`]: u32.
    pub positions: Option<BufferRef<'a>>,
    /// Cosines, for [`Rotary::tables`](crate::Rotary::tables).
    pub cos: Option<BufferRef<'a>>,
    /// Sines, for [`Rotary::tables`](crate::Rotary::tables).
    pub sin: Option<BufferRef<'a>>,
}

impl<'a> KvAppendArgs<'a> {
    /// New keys and values, and the cache. The others are fields to set.
    pub fn new(
        new_k: impl Into<BufferRef<'a>>,
        new_v: impl Into<BufferRef<'a>>,
        k: impl Into<BufferMut<'a>>,
        v: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            q: None,
            new_k: new_k.into(),
            new_v: new_v.into(),
            k: k.into(),
            v: v.into(),
            k_factors: None,
            v_factors: None,
            k_scales: None,
            v_scales: None,
            q_offsets: None,
            kv_offsets: None,
            kv_lengths: None,
            block_table: None,
            positions: None,
            cos: None,
            sin: None,
        }
    }

    /// With queries to turn.
    pub fn q(mut self, q: impl Into<BufferMut<'a>>) -> Self {
        self.q = Some(q.into());
        self
    }

    /// With the lengths of the sequences.
    pub fn kv_lengths(mut self, lengths: impl Into<BufferRef<'a>>) -> Self {
        self.kv_lengths = Some(lengths.into());
        self
    }
}

impl KvAppendPlan {
    pub(crate) fn new(ctx: &Context, caches: &PlanCaches, append: &KvAppend) -> Result<Self, Error> {
        let op = append.check()?;
        let device = &**ctx.device();
        let make = || {
            let CheckedKvAppend { heads, kv_heads, .. } = op;
            let _span = tracing::info_span!("plan", tokens = op.addressing.tokens, heads, kv_heads).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().kv_append)?;
            Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, &op, &plan)? })
        };
        let has_tokens = !op.is_nothing();
        let ready = if has_tokens { Some(caches.kv_append.get_or_make(&op, make)?) } else { None };
        let frequencies = append.frequencies().filter(|_| has_tokens);
        // As words: the halves of a u64, the lower first.
        let words = frequencies.map(|all| all.iter().flat_map(|&f| [f as u32, (f >> 32) as u32]).collect::<Vec<_>>());
        let frequencies = words.map(|words| ctx.upload(&words)).transpose()?;
        Ok(Self { device: device.info().id, extents: extents(&op), frequencies, ready, op })
    }

    /// Name of the chosen kernel.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the chosen kernel, the first of several; none where there is no token.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|launch| launch.config.kernel)
    }

    /// The chosen configuration; none where there is no token.
    pub fn launch(&self) -> Option<&KvAppendLaunch> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; none where there is no token.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedKvAppend {
        &self.op
    }

    /// Bytes that a run reads and writes at least.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the work to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA graph;
    /// lengths, offsets, positions and tables are read on the device when it runs.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the plan, or a device error. Nothing has
    /// been written then.
    pub fn run(&self, stream: &Stream, args: KvAppendArgs<'_>) -> Result<(), Error> {
        use KvAppendOperand as O;
        let (op, extents) = (&self.op, &self.extents);
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        checks.view("new k", args.new_k, extents.new_k)?;
        checks.view("new v", args.new_v, extents.new_v)?;
        checks.view("k", args.k.view(), extents.k)?;
        checks.view("v", args.v.view(), extents.v)?;
        let q = checks.optional("q", args.q, extents.q, "there are heads of queries")?;
        let used = op.operands();
        let of = |operand: O, element: ElementType, count: usize| {
            used.contains(&operand).then(|| Extent::of_values(element, count))
        };
        let (word, number) = (ElementType::Int32, ElementType::from(DType::F32));
        let factors = "the format of the cache has a factor a head";
        let tables = "angles come from tables";
        let table_len = match op.rotary {
            Some(CheckedRotary { dim, angles: RotaryAngles::Tables { positions, row_stride }, .. })
                if positions > 0 =>
            {
                (positions - 1) * row_stride as usize + dim / 2
            }
            _ => 0,
        };
        let addressing = op.addressing;
        let (sequences, width) = (addressing.sequences, addressing.paging().width);
        let read = [
            (O::KFactors, "k factors", args.k_factors, number, op.kv_heads, factors),
            (O::VFactors, "v factors", args.v_factors, number, op.kv_heads, factors),
            (O::QOffsets, "q offsets", args.q_offsets, word, sequences + 1, "tokens are found by offsets"),
            (O::KvOffsets, "kv offsets", args.kv_offsets, word, sequences + 1, "keys are found by offsets"),
            (O::KvLengths, "kv lengths", args.kv_lengths, word, sequences, "keys are as many as lengths say"),
            (O::BlockTable, "block table", args.block_table, word, sequences * width, "keys are found by a table"),
            (O::Positions, "positions", args.positions, word, addressing.tokens, "positions are given"),
            (O::Cos, "cos", args.cos, number, table_len, tables),
            (O::Sin, "sin", args.sin, number, table_len, tables),
        ];
        let of_blocks = "the format of the cache has scales of blocks";
        let [k_extent, v_extent] = extents.scales.map_or([None; 2], |both| both.map(Some));
        let k_scales = checks.optional("k scales", args.k_scales, k_extent, of_blocks)?;
        let v_scales = checks.optional("v scales", args.v_scales, v_extent, of_blocks)?;
        let mut operands = Operands::new();
        for (operand, name, view, element, count, why) in read {
            operands.read_if_any(operand, checks.optional(name, view, of(operand, element, count), why)?);
        }
        operands.read(O::NewK, args.new_k);
        operands.read(O::NewV, args.new_v);
        operands.read_if_any(O::Frequencies, self.frequencies.as_ref().map(Into::into));
        operands.write(O::K, args.k);
        operands.write(O::V, args.v);
        for (operand, scales) in [(O::KScales, k_scales), (O::VScales, v_scales)] {
            if let Some(scales) = scales {
                operands.write(operand, scales);
            }
        }
        if let Some(q) = q {
            operands.write(O::Q, q);
        }
        let Some(ready) = &self.ready else { return Ok(()) };
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

fn extents(op: &CheckedKvAppend) -> Extents {
    let (paging, tokens) = (op.addressing.paging(), op.addressing.tokens);
    // `KvAppend::check` found that they fit the address space.
    let of = |strides, counts, columns, format: KvFormat, alignment| {
        let bytes = extent_bytes(strides, counts, columns, format).unwrap_or(u64::MAX) as usize;
        Extent::new(format.element(), bytes, alignment)
    };
    let of_tokens = |rows: &HeadRows, heads, columns| {
        let width = op.dtype.bytes();
        let alignment = if rows.aligned { WIDE_ACCESS } else { width };
        of([0, rows.token_stride, rows.head_stride], [1, tokens, heads], columns, KvFormat::Plain(op.dtype), alignment)
    };
    let of_cache = |rows: &KvRows, columns| {
        let alignment = if rows.rows.aligned { op.kv.vector_bytes() } else { op.kv.width() };
        let strides = [rows.page_stride, rows.rows.token_stride, rows.rows.head_stride];
        of(strides, [paging.pages, paging.page_size, op.kv_heads], columns, op.kv, alignment)
    };
    let scales = |of: Extent| Extent::of_values(KV_SCALES, of.bytes() * 8 / op.kv.bits() / KV_BLOCK);
    let (of_k, of_v) = (of_cache(&op.k, op.qk_dim), of_cache(&op.v, op.v_dim));
    Extents {
        scales: op.kv.has_scales().then(|| [scales(of_k), scales(of_v)]),
        q: (op.heads > 0).then(|| of_tokens(&op.q, op.heads, op.qk_dim)),
        new_k: of_tokens(&op.new_k, op.kv_heads, op.qk_dim),
        new_v: of_tokens(&op.new_v, op.kv_heads, op.v_dim),
        k: of_k,
        v: of_v,
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for KvAppendPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedKvAppend { addressing, heads, kv_heads, dtype, kv, .. } = self.op;
        write!(f, "{} for {} tokens of {} sequences, ", self.kernel_name(), addressing.tokens, addressing.sequences)?;
        write!(f, "{heads} heads and {kv_heads} of keys, from {dtype} to {kv}, on {}", self.device)?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return f.write_str(", nothing to do") };
        writeln!(f, ", expected to take {:.1} µs", plan.estimate * 1e6)?;
        sequence.display_with(&self.op.operands()).fmt(f)
    }
}
