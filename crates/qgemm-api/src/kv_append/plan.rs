//! [`KvAppendPlan`]: ready kernel of one [`KvAppend`].

use std::fmt;
use std::ops::Deref;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALES};
use qgemm_hal::{
    Buffer, BufferMut, BufferRef, CheckedKvAppend, CheckedRotary, HeadRows, KvAppendOperand, KvFormat, KvRows,
    RotaryAngles, Stream,
};
use qgemm_sched::Preferences;

use super::description::KvAppend;
use crate::attention::extent_bytes;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded};
use crate::setters::setters;

/// Ready kernel of one [`KvAppend`], from
/// [`Context::plan_kv_append`]. Its text lists the launches of a
/// run.
#[derive(Debug)]
pub struct KvAppendPlan {
    planned: Planned<CheckedKvAppend>,
    /// Frequencies of the rotary embedding, on the device.
    frequencies: Option<Buffer>,
}

impl Deref for KvAppendPlan {
    type Target = Planned<CheckedKvAppend>;

    fn deref(&self) -> &Self::Target {
        &self.planned
    }
}

impl fmt::Display for KvAppendPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

/// Operands of one run of a [`KvAppendPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct KvAppendArgs<'a> {
    /// Queries, rotated in place, if there are query heads.
    pub q: Option<BufferMut<'a>>,
    /// New keys, unless heads are rotated in place alone.
    pub new_k: Option<BufferRef<'a>>,
    /// New values, where there are new keys.
    pub new_v: Option<BufferRef<'a>>,
    /// Keys of the cache, an output, where there are new keys.
    pub k: Option<BufferMut<'a>>,
    /// Values of the cache, an output, where there are new keys.
    pub v: Option<BufferMut<'a>>,
    /// Gamma of the query heads, for [`KvAppend::head_norm`]: `[head_dim]`.
    pub q_gamma: Option<BufferRef<'a>>,
    /// Gamma of the key heads, where there are new keys: `[head_dim]`.
    pub k_gamma: Option<BufferRef<'a>>,
    /// Factors of the cached keys, for formats with factors: an f32
    /// per KV head. Readers multiply keys by them.
    pub k_factors: Option<BufferRef<'a>>,
    /// Factors of the cached values, for formats with factors: an f32
    /// per KV head. Readers multiply values by them.
    pub v_factors: Option<BufferRef<'a>>,
    /// Scales of the cached keys, an output, for formats with scales:
    /// an f16 per 32 features. Element `i` of the keys has scale
    /// `i / 32`.
    pub k_scales: Option<BufferMut<'a>>,
    /// Scales of the cached values, an output in the layout of the
    /// key scales.
    pub v_scales: Option<BufferMut<'a>>,
    /// Offsets of the tokens of each sequence, and their end, for
    /// [`Queries::offsets`](crate::Queries::offsets): u32.
    pub q_offsets: Option<BufferRef<'a>>,
    /// Offsets of the keys of each sequence, and their end, for
    /// [`Keys::offsets`](crate::Keys::offsets): u32.
    pub kv_offsets: Option<BufferRef<'a>>,
    /// Number of keys of each sequence, with the new ones, for
    /// [`Keys::lengths`](crate::Keys::lengths) and
    /// [`Keys::paged`](crate::Keys::paged): u32.
    pub kv_lengths: Option<BufferRef<'a>>,
    /// Page indices of each sequence, for
    /// [`Keys::paged`](crate::Keys::paged): u32.
    pub block_table: Option<BufferRef<'a>>,
    /// Position of each token, for [`KvAppend::positions`]: u32.
    pub positions: Option<BufferRef<'a>>,
    /// Cosines, for [`Rotary::tables`](crate::Rotary::tables).
    pub cos: Option<BufferRef<'a>>,
    /// Sines, for [`Rotary::tables`](crate::Rotary::tables).
    pub sin: Option<BufferRef<'a>>,
}

impl<'a> KvAppendArgs<'a> {
    /// New keys and values, and the cache. Methods add the other
    /// operands.
    pub fn new(
        new_k: impl Into<BufferRef<'a>>,
        new_v: impl Into<BufferRef<'a>>,
        k: impl Into<BufferMut<'a>>,
        v: impl Into<BufferMut<'a>>,
    ) -> Self {
        let (new_k, new_v) = (Some(new_k.into()), Some(new_v.into()));
        Self { new_k, new_v, k: Some(k.into()), v: Some(v.into()), ..Self::NONE }
    }

    /// Heads of [`KvAppend::in_place`]. Methods add the other operands.
    pub fn in_place(heads: impl Into<BufferMut<'a>>) -> Self {
        Self { q: Some(heads.into()), ..Self::NONE }
    }

    /// No operand.
    const NONE: Self = Self {
        q: None,
        new_k: None,
        new_v: None,
        k: None,
        v: None,
        q_gamma: None,
        k_gamma: None,
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
    };

    setters! {
        /// With queries to rotate.
        q: BufferMut,
        /// With the lengths of the sequences.
        kv_lengths: BufferRef,
        /// With factors of the keys per KV head.
        k_factors: BufferRef,
        /// With factors of the values per KV head.
        v_factors: BufferRef,
        /// With the scales of the blocks of keys.
        k_scales: BufferMut,
        /// With the scales of the blocks of values.
        v_scales: BufferMut,
        /// With the offsets of the tokens.
        q_offsets: BufferRef,
        /// With the offsets of the keys.
        kv_offsets: BufferRef,
        /// With the block table.
        block_table: BufferRef,
    }

    /// With the tables of [`Rotary::tables`](crate::Rotary::tables).
    pub fn tables(mut self, cos: impl Into<BufferRef<'a>>, sin: impl Into<BufferRef<'a>>) -> Self {
        (self.cos, self.sin) = (Some(cos.into()), Some(sin.into()));
        self
    }

    /// With the gammas of [`KvAppend::head_norm`]: of queries and of keys.
    pub fn gammas(mut self, q: impl Into<BufferRef<'a>>, k: impl Into<BufferRef<'a>>) -> Self {
        (self.q_gamma, self.k_gamma) = (Some(q.into()), Some(k.into()));
        self
    }

    /// With the positions of [`KvAppend::positions`].
    pub fn positions(mut self, positions: impl Into<BufferRef<'a>>) -> Self {
        self.positions = Some(positions.into());
        self
    }
}

impl Context {
    /// Chooses a kernel for `append` and makes it ready. Uploads the
    /// frequencies of a rotary embedding. A known problem costs a
    /// lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Keys, KvAppend, KvAppendArgs, Queries, Rotary};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // One new token, room for four. One head of eight features; two rotate.
    /// let append = KvAppend::new(DType::F32, 1, 1, 8, Queries::each(1, 1), Keys::lengths(4)).rotary(Rotary::neox(2));
    /// let plan = ctx.plan_kv_append(&append)?;
    /// let ones = ctx.upload(&[1.0f32; 8])?;
    /// let mut q = ctx.upload(&[1.0f32, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])?;
    /// let (mut k, mut v) = (ctx.allocate(4 * 8 * 4)?, ctx.allocate(4 * 8 * 4)?);
    /// let lengths = ctx.upload(&[2u32])?; // the new key is the second: its position is 1
    /// let args = KvAppendArgs::new(&ones, &ones, &mut k, &mut v).q(&mut q).kv_lengths(&lengths);
    /// plan.run(&ctx.default_stream(), args)?;
    /// let rotated: Vec<f32> = ctx.download(&q)?;
    /// assert!((rotated[0] - 1f32.cos()).abs() < 1e-6 && (rotated[1] - 1f32.sin()).abs() < 1e-6 && rotated[2] == 3.0);
    /// let values: Vec<f32> = ctx.download(&v)?;
    /// assert!(values[..8] == [0.0; 8] && values[8..16] == [1.0; 8]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When `append` is invalid or no family serves it, or when the
    /// kernel cannot be prepared.
    pub fn plan_kv_append(&self, append: &KvAppend) -> Result<KvAppendPlan, Error> {
        KvAppendPlan::new(self, append)
    }

    /// Record of the choice of [`Context::plan_kv_append`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When `append` is invalid.
    pub fn explain_kv_append(&self, append: &KvAppend) -> Result<PlanRecord, Error> {
        explain(self, &append.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedKvAppend);

impl Recorded for CheckedKvAppend {}

impl Bound for CheckedKvAppend {
    fn wanted(&self, operand: KvAppendOperand, used: bool) -> Wanted {
        use KvAppendOperand as O;
        let (paging, tokens, sequences) = (self.addressing.paging(), self.addressing.tokens, self.addressing.sequences);
        // `KvAppend::check` has verified that the extents fit the
        // address space.
        let of = |strides, counts, columns, format: KvFormat, alignment| {
            let bytes = extent_bytes(strides, counts, columns, format).unwrap_or(u64::MAX) as usize;
            Extent::new(format.element(), bytes, alignment)
        };
        let of_tokens = |rows: &HeadRows, heads, columns| {
            let alignment = if rows.aligned { WIDE_ACCESS } else { self.dtype.bytes() };
            let strides = [0, rows.token_stride, rows.head_stride];
            of(strides, [1, tokens, heads], columns, KvFormat::Plain(self.dtype), alignment)
        };
        let of_cache = |rows: &KvRows, columns| {
            let alignment = if rows.rows.aligned { self.kv.vector_bytes() } else { self.kv.width() };
            let strides = [rows.page_stride, rows.rows.token_stride, rows.rows.head_stride];
            of(strides, [paging.pages, paging.page_size, self.kv_heads], columns, self.kv, alignment)
        };
        let appended =
            |name, of: Extent| Wanted::optional(name, self.appends().then_some(of), "there are heads of keys");
        let scales = |name, of: Extent| {
            let extent = Extent::of_values(KV_SCALES, of.bytes() * 8 / self.kv.bits() / KV_BLOCK);
            let why = "the format of the cache has scales of blocks";
            Wanted::optional(name, used.then_some(extent), why)
        };
        let values = |name, element: ElementType, count, why| {
            Wanted::optional(name, used.then(|| Extent::of_values(element, count)), why)
        };
        let gamma = |name| {
            let element = self.head_norm.map_or(DType::F32, |norm| norm.gamma).into();
            values(name, element, self.qk_dim, "heads are normalized")
        };
        let (word, number) = (ElementType::Int32, ElementType::from(DType::F32));
        let factors = "the format of the cache has a factor a head";
        let tables = "angles come from tables";
        match operand {
            O::Q => {
                let extent = (self.heads > 0).then(|| of_tokens(&self.q, self.heads, self.qk_dim));
                Wanted::optional("q", extent, "there are heads of queries")
            }
            O::NewK => appended("new k", of_tokens(&self.new_k, self.kv_heads, self.qk_dim)),
            O::NewV => appended("new v", of_tokens(&self.new_v, self.kv_heads, self.v_dim)),
            O::K => appended("k", of_cache(&self.k, self.qk_dim)),
            O::V => appended("v", of_cache(&self.v, self.v_dim)),
            O::QGamma => gamma("q gamma"),
            O::KGamma => gamma("k gamma"),
            O::KFactors => values("k factors", number, self.kv_heads, factors),
            O::VFactors => values("v factors", number, self.kv_heads, factors),
            O::KScales => scales("k scales", of_cache(&self.k, self.qk_dim)),
            O::VScales => scales("v scales", of_cache(&self.v, self.v_dim)),
            O::QOffsets => values("q offsets", word, sequences + 1, "tokens are found by offsets"),
            O::KvOffsets => values("kv offsets", word, sequences + 1, "keys are found by offsets"),
            O::KvLengths => values("kv lengths", word, sequences, "keys are as many as lengths say"),
            O::BlockTable => values("block table", word, sequences * paging.width, "keys are found by a table"),
            O::Positions => values("positions", word, tokens, "positions are given"),
            O::Frequencies => {
                // Pairs of words: u64 fractions of a turn.
                let count = self.rotary.map_or(0, |rotary| rotary.dim);
                values("frequencies", word, count, "pairs turn by frequencies")
            }
            O::Cos => values("cos", number, table_len(self), tables),
            O::Sin => values("sin", number, table_len(self), tables),
        }
    }
}

/// Extent of a table of cosines or sines, in elements.
fn table_len(op: &CheckedKvAppend) -> usize {
    match op.rotary {
        Some(CheckedRotary { dim, angles: RotaryAngles::Tables { positions, row_stride }, .. }) if positions > 0 => {
            (positions - 1) * row_stride as usize + dim / 2
        }
        _ => 0,
    }
}

impl KvAppendPlan {
    fn new(ctx: &Context, append: &KvAppend) -> Result<Self, Error> {
        let planned = Planned::new(ctx, append.check()?, Preferences::default())?;
        let frequencies = append.frequencies().filter(|_| planned.launch().is_some());
        // Words of a u64, the low half first.
        let words = frequencies.map(|all| all.iter().flat_map(|&f| [f as u32, (f >> 32) as u32]).collect::<Vec<_>>());
        Ok(Self { planned, frequencies: words.map(|words| ctx.upload(&words)).transpose()? })
    }

    /// Submits the work to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it.
    /// Lengths, offsets, positions and tables are read on the device
    /// at run time.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: KvAppendArgs<'_>) -> Result<(), Error> {
        use KvAppendOperand as O;
        let mut run = self.start(stream)?;
        let written =
            [(O::K, args.k), (O::V, args.v), (O::Q, args.q), (O::KScales, args.k_scales), (O::VScales, args.v_scales)];
        written.into_iter().try_for_each(|(operand, view)| run.write(operand, view))?;
        let read = [
            (O::NewK, args.new_k),
            (O::NewV, args.new_v),
            (O::QGamma, args.q_gamma),
            (O::KGamma, args.k_gamma),
            (O::KFactors, args.k_factors),
            (O::VFactors, args.v_factors),
            (O::QOffsets, args.q_offsets),
            (O::KvOffsets, args.kv_offsets),
            (O::KvLengths, args.kv_lengths),
            (O::BlockTable, args.block_table),
            (O::Positions, args.positions),
            (O::Cos, args.cos),
            (O::Sin, args.sin),
        ];
        read.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        run.operands.read_if_any(O::Frequencies, self.frequencies.as_ref().map(Into::into));
        run.launch(stream)
    }
}
