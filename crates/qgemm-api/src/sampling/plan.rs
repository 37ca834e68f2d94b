//! [`SamplingPlan`]: ready kernels of one sampling.

use std::fmt;
use std::ops::Deref;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::sampling::{STATUS_WORDS, SamplingParameters};
use qgemm_hal::{BufferMut, BufferRef, CheckedSampling, SamplingOperand, Stream};
use qgemm_sched::Preferences;

use super::description::Sampling;
use super::fault::SamplingFault;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded, WorkspaceRegion};
use crate::workspace::Workspace;

/// Ready kernels of one [`Sampling`], from
/// [`Context::plan_sampling`]. Its text lists the launches of
/// a run.
#[derive(Debug)]
pub struct SamplingPlan {
    planned: Planned<CheckedSampling>,
}

impl Deref for SamplingPlan {
    type Target = Planned<CheckedSampling>;

    fn deref(&self) -> &Self::Target {
        &self.planned
    }
}

impl fmt::Display for SamplingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

/// Earlier tokens of each row, for the repetition penalty.
#[derive(Debug)]
pub struct EarlierArgs<'a> {
    /// Ids, u32 `[rows, capacity]`. Ids outside of the vocabulary
    /// are ignored, and repeated ones count once.
    pub ids: BufferRef<'a>,
    /// Number of ids of each row, u32; at most the capacity is read.
    pub lengths: BufferRef<'a>,
}

/// Outputs of [`Sampling::log_probabilities`].
#[derive(Debug)]
pub struct SampledLogProbabilities<'a> {
    /// Log-probability of each token, f32 `[rows]`: of the logits,
    /// before any parameter applies. −∞ for a row that fails.
    pub tokens: BufferMut<'a>,
    /// Ids of the most likely tokens, u32 `[rows, alternatives]`,
    /// best first. `u32::MAX` after the last one that is not excluded.
    pub alternative_ids: Option<BufferMut<'a>>,
    /// Log-probabilities of these, f32 `[rows, alternatives]`.
    pub alternatives: Option<BufferMut<'a>>,
}

/// Operands of one run of a [`SamplingPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct SamplingArgs<'a> {
    /// Logits, f32 `[rows, vocabulary]`. −∞ excludes a token.
    pub logits: BufferRef<'a>,
    /// [`SamplingParameters::words`] of each row.
    pub parameters: BufferRef<'a>,
    /// Earlier tokens, when the sampling is
    /// [penalized](Sampling::penalized).
    pub earlier: Option<EarlierArgs<'a>>,
    /// Sampled tokens, u32 `[rows]`. `u32::MAX` for a row that fails.
    pub ids: BufferMut<'a>,
    /// Log-probabilities, when the sampling writes
    /// [them](Sampling::log_probabilities).
    pub log_probabilities: Option<SampledLogProbabilities<'a>>,
    /// Written: 16 bytes a row, for [`SamplingPlan::faults`].
    pub status: BufferMut<'a>,
    /// Workspace of at least [`SamplingPlan::workspace_bytes`](Planned::workspace_bytes), when
    /// that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> SamplingArgs<'a> {
    /// Operands of every run.
    pub fn new(
        logits: impl Into<BufferRef<'a>>,
        parameters: impl Into<BufferRef<'a>>,
        ids: impl Into<BufferMut<'a>>,
        status: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            logits: logits.into(),
            parameters: parameters.into(),
            earlier: None,
            ids: ids.into(),
            log_probabilities: None,
            status: status.into(),
            workspace: None,
        }
    }

    /// With earlier tokens and their number in each row.
    pub fn earlier(mut self, ids: impl Into<BufferRef<'a>>, lengths: impl Into<BufferRef<'a>>) -> Self {
        self.earlier = Some(EarlierArgs { ids: ids.into(), lengths: lengths.into() });
        self
    }

    /// With the log-probabilities of the tokens.
    pub fn log_probabilities(mut self, tokens: impl Into<BufferMut<'a>>) -> Self {
        let tokens = tokens.into();
        self.log_probabilities = Some(SampledLogProbabilities { tokens, alternative_ids: None, alternatives: None });
        self
    }

    /// With the most likely tokens and their log-probabilities. The
    /// log-probabilities of the tokens come first.
    pub fn alternatives(mut self, ids: impl Into<BufferMut<'a>>, log_probabilities: impl Into<BufferMut<'a>>) -> Self {
        if let Some(outputs) = &mut self.log_probabilities {
            (outputs.alternative_ids, outputs.alternatives) = (Some(ids.into()), Some(log_probabilities.into()));
        }
        self
    }

    /// With a workspace.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Context {
    /// Chooses kernels for `sampling` and makes them ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the sampling is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_sampling(&self, sampling: &Sampling) -> Result<SamplingPlan, Error> {
        Ok(SamplingPlan { planned: Planned::new(self, sampling.check()?, Preferences::default())? })
    }

    /// Record of the choice of [`Context::plan_sampling`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the sampling is invalid.
    pub fn explain_sampling(&self, sampling: &Sampling) -> Result<PlanRecord, Error> {
        explain(self, &sampling.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedSampling);

impl Recorded for CheckedSampling {
    fn workspace(&self, plan: &qgemm_hal::SamplingPlan) -> Vec<WorkspaceRegion> {
        WorkspaceRegion::whole("penalized logits", plan.config.workspace_bytes)
    }
}

impl Bound for CheckedSampling {
    fn wanted(&self, operand: SamplingOperand, _: bool) -> Wanted {
        use SamplingOperand as O;
        let words = |count: usize| Extent::of_values(ElementType::Int32, count);
        let numbers = |count: usize| Extent::of_values(DType::F32, count);
        let penalized = "the sampling applies a repetition penalty";
        let log_probabilities = "the sampling writes log-probabilities";
        let lists = (self.alternatives > 0).then_some(self.listed());
        match operand {
            O::Logits => Wanted::always("logits", Extent::of(&self.logits, self.rows, self.vocabulary)),
            O::Parameters => Wanted::always("parameters", words(self.rows * SamplingParameters::WORDS)),
            O::Earlier => {
                let extent = self.earlier.map(|earlier| {
                    let rows = self.rows.saturating_sub(1).saturating_mul(earlier.row_stride as usize);
                    words(if self.rows == 0 { 0 } else { rows.saturating_add(earlier.capacity) })
                });
                Wanted::optional("earlier tokens", extent, penalized)
            }
            O::EarlierLengths => {
                let extent = self.earlier.map(|_| words(self.rows));
                Wanted::optional("lengths of the earlier tokens", extent, penalized)
            }
            O::Ids => Wanted::always("ids", words(self.rows)),
            O::LogProbabilities => {
                let extent = self.log_probabilities.then(|| numbers(self.rows));
                Wanted::optional("log-probabilities", extent, log_probabilities)
            }
            O::AlternativeIds => Wanted::optional("ids of the alternatives", lists.map(words), log_probabilities),
            O::AlternativeLogProbabilities => {
                Wanted::optional("log-probabilities of the alternatives", lists.map(numbers), log_probabilities)
            }
            O::Status => Wanted::always("status", words(self.rows * STATUS_WORDS)),
            O::Workspace => Wanted::workspace("the penalized logits are kept there"),
            // A later step reads the sampled ids.
            O::SampledIds => Wanted::optional("sampled ids", None, "a step reads them"),
        }
    }
}

impl SamplingPlan {
    /// Submits the sampling to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it. A
    /// row that has no token is no error of the run: the status says
    /// why.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned or on another
    /// device; or on a device error. Nothing is written then.
    pub fn run(&self, stream: &Stream, args: SamplingArgs<'_>) -> Result<(), Error> {
        use SamplingOperand as O;
        let SamplingArgs { logits, parameters, earlier, ids, log_probabilities, status, workspace } = args;
        let mut run = self.start(stream)?;
        run.read(O::Logits, logits)?;
        run.read(O::Parameters, parameters)?;
        let (earlier, lengths) = earlier.map_or((None, None), |args| (Some(args.ids), Some(args.lengths)));
        run.read(O::Earlier, earlier)?;
        run.read(O::EarlierLengths, lengths)?;
        run.write(O::Ids, ids)?;
        let (tokens, alternative_ids, alternatives) = log_probabilities.map_or((None, None, None), |outputs| {
            (Some(outputs.tokens), outputs.alternative_ids, outputs.alternatives)
        });
        run.write(O::LogProbabilities, tokens)?;
        run.write(O::AlternativeIds, alternative_ids)?;
        run.write(O::AlternativeLogProbabilities, alternatives)?;
        run.write(O::Status, status)?;
        run.workspace(workspace.map(Workspace::view))?;
        run.launch(stream)
    }

    /// Waits for the default stream and reads the status of a run: why
    /// a row has no token, for each row.
    /// [Synchronize](Context::synchronize) first with a run on another
    /// stream.
    ///
    /// # Errors
    /// When `status` is too short or on another device, or on a device
    /// error.
    pub fn faults<'a>(
        &self,
        ctx: &Context,
        status: impl Into<BufferRef<'a>>,
    ) -> Result<Vec<Option<SamplingFault>>, Error> {
        let (status, checks) = (status.into(), Checks(self.device()));
        checks.device("context", ctx.info().id)?;
        let extent = Extent::of_values(ElementType::Int32, self.op().rows * STATUS_WORDS);
        checks.view("status", status, extent)?;
        let bytes = ctx.download(status.slice(0..extent.bytes())?)?;
        let words = |row: &[u8; STATUS_WORDS * 4]| {
            let mut words = [0; STATUS_WORDS];
            for (word, bytes) in words.iter_mut().zip(row.as_chunks().0) {
                *word = u32::from_le_bytes(*bytes);
            }
            words
        };
        Ok(bytes.as_chunks().0.iter().map(|row| SamplingFault::of_status(words(row))).collect())
    }

    /// As [`SamplingPlan::faults`], for runs all of whose rows should
    /// have a token.
    ///
    /// # Errors
    /// [`Error::NotSampled`] with the first row that has none, and as
    /// [`SamplingPlan::faults`].
    pub fn check_status<'a>(&self, ctx: &Context, status: impl Into<BufferRef<'a>>) -> Result<(), Error> {
        let faults = self.faults(ctx, status)?;
        let first = faults.into_iter().enumerate().find_map(|(row, fault)| Some((row, fault?)));
        first.map_or(Ok(()), |(row, fault)| Err(Error::NotSampled { row, fault }))
    }
}
