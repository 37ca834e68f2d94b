//! [`Engine`]: sessions that share the weights and the steps of a model (continuous batching).

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use qgemm_api::{DType, KvFormat};

use crate::error::Error;
use crate::language_model::LanguageModel;
use crate::page_pool::{PagePool, SlotPool};
use crate::session::{Finish, Generation, Output, Session, SessionId};
use crate::steps::{CacheSize, Sequence, Steps};

/// Sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Sessions that run at once; others wait.
    pub sessions: usize,
    /// Tokens of the cache, for all sessions; rounded up to whole pages.
    pub cache_tokens: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Tokens of a step at most: a longer prompt takes several steps.
    pub step_tokens: usize,
    /// Format of keys and values in the cache.
    pub kv_format: KvFormat,
    /// Whether cached keys and values have a Hadamard rotation, which formats of few bits lose less of.
    /// By default those of Q4_0 have.
    pub rotate_cache: Option<bool>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            sessions: 8,
            cache_tokens: 4096,
            page_size: 64,
            step_tokens: 512,
            kv_format: KvFormat::Plain(DType::F16),
            rotate_cache: None,
        }
    }
}

impl EngineOptions {
    /// Whether cached keys and values have a Hadamard rotation.
    pub fn rotates_cache(&self) -> bool {
        self.rotate_cache.unwrap_or(self.kv_format == KvFormat::Q4_0)
    }
}

/// Runs sessions of one model.
pub struct Engine {
    model: LanguageModel,
    options: EngineOptions,
    steps: Steps,
    pool: PagePool,
    slots: SlotPool,
    /// Tokens of a session at most.
    context: usize,
    waiting: VecDeque<Session>,
    running: Vec<Session>,
    /// Outputs that the next step reports.
    outputs: Vec<Output>,
    next_id: u64,
}

impl Engine {
    /// An engine for `model`, with its cache.
    ///
    /// # Errors
    /// [`Error::EngineOption`]; a device error such as exhausted memory.
    pub fn new(model: &LanguageModel, options: EngineOptions) -> Result<Self, Error> {
        let EngineOptions { sessions, cache_tokens, page_size, step_tokens, kv_format, .. } = options;
        let named = [("sessions", sessions), ("cache tokens", cache_tokens), ("page size", page_size)];
        if let Some((name, got)) = named.into_iter().find(|(_, got)| *got == 0) {
            return Err(Error::EngineOption { name, got, least: 1 });
        }
        if step_tokens < sessions {
            return Err(Error::EngineOption { name: "step tokens", got: step_tokens, least: sessions });
        }
        let pages = cache_tokens.div_ceil(page_size);
        let context = model.hyperparameters().context.min(pages.saturating_mul(page_size));
        let is_rotated = options.rotates_cache();
        let size = CacheSize { pages, page_size, context, format: kv_format, is_rotated, slots: sessions };
        let steps = Steps::new(model, size, step_tokens, sessions)?;
        Ok(Self {
            model: model.clone(),
            options,
            steps,
            pool: PagePool::new(u32::try_from(pages).unwrap_or(u32::MAX)),
            slots: SlotPool::new(u32::try_from(sessions).unwrap_or(u32::MAX)),
            context,
            waiting: VecDeque::new(),
            running: Vec::new(),
            outputs: Vec::new(),
            next_id: 0,
        })
    }

    /// Adds a session. It joins the next step that has room.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::PromptTooLong`], [`Error::UnknownToken`], [`Error::SamplingParameter`].
    pub fn start(&mut self, prompt: &[u32], generation: Generation) -> Result<SessionId, Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if prompt.len() > self.context {
            return Err(Error::PromptTooLong { tokens: prompt.len(), limit: self.context });
        }
        let vocabulary = self.model.vocabulary();
        if let Some(&id) = prompt.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(Error::UnknownToken { id, vocabulary });
        }
        generation.sampling.check()?;
        let id = SessionId(self.next_id);
        self.next_id += 1;
        let mut session = Session::new(id, prompt, generation);
        if session.is_done() {
            let end = session.end(None, String::new(), Finish::MaxTokens, self.model.tokenizer());
            self.outputs.push(end);
        } else {
            self.waiting.push_back(session);
        }
        Ok(id)
    }

    /// Ends a session. The next step reports [`Finish::Cancelled`].
    ///
    /// # Errors
    /// [`Error::NoSuchSession`].
    pub fn cancel(&mut self, id: SessionId) -> Result<(), Error> {
        self.retire();
        let running = self.running.iter().position(|session| session.id == id).map(|at| self.running.remove(at));
        let waiting =
            || self.waiting.iter().position(|session| session.id == id).and_then(|at| self.waiting.remove(at));
        let session = running.or_else(waiting).ok_or(Error::NoSuchSession)?;
        self.end(session, Finish::Cancelled);
        Ok(())
    }

    /// Whether no session is left, and none has an end to report.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.outputs.is_empty()
    }

    /// Tokens of a session at most, prompt included.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Free pages of the cache.
    pub fn free_pages(&self) -> usize {
        self.pool.available()
    }

    /// Runs a step: a token of each session that generates, and prompts as far as [`EngineOptions::step_tokens`] permits.
    /// An engine without sessions does nothing.
    ///
    /// # Errors
    /// A device error. Sessions whose part was done before it have advanced, and the next step reports them; the others
    /// repeat theirs then.
    pub fn step(&mut self) -> Result<Vec<Output>, Error> {
        self.retire();
        self.admit();
        let chunks = self.schedule();
        // One token each: the sessions share a pass over the weights.
        let singles = chunks.iter().take_while(|count| **count == 1).count();
        let mut batches: Vec<Range<usize>> = Vec::new();
        batches.extend((singles > 0).then_some(0..singles));
        batches.extend((singles..chunks.len()).filter(|&at| chunks[at] > 0).map(|at| at..at + 1));
        for batch in batches {
            self.run(batch, &chunks)?;
        }
        self.retire();
        Ok(std::mem::take(&mut self.outputs))
    }

    /// Frees the pages of sessions that have ended.
    fn retire(&mut self) {
        let sessions = std::mem::take(&mut self.running).into_iter();
        let (ended, running): (Vec<_>, Vec<_>) = sessions.partition(|session| session.has_ended);
        self.running = running;
        for session in ended {
            self.pool.release(session.pages);
            self.slots.release(session.slot);
        }
    }

    /// Runs the new tokens of some running sessions.
    fn run(&mut self, batch: Range<usize>, chunks: &[usize]) -> Result<(), Error> {
        let sessions = &mut self.running[batch.clone()];
        let chunks = &chunks[batch];
        let sequences: Vec<Sequence<'_>> =
            sessions.iter().zip(chunks).map(|(session, &count)| session.sequence(count)).collect();
        let sampled = match self.steps.run(&sequences) {
            Ok(sampled) => sampled,
            Err(error) => {
                // Some layers have advanced. A recurrent state cannot be rewound.
                if self.steps.recurs() {
                    sessions.iter_mut().for_each(|session| session.cached = 0);
                }
                return Err(error);
            }
        };
        let mut sampled = sampled.into_iter();
        for (session, count) in sessions.iter_mut().zip(chunks) {
            session.cached += count;
            if session.pending() > 0 {
                continue;
            }
            let Some(sampled) = sampled.next() else { unreachable!("sequences that end have a token") };
            let output = session.advance(sampled, self.model.tokenizer(), self.context);
            session.has_ended = output.finish.is_some();
            self.outputs.push(output);
        }
        Ok(())
    }

    /// Lets sessions join while there are pages for their prompts.
    fn admit(&mut self) {
        while self.running.len() < self.options.sessions {
            let Some(session) = self.waiting.front_mut() else { break };
            let pages = session.ids.len().div_ceil(self.options.page_size);
            if !self.pool.grow(&mut session.pages, pages) {
                break;
            }
            session.slot = self.slots.take();
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// New tokens of each running session. Those that generate come first; sessions without a page end.
    fn schedule(&mut self) -> Vec<usize> {
        let page_size = self.options.page_size;
        let sessions = std::mem::take(&mut self.running);
        for mut session in sessions {
            match self.pool.grow(&mut session.pages, session.ids.len().div_ceil(page_size)) {
                true => self.running.push(session),
                false => self.end(session, Finish::CacheFull),
            }
        }
        // Stable: sessions keep their order.
        self.running.sort_by_key(|session| session.pending() > 1);
        let mut room = self.options.step_tokens;
        let chunk = |session: &Session| {
            let count = session.pending().min(room);
            room -= count;
            count
        };
        self.running.iter().map(chunk).collect()
    }

    fn end(&mut self, mut session: Session, finish: Finish) {
        let output = session.end(None, String::new(), finish, self.model.tokenizer());
        self.pool.release(session.pages);
        self.slots.release(session.slot);
        self.outputs.push(output);
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        f.debug_struct("Engine").field("running", &running).field("waiting", &waiting).finish_non_exhaustive()
    }
}
