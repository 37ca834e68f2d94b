//! [`Matmul`]: two matrices to be multiplied, and its validation into a [`CheckedMatmul`].

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{Activation, BatchedDense, CheckedMatmul, FactorFormat, XPrecision};

use crate::error::Error;
use crate::operand::{StoredRows, WIDE_ACCESS, check_dimension};
use crate::quantization::Quantization;

/// A product of two matrices in device memory, or a batch of such, described for [`Context::plan_matmul`].
///
/// ```text
/// D[b] = activation(alpha · A[b]·B[b] + beta · C[b] + bias)      A [m, k], B [k, n], C and D [m, n], bias [n]
/// ```
///
/// Products and sums are in f32; D is rounded once. Operands are row-major without gaps unless said otherwise, `alpha` is 1, and there is
/// one product. A and B may each be stored transposed, which makes the four layouts of BLAS: `X·Wᵀ` is
/// [`b_transposed`](Self::b_transposed) (NT), `dYᵀ·X` is [`a_transposed`](Self::a_transposed) (TN).
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
    /// Elements from one row of scales to the next, of factors whose blocks have some.
    scale_rows: [Option<u64>; 2],
    d: Matrices<DType>,
    /// C and its factor.
    c: Option<(f32, Matrices<DType>)>,
    /// The factor of what D held.
    accumulates: Option<f32>,
    bias: Option<DType>,
    alpha: f32,
    activation: Activation,
    slope: bool,
    k_grouped: bool,
    rows_grouped: bool,
    operand_precision: XPrecision,
}

/// How the matrices of an operand are stored.
#[derive(Clone, Copy, Debug)]
struct Matrices<T> {
    name: &'static str,
    dtype: T,
    /// Bytes of an element.
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

    /// The matrices, `rows × columns` each. Those that are written must not overlap.
    fn check(&self, batch: usize, rows: usize, columns: usize, written: bool) -> Result<BatchedDense<T>, Error> {
        let Self { name, dtype, width, transposed, row_stride, batch_stride, alignment } = *self;
        let (stored_rows, stored_columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let stored = StoredRows { name, rows: stored_rows, columns: stored_columns, width, alignment };
        let (row_stride, rows_aligned16) = stored.check(row_stride)?;
        // Without gaps between matrices, too: the last row of one is followed by a gap as any other.
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
        // Matrices lie behind one another, or side by side in long rows.
        let rows_of_all = (batch as u64).saturating_sub(1).saturating_mul(batch_stride).saturating_add(columns as u64);
        let beside = batch_stride >= columns as u64 && (rows < 2 || dense.row_stride >= rows_of_all);
        if written && batch > 1 && one > 0 && batch_stride < one && !beside {
            return Err(Error::OverlappingMatrices { operand: name, batch_stride, row_stride: dense.row_stride });
        }
        Ok(dense)
    }
}

impl Matmul {
    /// `D[m, n] = A[m, k] · B[k, n]`, with A in `a`, B in `b` and D in `d`. Factors are plain numbers ([`DType`]) or E4M3
    /// ([`FactorFormat::E4M3`]), whose products are exact in f32, too. Codes with scales ([`FactorFormat::E4M3Block`]) are both factors or
    /// neither, and lie along K: [`Matmul::of_quantized`] describes such a product from the quantizations of its factors.
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

    /// `D[m, n] = A · Bᵀ`, with A `[m, k]` and B `[n, k]` as [`quantize`](crate::Context::plan_quantization) writes them in
    /// [`XFormat::E4M3Block`](crate::XFormat::E4M3Block): E4M3 codes with an f32 scale for every 128 values along K. Of dY and X,
    /// [quantized transposed](Quantization::x_transposed), that is the gradient of a weight, `dYᵀ·X`, whose scales are of 128 tokens. A
    /// run is given both by [`MatmulArgs::of_quantized`](crate::MatmulArgs::of_quantized).
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
    /// [`Error::BlockScaledProduct`] when a quantization is to another format, or they have different numbers of columns; when one is
    /// not valid.
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

    /// Elements from one row of A's scales to the next, where A is [`FactorFormat::E4M3Block`]: without gaps when not given.
    pub fn a_scale_row_stride(mut self, elements: u64) -> Self {
        self.scale_rows[0] = Some(elements);
        self
    }

    /// The same of the scales of B, a row for every column of B.
    pub fn b_scale_row_stride(mut self, elements: u64) -> Self {
        self.scale_rows[1] = Some(elements);
        self
    }

    /// A is stored as `[k, m]`.
    pub fn a_transposed(mut self) -> Self {
        self.a.transposed = true;
        self
    }

    /// B is stored as `[n, k]`.
    pub fn b_transposed(mut self) -> Self {
        self.b.transposed = true;
        self
    }

    /// All of A, which is E4M3, has a factor: an f32 in device memory, which a run is given
    /// ([`MatmulArgs::a_scale`](crate::MatmulArgs::a_scale)). It multiplies the product as alpha does.
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

    /// All of B, which is E4M3, has a factor, as [`a_scaled`](Self::a_scaled) says of A.
    pub fn b_scaled(mut self) -> Self {
        self.b_scaled = true;
        self
    }

    /// So many products. Matrices of each operand follow one another without gaps unless their strides say otherwise.
    pub fn batch(mut self, products: usize) -> Self {
        self.batch = products;
        self
    }

    /// So many products, each of a part of K of its own: A and B are one matrix, `[k, m]` and `[k, n]` as stored, and product `b` multiplies
    /// their rows from offset `b` to offset `b + 1` ([`MatmulArgs::offsets`](crate::MatmulArgs::offsets)), which lie in device memory: the
    /// gradients of experts' weights, `dWₑ = dYₑᵀ·Xₑ`, from rows sorted by expert, in one launch. Parts may be of any length, and of none;
    /// offsets beyond K, or that fall, name no rows. A must be [stored transposed](Self::a_transposed), and B must not; of codes with scales, which
    /// lie along K, B must be and A must not, and parts share the scales of the blocks that they begin or end in.
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

    /// So many products, each of rows of its own: A, C and D are one matrix of `m` rows, and product `b` multiplies those from offset `b`
    /// to offset `b + 1` ([`MatmulArgs::offsets`](crate::MatmulArgs::offsets)), which lie in device memory, with matrix `b` of B: rows sorted
    /// by expert, each with its expert's matrix, in one launch. Groups may be of any length, and of none. Rows of D that no product has stay
    /// as they are; offsets beyond `m`, or below one that precedes them, name no rows. A must not be [stored
    /// transposed](Self::a_transposed). On CUDA, A and B are plain numbers of one type, or A is f16 and B f32.
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

    /// How far factors in f32 may be rounded before they are multiplied ([`XPrecision::Exact`] when not given). A permission:
    /// [`XPrecision::Tf32`] lets matrix instructions multiply them, rounded to nearest in eleven bits, on CUDA from Ampere on where rows begin at
    /// multiples of 16 bytes; [`XPrecision::Bf16x3`] lets them multiply the sum of two bf16 numbers, each product within 2⁻¹⁵ of it, on CUDA
    /// from Ampere on. Anything else, and every other precision, multiplies them as they are.
    pub fn operand_precision(mut self, allowed: XPrecision) -> Self {
        self.operand_precision = allowed;
        self
    }

    /// Elements from one stored row of A to the next: the leading dimension.
    pub fn a_row_stride(mut self, elements: u64) -> Self {
        self.a.row_stride = Some(elements);
        self
    }

    /// Elements from one stored row of B to the next.
    pub fn b_row_stride(mut self, elements: u64) -> Self {
        self.b.row_stride = Some(elements);
        self
    }

    /// Elements from one row of D to the next.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d.row_stride = Some(elements);
        self
    }

    /// Elements from one row of C to the next. No effect without C.
    pub fn c_row_stride(mut self, elements: u64) -> Self {
        self.c = self.c.map(|(beta, c)| (beta, Matrices { row_stride: Some(elements), ..c }));
        self
    }

    /// Elements from one A to the next; 0 where all products have the same.
    pub fn a_batch_stride(mut self, elements: u64) -> Self {
        self.a.batch_stride = Some(elements);
        self
    }

    /// Elements from one B to the next; 0 where all products have the same.
    pub fn b_batch_stride(mut self, elements: u64) -> Self {
        self.b.batch_stride = Some(elements);
        self
    }

    /// Elements from one D to the next. Matrices may lie side by side in long rows, but must not overlap.
    pub fn d_batch_stride(mut self, elements: u64) -> Self {
        self.d.batch_stride = Some(elements);
        self
    }

    /// Elements from one C to the next; 0 where all products have the same. No effect without C.
    pub fn c_batch_stride(mut self, elements: u64) -> Self {
        self.c = self.c.map(|(beta, c)| (beta, Matrices { batch_stride: Some(elements), ..c }));
        self
    }

    /// What the addresses of A and B are multiples of, in bytes, at every run. 16 when not given: kernels are faster then.
    pub fn alignment(mut self, a: usize, b: usize) -> Self {
        (self.a.alignment, self.b.alignment) = (a, b);
        self
    }

    /// The same of D.
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d.alignment = bytes;
        self
    }

    /// The same of C. No effect without C.
    pub fn c_alignment(mut self, bytes: usize) -> Self {
        self.c = self.c.map(|(beta, c)| (beta, Matrices { alignment: bytes, ..c }));
        self
    }

    /// Factor of the product.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// Adds `beta · C` before the activation. With `beta` 0, C is not read and need not be passed. The last of this and
    /// [`accumulate`](Self::accumulate) counts.
    pub fn c(mut self, beta: f32, dtype: DType) -> Self {
        self.c = Some((beta, Matrices::new("C", dtype)));
        (self.accumulates, self.slope) = (None, false);
        self
    }

    /// Adds `beta` times what D held before. With `beta` 0, D is not read.
    pub fn accumulate(mut self, beta: f32) -> Self {
        self.accumulates = Some(beta);
        (self.c, self.slope) = (None, false);
        self
    }

    /// Adds a bias: `n` contiguous values, the same for every row and product.
    pub fn bias(mut self, dtype: DType) -> Self {
        self.bias = Some(dtype);
        self
    }

    /// Applied last.
    pub fn activation(mut self, activation: Activation) -> Self {
        (self.activation, self.slope) = (activation, false);
        self
    }

    /// Multiplies the product, and the bias, with the derivative of `activation` at Z, which is given as [`c`](Self::c) is and has
    /// its type: the gradient by what the activation was applied to. Nothing is added or applied.
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

    /// Validates everything that does not depend on the buffers of a run.
    pub(crate) fn check(&self) -> Result<CheckedMatmul, Error> {
        let &Self { m, n, k, batch, alpha, bias, activation, slope, k_grouped, operand_precision, .. } = self;
        let &Self { a_scaled, b_scaled, rows_grouped, .. } = self;
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
        // All parts of K are of one matrix, and all groups of rows.
        let factors = |grouped: bool| if grouped { 1 } else { batch };
        let (of_a, of_b, of_d) = (factors(k_grouped || rows_grouped), factors(k_grouped), factors(rows_grouped));
        let [a_scale_row, b_scale_row] = match of_blocks {
            true => [self.scale_row(0, m)?, self.scale_row(1, n)?],
            false => [0; 2],
        };
        let padded = |factor: &Matrices<FactorFormat>| match of_blocks {
            // As they are quantized: whole blocks.
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

    /// Whether blocks of both factors have scales.
    ///
    /// # Errors
    /// [`Error::BlockScaledProduct`] where those of one have, or the product is not of such a form.
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

    /// Elements between the `rows` rows of scales of a factor.
    fn scale_row(&self, factor: usize, rows: usize) -> Result<u64, Error> {
        let operand = ["A's scales", "B's scales"][factor];
        let columns = self.k.div_ceil(FactorFormat::BLOCK);
        let stored = StoredRows { name: operand, rows, columns, width: size_of::<f32>(), alignment: size_of::<f32>() };
        Ok(stored.check(self.scale_rows[factor])?.0)
    }
}

/// Values of a row of whole blocks.
fn whole_blocks(k: usize) -> u64 {
    (k as u64).next_multiple_of(FactorFormat::BLOCK as u64)
}
