//! `qgemm quantize`: quantizes a model's weights into a GGUF
//! file.

mod choice;
mod importance;
mod resume;
mod target;
mod types;

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use qgemm_api::gguf::{GgufHeader, GgufValue, GgufWriter};
use qgemm_api::{GgufConversion, Model, model_files};

use crate::holds::Holds;
use crate::opening::Opening;
use crate::out::Printing;
use crate::progress::Progress;
use crate::table::Table;
use crate::whole_file::{Existing, WholeFile};
use choice::Patterns;
use importance::Importance;
use resume::ResumableFile;
use target::{Choice, QuantizedRow, Target, named, targets};
use types::TypeOptions;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// The model: safetensors (a file, an index of shards, or a
    /// folder) or GGUF, whose metadata is kept.
    input: PathBuf,
    /// The GGUF file to write. It appears when it is complete.
    output: PathBuf,
    #[command(flatten)]
    types: TypeOptions,
    /// Importance matrix of llama.cpp (`llama-imatrix`), as GGUF or the
    /// older `.dat`. Q2_K to Q6_K, Q4_0 to Q5_1, IQ4_NL and IQ4_XS use it.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Quantize weights that are quantized already, which loses more than
    /// quantizing the originals.
    #[arg(long)]
    allow_requantize: bool,
    /// Give the tensors of a safetensors checkpoint llama.cpp's names and
    /// row order, and write its settings as metadata, but no tokenizer:
    /// llama, mistral, qwen2 and qwen3.
    #[arg(long)]
    convert: bool,
    /// Keep what is written when the run is interrupted, as OUTPUT.partial
    /// and OUTPUT.journal, and continue what an earlier run kept.
    #[arg(long)]
    resume: bool,
    /// Replace the output if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    patterns: Patterns,
}

/// Runs the command.
///
/// # Errors
/// When the input is not a readable model, GGUF lacks the format,
/// or writing fails. The output file is then unchanged.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let mut inputs = model_files(&args.input)?;
    for file in &inputs {
        ensure!(!is_same_file(file, &args.output), "{} is the model that is read", args.output.display());
    }
    // First, so that an unwritable output does not waste the work.
    let existing = if args.force { Existing::Replace } else { Existing::Refuse };
    let output = WholeFile::create(&args.output, existing)?;
    let model = args.opening.open(&args.input)?;
    args.patterns.check(model.tensors().iter().map(|info| info.name.as_str()))?;
    let conversion = args.convert.then(|| GgufConversion::of(&model, &args.input)).transpose()?;
    let named = named(&model, conversion.as_ref(), &args.types);
    let importance = Importance::load(args.imatrix.as_deref(), named.iter().map(|(_, new)| new.name.as_str()))?;
    let choice = Choice {
        types: &args.types,
        patterns: &args.patterns,
        allow_requantize: args.allow_requantize,
        has_importance: importance.is_given(),
        path: &args.input,
    };
    let targets = targets(&model, named, conversion.as_ref(), &choice)?;
    let mut header = GgufHeader::new();
    metadata(&mut header, &model, &targets, args)?;
    for (key, value) in conversion.iter().flat_map(|conversion| &conversion.metadata) {
        header.metadata(key, value.clone())?;
    }
    importance.metadata(args.imatrix.as_deref(), &mut header)?;
    for target in &targets {
        target.announce(&mut header).with_context(|| target.name.name.clone())?;
    }
    let work = Work { model: &model, importance: &importance, targets: &targets, path: &args.output, printing };
    if args.resume {
        drop(output);
        inputs.extend(args.imatrix.clone());
        let (output, rows) = ResumableFile::open(&args.output, existing, &header, &inputs)?;
        let writer = header.resume(output.file(), rows.len());
        work.run(writer, rows, |row| output.complete(row))?;
        output.finish()?;
    } else {
        let writer = header.write(BufWriter::new(output.file())).with_context(|| args.output.display().to_string())?;
        work.run(writer, Vec::new(), |_| Ok(()))?;
        output.finish()?;
    }
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
    const FILE_TYPE: &str = "general.file_type";
    const VERSION: (&str, u32) = ("general.quantization_version", 2);
    if model.metadata().is_empty() {
        let stem = args.input.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        header.metadata("general.name", GgufValue::String(stem))?;
    }
    let quantizes = args.types.is_recipe() || targets.iter().any(Target::is_quantized);
    for (key, value) in model.metadata() {
        let key = key.as_str();
        let is_new = quantizes && [FILE_TYPE, VERSION.0].contains(&key);
        if !is_new && (args.imatrix.is_none() || !importance::KEYS.contains(&key)) {
            header.metadata(key, value.clone())?;
        }
    }
    if !quantizes {
        return Ok(());
    }
    header.metadata(VERSION.0, VERSION.1.into())?;
    match args.types.file_type() {
        Some(file_type) => Ok(header.metadata(FILE_TYPE, file_type.into())?),
        None => Ok(()),
    }
}

/// Work of a run: the tensors to write, and where.
struct Work<'a> {
    model: &'a Model,
    importance: &'a Importance,
    targets: &'a [Target<'a>],
    path: &'a Path,
    printing: Printing,
}

impl Work<'_> {
    /// Writes the tensors behind those of `rows`. `complete` is called after
    /// each.
    fn run(
        &self,
        mut writer: GgufWriter<impl Write>,
        rows: Vec<QuantizedRow>,
        complete: impl Fn(&QuantizedRow) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let failed = || self.path.display().to_string();
        let bytes = |targets: &[Target<'_>]| targets.iter().map(|t| t.bytes as u64).sum();
        let (earlier, rest) = self.targets.split_at(rows.len());
        let progress = Progress::new(bytes(self.targets), "quantizing");
        progress.step(bytes(earlier));
        let mut table = Table::new(self.printing);
        for row in rows {
            table.push(row, &progress)?;
        }
        for target in rest {
            let name = &target.name.name;
            progress.say(name.clone());
            let write = |bytes: &[u8]| writer.tensor(bytes).with_context(failed);
            let row = target.write(self.model, self.importance, write).with_context(|| name.clone())?;
            complete(&row).with_context(failed)?;
            progress.step(target.bytes as u64);
            table.push(row, &progress)?;
        }
        writer.finish().with_context(failed)?;
        drop(progress);
        table.finish().map(|_| ())
    }
}
