//! Input gradient: the builder [`Gradient`] and its partition into K parts
//! with dequantized weights.

use qgemm_formats::DType;
use qgemm_hal::{CheckedMatmul, CheckedUnpack, Dense, ExpertForm};

use super::part::{Decode, Part, Product, Sums};
use super::through::{Columns, ThroughShape};
use crate::error::Error;
use crate::experts::ExpertProblem;
use crate::gemm::Problem;
use crate::matmul::Matmul;
use crate::operand::{WIDE_ACCESS, check_dimension};

/// Feature granularity of parts, except the last: whole TMA boxes and tiles.
const PART_STEP: usize = 64;
/// Default scratch memory. Parts of common layers then
/// occupy all multiprocessors.
const SCRATCH_BYTES: usize = 64 << 20;

/// Input gradient of a linear layer `Y = X·Wᵀ`, for
/// [`Context::plan_gradient`](crate::Context::plan_gradient):
///
/// ```text
/// dX[t, k] = alpha · Σ_n dY[t, n] · W[n, k]  (+ beta · dX[t, k])
/// ```
///
/// W is the packed weight of the layer, in any format. Its input features are
/// processed in parts. Each part is dequantized to the type of dY in scratch
/// memory and multiplied there, so no second copy of the weight exists.
/// If the weight does not fit f16 (with row scales), it is dequantized to f32
/// even for dY in f16. Matrices are row-major without gaps by default.
///
/// With [`Experts`](crate::Experts), rows of dY and dX
/// are sorted by expert, with offsets in device memory
/// ([`GradientArgs::offsets`](crate::GradientArgs::offsets)). Rows of dX
/// outside all groups are not written.
///
/// A gated pair has dY `[tokens, 2 N]`: gradients of the gate's sums, then of
/// the up's. Computing them is elementwise: `dG = dY · up · activation'(gate)`
/// and `dU = dY · activation(gate)`.
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
    /// Gradient of `tokens` rows, with dY in `dy` and dX in `dx`. With 0 tokens
    /// the plan launches nothing.
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

    /// Gradient of a GEMM problem: its tokens, dX in the type of X, dY in the type
    /// of D, and its alpha. Added operands do not matter.
    ///
    /// # Errors
    /// [`Error::NoBackward`] for parts without a gradient here, such as a norm or
    /// an activation. [`Error::XFormatNotServed`] for a quantized X.
    pub fn of(problem: &Problem) -> Result<Self, Error> {
        let (tokens, x, d, alpha) = problem.linear_part()?;
        Ok(Self::new(tokens, d, x).alpha(alpha))
    }

    /// Gradient of an expert problem with rows sorted by expert.
    ///
    /// The plan takes the [`Experts`](crate::Experts), and a run takes the offsets
    /// ([`GradientArgs::offsets`](crate::GradientArgs::offsets)).
    ///
    /// # Errors
    /// As [`Gradient::of`]. [`Error::NoBackward`] for rows that are not sorted by
    /// expert, or are combined.
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

    /// Row stride of dY in elements. At least the output features of the weight,
    /// or of both weights of a gated pair.
    pub fn dy_row_stride(mut self, elements: u64) -> Self {
        self.dy_row_stride = Some(elements);
        self
    }

    /// Row stride of dX in elements, at least the input features.
    pub fn dx_row_stride(mut self, elements: u64) -> Self {
        self.dx_row_stride = Some(elements);
        self
    }

    /// Alignment of the addresses of dY and dX in every run, in bytes.
    /// 16 by default, which is fastest.
    pub fn alignment(mut self, dy: usize, dx: usize) -> Self {
        (self.dy_alignment, self.dx_alignment) = (dy, dx);
        self
    }

    /// Factor of the product.
    pub fn alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// Adds `beta` times the old dX, e.g. for two layers with the same input.
    /// With `beta = 0`, dX is not read.
    pub fn accumulate(mut self, beta: f32) -> Self {
        self.accumulates = Some(beta);
        self
    }

    /// Limit of the dequantized parts in bytes. 64 MiB by default. A part has at
    /// least 64 input features regardless. A lower limit means more launches.
    pub fn max_scratch(mut self, bytes: usize) -> Self {
        self.max_scratch = bytes;
        self
    }

    /// Number of tokens.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Validates everything that is independent of a run's buffers, and partitions
    /// the product for weights of `shape`.
    pub(super) fn check(&self, shape: &ThroughShape) -> Result<Vec<Part>, Error> {
        check_dimension("M", self.tokens)?;
        // Validated as a whole, though run in parts.
        self.whole(shape)?;
        let (each, columns, dtype) = (shape.each(), shape.columns(), self.decoded(shape));
        // Rows of parts are 16-byte aligned.
        let d = Dense::rows_of(dtype, columns.copies.saturating_mul(columns.copy_pitch));
        // Sums that the gate's product leaves for the up's.
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

    /// Products of `features` input features, whose dequantized rows
    /// have stride `row_stride`.
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
        // The gate's sums stay in f32 until the up's are added.
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

    /// Product of all input features at once.
    pub(super) fn whole(&self, shape: &ThroughShape) -> Result<CheckedMatmul, Error> {
        self.matmul(shape, shape.each().k, shape.outputs(), shape.outputs() as u64)?.check()
    }

    /// Element type of the dequantized W.
    fn decoded(&self, shape: &ThroughShape) -> DType {
        match self.dy {
            DType::F16 if !shape.each().fits_f16_scaled => DType::F32,
            dy => dy,
        }
    }

    /// Row stride of dX in elements.
    fn dx_stride(&self, shape: &ThroughShape) -> Result<u64, Error> {
        let expected = shape.each().k as u64;
        let got = self.dx_row_stride.unwrap_or(expected);
        if got < expected {
            return Err(Error::StrideTooSmall { operand: "dX", expected, got });
        }
        Ok(got)
    }

    /// Product of `features` input features with row stride `row_stride`,
    /// over all output features.
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

    /// Product of some columns of dY with as many dequantized weights.
    /// Each expert has its own rows.
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
