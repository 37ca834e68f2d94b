//! Hyperparameters as files state them: GGUF metadata or `config.json`.

use std::path::Path;

use qgemm_api::gguf::{GgufScalar, GgufValue};
use qgemm_api::{Model, model_files, strict_json};
use serde_json::Value;

use crate::error::Error;

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
        match metadata(model, "general.architecture").and_then(GgufValue::as_str) {
            Some(architecture) => Ok(Self::Gguf { model, architecture: architecture.to_owned() }),
            None => match json_beside(path, "config.json")? {
                Some(config) => Ok(Self::Config(config)),
                None => Err(Error::MissingSetting { name: "config.json".into() }),
            },
        }
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
            Self::Gguf { .. } => number_of(self.gguf(key)?),
            Self::Config(config) => key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_f64()),
        }
    }

    /// A non-negative integer.
    pub fn count(&self, key: Key) -> Option<usize> {
        self.number(key).filter(|n| n.fract() == 0.0 && (0.0..1e12).contains(n)).map(|n| n as usize)
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
            Self::Gguf { .. } => match self.gguf(key)? {
                GgufValue::Scalar(GgufScalar::Bool(value)) => Some(*value),
                _ => None,
            },
            Self::Config(config) => key.config.iter().find_map(|pointer| config.pointer(pointer)?.as_bool()),
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
            Self::Gguf { model, architecture } => metadata(model, &format!("{architecture}.{}", key.gguf)),
            Self::Config(_) => None,
        }
    }
}

/// A metadata value of a GGUF file.
pub fn metadata<'m>(model: &'m Model, key: &str) -> Option<&'m GgufValue> {
    model.metadata().iter().find(|(name, _)| name == key).map(|(_, value)| value)
}

/// A metadata value as a number.
pub fn number_of(value: &GgufValue) -> Option<f64> {
    match value {
        GgufValue::Scalar(GgufScalar::F32(number)) => Some(f64::from(*number)),
        GgufValue::Scalar(GgufScalar::F64(number)) => Some(*number),
        other => other.as_u64().map(|number| number as f64),
    }
}

/// The text of the file `name` in the folder of the model at `path`, if there is one.
///
/// # Errors
/// [`Error::Io`], and when the model's files are not found.
pub fn text_beside(path: &Path, name: &str) -> Result<Option<String>, Error> {
    let files = model_files(path)?;
    let Some(folder) = files.first().and_then(|file| file.parent()) else { return Ok(None) };
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path, source }),
    }
}

/// The JSON of the file `name` in the folder of the model at `path`, if there is one.
///
/// # Errors
/// As [`text_beside`]; [`Error::Json`].
pub fn json_beside(path: &Path, name: &str) -> Result<Option<Value>, Error> {
    let Some(text) = text_beside(path, name)? else { return Ok(None) };
    let parsed = serde_json::from_str(&strict_json(&text));
    parsed.map(Some).map_err(|source| Error::Json { path: path.join(name), source })
}
