//! `gemm`: products of activations with a quantized or unquantized weight.

mod activation;
mod plan;
mod quantized_x;
mod work_tile;
mod workspace;
mod x_precision;

use std::hash::{Hash, Hasher};
use std::ops::Range;

use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, Encoding, Format, ScaleSpan, XFactor, XFormat};

pub use activation::{Activation, ClampedSwiglu, UnknownActivation};
pub use plan::{LaunchPlan, Schedule, StreamK, TileConfig, XPrologue};
pub use quantized_x::XPlanes;
pub use work_tile::WorkTile;
pub(crate) use workspace::COUNTER_BYTES;
pub use workspace::{WorkspaceLayout, XPlaneRegions, XRegion};
pub use x_precision::XPrecision;

use super::convert::CheckedConvert;
use super::dense::Dense;
use super::norm::{CheckedNorm, NormFunction, QuantizedD, XOverwrite};
use super::{Operation, operands};
use crate::caps::Math;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Name, spec};

operands! {
    /// Operands of `gemm`.
    pub enum GemmOperand {
        /// Activations, or the codes of quantized activations.
        X: "x" Read,
        /// Packed weight.
        W: "the weight" Constant,
        /// Row scales of W, f32.
        RowScale: "the row scales" Constant,
        /// Stored column of W → input feature, u32, padded with
        /// `NO_COLUMN` to whole k-tiles.
        KOrder: "the column order" Constant,
        /// C.
        C: "c" Read,
        /// Bias.
        Bias: "the bias" Read,
        /// Token scales, f32.
        TokenScale: "the token scales" Read,
        /// Residual.
        Residual: "the residual" Read,
        /// Output.
        D: "d" Write,
        /// Scratch memory passed between steps; zeroed before the first launch.
        Workspace: "the workspace" Accumulate,
        /// Factor of each token's accumulators, f32; part of the workspace.
        XFactor: "the tokens' factors" Read,
        /// Split-K partial sums; part of the workspace.
        Partials: "the partial accumulators" Write,
        /// Arrival counters of split tiles; part of the workspace.
        Counters: "the counters" Accumulate,
        /// Scales of a quantized X, by block or by token.
        XScales: "the scales of x" Read,
        /// Factor of each token of a quantized X, or
        /// one for all of X; f32.
        XPlaneFactors: "the factors of x" Read,
        /// X block sums, with scales applied.
        XSums: "the sums of x" Read,
        /// Gamma of the norm before the product.
        Gamma: "gamma" Constant,
        /// Beta of the norm before the product.
        Beta: "beta" Constant,
        /// Outputs of segment 2.
        D2: "d of segment 2" Write,
        /// Outputs of segment 3.
        D3: "d of segment 3" Write,
        /// Outputs of segment 4.
        D4: "d of segment 4" Write,
    }
}

spec! {
    /// Kernel identity keys of `gemm`.
    pub struct GemmSpec {
        /// Main loop: variant and mechanism, such as `sm90_wgmma_ws`.
        main_loop: Name,
        /// Format of W.
        w: Format,
        /// Format in which X is multiplied.
        x: XFormat,
        /// N tile: stored rows of W for each CTA.
        n: u32,
        /// M tile: tokens for each CTA.
        m: u32,
        /// K elements of a k-tile.
        k: u32,
        /// Threads of a CTA.
        threads: u32,
        /// Warps along N.
        warps_n: u32,
        /// Warp groups that slice K.
        k_groups: u32,
        /// CTAs per unit (SM, core).
        ctas: u32,
        /// Pipeline stages.
        stages: u32,
    }
}

/// X operand: format, strides in elements, and alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XOperand {
    /// Format in memory.
    pub format: XFormat,
    /// Token stride in elements.
    pub row_stride: u64,
    /// Column stride in elements: 1 for row-major.
    pub col_stride: u64,
    /// Whether every token is contiguous and 16-byte aligned.
    pub aligned16: bool,
    /// Planes of a quantized X. The strides above are
    /// then those of the codes.
    pub planes: Option<XPlanes>,
}

impl XOperand {
    /// X as a dense matrix; `None` when X is quantized.
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

/// The norm before the product, with its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormedX {
    /// The norm function.
    pub function: NormFunction,
    /// Input of the norm, row-major.
    pub x: Dense,
}

impl GemmOperand {
    /// Operands of the segments after the first, which is D.
    pub const OF_SEGMENTS: [Self; Segment::MOST - 1] = [Self::D2, Self::D3, Self::D4];
}

/// A contiguous range of output features that is written
/// to another matrix than D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// First feature, a multiple of [`Segment::STEP`]. The segment ends at the
    /// next one, or at the last feature.
    pub first: usize,
    /// Its output matrix.
    pub d: Dense,
}

impl Segment {
    /// Maximum segments of a product, D included.
    pub const MOST: usize = 4;
    /// Segment borders are multiples of this: every layout keeps 16 rows
    /// of W together, and kernels store their outputs together.
    pub const STEP: usize = 16;
}

/// GEMM with epilogue: `D[M, out_features] = activation(v) + residual` with
/// `v = alpha · token_scale · X·Wᵀ + beta · C + bias`.
///
/// For a gated pair:
/// `activation(v of the gate) · v of the up + residual`; of a
/// [`ClampedSwiglu`] both are clamped.
/// Validated by the API.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedGemm {
    /// Tokens (rows of X); at least 1.
    pub m: usize,
    /// Stored rows of W, at least 1: the output features, or
    /// a multiple of 16 for a gated pair (see
    /// [`HostWeight::gated_pair`](qgemm_formats::HostWeight::gated_pair)).
    pub stored_rows: usize,
    /// Output features (columns of D): the stored rows, or
    /// half of them for a gated pair.
    pub out_features: usize,
    /// Whether W is a gated pair.
    pub gated: bool,
    /// Input features (columns of X); at least 1.
    pub k: usize,
    /// Length of a stored row of W. It differs from `k`
    /// only with act-order padding.
    pub stored_k: usize,
    /// Format of W.
    pub format: Format,
    /// Layout of W.
    pub class: FragmentLayout,
    /// Whether W has row scales.
    pub row_scale: bool,
    /// Whether W's columns are permuted (act-order).
    pub k_order: bool,
    /// Whether W's values may be rounded to f16
    /// ([`HostWeight::fits_f16`](qgemm_formats::HostWeight::fits_f16)).
    pub weight_fits_f16: bool,
    /// X as it is multiplied: the output of
    /// the norm, if any.
    pub x: XOperand,
    /// The norm before the product. Its launch comes
    /// before those of families.
    pub norm: Option<NormedX>,
    /// Permitted rounding of X.
    pub x_precision: XPrecision,
    /// D, with the outputs before the first segment, or all
    /// outputs without segments.
    pub d: Dense,
    /// Further output segments in feature order, at most
    /// [`Segment::MOST`]` - 1`. Not supported for a gated pair.
    pub segments: Vec<Segment>,
    /// C; `beta` is 0 without it.
    pub c: Option<Dense>,
    /// Element type of the bias: contiguous, one element for each feature.
    /// For a gated pair, first the gate's bias, then the up's.
    pub bias: Option<DType>,
    /// Whether every token has an f32 scale.
    pub token_scale: bool,
    /// The residual, added last.
    pub residual: Option<Dense>,
    /// Whether D initially holds the residual. `residual` then describes D,
    /// and there is no separate operand.
    pub residual_in_d: bool,
    /// Scale of the product.
    pub alpha: f32,
    /// Scale of C.
    pub beta: f32,
    /// Activation, applied before the residual is added. For a gated
    /// pair it applies to the gate.
    pub activation: Activation,
    /// Fixes family and K partition for all M, so that a
    /// row's bits do not depend on its batch.
    pub batch_invariant: bool,
}

impl CheckedGemm {
    /// Elements of the bias, if any.
    pub fn bias_len(&self) -> usize {
        if self.gated { 2 * self.out_features } else { self.out_features }
    }

    /// Every output with its features and matrix: D, then the segments.
    pub fn outputs(&self) -> impl Iterator<Item = (GemmOperand, Range<usize>, Dense)> + '_ {
        let end = move |segment: usize| self.segments.get(segment).map_or(self.out_features, |next| next.first);
        let others = self.segments.iter().zip(GemmOperand::OF_SEGMENTS).enumerate();
        let others = others.map(move |(i, (segment, operand))| (operand, segment.first..end(i + 1), segment.d));
        std::iter::once((GemmOperand::D, 0..end(0), self.d)).chain(others)
    }

    /// Name in tables and messages: `gemm_nt_q4_k_f16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_nt_{}_{}", self.format.name, self.x.format)
    }

    /// X as a dense matrix.
    ///
    /// # Errors
    /// A refusal for kernels that do not support quantized X.
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

    /// The norm before the product, if any. Its output is the
    /// X that the product multiplies, with [`CheckedGemm::m`] rows.
    pub fn norm_prologue(&self) -> Option<CheckedNorm> {
        let NormedX { function, x } = self.norm?;
        let quantized = self.x.planes.map(|planes| QuantizedD { format: self.x.format, planes });
        let (d, d_columns) = match quantized {
            Some(QuantizedD { planes, .. }) => {
                let columns = planes.parts.columns(self.k);
                (Dense::rows_of(DType::F32, columns), columns)
            }
            // Pad to whole groups of columns; columns beyond X are 0.
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
            x_overwrite: XOverwrite::Own,
            gathers: false,
            groups: 1,
            gate: None,
        })
    }

    /// The norm that runs before the kernels of `plan`, with its
    /// output regions. `None` when the kernels normalize X themselves.
    pub fn norm_before(&self, plan: &LaunchPlan) -> Option<(CheckedNorm, XPlaneRegions)> {
        let regions = self.normed_regions_of(plan)?;
        Some((self.norm_prologue()?, regions))
    }

    /// Output regions of that norm in the workspace.
    pub fn normed_regions_of(&self, plan: &LaunchPlan) -> Option<XPlaneRegions> {
        if plan.config.normalizes_x { None } else { self.normed_regions(self.m, plan.workspace.bytes) }
    }

    /// Regions of `rows` normalized rows, or of their planes, after
    /// the first `bytes` bytes of a workspace. `None` without a
    /// norm, or when the size overflows.
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

    /// The X prologue of `plan`; `None` when its
    /// kernel reads X in place.
    ///
    /// D of the conversion has one row for each token, and
    /// whole k-tiles of columns in the order in which W stores
    /// them. [`WorkspaceLayout::x`] is its location.
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

    /// The operation after `prologue`, with X as the prologue wrote it.
    pub fn after(&self, prologue: &CheckedConvert) -> Self {
        let columns = prologue.d_columns;
        Self { k: columns, stored_k: columns, k_order: false, x: prologue.d.into(), ..self.clone() }
    }
}

impl Operation for CheckedGemm {
    type Operand = GemmOperand;
    type Config = TileConfig;
    type Plan = LaunchPlan;
    const WORKSPACE: Option<GemmOperand> = Some(GemmOperand::Workspace);

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
        // The norm's output is in the workspace,
        // except for a given factor.
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

    fn describe(&self) -> String {
        let Self { m, out_features, k, format, x, d, class, .. } = self;
        let gated = if self.gated { "gated pair of " } else { "" };
        let (x, d, precision) = (x.format, d.dtype, self.x_precision.name());
        let norm = self.norm.map_or(String::new(), |norm| format!(" behind a norm ({})", norm.function.kind));
        format!("{m} x {out_features} x {k}, {gated}{format} ({class:?}), X {x}{norm} (precision {precision}), D {d}")
    }

    fn is_nothing(&self) -> bool {
        self.m == 0
    }

    fn config(plan: &LaunchPlan) -> &TileConfig {
        &plan.config
    }

    fn estimate(plan: &LaunchPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &LaunchPlan) -> KernelId {
        plan.config.kernel_id(self.format)
    }

    fn math(plan: &LaunchPlan) -> Option<Math> {
        Some(plan.config.math)
    }

    fn matrix_type(&self) -> Option<DType> {
        let of_x = match (self.x.format, self.x_precision) {
            (XFormat::Plain(DType::F32), XPrecision::Exact | XPrecision::Tf32 | XPrecision::Bf16x3) => return None,
            (XFormat::Plain(DType::F32), XPrecision::BF16) => DType::BF16,
            (XFormat::Plain(dtype), _) if dtype != DType::F32 => dtype,
            _ => DType::F16,
        };
        // Plain weights are multiplied with X of their type alone.
        match self.format.desc().encoding {
            Encoding::Plain(of_w) if of_w != of_x => None,
            _ => Some(of_x),
        }
    }

    fn workspace_bytes(&self, plan: &LaunchPlan) -> usize {
        self.normed_regions_of(plan).map_or(plan.workspace.bytes, |regions| regions.all().end)
    }

    fn plan_name(&self, family: &str) -> String {
        self.kernel_name(family)
    }

    fn noop_config(&self) -> Result<TileConfig, Unsupported> {
        Ok(TileConfig {
            family: "noop",
            main_loop: Name::new("noop"),
            variant: None,
            math: Math::FmaF32,
            tile_n: 64,
            tile_m: 64,
            tile_k: 64,
            threads: 1,
            ctas_per_unit: 1,
            cluster: 1,
            schedule: Schedule::Grid,
            max_splits: 4,
            warps_n: 1,
            k_groups: 1,
            stages: 1,
            shared_bytes: 0,
            x_format: self.plain_x()?.dtype.into(),
            x_prologue: None,
            rounded_weights: None,
            normalizes_x: false,
            efficiency: (1000, 1000),
        })
    }
}

/// Plan cache key: NaN factors compare equal to themselves.
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
