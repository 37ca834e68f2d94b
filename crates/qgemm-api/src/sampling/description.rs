//! [`Sampling`]: sampling of a token for each row of logits.

use qgemm_formats::DType;
use qgemm_hal::CheckedSampling;
use qgemm_hal::op::sampling::{EarlierTokens, MOST_ALTERNATIVES, MOST_ROWS, MOST_VOCABULARY};

use crate::error::Error;
use crate::operand::Stored;

/// Sampling of a token for each row of f32 logits, `[rows,
/// vocabulary]`: repetition penalty, temperature, top-k, top-p,
/// min-p, a seeded draw. A description for [`Context::plan_sampling`].
///
/// Parameters are on the device, one
/// [`SamplingParameters`](crate::SamplingParameters) a row, so a captured graph runs with
/// changed ones. CPU and CUDA sample the same tokens, whatever the batch.
///
/// ```
/// use qgemm_api::{Context, Sampling, SamplingArgs, SamplingParameters};
///
/// let ctx = Context::open("cpu")?;
/// let plan = ctx.plan_sampling(&Sampling::new(1, 4))?;
/// let logits = ctx.upload(&[0.0f32, 3.0, 1.0, 2.0])?;
/// let greedy = SamplingParameters { temperature: 0.0, ..SamplingParameters::default() };
/// let parameters = ctx.upload(&greedy.words())?;
/// let (mut ids, mut status) = (ctx.allocate(4)?, ctx.allocate(16)?);
/// plan.run(&ctx.default_stream(), SamplingArgs::new(&logits, &parameters, &mut ids, &mut status))?;
/// assert_eq!(ctx.download::<u32>(&ids)?, [1]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_sampling`]: crate::Context::plan_sampling
#[derive(Clone, Debug)]
pub struct Sampling {
    rows: usize,
    vocabulary: usize,
    row_stride: Option<u64>,
    earlier: Option<EarlierTokens>,
    log_probabilities: Option<usize>,
}

impl Sampling {
    /// Sampling from `rows` rows of `vocabulary` logits.
    pub fn new(rows: usize, vocabulary: usize) -> Self {
        Self { rows, vocabulary, row_stride: None, earlier: None, log_probabilities: None }
    }

    /// Row stride of the logits, in elements.
    pub fn row_stride(mut self, row_stride: u64) -> Self {
        self.row_stride = Some(row_stride);
        self
    }

    /// Applies the repetition penalty to at most `capacity` earlier
    /// tokens of each row. Without it, the penalty has no effect.
    pub fn penalized(mut self, capacity: usize) -> Self {
        self.earlier = Some(EarlierTokens { capacity, row_stride: capacity as u64 });
        self
    }

    /// Row stride of the earlier tokens, in ids.
    pub fn earlier_row_stride(mut self, row_stride: u64) -> Self {
        self.earlier = self.earlier.map(|earlier| EarlierTokens { row_stride, ..earlier });
        self
    }

    /// Writes the log-probability of each token and those of the
    /// `alternatives` most likely tokens, at most 32.
    pub fn log_probabilities(mut self, alternatives: usize) -> Self {
        self.log_probabilities = Some(alternatives);
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(super) fn check(&self) -> Result<CheckedSampling, Error> {
        let &Self { rows, vocabulary, row_stride, earlier, log_probabilities } = self;
        let alternatives = log_probabilities.unwrap_or(0);
        let capacity = earlier.map_or(1, |earlier| earlier.capacity);
        let sizes = [
            ("rows of logits", rows, 0, MOST_ROWS),
            ("vocabulary", vocabulary, 1, MOST_VOCABULARY),
            ("alternatives", alternatives, 0, MOST_ALTERNATIVES),
            ("earlier tokens of a row", capacity, 1, u32::MAX as usize / 2),
        ];
        for (name, got, least, most) in sizes {
            if !(least..=most).contains(&got) {
                return Err(Error::OutOfRange { name, least, most, got });
            }
        }
        let dtype = DType::F32;
        let logits = Stored { name: "logits", rows, columns: vocabulary, dtype, alignment: dtype.bytes() };
        let logits = logits.check(row_stride)?;
        if let Some(EarlierTokens { capacity, row_stride }) = earlier {
            let ids = Stored { name: "earlier tokens", rows, columns: capacity, dtype, alignment: dtype.bytes() };
            ids.check(Some(row_stride))?;
        }
        let log_probabilities = log_probabilities.is_some();
        Ok(CheckedSampling { rows, vocabulary, logits, earlier, log_probabilities, alternatives })
    }
}
