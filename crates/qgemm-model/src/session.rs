//! A session: tokens, pages and streamed text of one prompt.

use crate::error::Error;
use crate::page_pool::PageTable;
use crate::sampler::{Draw, Sampled, Sampling};
use crate::steps::Sequence;
use crate::stop_strings::StopStrings;
use crate::text_stream::TextStream;
use crate::tokenizer::Tokenizer;

/// Identity of a session within its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub(crate) u64);

/// How a session generates.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Tokens at most.
    pub max_tokens: usize,
    /// Texts that end the session, which are not emitted.
    pub stop: Vec<String>,
    /// Whether tokens that end a text are ignored.
    pub ignore_end: bool,
}

impl Default for Generation {
    fn default() -> Self {
        Self { sampling: Sampling::default(), max_tokens: 256, stop: Vec::new(), ignore_end: false }
    }
}

/// Why a session ended. Other sessions go on.
#[derive(Debug)]
#[non_exhaustive]
pub enum Finish {
    /// The model ended the text.
    EndOfText,
    /// A stop string came.
    StopString(String),
    /// [`Generation::max_tokens`] were generated.
    MaxTokens,
    /// The model's context is full.
    ContextFull,
    /// The cache has no free page.
    CacheFull,
    /// [`Engine::cancel`](crate::Engine::cancel) was called.
    Cancelled,
    /// Sampling or decoding of this session failed.
    Failed(Error),
}

/// Output of a session in a step.
#[derive(Debug)]
#[non_exhaustive]
pub struct Output {
    /// The session.
    pub session: SessionId,
    /// The sampled token; none where the session ended without one.
    pub token: Option<Sampled>,
    /// Complete characters of text, possibly none.
    pub text: String,
    /// Whether and why the session ended.
    pub finish: Option<Finish>,
}

/// The state of a session.
pub struct Session {
    pub id: SessionId,
    /// Prompt and generated tokens.
    pub ids: Vec<u32>,
    prompt: usize,
    /// Tokens in the cache.
    pub cached: usize,
    /// Pages, which hold the cached tokens.
    pub pages: PageTable,
    /// Slot of its recurrent states, while it runs.
    pub slot: Option<u32>,
    /// Whether its end is reported.
    pub has_ended: bool,
    generation: Generation,
    text: TextStream,
    stops: StopStrings,
}

impl Session {
    /// A session that begins with a prompt.
    pub fn new(id: SessionId, prompt: &[u32], generation: Generation) -> Self {
        let text = prompt.last().map(|&last| TextStream::after(last)).unwrap_or_default();
        let stops = StopStrings::new(generation.stop.iter().cloned());
        let (ids, prompt) = (prompt.to_vec(), prompt.len());
        let (cached, pages, slot, has_ended) = (0, PageTable::default(), None, false);
        Self { id, ids, prompt, cached, pages, slot, has_ended, generation, text, stops }
    }

    /// Tokens that are not in the cache.
    pub fn pending(&self) -> usize {
        self.ids.len() - self.cached
    }

    /// The next `count` tokens as part of a step.
    pub fn sequence(&self, count: usize) -> Sequence<'_> {
        let length = self.cached + count;
        let draw = Draw { sampling: &self.generation.sampling, earlier: &self.ids };
        let draw = (length == self.ids.len()).then_some(draw);
        let slot = self.slot.unwrap_or(0);
        Sequence { ids: &self.ids[self.cached..length], length, pages: self.pages.pages(), slot, draw }
    }

    /// Whether it has all tokens that it may generate.
    pub fn is_done(&self) -> bool {
        self.ids.len() - self.prompt >= self.generation.max_tokens
    }

    /// Adds the next token, and says what to emit. `context` bounds the tokens of a session.
    pub fn advance(&mut self, sampled: Result<Sampled, Error>, tokenizer: &Tokenizer, context: usize) -> Output {
        let sampled = match sampled {
            Ok(sampled) => sampled,
            Err(error) => return self.end(None, String::new(), Finish::Failed(error), tokenizer),
        };
        let id = sampled.id;
        if tokenizer.is_end(id) && !self.generation.ignore_end {
            return self.end(Some(sampled), String::new(), Finish::EndOfText, tokenizer);
        }
        self.ids.push(id);
        let text = match self.text.push(id, |ids| tokenizer.decode(ids)) {
            Ok(text) => text,
            Err(error) => return self.end(Some(sampled), String::new(), Finish::Failed(error), tokenizer),
        };
        let (text, stop) = self.stops.push(&text);
        if let Some(stop) = stop {
            return Output { session: self.id, token: Some(sampled), text, finish: Some(Finish::StopString(stop)) };
        }
        if self.is_done() {
            return self.end(Some(sampled), text, Finish::MaxTokens, tokenizer);
        }
        if self.ids.len() > context {
            return self.end(Some(sampled), text, Finish::ContextFull, tokenizer);
        }
        Output { session: self.id, token: Some(sampled), text, finish: None }
    }

    /// The end of the session, with the text that was held back.
    pub fn end(&mut self, token: Option<Sampled>, text: String, finish: Finish, tokenizer: &Tokenizer) -> Output {
        let rest = self.text.finish(|ids| tokenizer.decode(ids)).unwrap_or_default();
        let (held, stop) = self.stops.push(&rest);
        let text = text + &held + &if stop.is_some() { String::new() } else { self.stops.finish() };
        Output { session: self.id, token, text, finish: Some(finish) }
    }
}
