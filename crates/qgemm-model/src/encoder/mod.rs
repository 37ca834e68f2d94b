//! [`Encoder`]: texts to embeddings, with BERT models.

mod numbers;
mod pass;
mod pooling;
mod weights;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use qgemm_api::{Context, ENCODERS, GGUF_ENCODER, HUGGING_FACE_ENCODER, Settings, open_model};

use crate::error::Error;
use crate::precision::Precision;
use crate::tokenizer::Tokenizer;
use numbers::EncoderSizes;
use pass::Pass;
use pooling::Pooling;
use weights::EncoderWeights;

/// Tokens of a pass. Texts are whole: a longer one has a pass alone.
const PASS_TOKENS: usize = 4096;

/// A text encoder: each text becomes a vector of unit length. Cheap to clone.
///
/// Texts are packed without padding.
///
/// ```no_run
/// use qgemm_api::Context;
/// use qgemm_model::{Encoder, Precision};
///
/// let encoder = Encoder::open(&Context::open("auto")?, "all-MiniLM-L6-v2", Precision::default())?;
/// let embeddings = encoder.encode(&["A man is eating food.", "Someone has a meal."])?;
/// let similarity: f32 = embeddings[0].iter().zip(&embeddings[1]).map(|(a, b)| a * b).sum();
/// # Ok::<(), qgemm_model::Error>(())
/// ```
#[derive(Clone)]
pub struct Encoder {
    ctx: Context,
    numbers: EncoderSizes,
    precision: Precision,
    pooling: Pooling,
    tokenizer: Arc<Tokenizer>,
    weights: Arc<EncoderWeights>,
}

impl Encoder {
    /// Opens a GGUF file, a safetensors file or a checkpoint folder, and loads its weights onto the device of `ctx`.
    ///
    /// # Errors
    /// [`Error::NotAnEncoder`], and others that name what the model lacks.
    pub fn open(ctx: &Context, path: impl AsRef<Path>, precision: Precision) -> Result<Self, Error> {
        let path = path.as_ref();
        let model = open_model(path)?;
        let settings = Settings::read(&model, path)?;
        if !ENCODERS.contains(&settings.architecture()) {
            return Err(Error::NotAnEncoder { name: settings.architecture().to_owned(), served: ENCODERS.to_vec() });
        }
        let numbers = EncoderSizes::read(&settings, path)?;
        let pooling = Pooling::read(&settings, path)?;
        let tokenizer = Tokenizer::open(&model, path)?.of_encoder(numbers.context)?;
        let names = if settings.is_gguf() { &GGUF_ENCODER } else { &HUGGING_FACE_ENCODER };
        let weights = EncoderWeights::load(ctx, &model, names, &numbers, precision)?;
        let (tokenizer, weights) = (Arc::new(tokenizer), Arc::new(weights));
        Ok(Self { ctx: ctx.clone(), numbers, precision, pooling, tokenizer, weights })
    }

    /// Features of an embedding.
    pub fn dimension(&self) -> usize {
        self.numbers.hidden
    }

    /// Tokens of a text at most. More are cut off.
    pub fn context(&self) -> usize {
        self.numbers.context
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Embeddings of texts: [`Encoder::dimension`] features each, of unit length.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]; [`Error::EmptyPrompt`] for a text without tokens; a device error.
    pub fn encode(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        let ids = texts.iter().map(|text| self.tokens(text)).collect::<Result<Vec<_>, Error>>()?;
        let mut embeddings = Vec::with_capacity(texts.len());
        let mut rest = &ids[..];
        while !rest.is_empty() {
            let (texts, later) = rest.split_at(texts_of_a_pass(rest));
            embeddings.extend(self.pass(texts)?);
            rest = later;
        }
        Ok(embeddings)
    }

    fn tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        let ids = self.tokenizer.encode(text)?;
        let vocabulary = self.weights.words.n();
        match ids.iter().find(|&&id| id as usize >= vocabulary) {
            _ if ids.is_empty() => Err(Error::EmptyPrompt),
            Some(&id) => Err(Error::UnknownToken { id, vocabulary }),
            None => Ok(ids),
        }
    }

    /// Embeddings of texts in one pass over the weights.
    fn pass(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
        let pass = Pass::new(&self.ctx, &self.weights, &self.numbers, self.precision, &lengths)?;
        let rows = pass.run(&texts.concat(), &self.numbers)?;
        let (hidden, mut rest) = (self.numbers.hidden, &rows[..]);
        let embedding = |tokens: &usize| {
            let (text, later) = rest.split_at(tokens * hidden);
            rest = later;
            self.pooling.embedding(text, hidden)
        };
        Ok(lengths.iter().map(embedding).collect())
    }
}

/// Number of the first texts that one pass takes.
fn texts_of_a_pass(texts: &[Vec<u32>]) -> usize {
    let mut tokens = 0;
    let fits = |text: &&Vec<u32>| {
        tokens += text.len();
        tokens <= PASS_TOKENS
    };
    texts.iter().take_while(fits).count().max(1)
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("numbers", &self.numbers).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_takes_whole_texts() {
        let texts = |lengths: &[usize]| lengths.iter().map(|&n| vec![0; n]).collect::<Vec<_>>();
        assert_eq!(texts_of_a_pass(&texts(&[PASS_TOKENS - 1, 1, 1])), 2);
        assert_eq!(texts_of_a_pass(&texts(&[PASS_TOKENS + 1, 1])), 1);
        assert_eq!(texts_of_a_pass(&texts(&[1, PASS_TOKENS])), 1);
    }
}
