//! [`GatherRows`]: embedding lookup, with its builder, plan and
//! arguments.

use std::fmt;
use std::ops::Deref;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::gather_rows::{STATUS_FINE, STATUS_WORDS};
use qgemm_hal::{BufferMut, BufferRef, CheckedGatherRows, GatherRowsOperand, Stream};
use qgemm_sched::Preferences;

use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::operand::{Checks, Extent, Stored, WIDE_ACCESS, check_dimension};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded};
use crate::weight::{Memory, Weight, WeightShape};

/// Embedding lookup, `D[i, :] = scale · dequantize(W[ids[i], :])`,
/// rounded once to D's type. It is llama.cpp's `GET_ROWS` and
/// `torch.nn.Embedding`. A description for
/// [`Context::plan_gather_rows`].
///
/// Ids are u32 on the device. An id outside W gives a row of
/// zeros; the run's status names the first such id.
///
/// ```
/// use qgemm_api::{Context, GatherRows, GatherRowsArgs, quantize};
///
/// let ctx = Context::open("cpu")?;
/// let table: Vec<f32> = (0..4 * 32).map(|i| (i / 32) as f32).collect(); // token t has [t, t, …]
/// let weight = ctx.load(&quantize(&table, 4, 32, "q8_0".parse()?)?.0)?;
/// let plan = ctx.plan_gather_rows(&GatherRows::new(&weight, 2))?;
/// let ids = ctx.upload(&[3u32, 0])?;
/// let (mut d, mut status) = (ctx.allocate(2 * 32 * 4)?, ctx.allocate(16)?);
/// plan.run(&ctx.default_stream(), GatherRowsArgs::new(&weight, &ids, &mut d, &mut status))?;
/// plan.check_status(&ctx, &status)?;
/// let rows: Vec<f32> = ctx.download(&d)?;
/// assert!((rows[0] - 3.0).abs() < 0.02 && rows[32] == 0.0);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GatherRows {
    weight: WeightShape,
    rows: usize,
    d_dtype: DType,
    d_row_stride: Option<u64>,
    d_alignment: usize,
    scale: f32,
}

impl GatherRows {
    /// `rows` rows of `weight`, `[rows, K]` in f32.
    pub fn new(weight: &Weight, rows: usize) -> Self {
        Self::of_shape(*weight.shape(), rows)
    }

    /// Gather from a weight that is not loaded
    /// ([`Context::describe_weight`]).
    pub fn of_described(weight: &DescribedWeight, rows: usize) -> Self {
        Self::of_shape(*weight.shape(), rows)
    }

    fn of_shape(weight: WeightShape, rows: usize) -> Self {
        Self { weight, rows, d_dtype: DType::F32, d_row_stride: None, d_alignment: WIDE_ACCESS, scale: 1.0 }
    }

    /// Element type of D.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d_dtype = dtype;
        self
    }

    /// Row stride of D, in elements.
    pub fn d_row_stride(mut self, row_stride: u64) -> Self {
        self.d_row_stride = Some(row_stride);
        self
    }

    /// Alignment of D's address, in bytes, at every run; 16 by
    /// default.
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d_alignment = bytes;
        self
    }

    /// Factor of every element; 1 by default. Gemma scales its
    /// embedding by the root of its features.
    pub fn scale(mut self, factor: f32) -> Self {
        self.scale = factor;
        self
    }

    fn check(&self) -> Result<CheckedGatherRows, Error> {
        let WeightShape { format, class, n, gated, k, stored_k, row_scale, k_order, .. } = self.weight;
        if gated {
            let (expected, got) = ("a weight that is no gated pair".to_owned(), self.weight.to_string());
            return Err(Error::WrongWeight { expected, got });
        }
        check_dimension("rows", self.rows)?;
        if !self.scale.is_finite() {
            return Err(Error::NonFiniteScalar { name: "scale", got: self.scale });
        }
        let (dtype, alignment) = (self.d_dtype, self.d_alignment);
        let d = Stored { name: "D", rows: self.rows, columns: k, dtype, alignment }.check(self.d_row_stride)?;
        let (rows, scale) = (self.rows, self.scale);
        Ok(CheckedGatherRows { rows, table_rows: n, k, stored_k, format, class, row_scale, k_order, d, scale })
    }
}

/// Ready kernel of one [`GatherRows`], from
/// [`Context::plan_gather_rows`]. Its text lists the launches of
/// a run. It runs with every weight of the planned shape.
#[derive(Debug)]
pub struct GatherRowsPlan {
    planned: Planned<CheckedGatherRows>,
    weight: WeightShape,
}

impl Deref for GatherRowsPlan {
    type Target = Planned<CheckedGatherRows>;

    fn deref(&self) -> &Self::Target {
        &self.planned
    }
}

impl fmt::Display for GatherRowsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

/// Operands of one run of a [`GatherRowsPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct GatherRowsArgs<'a> {
    /// The weight.
    pub w: &'a Weight,
    /// Row of the weight for each row of D: u32.
    pub ids: BufferRef<'a>,
    /// Output rows, `[rows, K]`.
    pub d: BufferMut<'a>,
    /// Written: 16 bytes that [`GatherRowsPlan::check_status`] reads.
    pub status: BufferMut<'a>,
}

impl<'a> GatherRowsArgs<'a> {
    /// Operands of every run.
    pub fn new(
        w: &'a Weight,
        ids: impl Into<BufferRef<'a>>,
        d: impl Into<BufferMut<'a>>,
        status: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self { w, ids: ids.into(), d: d.into(), status: status.into() }
    }
}

impl Context {
    /// Chooses a kernel for `gather` and makes it ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the gather is invalid, its weight is on another device or
    /// no family serves it; or when the kernel cannot be prepared.
    pub fn plan_gather_rows(&self, gather: &GatherRows) -> Result<GatherRowsPlan, Error> {
        self.check_weight(gather.weight.device)?;
        let planned = Planned::new(self, gather.check()?, Preferences::default())?;
        Ok(GatherRowsPlan { planned, weight: gather.weight })
    }

    /// Record of the choice of [`Context::plan_gather_rows`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the gather is invalid, or its weight is on another
    /// device.
    pub fn explain_gather_rows(&self, gather: &GatherRows) -> Result<PlanRecord, Error> {
        self.check_weight(gather.weight.device)?;
        explain(self, &gather.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedGatherRows);

impl Recorded for CheckedGatherRows {}

impl Bound for CheckedGatherRows {
    fn wanted(&self, operand: GatherRowsOperand, _: bool) -> Wanted {
        use GatherRowsOperand as O;
        match operand {
            O::Ids => Wanted::always("ids", Extent::of_values(ElementType::Int32, self.rows)),
            O::D => Wanted::always("D", Extent::of(&self.d, self.rows, self.k)),
            O::Status => Wanted::always("status", Extent::of_values(ElementType::Int32, STATUS_WORDS)),
            // The weight's description binds the weight.
            O::W | O::RowScale | O::KOrder => Wanted::optional("an operand of the weight", None, "the weight has it"),
        }
    }
}

impl GatherRowsPlan {
    /// Submits the gather to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it. An
    /// id outside W is no error of the run: the status holds the
    /// first one.
    ///
    /// # Errors
    /// When an operand is too short, misaligned or on another device;
    /// when the weight differs from the planned one; or on a device
    /// error. Nothing is written then.
    pub fn run(&self, stream: &Stream, args: GatherRowsArgs<'_>) -> Result<(), Error> {
        use GatherRowsOperand as O;
        let GatherRowsArgs { w, ids, d, status } = args;
        Checks(self.device()).device("weight", w.device())?;
        self.weight.check_serves(w.shape())?;
        let mut run = self.start(stream)?;
        run.read(O::Ids, ids)?;
        run.write(O::D, d)?;
        run.write(O::Status, status)?;
        if run.is_nothing() {
            // Without rows, every id is valid.
            return run.zero(stream, O::Status);
        }
        let Memory { data, row_scale, k_order } = w.memory();
        run.operands.read(O::W, data.into());
        run.operands.read_if_any(O::RowScale, row_scale.as_ref().map(Into::into));
        run.operands.read_if_any(O::KOrder, k_order.as_ref().map(Into::into));
        run.launch(stream)
    }

    /// Waits for the default stream and reads the status of a run:
    /// whether every id is a row. [Synchronize](Context::synchronize)
    /// first with a run on another stream.
    ///
    /// # Errors
    /// [`Error::UnknownRow`] with the first wrong id. Also when
    /// `status` is too short or on another device, or on a device
    /// error.
    pub fn check_status<'a>(&self, ctx: &Context, status: impl Into<BufferRef<'a>>) -> Result<(), Error> {
        let (status, checks) = (status.into(), Checks(self.device()));
        checks.device("context", ctx.info().id)?;
        let extent = Extent::of_values(ElementType::Int32, STATUS_WORDS);
        checks.view("status", status, extent)?;
        let bytes = ctx.download(status.slice(0..extent.bytes())?)?;
        let mut words = [0u32; STATUS_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        match words {
            [STATUS_FINE, ..] => Ok(()),
            [_, row, _, id] => Err(Error::UnknownRow { row: row as usize, id, rows: self.op().table_rows }),
        }
    }
}
