//! `merge_attention`: results of attention to parts of the keys, merged
//! by their log-sum-exp.

use qgemm_formats::DType;

use super::attention::HeadRows;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Most parts.
pub const MOST_PARTS: usize = 256;
/// Largest head dimension.
pub const MOST_DIM: usize = 576;

/// Merge of partial attention results, validated by the API. With
/// `m` the maximum of a row's log-sum-exps:
/// `w_p = exp(lse_p − m)`, `D = Σ w_p D_p / Σ w_p`,
/// `lse = m + ln Σ w_p`.
///
/// Arithmetic is f32, in the order of the parts, rounded once. A part
/// whose weight rounds to 0 is not used, whatever its numbers are.
/// Without any weight, D is 0 and the log-sum-exp −∞. A log-sum-exp
/// that is NaN or +∞ makes its row NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedMergeAttention {
    /// Parts; 1 to [`MOST_PARTS`].
    pub parts: usize,
    /// Tokens.
    pub tokens: usize,
    /// Heads; at least 1.
    pub heads: usize,
    /// Head dimension: a multiple of 8 up to [`MOST_DIM`].
    pub dim: usize,
    /// Element type of the partial results.
    pub dtype: DType,
    /// Part stride of the partial results, in elements.
    pub part_stride: u64,
    /// Layout of a part's results.
    pub partial: HeadRows,
    /// Element type of D.
    pub d_dtype: DType,
    /// Layout of D; rows do not overlap.
    pub d: HeadRows,
    /// Whether the log-sum-exp is written.
    pub lse: bool,
}

operands! {
    /// Operands of `merge_attention`.
    pub enum MergeAttentionOperand {
        /// Results of the parts, `[parts, tokens, heads, dim]`.
        Partial: "the partial results" Read,
        /// Log-sum-exps of the parts, f32 `[parts, tokens, heads]`.
        PartialLse: "the partial log-sum-exps" Read,
        /// Merged results, `[tokens, heads, dim]`.
        D: "d" Write,
        /// Log-sum-exp, f32 `[tokens, heads]`.
        Lse: "the log-sum-exp" Write,
    }
}

spec! {
    /// Kernel identity keys of `merge_attention`. The type of D is a
    /// run-time parameter.
    pub struct MergeAttentionSpec {
        /// Element type of the partial results.
        from: DType,
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeAttentionConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeAttentionPlan {
    /// The config.
    pub config: MergeAttentionConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedMergeAttention {
    /// Name in tables and messages: `merge_attention_f32_bf16`.
    pub fn kernel_name(&self) -> String {
        format!("merge_attention_{}_{}", self.dtype, self.d_dtype)
    }

    /// The kernel of `family`.
    pub fn kernel_of(&self, family: &'static str, variant: Option<crate::Variant>) -> KernelId {
        KernelId::new(family, variant, Spec::MergeAttention(MergeAttentionSpec { from: self.dtype }))
    }

    /// Rows of D: a head of a token each.
    pub fn rows(&self) -> usize {
        self.tokens * self.heads
    }
}

impl Operation for CheckedMergeAttention {
    type Operand = MergeAttentionOperand;
    type Config = MergeAttentionConfig;
    type Plan = MergeAttentionPlan;

    fn operands(&self) -> Vec<MergeAttentionOperand> {
        use MergeAttentionOperand as O;
        [O::Partial, O::PartialLse, O::D].into_iter().chain(self.lse.then_some(O::Lse)).collect()
    }

    fn traffic(&self) -> f64 {
        let lse = DType::F32.bytes();
        let read = self.parts * (self.dim * self.dtype.bytes() + lse);
        let written = self.dim * self.d_dtype.bytes() + if self.lse { lse } else { 0 };
        self.rows() as f64 * (read + written) as f64
    }

    fn macs(&self) -> f64 {
        self.rows() as f64 * (self.parts * self.dim) as f64
    }

    fn describe(&self) -> String {
        let Self { parts, tokens, heads, dim, dtype, d_dtype, .. } = self;
        let lse = if self.lse { ", with log-sum-exp" } else { "" };
        format!("{parts} parts of {tokens} tokens x {heads} heads x {dim} from {dtype} to {d_dtype}{lse}")
    }

    fn is_nothing(&self) -> bool {
        self.tokens == 0
    }

    fn config(plan: &MergeAttentionPlan) -> &MergeAttentionConfig {
        &plan.config
    }

    fn estimate(plan: &MergeAttentionPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &MergeAttentionPlan) -> KernelId {
        plan.config.kernel
    }

    fn plan_name(&self, _: &str) -> String {
        self.kernel_name()
    }

    fn noop_config(&self) -> Result<MergeAttentionConfig, Unsupported> {
        Ok(MergeAttentionConfig { kernel: self.kernel_of("noop", None), efficiency: 1000 })
    }
}

memory_bound!(CheckedMergeAttention, MergeAttentionConfig, MergeAttentionPlan, |_| 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_read_once() {
        use MergeAttentionOperand as O;
        let rows = HeadRows { token_stride: 256, head_stride: 64, aligned: true };
        let op = CheckedMergeAttention {
            parts: 3,
            tokens: 5,
            heads: 4,
            dim: 64,
            dtype: DType::F32,
            part_stride: 1280,
            partial: rows,
            d_dtype: DType::BF16,
            d: rows,
            lse: false,
        };
        assert_eq!(op.operands(), [O::Partial, O::PartialLse, O::D]);
        assert_eq!(op.traffic(), (20 * (3 * (256 + 4) + 128)) as f64);
        assert_eq!((op.macs(), op.kernel_name().as_str()), ((20 * 3 * 64) as f64, "merge_attention_f32_bf16"));
        let with_lse = CheckedMergeAttention { lse: true, ..op };
        assert_eq!((with_lse.operands().len(), with_lse.traffic() - op.traffic()), (4, 80.0));
        assert!(CheckedMergeAttention { tokens: 0, ..op }.is_nothing());
    }
}
