//! A case of `gradient`, as data.

use std::fmt;
use std::ops::Range;

use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;

use crate::gemm::{Case, Epilogue, Layout, random_case};

/// Scratch memory in which any weight of a case fits whole.
const WHOLE: usize = 1 << 30;

/// Experts of a gradient. Each has the layer's shape, but
/// different values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientExperts {
    /// Number of experts.
    pub count: usize,
    /// Whether experts share one weight.
    pub shared: bool,
    /// Assignment of rows to experts.
    pub rows: RowGroups,
}

/// Assignment of rows to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowGroups {
    /// Equal numbers of rows.
    Even,
    /// Every other expert has no rows.
    Gaps,
    /// One expert has all rows.
    One,
    /// The first and last rows belong to no expert.
    Inner,
    /// Offsets that exceed the rows, and descend.
    Wrong,
}

impl RowGroups {
    /// Every assignment.
    pub const ALL: [Self; 5] = [Self::Even, Self::Gaps, Self::One, Self::Inner, Self::Wrong];

    /// First row of each expert, and the end of the last.
    fn offsets(self, rows: usize, experts: usize) -> Vec<u32> {
        let at = |i: usize| match self {
            Self::Even => rows * i / experts,
            Self::Gaps => rows * (i / 2 * 2) / experts,
            Self::One => rows * usize::from(i > experts / 2),
            Self::Inner => rows / 5 + (rows - 2 * (rows / 5)) * i / experts,
            Self::Wrong => [rows / 3, rows / 2, rows / 4, 3 * rows, rows][i % 5],
        };
        (0..=experts).map(|i| at(i) as u32).collect()
    }
}

/// A gradient to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientCase {
    /// The layer. Its X is dY here, `[m, n]`, its D is dX, `[m, k]`.
    /// Of its epilogue only alpha and the channel scale apply.
    pub layer: Case,
    /// Factor of the old dX, if it accumulates.
    pub accumulate: Option<f32>,
    /// Scratch bytes for dequantized parts of the weight.
    pub max_scratch: usize,
    /// The experts, if any. Rows are sorted by expert.
    pub experts: Option<GradientExperts>,
}

impl GradientCase {
    /// A plain f32 gradient of a quantized weight with normal values.
    pub fn new(format: Format, tokens: usize, n: usize, k: usize) -> Self {
        Self::of(Case::new(format, tokens, n, k))
    }

    /// The gradient of a layer, in one part.
    pub(super) fn of(layer: Case) -> Self {
        Self { layer, accumulate: None, max_scratch: WHOLE, experts: None }
    }

    /// With these types of dY and dX.
    pub fn of_types(self, dy: DType, dx: DType) -> Self {
        Self { layer: Case { x_dtype: dy, d_dtype: dx, ..self.layer }, ..self }
    }

    /// Offsets of the rows of experts.
    pub(super) fn offsets(&self) -> Option<Vec<u32>> {
        self.experts.map(|experts| experts.rows.offsets(self.layer.m, experts.count))
    }

    /// Rows of each weight. They never overlap: offsets are clamped
    /// to those before.
    pub(super) fn rows(&self) -> Vec<Range<usize>> {
        let Some(offsets) = self.offsets() else { return std::iter::once(0..self.layer.m).collect() };
        let reached = |i: usize| offsets[..=i].iter().map(|&at| (at as usize).min(self.layer.m)).max().unwrap_or(0);
        (0..offsets.len() - 1).map(|expert| reached(expert)..reached(expert + 1)).collect()
    }

    /// The layer with an expert's values.
    pub(super) fn layer_of(&self, expert: usize) -> Case {
        let own = if self.experts.is_some_and(|experts| experts.shared) { 0 } else { expert as u64 };
        Case { seed: self.layer.seed.wrapping_add(own * 0x9e37), ..self.layer }
    }

    /// The random case of `seed`, in one of `formats`.
    pub(super) fn random(formats: &[Format], seed: u64) -> Self {
        let drawn = random_case(formats, seed);
        let Epilogue { alpha, channel_scale, c, .. } = drawn.epilogue;
        let layout = Layout { x_transposed: false, w_transposed: false, c_gap: 0, residual_gap: 0, ..drawn.layout };
        let epilogue = Epilogue {
            alpha,
            channel_scale,
            c: None,
            bias: None,
            token_scale: false,
            activation: Activation::Identity,
            residual: None,
        };
        let layer = Case { batch_invariant: false, epilogue, layout, ..drawn };
        let max_scratch = if seed.is_multiple_of(3) { 0 } else { WHOLE };
        let rows = RowGroups::ALL[seed as usize % RowGroups::ALL.len()];
        let count = 1 + seed as usize / 7 % 9;
        let experts =
            seed.is_multiple_of(4).then_some(GradientExperts { count, shared: seed.is_multiple_of(12), rows });
        Self { layer, accumulate: c.map(|(beta, _)| beta), max_scratch, experts }
    }
}

/// The layer's text, then non-default fields.
impl fmt::Display for GradientCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layer)?;
        if let Some(beta) = self.accumulate {
            write!(f, " accumulate={beta}")?;
        }
        if let Some(GradientExperts { count, shared, rows }) = self.experts {
            write!(f, " experts={count} rows={rows:?}{}", if shared { " shared" } else { "" })?;
        }
        if self.max_scratch != WHOLE {
            write!(f, " max-scratch={}", self.max_scratch)?;
        }
        Ok(())
    }
}
