//! Settings of a checkpoint, as its files state them: metadata of GGUF;
//! `config.json`, quantization and tokenizer files beside safetensors.

use std::path::Path;

use qgemm_api::gguf::{GgufScalar, GgufValue};
use qgemm_api::{Model, model_files, strict_json};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::table::{Column, Row, words};
use crate::text_file;

/// Settings files of safetensors checkpoints.
const FILES: [&str; 5] =
    ["config.json", "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json"];
/// Deepest objects whose settings are listed.
const DEEPEST: usize = 4;

/// A setting and its value.
#[derive(Serialize)]
pub struct SettingRow {
    setting: String,
    value: Value,
}

impl Row for SettingRow {
    const COLUMNS: &'static [Column] = &[words("setting", 44), words("value", 0)];

    fn cells(&self) -> Vec<String> {
        /// Longer texts, such as chat templates, are only in JSON.
        const LONGEST: usize = 200;
        let value = match &self.value {
            Value::String(text) if text.len() > LONGEST => format!("text of {} bytes", text.len()),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        vec![self.setting.clone(), value]
    }
}

/// The settings of the model at `path`.
///
/// # Errors
/// When the model's files are not found.
pub fn of(model: &Model, path: &Path) -> anyhow::Result<Vec<SettingRow>> {
    let files = model_files(path)?;
    let row = |setting: &str, value: Value| SettingRow { setting: setting.to_owned(), value };
    let is_gguf = !model.metadata().is_empty();
    let mut rows = vec![row("container", if is_gguf { "GGUF" } else { "safetensors" }.into())];
    rows.push(row("files", files.len().into()));
    for (key, value) in model.metadata() {
        rows.push(row(key, of_gguf(value)));
    }
    if let (false, Some(folder)) = (is_gguf, files.first().and_then(|file| file.parent())) {
        for name in FILES {
            let file = folder.join(name);
            if file.exists() {
                match json(&file) {
                    Ok(value) => list(name, &value, 0, &mut rows),
                    Err(error) => rows.push(row(name, format!("not readable: {error:#}").into())),
                }
            }
        }
        let tokenizer = folder.join("tokenizer.json");
        if tokenizer.exists() {
            let kind = tokenizer_kind(&tokenizer).unwrap_or_else(|error| format!("not readable: {error:#}"));
            rows.push(row("tokenizer.json: model.type", kind.into()));
        }
    }
    Ok(rows)
}

/// A metadata value; of a list its length, because vocabularies are long.
fn of_gguf(value: &GgufValue) -> Value {
    match value {
        GgufValue::String(text) => text.clone().into(),
        GgufValue::Scalar(GgufScalar::Bool(yes)) => (*yes).into(),
        // Its shortest decimal form: 1e-5, not 9.999999747378752e-6.
        GgufValue::Scalar(GgufScalar::F32(number)) => {
            number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
        }
        GgufValue::Array(array) => format!("list of {}", array.len()).into(),
        other => match (other.as_u64(), other.as_f64()) {
            (Some(number), _) => number.into(),
            (_, Some(number)) => number.into(),
            _ => "not text in UTF-8".into(),
        },
    }
}

fn json(path: &Path) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&strict_json(&text_file::read(path)?))?)
}

/// Lists the settings of an object and of the objects in it.
fn list(name: &str, value: &Value, depth: usize, rows: &mut Vec<SettingRow>) {
    /// Longest list that is shown whole.
    const LONGEST: usize = 8;
    let row = |value: Value| SettingRow { setting: name.to_owned(), value };
    let separator = if depth == 0 { ": " } else { "." };
    match value {
        Value::Object(fields) if depth < DEEPEST => {
            fields.iter().for_each(|(key, value)| list(&format!("{name}{separator}{key}"), value, depth + 1, rows));
        }
        Value::Object(fields) => rows.push(row(format!("{} settings", fields.len()).into())),
        Value::Array(values) if values.len() > LONGEST => rows.push(row(format!("list of {}", values.len()).into())),
        Value::Null => {}
        other => rows.push(row(other.clone())),
    }
}

/// The algorithm of a `tokenizer.json`, such as `BPE`.
fn tokenizer_kind(path: &Path) -> anyhow::Result<String> {
    #[derive(Deserialize)]
    struct Tokenizer {
        model: Kind,
    }
    #[derive(Deserialize)]
    struct Kind {
        #[serde(rename = "type")]
        kind: String,
    }
    let tokenizer: Tokenizer = serde_json::from_str(&text_file::read(path)?)?;
    Ok(tokenizer.model.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_settings_have_paths() {
        let mut rows = Vec::new();
        let value = serde_json::json!({"model_type": "llama", "quantization_config":
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "modules": (0..99).collect::<Vec<u32>>()}});
        list("config.json", &value, 0, &mut rows);
        let cells: Vec<String> = rows.iter().map(|row| row.cells().join(" = ")).collect();
        for expected in [
            "config.json: model_type = llama",
            "config.json: quantization_config.bits = 4",
            "config.json: quantization_config.quant_method = gptq",
            "config.json: quantization_config.modules = list of 99",
        ] {
            assert!(cells.iter().any(|cell| cell == expected), "{cells:?}");
        }
    }
}
