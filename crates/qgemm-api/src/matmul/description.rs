//! Matmul problem: the builder [`Matmul`] and its validation into a [`CheckedMatmul`].

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{Activation, BatchedDense, CheckedMatmul, FactorFormat, XPrecision};

use crate::activation::check_activation;
use crate::error::Error;
use crate::operand::{StoredRows, WIDE_ACCESS, check_dimension};
use crate::quantization::Quantization;

/// Product of two matrices in device memory, optionally batched or grouped;
/// for [`Context::plan_matmul`].
///
/// ```text
/// D[b] = activation(alpha · A[b]·B[b] + beta · C[b] + bias)      A [m, k], B [k, n], C and D [m, n], bias [n]
/// ```
///
/// Arithmetic is f32; D is rounded once. Defaults: row-major without gaps,
/// `alpha` 1, one product. A and B may be stored transposed, for the four BLAS
/// layouts: `X·Wᵀ` is [`b_transposed`](Self::b_transposed) (NT), `dYᵀ·X` is
/// [`a_transposed`](Self::a_transposed) (TN).
///
/// [`Context::plan_matmul`]: crate::Context::plan_matmul
#[derive(Clone, Debug)]
pub struct Matmul {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    a: Matrices<FactorFormat>,
    b: Matrices<FactorFormat>,
    a_scaled: bool,
    b_scaled: bool,
    /// Row strides of block scales of A and B, in elements.
    scale_rows: [Option<u64>; 2],
    d: Matrices<DType>,
    /// C and its factor beta.
    c: Option<(f32, Matrices<DType>)>,
    /// Factor of the old D.
    accumulates: Option<f32>,
    bias: Option<DType>,
    alpha: f32,
    activation: Activation,
    slope: bool,
    k_grouped: bool,
    rows_grouped: bool,
    operand_precision: XPrecision,
}

/// Stored matrices of an operand.
#[derive(Clone, Copy, Debug)]
struct Matrices<T> {
    name: &'static str,
    dtype: T,
    /// Bytes per element.
    width: usize,
    transposed: bool,
    row_stride: Option<u64>,
    batch_stride: Option<u64>,
    alignment: usize,
}

impl Matrices<DType> {
    fn new(name: &'static str, dtype: DType) -> Self {
        Self::of_width(name, dtype, dtype.bytes())
    }
}

impl<T: Copy> Matrices<T> {
    fn of_width(name: &'static str, dtype: T, width: usize) -> Self {
        Self { name, dtype, width, transposed: false, row_stride: None, batch_stride: None, alignment: WIDE_ACCESS }
    }

    /// Validates matrices of `rows × columns` each. Written matrices must not overlap.
    fn check(&self, batch: usize, rows: usize, columns: usize, written: bool) -> Result<BatchedDense<T>, Error> {
        let Self { name, dtype, width, transposed, row_stride, batch_stride, alignment } = *self;
        let (stored_rows, stored_columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let stored = StoredRows { name, rows: stored_rows, columns: stored_columns, width, alignment };
        let (row_stride, rows_aligned16) = stored.check(row_stride)?;
        // The last row of a matrix is padded like the others, even if matrices are contiguous.
        let whole = (stored_rows as u64).saturating_mul(row_stride);
        let batch_stride = if batch > 1 { batch_stride.unwrap_or(whole) } else { 0 };
        let (row_stride, col_stride) = if transposed { (1, row_stride) } else { (row_stride, 1) };
        let batch_bytes = batch_stride.checked_mul(width as u64);
        let aligned16 = rows_aligned16 && batch_bytes.is_some_and(|bytes| bytes.is_multiple_of(WIDE_ACCESS as u64));
        let dense = BatchedDense { dtype, row_stride, col_stride, batch_stride, aligned16 };
        let one = dense.extent(1, rows, columns).unwrap_or(u64::MAX);
        let bytes = dense.extent(batch, rows, columns).and_then(|elements| elements.checked_mul(width as u64));
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::BatchOverflow { operand: name, batch, batch_stride });
        }
        // Written matrices follow each other, or are interleaved in long rows.
        let rows_of_all = (batch as u64).saturating_sub(1).saturating_mul(batch_stride).saturating_add(columns as u64);
        let beside = batch_stride >= columns as u64 && (rows < 2 || dense.row_stride >= rows_of_all);
        if written && batch > 1 && one > 0 && batch_stride < one && !beside {
            return Err(Error::OverlappingMatrices { operand: name, batch_stride, row_stride: dense.row_stride });
        }
        Ok(dense)
    }
}

impl Matmul {
    /// `D[m, n] = A[m, k] · B[k, n]`, with A in `a`, B in `b` and D in `d`.
    ///
    /// An operand is plain ([`DType`]) or E4M3 ([`FactorFormat::E4M3`]), whose products
    /// are exact in f32. With [`FactorFormat::E4M3Block`], both operands have block scales
    /// along K. [`Matmul::of_quantized`] describes it by their quantizations.
    pub fn new([m, n, k]: [usize; 3], a: impl Into<FactorFormat>, b: impl Into<FactorFormat>, d: DType) -> Self {
        let factor = |name, format: FactorFormat| Matrices::of_width(name, format, format.bytes());
        Self {
            m,
            n,
            k,
            batch: 1,
            a: factor("A", a.into()),
            b: factor("B", b.into()),
            a_scaled: false,
            b_scaled: false,
            scale_rows: [None; 2],
            d: Matrices::new("D", d),
            c: None,
            accumulates: None,
            bias: None,
            alpha: 1.0,
            activation: Activation::Identity,
            slope: false,
            k_grouped: false,
            rows_grouped: false,
            operand_precision: XPrecision::Exact,
        }
    }

    /// FP8 product with block scales: `D[m, n] = A · Bᵀ`, with A `[m, k]` and
    /// B `[n, k]` in [`XFormat::E4M3Block`](crate::XFormat::E4M3Block): one f32
    /// scale per 128 values along K.
    ///
    /// [`quantize`](crate::Context::plan_quantization) writes such operands.
    /// With dY and X [quantized transposed](Quantization::x_transposed) it is
    /// the weight gradient `dYᵀ·X`, whose scales cover 128 tokens. A run takes both by
    /// [`MatmulArgs::of_quantized`](crate::MatmulArgs::of_quantized).
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Matmul, MatmulArgs, Quantization, XFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let stream = ctx.default_stream();
    /// // Of three tokens: dY with two features, and X with one.
    /// let transposed = |features| Quantization::new(features, 3, DType::F32, XFormat::E4M3Block).x_transposed();
    /// let (of_dy, of_x) = (transposed(2), transposed(1));
    /// let (to_dy, to_x) = (ctx.plan_quantization(&of_dy)?, ctx.plan_quantization(&of_x)?);
    /// let (mut dy8, mut x8) = (ctx.allocate_x(&to_dy)?, ctx.allocate_x(&to_x)?);
    /// to_dy.run(&stream, dy8.args(&ctx.upload(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?))?;
    /// to_x.run(&stream, x8.args(&ctx.upload(&[1.0f32, 0.5, -1.0])?))?;
    /// let plan = ctx.plan_matmul(&Matmul::of_quantized(&of_dy, &of_x, DType::F32)?.accumulate(1.0))?;
    /// let mut dw = ctx.upload(&[10.0f32, 20.0])?;
    /// plan.run(&stream, MatmulArgs::of_quantized(&dy8, &x8, &mut dw)?)?;
    /// let dw = ctx.download::<f32>(&dw)?;
    /// assert!((dw[0] - 7.5).abs() < 0.2 && (dw[1] - 18.0).abs() < 0.2);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::BlockScaledProduct`] when a quantization has another format, their column
    /// counts differ, or one is invalid.
    pub fn of_quantized(a: &Quantization, b: &Quantization, d: DType) -> Result<Self, Error> {
        let (a, b) = (a.check()?, b.check()?);
        let of_blocks = XFormat::E4M3Block;
        if a.format != of_blocks || b.format != of_blocks {
            return Err(Error::BlockScaledProduct { why: "both factors must be quantized to e4m3_1x128" });
        }
        if a.columns != b.columns {
            return Err(Error::BlockScaledProduct {
                why: "both factors must have the same number of columns, along which K lies",
            });
        }
        let (format, words) = (FactorFormat::E4M3Block, size_of::<f32>() as u64);
        let matmul = Self::new([a.rows, b.rows, a.columns], format, format, d).b_transposed();
        let scale_rows = [a.scales_row, b.scales_row].map(|bytes| Some(bytes / words));
        Ok(Self { scale_rows, ..matmul.a_row_stride(a.codes_row).b_row_stride(b.codes_row) })
    }

    /// Row stride of A's scales in elements, for [`FactorFormat::E4M3Block`].
    /// Without gaps by default.
    pub fn a_scale_row_stride(mut self, elements: u64) -> Self {
        self.scale_rows[0] = Some(elements);
        self
    }

    /// Row stride of B's scales in elements. They have one row per column of B.
    pub fn b_scale_row_stride(mut self, elements: u64) -> Self {
        self.scale_rows[1] = Some(elements);
        self
    }

    /// Stores A as `[k, m]`.
    pub fn a_transposed(mut self) -> Self {
        self.a.transposed = true;
        self
    }

    /// Stores B as `[n, k]`.
    pub fn b_transposed(mut self) -> Self {
        self.b.transposed = true;
        self
    }

    /// Tensor scale of an E4M3 operand A: one f32 in device memory
    /// ([`MatmulArgs::a_scale`](crate::MatmulArgs::a_scale)).
    ///
    /// It multiplies the product like alpha.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, FactorFormat, Matmul, MatmulArgs};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_matmul(&Matmul::new([1, 1, 2], FactorFormat::E4M3, DType::F32, DType::F32).a_scaled())?;
    /// // 1.0 and 2.0 in E4M3.
    /// let (a, b) = (ctx.upload(&[0x38u8, 0x40])?, ctx.upload(&[10.0f32, 100.0])?);
    /// let scale = ctx.upload(&[0.5f32])?;
    /// let mut d = ctx.allocate(4)?;
    /// plan.run(&ctx.default_stream(), MatmulArgs::new(&a, &b, &mut d).a_scale(&scale))?;
    /// assert_eq!(ctx.download::<f32>(&d)?, [105.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn a_scaled(mut self) -> Self {
        self.a_scaled = true;
        self
    }

    /// Tensor scale of an E4M3 operand B, as [`a_scaled`](Self::a_scaled) for A.
    pub fn b_scaled(mut self) -> Self {
        self.b_scaled = true;
        self
    }

    /// Batch of `products` products. Matrices of an operand are contiguous
    /// unless batch strides are set.
    pub fn batch(mut self, products: usize) -> Self {
        self.batch = products;
        self
    }

    /// K-grouped products: product `b` multiplies rows
    /// `offsets[b] .. offsets[b + 1]` of A and B.
    ///
    /// A and B are one matrix each, `[k, m]` and `[k, n]` as stored. Offsets are in device
    /// memory ([`MatmulArgs::offsets`](crate::MatmulArgs::offsets)). The use is the weight
    /// gradient of experts, `dWₑ = dYₑᵀ·Xₑ`, with rows sorted by expert, in one launch.
    /// Groups may have any size, even 0. Offsets beyond K or in descending order select
    /// no rows. A must be [stored transposed](Self::a_transposed), and B must not.
    /// For operands with block scales B must be, and A must not; groups share the scales
    /// of the blocks at their borders.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Matmul, MatmulArgs};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let matmul = Matmul::new([1, 1, 3], DType::F32, DType::F32, DType::F32).a_transposed().k_grouped(2);
    /// let plan = ctx.plan_matmul(&matmul)?;
    /// let (dy, x) = (ctx.upload(&[1.0f32, 2.0, 3.0])?, ctx.upload(&[10.0f32, 10.0, 10.0])?);
    /// let offsets = ctx.upload(&[0u32, 1, 3])?;
    /// let mut dw = ctx.allocate(2 * 4)?;
    /// plan.run(&ctx.default_stream(), MatmulArgs::new(&dy, &x, &mut dw).offsets(&offsets))?;
    /// assert_eq!(ctx.download::<f32>(&dw)?, [10.0, 50.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn k_grouped(mut self, products: usize) -> Self {
        (self.batch, self.k_grouped, self.rows_grouped) = (products, true, false);
        self
    }

    /// M-grouped products: product `b` multiplies rows `offsets[b] .. offsets[b + 1]`
    /// of A with matrix `b` of B.
    ///
    /// A, C and D are one matrix of `m` rows each. Offsets are in device memory
    /// ([`MatmulArgs::offsets`](crate::MatmulArgs::offsets)). The use is rows
    /// sorted by expert, each with its expert's matrix, in one launch. Groups
    /// may have any size, even 0. Rows of D outside all groups are not written.
    /// Offsets beyond `m` or in descending order select no rows. A must not be [stored
    /// transposed](Self::a_transposed). On CUDA, A and B are plain numbers of one
    /// type, or A is f16 and B f32.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Matmul, MatmulArgs};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_matmul(&Matmul::new([3, 1, 1], DType::F32, DType::F32, DType::F32).rows_grouped(2))?;
    /// let (x, w) = (ctx.upload(&[1.0f32, 2.0, 3.0])?, ctx.upload(&[10.0f32, 100.0])?);
    /// let offsets = ctx.upload(&[0u32, 1, 3])?;
    /// let mut d = ctx.allocate(3 * 4)?;
    /// plan.run(&ctx.default_stream(), MatmulArgs::new(&x, &w, &mut d).offsets(&offsets))?;
    /// assert_eq!(ctx.download::<f32>(&d)?, [10.0, 200.0, 300.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn rows_grouped(mut self, products: usize) -> Self {
        (self.batch, self.rows_grouped, self.k_grouped) = (products, true, false);
        self
    }

    /// Allowed rounding of f32 operands. [`XPrecision::Exact`] by default.
    ///
    /// It is a permission. [`XPrecision::Tf32`] allows TF32 matrix instructions, on CUDA
    /// since Ampere with 16-byte aligned rows. [`XPrecision::Bf16x3`] allows each operand
    /// as a sum of two bf16 numbers, with products accurate to 2⁻¹⁵, on CUDA since Ampere.
    /// All other precisions keep f32.
    pub fn operand_precision(mut self, allowed: XPrecision) -> Self {
        self.operand_precision = allowed;
        self
    }

    /// Row stride of A as stored (leading dimension), in elements.
    pub fn a_row_stride(mut self, elements: u64) -> Self {
        self.a.row_stride = Some(elements);
        self
    }

    /// Row stride of B as stored, in elements.
    pub fn b_row_stride(mut self, elements: u64) -> Self {
        self.b.row_stride = Some(elements);
        self
    }

    /// Row stride of D in elements.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d.row_stride = Some(elements);
        self
    }

    /// Row stride of C in elements. No effect without C.
    pub fn c_row_stride(mut self, elements: u64) -> Self {
        self.c = self.c.map(|(beta, c)| (beta, Matrices { row_stride: Some(elements), ..c }));
        self
    }

    /// Batch stride of A in elements. 0 shares one A.
    pub fn a_batch_stride(mut self, elements: u64) -> Self {
        self.a.batch_stride = Some(elements);
        self
    }

    /// Batch stride of B in elements. 0 shares one B.
    pub fn b_batch_stride(mut self, elements: u64) -> Self {
        self.b.batch_stride = Some(elements);
        self
    }

    /// Batch stride of D in elements. Matrices may be interleaved in long
    /// rows, but must not overlap.
    pub fn d_batch_stride(mut self, elements: u64) -> Self {
        self.d.batch_stride = Some(elements);
        self
    }

    /// Batch stride of C in elements. 0 shares one C. No effect without C.
    pub fn c_batch_stride(mut self, elements: u64) -> Self {
        self.c = self.c.map(|(beta, c)| (beta, Matrices { batch_stride: Some(elements), ..c }));
        self
    }

    /// Alignment of the addresses of A and B in every run, in bytes. 16 by
    /// default, which is fastest.
    pub fn alignment(mut self, a: usize, b: usize) -> Self {
        (self.a.alignment, self.b.alignment) = (a, b);
        self
    }

    /// Alignment of the address of D in every run, in bytes.
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d.alignment = bytes;
        self
    }

    /// Alignment of the address of C in every run, in bytes. No effect without C.
    pub fn c_alignment(mut self, bytes: usize) -> Self {
        self.c = self.c.map(|(beta, c)| (beta, Matrices { alignment: bytes, ..c }));
        self
    }

    /// Factor of the product.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// Adds `beta · C` before the activation. With `beta = 0`, C is not read and need not
    /// be passed. The later call of this and [`accumulate`](Self::accumulate) wins.
    pub fn c(mut self, beta: f32, dtype: DType) -> Self {
        self.c = Some((beta, Matrices::new("C", dtype)));
        (self.accumulates, self.slope) = (None, false);
        self
    }

    /// Adds `beta` times the old D. With `beta = 0`, D is not read.
    pub fn accumulate(mut self, beta: f32) -> Self {
        self.accumulates = Some(beta);
        (self.c, self.slope) = (None, false);
        self
    }

    /// Adds a bias of `n` contiguous values to every row of every product.
    pub fn bias(mut self, dtype: DType) -> Self {
        self.bias = Some(dtype);
        self
    }

    /// Activation function, applied last.
    pub fn activation(mut self, activation: Activation) -> Self {
        (self.activation, self.slope) = (activation, false);
        self
    }

    /// Backward pass of an activation: multiplies the product with the
    /// derivative of `activation` at Z.
    ///
    /// Z is passed like [`c`](Self::c) and has the type `z`. The bias is multiplied as
    /// well. Nothing is added or applied afterwards.
    ///
    /// ```
    /// use qgemm_api::{Activation, Context, DType, Matmul, MatmulArgs};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_matmul(
    ///     &Matmul::new([1, 2, 1], DType::F32, DType::F32, DType::F32).through(Activation::Relu, DType::F32),
    /// )?;
    /// let (dy, w) = (ctx.upload(&DType::F32.encode(&[3.0]))?, ctx.upload(&DType::F32.encode(&[1.0, 2.0]))?);
    /// let z = ctx.upload(&DType::F32.encode(&[0.5, -0.5]))?;
    /// let mut dz = ctx.allocate(2 * 4)?;
    /// plan.run(&ctx.default_stream(), MatmulArgs::new(&dy, &w, &mut dz).c(&z))?;
    /// assert_eq!(DType::F32.decode(&ctx.download(&dz)?), [3.0, 0.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn through(self, activation: Activation, z: DType) -> Self {
        Self { slope: true, activation, ..self.c(1.0, z) }
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedMatmul, Error> {
        let &Self { m, n, k, batch, alpha, bias, activation, slope, k_grouped, operand_precision, .. } = self;
        let &Self { a_scaled, b_scaled, rows_grouped, .. } = self;
        check_activation(activation, false, "`matmul`")?;
        for (name, got) in [("M", m), ("N", n), ("K", k), ("batch", batch)] {
            check_dimension(name, got)?;
        }
        let beta = self.c.map(|(beta, _)| beta).or(self.accumulates).unwrap_or(0.0);
        for (name, got) in [("alpha", alpha), ("beta", beta)] {
            if !got.is_finite() {
                return Err(Error::NonFiniteScalar { name, got });
            }
        }
        let of_blocks = self.has_block_scales()?;
        if k_grouped && !of_blocks && (!self.a.transposed || self.b.transposed) {
            return Err(Error::KGroupedLayout);
        }
        if rows_grouped && self.a.transposed {
            return Err(Error::RowsGroupedLayout);
        }
        for (factor, scaled) in [(&self.a, a_scaled), (&self.b, b_scaled)] {
            if let (true, Some(dtype)) = (scaled, factor.dtype.plain()) {
                return Err(Error::ScaledPlainFactor { operand: factor.name, dtype });
            }
        }
        // All K groups are in one matrix, as are all M groups.
        let factors = |grouped: bool| if grouped { 1 } else { batch };
        let (of_a, of_b, of_d) = (factors(k_grouped || rows_grouped), factors(k_grouped), factors(rows_grouped));
        let [a_scale_row, b_scale_row] = match of_blocks {
            true => [self.scale_row(0, m)?, self.scale_row(1, n)?],
            false => [0; 2],
        };
        let padded = |factor: &Matrices<FactorFormat>| match of_blocks {
            // Rows of quantized operands have whole blocks.
            true => Matrices { row_stride: factor.row_stride.or(Some(whole_blocks(k))), ..*factor },
            false => *factor,
        };
        let c = match self.c {
            Some((_, c)) => Some(c.check(of_d, m, n, false)?),
            None => None,
        };
        Ok(CheckedMatmul {
            batch,
            m,
            n,
            k,
            a: padded(&self.a).check(of_a, m, k, false)?,
            b: padded(&self.b).check(of_b, k, n, false)?,
            a_scaled,
            b_scaled,
            a_scale_row,
            b_scale_row,
            d: self.d.check(of_d, m, n, true)?,
            c: c.filter(|_| beta != 0.0),
            accumulates: self.accumulates.is_some() && beta != 0.0,
            bias,
            alpha,
            beta,
            activation,
            slope,
            k_grouped,
            rows_grouped,
            operand_precision,
        })
    }

    /// Whether both operands have block scales.
    ///
    /// # Errors
    /// [`Error::BlockScaledProduct`] when only one has, or the product has another form.
    fn has_block_scales(&self) -> Result<bool, Error> {
        let (a, b) = (&self.a, &self.b);
        let has = [a.dtype.has_scales(), b.dtype.has_scales()];
        let why = match has {
            [false, false] if self.scale_rows == [None; 2] => return Ok(false),
            [false, false] => "row strides of scales are for factors in e4m3_1x128",
            [true, false] | [false, true] => "both factors must be e4m3_1x128, or neither",
            _ if a.transposed || !b.transposed => {
                "codes must lie along K: store A as [m, k], and B as [n, k] (`Matmul::b_transposed`)"
            }
            _ if self.a_scaled || self.b_scaled => "blocks have scales: fold a factor of all into alpha",
            _ if self.rows_grouped || (self.batch != 1 && !self.k_grouped) => {
                "there is one product, or parts of K (`Matmul::k_grouped`), no batch and no groups of rows"
            }
            _ => return Ok(true),
        };
        Err(Error::BlockScaledProduct { why })
    }

    /// Row stride of an operand's scales, `rows` rows, in elements.
    fn scale_row(&self, factor: usize, rows: usize) -> Result<u64, Error> {
        let operand = ["A's scales", "B's scales"][factor];
        let columns = self.k.div_ceil(FactorFormat::BLOCK);
        let stored = StoredRows { name: operand, rows, columns, width: size_of::<f32>(), alignment: size_of::<f32>() };
        Ok(stored.check(self.scale_rows[factor])?.0)
    }
}

/// Values in a row of whole blocks.
fn whole_blocks(k: usize) -> u64 {
    (k as u64).next_multiple_of(FactorFormat::BLOCK as u64)
}
