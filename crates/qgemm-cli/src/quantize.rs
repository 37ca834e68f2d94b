//! `qgemm quantize`: the weights of a safetensors file, quantized, into a GGUF file.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use qgemm_api::gguf::{GgufHeader, GgufValue};
use qgemm_api::{Format, Model, TensorInfo, TensorKind, format_for_k, open_model, quantize};
use serde::Serialize;

use crate::Holds;
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// The model to read: unquantized safetensors.
    input: PathBuf,
    /// The GGUF file to write.
    output: PathBuf,
    /// Format of the weights: tensors of two or more dimensions whose name ends in `.weight`. Everything else is
    /// copied as it is.
    #[arg(long)]
    format: Format,
}

#[derive(Serialize)]
struct QuantizedRow {
    name: String,
    from: String,
    to: String,
    bytes_before: usize,
    bytes_after: usize,
    note: Option<String>,
}

impl Row for QuantizedRow {
    const COLUMNS: &'static [Column] = &[
        words("tensor", 48),
        words("from", 6),
        words("to", 10),
        numbers("bytes before", 12),
        numbers("bytes after", 12),
        words("note", 0),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.from.clone(),
            self.to.clone(),
            self.bytes_before.to_string(),
            self.bytes_after.to_string(),
            self.note.clone().unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the input is no model or holds what cannot be read, GGUF lacks the format, or writing fails. The output
/// file is then left as it was.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let model = open_model(&args.input)?;
    let mut header = GgufHeader::new();
    let stem = args.input.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    header.metadata("general.name", GgufValue::String(stem))?;
    let mut targets = Vec::new();
    for info in model.tensors() {
        let target = Target::of(info, args.format)?;
        target.bytes_after(&mut header).with_context(|| info.name.clone())?;
        targets.push(target);
    }

    let partial = partial_path(&args.output);
    let result = write(&model, header, &targets, &partial, json);
    let result = result.and_then(|()| {
        std::fs::rename(&partial, &args.output).with_context(|| format!("renaming to {}", args.output.display()))
    });
    if result.is_err() {
        // What is half written helps nobody; that it cannot be removed matters less than why it failed.
        let _ = std::fs::remove_file(&partial);
    }
    result.map(|()| Holds::Yes)
}

/// What becomes of a tensor.
struct Target<'a> {
    info: &'a TensorInfo,
    format: Format,
    quantized: bool,
    note: Option<String>,
}

impl<'a> Target<'a> {
    fn of(info: &'a TensorInfo, wanted: Format) -> anyhow::Result<Self> {
        let dtype = match &info.kind {
            TensorKind::Dense(dtype) => dtype,
            TensorKind::Quantized(format) => bail!("{}: it is quantized already, to {format}", info.name),
            TensorKind::Opaque(why) => bail!("{}: expected f32, f16 or bf16, got {why}", info.name),
        };
        let plain: Format = dtype.name().parse()?;
        let is_weight = info.shape.len() >= 2 && info.name.ends_with(".weight");
        let Some(&k) = info.shape.last().filter(|_| is_weight) else {
            return Ok(Self { info, format: plain, quantized: false, note: None });
        };
        let format = format_for_k(wanted, k).with_context(|| info.name.clone())?;
        let note = (format != wanted).then(|| format!("K = {k} is no multiple of {}", wanted.block_len));
        Ok(Self { info, format, quantized: true, note })
    }

    /// Announces the tensor in the header, which says how large it will be.
    fn bytes_after(&self, header: &mut GgufHeader) -> anyhow::Result<usize> {
        // GGUF has no tensors without dimensions.
        let shape: &[usize] = if self.info.shape.is_empty() { &[1] } else { &self.info.shape };
        Ok(header.tensor(&self.info.name, shape, self.format)?)
    }
}

fn write(model: &Model, header: GgufHeader, targets: &[Target<'_>], to: &Path, json: bool) -> anyhow::Result<()> {
    let file = File::create(to).with_context(|| format!("creating {}", to.display()))?;
    let mut writer = header.write(BufWriter::new(file))?;
    let progress = Progress::new(targets.iter().map(|t| t.info.bytes as u64).sum(), "quantizing");
    let mut table = Table::new(json);
    for target in targets {
        let info = target.info;
        progress.say(info.name.clone());
        let dense = model.dense(&info.name)?;
        let bytes_after = if target.quantized {
            let k = info.shape.last().copied().unwrap_or(1);
            let n = info.shape.iter().rev().skip(1).product();
            let (weight, _) = quantize(&dense.to_f32(), n, k, target.format).with_context(|| info.name.clone())?;
            writer.tensor(weight.blocks())?;
            weight.blocks().len()
        } else {
            writer.tensor(&dense.bytes)?;
            dense.bytes.len()
        };
        progress.step(info.bytes as u64);
        let row = QuantizedRow {
            name: info.name.clone(),
            from: dense.dtype.to_string(),
            to: target.format.to_string(),
            bytes_before: info.bytes,
            bytes_after,
            note: target.note.clone(),
        };
        table.push(row, &progress);
    }
    let file = writer.finish()?.into_inner().map_err(|e| e.into_error())?;
    file.sync_all()?;
    table.finish().map(|_| ())
}

/// Beside the output, so that renaming stays within one file system.
fn partial_path(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    output.with_file_name(name)
}
