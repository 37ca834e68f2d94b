//! Sampling of tokens behind the head, on the device.
//!
//! A step downloads tokens and statuses instead of logits.

use qgemm_api::{
    Buffer, BufferRef, Context, DType, Sampling as SamplingProblem, SamplingArgs, SamplingFault, SamplingParameters,
    SamplingPlan, Stream, Workspace,
};

use crate::error::Error;

/// Alternatives of a token at most.
const MOST_ALTERNATIVES: usize = 32;
/// Id that the device reports where there is no token.
const NO_TOKEN: u32 = u32::MAX;
/// Bytes of a row's status.
const STATUS_BYTES: usize = 16;

/// Sampling parameters. The default is greedy decoding.
///
/// Parameters apply in this order: repetition penalty, temperature, top-k, top-p, min-p. What remains is normalized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of logits. 0 is argmax; the lowest id wins a tie.
    pub temperature: f32,
    /// Number of most likely tokens that remain; the lower id wins a tie. 0 keeps all.
    pub top_k: usize,
    /// Least probability that the most likely tokens have together, from 0 (the best token alone) to 1 (all).
    pub top_p: f32,
    /// Least probability of a token, relative to the best token, from 0 (all) to 1.
    pub min_p: f32,
    /// Positive logits of earlier tokens are divided by it, negative ones multiplied. 1 changes nothing.
    pub repetition_penalty: f32,
    /// Seed of the random numbers. A number depends on seed and position alone.
    pub seed: u64,
    /// Number of alternatives whose log-probabilities are reported, at most 32; `None` reports none, not even that of the token.
    pub log_probabilities: Option<usize>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            log_probabilities: None,
        }
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: u32,
    /// Log-probability of the token, if asked for: of the model's own logits, before any parameter applies.
    pub log_probability: Option<f32>,
    /// The most likely tokens with their log-probabilities, best first.
    pub alternatives: Vec<(u32, f32)>,
}

impl Sampling {
    /// Validates the parameters.
    ///
    /// # Errors
    /// [`Error::SamplingParameter`].
    pub fn check(&self) -> Result<(), Error> {
        if let Some(refused) = self.at(0).refused() {
            let (name, expected) = SamplingParameters::NAMES[refused.index];
            return Err(Error::SamplingParameter { name, got: refused.got, expected });
        }
        match self.log_probabilities {
            Some(count) if count > MOST_ALTERNATIVES => {
                let (name, expected) = ("alternatives", "at most 32");
                Err(Error::SamplingParameter { name, got: count as f32, expected })
            }
            _ => Ok(()),
        }
    }

    /// The device's parameters for the token at `position`.
    fn at(&self, position: usize) -> SamplingParameters {
        let &Self { temperature, top_p, min_p, repetition_penalty, seed, .. } = self;
        // More than the vocabulary keeps all.
        let top_k = u32::try_from(self.top_k).unwrap_or(u32::MAX);
        SamplingParameters { temperature, top_k, top_p, min_p, repetition_penalty, seed, position: position as u64 }
    }
}

/// A token to sample from a row of logits.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    /// Sampling parameters.
    pub sampling: &'a Sampling,
    /// Tokens before it. Their number is its position.
    pub earlier: &'a [u32],
}

/// Samples the rows of a step.
pub struct Sampler {
    ctx: Context,
    vocabulary: usize,
    parameters: Buffer,
    lengths: Buffer,
    /// Status of each row, then its id: one download.
    results: Buffer,
    rows: usize,
    log_probabilities: Buffer,
    alternative_ids: Buffer,
    alternatives: Buffer,
    /// Earlier tokens, if a session has a repetition penalty.
    earlier: Option<Buffer>,
    workspace: Workspace,
}

/// A sampling whose parameters are on the device.
pub struct Prepared {
    plan: SamplingPlan,
    wanted: Wanted,
}

/// Requirements of all draws of a step.
#[derive(Clone, Copy)]
struct Wanted {
    /// Earlier tokens of a row at most.
    capacity: Option<usize>,
    log_probabilities: Option<usize>,
}

impl Wanted {
    fn of(draws: &[Draw<'_>]) -> Self {
        let penalized = draws.iter().filter(|draw| draw.sampling.repetition_penalty != 1.0);
        // Powers of two, so that a growing session meets few plans.
        let capacity = penalized.map(|draw| draw.earlier.len().max(1).next_power_of_two()).max();
        Self { capacity, log_probabilities: draws.iter().filter_map(|draw| draw.sampling.log_probabilities).max() }
    }
}

impl Sampler {
    /// Allocates memory for up to `rows` rows of `vocabulary` logits.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn new(ctx: &Context, rows: usize, vocabulary: usize) -> Result<Self, Error> {
        let words = |count: usize| ctx.upload(&vec![0u32; rows * count]);
        let numbers = |count: usize| ctx.allocate_elements(DType::F32, rows * count);
        Ok(Self {
            ctx: ctx.clone(),
            vocabulary,
            parameters: words(SamplingParameters::WORDS)?,
            lengths: words(1)?,
            results: words(STATUS_BYTES / 4 + 1)?,
            rows,
            log_probabilities: numbers(1)?,
            alternative_ids: words(MOST_ALTERNATIVES)?,
            alternatives: numbers(MOST_ALTERNATIVES)?,
            earlier: None,
            workspace: ctx.workspace(0)?,
        })
    }

    /// Uploads the parameters of `draws`, before the work that makes their logits.
    ///
    /// # Errors
    /// A device error.
    pub fn prepare(&mut self, stream: &Stream, draws: &[Draw<'_>]) -> Result<Prepared, Error> {
        let wanted = Wanted::of(draws);
        let plan = self.plan(draws.len(), wanted)?;
        self.upload(stream, draws, wanted)?;
        Ok(Prepared { plan, wanted })
    }

    /// Samples a token from each row of `logits`, `[draws, vocabulary]` in f32. A row that has none fails alone.
    ///
    /// # Errors
    /// A device error.
    pub fn sample(
        &mut self,
        stream: &Stream,
        logits: BufferRef<'_>,
        draws: &[Draw<'_>],
        Prepared { plan, wanted }: Prepared,
    ) -> Result<Vec<Result<Sampled, Error>>, Error> {
        let status = 0..self.rows * STATUS_BYTES;
        let ids = status.end..status.end + self.rows * 4;
        let (_, [status, ids]) = self.results.parts([], [status, ids])?;
        let mut args = SamplingArgs::new(logits, &self.parameters, ids, status);
        if let Some(earlier) = self.earlier.as_ref().filter(|_| wanted.capacity.is_some()) {
            args = args.earlier(earlier, &self.lengths).workspace(&mut self.workspace);
        }
        if let Some(count) = wanted.log_probabilities {
            args = args.log_probabilities(&mut self.log_probabilities);
            if count > 0 {
                args = args.alternatives(&mut self.alternative_ids, &mut self.alternatives);
            }
        }
        plan.run(stream, args)?;
        self.download(draws, wanted)
    }

    /// Plan of the rows. Memory grows with it.
    fn plan(&mut self, rows: usize, wanted: Wanted) -> Result<SamplingPlan, Error> {
        let mut sampling = SamplingProblem::new(rows, self.vocabulary);
        if let Some(capacity) = wanted.capacity {
            sampling = sampling.penalized(capacity);
        }
        if let Some(count) = wanted.log_probabilities {
            sampling = sampling.log_probabilities(count);
        }
        let plan = self.ctx.plan_sampling(&sampling)?;
        if plan.workspace_bytes() > self.workspace.len() {
            self.workspace = self.ctx.workspace(plan.workspace_bytes())?;
        }
        Ok(plan)
    }

    fn upload(&mut self, stream: &Stream, draws: &[Draw<'_>], wanted: Wanted) -> Result<(), Error> {
        let words = |draw: &Draw<'_>| draw.sampling.at(draw.earlier.len()).words();
        self.ctx.enqueue_upload(stream, &draws.iter().flat_map(words).collect::<Vec<u32>>(), &mut self.parameters)?;
        let Some(capacity) = wanted.capacity else { return Ok(()) };
        let mut ids = vec![NO_TOKEN; draws.len() * capacity];
        let mut lengths = vec![0u32; draws.len()];
        for ((row, length), draw) in ids.chunks_exact_mut(capacity).zip(&mut lengths).zip(draws) {
            // Rows without a penalty have no earlier tokens.
            let is_penalized = draw.sampling.repetition_penalty != 1.0;
            let earlier = if is_penalized { draw.earlier } else { &[] };
            row[..earlier.len()].copy_from_slice(earlier);
            *length = earlier.len() as u32;
        }
        self.ctx.enqueue_upload(stream, &lengths, &mut self.lengths)?;
        match &mut self.earlier {
            Some(buffer) if buffer.len() >= ids.len() * 4 => self.ctx.enqueue_upload(stream, &ids, buffer)?,
            _ => self.earlier = Some(self.ctx.upload(&ids)?),
        }
        Ok(())
    }

    fn download(&self, draws: &[Draw<'_>], wanted: Wanted) -> Result<Vec<Result<Sampled, Error>>, Error> {
        let rows = draws.len();
        let results: Vec<u32> = self.ctx.download(&self.results)?;
        let (status, ids) = results.split_at(self.rows * STATUS_BYTES / 4);
        let faults = SamplingFault::of_rows(&status[..rows * STATUS_BYTES / 4]);
        let (mut own, mut listed): (Vec<f32>, Vec<(u32, f32)>) = (Vec::new(), Vec::new());
        let listed_bytes = wanted.log_probabilities.map_or(0, |count| rows * count * 4);
        if wanted.log_probabilities.is_some() {
            own = self.ctx.download(self.log_probabilities.slice(0..rows * 4)?)?;
        }
        if listed_bytes > 0 {
            let ids: Vec<u32> = self.ctx.download(self.alternative_ids.slice(0..listed_bytes)?)?;
            let values: Vec<f32> = self.ctx.download(self.alternatives.slice(0..listed_bytes)?)?;
            listed = ids.into_iter().zip(values).collect();
        }
        let sampled = |row: usize| {
            if let Some(fault) = faults[row] {
                return Err(Error::from(fault));
            }
            let count = draws[row].sampling.log_probabilities;
            let of_row = listed.iter().skip(row * wanted.log_probabilities.unwrap_or(0)).take(count.unwrap_or(0));
            let alternatives = of_row.copied().filter(|(id, _)| *id != NO_TOKEN).collect();
            Ok(Sampled { id: ids[row], log_probability: count.and_then(|_| own.get(row).copied()), alternatives })
        };
        Ok((0..rows).map(sampled).collect())
    }
}

impl From<SamplingFault> for Error {
    fn from(fault: SamplingFault) -> Self {
        match fault {
            SamplingFault::NonFiniteLogit { id, got } => Error::NonFiniteLogit { id: id as usize, got },
            SamplingFault::Parameter { name, got, expected } => Error::SamplingParameter { name, got, expected },
            _ => Error::NoCandidate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples rows of logits on the CPU, each with its sampling and earlier tokens.
    fn sample(rows: &[(&[f32], Sampling, &[u32])]) -> Vec<Result<Sampled, Error>> {
        let ctx = Context::open("cpu").expect("the CPU");
        let vocabulary = rows[0].0.len();
        let mut sampler = Sampler::new(&ctx, rows.len(), vocabulary).expect("a sampler");
        let logits: Vec<f32> = rows.iter().flat_map(|(logits, ..)| logits.iter().copied()).collect();
        let draws: Vec<Draw<'_>> = rows.iter().map(|(_, sampling, earlier)| Draw { sampling, earlier }).collect();
        let logits = ctx.upload(&logits).expect("memory");
        let stream = ctx.default_stream();
        let prepared = sampler.prepare(&stream, &draws).expect("a working device");
        sampler.sample(&stream, logits.view(), &draws, prepared).expect("a working device")
    }

    #[test]
    fn rows_have_their_own_rules() {
        let greedy = Sampling::default();
        let logits: &[f32] = &[3.0, 2.0, 2.0, f32::NEG_INFINITY];
        let penalized = Sampling { repetition_penalty: 2.0, ..greedy };
        let warm = Sampling { temperature: 1.0, top_k: 1, ..greedy };
        let rows = [
            (logits, greedy, &[0u32, 0][..]),
            (logits, penalized, &[0, 77]),
            (logits, warm, &[]),
            (logits, penalized, &[2]),
        ];
        let ids: Vec<u32> = sample(&rows).into_iter().map(|sampled| sampled.expect("a token").id).collect();
        assert_eq!(ids, [0, 1, 0, 0]);
    }

    #[test]
    fn a_row_that_fails_leaves_the_others() {
        let greedy = Sampling::default();
        let rows = [
            (&[0.0, f32::NAN][..], greedy, &[][..]),
            (&[1.0, 2.0], greedy, &[]),
            (&[f32::NEG_INFINITY; 2], greedy, &[]),
        ];
        let [bad, fine, none] = &sample(&rows)[..] else { panic!("three rows") };
        assert!(matches!(bad, Err(Error::NonFiniteLogit { id: 1, .. })), "{bad:?}");
        assert!(matches!(fine, Ok(Sampled { id: 1, .. })), "{fine:?}");
        assert!(matches!(none, Err(Error::NoCandidate)), "{none:?}");
    }

    #[test]
    fn log_probabilities_are_of_the_models_own_logits() {
        let logits: Vec<f32> = [0.1f32, 0.6, 0.3].iter().map(|p| p.ln()).collect();
        let two = Sampling { log_probabilities: Some(2), temperature: 0.1, top_k: 1, ..Sampling::default() };
        let none = Sampling { log_probabilities: None, ..two };
        let sampled = sample(&[(&logits, two, &[]), (&logits, none, &[])]);
        let [Ok(first), Ok(second)] = &sampled[..] else { panic!("two tokens: {sampled:?}") };
        assert_eq!((first.id, second.log_probability, second.alternatives.len()), (1, None, 0));
        assert!((first.log_probability.expect("asked for") - 0.6f32.ln()).abs() < 1e-6);
        let ids: Vec<u32> = first.alternatives.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 2]);
        assert!((first.alternatives[1].1 - 0.3f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let fine = Sampling::default();
        let bad = [
            ("temperature", Sampling { temperature: -1.0, ..fine }),
            ("top-p", Sampling { top_p: 1.5, ..fine }),
            ("min-p", Sampling { min_p: f32::NAN, ..fine }),
            ("repetition penalty", Sampling { repetition_penalty: 0.0, ..fine }),
            ("alternatives", Sampling { log_probabilities: Some(33), ..fine }),
        ];
        for (expected, sampling) in bad {
            let refused = sampling.check();
            assert!(matches!(refused, Err(Error::SamplingParameter { name, .. }) if name == expected), "{refused:?}");
        }
    }
}
