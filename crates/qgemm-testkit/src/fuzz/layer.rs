//! A one-layer checkpoint: tensors and settings as their files
//! state them.

use std::collections::BTreeMap;

use half::{bf16, f16};
use serde_json::{Map, Value};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub(super) type Tensors = BTreeMap<String, Tensor>;

/// Values `[N][K]`, row after row.
pub(super) type Values = Vec<f32>;

/// JSON as Python reads and writes it: with NaN and infinities,
/// and a byte-order mark.
pub(super) fn python_json(text: &str) -> Option<Value> {
    let mut plain = String::new();
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = text.strip_prefix('\u{feff}').unwrap_or(text);
    while let Some(next) = rest.chars().next() {
        if !in_string && let Some(token) = ["-Infinity", "Infinity", "NaN"].iter().find(|t| rest.starts_with(**t)) {
            plain.push_str("null");
            rest = &rest[token.len()..];
            continue;
        }
        if !escaped && next == '"' {
            in_string = !in_string;
        }
        escaped = in_string && !escaped && next == '\\';
        plain.push(next);
        rest = &rest[next.len_utf8()..];
    }
    serde_json::from_str(&plain).ok()
}

/// The quantization settings within a file of settings.
pub(super) fn quantization(file: &Map<String, Value>) -> Map<String, Value> {
    let places = [
        Some(file),
        file.get("text_config").and_then(Value::as_object),
        file.get("llm_config").and_then(Value::as_object),
    ];
    for place in places.into_iter().flatten() {
        for key in ["quantization_config", "compression_config"] {
            if let Some(Value::Object(found)) = place.get(key) {
                return found.clone();
            }
        }
    }
    let is_config = ["architectures", "model_type"].iter().any(|key| file.contains_key(*key));
    if is_config { Map::new() } else { file.clone() }
}

pub(super) struct Settings(pub Map<String, Value>);

/// Value of a key.
pub(super) enum Stated<T> {
    Nothing,
    This(T),
    Nonsense,
}

impl Settings {
    pub fn text(&self, key: &str) -> Stated<String> {
        match self.0.get(key) {
            None | Some(Value::Null) => Stated::Nothing,
            Some(Value::String(text)) => Stated::This(text.trim().to_ascii_lowercase()),
            _ => Stated::Nonsense,
        }
    }

    /// An integer, stored as number or string.
    pub fn integer(&self, keys: [&str; 2]) -> Stated<i64> {
        let found = keys.iter().find_map(|key| self.0.get(*key).filter(|value| !value.is_null()));
        let number = match found {
            None => return Stated::Nothing,
            Some(Value::String(text)) => text.trim().parse::<f64>().ok(),
            Some(value) => value.as_f64(),
        };
        number.filter(|n| n.fract() == 0.0 && n.abs() < 1e15).map_or(Stated::Nonsense, |n| Stated::This(n as i64))
    }

    /// A truth value, stored as such or as text; `None` for anything else.
    pub fn flag(&self, key: &str) -> Option<Option<bool>> {
        match self.0.get(key) {
            None | Some(Value::Null) => Some(None),
            Some(Value::Bool(value)) => Some(Some(*value)),
            Some(Value::String(text)) => text.trim().to_ascii_lowercase().parse().ok().map(Some),
            Some(_) => None,
        }
    }

    /// Whether settings declare scales for 8-bit weights.
    pub fn promises_scales(&self) -> bool {
        let by_method =
            matches!(self.text("quant_method"), Stated::This(m) if m.starts_with("compressed") || m == "modelopt");
        by_method
            || ["weight_block_size", "config_groups"].iter().any(|key| self.0.get(*key).is_some_and(|v| !v.is_null()))
    }
}

/// Values of float tensors; `None` for other types.
pub(super) fn floats(tensor: &Tensor) -> Option<Values> {
    let pairs = |convert: fn([u8; 2]) -> f32| tensor.bytes.as_chunks::<2>().0.iter().map(|b| convert(*b)).collect();
    Some(match tensor.dtype.as_str() {
        "F32" => tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        "F16" => pairs(|b| f16::from_le_bytes(b).to_f32()),
        "BF16" => pairs(|b| bf16::from_le_bytes(b).to_f32()),
        _ => return None,
    })
}

/// Float scales, or power-of-two scales in bytes.
pub(super) fn scales(tensor: &Tensor) -> Option<Values> {
    match tensor.dtype.as_str() {
        "F8_E8M0" | "U8" => Some(tensor.bytes.iter().map(|b| (f64::from(*b) - 127.0).exp2() as f32).collect()),
        _ => floats(tensor),
    }
}

pub(super) fn words(tensor: &Tensor) -> Option<Vec<u32>> {
    let is_words = tensor.dtype == "I32" && tensor.shape.len() == 2;
    is_words.then(|| tensor.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

/// Bit field of `bits` bits at bit `at`, in every `stride`-th
/// word from `first`.
pub(super) fn field(words: &[u32], first: usize, stride: usize, at: usize, bits: usize) -> Option<u32> {
    (0..bits).try_fold(0, |number, bit| {
        let word = words.get(first + (at + bit) / 32 * stride)?;
        Some(number | (word >> ((at + bit) % 32) & 1) << bit)
    })
}
