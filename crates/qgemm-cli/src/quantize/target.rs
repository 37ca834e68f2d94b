//! [`Target`]: a tensor of the output, and how it is made.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use qgemm_api::gguf::GgufHeader;
use qgemm_api::{
    DType, Format, GgufConversion, GgufName, Model, NumberType, TensorInfo, TensorKind, TypeChooser,
    quantize_by_importance, quantize_matrix,
};
use serde::{Deserialize, Serialize};

use super::choice::{Fate, Patterns};
use super::importance::Importance;
use super::types::{TypeOptions, Types};
use crate::table::{Column, Row, numbers, words};

/// A row of the table.
#[derive(Deserialize, Serialize)]
pub struct QuantizedRow {
    /// Name of the tensor.
    pub name: String,
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

/// Contents of a tensor.
enum Content<'a> {
    /// A tensor of the model.
    Of(&'a TensorInfo, Stored),
    /// Numbers that the model does not have as a tensor.
    Made(Vec<f32>),
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

/// A tensor of the output.
pub struct Target<'a> {
    /// Name in the output.
    pub name: GgufName,
    /// Bytes that are read.
    pub bytes: usize,
    content: Content<'a>,
    note: Option<String>,
}

/// Options that decide about tensors.
pub struct Choice<'a> {
    /// Formats.
    pub types: &'a TypeOptions,
    /// Tensors by name.
    pub patterns: &'a Patterns,
    /// Whether quantized weights may be quantized again.
    pub allow_requantize: bool,
    /// Whether an importance matrix is given.
    pub has_importance: bool,
    /// The model's path.
    pub path: &'a Path,
}

/// The tensors of the model and their names in the output, in the order
/// of the output.
pub fn named<'a>(
    model: &'a Model,
    conversion: Option<&GgufConversion>,
    types: &TypeOptions,
) -> Vec<(&'a TensorInfo, GgufName)> {
    let new = |info: &TensorInfo| match conversion {
        Some(conversion) => conversion.names.get(&info.name).cloned(),
        None => Some(GgufName::new(&info.name)),
    };
    let mut named: Vec<_> = model.tensors().iter().filter_map(|info| Some((info, new(info)?))).collect();
    if types.is_recipe() {
        named.sort_by(|(_, a), (_, b)| TypeChooser::sort_key(&a.name).cmp(&TypeChooser::sort_key(&b.name)));
    }
    named
}

/// The tensors to write, in their order.
///
/// # Errors
/// As [`Target::of`], and those of the choice of formats.
pub fn targets<'a>(
    model: &'a Model,
    named: Vec<(&'a TensorInfo, GgufName)>,
    conversion: Option<&GgufConversion>,
    choice: &Choice<'_>,
) -> anyhow::Result<Vec<Target<'a>>> {
    let names: Vec<String> = named.iter().map(|(_, new)| new.name.clone()).collect();
    let names = names.iter().map(String::as_str);
    let mut types = choice.types.of(model, choice.path, names, choice.has_importance)?;
    let factors = conversion.and_then(|conversion| conversion.rotary_factors.clone());
    let made = factors.map(|factors| Ok(Target::made(GgufName::new("rope_freqs.weight"), factors)));
    let targets = named.into_iter().map(|(info, new)| Target::of(info, new, model, choice, &mut types));
    made.into_iter().chain(targets.filter_map(Result::transpose)).collect()
}

impl<'a> Target<'a> {
    /// Tensor of these numbers.
    pub fn made(name: GgufName, numbers: Vec<f32>) -> Self {
        Self { name, bytes: 0, content: Content::Made(numbers), note: None }
    }

    /// Tensor `info` under another name. `None` for an excluded tensor.
    ///
    /// # Errors
    /// When the tensor can neither be quantized nor copied as asked.
    pub fn of(
        info: &'a TensorInfo,
        new: GgufName,
        model: &Model,
        choice: &Choice<'_>,
        types: &mut Types<'_>,
    ) -> anyhow::Result<Option<Self>> {
        let name = &info.name;
        // In ggml a matrix of one row has one dimension.
        let is_row = choice.types.is_recipe() && info.shape.iter().rev().skip(1).all(|&n| n == 1);
        let fate = choice.patterns.fate(name, if is_row { 1 } else { info.shape.len() });
        let (stored, note) = match (&info.kind, fate) {
            (_, Fate::LeftOut) => return Ok(None),
            (TensorKind::Quantized(format), Fate::Copied(note)) => {
                ensure!(
                    format.ggml_type.is_some(),
                    "{name}: it cannot be copied, as GGUF does not have {format} (`--skip {name}` leaves it out)"
                );
                (Stored::Blocks(*format), note)
            }
            (TensorKind::Quantized(from), Fate::Quantized) => match types.next(&new.name, &info.shape)? {
                // In recipes, tensors of the wanted format stay as they are.
                (to, note) if to == *from && choice.types.is_recipe() => (Stored::Blocks(to), note),
                (to, note) if choice.allow_requantize => (Stored::Quantized(to), note),
                _ => bail!(
                    "{name}: it is quantized already, to {from} (--allow-requantize quantizes it again, `--keep {name}` copies it, `--skip {name}` leaves it out)"
                ),
            },
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
            (TensorKind::Dense(dtype), Fate::Quantized) => {
                let (to, note) = types.next(&new.name, &info.shape)?;
                let from: Format = dtype.name().parse()?;
                (if to == from { Stored::Dense(to) } else { Stored::Quantized(to) }, note)
            }
        };
        Ok(Some(Self { name: new, bytes: info.bytes, content: Content::Of(info, stored), note }))
    }

    /// Whether the tensor changes its format.
    pub fn is_quantized(&self) -> bool {
        matches!(self.content, Content::Of(_, Stored::Quantized(_)))
    }

    /// Adds the tensor to the header, and returns its size.
    ///
    /// # Errors
    /// When GGUF lacks the format, or the name is too long or comes twice.
    pub fn announce(&self, header: &mut GgufHeader) -> anyhow::Result<usize> {
        let name = &self.name.name;
        let (info, stored) = match &self.content {
            Content::Of(info, stored) => (info, stored),
            Content::Made(numbers) => return Ok(header.tensor(name, &[numbers.len()], DType::F32.name().parse()?)?),
        };
        // GGUF has no zero-dimensional tensors.
        let shape: &[usize] = if info.shape.is_empty() { &[1] } else { &info.shape };
        Ok(match *stored {
            Stored::Quantized(format) | Stored::Dense(format) | Stored::Blocks(format) => {
                header.tensor(name, shape, format)?
            }
            Stored::Numbers(kind) => header.numbers(name, shape, kind)?,
        })
    }

    /// Writes the tensor with `write`, and returns its row of the
    /// table.
    ///
    /// # Errors
    /// When the tensor cannot be read or quantized, or `write` fails.
    pub fn write(
        &self,
        model: &Model,
        importance: &Importance,
        write: impl FnOnce(&[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<QuantizedRow> {
        let Self { name, bytes, content, note } = self;
        let row = |from: &str, to: String, bytes_after, note| QuantizedRow {
            name: name.name.clone(),
            from: from.to_owned(),
            to,
            bytes_before: *bytes,
            bytes_after,
            note,
        };
        let (info, stored) = match content {
            Content::Of(info, stored) => (info, stored),
            Content::Made(numbers) => {
                let bytes = DType::F32.encode(numbers);
                write(&bytes)?;
                return Ok(row("", DType::F32.name().to_owned(), bytes.len(), note.clone()));
            }
        };
        let write = |bytes: &[u8]| match name.interleaved_heads {
            Some(heads) => write(&interleaved(bytes, info.shape.first().copied().unwrap_or(0), heads)?),
            None => write(bytes),
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
                let (importance, missing) = importance.of(&name.name, &info.shape)?;
                let (blocks, zeroed) = quantized(info, model, *format, importance)?;
                write(&blocks)?;
                let n: usize = info.shape.iter().rev().skip(1).product();
                let zeroed =
                    (zeroed > 0).then(|| format!("{zeroed} rows of {n} became zero: too small for the format"));
                let notes: Vec<String> = note.iter().cloned().chain(missing).chain(zeroed).collect();
                let from = match &info.kind {
                    TensorKind::Quantized(format) => format.name,
                    TensorKind::Dense(dtype) => dtype.name(),
                    TensorKind::Opaque(name) => name,
                };
                Ok(row(from, format.to_string(), blocks.len(), (!notes.is_empty()).then(|| notes.join("; "))))
            }
        }
    }
}

/// Rows in the order of [`GgufName::interleaved_heads`].
fn interleaved(bytes: &[u8], rows: usize, heads: usize) -> anyhow::Result<Vec<u8>> {
    let of_head = rows / heads.max(1);
    let is_even = rows > 0 && of_head * heads == rows && of_head.is_multiple_of(2);
    ensure!(is_even, "expected an even number of rows for each of {heads} heads, got {rows} rows");
    let row = |at: usize| {
        let (head, within) = (at / of_head, at % of_head);
        let from = head * of_head + within % 2 * (of_head / 2) + within / 2;
        &bytes[from * (bytes.len() / rows)..][..bytes.len() / rows]
    };
    Ok((0..rows).flat_map(row).copied().collect())
}

/// Blocks of a tensor in another format, matrix by matrix, and its rows
/// that became zero.
fn quantized(
    info: &TensorInfo,
    model: &Model,
    format: Format,
    importance: Option<&[f32]>,
) -> anyhow::Result<(Vec<u8>, usize)> {
    let (k, n) = match info.shape[..] {
        [.., n, k] => (k, n),
        [k] => (k, 1),
        [] => (1, 1),
    };
    let stack: usize = info.shape.iter().rev().skip(2).product();
    let dense = matches!(info.kind, TensorKind::Dense(_)).then(|| model.dense(&info.name)).transpose()?;
    let (mut blocks, mut zeroed) = (Vec::new(), 0);
    for matrix in 0..stack {
        let values = match &dense {
            Some(tensor) => {
                let bytes = tensor.bytes.len() / stack;
                tensor.dtype.decode(&tensor.bytes[matrix * bytes..][..bytes])
            }
            None => model.stacked_weight(&info.name, matrix)?.dequantize()?,
        };
        let quantized = match importance {
            Some(importance) => quantize_by_importance(&values, n, k, format, &importance[matrix * k..][..k])?,
            None => quantize_matrix(&values, n, k, format)?,
        };
        blocks.extend_from_slice(quantized.weight.blocks());
        zeroed += quantized.zeroed_rows;
    }
    Ok((blocks, zeroed))
}
