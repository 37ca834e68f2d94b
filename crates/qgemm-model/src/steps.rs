//! [`Steps`]: plans of a decoder's steps, in one memory.

use std::collections::HashMap;
use std::sync::Arc;

use qgemm_api::{KvFormat, LoadedPlan, PlanArena, PlanOptions, PlanWeights, StepGraph, Stream};

use crate::error::Error;
use crate::followers::Followers;
use crate::language_model::LanguageModel;
use crate::sampler::{Draw, Sampled, Sampler};

/// Most shapes whose plans are kept.
const KEPT_SHAPES: usize = 64;
/// Bounds of keys are powers of two from here on, so that a growing session meets few plans.
const LEAST_KEYS: usize = 256;

/// Sizes of a paged cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheSize {
    /// Pages.
    pub pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Tokens that one session may have.
    pub context: usize,
    /// Format of keys and values.
    pub format: KvFormat,
    /// Whether keys and values have a Hadamard rotation.
    pub is_rotated: bool,
    /// Slots of recurrent states.
    pub slots: usize,
}

/// New tokens of one session.
pub struct Sequence<'a> {
    /// The new tokens.
    pub ids: &'a [u32],
    /// Tokens in the cache after the step.
    pub length: usize,
    /// Pages of the session.
    pub pages: &'a [u32],
    /// Slot of its recurrent states.
    pub slot: u32,
    /// The token to sample after the last one, if it is wanted.
    pub draw: Option<Draw<'a>>,
}

impl Sequence<'_> {
    /// Whether its first token is among the new ones.
    fn begins(&self) -> bool {
        self.length == self.ids.len()
    }

    fn followed(&self) -> Followed {
        Followed { ids: self.ids.to_vec(), length: self.length, pages: self.pages.to_vec(), slot: self.slot }
    }
}

/// The same for another rank, which samples nothing.
struct Followed {
    ids: Vec<u32>,
    length: usize,
    pages: Vec<u32>,
    slot: u32,
}

impl Followed {
    fn sequence(&self) -> Sequence<'_> {
        Sequence { ids: &self.ids, length: self.length, pages: &self.pages, slot: self.slot, draw: None }
    }
}

/// Steps of a decoder with its cache, on all ranks.
pub struct Steps {
    own: RankSteps,
    followers: Followers<Vec<Followed>>,
}

impl Steps {
    /// Plans and memory for steps of up to `tokens` tokens of one sequence, or a token each of
    /// `sequences`.
    ///
    /// # Errors
    /// When a step cannot be planned; a device error such as exhausted memory.
    pub fn new(model: &LanguageModel, size: CacheSize, tokens: usize, sequences: usize) -> Result<Self, Error> {
        let followers = Followers::start(model, move |model: &LanguageModel| {
            let mut steps = RankSteps::new(model, size, tokens, sequences)?;
            Ok(move |job: &Vec<Followed>| {
                let sequences: Vec<Sequence<'_>> = job.iter().map(Followed::sequence).collect();
                steps.run(&sequences).map(drop)
            })
        })?;
        Ok(Self { own: followers.ready(RankSteps::new(model, size, tokens, sequences))?, followers })
    }

    /// Runs a step of sequences with equally many new tokens. Sequences that draw a token come
    /// first. Returns the tokens.
    ///
    /// # Errors
    /// A device error, after which the cache's new tokens are undefined; a step may be repeated, unless
    /// a rank of several failed.
    pub fn run(&mut self, sequences: &[Sequence<'_>]) -> Result<Vec<Result<Sampled, Error>>, Error> {
        let Self { own, followers } = self;
        followers.run(|| sequences.iter().map(Sequence::followed).collect(), || own.run(sequences))
    }

    /// Whether the model has recurrent states.
    pub fn recurs(&self) -> bool {
        self.own.model.network().recurs()
    }
}

/// Steps of one rank.
struct RankSteps {
    model: LanguageModel,
    /// Weights of all plans so far.
    weights: Arc<PlanWeights>,
    size: CacheSize,
    /// Cache and activations, in the form of the plan that ran last.
    arena: PlanArena,
    plans: HashMap<Shape, Step>,
    sampler: Sampler,
}

/// Key of a step's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    sequences: usize,
    /// New tokens of each sequence.
    tokens: usize,
    /// Bound for the keys of a sequence.
    keys: usize,
}

impl Shape {
    /// Whether a sequence repeats the step with its next token.
    fn decodes(&self) -> bool {
        self.tokens == 1
    }
}

/// Plan of a shape.
struct Step {
    plan: Arc<LoadedPlan>,
    /// Replaces the plan's launches, from the second run on.
    graph: Option<StepGraph>,
    runs: usize,
}

impl RankSteps {
    fn new(model: &LanguageModel, size: CacheSize, tokens: usize, sequences: usize) -> Result<Self, Error> {
        let planned = |sequences, tokens| plan(model, size, Shape { sequences, tokens, keys: size.context });
        let (prompt, decode) = (planned(1, tokens.min(size.context))?, planned(sequences, 1)?);
        let arena = prompt.arena_beside(&[&decode])?;
        let weights = Arc::new(decode.load_more_weights(model.host(), model.weights())?);
        let sampler = Sampler::new(model.context(), sequences, model.vocabulary())?;
        Ok(Self { model: model.clone(), weights, size, arena, plans: HashMap::new(), sampler })
    }

    fn run(&mut self, sequences: &[Sequence<'_>]) -> Result<Vec<Result<Sampled, Error>>, Error> {
        let shape = self.shape(sequences);
        if !self.plans.contains_key(&shape) {
            if self.plans.len() >= KEPT_SHAPES {
                self.plans.clear();
            }
            let step = self.plan(shape)?;
            self.plans.insert(shape, step);
        }
        let stream = self.model.context().default_stream();
        self.enter(&stream, shape)?;
        let plan = &self.plans[&shape].plan;
        for sequence in sequences.iter().filter(|sequence| sequence.begins()) {
            plan.clear_slot(&stream, &mut self.arena, sequence.slot as usize)?;
        }
        self.upload(&stream, shape, sequences)?;
        let draws: Vec<Draw<'_>> = sequences.iter().filter_map(|sequence| sequence.draw).collect();
        if draws.is_empty() {
            self.launch(&stream, shape)?;
            return Ok(Vec::new());
        }
        // Uploads wait for nothing as long as the device has no work.
        let prepared = self.sampler.prepare(&stream, &draws)?;
        self.launch(&stream, shape)?;
        self.sampler.sample(&stream, self.arena.region("logits")?, &draws, prepared)
    }

    fn shape(&self, sequences: &[Sequence<'_>]) -> Shape {
        let tokens = sequences.first().map_or(0, |sequence| sequence.ids.len());
        debug_assert!(sequences.iter().all(|sequence| sequence.ids.len() == tokens), "{tokens} new tokens each");
        let keys = sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
        let keys = keys.next_power_of_two().max(LEAST_KEYS).min(self.size.context);
        Shape { sequences: sequences.len(), tokens, keys }
    }

    fn plan(&mut self, shape: Shape) -> Result<Step, Error> {
        let plan = plan(&self.model, self.size, shape)?;
        plan.prepare()?;
        // Another choice of kernels may take other weights together.
        self.weights = Arc::new(plan.load_more_weights(self.model.host(), &self.weights)?);
        Ok(Step { plan: Arc::new(plan), graph: None, runs: 0 })
    }

    /// Gives the memory the form of a shape's plan. Memory that is too short is replaced.
    fn enter(&mut self, stream: &Stream, shape: Shape) -> Result<(), Error> {
        let plan = &self.plans[&shape].plan;
        match plan.enter(stream, &mut self.arena) {
            Err(qgemm_api::Error::BufferTooShort { .. }) => {
                let mut longer = plan.arena()?;
                longer.copy_caches(self.model.context(), &self.arena)?;
                self.arena = longer;
                self.plans.values_mut().for_each(|step| step.graph = None);
                Ok(())
            }
            entered => Ok(entered?),
        }
    }

    /// Uploads ids, lengths and the block table.
    fn upload(&mut self, stream: &Stream, shape: Shape, sequences: &[Sequence<'_>]) -> Result<(), Error> {
        let width = shape.keys.div_ceil(self.size.page_size);
        let mut table = vec![0u32; sequences.len() * width];
        for (sequence, row) in sequences.iter().zip(table.chunks_mut(width)) {
            // A prompt has the pages of all its tokens from the start.
            let pages = &sequence.pages[..width.min(sequence.pages.len())];
            row[..pages.len()].copy_from_slice(pages);
        }
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.ids).copied().collect();
        let lengths: Vec<u32> = sequences.iter().map(|sequence| sequence.length as u32).collect();
        let slots: Vec<u32> = sequences.iter().map(|sequence| sequence.slot).collect();
        let inputs = [("tokens", &ids), ("kv_lengths", &lengths), ("block_table", &table)];
        let of_states = self.model.network().recurs().then_some(("state_slots", &slots));
        for (region, words) in inputs.into_iter().chain(of_states) {
            self.model.context().enqueue_upload(stream, words, self.arena.region_mut(region)?)?;
        }
        Ok(())
    }

    /// Submits the step. One that decodes is captured as a graph when it comes again.
    fn launch(&mut self, stream: &Stream, shape: Shape) -> Result<(), Error> {
        let Self { plans, arena, weights, .. } = self;
        let Some(Step { plan, graph, runs }) = plans.get_mut(&shape) else { unreachable!("it was planned") };
        *runs += 1;
        if graph.is_none() && *runs == 2 && shape.decodes() {
            *graph = plan.capture(stream, arena, weights)?;
        }
        match graph {
            Some(graph) => graph.replay(stream, arena)?,
            None => plan.step(stream, arena, weights)?,
        }
        // Whoever waits for the result otherwise, waits for ranks that are gone, too.
        let ctx = self.model.context();
        ctx.communicator().map_or(Ok(()), |group| Ok(group.wait(&**ctx.device(), stream)?))
    }
}

/// The plan of a shape.
fn plan(model: &LanguageModel, size: CacheSize, shape: Shape) -> Result<LoadedPlan, Error> {
    let mut options = PlanOptions::new(shape.sequences * shape.tokens);
    (options.sequences, options.context) = (Some(shape.sequences), Some(shape.keys));
    (options.kv_format, options.page_size, options.pages) = (Some(size.format), Some(size.page_size), Some(size.pages));
    options.rotate_cache = size.is_rotated;
    options.slots = Some(size.slots);
    model.options().state(&mut options);
    let ctx = model.context();
    Ok(ctx.load_exec_plan(ctx.plan_network(model.network(), &options)?, model.host())?)
}
