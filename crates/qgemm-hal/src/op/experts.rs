//! `experts`: grouped products, in which each row of X is multiplied with the weight of one of many experts.

use std::borrow::Cow;
use std::ops::Range;

use super::dense::Dense;
use super::dequantize::CheckedDequantize;
use super::expert_lists::list_parts;
use super::gemm::{COUNTER_BYTES, CheckedGemm, TileConfig, XPlaneRegions, XPlanes, XRegion};
use super::norm::CheckedNorm;
use super::quantize::CheckedQuantize;
use super::{Operation, operands};
use crate::kernel_id::{KernelId, Name, Spec, spec};
use crate::operands::Portion;

/// What parts of a workspace are aligned to.
const ALIGNMENT: usize = 256;

operands! {
    /// What `experts` reads and writes.
    pub enum ExpertOperand {
        /// Activations; of quantized ones the codes.
        X: "x" Read,
        /// Codes and scales of all experts' weights in the device's layout, one expert after the other.
        W: "the weights" Constant,
        /// A factor for every stored row of every expert, in f32.
        RowScale: "the row scales" Constant,
        /// Stored column → input feature, of each expert, padded with `NO_COLUMN` to whole k-tiles.
        KOrder: "the column orders" Constant,
        /// C.
        C: "c" Read,
        /// The bias of every expert.
        Bias: "the biases" Read,
        /// Factors of the rows, in f32.
        TokenScale: "the row factors" Read,
        /// Residual.
        Residual: "the residual" Read,
        /// Output.
        D: "d" Write,
        /// Which rows are whose: offsets, counts or ids, by [`ExpertForm`].
        Index: "the index" Read,
        /// What each slot's product is multiplied with where those of a token are added up, in f32.
        RouterWeights: "the router weights" Read,
        /// What was wrong with the index, two `u32`: an [`ExpertFault`] and its place.
        Status: "the status" Write,
        /// The slots of each expert: see [`CheckedExperts::lists`].
        Lists: "the lists" Read,
        /// Memory for what one step leaves for the next.
        Workspace: "the workspace" Accumulate,
        /// The products of all slots before they are combined, in f32: a part of the workspace.
        Products: "the slots' products" Read,
        /// Factors of the columns of X, of a norm before the products.
        Gamma: "gamma" Constant,
        /// What such a norm adds to the columns of X.
        Beta: "beta" Constant,
        /// What blocks or tokens of a quantized X are scaled by.
        XScales: "the scales of x" Read,
        /// The factors of its tokens, or the one that is given for all of it, in f32.
        XPlaneFactors: "the factors of x" Read,
        /// The sums of its codes, scales included.
        XSums: "the sums of x" Read,
    }
}

spec! {
    /// What tells the kernels apart that a sequence has beside its product.
    pub struct ExpertStepSpec {
        /// What it does: `combine` slots.
        step: Name,
    }
}

/// How rows are given to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertForm {
    /// Rows are sorted by expert. The index has an offset, `u32`, for each expert and one more: expert `e` has rows
    /// `offsets[e]..offsets[e + 1]`. Offsets ascend; those beyond the rows count as their number.
    Contiguous,
    /// Every expert has room for so many rows, of which it uses the first `counts[e]`: a `u32` an expert.
    Masked {
        /// Rows of an expert.
        capacity: usize,
    },
    /// Every token has `top_k` slots, each with the id, `i32`, of an expert.
    Indexed {
        /// Slots of a token.
        top_k: usize,
        /// Whether X has a row for each slot; else those of a token share its row.
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

/// What kernels find wrong with an index. The rows concerned are left out; others are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ExpertFault {
    /// The id at this slot is negative, or there is no such expert.
    Id = 1,
    /// The offset at this place is below the one before, or beyond the rows.
    Offset = 2,
    /// The count of this expert is beyond its capacity.
    Count = 3,
    /// The router weight of this slot is NaN.
    RouterWeight = 4,
}

impl ExpertFault {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Id, Self::Offset, Self::Count, Self::RouterWeight];
}

/// The weighted sum of a token's slots, in their order, in f32: `D[t] = Σj weights[t, j] · v[t, j] + residual[t]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Combine {
    /// D, a row for each token.
    pub d: Dense,
    /// The residual, a row for each token.
    pub residual: Option<Dense>,
}

/// `D[r] = activation(v) + residual[r]`, with `v` of row `r` and its expert as in [`CheckedGemm`]; validated by the API.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CheckedExperts {
    /// The product of one expert. Its `m` is that of all rows: of D, and of X but where slots share rows. With
    /// [`CheckedExperts::combine`], its D is the slots' products, in f32 without gaps.
    pub each: CheckedGemm,
    /// Experts; at least 1.
    pub experts: usize,
    /// Rows of W from one expert to the next: a multiple of [`EXPERT_ROWS`](qgemm_formats::EXPERT_ROWS), or 0 where all have the same
    /// weight, and the same bias.
    pub row_pitch: usize,
    /// How rows are given to experts.
    pub form: ExpertForm,
    /// How the slots of a token are added up, where they are; only of [`ExpertForm::Indexed`].
    pub combine: Option<Combine>,
    /// Whether a run says in its status what is wrong with the index. What is wrong is left out in any case.
    pub checks_index: bool,
    /// Whether the slots of each expert are listed by who gives the ids; only of [`ExpertForm::Indexed`]. The lists are `u32`, as
    /// [`list_parts`] has them.
    pub lists: bool,
    /// Whether the index is there before a run is submitted: kernels may read it, and by it weights, before earlier work of the stream is
    /// done.
    pub settled_index: bool,
}

impl CheckedExperts {
    /// Rows of X.
    pub fn x_rows(&self) -> usize {
        match self.form {
            ExpertForm::Indexed { top_k, x_per_slot: false } => self.each.m / top_k,
            _ => self.each.m,
        }
    }

    /// Tokens: the rows of D where slots are combined.
    pub fn tokens(&self) -> usize {
        match self.form {
            ExpertForm::Indexed { top_k, .. } => self.each.m / top_k,
            _ => self.each.m,
        }
    }

    /// The operation for a portion of its tokens; of [`ExpertForm::Masked`], whose counts say how many there are, it stays as it is.
    pub fn of_portion(&self, portion: Option<Portion>) -> Self {
        let m = match (portion, self.form) {
            (None, _) | (_, ExpertForm::Masked { .. }) => self.each.m,
            (Some(portion), _) => portion.rows(self.each.m),
        };
        Self { each: CheckedGemm { m, ..self.each.clone() }, ..self.clone() }
    }

    /// The norm before the products; `None` where there is none.
    pub fn norm_prologue(&self) -> Option<CheckedNorm> {
        Some(CheckedNorm { rows: self.x_rows(), ..self.each.norm_prologue()? })
    }

    /// The step that makes plain numbers of a quantized X, and the operation behind it, as [`CheckedGemm::dequantized`] has both;
    /// `None` of an X that is plain.
    pub fn dequantized(&self) -> Option<(Self, CheckedDequantize)> {
        let (each, step) = self.each.dequantized()?;
        Some((Self { each, ..self.clone() }, CheckedDequantize { rows: self.x_rows(), ..step }))
    }

    /// The steps that quantize a plain X as far as its precision permits, each with the operation behind it, as
    /// [`CheckedGemm::quantized`] has both; none where a norm writes X.
    pub fn quantized(&self) -> impl Iterator<Item = (Self, CheckedQuantize)> + '_ {
        let is_given = self.each.norm.is_none();
        self.each.quantized().filter(move |_| is_given).map(|of_each| self.of_quantized(of_each))
    }

    fn of_quantized(&self, (each, step): (CheckedGemm, CheckedQuantize)) -> (Self, CheckedQuantize) {
        (Self { each, ..self.clone() }, CheckedQuantize { rows: self.x_rows(), ..step })
    }

    /// The operation that the families of `plan` see: this one, or that behind the step that makes X plain or quantizes it.
    pub fn product(&self, plan: &ExpertsPlan) -> Cow<'_, Self> {
        let plain = plan.dequantized.and_then(|_| self.dequantized()).map(|(product, _)| product);
        let quantized = plan.quantized.and_then(|regions| self.each.quantized_to(regions.format));
        let quantized = quantized.map(|of_each| self.of_quantized(of_each).0);
        plain.or(quantized).map_or(Cow::Borrowed(self), Cow::Owned)
    }

    /// The step that quantizes X before the kernels of `plan`, and where it writes.
    pub fn quantize_step(&self, plan: &ExpertsPlan) -> Option<(CheckedQuantize, XPlaneRegions)> {
        let regions = plan.quantized?;
        self.each.quantized_to(regions.format).map(|of_each| (self.of_quantized(of_each).1, regions))
    }

    /// Words of the index.
    pub fn index_len(&self) -> usize {
        match self.form {
            ExpertForm::Contiguous => self.experts + 1,
            ExpertForm::Masked { .. } => self.experts,
            ExpertForm::Indexed { .. } => self.each.m,
        }
    }

    /// [`list_parts`] of the slots.
    pub fn list_parts(&self) -> Option<[Range<usize>; 2]> {
        list_parts(self.experts, self.each.m)
    }

    /// Weights that there are: of all experts, or one that they share.
    pub fn weights(&self) -> usize {
        if self.row_pitch == 0 { 1 } else { self.experts }
    }

    /// Experts that have rows where each row goes to any expert alike: as many as are to be expected.
    pub fn used_experts(&self) -> f64 {
        let (experts, rows) = (self.experts.max(1) as f64, self.each.m as f64);
        match self.form {
            ExpertForm::Masked { .. } => experts,
            _ => experts * (1.0 - (1.0 - 1.0 / experts).powf(rows)),
        }
    }

    /// Rows that an expert has where all have as many; at least 1.
    pub fn mean_rows(&self) -> usize {
        match self.form {
            ExpertForm::Masked { capacity } => capacity.max(1),
            _ => self.each.m.div_ceil(self.experts).max(1),
        }
    }

    /// Name of a product of `family` in tables and messages: `gemm_nt_q4_k_f16_indexed`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{}_{}", self.each.kernel_name(family), self.form.name())
    }
}

/// What families offer of `experts`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The tile of each product.
    pub tile: TileConfig,
    /// Whether the slots of [`ExpertForm::Indexed`] are multiplied expert by expert, which reads each weight once and takes lists of
    /// slots; else each slot is multiplied by itself. Kernels of other forms always have the rows of one expert.
    pub grouped: bool,
    /// Bytes of the workspace that the kernels themselves want.
    pub scratch_bytes: usize,
    /// Whether the next launch may begin only once all work before this product is done: what that wrote is then settled for it.
    pub settles: bool,
}

impl ExpertsConfig {
    /// The identity of the kernel that multiplies.
    pub fn kernel_id(&self, op: &CheckedExperts) -> KernelId {
        let id = self.tile.kernel_id(op.each.format);
        match id.spec {
            Spec::Gemm(spec) => KernelId { spec: Spec::Experts(spec), ..id },
            _ => id,
        }
    }
}

/// A configuration with the layout of its workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsPlan {
    /// The configuration.
    pub config: ExpertsConfig,
    /// Where the slots' products begin in the workspace, a multiple of 256.
    pub products: usize,
    /// Their bytes; 0 where they are not combined.
    pub product_bytes: usize,
    /// A quantized X as plain numbers, for kernels that multiply no codes of its format.
    pub dequantized: Option<XRegion>,
    /// A plain X in codes and scales, for kernels that multiply codes.
    pub quantized: Option<XPlaneRegions>,
    /// Where the kernels' own part of the workspace begins, a multiple of 256.
    pub scratch: usize,
    /// Size of the workspace; 0 when nothing is kept in it.
    pub workspace_bytes: usize,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl ExpertsPlan {
    /// The plan of a configuration that is expected to take `estimate` seconds; `None` where the workspace's size overflows.
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

    /// The plan with room for what `dequantize` writes, behind all else, or `None` where the size overflows.
    pub fn with_dequantized(self, dequantize: &CheckedDequantize) -> Option<Self> {
        let reserved = usize::try_from(COUNTER_BYTES).ok()?;
        let region = dequantize.region(self.workspace_bytes.max(reserved).checked_next_multiple_of(ALIGNMENT)?);
        let bytes = dequantize.rows.checked_mul(region.row_bytes)?;
        Some(Self { dequantized: Some(region), workspace_bytes: region.x.checked_add(bytes)?, ..self })
    }
}

impl ExpertsPlan {
    /// The plan with room for what `quantize` writes, behind all else, or `None` where the size overflows.
    pub fn with_quantized(self, quantize: &CheckedQuantize) -> Option<Self> {
        let reserved = usize::try_from(COUNTER_BYTES).ok()?;
        let regions = XPlaneRegions::of(quantize, self.workspace_bytes.max(reserved))?;
        Some(Self { quantized: Some(regions), workspace_bytes: regions.all().end, ..self })
    }
}

impl Operation for CheckedExperts {
    const NAME: &'static str = "experts";
    type Operand = ExpertOperand;
    type Config = ExpertsConfig;
    type Plan = ExpertsPlan;

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

    /// The weights of as many experts as can have rows, and X, D, C and the residual once each.
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
}
