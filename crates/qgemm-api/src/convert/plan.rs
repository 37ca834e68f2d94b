//! [`ConversionPlan`]: ready kernel of one conversion.

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{BufferMut, BufferRef, CheckedConvert, ConvertOperand, ConvertPlan, Stream};
use qgemm_sched::Preferences;

use super::conversion::Conversion;
use crate::context::Context;
use crate::error::Error;
use crate::operand::Extent;
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{Dispatch, PlanRecord, Recorded, SplitAxis};

/// Ready kernels of one [`Conversion`], from
/// [`Context::plan_conversion`]. Its text lists the launches of a
/// run.
pub type ConversionPlan = Planned<CheckedConvert>;

/// Operands of one run of a [`ConversionPlan`].
///
/// ```
/// use qgemm_api::{Context, Conversion, ConversionArgs, DType, NO_COLUMN};
///
/// let ctx = Context::open("cpu")?;
/// // Three columns of X, the last one first, and one of zeros.
/// let plan = ctx.plan_conversion(&Conversion::new(1, 3, DType::F32, DType::F16).gathered(4))?;
/// let x = ctx.upload(&DType::F32.encode(&[0.5, 2.0, -3.0]))?;
/// let order = ctx.upload(&[2, 0, NO_COLUMN, 1].map(u32::to_le_bytes).concat())?;
/// let mut d = ctx.allocate(4 * DType::F16.bytes())?;
/// let args = ConversionArgs::new(&x, &mut d).order(&order);
/// plan.run(&ctx.default_stream(), args)?;
/// assert_eq!(DType::F16.decode(&ctx.download(&d)?), [-3.0, 0.5, 0.0, 2.0]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct ConversionArgs<'a> {
    /// Input matrix.
    pub x: BufferRef<'a>,
    /// Output matrix.
    pub d: BufferMut<'a>,
    /// Source column of each column of D, a `u32`, when the
    /// conversion is [gathered](Conversion::gathered).
    pub order: Option<BufferRef<'a>>,
    /// Row factors, an f32 output per row, when the conversion has
    /// [row factors](Conversion::row_factors).
    pub row_factors: Option<BufferMut<'a>>,
}

impl<'a> ConversionArgs<'a> {
    /// Operands of every run. Methods add the other operands. Callers
    /// with optional operands can set the fields.
    pub fn new(x: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        Self { x: x.into(), d: d.into(), order: None, row_factors: None }
    }

    /// With the order of [`Conversion::gathered`].
    pub fn order(mut self, order: impl Into<BufferRef<'a>>) -> Self {
        self.order = Some(order.into());
        self
    }

    /// With the factors of [`Conversion::row_factors`].
    pub fn row_factors(mut self, row_factors: impl Into<BufferMut<'a>>) -> Self {
        self.row_factors = Some(row_factors.into());
        self
    }
}

impl Context {
    /// Chooses a kernel for `conversion` and makes it ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, Conversion, ConversionArgs, DType};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // Two rows of three columns, stored column by column.
    /// let plan = ctx.plan_conversion(&Conversion::new(2, 3, DType::F32, DType::BF16).x_transposed())?;
    /// let x = ctx.upload(&DType::F32.encode(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]))?;
    /// let mut d = ctx.allocate(2 * 3 * DType::BF16.bytes())?;
    /// plan.run(&ctx.default_stream(), ConversionArgs::new(&x, &mut d))?;
    /// assert_eq!(DType::BF16.decode(&ctx.download(&d)?), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the conversion is invalid or no family serves it, or when
    /// the kernel cannot be prepared.
    pub fn plan_conversion(&self, conversion: &Conversion) -> Result<ConversionPlan, Error> {
        Planned::new(self, conversion.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_conversion`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the conversion is invalid.
    pub fn explain_conversion(&self, conversion: &Conversion) -> Result<PlanRecord, Error> {
        explain(self, &conversion.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedConvert);

impl Recorded for CheckedConvert {
    fn dispatch(&self, _: &ConvertPlan) -> Dispatch {
        Dispatch::along(SplitAxis::Range, 1)
    }
}

impl Bound for CheckedConvert {
    fn wanted(&self, operand: ConvertOperand, _: bool) -> Wanted {
        use ConvertOperand as O;
        match operand {
            O::X => Wanted::always("X", Extent::of(&self.x, self.rows, self.columns)),
            O::D => Wanted::always("D", Extent::of(&self.d, self.rows, self.d_columns)),
            O::Order => {
                let order = self.gathers.then(|| Extent::of_values(ElementType::Int32, self.d_columns));
                Wanted::optional("column order", order, "the conversion gathers columns")
            }
            O::RowFactors => {
                let factors = self.row_factors.then(|| Extent::of_values(DType::F32, self.rows));
                Wanted::optional("row factors", factors, "the conversion multiplies rows")
            }
        }
    }
}

impl ConversionPlan {
    /// Submits the conversion to `stream`. Allocations, waits and
    /// locks are as for [`Plan::run`](crate::Plan::run). A CUDA graph
    /// may capture the run.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: ConversionArgs<'_>) -> Result<(), Error> {
        use ConvertOperand as O;
        let ConversionArgs { x, d, order, row_factors } = args;
        let mut run = self.start(stream)?;
        run.read(O::X, x)?;
        run.read(O::Order, order)?;
        run.write(O::D, d)?;
        run.write(O::RowFactors, row_factors)?;
        run.launch(stream)
    }
}
