//! [`Network::read`]: from a model's files to its layers.

use std::path::Path;

use qgemm_formats::model::Model;

use super::decoder::decoder;
use super::encoder::encoder;
use super::network::Network;
use super::served::{ENCODERS, architecture};
use super::settings::Settings;
use crate::error::Error;

impl Network {
    /// Reads the architecture of `model`, which was opened at `path`.
    ///
    /// Gemma, gemma3, gpt-oss, lfm2, llama, mistral, mixtral, nemotron_h, qwen2,
    /// qwen3, qwen35, qwen3moe, qwen3next or bert, from GGUF or safetensors.
    ///
    /// # Errors
    /// [`Error::UnknownArchitecture`] and
    /// [`Error::UnservedArchitecture`]; others name the setting
    /// or tensor that is missing, of another shape,
    /// or not part of the architecture.
    pub fn read(model: &Model, path: impl AsRef<Path>) -> Result<Self, Error> {
        let settings = Settings::read(model, path.as_ref())?;
        match ENCODERS.contains(&settings.architecture()) {
            true => encoder(model, &settings),
            false => decoder(model, &settings, architecture(settings.architecture())?),
        }
    }
}
