//! Quantization settings of a checkpoint, from all its files, resolved per layer.
//!
//! ```text
//! config.json                    quantization_config, compression_config, also below text_config, llm_config, …
//! quantize_config.json           all of it (GPTQ)
//! quant_config.json              all of it (AWQ)
//! quantization_config.json       all of it (AutoRound)
//! hf_quant_config.json           quantization (ModelOpt)
//! ```
//!
//! Settings are read when a layer depends on them. An invalid or contradicting setting
//! is an error of that layer alone.

use super::json::Json;
use super::options::NamedFile;
use super::overrides::Overrides;
use super::raw::{Metadata, bad};
use crate::error::FormatError;
use crate::names::printable;
use crate::x_format::XFormat;

/// Keys of the settings within a larger file.
const SECTIONS: [&str; 3] = ["quantization_config", "compression_config", "quantization"];
/// Maximum nesting of model parts (`thinker_config.text_config`) in
/// the search for settings.
const MOST_PARTS: usize = 4;

/// All settings of a checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    sources: Vec<Source>,
    /// Metadata of the safetensors files.
    metadata: Metadata,
}

/// One set of settings.
#[derive(Clone, Debug)]
struct Source {
    /// File, and path within it.
    name: String,
    values: Json,
    overrides: Overrides,
}

impl Settings {
    /// Parses the files. Some may state no quantization.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when a text or its settings are no JSON object.
    pub fn parse(files: &[NamedFile<&str>]) -> Result<Self, FormatError> {
        let mut settings = Self::default();
        for NamedFile { name: file, contents } in files {
            let bad = |what: String| FormatError::BadFile { file: file.clone(), what: printable(&what) };
            let value = Json::parse(contents).map_err(|error| bad(error.to_string()))?;
            if !value.is_object() {
                return Err(bad(format!("expected a JSON object, got {value}")));
            }
            let before = settings.sources.len();
            settings.collect(file, "", &value, 0).map_err(bad)?;
            // The top level of a `config.json` has unrelated keys called `version` or `bits`.
            let is_config = ["architectures", "model_type"].iter().any(|key| !value.get(key).is_null());
            if settings.sources.len() == before && !is_config {
                settings.push(file.clone(), value);
            }
        }
        Ok(settings)
    }

    /// Adds the metadata of the safetensors files.
    pub fn with_metadata(self, metadata: Metadata) -> Self {
        Self { metadata, ..self }
    }

    /// JSON object in the metadata under the name of a tensor. `Null` when absent.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when it is no JSON.
    pub fn of_tensor(&self, name: &str) -> Result<Json, FormatError> {
        let Some(text) = self.metadata.get(name) else { return Ok(Json::Null) };
        Json::parse(text).map_err(|error| bad(name, format!("metadata of the file: {error}")))
    }

    fn collect(&mut self, file: &str, path: &str, value: &Json, depth: usize) -> Result<(), String> {
        for (key, value) in value.entries() {
            let path = format!("{path}{key}");
            match value {
                Json::Object(_) if SECTIONS.contains(&key.as_str()) => {
                    self.push(format!("{file}: {path}"), value.clone());
                }
                Json::Object(_) if key.ends_with("_config") && depth < MOST_PARTS => {
                    self.collect(file, &format!("{path}."), value, depth + 1)?;
                }
                Json::Null | Json::Object(_) => {}
                _ if SECTIONS[..2].contains(&key.as_str()) => {
                    return Err(format!("{path}: expected a JSON object, got {value}"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn push(&mut self, name: String, values: Json) {
        let overrides = Overrides::of(&values);
        self.sources.push(Source { name: printable(&name), values, overrides });
    }

    /// Settings of each source.
    pub fn sources(&self) -> impl Iterator<Item = &Json> {
        self.sources.iter().map(|source| &source.values)
    }

    /// Settings of the layer `name`, such as `model.layers.0.mlp.up_proj`.
    pub fn layer(&self, name: &str) -> LayerSettings<'_> {
        let sources = self.sources.iter().map(|source| (source, source.overrides.find(name))).collect();
        LayerSettings { layer: name.to_owned(), sources }
    }
}

/// Settings of one layer from all sources. One source may omit what another states.
#[derive(Clone, Debug)]
pub(super) struct LayerSettings<'a> {
    layer: String,
    /// Sources, each with its own per-layer settings.
    sources: Vec<(&'a Source, Result<Option<&'a Json>, String>)>,
}

impl<'a> LayerSettings<'a> {
    /// Setting with a key out of `keys`, parsed by `read`.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when `read` fails (the message says `expected`),
    /// when two sources contradict each other, or when a source has an invalid pattern
    /// that may match this layer.
    pub fn agreed<T: PartialEq>(
        &self,
        keys: &[&str],
        expected: &str,
        read: impl Fn(&Json) -> Option<T>,
    ) -> Result<Option<T>, FormatError> {
        let mut agreed: Option<(T, Stated<'_>)> = None;
        for stated in self.stated(keys)? {
            let value = read(stated.value).ok_or_else(|| bad(&self.layer, format!("{stated}: expected {expected}")))?;
            match &agreed {
                Some((first, by)) if *first != value => {
                    return Err(bad(&self.layer, format!("{by}, but {stated}: expected the same")));
                }
                Some(_) => {}
                None => agreed = Some((value, stated)),
            }
        }
        Ok(agreed.map(|(value, _)| value))
    }

    /// Sources of the setting and their values, for errors. Empty when none states it.
    pub fn who_says(&self, keys: &[&str]) -> String {
        let stated = self.stated(keys).unwrap_or_default();
        stated.iter().map(Stated::to_string).collect::<Vec<_>>().join(", ")
    }

    /// All values of the setting with a key out of `keys`. `null` means not stated.
    fn stated(&self, keys: &[&str]) -> Result<Vec<Stated<'a>>, FormatError> {
        let mut all = Vec::new();
        for (source, own) in &self.sources {
            let own = own.as_ref().map_err(|why| bad(&self.layer, format!("{}: {why}", source.name)))?;
            let of = |values: &'a Json| {
                keys.iter().filter_map(move |&key| {
                    let (key, value) = values.entries().iter().rev().find(|(name, _)| name == key)?;
                    (!value.is_null()).then_some(Stated { source: &source.name, key, value })
                })
            };
            let own: Vec<_> = own.iter().flat_map(|&values| of(values)).collect();
            if own.is_empty() { all.extend(of(&source.values)) } else { all.extend(own) }
        }
        Ok(all)
    }

    /// Quantization method (`"gptq"`, `"awq"`, `"fp8"`,
    /// `"compressed-tensors"`, …) in lower case.
    ///
    /// # Errors
    /// As [`Self::agreed`], and so all others.
    pub fn method(&self) -> Result<Option<String>, FormatError> {
        self.word(&["quant_method", "method"])
    }

    /// Word setting, in lower case.
    pub fn word(&self, keys: &[&str]) -> Result<Option<String>, FormatError> {
        self.agreed(keys, "a string", Json::word)
    }

    /// Boolean setting.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, FormatError> {
        self.agreed(&[key], "true or false", Json::boolean)
    }

    /// Code width in bits. 16 for layers that are stated as unquantized.
    pub fn bits(&self) -> Result<Option<u32>, FormatError> {
        self.agreed(Self::BITS, "a number of bits", |value| u32::try_from(value.integer()?).ok())
    }

    /// Input features per scale. −1 means all.
    pub fn group_size(&self) -> Result<Option<i64>, FormatError> {
        self.agreed(Self::GROUP_SIZE, "a number", Json::integer)
    }

    /// Keys of [`Self::bits`].
    pub const BITS: &'static [&'static str] = &["bits", "w_bit", "wbits"];
    /// Keys of [`Self::group_size`].
    pub const GROUP_SIZE: &'static [&'static str] = &["group_size", "q_group_size"];

    /// Rows and columns per FP8 scale.
    pub fn weight_block_size(&self) -> Result<Option<Vec<usize>>, FormatError> {
        self.agreed(&["weight_block_size"], "two sizes", Json::sizes)
    }

    /// Whether the settings declare FP8 scales as powers of two,
    /// whatever their element type.
    pub fn has_ue8m0_scales(&self) -> Result<bool, FormatError> {
        Ok(self.word(&["scale_fmt"])?.is_some_and(|format| format == "ue8m0"))
    }

    /// X format of FP8 layers. `None` also when groups or sources differ.
    pub fn stated_x(&self) -> Option<XFormat> {
        let mut stated = self.sources.iter().filter_map(|(source, _)| x_of_source(&source.values));
        let first = stated.next()?;
        stated.all(|other| other == first).then_some(first)?
    }
}

/// Setting and its source.
struct Stated<'a> {
    source: &'a str,
    key: &'a str,
    value: &'a Json,
}

impl std::fmt::Display for Stated<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: `{}` is {}", self.source, self.key, self.value)
    }
}

/// X format of FP8 layers in one source. Outer `None`: not stated.
/// Inner `None`: not supported.
fn x_of_source(settings: &Json) -> Option<Option<XFormat>> {
    if let Some(scheme) = settings.get("activation_scheme").word() {
        // Block scales of W imply 1×128 scales of X; otherwise X has one scale per token.
        let dynamic = if settings.get("weight_block_size").is_null() { XFormat::E4M3Token } else { XFormat::E4M3Block };
        return Some(match scheme.as_str() {
            "dynamic" => Some(dynamic),
            "static" => Some(XFormat::E4M3Tensor),
            _ => None,
        });
    }
    let groups = settings.get("config_groups").entries().iter().map(|(_, group)| group);
    let mut stated =
        groups.filter(|group| is_float8(group.get("weights"))).map(|group| x_of(group.get("input_activations")));
    let first = stated.next()?;
    Some(first.filter(|_| stated.all(|other| other == first)))
}

/// Whether compressed-tensors arguments describe FP8.
fn is_float8(arguments: &Json) -> bool {
    arguments.get("type").word().as_deref() == Some("float") && arguments.get("num_bits").integer() == Some(8)
}

/// X format of compressed-tensors activation arguments, if supported. `dynamic` may be
/// `"local"`: dynamic scales below a calibrated factor.
fn x_of(arguments: &Json) -> Option<XFormat> {
    let dynamic = arguments.get("dynamic");
    let is_dynamic = dynamic.boolean().unwrap_or(false);
    match (arguments.get("strategy").word()?.as_str(), is_dynamic, arguments.get("group_size").integer()) {
        _ if !is_float8(arguments) => None,
        ("token", true, _) => Some(XFormat::E4M3Token),
        ("group", true, Some(128)) => Some(XFormat::E4M3Block),
        ("tensor", false, _) if dynamic.boolean().is_some() || dynamic.is_null() => Some(XFormat::E4M3Tensor),
        _ => None,
    }
}
