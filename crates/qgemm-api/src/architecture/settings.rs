//! Hyperparameters as files state them: GGUF metadata or `config.json`.

use std::path::Path;

use qgemm_formats::model::gguf::{GgufArray, GgufValue};
use qgemm_formats::model::{Model, strict_json};
use serde_json::Value;

use crate::error::Error;
use crate::model::config_of;

/// Where hyperparameters stand.
pub enum Settings<'m> {
    /// Metadata of a GGUF file; keys of the architecture begin with its name.
    Gguf {
        /// The file.
        model: &'m Model,
        /// `general.architecture`.
        architecture: String,
    },
    /// The `config.json` of a safetensors checkpoint.
    Config(Value),
}

/// Keys of one hyperparameter: behind `ARCHITECTURE.` in GGUF metadata, and JSON pointers in `config.json`.
#[derive(Clone, Copy)]
pub struct Key {
    /// GGUF key; empty where GGUF has none.
    pub gguf: &'static str,
    /// JSON pointers, of which the first that exists counts.
    pub config: &'static [&'static str],
}

impl<'m> Settings<'m> {
    /// Reads the settings of the model at `path`.
    ///
    /// # Errors
    /// When there are none.
    pub fn read(model: &'m Model, path: &Path) -> Result<Self, Error> {
        if !model.metadata().is_empty() {
            let architecture = model.metadata_value("general.architecture").and_then(GgufValue::as_str);
            return Ok(Self::Gguf { model, architecture: architecture.unwrap_or_default().to_owned() });
        }
        let Some(config) = config_of(path)? else {
            return Err(Error::MissingSetting { name: "config.json".into() });
        };
        let parsed = serde_json::from_str(&strict_json(&config.contents));
        let unreadable = |error| Error::IncompleteModel { what: format!("{}: {error}", config.name) };
        parsed.map(Self::Config).map_err(unreadable)
    }

    /// Name of the architecture.
    pub fn architecture(&self) -> &str {
        match self {
            Self::Gguf { architecture, .. } => architecture,
            Self::Config(config) => config["model_type"].as_str().unwrap_or_default(),
        }
    }

    /// Whether tensors have the names of GGUF.
    pub fn is_gguf(&self) -> bool {
        matches!(self, Self::Gguf { .. })
    }

    /// A number.
    pub fn number(&self, key: Key) -> Option<f64> {
        match self {
            Self::Gguf { .. } => self.gguf(key)?.as_f64(),
            Self::Config(config) => key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_f64()),
        }
    }

    /// A non-negative integer.
    pub fn count(&self, key: Key) -> Option<usize> {
        self.number(key).filter(|n| n.fract() == 0.0 && (0.0..1e12).contains(n)).map(|n| n as usize)
    }

    /// A list of non-negative integers.
    pub fn counts(&self, key: Key) -> Option<Vec<usize>> {
        let count = |n: f64| (n.fract() == 0.0 && (0.0..1e12).contains(&n)).then_some(n as usize);
        match self {
            Self::Gguf { .. } => {
                let GgufValue::Array(array) = self.gguf(key)? else { return None };
                let of = |at| GgufValue::Scalar(array.scalar(at)?).as_f64().and_then(count);
                (0..array.len()).map(of).collect()
            }
            Self::Config(config) => {
                let items = key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_array())?;
                items.iter().map(|item| item.as_f64().and_then(count)).collect()
            }
        }
    }

    /// A text.
    pub fn text(&self, key: Key) -> Option<&str> {
        match self {
            Self::Gguf { .. } => self.gguf(key)?.as_str(),
            Self::Config(config) => key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_str()),
        }
    }

    /// A truth value.
    pub fn flag(&self, key: Key) -> Option<bool> {
        match self {
            Self::Gguf { .. } => self.gguf(key)?.as_bool(),
            Self::Config(config) => key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_bool()),
        }
    }

    /// A list of truth values in GGUF metadata.
    pub fn flags(&self, key: Key) -> Option<Vec<bool>> {
        const BOOL: u32 = 7;
        match self {
            Self::Gguf { .. } => match self.gguf(key)? {
                GgufValue::Array(GgufArray::Scalars { kind: BOOL, bytes }) => {
                    Some(bytes.iter().map(|&byte| byte != 0).collect())
                }
                _ => None,
            },
            Self::Config(_) => None,
        }
    }

    /// A list of texts in `config.json`.
    pub fn texts(&self, key: Key) -> Option<Vec<&str>> {
        let Self::Config(config) = self else { return None };
        let items = key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_array())?;
        Some(items.iter().map(|item| item.as_str().unwrap_or_default()).collect())
    }

    /// A value that must be there.
    ///
    /// # Errors
    /// [`Error::MissingSetting`].
    pub fn required<T>(&self, found: Option<T>, key: Key) -> Result<T, Error> {
        found.ok_or_else(|| Error::MissingSetting { name: self.name(key) })
    }

    /// The key, for messages.
    pub fn name(&self, key: Key) -> String {
        match self {
            Self::Gguf { architecture, .. } => format!("{architecture}.{}", key.gguf),
            Self::Config(_) => key.config.first().unwrap_or(&key.gguf).trim_start_matches('/').replace('/', "."),
        }
    }

    fn gguf(&self, key: Key) -> Option<&'m GgufValue> {
        match self {
            Self::Gguf { model, architecture } => model.metadata_value(&format!("{architecture}.{}", key.gguf)),
            Self::Config(_) => None,
        }
    }
}
