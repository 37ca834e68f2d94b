//! Norm problem: the builder [`Norm`] and its validation
//! into a [`CheckedNorm`].

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{
    AddedResidual, CheckedNorm, CheckedQuantize, Dense, GateFunction, NormFunction, NormGate, QuantizedD, XOverwrite,
    XPlanes,
};

use crate::error::Error;
use crate::operand::{MAX_DIMENSION, Stored, WIDE_ACCESS, check_dimension};
use crate::quantization::Quantization;

/// RMSNorm or LayerNorm of rows, for [`Context::plan_norm`]:
///
/// ```text
/// RMSNorm:   y[r, c] = x[r, c] / sqrt(mean over c of x² + eps)
/// LayerNorm: y[r, c] = (x[r, c] − mean) / sqrt(mean over c of (x − mean)² + eps)
/// D[r, c] = gamma[c] · y[r, c] + beta[c]
/// ```
///
/// With a [gate](Norm::gate), `D[r, c]` is multiplied by `act(z[r, c])`; with a gate
/// [before the norm](Norm::gate_before), `x[r, c]` is. With [groups](Norm::groups) of
/// features, each group has its own means.
///
/// Arithmetic is f32, rounded once to D's type. With a
/// [residual](Norm::residual), `x` is the sum of X and the residual, rounded to
/// the sum's type. The result is thus exactly the norm of the written sum,
/// which a backward pass can recompute.
///
/// Rows of any f32 magnitude work, without overflow of squares. A row of zeros
/// with `eps = 0` becomes NaN. An infinity makes the other values of an RMSNorm
/// 0, and those of a LayerNorm NaN. Non-finite values affect only their row.
///
/// Defaults: D has the type of X, no residual, row-major without gaps.
///
/// [`Context::plan_norm`]: crate::Context::plan_norm
#[derive(Clone, Debug)]
pub struct Norm {
    rows: usize,
    columns: usize,
    d_columns: usize,
    function: NormFunction,
    x: Given,
    d: Given,
    /// Quantization of the result, if any.
    quantization: Option<Quantization>,
    residual: Option<Given>,
    sum: Given,
    x_overwrite: XOverwrite,
    sum_takes_residual: bool,
    groups: usize,
    gate: Option<(GateFunction, bool)>,
    z: Given,
}

/// Stated properties of a matrix.
#[derive(Clone, Copy, Debug)]
struct Given {
    /// Element type. By default that of another matrix.
    dtype: Option<DType>,
    row_stride: Option<u64>,
    alignment: usize,
}

impl Given {
    const NOTHING: Self = Self { dtype: None, row_stride: None, alignment: WIDE_ACCESS };

    /// Whether no stated property differs from those of `other`, of type `dtype`,
    /// so that both can share memory.
    fn agrees_with(&self, other: &Self, dtype: DType) -> bool {
        self.dtype.is_none_or(|own| own == dtype) && (self.row_stride.is_none() || self.row_stride == other.row_stride)
    }
}

impl Norm {
    /// Norm of X with `rows` × `columns` elements of type `x`. With 0 rows or
    /// columns the plan launches nothing.
    pub fn new(rows: usize, columns: usize, x: DType, function: NormFunction) -> Self {
        Self {
            rows,
            columns,
            d_columns: columns,
            function,
            x: Given { dtype: Some(x), ..Given::NOTHING },
            d: Given::NOTHING,
            quantization: None,
            residual: None,
            sum: Given::NOTHING,
            x_overwrite: XOverwrite::Own,
            sum_takes_residual: false,
            groups: 1,
            gate: None,
            z: Given::NOTHING,
        }
    }

    /// Row stride of X in elements, at least its columns.
    pub fn x_row_stride(mut self, elements: u64) -> Self {
        self.x.row_stride = Some(elements);
        self
    }

    /// Alignment of the address of X in every run, in bytes. 16 by default, which
    /// all buffers of a context have; less is slower.
    pub fn x_alignment(mut self, bytes: usize) -> Self {
        self.x.alignment = bytes;
        self
    }

    /// Element type of D. By default that of X.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d.dtype = Some(dtype);
        self
    }

    /// Format of the result, plain or quantized from unrounded f32 rows, in
    /// one launch with the norm.
    ///
    /// Quantized results have planes without gaps, with sums
    /// and factors as in [`Quantization::new`]. They replace D:
    /// [`Context::allocate_normed_x`](crate::Context::allocate_normed_x) allocates
    /// them.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Norm, NormArgs, NormFunction, XFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let norm = Norm::new(1, 4, DType::F32, NormFunction::layer(0.0)).d_format(XFormat::Int8Token);
    /// let plan = ctx.plan_norm(&norm)?;
    /// let x = ctx.upload(&[11.0f32, 9.0, 9.0, 11.0])?;
    /// let mut normed = ctx.allocate_normed_x(&plan)?;
    /// plan.run(&ctx.default_stream(), NormArgs::quantized(&x, &mut normed))?;
    /// let codes: Vec<u8> = ctx.download(normed.codes())?;
    /// assert_eq!(codes[..4].iter().map(|&code| code as i8).collect::<Vec<_>>(), [127, -127, -127, 127]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn d_format(mut self, format: XFormat) -> Self {
        match format.plain() {
            Some(dtype) => {
                self.quantization = None;
                self.d_dtype(dtype)
            }
            None => {
                let whole = Quantization::new(self.rows, self.columns, DType::F32, format);
                self.d_quantization(&whole)
            }
        }
    }

    /// Quantization of the result: format, sums, factors and strides. Its shape and
    /// source type are ignored.
    pub fn d_quantization(mut self, quantization: &Quantization) -> Self {
        self.quantization = Some(quantization.clone());
        self
    }

    /// Number of columns of D, at least that of X. Extra columns are 0.
    pub fn d_columns(mut self, columns: usize) -> Self {
        self.d_columns = columns;
        self
    }

    /// Row stride of D in elements, at least its columns. Gaps are not written.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d.row_stride = Some(elements);
        self
    }

    /// Alignment of the address of D, in bytes; see [`Norm::x_alignment`].
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d.alignment = bytes;
        self
    }

    /// Adds a residual of this type to X first, and writes the sum. The sum has
    /// the same type unless [`Norm::sum_dtype`] is set.
    pub fn residual(mut self, dtype: DType) -> Self {
        self.residual = Some(Given { dtype: Some(dtype), ..self.residual.unwrap_or(Given::NOTHING) });
        self
    }

    /// Row stride of the residual in elements. Call after [`Norm::residual`].
    pub fn residual_row_stride(mut self, elements: u64) -> Self {
        if let Some(residual) = &mut self.residual {
            residual.row_stride = Some(elements);
        }
        self
    }

    /// Alignment of the address of the residual, in bytes. Call
    /// after [`Norm::residual`].
    pub fn residual_alignment(mut self, bytes: usize) -> Self {
        if let Some(residual) = &mut self.residual {
            residual.alignment = bytes;
        }
        self
    }

    /// Element type of the sum.
    pub fn sum_dtype(mut self, dtype: DType) -> Self {
        self.sum.dtype = Some(dtype);
        self
    }

    /// Row stride of the sum in elements, at least its
    /// columns. Gaps are not written.
    pub fn sum_row_stride(mut self, elements: u64) -> Self {
        self.sum.row_stride = Some(elements);
        self
    }

    /// Alignment of the address of the sum, in bytes; see [`Norm::x_alignment`].
    pub fn sum_alignment(mut self, bytes: usize) -> Self {
        self.sum.alignment = bytes;
        self
    }

    /// Multiplies the result by `act(z)`: `norm(x) · gamma · act(z)`, the gated
    /// RMSNorm of Qwen3-Next. z is `[rows, columns]` in the type of X. Backends serve
    /// neither a residual nor a quantized result beside it.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, GateFunction, Norm, NormArgs, NormFunction};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let norm = Norm::new(1, 2, DType::F32, NormFunction::rms(0.0)).gate(GateFunction::Sigmoid);
    /// let plan = ctx.plan_norm(&norm)?;
    /// let (x, z) = (ctx.upload(&[3.0f32, -3.0])?, ctx.upload(&[0.0f32, 40.0])?);
    /// let mut d = ctx.allocate(2 * 4)?;
    /// plan.run(&ctx.default_stream(), NormArgs::new(&x, &mut d).gate(&z))?;
    /// assert_eq!(ctx.download::<f32>(&d)?, [0.5, -1.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn gate(mut self, function: GateFunction) -> Self {
        self.gate = Some((function, false));
        self
    }

    /// Multiplies X by `act(z)` before the norm: `norm(x · act(z)) · gamma`, the gated
    /// RMSNorm of Mamba-2. See [`Norm::gate`].
    pub fn gate_before(mut self, function: GateFunction) -> Self {
        self.gate = Some((function, true));
        self
    }

    /// Row stride of z in elements.
    pub fn gate_row_stride(mut self, elements: u64) -> Self {
        self.z.row_stride = Some(elements);
        self
    }

    /// Alignment of the address of z, in bytes; see [`Norm::x_alignment`].
    pub fn gate_alignment(mut self, bytes: usize) -> Self {
        self.z.alignment = bytes;
        self
    }

    /// Groups of adjacent features, each normalized by itself, as in Mamba-2; a
    /// divisor of the columns. Gamma and beta still have all columns. Heads of
    /// contiguous rows need none: they are rows.
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// D overwrites X, with its type, row stride and alignment.
    pub fn d_in_place(mut self) -> Self {
        self.x_overwrite = XOverwrite::D;
        self
    }

    /// The sum overwrites the residual, with its type, row stride and alignment.
    pub fn sum_in_place(mut self) -> Self {
        self.sum_takes_residual = true;
        self
    }

    /// The sum overwrites X, with its type, row stride and alignment.
    pub fn sum_in_place_of_x(mut self) -> Self {
        self.x_overwrite = XOverwrite::Sum;
        self
    }

    /// Validated quantization of the result. `None` for a plain one.
    pub(crate) fn check_quantization(&self) -> Result<Option<CheckedQuantize>, Error> {
        let Some(quantization) = &self.quantization else { return Ok(None) };
        let format = quantization.format();
        if self.x_overwrite == XOverwrite::D {
            let why = "it is codes and scales: leave out `Norm::d_in_place`";
            return Err(Error::InPlace { what: "D in the place of X", why });
        }
        let asked = [
            (self.d_columns != self.columns, "columns of zeros behind D's"),
            (self.d.row_stride.is_some(), "a row stride of elements"),
        ];
        if let Some((_, what)) = asked.into_iter().find(|(is_asked, _)| *is_asked) {
            return Err(Error::NotOfXFormat { what, format });
        }
        quantization.of_shape(self.rows, self.columns).check().map(Some)
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedNorm, Error> {
        let &Self { rows, columns, function, x_overwrite, sum_takes_residual, groups, .. } = self;
        let quantized = self.check_quantization()?.map(|made| {
            let CheckedQuantize { format, parts, codes_row, scales_row, sums_row, .. } = made;
            QuantizedD { format, planes: XPlanes { parts, codes_row, scales_row, sums_row } }
        });
        let stored_columns = |quantized: QuantizedD| quantized.planes.parts.columns(columns);
        let d_columns = quantized.map_or(self.d_columns, stored_columns);
        check_dimension("rows", rows)?;
        check_dimension("columns", columns)?;
        check_dimension("columns of D", d_columns)?;
        if columns == 0 && d_columns > 0 {
            return Err(Error::NoColumns { d_columns });
        }
        if d_columns < columns {
            return Err(Error::OutOfRange {
                name: "columns of D",
                least: columns,
                most: MAX_DIMENSION,
                got: d_columns,
            });
        }
        if groups == 0 {
            return Err(Error::OutOfRange { name: "groups of features", least: 1, most: columns, got: groups });
        }
        if !columns.is_multiple_of(groups) {
            return Err(Error::HeadDim { name: "columns", step: groups, most: MAX_DIMENSION, got: columns });
        }
        if groups > 1 && d_columns != columns {
            let (least, most) = (columns, columns);
            return Err(Error::OutOfRange { name: "columns of D", least, most, got: d_columns });
        }
        check_function(&function)?;
        let x_dtype = self.x.dtype.unwrap_or(DType::F32);
        let with_columns = |name, columns, given: &Given, dtype: DType| -> Result<Dense, Error> {
            let dtype = given.dtype.unwrap_or(dtype);
            Stored { name, rows, columns, dtype, alignment: given.alignment }.check(given.row_stride)
        };
        let stored = |name, given: &Given, dtype: DType| with_columns(name, columns, given, dtype);
        let x = stored("X", &self.x, x_dtype)?;
        let d = match x_overwrite {
            XOverwrite::D if !self.d.agrees_with(&self.x, x_dtype) || d_columns != columns => {
                let why = "it has another type or row stride, or more columns";
                return Err(Error::InPlace { what: "D in the place of X", why });
            }
            XOverwrite::D => x,
            _ if quantized.is_some() => Dense::rows_of(DType::F32, d_columns),
            _ => with_columns("D", d_columns, &self.d, x_dtype)?,
        };
        let added = match &self.residual {
            None if x_overwrite == XOverwrite::Sum || sum_takes_residual => {
                return Err(Error::InPlace {
                    what: "the sum",
                    why: "there is no residual: state it with `Norm::residual`",
                });
            }
            None => None,
            Some(given) => {
                let dtype = given.dtype.unwrap_or(x_dtype);
                let residual = stored("residual", given, dtype)?;
                let sum = match (x_overwrite, sum_takes_residual) {
                    (XOverwrite::Sum, true) => {
                        let why = "it cannot take the place of X and of the residual: state one of them";
                        return Err(Error::InPlace { what: "the sum", why });
                    }
                    (XOverwrite::Sum, _) if !self.sum.agrees_with(&self.x, x_dtype) => {
                        let what = "the sum in the place of X";
                        return Err(Error::InPlace { what, why: "it has another type or row stride" });
                    }
                    (_, true) if !self.sum.agrees_with(given, dtype) => {
                        let what = "the sum in the place of the residual";
                        return Err(Error::InPlace { what, why: "it has another type or row stride" });
                    }
                    (XOverwrite::Sum, _) => x,
                    (_, true) => residual,
                    _ => stored("sum", &self.sum, dtype)?,
                };
                Some(AddedResidual { residual, sum, in_place: sum_takes_residual })
            }
        };
        let gate = match self.gate {
            Some((function, before)) => Some(NormGate { z: stored("gate", &self.z, x_dtype)?, function, before }),
            None => None,
        };
        Ok(CheckedNorm {
            rows,
            columns,
            groups,
            d_columns,
            function,
            x,
            d,
            quantized,
            added,
            x_overwrite,
            gathers: false,
            gate,
        })
    }
}

/// Validates epsilon and the parameters of a norm function.
pub(crate) fn check_function(function: &NormFunction) -> Result<(), Error> {
    check_eps(function.eps)
}

/// Validates epsilon.
pub(crate) fn check_eps(got: f32) -> Result<(), Error> {
    if !got.is_finite() {
        return Err(Error::NonFiniteScalar { name: "eps", got });
    }
    if got < 0.0 { Err(Error::NegativeEps { got }) } else { Ok(()) }
}
