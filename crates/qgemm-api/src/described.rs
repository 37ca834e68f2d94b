//! Weights that need not be anywhere: a description is enough to plan.

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

/// A weight by its description. Plans of its problems run with every weight that is like it, once there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedWeight {
    shape: WeightShape,
}

/// A layer of experts by its description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedExperts {
    shape: ExpertsShape,
}

impl Context {
    /// A weight of `n` output and `k` input features in `format`, which need not exist: for [`Context::explain`], to plan before
    /// loading, and for [`Context::prepare`].
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
    /// As a gated pair, of which this is each half ([`Context::load_gated`]).
    ///
    /// # Errors
    /// When twice the rows are too many.
    pub fn gated(self) -> Result<Self, Error> {
        let rows = self.shape.n.div_ceil(PAIR_ROWS) * 2 * PAIR_ROWS;
        check_dimension("N of both", rows)?;
        let gated = Self { shape: WeightShape { rows, gated: true, ..self.shape } };
        gated.checked_bytes().map(|_| gated)
    }

    /// With a factor for each row.
    pub fn row_scaled(mut self) -> Self {
        self.shape.row_scale = true;
        self
    }

    /// Of a checkpoint that states this format of activations ([`HostWeight::stated_x`](crate::HostWeight::stated_x)).
    pub fn for_stated_x(mut self, stated: XFormat) -> Self {
        self.shape.stated_x = Some(stated);
        self
    }

    /// With its columns permuted (act-order).
    pub fn permuted(mut self) -> Self {
        self.shape.k_order = true;
        self
    }

    /// As a layer of `experts` experts, of which this is each.
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

    /// `m` tokens times this weight: see [`Problem::new`].
    pub fn problem(&self, m: usize) -> Problem {
        Problem::of_shape(self.shape, m)
    }

    /// The format of its values.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Output features; of a gated pair, the rows of each weight.
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Bytes that such a weight occupies on the device.
    pub fn bytes(&self) -> usize {
        // Checked when it was made; row factors and column orders are less than what they belong to.
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
    /// `tokens` rows of X, each multiplied with `top_k` experts: see [`ExpertProblem::indexed`].
    pub fn indexed(&self, tokens: usize, top_k: usize) -> ExpertProblem {
        let form = ExpertForm::Indexed { top_k, x_per_slot: false };
        ExpertProblem::of_shape(self.shape, tokens.saturating_mul(top_k), form)
    }

    /// At most `rows` rows, sorted by expert: see [`ExpertProblem::contiguous`].
    pub fn contiguous(&self, rows: usize) -> ExpertProblem {
        ExpertProblem::of_shape(self.shape, rows, ExpertForm::Contiguous)
    }

    /// `capacity` rows for each expert: see [`ExpertProblem::masked`].
    pub fn masked(&self, capacity: usize) -> ExpertProblem {
        let rows = self.shape.experts.saturating_mul(capacity);
        ExpertProblem::of_shape(self.shape, rows, ExpertForm::Masked { capacity })
    }

    pub(crate) fn shape(&self) -> &ExpertsShape {
        &self.shape
    }

    /// Bytes that such experts occupy on the device.
    pub fn bytes(&self) -> usize {
        self.checked_bytes().unwrap_or(usize::MAX)
    }

    fn checked_bytes(&self) -> Result<usize, Error> {
        let ExpertsShape { each, experts, row_pitch } = &self.shape;
        bytes(each, row_pitch * experts, *experts)
    }
}

/// Bytes of `rows` stored rows, with their factors and with the column orders of `orders` weights.
fn bytes(shape: &WeightShape, rows: usize, orders: usize) -> Result<usize, Error> {
    let WeightShape { format, class, stored_k, row_scale, k_order, .. } = *shape;
    let layout = PackedLayout::new(format, class);
    let overflow =
        || FormatError::Overflow { what: format!("{format} weight"), dims: vec![rows as u64, stored_k as u64] };
    // A packed tile has no more than 32 rows and pads to whole k-tiles, so this bounds both layouts.
    let bound = format.row_bytes(stored_k.next_multiple_of(1024)).checked_mul(rows.next_multiple_of(32));
    bound.and_then(|bytes| bytes.checked_mul(4)).ok_or_else(overflow)?;
    let blocks = layout.as_ref().map_or_else(|| format.row_offset(rows, stored_k), |l| l.bytes(rows, stored_k));
    let factors = if row_scale { rows * DType::F32.bytes() } else { 0 };
    let columns = if k_order { stored_k.next_multiple_of(k_step(format, layout.as_ref())) } else { 0 };
    Ok(blocks + factors + columns * size_of::<u32>() * orders)
}
