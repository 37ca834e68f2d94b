//! `qgemm inspect`: what a checkpoint is, its tensors, and totals by
//! format.

mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;

use qgemm_api::{TensorInfo, TensorKind};
use serde::Serialize;

use crate::holds::Holds;
use crate::opening::Opening;
use crate::out::{self, Printing};
use crate::table::{self, Column, Row, numbers, words};
use settings::SettingRow;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF or safetensors file, an index of shards, or a folder
    /// with one model.
    file: PathBuf,
    #[command(flatten)]
    opening: Opening,
}

/// The result as JSON.
#[derive(Serialize)]
struct Inspected {
    /// Settings of the model, its quantization and its tokenizer, as its
    /// files state them.
    settings: Vec<SettingRow>,
    /// By format, the largest first; the last row is the whole model.
    totals: Vec<TotalRow>,
    tensors: Vec<TensorRow>,
}

#[derive(Clone, Serialize)]
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
        TensorRow {
            name: info.name.clone(),
            format,
            readable,
            shape: info.shape.clone(),
            bytes: info.bytes,
            bits_per_value: bits(info.bytes as f64, values(&info.shape)),
        }
    }
}

/// Values of a tensor. A header may claim more than an integer holds.
fn values(shape: &[usize]) -> f64 {
    shape.iter().map(|&d| d as f64).product()
}

fn bits(bytes: f64, values: f64) -> f64 {
    if values > 0.0 { bytes * 8.0 / values } else { 0.0 }
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

/// Tensors of one format together.
#[derive(Serialize)]
struct TotalRow {
    format: String,
    tensors: usize,
    parameters: f64,
    bytes: u64,
    bits_per_parameter: f64,
    /// Share of the model's bytes.
    share: f64,
}

impl Row for TotalRow {
    const COLUMNS: &'static [Column] = &[
        words("format", 24),
        numbers("tensors", 7),
        numbers("parameters", 12),
        numbers("bytes", 14),
        numbers("", 10),
        numbers("bits a weight", 13),
        numbers("of bytes", 8),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.format.clone(),
            self.tensors.to_string(),
            parameters(self.parameters),
            self.bytes.to_string(),
            table::bytes(self.bytes),
            format!("{:.2}", self.bits_per_parameter),
            format!("{:.1}%", self.share * 100.0),
        ]
    }
}

/// A count as people state the size of a model: `134.5M`.
fn parameters(count: f64) -> String {
    const UNITS: [(f64, &str); 3] = [(1e9, "B"), (1e6, "M"), (1e3, "k")];
    let unit = UNITS.iter().find(|(scale, _)| count >= *scale);
    unit.map_or_else(|| format!("{count:.0}"), |(scale, unit)| format!("{:.2}{unit}", count / scale))
}

fn totals(tensors: &[TensorRow]) -> Vec<TotalRow> {
    let mut by_format: BTreeMap<&str, (usize, f64, u64)> = BTreeMap::new();
    let all: u64 = tensors.iter().map(|tensor| tensor.bytes as u64).sum();
    for tensor in tensors {
        let total = by_format.entry(&tensor.format).or_default();
        *total = (total.0 + 1, total.1 + values(&tensor.shape), total.2 + tensor.bytes as u64);
    }
    let row = |(format, (tensors, parameters, bytes)): (&str, (usize, f64, u64))| TotalRow {
        format: format.to_owned(),
        tensors,
        parameters,
        bytes,
        bits_per_parameter: bits(bytes as f64, parameters),
        share: bytes as f64 / all.max(1) as f64,
    };
    let mut rows: Vec<TotalRow> = by_format.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    let parameters = rows.iter().map(|row| row.parameters).sum();
    rows.push(row(("all", (tensors.len(), parameters, all))));
    rows
}

/// Runs the command.
///
/// # Errors
/// When the file is not a model.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let model = args.opening.open(&args.file)?;
    let tensors: Vec<TensorRow> = model.tensors().iter().map(TensorRow::from).collect();
    let inspected = Inspected { settings: settings::of(&model, &args.file)?, totals: totals(&tensors), tensors };
    match printing {
        Printing::Json => out::json(&inspected)?,
        // One table, so that programs read it.
        Printing::Csv => table::print(inspected.tensors, printing)?,
        Printing::Text | Printing::Markdown => {
            table::print(inspected.settings, printing)?;
            out::line("")?;
            table::print(inspected.tensors, printing)?;
            out::line("")?;
            table::print(inspected.totals, printing)?;
        }
    }
    Ok(Holds::Yes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up() {
        let tensor = |format: &str, shape: &[usize], bytes| TensorRow {
            name: "t".into(),
            format: format.into(),
            readable: true,
            shape: shape.to_vec(),
            bytes,
            bits_per_value: 0.0,
        };
        let rows =
            totals(&[tensor("f32", &[64], 256), tensor("q4_0", &[64, 32], 1152), tensor("q4_0", &[64, 32], 1152)]);
        assert_eq!(rows.iter().map(|row| row.format.as_str()).collect::<Vec<_>>(), ["q4_0", "f32", "all"]);
        assert_eq!((rows[0].bits_per_parameter, rows[0].parameters), (4.5, 4096.0));
        assert_eq!((rows[2].tensors, rows[2].bytes, rows[2].share), (3, 2560, 1.0));
        assert_eq!([parameters(134_515_008.0), parameters(12.0)], ["134.52M", "12"]);
        assert_eq!(totals(&[]).len(), 1);
    }
}
