//! One gradient to check, as data.

use std::fmt;
use std::ops::Range;

use qgemm_formats::{DType, Format};
use qgemm_hal::Activation;

use crate::gemm::{Case, Epilogue, Layout, random_case};

/// Scratch memory in which any weight of a case is one part.
const WHOLE: usize = 1 << 30;

/// Experts whose gradient is checked: each has the layer's shape, and values of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientExperts {
    /// How many there are.
    pub count: usize,
    /// Whether they have one weight.
    pub shared: bool,
    /// How rows are given to them.
    pub rows: RowGroups,
}

/// How rows are given to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowGroups {
    /// As many to each.
    Even,
    /// Every other one has none.
    Gaps,
    /// One has all.
    One,
    /// The first and the last rows are no one's.
    Inner,
    /// Offsets lead out of the rows, and fall.
    Wrong,
}

impl RowGroups {
    /// Every way.
    pub const ALL: [Self; 5] = [Self::Even, Self::Gaps, Self::One, Self::Inner, Self::Wrong];

    /// Where the rows of each expert begin, and the last one's end.
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

/// One gradient to check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientCase {
    /// The layer: its X is dY here, `[m, n]`, and its D is dX, `[m, k]`. Of its epilogue alpha counts, and whether output features have
    /// a factor.
    pub layer: Case,
    /// Factor of what dX held.
    pub accumulate: Option<f32>,
    /// Bytes that parts of the weight may take as numbers.
    pub max_scratch: usize,
    /// The experts, where there are any: rows are sorted by expert.
    pub experts: Option<GradientExperts>,
}

impl GradientCase {
    /// A plain gradient of a quantized weight with normal values, all in f32.
    pub fn new(format: Format, tokens: usize, n: usize, k: usize) -> Self {
        Self::of(Case::new(format, tokens, n, k))
    }

    /// The gradient of a layer, of one part.
    pub(super) fn of(layer: Case) -> Self {
        Self { layer, accumulate: None, max_scratch: WHOLE, experts: None }
    }

    /// With dY of this type, and dX.
    pub fn of_types(self, dy: DType, dx: DType) -> Self {
        Self { layer: Case { x_dtype: dy, d_dtype: dx, ..self.layer }, ..self }
    }

    /// Offsets of the rows of experts.
    pub(super) fn offsets(&self) -> Option<Vec<u32>> {
        self.experts.map(|experts| experts.rows.offsets(self.layer.m, experts.count))
    }

    /// The rows of each weight. No two have one in common: an offset leads nowhere before those that precede it.
    pub(super) fn rows(&self) -> Vec<Range<usize>> {
        let Some(offsets) = self.offsets() else { return std::iter::once(0..self.layer.m).collect() };
        let reached = |i: usize| offsets[..=i].iter().map(|&at| (at as usize).min(self.layer.m)).max().unwrap_or(0);
        (0..offsets.len() - 1).map(|expert| reached(expert)..reached(expert + 1)).collect()
    }

    /// The layer with the values of an expert.
    pub(super) fn layer_of(&self, expert: usize) -> Case {
        let own = if self.experts.is_some_and(|experts| experts.shared) { 0 } else { expert as u64 };
        Case { seed: self.layer.seed.wrapping_add(own * 0x9e37), ..self.layer }
    }

    /// The case that `seed` stands for, in one of `formats`.
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

/// As the layer's, and then whatever is not the default.
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
