//! Sizes of an encoder, and the length of its texts.

use std::ops::Deref;
use std::path::Path;

use qgemm_api::{EncoderNumbers, Settings};

use crate::beside::json_beside;
use crate::error::Error;

/// Sizes of an encoder, and the length of its texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderSizes {
    numbers: EncoderNumbers,
    /// Tokens of a text at most.
    pub context: usize,
}

impl EncoderSizes {
    /// Reads the sizes of the model at `path`.
    ///
    /// # Errors
    /// As [`EncoderNumbers::read`]; [`Error::Io`], [`Error::Json`].
    pub fn read(settings: &Settings<'_>, path: &Path) -> Result<Self, Error> {
        let numbers = EncoderNumbers::read(settings)?;
        let positions = numbers.positions;
        // `sentence-transformers` cuts texts earlier.
        let stated = json_beside(path, "sentence_bert_config.json")?.unwrap_or_default();
        let stated = stated["max_seq_length"].as_u64().and_then(|tokens| usize::try_from(tokens).ok());
        let context = stated.filter(|&tokens| tokens > 0).map_or(positions, |tokens| tokens.min(positions));
        Ok(Self { numbers, context })
    }
}

impl Deref for EncoderSizes {
    type Target = EncoderNumbers;

    fn deref(&self) -> &EncoderNumbers {
        &self.numbers
    }
}
