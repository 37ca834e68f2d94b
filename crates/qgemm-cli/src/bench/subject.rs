//! Subjects of measurements: weights of a model, or random ones.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use anyhow::ensure;
use qgemm_api::{DType, Format, HostWeight, Model, TensorKind, quantize};
use qgemm_testkit::{ActivationKind, WeightKind, activations, weight};

use crate::choice::{FormatChoice, Shape, Sizes, gemm_shapes};
use crate::opening::Opening;

/// Source of a weight.
#[derive(Clone)]
enum Origin {
    /// Random codes and scales.
    MadeUp,
    /// A tensor of a model.
    Tensor { model: Model, name: String },
    /// An unquantized tensor of a model, quantized when loaded.
    Quantized { model: Model, name: String },
}

/// A weight and a token count.
pub struct Subject {
    /// Tokens and the weight's shape.
    pub shape: Shape,
    format: Format,
    origin: Origin,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.shape, self.format)
    }
}

impl Subject {
    /// The format of the weight.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Makes or reads the weight.
    ///
    /// # Errors
    /// When it cannot be read or quantized.
    pub fn weight(&self) -> anyhow::Result<HostWeight> {
        let Shape { n, k, .. } = self.shape;
        match &self.origin {
            Origin::MadeUp => repeated_rows(self.format, n, k),
            Origin::Tensor { model, name } => Ok(model.weight(name)?),
            Origin::Quantized { model, name } => Ok(quantize(&model.dense(name)?.to_f32(), n, k, self.format)?.0),
        }
    }
}

/// Period of repeated rows: at least the rows that share a scale,
/// and a tile.
pub const ROWS: usize = 128;

/// Normal numbers, as rows of X or dY.
/// A chip's power, and so its clock, depends on the data: equal
/// rows would be multiplied faster.
pub fn normal_rows(dtype: DType, rows: usize, columns: usize) -> Vec<u8> {
    let few = dtype.encode(&activations(ActivationKind::Normal, rows.min(ROWS), columns, dtype, 1));
    repeated(&few, rows * columns * dtype.bytes())
}

/// `bytes` bytes that repeat `few`.
pub fn repeated(few: &[u8], bytes: usize) -> Vec<u8> {
    let mut all = few.repeat(bytes.div_ceil(few.len().max(1)));
    all.truncate(bytes);
    all
}

/// A random weight with repeated rows. The time does not depend
/// on quantized values.
pub fn repeated_rows(format: Format, n: usize, k: usize) -> anyhow::Result<HostWeight> {
    // Quantizer output: rare zero points may take a kernel's slow
    // path.
    let few = weight(WeightKind::Quantized, format, n.min(ROWS), k, None, 1)?;
    let blocks = repeated(few.blocks(), format.row_offset(n, k));
    let many = HostWeight::new(format, n, k, blocks.into())?;
    match few.row_scale() {
        None => Ok(many),
        Some(scales) => Ok(many.with_row_scale(scales.iter().copied().cycle().take(n).collect())?),
    }
}

/// Products of a model, or random ones, by default in three
/// shapes.
///
/// # Errors
/// When a shape is invalid, or as [`from_model`] and [`made_up`].
pub fn chosen(
    model: Option<&Path>,
    opening: Opening,
    sizes: &[Sizes],
    format: Option<FormatChoice>,
) -> anyhow::Result<Vec<Subject>> {
    let shapes = match sizes {
        [] => ["1x4096x4096", "8x4096x4096", "512x4096x4096"].map(str::parse::<Shape>).into_iter().collect(),
        _ => gemm_shapes(sizes),
    }?;
    match model {
        Some(path) => from_model(path, opening, &shapes, format),
        None => made_up(&shapes, format),
    }
}

/// Every shape in every format.
///
/// # Errors
/// When a named format cannot store a shape.
pub fn made_up(shapes: &[Shape], format: Option<FormatChoice>) -> anyhow::Result<Vec<Subject>> {
    let choice = match format {
        Some(choice) => choice,
        None => FormatChoice::One("q4_0".parse()?),
    };
    let mut subjects = Vec::new();
    for &shape in shapes {
        for format in choice.formats() {
            match format.check_k(shape.k) {
                Ok(()) => subjects.push(Subject { shape, format, origin: Origin::MadeUp }),
                Err(error) if choice == FormatChoice::All => eprintln!("left out: {error}"),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(subjects)
}

/// Every distinct format and shape among a model's weights, with
/// the tokens of every shape.
///
/// # Errors
/// When the file is not a model, or has no weight.
pub fn from_model(
    path: &Path,
    opening: Opening,
    shapes: &[Shape],
    format: Option<FormatChoice>,
) -> anyhow::Result<Vec<Subject>> {
    let tokens: BTreeSet<usize> = shapes.iter().map(|s| s.m).collect();
    let wanted = match format {
        Some(FormatChoice::One(format)) => Some(format),
        Some(FormatChoice::All) => anyhow::bail!("a model is benchmarked in one format: name it"),
        None => None,
    };
    let model = opening.open(path)?;
    let mut seen = BTreeSet::new();
    let mut subjects = Vec::new();
    for info in model.tensors() {
        // Norms and position embeddings are not weights of products.
        let (&[n, k], true) = (info.shape.as_slice(), info.name.ends_with(".weight")) else { continue };
        let name = info.name.clone();
        let (format, origin) = match (&info.kind, wanted) {
            (TensorKind::Quantized(format), _) => (*format, Origin::Tensor { model: model.clone(), name }),
            (TensorKind::Dense(dtype), None) => (dtype.name().parse()?, Origin::Tensor { model: model.clone(), name }),
            (TensorKind::Dense(_), Some(format)) => {
                (qgemm_api::format_for_k(format, k)?, Origin::Quantized { model: model.clone(), name })
            }
            (TensorKind::Opaque(_), _) => continue,
        };
        if seen.insert((format.name, n, k)) {
            let subject = |&m: &usize| Subject { shape: Shape { m, n, k }, format, origin: origin.clone() };
            subjects.extend(tokens.iter().map(subject));
        }
    }
    ensure!(!subjects.is_empty(), "{}: no weight among {} tensors", path.display(), model.tensors().len());
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_rows_differ_until_they_repeat() {
        let (columns, dtype) = (16, DType::F16);
        let values = dtype.decode(&normal_rows(dtype, ROWS + 3, columns));
        assert_eq!(values.len(), (ROWS + 3) * columns);
        let rows: Vec<&[f32]> = values.chunks(columns).collect();
        assert!((1..ROWS).all(|row| rows[row] != rows[0]));
        assert!((0..3).all(|row| rows[ROWS + row] == rows[row]));
        assert_eq!(normal_rows(dtype, 2, columns).len(), 2 * columns * 2);
    }
}
