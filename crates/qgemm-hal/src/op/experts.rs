//! `experts`: MoE grouped GEMM. Each row of X is multiplied
//! with the weight of its expert.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use qgemm_formats::DType;

use super::dense::Dense;
use super::dequantize::CheckedDequantize;
use super::expert_lists::list_parts;
use super::gemm::{COUNTER_BYTES, CheckedGemm, GemmSpec, TileConfig, XPlaneRegions, XPlanes, XRegion};
use super::norm::CheckedNorm;
use super::quantize::CheckedQuantize;
use super::{Operation, operands};
use crate::caps::Math;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};
use crate::operands::Portion;

/// Alignment of workspace parts, in bytes.
const ALIGNMENT: usize = 256;

operands! {
    /// Operands of `experts`.
    pub enum ExpertOperand {
        /// Activations, or the codes of quantized activations.
        X: "x" Read,
        /// Packed weights of all experts, one after the other.
        W: "the weights" Constant,
        /// Row scales of every expert, f32.
        RowScale: "the row scales" Constant,
        /// Stored column → input feature for each expert, padded with
        /// `NO_COLUMN` to whole k-tiles.
        KOrder: "the column orders" Constant,
        /// C.
        C: "c" Read,
        /// The bias of every expert.
        Bias: "the biases" Read,
        /// Row factors, f32.
        TokenScale: "the row factors" Read,
        /// Residual.
        Residual: "the residual" Read,
        /// Output.
        D: "d" Write,
        /// Offsets, counts or expert ids, depending on [`ExpertForm`].
        Index: "the index" Read,
        /// Router weight of each slot for the combine step, f32.
        RouterWeights: "the router weights" Read,
        /// Fault status, two `u32`: an [`ExpertFault`] and its position.
        Status: "the status" Write,
        /// Slots of each expert: see [`CheckedExperts::lists`].
        Lists: "the lists" Read,
        /// Scratch memory passed between steps.
        Workspace: "the workspace" Accumulate,
        /// Products of all slots before the combine step,
        /// f32; part of the workspace.
        Products: "the slots' products" Read,
        /// Gamma of the norm before the products.
        Gamma: "gamma" Constant,
        /// Beta of the norm before the products.
        Beta: "beta" Constant,
        /// Scales of a quantized X, by block or by token.
        XScales: "the scales of x" Read,
        /// Factor of each token of a quantized X, or
        /// one for all of X; f32.
        XPlaneFactors: "the factors of x" Read,
        /// X block sums, with scales applied.
        XSums: "the sums of x" Read,
    }
}

spec! {
    /// Kernel identity keys of the steps around the product.
    pub struct ExpertStepSpec {
        /// The step.
        step: ExpertStep,
    }
}

/// A step around the product of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertStep {
    /// Sum of a token's products.
    Combine,
    /// Rows of a quantized X in the order of the expert lists.
    Gather,
    /// Conversion of X.
    Convert {
        /// Element type of X.
        x: DType,
        /// Element type of the converted rows.
        d: DType,
    },
}

impl ExpertStep {
    fn all() -> impl Iterator<Item = Self> {
        let convert = DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| Self::Convert { x, d }));
        [Self::Combine, Self::Gather].into_iter().chain(convert)
    }
}

impl fmt::Display for ExpertStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Combine => f.write_str("combine"),
            Self::Gather => f.write_str("gather"),
            Self::Convert { x, d } => write!(f, "convert_{x}_{d}"),
        }
    }
}

impl FromStr for ExpertStep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::all().find(|step| step.to_string() == text).ok_or_else(|| format!("`{text}` is no step around a product"))
    }
}

/// How rows are assigned to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertForm {
    /// Rows sorted by expert. The index holds `u32` offsets
    /// `[experts + 1]`: expert `e` has rows `offsets[e]..offsets[e + 1]`.
    /// Offsets ascend and are clamped to the number of rows.
    Contiguous,
    /// A fixed capacity for each expert. The index holds `u32` counts
    /// `[experts]`: expert `e` uses its first `counts[e]` rows.
    Masked {
        /// Rows of an expert.
        capacity: usize,
    },
    /// `top_k` slots for each token. The index holds the
    /// `i32` expert id of each slot.
    Indexed {
        /// Slots of a token.
        top_k: usize,
        /// Whether X has a row for each slot; otherwise the slots
        /// of a token share its row.
        x_per_slot: bool,
    },
}

impl ExpertForm {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ExpertForm::Contiguous => "contiguous",
            ExpertForm::Masked { .. } => "masked",
            ExpertForm::Indexed { .. } => "indexed",
        }
    }
}

/// Faults in an index. The affected rows are skipped;
/// all others are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ExpertFault {
    /// The id of this slot is negative or too large.
    Id = 1,
    /// This offset is below the previous one or beyond the rows.
    Offset = 2,
    /// The count of this expert exceeds the capacity.
    Count = 3,
    /// The router weight of this slot is NaN.
    RouterWeight = 4,
}

impl ExpertFault {
    /// All faults.
    pub const ALL: [Self; 4] = [Self::Id, Self::Offset, Self::Count, Self::RouterWeight];
}

/// Combine step: the weighted sum of a token's slots in slot
/// order, in f32:
/// `D[t] = Σj weights[t, j] · v[t, j] + residual[t]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Combine {
    /// D, one row for each token.
    pub d: Dense,
    /// Residual, one row for each token.
    pub residual: Option<Dense>,
}

/// MoE grouped GEMM: `D[r] = activation(v) + residual[r]`,
/// with `v` as in [`CheckedGemm`] for row `r` and its
/// expert; validated by the API.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CheckedExperts {
    /// The product of one expert. Its `m` counts all rows of
    /// D, and of X unless slots share rows. With [`CheckedExperts::combine`],
    /// its D is the contiguous f32 products of the slots.
    pub each: CheckedGemm,
    /// Experts; at least 1.
    pub experts: usize,
    /// Experts that rows are routed to: [`CheckedExperts::experts`], or more
    /// where slots of others have no row here (expert parallelism).
    pub routed_to: usize,
    /// Rows of W between experts: a multiple of
    /// [`EXPERT_ROWS`](qgemm_formats::EXPERT_ROWS), or 0 when all
    /// experts share one weight and bias.
    pub row_pitch: usize,
    /// How rows are assigned to experts.
    pub form: ExpertForm,
    /// Combine step for the slots of a token; [`ExpertForm::Indexed`] only.
    pub combine: Option<Combine>,
    /// Whether a run reports index faults in its status. Faulty
    /// rows are skipped in any case.
    pub checks_index: bool,
    /// Whether the source of the ids also provides the slots of
    /// each expert; [`ExpertForm::Indexed`] only. The lists are `u32`,
    /// laid out as in [`list_parts`].
    pub lists: bool,
    /// Whether the index is ready before launch: kernels may
    /// then read it, and prefetch weights by it, before earlier
    /// work of the stream is done.
    pub index_ready: bool,
}

impl CheckedExperts {
    /// Rows of X.
    pub fn x_rows(&self) -> usize {
        match self.form {
            ExpertForm::Indexed { top_k, x_per_slot: false } => self.each.m / top_k,
            _ => self.each.m,
        }
    }

    /// Tokens: rows of D after the combine step.
    pub fn tokens(&self) -> usize {
        match self.form {
            ExpertForm::Indexed { top_k, .. } => self.each.m / top_k,
            _ => self.each.m,
        }
    }

    /// The operation for a portion of the tokens. Unchanged for
    /// [`ExpertForm::Masked`], whose counts determine the rows.
    pub fn of_portion(&self, portion: Option<Portion>) -> Self {
        let m = match (portion, self.form) {
            (None, _) | (_, ExpertForm::Masked { .. }) => self.each.m,
            (Some(portion), _) => portion.rows(self.each.m),
        };
        Self { each: CheckedGemm { m, ..self.each.clone() }, ..self.clone() }
    }

    /// The norm before the products, if any.
    pub fn norm_prologue(&self) -> Option<CheckedNorm> {
        Some(CheckedNorm { rows: self.x_rows(), ..self.each.norm_prologue()? })
    }

    /// The dequantization step and the operation after it, as in
    /// [`CheckedGemm::dequantized`]. `None` when X is not quantized.
    pub fn dequantized(&self) -> Option<(Self, CheckedDequantize)> {
        let (each, step) = self.each.dequantized()?;
        Some((Self { each, ..self.clone() }, CheckedDequantize { rows: self.x_rows(), ..step }))
    }

    /// The steps that quantize X as far as its precision permits,
    /// each with the operation after it, as in
    /// [`CheckedGemm::quantized`]. None when a norm writes X.
    pub fn quantized(&self) -> impl Iterator<Item = (Self, CheckedQuantize)> + '_ {
        let is_given = self.each.norm.is_none();
        self.each.quantized().filter(move |_| is_given).map(|of_each| self.of_quantized(of_each))
    }

    fn of_quantized(&self, (each, step): (CheckedGemm, CheckedQuantize)) -> (Self, CheckedQuantize) {
        (Self { each, ..self.clone() }, CheckedQuantize { rows: self.x_rows(), ..step })
    }

    /// The operation that the families of `plan` see: this one, or
    /// the one after the step that dequantizes or quantizes X.
    pub fn product(&self, plan: &ExpertsPlan) -> Cow<'_, Self> {
        let plain = plan.dequantized.and_then(|_| self.dequantized()).map(|(product, _)| product);
        let quantized = plan.quantized.and_then(|regions| self.each.quantized_to(regions.format));
        let quantized = quantized.map(|of_each| self.of_quantized(of_each).0);
        plain.or(quantized).map_or(Cow::Borrowed(self), Cow::Owned)
    }

    /// The step that quantizes X before the kernels of
    /// `plan`, and its output regions.
    pub fn quantize_step(&self, plan: &ExpertsPlan) -> Option<(CheckedQuantize, XPlaneRegions)> {
        let regions = plan.quantized?;
        self.each.quantized_to(regions.format).map(|of_each| (self.of_quantized(of_each).1, regions))
    }

    /// Entries of the index.
    pub fn index_len(&self) -> usize {
        match self.form {
            ExpertForm::Contiguous => self.experts + 1,
            ExpertForm::Masked { .. } => self.experts,
            ExpertForm::Indexed { .. } => self.each.m,
        }
    }

    /// [`list_parts`] for the slots.
    pub fn list_parts(&self) -> Option<[Range<usize>; 2]> {
        list_parts(self.experts, self.each.m)
    }

    /// Number of weights: one for each expert, or one shared weight.
    pub fn weights(&self) -> usize {
        if self.row_pitch == 0 { 1 } else { self.experts }
    }

    /// Expected number of experts with rows under uniform random routing.
    pub fn used_experts(&self) -> f64 {
        let (experts, rows) = (self.experts.max(1) as f64, self.each.m as f64);
        match self.form {
            ExpertForm::Masked { .. } => experts,
            _ => experts * (1.0 - (1.0 - 1.0 / self.routed_to.max(1) as f64).powf(rows)),
        }
    }

    /// Mean rows of an expert under uniform routing; at least 1.
    pub fn mean_rows(&self) -> usize {
        match self.form {
            ExpertForm::Masked { capacity } => capacity.max(1),
            _ => self.each.m.div_ceil(self.routed_to.max(1)).max(1),
        }
    }

    /// Expected rows of all experts under uniform routing.
    pub fn expected_rows(&self) -> f64 {
        self.each.m as f64 * self.experts as f64 / self.routed_to.max(1) as f64
    }

    /// Name in tables and messages: `gemm_nt_q4_k_f16_indexed`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{}_{}", self.each.kernel_name(family), self.form.name())
    }
}

/// A candidate kernel of `experts`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The tile of each product.
    pub tile: TileConfig,
    /// Whether slots of [`ExpertForm::Indexed`] are grouped by expert, which
    /// reads each weight once but needs expert lists. Otherwise each slot
    /// is a separate product. Kernels for other forms always group.
    pub grouped: bool,
    /// Workspace bytes of the kernels.
    pub scratch_bytes: usize,
    /// Whether the next launch starts only after all work
    /// before this product is done, so that it can
    /// prefetch what that work wrote.
    pub prefetches_early: bool,
}

impl ExpertsConfig {
    /// Identity of the product kernel.
    pub fn kernel_id(&self, op: &CheckedExperts) -> KernelId {
        let id = self.tile.kernel_id(op.each.format);
        match id.spec {
            Spec::Gemm(spec) => KernelId { spec: Spec::Experts(spec), ..id },
            _ => id,
        }
    }
}

/// A config with its workspace layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsPlan {
    /// The config.
    pub config: ExpertsConfig,
    /// Offset of the slot products in the
    /// workspace, a multiple of 256.
    pub products: usize,
    /// Bytes of the slot products; 0 without a combine step.
    pub product_bytes: usize,
    /// Region of a dequantized X.
    pub dequantized: Option<XRegion>,
    /// Regions of a quantized X.
    pub quantized: Option<XPlaneRegions>,
    /// Offset of the kernels' scratch memory, a multiple of 256.
    pub scratch: usize,
    /// Workspace bytes; 0 when none is needed.
    pub workspace_bytes: usize,
    /// Estimated seconds.
    pub estimate: f64,
}

impl ExpertsPlan {
    /// A plan with its layout and an estimate in seconds; `None`
    /// when the workspace size overflows.
    pub fn new(op: &CheckedExperts, config: ExpertsConfig, estimate: f64) -> Option<Self> {
        let after = |bytes: usize| bytes.checked_next_multiple_of(ALIGNMENT);
        let product_bytes = match op.combine {
            None => 0,
            Some(_) => op.each.m.checked_mul(op.each.out_features)?.checked_mul(op.each.d.dtype.bytes())?,
        };
        let products = usize::try_from(COUNTER_BYTES).ok()?;
        let scratch = after(products.checked_add(product_bytes)?)?;
        let end = scratch.checked_add(config.scratch_bytes)?;
        let workspace_bytes = if product_bytes + config.scratch_bytes == 0 { 0 } else { end };
        Some(Self {
            config,
            products,
            product_bytes,
            dequantized: None,
            quantized: None,
            scratch,
            workspace_bytes,
            estimate,
        })
    }

    /// Adds room for the output of `dequantize` at the
    /// end; `None` on overflow.
    pub fn with_dequantized(self, dequantize: &CheckedDequantize) -> Option<Self> {
        let reserved = usize::try_from(COUNTER_BYTES).ok()?;
        let region = dequantize.region(self.workspace_bytes.max(reserved).checked_next_multiple_of(ALIGNMENT)?);
        let bytes = dequantize.rows.checked_mul(region.row_bytes)?;
        Some(Self { dequantized: Some(region), workspace_bytes: region.x.checked_add(bytes)?, ..self })
    }
}

impl ExpertsPlan {
    /// Adds room for the output of `quantize` at the
    /// end; `None` on overflow.
    pub fn with_quantized(self, quantize: &CheckedQuantize) -> Option<Self> {
        let reserved = usize::try_from(COUNTER_BYTES).ok()?;
        let regions = XPlaneRegions::of(quantize, self.workspace_bytes.max(reserved))?;
        Some(Self { quantized: Some(regions), workspace_bytes: regions.all().end, ..self })
    }
}

/// Kernel identity keys of one product of `experts`.
pub type ExpertsSpec = GemmSpec;

impl Operation for CheckedExperts {
    type Operand = ExpertOperand;
    type Config = ExpertsConfig;
    type Plan = ExpertsPlan;
    const WORKSPACE: Option<ExpertOperand> = Some(ExpertOperand::Workspace);

    fn operands(&self) -> Vec<ExpertOperand> {
        use ExpertOperand as O;
        let each = &self.each;
        let residual = each.residual.is_some() || self.combine.is_some_and(|combine| combine.residual.is_some());
        let optional = [
            (each.row_scale, O::RowScale),
            (each.k_order, O::KOrder),
            (each.c.is_some(), O::C),
            (each.bias.is_some(), O::Bias),
            (each.token_scale, O::TokenScale),
            (residual, O::Residual),
            (self.combine.is_some(), O::RouterWeights),
            (self.checks_index, O::Status),
            (self.lists, O::Lists),
            (each.norm.is_some_and(|norm| norm.function.gamma.is_some()), O::Gamma),
            (each.norm.is_some_and(|norm| norm.function.beta.is_some()), O::Beta),
        ];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        let names = [O::XScales, O::XPlaneFactors, O::XSums];
        let planes = each.x.planes.iter().flat_map(|planes: &XPlanes| planes.operands_of(names));
        [O::X, O::W, O::Index, O::D].into_iter().chain(planes).chain(given).collect()
    }

    /// The weights of every expert that can have rows, plus X,
    /// D, C and the residual once each.
    fn traffic(&self) -> f64 {
        let each = &self.each;
        let used = self.weights().min(each.m) as f64;
        let rows = |dense: &Dense, rows: usize| (rows * each.out_features * dense.dtype.bytes()) as f64;
        let d = match &self.combine {
            Some(Combine { d, residual }) => {
                rows(d, self.tokens()) + residual.as_ref().map_or(0.0, |residual| rows(residual, self.tokens()))
            }
            None => rows(&each.d, each.m),
        };
        let read: f64 = each.c.iter().chain(&each.residual).map(|dense| rows(dense, each.m)).sum();
        used * each.weight_bytes() + self.x_rows() as f64 * each.x_row_bytes() + d + read
    }

    fn macs(&self) -> f64 {
        self.each.macs()
    }

    fn describe(&self) -> String {
        format!("{} products with {} experts, each {}", self.form.name(), self.experts, self.each.describe())
    }

    fn is_nothing(&self) -> bool {
        self.each.m == 0
    }

    fn config(plan: &ExpertsPlan) -> &ExpertsConfig {
        &plan.config
    }

    fn estimate(plan: &ExpertsPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &ExpertsPlan) -> KernelId {
        plan.config.kernel_id(self)
    }

    fn math(plan: &ExpertsPlan) -> Option<Math> {
        Some(plan.config.tile.math)
    }

    fn matrix_type(&self) -> Option<DType> {
        self.each.matrix_type()
    }

    fn workspace_bytes(&self, plan: &ExpertsPlan) -> usize {
        let own = plan.workspace_bytes;
        self.each.normed_regions(self.x_rows(), own).map_or(own, |regions| regions.all().end)
    }

    fn plan_name(&self, family: &str) -> String {
        self.kernel_name(family)
    }

    fn noop_config(&self) -> Result<ExpertsConfig, Unsupported> {
        let tile = self.each.noop_config()?;
        Ok(ExpertsConfig { tile, grouped: false, scratch_bytes: 0, prefetches_early: false })
    }
}
