//! GEMM problem: the builder [`Problem`] and its validation into a [`CheckedGemm`].

use qgemm_formats::{DType, ScaleSpan, XFormat};
use qgemm_hal::{
    Activation, CheckedGemm, CheckedQuantize, Dense, Math, NormFunction, NormedX, Segment, XOperand, XPlanes,
    XPrecision,
};
use qgemm_sched::Preferences;

use crate::activation::check_activation;
use crate::error::Error;
use crate::norm::check_function;
use crate::operand::{Extent, Stored, WIDE_ACCESS, check_dimension};
use crate::quantization::Quantization;
use crate::weight::{Weight, WeightShape};

/// Plain formats of X.
const SERVED: &[XFormat] = &[XFormat::Plain(DType::F32), XFormat::Plain(DType::F16), XFormat::Plain(DType::BF16)];

/// Column granularity of normalized rows: 16 bytes of 16-bit numbers.
const NORMED_GROUP: usize = 8;

/// GEMM problem with a quantized weight, for [`Context::plan`]:
///
/// ```text
/// v[m, n] = alpha · token_scale[m] · row_scale[n] · Σk X[m, k] · W[n, k] + beta · C[m, n] + bias[n]
/// D[m, n] = activation(v[m, n]) + residual[m, n]
/// ```
///
/// For a gated pair ([`Context::load_gated`]), `vg` and `vu` are the `v` of gate
/// and up. Each has its own weight, row scales and bias; there is no C:
///
/// ```text
/// D[m, n] = activation(vg[m, n]) · vu[m, n] + residual[m, n]
/// ```
///
/// All arithmetic is f32, rounded once to D's type. `row_scale` belongs to the
/// weight ([`HostWeight::with_row_scale`](crate::HostWeight::with_row_scale)),
/// so per-channel scales cost nothing extra. Methods below add the other operands.
///
/// Defaults: `alpha` is 1; the only operands are X, W and D; no activation;
/// X is f32; D has the type of X; operands are row-major without gaps. A gated pair
/// must state its activation.
///
/// [`Context::load_gated`]: crate::Context::load_gated
/// [`Context::plan`]: crate::Context::plan
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    weight: WeightShape,
    m: usize,
    x_format: XFormat,
    /// Planes and strides of a quantized X, if stated.
    x_quantization: Option<Quantization>,
    x_precision: XPrecision,
    x_row_stride: Option<u64>,
    x_transposed: bool,
    x_alignment: usize,
    norm: Option<NormFunction>,
    normed_format: Option<XFormat>,
    d_dtype: Option<DType>,
    d_row_stride: Option<u64>,
    d_alignment: usize,
    /// Separate outputs of a fused weight's product.
    segments: Vec<Segment>,
    c: Option<(f32, DType)>,
    c_row_stride: Option<u64>,
    c_alignment: usize,
    bias: Option<DType>,
    token_scale: bool,
    activation: Option<Activation>,
    residual: Option<DType>,
    residual_row_stride: Option<u64>,
    residual_alignment: usize,
    residual_in_d: bool,
    alpha: f32,
    batch_invariant: bool,
    preferences: Preferences,
}

impl Problem {
    /// Product of `m` tokens with `weight`. With `m = 0` the plan launches nothing.
    pub fn new(weight: &Weight, m: usize) -> Self {
        Self::of_shape(*weight.shape(), m)
    }

    pub(crate) fn of_shape(weight: WeightShape, m: usize) -> Self {
        Self {
            weight,
            m,
            x_format: DType::F32.into(),
            x_quantization: None,
            x_precision: XPrecision::default(),
            x_row_stride: None,
            x_transposed: false,
            x_alignment: WIDE_ACCESS,
            norm: None,
            normed_format: None,
            d_dtype: None,
            d_row_stride: None,
            d_alignment: WIDE_ACCESS,
            segments: Vec::new(),
            c: None,
            c_row_stride: None,
            c_alignment: WIDE_ACCESS,
            bias: None,
            token_scale: false,
            activation: None,
            residual: None,
            residual_row_stride: None,
            residual_alignment: WIDE_ACCESS,
            residual_in_d: false,
            alpha: 1.0,
            batch_invariant: false,
            preferences: Preferences::default(),
        }
    }

    /// Element type of a plain X.
    pub fn x_dtype(self, dtype: DType) -> Self {
        self.x_format(dtype.into())
    }

    /// Format of X in memory. A quantized X has planes without gaps, and sums and
    /// factors as in [`Quantization::new`]; [`Problem::x_quantization`] states others.
    ///
    /// If no kernel of the device multiplies this format, a first step dequantizes X
    /// into the workspace. The text of the plan shows it.
    pub fn x_format(mut self, format: XFormat) -> Self {
        self.x_format = format;
        self.x_quantization = None;
        self
    }

    /// Quantization of X: format, columns, sums, factors and strides. Its row
    /// count and source are ignored.
    pub fn x_quantization(mut self, quantization: &Quantization) -> Self {
        self.x_format = quantization.format();
        self.x_quantization = Some(quantization.clone());
        self
    }

    /// Allowed rounding of X. [`XPrecision::Auto`] by default.
    ///
    /// It is a permission: the planner chooses the fastest format for
    /// the device. On the CPU and wgpu that is 8-bit for quantized weights.
    /// [`XPrecision::Exact`] forbids rounding. [`XPrecision::F16`] allows
    /// f16, where the CPU and wgpu read X unrounded, too. The result is in
    /// [`TileConfig::x_format`](crate::tuning::TileConfig::x_format) and
    /// [`TileConfig::x_prologue`](crate::tuning::TileConfig::x_prologue) of the launch.
    pub fn x_precision(mut self, allowed: XPrecision) -> Self {
        self.x_precision = allowed;
        self
    }

    /// Norm prologue: normalizes rows of X before the product. Statistics are f32.
    ///
    /// `gamma · y + beta` is rounded once, to the type of X or to
    /// [`Problem::normed_dtype`]. [`Problem::x_precision`] then applies to it.
    /// X must be plain and row-major, and is not changed. Normalized
    /// rows go to the workspace, unless the kernel normalizes them itself
    /// ([`TileConfig::normalizes_x`](crate::tuning::TileConfig::normalizes_x)):
    /// on CUDA, RMSNorm without beta at M = 1.
    ///
    /// ```
    /// use qgemm_api::{Args, Context, DType, NormFunction, Problem, WeightOrder};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let weight = ctx.load_dense(&DType::F32.encode(&[1.0, 1.0]), DType::F32, 1, 2, WeightOrder::NK)?;
    /// let problem = Problem::new(&weight, 1).norm(NormFunction::rms(0.0).gamma(DType::F32));
    /// let plan = ctx.plan(&problem)?;
    /// let x = ctx.upload(&DType::F32.encode(&[7.0, 1.0]))?;
    /// let gamma = ctx.upload(&DType::F32.encode(&[1.0, 10.0]))?;
    /// let (mut d, mut workspace) = (ctx.allocate(4)?, ctx.workspace(plan.workspace_bytes())?);
    /// plan.run(&ctx.default_stream(), Args::new(&x, &weight, &mut d).gamma(&gamma).workspace(&mut workspace))?;
    /// // The mean of 49 and 1 is 25: 1.4 and 0.2 · 10.
    /// assert_eq!(ctx.download::<f32>(&d)?, [3.4]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn norm(mut self, function: NormFunction) -> Self {
        self.norm = Some(function);
        self
    }

    /// Element type of normalized rows. An f32 residual stream can
    /// so be multiplied in bf16.
    pub fn normed_dtype(self, dtype: DType) -> Self {
        self.normed_format(dtype.into())
    }

    /// Format of normalized rows: quantized by the norm's launch
    /// from unrounded f32 rows.
    ///
    /// Sums and factors are as in [`Quantization::new`]. A format with a factor for all
    /// of X takes it from [`Args::x_factor`](crate::Args::x_factor).
    pub fn normed_format(mut self, format: XFormat) -> Self {
        self.normed_format = Some(format);
        self
    }

    /// Element type of D. By default that of X, or f32 for a quantized X.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d_dtype = Some(dtype);
        self
    }

    /// Factor of the product.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// Adds `beta · C` before the activation. With `beta = 0`, C is not read and need
    /// not be passed. Not for gated pairs.
    pub fn c(mut self, beta: f32, dtype: DType) -> Self {
        self.c = Some((beta, dtype));
        self
    }

    /// Adds a bias of N elements before the activation. A gated
    /// pair has 2 N: gate, then up.
    pub fn bias(mut self, dtype: DType) -> Self {
        self.bias = Some(dtype);
        self
    }

    /// Token factors: M f32 values, contiguous, that multiply each token's sums.
    /// Uses: scales of quantized activations, router weights.
    pub fn token_scale(mut self) -> Self {
        self.token_scale = true;
        self
    }

    /// Activation function, applied after all additions above. A gated pair applies it
    /// to the gate and multiplies with the up. [`Activation::ClampedSwiglu`] is for
    /// gated pairs only.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = Some(activation);
        self
    }

    /// Adds an M × N residual after the activation (and after the gate's product).
    /// It may not overlap D: see [`Problem::residual_in_d`].
    pub fn residual(mut self, dtype: DType) -> Self {
        self.residual = Some(dtype);
        self.residual_in_d = false;
        self
    }

    /// Accumulates into D: D's old contents are the residual. A run takes no other.
    pub fn residual_in_d(mut self) -> Self {
        self.residual_in_d = true;
        self
    }

    /// Stores X as `[K, M]`: the values of one input feature are contiguous.
    pub fn x_transposed(mut self) -> Self {
        self.x_transposed = true;
        self
    }

    /// Row stride of X as stored (leading dimension), in elements. At least
    /// K, or M when transposed.
    pub fn x_row_stride(mut self, elements: u64) -> Self {
        self.x_row_stride = Some(elements);
        self
    }

    /// Row stride of D in elements, at least N. Gaps are not written.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d_row_stride = Some(elements);
        self
    }

    /// Row stride of C in elements, at least N.
    pub fn c_row_stride(mut self, elements: u64) -> Self {
        self.c_row_stride = Some(elements);
        self
    }

    /// Row stride of the residual in elements, at least N.
    pub fn residual_row_stride(mut self, elements: u64) -> Self {
        self.residual_row_stride = Some(elements);
        self
    }

    /// Alignment of the address of X in every run, in bytes. 16 by default, which all
    /// buffers of a context have; less is slower.
    pub fn x_alignment(mut self, bytes: usize) -> Self {
        self.x_alignment = bytes;
        self
    }

    /// Alignment of the address of D, in bytes; see [`Problem::x_alignment`].
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d_alignment = bytes;
        self
    }

    /// Alignment of the address of C, in bytes; see [`Problem::x_alignment`].
    pub fn c_alignment(mut self, bytes: usize) -> Self {
        self.c_alignment = bytes;
        self
    }

    /// Alignment of the address of the residual, in bytes; see
    /// [`Problem::x_alignment`].
    pub fn residual_alignment(mut self, bytes: usize) -> Self {
        self.residual_alignment = bytes;
        self
    }

    /// Batch-invariant results: the bits of a row do not depend on M.
    pub fn batch_invariant(mut self, on: bool) -> Self {
        self.batch_invariant = on;
        self
    }

    /// Limit of the workspace in bytes.
    pub fn max_workspace(mut self, bytes: usize) -> Self {
        self.preferences.max_workspace = Some(bytes);
        self
    }

    /// Restricts the plan to one kernel family, such as `gemv`,
    /// for tests and benchmarks.
    pub fn family(mut self, name: impl Into<String>) -> Self {
        self.preferences.family = Some(name.into());
        self
    }

    /// Restricts the plan to kernels with this arithmetic, for tests and benchmarks.
    pub fn math(mut self, math: Math) -> Self {
        self.preferences.math = Some(math);
        self
    }

    /// The same problem with another weight.
    pub(crate) fn with_weight(self, weight: &Weight) -> Self {
        Self { weight: *weight.shape(), ..self }
    }

    /// Separate outputs of trailing features, already checked. D has
    /// the features before them.
    pub(crate) fn segments(self, segments: Vec<Segment>) -> Self {
        Self { segments, ..self }
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedGemm, Error> {
        let WeightShape { format, class, rows, n, gated, k, stored_k, row_scale, k_order, fits_f16, .. } = self.weight;
        check_dimension("M", self.m)?;
        let (beta, c_dtype) = self.c.map_or((0.0, None), |(beta, dtype)| (beta, Some(dtype)));
        for (name, got) in [("alpha", self.alpha), ("beta", beta)] {
            if !got.is_finite() {
                return Err(Error::NonFiniteScalar { name, got });
            }
        }
        if gated && let Some((beta, _)) = self.c {
            return Err(Error::GatedWithC { beta });
        }
        let activation = match self.activation {
            None if gated => return Err(Error::MissingActivation),
            activation => activation.unwrap_or_default(),
        };
        check_activation(activation, gated, "this product")?;

        let x = self.check_x(k)?;
        let x_dtype = self.x_format.plain().unwrap_or(DType::F32);
        let (x, norm) = match (self.norm, x.dense()) {
            (None, _) => (x, None),
            (Some(_), None) => return Err(Error::NormOf { what: "a quantized X" }),
            (Some(_), _) if self.x_transposed => return Err(Error::NormOf { what: "a transposed X" }),
            (Some(function), Some(x)) => {
                check_function(&function)?;
                let format = self.normed_format.unwrap_or(x_dtype.into());
                let normed = match format.plain() {
                    Some(dtype) => {
                        let columns = k.next_multiple_of(NORMED_GROUP);
                        let (name, rows) = ("normalized X", self.m);
                        Stored { name, rows, columns, dtype, alignment: WIDE_ACCESS }.check(None)?.into()
                    }
                    None => planes_of(&Quantization::new(self.m, k, DType::F32, format).check()?).operand(format),
                };
                (normed, Some(NormedX { function, x }))
            }
        };
        let output =
            |name, dtype, alignment, stride| Stored { name, rows: self.m, columns: n, dtype, alignment }.check(stride);
        let d = Stored {
            name: "D",
            rows: self.m,
            columns: self.segments.first().map_or(n, |second| second.first),
            dtype: self.d_dtype.unwrap_or(x_dtype),
            alignment: self.d_alignment,
        };
        let d = d.check(self.d_row_stride)?;
        let c = match c_dtype {
            Some(dtype) => Some(output("C", dtype, self.c_alignment, self.c_row_stride)?),
            None => None,
        };
        let residual = match self.residual {
            _ if self.residual_in_d => Some(d),
            Some(dtype) => Some(output("residual", dtype, self.residual_alignment, self.residual_row_stride)?),
            None => None,
        };
        Ok(CheckedGemm {
            m: self.m,
            stored_rows: rows,
            out_features: n,
            gated,
            k,
            stored_k,
            format,
            class,
            row_scale,
            k_order,
            weight_fits_f16: fits_f16,
            x,
            norm,
            x_precision: self.permitted(),
            d,
            segments: self.segments.clone(),
            c: c.filter(|_| beta != 0.0),
            bias: self.bias,
            token_scale: self.token_scale,
            residual,
            residual_in_d: self.residual_in_d,
            alpha: self.alpha,
            beta,
            activation,
            batch_invariant: self.batch_invariant,
        })
    }

    /// Allowed rounding of X. By default the checkpoint's X format,
    /// if its scales are dynamic.
    ///
    /// 1×128 scales round no more than per-token scales.
    fn permitted(&self) -> XPrecision {
        let is_dynamic = |stated: XFormat| matches!(stated.desc().scale_span, ScaleSpan::Block(_) | ScaleSpan::Token);
        match self.x_precision {
            XPrecision::Auto if self.weight.stated_x.is_some_and(is_dynamic) => XPrecision::E4M3,
            stated => stated,
        }
    }

    /// Checks an X of `k` columns.
    fn check_x(&self, k: usize) -> Result<XOperand, Error> {
        let format = self.x_format;
        if let Some(dtype) = format.plain() {
            let stored = |rows, columns| Stored { name: "X", rows, columns, dtype, alignment: self.x_alignment };
            let x = match self.x_transposed {
                false => stored(self.m, k).check(self.x_row_stride)?,
                true => stored(k, self.m).check_transposed(self.x_row_stride)?,
            };
            return Ok(x.into());
        }
        let unfit = [(self.x_transposed, "a transposed X"), (self.x_row_stride.is_some(), "a row stride of elements")];
        if let Some((_, what)) = unfit.into_iter().find(|(is_stated, _)| *is_stated) {
            return Err(Error::NotOfXFormat { what, format });
        }
        let made = match &self.x_quantization {
            Some(stated) => stated.of_rows(self.m).check()?,
            None => Quantization::new(self.m, k, DType::F32, format).check()?,
        };
        if made.columns != k {
            return Err(Error::WrongLength { operand: "a row of X", expected: k, got: made.columns });
        }
        Ok(planes_of(&made).operand(format))
    }

    /// Same problem with `m` tokens.
    pub(super) fn with_m(&self, m: usize) -> Self {
        Self { m, ..self.clone() }
    }

    /// Whether two problems have the same plans. Factors of 0
    /// are distinguished by sign.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let factors = |problem: &Self| (problem.alpha.to_bits(), problem.c.map(|(beta, _)| beta.to_bits()));
        self == other && factors(self) == factors(other)
    }

    /// Bytes of X and D in a run.
    pub(crate) fn bytes_of_x_and_d(&self) -> Result<(usize, usize), Error> {
        let op = self.check()?;
        let x = stored_x(&op).ok_or_else(|| not_served(op.x.format))?;
        Ok((Extent::of(&x, op.m, op.k).bytes(), Extent::of(&op.d, op.m, op.out_features).bytes()))
    }

    /// Parts that matter for the input gradient: tokens, types of X and D, alpha.
    pub(crate) fn linear_part(&self) -> Result<(usize, DType, DType, f32), Error> {
        let no_backward = |what, instead| Err(Error::NoBackward { what, instead });
        if self.norm.is_some() {
            return no_backward("a norm of X", "take the gradient by the normalized X, and that of the norm yourself");
        }
        if self.activation.is_some_and(|activation| activation != Activation::Identity) {
            let instead = "multiply dY by the derivative first (`Matmul::through`), of a product that states none";
            return no_backward("an activation", instead);
        }
        if self.token_scale {
            return no_backward("a factor of each token", "multiply rows of dY with them first");
        }
        if self.x_transposed {
            return no_backward("a transposed X", "describe the gradient of rows of X (`Gradient::new`)");
        }
        let x = self.x_format.plain().ok_or_else(|| not_served(self.x_format))?;
        Ok((self.m, x, self.d_dtype.unwrap_or(x), self.alpha))
    }

    /// Preferences for the scheduler.
    pub(crate) fn preferences(&self) -> &Preferences {
        &self.preferences
    }

    /// Whether the problem has a C, read or (with `beta = 0`) not.
    pub(crate) fn states_c(&self) -> bool {
        self.c.is_some()
    }

    pub(crate) fn weight(&self) -> &WeightShape {
        &self.weight
    }

    pub(crate) fn is_transposed(&self) -> bool {
        self.x_transposed
    }
}

/// Planes of a quantization.
fn planes_of(made: &CheckedQuantize) -> XPlanes {
    let CheckedQuantize { parts, codes_row, scales_row, sums_row, .. } = *made;
    XPlanes { parts, codes_row, scales_row, sums_row }
}

/// Stored X, if plain.
pub(crate) fn stored_x(op: &CheckedGemm) -> Option<Dense> {
    op.norm.map_or_else(|| op.x.dense(), |norm| Some(norm.x))
}

/// Error of an unsupported X format.
pub(super) fn not_served(got: XFormat) -> Error {
    Error::XFormatNotServed { got, served: SERVED }
}
