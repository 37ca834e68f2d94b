//! Language models on qgemm: checkpoints, tokenizers, sessions with a paged KV cache, sampling and streaming.
//!
//! ```no_run
//! use qgemm_api::Context;
//! use qgemm_model::{Engine, EngineOptions, Generation, LanguageModel, Precision};
//!
//! let ctx = Context::open("auto")?;
//! let model = LanguageModel::open(&ctx, "model.gguf", Precision::default())?;
//! let mut engine = Engine::new(&model, EngineOptions::default())?;
//!
//! let prompt = model.tokenizer().encode("The capital of France is")?;
//! engine.start(&prompt, Generation { max_tokens: 32, ..Generation::default() })?;
//! let mut text = String::new();
//! while !engine.is_idle() {
//!     for output in engine.step()? {
//!         text += &output.text; // complete characters, as they come
//!     }
//! }
//! # Ok::<(), qgemm_model::Error>(())
//! ```
//!
//! A [`LanguageModel`] is a checkpoint on a device with its tokenizer and chat template. An [`Engine`] runs its sessions step by
//! step: all sessions that generate share one pass over the weights, and prompts join as the cache has pages. An error of one
//! session ends that session alone ([`Finish`]).
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod beside;
mod chat_template;
mod encoder;
mod engine;
mod error;
mod followers;
mod language_model;
mod model_options;
mod page_pool;
mod precision;
mod projection;
mod sampler;
mod session;
mod steps;
mod stop_strings;
mod tensors;
mod text_stream;
mod tokenizer;

pub use chat_template::{ChatTemplate, Message};
pub use encoder::Encoder;
pub use engine::{Engine, EngineOptions};
pub use error::Error;
pub use language_model::LanguageModel;
pub use model_options::ModelOptions;
pub use precision::Precision;
pub use qgemm_api::{ExpertNumbers, Hyperparameters};
pub use sampler::{Sampled, Sampling};
pub use session::{Finish, Generation, Output, SessionId};
pub use stop_strings::StopStrings;
pub use text_stream::TextStream;
pub use tokenizer::Tokenizer;

/// The programs of the guide, compiled with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/models.md")]
struct Guide;

/// The page on several GPUs, compiled with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/several-gpus.md")]
struct SeveralGpus;

/// The README's example, compiled with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
