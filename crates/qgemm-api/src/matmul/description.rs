//! [`Matmul`]: two matrices to be multiplied, and its validation into a [`CheckedMatmul`].

use qgemm_formats::DType;
use qgemm_hal::{Activation, BatchedDense, CheckedMatmul, FactorFormat, XPrecision};

use crate::error::Error;
use crate::operand::{StoredRows, WIDE_ACCESS, check_dimension};

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
    /// ([`FactorFormat::E4M3`]), whose products are exact in f32, too.
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
    /// offsets beyond K, or that fall, name no rows. A must be [stored transposed](Self::a_transposed), and B must not.
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
        if k_grouped && (!self.a.transposed || self.b.transposed) {
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
        let c = match self.c {
            Some((_, c)) => Some(c.check(of_d, m, n, false)?),
            None => None,
        };
        Ok(CheckedMatmul {
            batch,
            m,
            n,
            k,
            a: self.a.check(of_a, m, k, false)?,
            b: self.b.check(of_b, k, n, false)?,
            a_scaled,
            b_scaled,
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
}
