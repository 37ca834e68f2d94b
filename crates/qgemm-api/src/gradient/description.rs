//! [`Gradient`]: the product `dX = dY·W`, and its cut into parts whose weights are plain numbers for a while.

use qgemm_formats::DType;
use qgemm_hal::{CheckedMatmul, CheckedUnpack, Dense, ExpertForm};

use super::part::{Decode, Part, Product, Sums};
use super::through::{Columns, ThroughShape};
use crate::error::Error;
use crate::experts::ExpertProblem;
use crate::gemm::Problem;
use crate::matmul::Matmul;
use crate::operand::{WIDE_ACCESS, check_dimension};

/// Features of a part are a multiple of this, but for the last: whole boxes and tiles of products.
const PART_STEP: usize = 64;
/// Scratch memory unless a gradient says otherwise: parts of ordinary layers are large enough for every multiprocessor.
const SCRATCH_BYTES: usize = 64 << 20;

/// The gradient of a linear layer `Y = X·Wᵀ` by its input, described for
/// [`Context::plan_gradient`](crate::Context::plan_gradient):
///
/// ```text
/// dX[t, k] = alpha · Σ_n dY[t, n] · W[n, k]  (+ beta · dX[t, k])
/// ```
///
/// W is the packed weight that the layer multiplies with, of any format. Parts of it, some input features each, become numbers of the
/// type of dY in scratch memory, rounded once, and are multiplied there: no second copy of the weight is kept. Weights that f16
/// has no room or no bits for, row scales applied, are decoded to f32 for a dY in f16. Matrices are row-major without gaps unless said otherwise.
///
/// Through [`Experts`](crate::Experts), rows of dY and dX are sorted by expert: offsets in device memory say whose they are
/// ([`GradientArgs::offsets`](crate::GradientArgs::offsets)). Rows of dX that no expert has stay as they are.
///
/// Of a gated pair, dY has the gradients by the gate's sums and, behind these, by the up's: `[tokens, 2 N]`. What they come to is
/// elementwise work, `dG = dY · up · activation'(gate)` and `dU = dY · activation(gate)`.
#[derive(Clone, Debug)]
pub struct Gradient {
    tokens: usize,
    dy: DType,
    dx: DType,
    dy_row_stride: Option<u64>,
    dx_row_stride: Option<u64>,
    dy_alignment: usize,
    dx_alignment: usize,
    alpha: f32,
    accumulates: Option<f32>,
    max_scratch: usize,
}

impl Gradient {
    /// Of `tokens` rows of dY in `dy`, and dX in `dx`. There may be 0 tokens: such a plan launches nothing.
    pub fn new(tokens: usize, dy: DType, dx: DType) -> Self {
        Self {
            tokens,
            dy,
            dx,
            dy_row_stride: None,
            dx_row_stride: None,
            dy_alignment: WIDE_ACCESS,
            dx_alignment: WIDE_ACCESS,
            alpha: 1.0,
            accumulates: None,
            max_scratch: SCRATCH_BYTES,
        }
    }

    /// That of a product as its problem describes it: its tokens, dX in the type of X, dY in that of D, and its alpha. What is added to the
    /// product plays no part.
    ///
    /// # Errors
    /// [`Error::NoBackward`] for what has none here, such as a norm of X or an activation; [`Error::XFormatNotServed`] when X is quantized.
    pub fn of(problem: &Problem) -> Result<Self, Error> {
        let (tokens, x, d, alpha) = problem.linear_part()?;
        Ok(Self::new(tokens, d, x).alpha(alpha))
    }

    /// That of products with experts as their problem describes them. Rows of dY and dX are sorted by expert, and a run is given the
    /// offsets ([`GradientArgs::offsets`](crate::GradientArgs::offsets)): the plan is made with the [`Experts`](crate::Experts).
    ///
    /// # Errors
    /// As [`Gradient::of`]; [`Error::NoBackward`] for rows that are not sorted by expert, or are added up.
    pub fn of_experts(problem: &ExpertProblem) -> Result<Self, Error> {
        let no_backward = |what, instead| Err(Error::NoBackward { what, instead });
        let sorted = "sort the rows by expert (`ExpertProblem::contiguous`)";
        match problem.form() {
            ExpertForm::Contiguous => {}
            ExpertForm::Masked { .. } => return no_backward("a capacity for each expert", sorted),
            ExpertForm::Indexed { .. } => return no_backward("slots in the order of tokens", sorted),
            _ => return no_backward("a form of index other than offsets", sorted),
        }
        let (rows, x, d, alpha) = problem.each_problem().linear_part()?;
        Ok(Self::new(rows, d, x).alpha(alpha))
    }

    /// Elements from one row of dY to the next: at least the weight's output features, of a gated pair those of both weights.
    pub fn dy_row_stride(mut self, elements: u64) -> Self {
        self.dy_row_stride = Some(elements);
        self
    }

    /// Elements from one row of dX to the next: at least the weight's input features.
    pub fn dx_row_stride(mut self, elements: u64) -> Self {
        self.dx_row_stride = Some(elements);
        self
    }

    /// What the addresses of dY and dX are multiples of, in bytes, at every run. 16 when not given: kernels are faster then.
    pub fn alignment(mut self, dy: usize, dx: usize) -> Self {
        (self.dy_alignment, self.dx_alignment) = (dy, dx);
        self
    }

    /// Factor of the product.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// Adds `beta` times what dX held before, as two layers with the same input want it. With `beta` 0, dX is not read.
    pub fn accumulate(mut self, beta: f32) -> Self {
        self.accumulates = Some(beta);
        self
    }

    /// Bytes that parts of the weight may take as plain numbers, 64 MiB when not given. A part is 64 input features at least, whatever
    /// this says; fewer bytes mean more launches.
    pub fn max_scratch(mut self, bytes: usize) -> Self {
        self.max_scratch = bytes;
        self
    }

    /// Tokens.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Validates everything that does not depend on the buffers of a run, and cuts the product into parts for weights of `shape`.
    pub(super) fn check(&self, shape: &ThroughShape) -> Result<Vec<Part>, Error> {
        check_dimension("M", self.tokens)?;
        // Validated as a whole, though parts of it are run.
        self.whole(shape)?;
        let (each, columns, dtype) = (shape.each(), shape.columns(), self.decoded(shape));
        // Rows of parts begin at multiples of 16 bytes.
        let d = Dense::rows_of(dtype, columns.copies.saturating_mul(columns.copy_pitch));
        // What the product with the gates leaves for that with the ups.
        let sums = if columns.up.is_some() { self.tokens.saturating_mul(DType::F32.bytes()) } else { 0 };
        let feature_bytes = (d.row_stride as usize).saturating_mul(dtype.bytes()).saturating_add(sums).max(1);
        let most = (self.max_scratch / feature_bytes / PART_STEP * PART_STEP).max(PART_STEP);
        let count = each.k.div_ceil(most).max(1);
        let features = each.k.div_ceil(count).next_multiple_of(PART_STEP);
        let part = |first: usize| {
            let features = features.min(each.k - first);
            let unpack = CheckedUnpack {
                out_features: columns.out_features,
                gated: each.gated,
                k: each.k,
                stored_k: each.stored_k,
                first,
                features,
                format: each.format,
                class: each.class,
                row_scale: each.row_scale,
                k_order: each.k_order,
                d,
            };
            let copy_bytes = columns.copy_pitch * dtype.bytes();
            let decode = (each.n > 0).then_some(Decode { unpack, copies: columns.copies, copy_bytes });
            Ok(Part { decode, products: self.products(shape, &columns, features, d.row_stride)?, first })
        };
        if self.tokens == 0 {
            return Ok(Vec::new());
        }
        (0..each.k).step_by(features.max(1)).map(part).collect()
    }

    /// The products with `features` input features, whose numbers stand `row_stride` apart.
    fn products(
        &self,
        shape: &ThroughShape,
        columns: &Columns,
        features: usize,
        row_stride: u64,
    ) -> Result<Vec<Product>, Error> {
        let (outputs, n) = (shape.outputs(), shape.each().n);
        let of = |matmul: Matmul| matmul.b_batch_stride(columns.expert_pitch as u64).check();
        let Some(up) = columns.up else {
            let matmul = of(self.matmul(shape, features, outputs, row_stride)?)?;
            return Ok(vec![Product { matmul, dy_start: 0, weight_start: 0, sums: Sums::None }]);
        };
        // The gate's sums stay in f32 until the up's are added to them.
        let gate = self.product(shape, [features, n], row_stride, [self.dy_alignment, WIDE_ACCESS], DType::F32)?;
        let gate = match self.accumulates {
            Some(beta) => gate.c(beta, self.dx).c_row_stride(self.dx_stride(shape)?).c_alignment(self.dx_alignment),
            None => gate,
        };
        let dy_start = n * self.dy.bytes();
        let aligned = |bytes: usize, to: usize| if bytes == 0 { to } else { to.min(1 << bytes.trailing_zeros()) };
        let alignment = [aligned(dy_start, self.dy_alignment), WIDE_ACCESS];
        let ups = self
            .product(shape, [features, n], row_stride, alignment, self.dx)?
            .d_row_stride(self.dx_stride(shape)?)
            .d_alignment(self.dx_alignment)
            .c(1.0, DType::F32);
        let weight_start = up * self.decoded(shape).bytes();
        Ok(vec![
            Product { matmul: of(gate)?, dy_start: 0, weight_start: 0, sums: Sums::Written },
            Product { matmul: of(ups)?, dy_start, weight_start, sums: Sums::Read },
        ])
    }

    /// The product with all input features at once.
    pub(super) fn whole(&self, shape: &ThroughShape) -> Result<CheckedMatmul, Error> {
        self.matmul(shape, shape.each().k, shape.outputs(), shape.outputs() as u64)?.check()
    }

    /// What W becomes for a while.
    fn decoded(&self, shape: &ThroughShape) -> DType {
        match self.dy {
            DType::F16 if !shape.each().fits_f16_scaled => DType::F32,
            dy => dy,
        }
    }

    /// Elements from one row of dX to the next.
    fn dx_stride(&self, shape: &ThroughShape) -> Result<u64, Error> {
        let expected = shape.each().k as u64;
        let got = self.dx_row_stride.unwrap_or(expected);
        if got < expected {
            return Err(Error::StrideTooSmall { operand: "dX", expected, got });
        }
        Ok(got)
    }

    /// The product with `features` input features, whose numbers stand `row_stride` apart, that is all of theirs.
    fn matmul(&self, shape: &ThroughShape, features: usize, outputs: usize, row_stride: u64) -> Result<Matmul, Error> {
        let alignment = [self.dy_alignment, WIDE_ACCESS];
        let matmul = self
            .product(shape, [features, outputs], row_stride, alignment, self.dx)?
            .d_row_stride(self.dx_stride(shape)?)
            .d_alignment(self.dx_alignment);
        Ok(match self.accumulates {
            Some(beta) => matmul.accumulate(beta),
            None => matmul,
        })
    }

    /// The product of some columns of dY with as many of the decoded weights, of which each expert has rows of its own.
    fn product(
        &self,
        shape: &ThroughShape,
        [features, columns]: [usize; 2],
        row_stride: u64,
        [dy_alignment, weight_alignment]: [usize; 2],
        d: DType,
    ) -> Result<Matmul, Error> {
        let matmul = Matmul::new([self.tokens, features, columns], self.dy, self.decoded(shape), d)
            .b_transposed()
            .a_row_stride(self.dy_row_stride.unwrap_or(shape.outputs() as u64))
            .b_row_stride(row_stride)
            .alignment(dy_alignment, weight_alignment)
            .alpha(self.alpha);
        Ok(match shape.experts() {
            Some(experts) => matmul.rows_grouped(experts).b_batch_stride(0),
            None => matmul,
        })
    }
}
