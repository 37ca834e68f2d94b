//! [`Gradient`]: the product `dX = dY·W`, and its cut into parts whose weights are plain numbers for a while.

use qgemm_formats::DType;
use qgemm_hal::{CheckedMatmul, CheckedUnpack, Dense};

use crate::error::Error;
use crate::gemm::Problem;
use crate::matmul::Matmul;
use crate::operand::{WIDE_ACCESS, check_dimension};
use crate::weight::WeightShape;

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

/// What a plan makes kernels ready for: some input features.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The input features from the first on; none of a weight without output features.
    pub unpack: Option<CheckedUnpack>,
    /// The product.
    pub matmul: CheckedMatmul,
    /// The first input feature.
    pub first: usize,
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

    /// Validates everything that does not depend on the buffers of a run, and cuts the product into parts for a weight of `shape`.
    pub(super) fn check(&self, shape: &WeightShape) -> Result<Vec<Part>, Error> {
        check_dimension("M", self.tokens)?;
        // Validated as a whole, though parts of it are run.
        self.whole(shape)?;
        let dtype = self.decoded(shape);
        // Rows of parts begin at multiples of 16 bytes.
        let d = Dense::rows_of(dtype, outputs(shape).next_multiple_of(WIDE_ACCESS));
        let row_bytes = (d.row_stride as usize).saturating_mul(dtype.bytes()).max(1);
        let most = (self.max_scratch / row_bytes / PART_STEP * PART_STEP).max(PART_STEP);
        let count = shape.k.div_ceil(most).max(1);
        let features = shape.k.div_ceil(count).next_multiple_of(PART_STEP);
        let part = |first: usize| {
            let features = features.min(shape.k - first);
            let unpack = CheckedUnpack {
                out_features: shape.n,
                gated: shape.gated,
                k: shape.k,
                stored_k: shape.stored_k,
                first,
                features,
                format: shape.format,
                class: shape.class,
                row_scale: shape.row_scale,
                k_order: shape.k_order,
                d,
            };
            let unpack = (shape.n > 0).then_some(unpack);
            Ok(Part { unpack, matmul: self.matmul(shape, features, d.row_stride)?, first })
        };
        if self.tokens == 0 {
            return Ok(Vec::new());
        }
        (0..shape.k).step_by(features.max(1)).map(part).collect()
    }

    /// The product with all input features at once.
    pub(super) fn whole(&self, shape: &WeightShape) -> Result<CheckedMatmul, Error> {
        self.matmul(shape, shape.k, outputs(shape) as u64)
    }

    /// What W becomes for a while.
    fn decoded(&self, shape: &WeightShape) -> DType {
        match self.dy {
            DType::F16 if !shape.fits_f16_scaled => DType::F32,
            dy => dy,
        }
    }

    /// The product with `features` input features, whose numbers stand `row_stride` apart.
    fn matmul(&self, shape: &WeightShape, features: usize, row_stride: u64) -> Result<CheckedMatmul, Error> {
        let dx_row_stride = self.dx_row_stride.unwrap_or(shape.k as u64);
        if dx_row_stride < shape.k as u64 {
            let (operand, expected) = ("dX", shape.k as u64);
            return Err(Error::StrideTooSmall { operand, expected, got: dx_row_stride });
        }
        let mut matmul = Matmul::new([self.tokens, features, outputs(shape)], self.dy, self.decoded(shape), self.dx)
            .b_transposed()
            .a_row_stride(self.dy_row_stride.unwrap_or(outputs(shape) as u64))
            .b_row_stride(row_stride)
            .d_row_stride(dx_row_stride)
            .alignment(self.dy_alignment, WIDE_ACCESS)
            .d_alignment(self.dx_alignment)
            .alpha(self.alpha);
        if let Some(beta) = self.accumulates {
            matmul = matmul.accumulate(beta);
        }
        matmul.check()
    }
}

/// Columns of dY.
pub(super) fn outputs(shape: &WeightShape) -> usize {
    if shape.gated { 2 * shape.n } else { shape.n }
}
