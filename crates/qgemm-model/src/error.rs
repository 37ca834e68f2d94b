//! The error type of the crate.

use std::path::PathBuf;

use qgemm_api::{FormatError, HalError};
use thiserror::Error;

/// Source of an error in a tokenizer.
pub(crate) type TokenizerSource = Box<dyn std::error::Error + Send + Sync>;

/// Errors of models, from checkpoint to text.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation, a device or a model file failed.
    #[error(transparent)]
    Api(#[from] qgemm_api::Error),
    /// A file beside the model cannot be read.
    #[error("{}: cannot be read", .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
    /// A JSON file beside the model is malformed.
    #[error("{}: expected JSON", .path.display())]
    Json {
        /// The path.
        path: PathBuf,
        /// Parse error.
        source: serde_json::Error,
    },
    /// The model is an encoder, which generates no text.
    #[error("architecture `{name}` is an encoder: open it with qgemm_model::Encoder")]
    IsEncoder {
        /// Name in the checkpoint.
        name: String,
    },
    /// The model is no encoder that the crate runs.
    #[error("architecture `{name}`: no encoder that qgemm-model runs (it runs {})", .served.join(", "))]
    NotAnEncoder {
        /// Name in the checkpoint.
        name: String,
        /// Encoders that run.
        served: Vec<&'static str>,
    },
    /// There is no tokenizer in the GGUF file, or no `tokenizer.json` beside the checkpoint.
    #[error("no tokenizer: expected {expected}")]
    NoTokenizer {
        /// Where it was looked for.
        expected: String,
    },
    /// The GGUF file has a kind of tokenizer that the crate does not build.
    #[error("`{key}` is `{got}`: expected one of {}", .served.join(", "))]
    UnservedTokenizer {
        /// Metadata key.
        key: &'static str,
        /// The kind.
        got: String,
        /// Kinds that are built.
        served: Vec<&'static str>,
    },
    /// The tokenizer is malformed, or cannot encode a text.
    #[error("tokenizer")]
    Tokenizer {
        /// The tokenizer's error.
        source: TokenizerSource,
    },
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoChatTemplate,
    /// The chat template has an error, or refuses the messages.
    #[error("chat template")]
    ChatTemplate {
        /// The template engine's error.
        source: minijinja::Error,
    },
    /// A prompt without tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A prompt longer than the context or the cache.
    #[error("the prompt has {tokens} tokens: expected at most {limit}")]
    PromptTooLong {
        /// Its tokens.
        tokens: usize,
        /// Tokens that fit.
        limit: usize,
    },
    /// A token id outside of the vocabulary.
    #[error("token {id}: expected less than {vocabulary}, the size of the vocabulary")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocabulary: usize,
    },
    /// A sampling parameter out of range.
    #[error("{name} is {got}: expected {expected}")]
    SamplingParameter {
        /// The parameter.
        name: &'static str,
        /// Its value.
        got: f32,
        /// Its range.
        expected: &'static str,
    },
    /// A logit is NaN or +∞.
    #[error("the logit of token {id} is {got}")]
    NonFiniteLogit {
        /// The token.
        id: usize,
        /// The logit.
        got: f32,
    },
    /// No token has a logit above −∞.
    #[error("no token has a finite logit")]
    NoCandidate,
    /// An engine option out of range.
    #[error("{name} is {got}: expected at least {least}")]
    EngineOption {
        /// The option.
        name: &'static str,
        /// Its value.
        got: usize,
        /// Its minimum.
        least: usize,
    },
    /// The session has ended, or belongs to another engine.
    #[error("no such session")]
    NoSuchSession,
}

impl Error {
    /// A tokenizer's error.
    pub(crate) fn tokenizer(source: impl Into<TokenizerSource>) -> Self {
        Self::Tokenizer { source: source.into() }
    }
}

impl From<FormatError> for Error {
    fn from(error: FormatError) -> Self {
        Self::Api(error.into())
    }
}

impl From<HalError> for Error {
    fn from(error: HalError) -> Self {
        Self::Api(error.into())
    }
}

impl From<minijinja::Error> for Error {
    fn from(source: minijinja::Error) -> Self {
        Self::ChatTemplate { source }
    }
}
