//! Weight descriptions, for plans before any weight is loaded.

use qgemm_formats::packed_file::k_step;
use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, EXPERT_ROWS, Format, FormatError, PAIR_ROWS, XFormat};
use qgemm_hal::{DeviceInfo, ExpertForm};

use crate::context::Context;
use crate::error::Error;
use crate::experts::{ExpertProblem, ExpertsShape};
use crate::gemm::Problem;
use crate::operand::check_dimension;
use crate::weight::WeightShape;

/// Weight description. Its plans run with every weight that matches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedWeight {
    shape: WeightShape,
}

/// Description of a layer of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedExperts {
    shape: ExpertsShape,
}

impl Context {
    /// Describes a weight of `n` output and `k` input features in `format`.
    ///
    /// Uses: [`Context::explain`], plans before loading, and [`Context::prepare`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType};
    /// let ctx = Context::open("cpu")?;
    /// let weight = ctx.describe_weight("q8_0".parse()?, 4096, 4096)?;
    /// let plan = ctx.plan(&weight.problem(1).x_dtype(DType::F16))?;
    /// assert!(plan.kernel_name().ends_with("q8_0_f16") && weight.bytes() >= 4096 * 4096 / 32 * 34);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the format cannot store K, or a size is 0 or too large.
    pub fn describe_weight(&self, format: Format, n: usize, k: usize) -> Result<DescribedWeight, Error> {
        for (name, got) in [("N", n), ("K", k)] {
            check_dimension(name, got)?;
            if got == 0 {
                return Err(Error::OutOfRange { name, least: 1, most: crate::operand::MAX_DIMENSION, got });
            }
        }
        format.check_k(k)?;
        let device = self.device();
        let (class, DeviceInfo { id, .. }) = (device.fragment_layout(format), device.info());
        let shape = WeightShape {
            device: *id,
            format,
            class,
            rows: n,
            n,
            gated: false,
            k,
            stored_k: k,
            row_scale: false,
            k_order: false,
            fits_f16: true,
            fits_f16_scaled: true,
            stated_x: None,
        };
        let described = DescribedWeight { shape };
        described.checked_bytes().map(|_| described)
    }
}

impl DescribedWeight {
    /// Makes it a gated pair of two such weights ([`Context::load_gated`]).
    ///
    /// # Errors
    /// When twice the rows are too many.
    pub fn gated(self) -> Result<Self, Error> {
        let rows = self.shape.n.div_ceil(PAIR_ROWS) * 2 * PAIR_ROWS;
        check_dimension("N of both", rows)?;
        let gated = Self { shape: WeightShape { rows, gated: true, ..self.shape } };
        gated.checked_bytes().map(|_| gated)
    }

    /// Adds row factors.
    pub fn row_scaled(mut self) -> Self {
        self.shape.row_scale = true;
        self
    }

    /// Sets the X format that the checkpoint states
    /// ([`HostWeight::stated_x`](crate::HostWeight::stated_x)).
    pub fn for_stated_x(mut self, stated: XFormat) -> Self {
        self.shape.stated_x = Some(stated);
        self
    }

    /// Adds a column order (act-order).
    pub fn permuted(mut self) -> Self {
        self.shape.k_order = true;
        self
    }

    /// Makes it a layer of `experts` such experts.
    ///
    /// # Errors
    /// When there are none, or all rows are too many.
    pub fn experts(self, experts: usize) -> Result<DescribedExperts, Error> {
        if experts == 0 {
            return Err(FormatError::NoExperts.into());
        }
        let row_pitch = self.shape.rows.next_multiple_of(EXPERT_ROWS);
        check_dimension("N of all experts", row_pitch.saturating_mul(experts))?;
        let described = DescribedExperts { shape: ExpertsShape { each: self.shape, experts, row_pitch } };
        described.checked_bytes().map(|_| described)
    }

    /// Product of `m` tokens with this weight: see [`Problem::new`].
    pub fn problem(&self, m: usize) -> Problem {
        Problem::of_shape(self.shape, m)
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Output features. A gated pair counts one of its weights.
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        // Checked on creation. Row factors and column orders are smaller than the weight.
        self.checked_bytes().unwrap_or(usize::MAX)
    }

    pub(crate) fn shape(&self) -> &WeightShape {
        &self.shape
    }

    fn checked_bytes(&self) -> Result<usize, Error> {
        let shape = &self.shape;
        bytes(shape, shape.rows, 1)
    }
}

impl DescribedExperts {
    /// Indexed form: `tokens` rows of X with `top_k` experts each, see
    /// [`ExpertProblem::indexed`].
    pub fn indexed(&self, tokens: usize, top_k: usize) -> ExpertProblem {
        let form = ExpertForm::Indexed { top_k, x_per_slot: false };
        ExpertProblem::of_shape(self.shape, tokens.saturating_mul(top_k), form)
    }

    /// Contiguous form: at most `rows` rows, sorted by expert, see
    /// [`ExpertProblem::contiguous`].
    pub fn contiguous(&self, rows: usize) -> ExpertProblem {
        ExpertProblem::of_shape(self.shape, rows, ExpertForm::Contiguous)
    }

    /// Masked form: `capacity` rows per expert, see [`ExpertProblem::masked`].
    pub fn masked(&self, capacity: usize) -> ExpertProblem {
        let rows = self.shape.experts.saturating_mul(capacity);
        ExpertProblem::of_shape(self.shape, rows, ExpertForm::Masked { capacity })
    }

    pub(crate) fn shape(&self) -> &ExpertsShape {
        &self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.checked_bytes().unwrap_or(usize::MAX)
    }

    fn checked_bytes(&self) -> Result<usize, Error> {
        let ExpertsShape { each, experts, row_pitch } = &self.shape;
        bytes(each, row_pitch * experts, *experts)
    }
}

/// Bytes of `rows` stored rows with their factors, and column
/// orders of `orders` weights.
fn bytes(shape: &WeightShape, rows: usize, orders: usize) -> Result<usize, Error> {
    let WeightShape { format, class, stored_k, row_scale, k_order, .. } = *shape;
    let layout = PackedLayout::new(format, class);
    let overflow =
        || FormatError::Overflow { what: format!("{format} weight"), dims: vec![rows as u64, stored_k as u64] };
    // A packed tile has at most 32 rows and whole k-tiles, so this bounds both layouts.
    let bound = format.row_bytes(stored_k.next_multiple_of(1024)).checked_mul(rows.next_multiple_of(32));
    bound.and_then(|bytes| bytes.checked_mul(4)).ok_or_else(overflow)?;
    let blocks = layout.as_ref().map_or_else(|| format.row_offset(rows, stored_k), |l| l.bytes(rows, stored_k));
    let factors = if row_scale { rows * DType::F32.bytes() } else { 0 };
    let columns = if k_order { stored_k.next_multiple_of(k_step(format, layout.as_ref())) } else { 0 };
    Ok(blocks + factors + columns * size_of::<u32>() * orders)
}
