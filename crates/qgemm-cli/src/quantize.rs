//! `qgemm quantize`: quantizes a model's weights into a GGUF
//! file.

mod choice;

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use qgemm_api::gguf::{GgufHeader, GgufValue, file_type};
use qgemm_api::{Format, Model, NumberType, TensorInfo, TensorKind, format_for_k, model_files, quantize_matrix};
use serde::Serialize;

use crate::holds::Holds;
use crate::opening::Opening;
use crate::out::Printing;
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};
use crate::whole_file::{Existing, WholeFile};
use choice::{Fate, Patterns};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// The model: safetensors (a file, an index of shards, or a
    /// folder) or GGUF, whose metadata is kept.
    input: PathBuf,
    /// The GGUF file to write. It appears when it is complete.
    output: PathBuf,
    /// Format of the weights. These are tensors of two or more
    /// dimensions whose name ends in `weight`.
    /// Norms, embeddings of positions and types, expert gating and
    /// others that llama.cpp keeps are excluded. All other tensors
    /// are copied.
    #[arg(long)]
    format: Format,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    patterns: Patterns,
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
/// When the input is not a readable model, GGUF lacks the format,
/// or writing fails. The output file is then unchanged.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    for file in model_files(&args.input)? {
        ensure!(!is_same_file(&file, &args.output), "{} is the model that is read", args.output.display());
    }
    // First, so that an unwritable output does not waste the work.
    let existing = if args.force { Existing::Replace } else { Existing::Refuse };
    let output = WholeFile::create(&args.output, existing)?;
    let model = args.opening.open(&args.input)?;
    args.patterns.check(model.tensors().iter().map(|info| info.name.as_str()))?;
    let targets = model.tensors().iter().map(|info| Target::of(info, &model, args));
    let targets: Vec<Target<'_>> = targets.filter_map(Result::transpose).collect::<anyhow::Result<_>>()?;
    let mut header = GgufHeader::new();
    metadata(&mut header, &model, &targets, args)?;
    for target in &targets {
        target.announce(&mut header).with_context(|| target.info.name.clone())?;
    }
    let writer = BufWriter::new(output.file());
    write(&model, header, &targets, (writer, &args.output), printing)?;
    output.finish()?;
    Ok(Holds::Yes)
}

/// Whether both paths are the same file, possibly through links.
fn is_same_file(a: &Path, b: &Path) -> bool {
    if let (Ok(a), Ok(b)) = (fs::canonicalize(a), fs::canonicalize(b))
        && a == b
    {
        return true;
    }
    #[cfg(unix)]
    if let (Ok(a), Ok(b)) = (fs::metadata(a), fs::metadata(b)) {
        use std::os::unix::fs::MetadataExt as _;
        return (a.dev(), a.ino()) == (b.dev(), b.ino());
    }
    false
}

/// Metadata for llama.cpp: all of a GGUF model's, and the
/// quantization if any tensor is quantized.
fn metadata(header: &mut GgufHeader, model: &Model, targets: &[Target<'_>], args: &Args) -> anyhow::Result<()> {
    const NAME: &str = "general.name";
    const FILE_TYPE: &str = "general.file_type";
    const VERSION: (&str, u32) = ("general.quantization_version", 2);
    let stated = |key: &str| model.metadata().iter().any(|(k, _)| k == key);
    if !stated(NAME) {
        let stem = args.input.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        header.metadata(NAME, GgufValue::String(stem))?;
    }
    let quantizes = targets.iter().any(|target| matches!(target.stored, Stored::Quantized(_)));
    for (key, value) in model.metadata() {
        if !quantizes || ![FILE_TYPE, VERSION.0].contains(&key.as_str()) {
            header.metadata(key, value.clone())?;
        }
    }
    if !quantizes {
        return Ok(());
    }
    if let Some(file_type) = args.format.ggml_type.and_then(file_type) {
        header.metadata(FILE_TYPE, file_type.into())?;
    }
    Ok(header.metadata(VERSION.0, VERSION.1.into())?)
}

/// Storage of a tensor.
enum Stored {
    /// Quantized to this format.
    Quantized(Format),
    /// Plain numbers that are a format, copied.
    Dense(Format),
    /// Blocks in a format of the model, copied.
    Blocks(Format),
    /// Other numbers, copied.
    Numbers(NumberType),
}

/// A tensor and its storage.
struct Target<'a> {
    info: &'a TensorInfo,
    stored: Stored,
    note: Option<String>,
}

impl<'a> Target<'a> {
    /// `None` for an excluded tensor.
    fn of(info: &'a TensorInfo, model: &Model, args: &Args) -> anyhow::Result<Option<Self>> {
        let name = &info.name;
        let fate = args.patterns.fate(name, info.shape.len());
        let (stored, note) = match (&info.kind, fate) {
            (_, Fate::LeftOut) => return Ok(None),
            (TensorKind::Quantized(format), Fate::Copied(note)) => {
                ensure!(
                    format.ggml_type.is_some(),
                    "{name}: it cannot be copied, as GGUF does not have {format} (`--skip {name}` leaves it out)"
                );
                (Stored::Blocks(*format), note)
            }
            (TensorKind::Quantized(format), Fate::Quantized) => bail!(
                "{name}: it is quantized already, to {format} (`--keep {name}` copies it, `--skip {name}` leaves it out)"
            ),
            (TensorKind::Opaque(why), fate) => match (model.numbers(name)?, fate) {
                (Some(tensor), Fate::Copied(note)) => (Stored::Numbers(tensor.kind), note),
                (Some(tensor), _) if tensor.kind == NumberType::F64 => {
                    (Stored::Numbers(tensor.kind), Some("no format is made of it".into()))
                }
                (Some(_), _) => bail!(
                    "{name}: expected a weight of real numbers, got {why} (`--keep {name}` copies it, `--skip {name}` leaves it out)"
                ),
                (None, _) => {
                    let error = model.dense(name).err().context("it is not dense")?;
                    bail!("{error} (`--skip {name}` leaves it out)")
                }
            },
            (TensorKind::Dense(dtype), Fate::Copied(note)) => (Stored::Dense(dtype.name().parse()?), note),
            (TensorKind::Dense(_), Fate::Quantized) => {
                let (wanted, k) = (args.format, info.shape.last().copied().unwrap_or(0));
                let format =
                    format_for_k(wanted, k).with_context(|| format!("{name} (`--keep {name}` copies it as it is)"))?;
                let note = (format != wanted).then(|| format!("K = {k} is no multiple of {}", wanted.block_len));
                (Stored::Quantized(format), note)
            }
        };
        Ok(Some(Self { info, stored, note }))
    }

    /// Adds the tensor to the header, and returns its size.
    fn announce(&self, header: &mut GgufHeader) -> anyhow::Result<usize> {
        // GGUF has no zero-dimensional tensors.
        let shape: &[usize] = if self.info.shape.is_empty() { &[1] } else { &self.info.shape };
        Ok(match self.stored {
            Stored::Quantized(format) | Stored::Dense(format) | Stored::Blocks(format) => {
                header.tensor(&self.info.name, shape, format)?
            }
            Stored::Numbers(kind) => header.numbers(&self.info.name, shape, kind)?,
        })
    }

    /// Writes the tensor with `write`, and returns its row of the
    /// table.
    fn write(&self, model: &Model, write: impl FnOnce(&[u8]) -> anyhow::Result<()>) -> anyhow::Result<QuantizedRow> {
        let Self { info, stored, note } = self;
        let row = |from: &str, to: String, bytes_after, note| QuantizedRow {
            name: info.name.clone(),
            from: from.to_owned(),
            to,
            bytes_before: info.bytes,
            bytes_after,
            note,
        };
        match stored {
            Stored::Numbers(kind) => {
                let tensor = model.numbers(&info.name)?.context("its kind is known")?;
                write(&tensor.bytes)?;
                Ok(row(kind.name(), kind.name().to_owned(), tensor.bytes.len(), note.clone()))
            }
            Stored::Blocks(format) => {
                let blocks = model.blocks(&info.name)?;
                write(&blocks)?;
                Ok(row(format.name, format.to_string(), blocks.len(), note.clone()))
            }
            Stored::Dense(format) => {
                let tensor = model.dense(&info.name)?;
                write(&tensor.bytes)?;
                Ok(row(tensor.dtype.name(), format.to_string(), tensor.bytes.len(), note.clone()))
            }
            Stored::Quantized(format) => {
                let tensor = model.dense(&info.name)?;
                let k = info.shape.last().copied().unwrap_or(1);
                let n = info.shape.iter().rev().skip(1).product();
                let quantized = quantize_matrix(&tensor.to_f32(), n, k, *format)?;
                write(quantized.weight.blocks())?;
                let zeroed = (quantized.zeroed_rows > 0)
                    .then(|| format!("{} rows of {n} became zero: too small for the format", quantized.zeroed_rows));
                let notes: Vec<String> = note.iter().cloned().chain(zeroed).collect();
                let note = (!notes.is_empty()).then(|| notes.join("; "));
                Ok(row(tensor.dtype.name(), format.to_string(), quantized.weight.blocks().len(), note))
            }
        }
    }
}

fn write(
    model: &Model,
    header: GgufHeader,
    targets: &[Target<'_>],
    (to, path): (impl Write, &Path),
    printing: Printing,
) -> anyhow::Result<()> {
    let failed = || path.display().to_string();
    let mut writer = header.write(to).with_context(failed)?;
    let progress = Progress::new(targets.iter().map(|t| t.info.bytes as u64).sum(), "quantizing");
    let mut table = Table::new(printing);
    for target in targets {
        let name = &target.info.name;
        progress.say(name.clone());
        let row =
            target.write(model, |bytes| writer.tensor(bytes).with_context(failed)).with_context(|| name.clone())?;
        progress.step(target.info.bytes as u64);
        table.push(row, &progress)?;
    }
    writer.finish().with_context(failed)?;
    drop(progress);
    table.finish().map(|_| ())
}
