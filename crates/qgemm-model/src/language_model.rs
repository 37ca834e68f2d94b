//! [`LanguageModel`]: a checkpoint with its tokenizer and chat template.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use qgemm_api::{Context, open_model};

use crate::architecture::architecture;
use crate::chat_template::{self, ChatTemplate, Message};
use crate::decoder::Decoder;
use crate::error::Error;
use crate::hyperparameters::Hyperparameters;
use crate::precision::Precision;
use crate::rotary::RotarySettings;
use crate::settings::Settings;
use crate::tokenizer::Tokenizer;
use crate::weight_bytes::WeightBytes;

/// A language model on a device. Cheap to clone; several [`Engine`](crate::Engine)s share its weights.
#[derive(Clone)]
pub struct LanguageModel {
    ctx: Context,
    architecture: &'static str,
    decoder: Arc<Decoder>,
    weight_bytes: WeightBytes,
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<ChatTemplate>,
}

impl LanguageModel {
    /// Opens a GGUF file, a safetensors file or a checkpoint folder, and loads its weights onto the device of `ctx`.
    ///
    /// # Errors
    /// [`Error::UnservedArchitecture`], [`Error::UnknownArchitecture`], and others that name what the model lacks.
    pub fn open(ctx: &Context, path: impl AsRef<Path>, precision: Precision) -> Result<Self, Error> {
        let path = path.as_ref();
        let model = open_model(path)?;
        let settings = Settings::read(&model, path)?;
        let architecture = architecture(settings.architecture())?;
        let names = architecture.names(settings.is_gguf());
        let numbers = Hyperparameters::read(&settings, architecture)?;
        let rotary = RotarySettings::read(&settings, architecture, &numbers)?;
        let tokenizer = Tokenizer::open(&model, path)?;
        let source = chat_template::source(&model, path)?;
        let text = |token: Option<&str>| token.unwrap_or_default().to_owned();
        let (bos, eos) = (text(tokenizer.bos_text()), text(tokenizer.eos_text()));
        let chat_template = source.map(|source| ChatTemplate::new(&source, &bos, &eos)).transpose()?;
        let rotary = (rotary, numbers.context);
        let weight_bytes = WeightBytes::new(&model, names, &numbers);
        let decoder = Decoder::load(ctx, &model, (architecture, names), numbers, rotary, precision)?;
        Ok(Self {
            ctx: ctx.clone(),
            architecture: architecture.name,
            decoder: Arc::new(decoder),
            weight_bytes,
            tokenizer: Arc::new(tokenizer),
            chat_template,
        })
    }

    /// The device's context.
    pub fn context(&self) -> &Context {
        &self.ctx
    }

    /// Name of the architecture.
    pub fn architecture(&self) -> &'static str {
        self.architecture
    }

    /// Sizes and constants.
    pub fn hyperparameters(&self) -> &Hyperparameters {
        &self.decoder.numbers
    }

    /// Size of the vocabulary: rows of the embedding.
    pub fn vocabulary(&self) -> usize {
        self.decoder.vocabulary()
    }

    /// Bytes of weights that a step of `tokens` tokens reads, in the
    /// checkpoint's formats.
    ///
    /// An embedding counts if it is tied to the head. Experts count
    /// as often as a router that is balanced chooses them.
    pub fn weight_bytes(&self, tokens: usize) -> f64 {
        self.weight_bytes.of_step(tokens)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Tokens of a conversation, ready for the assistant's reply.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::ChatTemplate`], [`Error::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        let template = self.chat_template.as_ref().ok_or(Error::NoChatTemplate)?;
        self.tokenizer.encode_chat(&template.render(messages, true)?)
    }

    /// The loaded weights.
    pub(crate) fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }
}

impl fmt::Debug for LanguageModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = &self.decoder.numbers;
        f.debug_struct("LanguageModel")
            .field("architecture", &self.architecture)
            .field("numbers", numbers)
            .finish_non_exhaustive()
    }
}
