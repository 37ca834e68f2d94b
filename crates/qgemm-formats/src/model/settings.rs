//! The quantization settings of a checkpoint, wherever they stand, and what they say of one layer.
//!
//! ```text
//! config.json                    quantization_config, compression_config, also below text_config, llm_config, …
//! quantize_config.json           all of it (GPTQ)
//! quant_config.json              all of it (AWQ)
//! quantization_config.json       all of it (AutoRound)
//! hf_quant_config.json           quantization (ModelOpt)
//! ```
//!
//! Settings are looked at when a layer is found that they decide about: what is wrong with them, or contradicts
//! another place, is an error of that layer alone.

use super::NamedFile;
use super::json::Json;
use super::overrides::Overrides;
use super::raw::bad;
use crate::error::FormatError;
use crate::names::printable;
use crate::x_format::XFormat;

/// What settings are called in a file that holds other things, too.
const SECTIONS: [&str; 3] = ["quantization_config", "compression_config", "quantization"];
/// Levels of parts of a model (`thinker_config.text_config`) below which settings are looked for.
const MOST_PARTS: usize = 4;

/// All settings of a checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    places: Vec<Place>,
}

/// One set of settings.
#[derive(Clone, Debug)]
struct Place {
    /// File and path in it.
    name: String,
    values: Json,
    overrides: Overrides,
}

impl Settings {
    /// Reads the files, some of which may say nothing of quantization.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when a text is no JSON object, or settings in it are none.
    pub fn parse(files: &[NamedFile<&str>]) -> Result<Self, FormatError> {
        let mut settings = Self::default();
        for NamedFile { name: file, contents } in files {
            let bad = |what: String| FormatError::BadFile { file: file.clone(), what: printable(&what) };
            let value = Json::parse(contents).map_err(|error| bad(error.to_string()))?;
            if !value.is_object() {
                return Err(bad(format!("expected a JSON object, got {value}")));
            }
            let before = settings.places.len();
            settings.collect(file, "", &value, 0).map_err(bad)?;
            // A `config.json` has other things called `version` or `bits` at its top level.
            let is_config = ["architectures", "model_type"].iter().any(|key| !value.get(key).is_null());
            if settings.places.len() == before && !is_config {
                settings.push(file.clone(), value);
            }
        }
        Ok(settings)
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
        self.places.push(Place { name: printable(&name), values, overrides });
    }

    /// The settings of each place.
    pub fn places(&self) -> impl Iterator<Item = &Json> {
        self.places.iter().map(|place| &place.values)
    }

    /// What is said of the layer `name`, such as `model.layers.0.mlp.up_proj`.
    pub fn layer(&self, name: &str) -> LayerSettings<'_> {
        let places = self.places.iter().map(|place| (place, place.overrides.find(name))).collect();
        LayerSettings { layer: name.to_owned(), places }
    }
}

/// What all places say of one layer. Where one says nothing of a setting, another may.
#[derive(Clone, Debug)]
pub(super) struct LayerSettings<'a> {
    layer: String,
    /// Each place with what it says of this layer apart from others.
    places: Vec<(&'a Place, Result<Option<&'a Json>, String>)>,
}

impl<'a> LayerSettings<'a> {
    /// The setting that is called one of `keys`, as `read` understands it.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when `read` does not understand a value, which should have been `expected`, when two
    /// places contradict each other, or when a place has a pattern that may be for this layer and cannot be tried.
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

    /// Who says what of the setting that is called one of `keys`, for errors; empty where nobody does.
    pub fn who_says(&self, keys: &[&str]) -> String {
        let stated = self.stated(keys).unwrap_or_default();
        stated.iter().map(Stated::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Every value of the setting that is called one of `keys`. What is `null` is not said.
    fn stated(&self, keys: &[&str]) -> Result<Vec<Stated<'a>>, FormatError> {
        let mut all = Vec::new();
        for (place, own) in &self.places {
            let own = own.as_ref().map_err(|why| bad(&self.layer, format!("{}: {why}", place.name)))?;
            let of = |values: &'a Json| {
                keys.iter().filter_map(move |&key| {
                    let (key, value) = values.entries().iter().rev().find(|(name, _)| name == key)?;
                    (!value.is_null()).then_some(Stated { place: &place.name, key, value })
                })
            };
            let own: Vec<_> = own.iter().flat_map(|&values| of(values)).collect();
            if own.is_empty() { all.extend(of(&place.values)) } else { all.extend(own) }
        }
        Ok(all)
    }

    /// The method (`"gptq"`, `"awq"`, `"fp8"`, `"compressed-tensors"`, …) in lower case.
    ///
    /// # Errors
    /// As [`Self::agreed`], and so all others.
    pub fn method(&self) -> Result<Option<String>, FormatError> {
        self.word(&["quant_method", "method"])
    }

    /// A setting that is a word, in lower case.
    pub fn word(&self, keys: &[&str]) -> Result<Option<String>, FormatError> {
        self.agreed(keys, "a string", Json::word)
    }

    /// A setting that is a truth value.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, FormatError> {
        self.agreed(&[key], "true or false", Json::boolean)
    }

    /// Width of a code; 16 of a layer that is stated not to be quantized.
    pub fn bits(&self) -> Result<Option<u32>, FormatError> {
        self.agreed(Self::BITS, "a number of bits", |value| u32::try_from(value.integer()?).ok())
    }

    /// Input features per scale; −1 for all.
    pub fn group_size(&self) -> Result<Option<i64>, FormatError> {
        self.agreed(Self::GROUP_SIZE, "a number", Json::integer)
    }

    /// What [`Self::bits`] is called.
    pub const BITS: &'static [&'static str] = &["bits", "w_bit", "wbits"];
    /// What [`Self::group_size`] is called.
    pub const GROUP_SIZE: &'static [&'static str] = &["group_size", "q_group_size"];

    /// Rows and columns of an FP8 scale block.
    pub fn weight_block_size(&self) -> Result<Option<Vec<usize>>, FormatError> {
        self.agreed(&["weight_block_size"], "two sizes", Json::sizes)
    }

    /// Whether FP8 scales are stated to be powers of two, whatever they are stored as.
    pub fn has_power_scales(&self) -> Result<bool, FormatError> {
        Ok(self.word(&["scale_fmt"])?.is_some_and(|format| format == "ue8m0"))
    }

    /// What activations of FP8 layers are stated to be rounded to; `None` also where groups of FP8 layers, or places,
    /// differ.
    pub fn stated_x(&self) -> Option<XFormat> {
        let mut stated = self.places.iter().filter_map(|(place, _)| x_of_place(&place.values));
        let first = stated.next()?;
        stated.all(|other| other == first).then_some(first)?
    }
}

/// A setting and where it stands.
struct Stated<'a> {
    place: &'a str,
    key: &'a str,
    value: &'a Json,
}

impl std::fmt::Display for Stated<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: `{}` is {}", self.place, self.key, self.value)
    }
}

/// What settings say of activations of FP8 layers: nothing, or something for which there may be no format.
fn x_of_place(settings: &Json) -> Option<Option<XFormat>> {
    if let Some(scheme) = settings.get("activation_scheme").word() {
        // Scales of 128 columns of X go with blocks of W; else a token has one.
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

/// Whether arguments of compressed-tensors are those of FP8.
fn is_float8(arguments: &Json) -> bool {
    arguments.get("type").word().as_deref() == Some("float") && arguments.get("num_bits").integer() == Some(8)
}

/// What arguments of compressed-tensors for activations come to, where there is a format for it. `dynamic` may be `"local"`, which is
/// for scales below a factor that was calibrated.
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
