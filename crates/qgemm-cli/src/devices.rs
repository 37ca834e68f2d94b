//! `qgemm devices`: devices of this machine, and their formats.

use qgemm_api::{DeviceInfo, DeviceListing, Feature, Format, devices};
use serde::Serialize;

use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::table::{self, Column, Row, numbers, words};

#[derive(Serialize)]
struct DeviceRow {
    device: String,
    /// `None` if the backend has no device.
    found: Option<Found>,
    /// Why there is none.
    absent: Option<String>,
}

#[derive(Serialize)]
struct Found {
    name: String,
    arch: String,
    variant: Option<String>,
    driver: String,
    units: u32,
    memory_bytes: u64,
    read_bytes_per_second: f64,
    cache_bytes: u64,
    shared_bytes: u32,
    max_buffer_bytes: u64,
    features: Vec<&'static str>,
}

impl From<DeviceListing> for DeviceRow {
    fn from(listing: DeviceListing) -> Self {
        match listing {
            DeviceListing::Found(info) => {
                DeviceRow { device: info.id.to_string(), found: Some(info.into()), absent: None }
            }
            DeviceListing::Absent { kind, why } => {
                DeviceRow { device: kind.name().to_owned(), found: None, absent: Some(why) }
            }
            // Kinds of later library versions are printed as they are.
            other => DeviceRow { device: "-".to_owned(), found: None, absent: Some(format!("{other:?}")) },
        }
    }
}

impl From<DeviceInfo> for Found {
    fn from(info: DeviceInfo) -> Self {
        Found {
            name: info.name,
            arch: info.arch,
            variant: info.variant.map(|v| v.to_string()),
            driver: info.driver,
            units: info.units,
            memory_bytes: info.memory_bytes,
            read_bytes_per_second: info.bandwidth,
            cache_bytes: info.cache_bytes,
            shared_bytes: info.shared_bytes,
            max_buffer_bytes: info.max_buffer_bytes,
            features: info.features.into_iter().map(Feature::name).collect(),
        }
    }
}

impl Row for DeviceRow {
    const COLUMNS: &'static [Column] = &[
        words("device", 8),
        words("name", 36),
        words("arch", 14),
        words("variant", 7),
        numbers("units", 5),
        numbers("memory", 10),
        numbers("GB/s", 7),
        numbers("cache", 10),
        words("features", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let Some(found) = &self.found else {
            return vec![self.device.clone(), self.absent.clone().unwrap_or_default()];
        };
        vec![
            self.device.clone(),
            found.name.clone(),
            found.arch.clone(),
            found.variant.clone().unwrap_or_else(|| "-".into()),
            found.units.to_string(),
            table::bytes(found.memory_bytes),
            format!("{:.0}", found.read_bytes_per_second / 1e9),
            table::bytes(found.cache_bytes),
            found.features.join(" "),
        ]
    }
}

#[derive(Serialize)]
struct FormatRow {
    format: &'static str,
    bits_per_weight: f64,
    block: usize,
    any_k: bool,
    quantizer: bool,
    gguf: bool,
    summary: &'static str,
}

impl From<Format> for FormatRow {
    fn from(format: Format) -> Self {
        let desc = format.desc();
        FormatRow {
            format: desc.name,
            bits_per_weight: desc.bits_per_weight(),
            block: desc.block_len,
            any_k: desc.ragged_k || desc.block_len == 1,
            quantizer: desc.quantize_blocks.is_some() || desc.quantize_matrix.is_some(),
            gguf: desc.ggml_type.is_some(),
            summary: desc.summary,
        }
    }
}

impl Row for FormatRow {
    const COLUMNS: &'static [Column] = &[
        words("format", 18),
        numbers("bits", 6),
        numbers("block", 5),
        words("any K", 5),
        words("quantizes", 9),
        words("gguf", 4),
        words("summary", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let tick = |yes: bool| if yes { "yes" } else { "-" }.to_owned();
        vec![
            self.format.to_owned(),
            format!("{:.3}", self.bits_per_weight),
            self.block.to_string(),
            tick(self.any_k),
            tick(self.quantizer),
            tick(self.gguf),
            self.summary.to_owned(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When a table cannot be serialised.
pub fn run(printing: Printing) -> anyhow::Result<Holds> {
    let devices: Vec<DeviceRow> = devices().into_iter().map(Into::into).collect();
    let formats: Vec<FormatRow> = Format::all().map(Into::into).collect();
    if printing == Printing::Json {
        let both = serde_json::json!({ "devices": devices, "formats": formats });
        out::json(&both)?;
    } else {
        table::print(devices, printing)?;
        out::line("")?;
        table::print(formats, printing)?;
    }
    Ok(Holds::Yes)
}
