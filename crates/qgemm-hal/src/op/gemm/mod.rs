//! `gemm`: products of activations and a weight, which may be quantized.

mod activation;
mod plan;
mod quantized_x;
mod work_tile;
mod workspace;
mod x_precision;

use std::hash::{Hash, Hasher};
use std::ops::Range;

use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, Format, ScaleSpan, XFactor, XFormat};

pub use activation::Activation;
pub use plan::{LaunchPlan, Schedule, StreamK, TileConfig, XPrologue};
pub use quantized_x::XPlanes;
pub use work_tile::WorkTile;
pub(crate) use workspace::COUNTER_BYTES;
pub use workspace::{WorkspaceLayout, XPlaneRegions, XRegion};
pub use x_precision::XPrecision;

use super::convert::CheckedConvert;
use super::dense::Dense;
use super::norm::{CheckedNorm, NormFunction, QuantizedD, XPlace};
use super::{Operation, operands};
use crate::error::Unsupported;
use crate::kernel_id::{Name, spec};

operands! {
    /// What `gemm` reads and writes.
    pub enum GemmOperand {
        /// Activations; of quantized ones the codes.
        X: "x" Read,
        /// Codes and scales of the weight in the device's layout.
        W: "the weight" Constant,
        /// A factor for every stored row of W, in f32.
        RowScale: "the row scales" Constant,
        /// Stored column of W → input feature, `u32` each, padded with `NO_COLUMN` to whole k-tiles.
        KOrder: "the column order" Constant,
        /// C.
        C: "c" Read,
        /// Bias.
        Bias: "the bias" Read,
        /// Factors of the tokens, in f32.
        TokenScale: "the token scales" Read,
        /// Residual.
        Residual: "the residual" Read,
        /// Output.
        D: "d" Write,
        /// Memory for what one step leaves for the next; zeroed before the first launch.
        Workspace: "the workspace" Accumulate,
        /// What each token's accumulators are to be multiplied with, in f32: a part of the workspace.
        XFactor: "the tokens' factors" Read,
        /// Partial accumulators of tiles that are cut along K: a part of the workspace.
        Partials: "the partial accumulators" Write,
        /// Arrival counters of such tiles: a part of the workspace.
        Counters: "the counters" Accumulate,
        /// What blocks or tokens of a quantized X are scaled by.
        XScales: "the scales of x" Read,
        /// The factors of its tokens, or the one that is given for all of it, in f32.
        XPlaneFactors: "the factors of x" Read,
        /// The sums of its codes, scales included.
        XSums: "the sums of x" Read,
        /// Factors of the columns of X, of a norm before the product.
        Gamma: "gamma" Constant,
        /// What such a norm adds to the columns of X.
        Beta: "beta" Constant,
        /// The outputs of the second segment, where there are segments.
        D2: "d of segment 2" Write,
        /// Those of the third.
        D3: "d of segment 3" Write,
        /// Those of the fourth.
        D4: "d of segment 4" Write,
    }
}

spec! {
    /// What tells the kernels of `gemm` apart.
    pub struct GemmSpec {
        /// The main loop: generation and mechanism, such as `sm90_wgmma_ws`.
        main_loop: Name,
        /// Format of W.
        w: Format,
        /// Format in which X is multiplied.
        x: XFormat,
        /// Stored rows of W that a CTA computes.
        n: u32,
        /// Tokens that a CTA computes.
        m: u32,
        /// Values along K of a k-tile.
        k: u32,
        /// Threads of a CTA.
        threads: u32,
        /// Warps along N.
        warps_n: u32,
        /// Groups of warps that share K.
        k_groups: u32,
        /// CTAs that one unit (SM, core) runs at once.
        ctas: u32,
        /// Stages of the copy pipeline.
        stages: u32,
    }
}

/// X: its format, strides in elements, and the alignment of its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XOperand {
    /// Format in memory.
    pub format: XFormat,
    /// Elements from one token to the next.
    pub row_stride: u64,
    /// Elements from one column to the next: 1 for row-major.
    pub col_stride: u64,
    /// Whether every token begins at a multiple of 16 bytes (and columns are contiguous).
    pub aligned16: bool,
    /// Its planes, where it is quantized; strides are then those of codes.
    pub planes: Option<XPlanes>,
}

impl XOperand {
    /// X as a matrix of plain numbers; `None` where it is quantized.
    pub fn dense(&self) -> Option<Dense> {
        let Self { format, row_stride, col_stride, aligned16, .. } = *self;
        format.plain().map(|dtype| Dense { dtype, row_stride, col_stride, aligned16 })
    }
}

impl From<Dense> for XOperand {
    fn from(Dense { dtype, row_stride, col_stride, aligned16 }: Dense) -> Self {
        Self { format: XFormat::Plain(dtype), row_stride, col_stride, aligned16, planes: None }
    }
}

/// X as it is stored where it is normalized before it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormedX {
    /// What becomes of a row.
    pub function: NormFunction,
    /// X in memory, row-major.
    pub x: Dense,
}

impl GemmOperand {
    /// The outputs of the segments behind the first, whose outputs are D.
    pub const OF_SEGMENTS: [Self; Segment::MOST - 1] = [Self::D2, Self::D3, Self::D4];
}

/// Where the outputs of neighbouring features lie that are not in D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The first of them, a multiple of [`Segment::STEP`]. They end where the next segment begins, or with the last feature.
    pub first: usize,
    /// Their matrix.
    pub d: Dense,
}

impl Segment {
    /// Segments of a product, that of D among them.
    pub const MOST: usize = 4;
    /// What borders between segments are multiples of: rows of W that lie together in every layout, whose outputs kernels store
    /// together.
    pub const STEP: usize = 16;
}

/// `D[M, out_features] = activation(v) + residual` with `v = alpha · token_scale · X·Wᵀ + beta · C + bias`, or, of a gated
/// pair, `activation(v of the gate) · v of the up + residual`; validated by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedGemm {
    /// Tokens (rows of X); at least 1.
    pub m: usize,
    /// Rows of W as stored, at least 1: the output features, or, of a gated pair, a multiple of 16 (see
    /// [`HostWeight::gated_pair`](qgemm_formats::HostWeight::gated_pair)).
    pub stored_rows: usize,
    /// Output features (columns of D): the stored rows, or, of a gated pair, the rows of each weight.
    pub out_features: usize,
    /// Whether W is a gated pair.
    pub gated: bool,
    /// Input features (columns of X); at least 1.
    pub k: usize,
    /// Length of a stored row of W (differs from `k` only with act-order padding).
    pub stored_k: usize,
    /// Format of W.
    pub format: Format,
    /// Layout of W.
    pub class: FragmentLayout,
    /// Whether W has a factor per row.
    pub row_scale: bool,
    /// Whether W's columns are permuted (act-order).
    pub k_order: bool,
    /// Whether W's values can be rounded to f16 ([`HostWeight::fits_f16`](qgemm_formats::HostWeight::fits_f16)).
    pub weight_fits_f16: bool,
    /// X as it is multiplied: where it is normalized first, the rows that the norm writes.
    pub x: XOperand,
    /// The norm before the product, whose launch comes before those that families make.
    pub norm: Option<NormedX>,
    /// How far X may be rounded.
    pub x_precision: XPrecision,
    /// D, which has the outputs of all features, or, where there are segments, of those before the first.
    pub d: Dense,
    /// Outputs that lie elsewhere, at most [`Segment::MOST`]` - 1`, in the order of features; never of a gated pair.
    pub segments: Vec<Segment>,
    /// C, read only when present; `beta` is 0 otherwise.
    pub c: Option<Dense>,
    /// Element type of the bias: contiguous, one element a feature; of a gated pair the gate's bias, then the up's.
    pub bias: Option<DType>,
    /// Whether every token has a factor in f32.
    pub token_scale: bool,
    /// The residual, added last.
    pub residual: Option<Dense>,
    /// Whether D holds the residual before: `residual` then is what D is, and no such operand is given.
    pub residual_in_d: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
    /// Function applied before the residual is added; of a gated pair, to the gate.
    pub activation: Activation,
    /// Pins family and K partition whatever M is, so that a row's bits do not depend on its batch.
    pub batch_invariant: bool,
}

impl CheckedGemm {
    /// Elements of the bias, where there is one.
    pub fn bias_len(&self) -> usize {
        if self.gated { 2 * self.out_features } else { self.out_features }
    }

    /// Every output with its features and matrix: D, then those of segments.
    pub fn outputs(&self) -> impl Iterator<Item = (GemmOperand, Range<usize>, Dense)> + '_ {
        let end = move |segment: usize| self.segments.get(segment).map_or(self.out_features, |next| next.first);
        let others = self.segments.iter().zip(GemmOperand::OF_SEGMENTS).enumerate();
        let others = others.map(move |(i, (segment, operand))| (operand, segment.first..end(i + 1), segment.d));
        std::iter::once((GemmOperand::D, 0..end(0), self.d)).chain(others)
    }

    /// Name of a product of `family` in tables and messages: `gemm_nt_q4_k_f16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_nt_{}_{}", self.format.name, self.x.format)
    }

    /// X as a matrix of plain numbers.
    ///
    /// # Errors
    /// The reason for kernels that read nothing else, when X is quantized.
    pub fn plain_x(&self) -> Result<Dense, Unsupported> {
        let why = || format!("multiplies X in f32, f16 or bf16, and this one is in {}", self.x.format);
        self.x.dense().ok_or_else(|| Unsupported::new(why()))
    }

    /// Bytes of W.
    pub fn weight_bytes(&self) -> f64 {
        self.stored_rows as f64 * self.format.row_bytes(self.stored_k) as f64
    }

    /// Bytes of a token of X.
    pub fn x_row_bytes(&self) -> f64 {
        let (desc, k) = (self.x.format.desc(), self.k as f64);
        let scale_bits = match (desc.scale_span, desc.scale) {
            (_, None) | (ScaleSpan::None | ScaleSpan::Tensor, _) => 0.0,
            (ScaleSpan::Token, Some(scale)) => scale.bytes() as f64 * 8.0,
            (ScaleSpan::Block(columns), Some(scale)) => (k / columns as f64).ceil() * scale.bytes() as f64 * 8.0,
        };
        let sum_bits = desc.sum_span.map_or(0.0, |span| (k / span as f64).ceil() * 32.0);
        (k * f64::from(desc.bits) + scale_bits + sum_bits) / 8.0
    }

    /// The norm before the product; `None` where there is none. Its D is X as it is multiplied, of [`CheckedGemm::m`] rows.
    pub fn norm_prologue(&self) -> Option<CheckedNorm> {
        let NormedX { function, x } = self.norm?;
        let quantized = self.x.planes.map(|planes| QuantizedD { format: self.x.format, planes });
        let (d, d_columns) = match quantized {
            Some(QuantizedD { planes, .. }) => {
                let columns = planes.parts.columns(self.k);
                (Dense::rows_of(DType::F32, columns), columns)
            }
            // Whole groups of columns, of which those beyond X's are 0.
            None => {
                let d = self.plain_x().ok()?;
                (d, usize::try_from(d.row_stride).ok()?)
            }
        };
        Some(CheckedNorm {
            rows: self.m,
            columns: self.k,
            d_columns,
            function,
            x,
            d,
            quantized,
            added: None,
            x_place: XPlace::Own,
            gathers: false,
        })
    }

    /// The same before the kernels of `plan`; `None` where these normalize X themselves.
    pub fn norm_before(&self, plan: &LaunchPlan) -> Option<(CheckedNorm, XPlaneRegions)> {
        let regions = self.normed_regions_of(plan)?;
        Some((self.norm_prologue()?, regions))
    }

    /// Where what such a norm writes lies in the workspace.
    pub fn normed_regions_of(&self, plan: &LaunchPlan) -> Option<XPlaneRegions> {
        if plan.config.normalizes_x { None } else { self.normed_regions(self.m, plan.workspace.bytes) }
    }

    /// Where `rows` normalized rows, or the planes of them, lie in a workspace whose first `bytes` bytes a plan's own steps have; `None`
    /// where X is not normalized, or its size overflows.
    pub fn normed_regions(&self, rows: usize, bytes: usize) -> Option<XPlaneRegions> {
        self.norm?;
        let row_bytes = match self.x.planes {
            Some(XPlanes { parts, codes_row, scales_row, sums_row }) => {
                let factor = if parts.factor == XFactor::PerToken { size_of::<f32>() as u64 } else { 0 };
                [codes_row, scales_row, factor, sums_row]
            }
            None => {
                let x = self.plain_x().ok()?;
                [x.row_stride.checked_mul(x.dtype.bytes() as u64)?, 0, 0, 0]
            }
        };
        XPlaneRegions::new(self.x.format, rows, row_bytes, bytes.max(WorkspaceLayout::RESERVED))
    }

    /// The conversion of X that `plan` begins with; `None` where its kernel reads X in place.
    ///
    /// D of the conversion has a row for each token of the operation and whole k-tiles of columns, in the order in which W
    /// stores them; [`WorkspaceLayout::x`] says where it lies.
    pub fn x_prologue(&self, plan: &LaunchPlan) -> Option<CheckedConvert> {
        let XPrologue::Convert { row_factors } = plan.config.x_prologue?;
        let (x, dtype) = (self.plain_x().ok()?, plan.config.x_format.plain()?);
        let d_columns = plan.workspace.x?.columns;
        Some(CheckedConvert {
            rows: self.m,
            columns: self.k,
            d_columns,
            x,
            d: Dense::rows_of(dtype, d_columns),
            gathers: self.k_order,
            row_factors,
        })
    }

    /// The operation as the kernel behind `prologue` sees it: X is what that wrote.
    pub fn after(&self, prologue: &CheckedConvert) -> Self {
        let columns = prologue.d_columns;
        Self { k: columns, stored_k: columns, k_order: false, x: prologue.d.into(), ..self.clone() }
    }
}

impl Operation for CheckedGemm {
    const NAME: &'static str = "gemm";
    type Operand = GemmOperand;
    type Config = TileConfig;
    type Plan = LaunchPlan;

    fn operands(&self) -> Vec<GemmOperand> {
        let optional = [
            (self.row_scale, GemmOperand::RowScale),
            (self.k_order, GemmOperand::KOrder),
            (self.c.is_some(), GemmOperand::C),
            (self.bias.is_some(), GemmOperand::Bias),
            (self.token_scale, GemmOperand::TokenScale),
            (self.residual.is_some() && !self.residual_in_d, GemmOperand::Residual),
            (self.norm.is_some_and(|norm| norm.function.gamma.is_some()), GemmOperand::Gamma),
            (self.norm.is_some_and(|norm| norm.function.beta.is_some()), GemmOperand::Beta),
        ];
        // What a norm writes lies in the workspace, but for the factor that it is given.
        let is_given = |planes: &XPlanes, operand: GemmOperand| {
            let of_norm = planes.parts.factor == XFactor::Given && operand == GemmOperand::XPlaneFactors;
            self.norm.is_none() || of_norm
        };
        let planes = self.x.planes.iter();
        let planes = planes.flat_map(|planes| planes.operands().filter(move |&operand| is_given(planes, operand)));
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        let others = self.outputs().skip(1).map(|(operand, ..)| operand);
        [GemmOperand::X, GemmOperand::W, GemmOperand::D].into_iter().chain(planes).chain(given).chain(others).collect()
    }

    /// W, X, D, C and the residual once each.
    fn traffic(&self) -> f64 {
        let output = |features: usize, dense: &Dense| self.m as f64 * features as f64 * dense.dtype.bytes() as f64;
        let read: f64 = self.c.iter().chain(&self.residual).map(|dense| output(self.out_features, dense)).sum();
        let written: f64 = self.outputs().map(|(_, features, dense)| output(features.len(), &dense)).sum();
        self.weight_bytes() + self.m as f64 * self.x_row_bytes() + written + read
    }

    fn macs(&self) -> f64 {
        self.m as f64 * self.stored_rows as f64 * self.k as f64
    }
}

/// A factor that is no number equals itself here: descriptions are keys of plans.
impl Eq for CheckedGemm {}

impl Hash for CheckedGemm {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let sizes = (self.m, self.stored_rows, self.out_features, self.k, self.stored_k);
        let weight = (self.format, self.class, self.gated, self.row_scale, self.k_order, self.weight_fits_f16);
        let dense = (self.x, self.norm, self.x_precision, self.d, self.c, self.residual, self.residual_in_d);
        (sizes, weight, dense, &self.segments, self.bias, self.token_scale, self.activation, self.batch_invariant)
            .hash(state);
        (self.alpha.to_bits(), self.beta.to_bits()).hash(state);
    }
}
