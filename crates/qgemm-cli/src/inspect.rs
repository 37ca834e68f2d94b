//! `qgemm inspect`: the tensors of a model.

use std::path::PathBuf;

use qgemm_api::{TensorInfo, TensorKind};
use serde::Serialize;

use crate::holds::Holds;
use crate::opening::Opening;
use crate::out;
use crate::table::{self, Column, Row, numbers, words};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF or safetensors file, an index of shards, or a folder
    /// with one model.
    file: PathBuf,
    #[command(flatten)]
    opening: Opening,
}

#[derive(Serialize)]
pub struct TensorRow {
    name: String,
    format: String,
    /// Whether the library can multiply with the tensor or read it.
    readable: bool,
    shape: Vec<usize>,
    bytes: usize,
    bits_per_value: f64,
}

impl From<&TensorInfo> for TensorRow {
    fn from(info: &TensorInfo) -> Self {
        let (format, readable) = match &info.kind {
            TensorKind::Quantized(format) => match info.type_name.as_str() {
                own if own.is_empty() || own.eq_ignore_ascii_case(format.name) => (format.to_string(), true),
                own => (format!("{format} ({own})"), true),
            },
            TensorKind::Dense(dtype) => (dtype.to_string(), true),
            TensorKind::Opaque(why) => (why.clone(), false),
        };
        let values = info.shape.iter().map(|&d| d as f64).product::<f64>();
        TensorRow {
            name: info.name.clone(),
            format,
            readable,
            shape: info.shape.clone(),
            bytes: info.bytes,
            bits_per_value: if values > 0.0 { info.bytes as f64 * 8.0 / values } else { 0.0 },
        }
    }
}

impl Row for TensorRow {
    const COLUMNS: &'static [Column] =
        &[words("tensor", 48), words("shape", 18), numbers("bytes", 12), numbers("bits", 6), words("format", 0)];

    fn cells(&self) -> Vec<String> {
        let shape: Vec<String> = self.shape.iter().map(ToString::to_string).collect();
        let note = if self.readable { "" } else { " (not readable)" };
        vec![
            self.name.clone(),
            shape.join("x"),
            self.bytes.to_string(),
            format!("{:.2}", self.bits_per_value),
            format!("{}{note}", self.format),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the file is not a model.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let model = args.opening.open(&args.file)?;
    table::print(model.tensors().iter().map(TensorRow::from).collect(), json)?;
    if !json {
        let total: u64 = model.tensors().iter().map(|t| t.bytes as u64).sum();
        out::line(&format!("{} tensors, {}", model.tensors().len(), table::bytes(total)))?;
    }
    Ok(Holds::Yes)
}
