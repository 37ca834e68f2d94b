//! `qgemm loading`: speed of packing and loading weights.

use std::time::Instant;

use qgemm_api::{Context, DeviceKind};
use serde::Serialize;

use crate::bench::subject;
use crate::choice::{FormatChoice, Shape};
use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};

/// Loads of each weight; the fastest counts.
const LOADS: usize = 3;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Device: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    device: String,
    /// Weight formats, or `all`.
    #[arg(long, num_args = 1.., default_values = ["q4_0"])]
    format: Vec<FormatChoice>,
    /// Shapes, as tokens x output features x input features; tokens
    /// are ignored.
    #[arg(long, value_name = "MxNxK", num_args = 1.., default_values = ["1x4096x4096"])]
    shape: Vec<Shape>,
}

/// One measurement.
#[derive(Serialize)]
struct LoadingRow {
    device: String,
    shape: String,
    format: String,
    /// Bytes of the file's blocks.
    bytes: usize,
    /// Time of a whole load from host memory: scanning scales,
    /// uploading, packing.
    milliseconds: f64,
    /// File bytes per second.
    bytes_per_second: f64,
    /// Bytes read and written per second by packing on the device;
    /// absent if the host packs.
    packing: Option<f64>,
    /// Packing speed relative to copying in device memory.
    of_copying: Option<f64>,
}

impl Row for LoadingRow {
    const COLUMNS: &'static [Column] = &[
        words("shape", 18),
        words("format", 18),
        numbers("MB", 8),
        numbers("load ms", 9),
        numbers("GB/s", 8),
        numbers("packing GB/s", 13),
        numbers("of copying", 11),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.shape.clone(),
            self.format.clone(),
            format!("{:.1}", self.bytes as f64 / 1e6),
            format!("{:.2}", self.milliseconds),
            format!("{:.2}", self.bytes_per_second / 1e9),
            self.packing.map(|rate| format!("{:.1}", rate / 1e9)).unwrap_or_default(),
            self.of_copying.map(|share| format!("{:.1}%", share * 100.0)).unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the device fails, or a format cannot store a shape.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    /// Larger than every cache.
    const COPIED_BYTES: usize = 1 << 30;
    let ctx = Context::open(&args.device)?;
    let packs = ctx.info().id.kind == DeviceKind::Cuda;
    let copying = packs.then(|| qgemm_api::cuda::copy_bandwidth(&**ctx.device(), COPIED_BYTES)).transpose()?;
    if printing.is_text() {
        out::line(&format!("{} ({})", ctx.info().name, ctx.info().id))?;
        if let Some(rate) = copying {
            out::line(&format!("copies {:.1} GB/s, read and written", rate / 1e9))?;
        }
    }
    let mut subjects = Vec::new();
    for &format in &args.format {
        subjects.extend(subject::made_up(&args.shape, Some(format))?);
    }
    let progress = Progress::new(subjects.len() as u64, "loading");
    let mut table = Table::new(printing);
    for subject in &subjects {
        progress.say(subject.to_string());
        let weight = subject.weight()?;
        let mut seconds = f64::INFINITY;
        for _ in 0..LOADS {
            let start = Instant::now();
            ctx.load(&weight)?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        let (format, Shape { n, k, .. }) = (subject.format(), subject.shape);
        let packing = packs.then(|| qgemm_api::cuda::repack_bandwidth(&**ctx.device(), format, n, k)).transpose()?;
        let row = LoadingRow {
            device: ctx.info().name.clone(),
            shape: subject.shape.to_string(),
            format: format.to_string(),
            bytes: weight.blocks().len(),
            milliseconds: seconds * 1e3,
            bytes_per_second: weight.blocks().len() as f64 / seconds,
            packing,
            of_copying: packing.zip(copying).map(|(packing, copying)| packing / copying),
        };
        table.push(row, &progress)?;
        progress.step(1);
    }
    drop(progress);
    table.finish()?;
    Ok(Holds::Yes)
}
