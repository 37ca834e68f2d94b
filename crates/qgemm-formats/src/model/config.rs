//! The quantization settings of a checkpoint: `config.json`'s `quantization_config`, or `quantize_config.json`.

use std::sync::Arc;

use serde::Deserialize;

use crate::error::FormatError;
use crate::names::printable;
use crate::x_format::XFormat;

/// The settings that decide how tensors are read. All optional: what the tensors' shapes tell is taken from
/// them.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct QuantConfig {
    /// `"gptq"`, `"awq"`, `"fp8"`, …
    pub quant_method: Option<String>,
    /// Width of a code.
    #[serde(alias = "w_bit")]
    pub bits: Option<u32>,
    /// Input features per scale; −1 for all.
    #[serde(alias = "q_group_size")]
    pub group_size: Option<i64>,
    /// `"gptq"` (zero points stored less one), `"gptq_v2"`, or another packing.
    pub checkpoint_format: Option<String>,
    /// AWQ's packing: `"gemm"`, `"gemv"`, …
    pub version: Option<String>,
    /// Rows and columns of an FP8 scale block.
    pub weight_block_size: Option<Vec<usize>>,
    /// `"ue8m0"` where FP8 scales are powers of two, whatever they are stored as.
    pub scale_fmt: Option<String>,
    /// `"dynamic"` where scales of FP8 activations are made of the activations, `"static"` where they were calibrated.
    pub activation_scheme: Option<String>,
    /// Settings of groups of layers, as compressed-tensors has them.
    pub config_groups: Option<serde_json::Value>,
    /// GPTQ settings that differ by layer; where there are any, `bits` and `group_size` prove nothing.
    pub dynamic: Option<serde_json::Value>,
    /// All of the settings, for what is asked of one method or one layer.
    #[serde(skip)]
    pub all: Arc<serde_json::Value>,
}

impl QuantConfig {
    /// Reads either of the two files, which errors call `file`; a `config.json` without quantization gives the default.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the text is no JSON object or a setting has the wrong type.
    pub fn parse(file: &str, json: &str) -> Result<Self, FormatError> {
        let bad = |what: String| FormatError::BadFile { file: file.to_owned(), what: printable(&what) };
        let value: serde_json::Value = serde_json::from_str(json).map_err(|error| bad(error.to_string()))?;
        let object = value.as_object().ok_or_else(|| bad("expected a JSON object".into()))?;
        // ModelOpt's `hf_quant_config.json` and MLX's `config.json` have them below `quantization`.
        let names = ["quantization_config", "compression_config", "quantization"];
        let nested = names.iter().find_map(|name| object.get(*name).filter(|settings| !settings.is_null()));
        // A `config.json` has other things called `version` or `bits` at its top level.
        let settings = match nested {
            Some(nested) => nested.clone(),
            None if object.contains_key("architectures") || object.contains_key("model_type") => {
                return Ok(Self::default());
            }
            None => value,
        };
        let read = Self::deserialize(&settings).map_err(|error| bad(format!("quantization settings: {error}")))?;
        Ok(Self { all: Arc::new(settings), ..read })
    }

    /// Whether layers may differ from `bits` and `group_size`.
    pub fn varies_by_layer(&self) -> bool {
        self.dynamic.as_ref().is_some_and(|dynamic| !dynamic.is_null())
    }

    /// What activations of FP8 layers are stated to be rounded to; `None` also where groups of FP8 layers differ.
    pub fn stated_x(&self) -> Option<XFormat> {
        if let Some(scheme) = &self.activation_scheme {
            // Scales of 128 columns of X go with blocks of W; else a token has one.
            let dynamic = self.weight_block_size.as_ref().map_or(XFormat::E4M3Token, |_| XFormat::E4M3Block);
            return match scheme.to_ascii_lowercase().as_str() {
                "dynamic" => Some(dynamic),
                "static" => Some(XFormat::E4M3Tensor),
                _ => None,
            };
        }
        let groups = self.config_groups.as_ref()?.as_object()?.values();
        let mut stated =
            groups.filter(|group| is_float8(&group["weights"])).map(|group| x_of(&group["input_activations"]));
        let first = stated.next()??;
        stated.all(|other| other == Some(first)).then_some(first)
    }

    /// Whether FP8 scales are stated to be powers of two.
    pub fn has_power_scales(&self) -> bool {
        self.scale_fmt.as_deref().is_some_and(|format| format.eq_ignore_ascii_case("ue8m0"))
    }

    /// Whether the method is stated to be `method`.
    pub fn is(&self, method: &str) -> bool {
        self.quant_method.as_deref().is_some_and(|m| m.eq_ignore_ascii_case(method))
    }
}

/// Whether arguments of compressed-tensors are those of FP8.
fn is_float8(arguments: &serde_json::Value) -> bool {
    arguments["type"].as_str() == Some("float") && arguments["num_bits"].as_u64() == Some(8)
}

/// What arguments of compressed-tensors for activations come to, where there is a format for it. `dynamic` may be `"local"`, which is
/// for scales below a factor that was calibrated.
fn x_of(arguments: &serde_json::Value) -> Option<XFormat> {
    let is_dynamic = arguments["dynamic"].as_bool().unwrap_or(false);
    match (arguments["strategy"].as_str()?, is_dynamic, arguments["group_size"].as_u64()) {
        _ if !is_float8(arguments) => None,
        ("token", true, _) => Some(XFormat::E4M3Token),
        ("group", true, Some(128)) => Some(XFormat::E4M3Block),
        ("tensor", false, _) if arguments["dynamic"].is_boolean() || arguments["dynamic"].is_null() => {
            Some(XFormat::E4M3Tensor)
        }
        _ => None,
    }
}
