//! `sampling`: a token for each row of logits.

pub mod arithmetic;
mod parameters;

pub use parameters::{RefusedParameter, SamplingParameters};

use qgemm_formats::DType;

use super::dense::Dense;
use super::gemm::WorkspaceLayout;
use super::{Operation, memory_bound, operands};
use crate::axis::axis;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};
use crate::sequence::LaunchStep;

/// Maximum rows.
pub const MOST_ROWS: usize = 1 << 16;
/// Maximum tokens of a vocabulary: sums of weights have room for all.
pub const MOST_VOCABULARY: usize = 1 << 20;
/// Maximum alternatives of a row.
pub const MOST_ALTERNATIVES: usize = 32;
/// Id of a row without a token, and of a missing alternative.
pub const NO_TOKEN: u32 = u32::MAX;
/// Words of a row's status: code, token or parameter, bits of its value, 0.
pub const STATUS_WORDS: usize = 4;
/// [`SamplingOperand::Status`]: the row has a token.
pub const STATUS_FINE: u32 = 0;
/// [`SamplingOperand::Status`]: a logit is NaN or +∞.
pub const STATUS_NON_FINITE: u32 = 1;
/// [`SamplingOperand::Status`]: every token is excluded.
pub const STATUS_NO_CANDIDATE: u32 = 2;
/// [`SamplingOperand::Status`]: a parameter is invalid.
pub const STATUS_PARAMETER: u32 = 3;

/// Earlier tokens of a row, which the repetition penalty applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EarlierTokens {
    /// Maximum ids of a row; at least 1. Longer lengths are clamped.
    pub capacity: usize,
    /// Ids between rows; at least the capacity.
    pub row_stride: u64,
}

/// Sampling of a token for each row of logits; validated by the API.
///
/// A token's weight is `exp((logit − best) / temperature)`, an
/// integer multiple of 2⁻³¹. [`arithmetic`] defines it and the
/// sums, so that every device chooses the same token. The random word
/// picks a part of the kept tokens' total weight; the token is the
/// first one in order of ids whose running sum exceeds that part.
///
/// Log-probabilities are those of the logits, before any parameter
/// applies. A row that fails has the id [`NO_TOKEN`] and a
/// log-probability of −∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedSampling {
    /// Rows of logits; 1 to [`MOST_ROWS`] wherever kernels are chosen.
    pub rows: usize,
    /// Logits of a row; 1 to [`MOST_VOCABULARY`].
    pub vocabulary: usize,
    /// Logits, f32 `[rows, vocabulary]`, row-major.
    pub logits: Dense,
    /// Earlier tokens, if there is a repetition penalty.
    pub earlier: Option<EarlierTokens>,
    /// Whether log-probabilities of the tokens are written.
    pub log_probabilities: bool,
    /// Most likely tokens that are listed with their
    /// log-probabilities; at most [`MOST_ALTERNATIVES`]. They need
    /// log-probabilities.
    pub alternatives: usize,
}

operands! {
    /// Operands of `sampling`.
    pub enum SamplingOperand {
        /// Logits.
        Logits: "the logits" Read,
        /// [`SamplingParameters::words`] of each row.
        Parameters: "the parameters" Read,
        /// Earlier tokens of each row: u32.
        Earlier: "the earlier tokens" Read,
        /// Number of earlier tokens of each row: u32.
        EarlierLengths: "the lengths of the earlier tokens" Read,
        /// Sampled tokens: u32 `[rows]`.
        Ids: "the ids" Write,
        /// Sampled tokens, read by a later step.
        SampledIds: "the sampled ids" Read,
        /// Log-probabilities of the sampled tokens: f32 `[rows]`.
        LogProbabilities: "the log-probabilities" Write,
        /// Most likely tokens: u32 `[rows, alternatives]`, best first.
        AlternativeIds: "the alternatives' ids" Write,
        /// Their log-probabilities: f32 `[rows, alternatives]`.
        AlternativeLogProbabilities: "the alternatives' log-probabilities" Write,
        /// First fault of each row: see [`STATUS_WORDS`].
        Status: "the status" Write,
        /// Orders of the penalized logits.
        Workspace: "the workspace" Accumulate,
    }
}

axis! {
    /// Kernel step of `sampling`.
    pub enum SamplingStep: "step of a sampling" {
        /// Orders of the penalized logits.
        Penalize: "penalize",
        /// Choice of the tokens.
        Sample: "sample",
        /// Log-probabilities.
        LogProbabilities: "log_probabilities",
    }
}

spec! {
    /// Kernel identity keys of `sampling`.
    pub struct SamplingSpec {
        /// The step.
        step: SamplingStep,
    }
}

/// Candidate kernels of a family, with what the
/// scheduler ranks them by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingConfig {
    /// The kernel that samples.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Workspace bytes; 0 when none is needed.
    pub workspace_bytes: usize,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingPlan {
    /// The config.
    pub config: SamplingConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedSampling {
    /// Steps of a run in launch order.
    pub fn steps(&self) -> Vec<SamplingStep> {
        use SamplingStep as S;
        let all =
            [(self.earlier.is_some(), S::Penalize), (true, S::Sample), (self.log_probabilities, S::LogProbabilities)];
        all.into_iter().filter(|(runs, _)| *runs).map(|(_, step)| step).collect()
    }

    /// Binds a launch of `kind` to the operands of its kernel, for
    /// kernels that keep the penalized logits.
    pub fn bind(&self, step: LaunchStep, kind: SamplingStep) -> LaunchStep {
        use SamplingOperand as O;
        let keeps_orders = |step: LaunchStep| match self.earlier {
            Some(_) => step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..self.kept_bytes()),
            None => step,
        };
        match kind {
            SamplingStep::Penalize => {
                keeps_orders(step.bind_all([O::Logits, O::Parameters, O::Earlier, O::EarlierLengths]))
            }
            SamplingStep::Sample => keeps_orders(step.bind_all([O::Logits, O::Parameters, O::Ids, O::Status])),
            SamplingStep::LogProbabilities => {
                let step = step.bind_all([O::Logits, O::LogProbabilities]).bind(O::SampledIds, O::Ids);
                let listed = [O::AlternativeIds, O::AlternativeLogProbabilities];
                if self.alternatives > 0 { step.bind_all(listed) } else { step }
            }
        }
    }

    /// Workspace bytes of kernels that keep the penalized logits.
    pub fn kept_bytes(&self) -> usize {
        match self.earlier {
            Some(_) => WorkspaceLayout::RESERVED + self.rows * self.vocabulary * size_of::<u32>(),
            None => 0,
        }
    }

    /// Words of the outputs without a stride: alternatives of all rows.
    pub fn listed(&self) -> usize {
        self.rows * self.alternatives
    }
}

/// Identity of a family's kernel for a step.
pub fn kernel_of(family: &'static str, step: SamplingStep, variant: Option<crate::caps::Variant>) -> KernelId {
    KernelId::new(family, variant, Spec::Sampling(SamplingSpec { step }))
}

impl Operation for CheckedSampling {
    type Operand = SamplingOperand;
    type Config = SamplingConfig;
    type Plan = SamplingPlan;
    const WORKSPACE: Option<SamplingOperand> = Some(SamplingOperand::Workspace);

    fn operands(&self) -> Vec<SamplingOperand> {
        use SamplingOperand as O;
        let (penalizes, lists) = (self.earlier.is_some(), self.alternatives > 0);
        let optional = [
            (true, O::Logits),
            (true, O::Parameters),
            (penalizes, O::Earlier),
            (penalizes, O::EarlierLengths),
            (true, O::Ids),
            (self.log_probabilities, O::LogProbabilities),
            (lists, O::AlternativeIds),
            (lists, O::AlternativeLogProbabilities),
            (true, O::Status),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    /// Logits once; earlier tokens, parameters and outputs.
    fn traffic(&self) -> f64 {
        let words = 1 + SamplingParameters::WORDS + STATUS_WORDS + usize::from(self.log_probabilities);
        let earlier = self.earlier.map_or(0, |earlier| earlier.capacity + 1);
        let row = self.vocabulary + words + earlier + 2 * self.alternatives;
        self.rows as f64 * row as f64 * DType::F32.bytes() as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { rows, vocabulary, .. } = self;
        let penalty = self.earlier.map_or(String::new(), |e| format!(", at most {} earlier tokens a row", e.capacity));
        let log_probabilities = match (self.log_probabilities, self.alternatives) {
            (false, _) => String::new(),
            (true, 0) => ", log-probabilities".to_owned(),
            (true, count) => format!(", log-probabilities of {count} alternatives"),
        };
        format!("{rows} rows of {vocabulary} logits{penalty}{log_probabilities}")
    }

    fn is_nothing(&self) -> bool {
        self.rows == 0
    }

    fn config(plan: &SamplingPlan) -> &SamplingConfig {
        &plan.config
    }

    fn estimate(plan: &SamplingPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &SamplingPlan) -> KernelId {
        plan.config.kernel
    }

    fn workspace_bytes(&self, plan: &SamplingPlan) -> usize {
        plan.config.workspace_bytes
    }

    fn noop_config(&self) -> Result<SamplingConfig, Unsupported> {
        let kernel = kernel_of("noop", SamplingStep::Sample, None);
        Ok(SamplingConfig { kernel, launches: 1, workspace_bytes: self.kept_bytes(), efficiency: 1000 })
    }
}

memory_bound!(CheckedSampling, SamplingConfig, SamplingPlan, |config| config.launches);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_operands_and_steps_follow_the_options() {
        let logits = Dense::rows_of(DType::F32, 1000);
        let plain = CheckedSampling {
            rows: 2,
            vocabulary: 1000,
            logits,
            earlier: None,
            log_probabilities: false,
            alternatives: 0,
        };
        assert_eq!((plain.operands().len(), plain.steps().len(), plain.kept_bytes()), (4, 1, 0));
        assert_eq!(plain.traffic(), (2 * 1015 * 4) as f64);
        let earlier = Some(EarlierTokens { capacity: 7, row_stride: 8 });
        let all = CheckedSampling { earlier, log_probabilities: true, alternatives: 3, ..plain };
        assert_eq!((all.operands().len(), all.steps().len()), (9, 3));
        assert_eq!(all.kept_bytes(), WorkspaceLayout::RESERVED + 8000);
        assert!(CheckedSampling { rows: 0, ..plain }.is_nothing());
    }
}
