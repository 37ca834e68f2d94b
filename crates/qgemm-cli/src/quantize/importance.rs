//! Importance matrices of `--imatrix`, for the tensors of a model.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use qgemm_api::gguf::{GgufHeader, GgufValue};
use qgemm_api::{ImportanceMatrix, SharedBytes};

/// Metadata that llama.cpp writes of an importance matrix.
pub const KEYS: [&str; 4] = [
    "quantize.imatrix.file",
    "quantize.imatrix.dataset",
    "quantize.imatrix.entries_count",
    "quantize.imatrix.chunks_count",
];

/// An importance matrix, or none.
pub struct Importance {
    matrix: Option<ImportanceMatrix>,
}

impl Importance {
    /// Reads the file, if one is given.
    ///
    /// # Errors
    /// When it cannot be read, is no importance matrix, or is that of a
    /// model without any of these tensors.
    pub fn load<'a>(path: Option<&Path>, mut names: impl Iterator<Item = &'a str>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self { matrix: None }) };
        let shown = || path.display().to_string();
        let bytes = SharedBytes::from(fs::read(path).with_context(shown)?);
        let matrix = ImportanceMatrix::read(&bytes).with_context(shown)?;
        let of_model = names.any(|name| matrix.get(name).is_some());
        ensure!(of_model, "{}: none of its entries has the name of a tensor of the model", shown());
        Ok(Self { matrix: Some(matrix) })
    }

    /// Whether the user gave an importance matrix.
    pub fn is_given(&self) -> bool {
        self.matrix.is_some()
    }

    /// Importance of the columns of each matrix of a tensor, one after
    /// another, and a note if there should be one.
    ///
    /// # Errors
    /// When the entry has another number of columns.
    pub fn of(&self, name: &str, shape: &[usize]) -> anyhow::Result<(Option<&[f32]>, Option<String>)> {
        let Some(matrix) = &self.matrix else { return Ok((None, None)) };
        let Some(found) = matrix.get(name) else { return Ok((None, Some("no importances".into()))) };
        let stack: usize = shape.iter().rev().skip(2).product();
        let expected = shape.last().copied().unwrap_or(0) * stack;
        // llama.cpp measures no embedding, but quantizes a tied one.
        if found.len() != expected && name == "token_embd.weight" {
            return Ok((None, Some(format!("{} importances, not {expected}: not used", found.len()))));
        }
        let got = found.len();
        ensure!(got == expected, "{name}: expected {expected} importances (K for each matrix), got {got}");
        Ok((Some(found), None))
    }

    /// Adds metadata of the matrix in `path`, as llama.cpp does.
    ///
    /// # Errors
    /// When a key is there already.
    pub fn metadata(&self, path: Option<&Path>, header: &mut GgufHeader) -> anyhow::Result<()> {
        let (Some(matrix), Some(path)) = (&self.matrix, path) else { return Ok(()) };
        let [file, dataset, entries, chunks] = KEYS;
        header.metadata(file, text(&path.to_string_lossy()))?;
        if let Some(first) = matrix.datasets().first() {
            header.metadata(dataset, text(first))?;
        }
        header.metadata(entries, u32::try_from(matrix.tensors().count())?.into())?;
        if matrix.chunks() > 0 {
            header.metadata(chunks, matrix.chunks().into())?;
        }
        Ok(())
    }
}

/// Text of metadata, cut as in llama.cpp.
fn text(text: &str) -> GgufValue {
    const MOST: usize = 127;
    let end = (0..=MOST.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    text[..end].into()
}
