//! Pooling: an embedding from the rows of a text's tokens.

use std::path::Path;

use qgemm_api::{Key, Settings};

use crate::beside::json_beside;
use crate::error::Error;

const KIND: Key = Key { gguf: "pooling_type", config: &[] };

/// How rows become an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Mean of all tokens.
    Mean,
    /// The first token (CLS).
    First,
}

impl Pooling {
    /// Reads the pooling of the model at `path`: GGUF metadata, or `1_Pooling/config.json` of `sentence-transformers`.
    /// It is the mean where nothing is stated.
    ///
    /// # Errors
    /// [`Error::UnservedSetting`] for another pooling.
    pub fn read(settings: &Settings<'_>, path: &Path) -> Result<Self, Error> {
        if settings.is_gguf() {
            return match settings.count(KIND) {
                None | Some(1) => Ok(Self::Mean),
                Some(2) => Ok(Self::First),
                Some(other) => Err(unserved(settings.name(KIND), other.to_string(), "1 (mean) or 2 (CLS)")),
            };
        }
        let Some(config) = json_beside(path, "1_Pooling/config.json")? else { return Ok(Self::Mean) };
        let set = config.as_object().into_iter().flatten().filter(|(_, value)| **value == true);
        let set: Vec<&str> = set.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).collect();
        match set[..] {
            ["mean_tokens"] | [] => Ok(Self::Mean),
            ["cls_token"] => Ok(Self::First),
            _ => Err(unserved("1_Pooling/config.json".into(), set.join(", "), "mean_tokens or cls_token")),
        }
    }

    /// The embedding of a text of at least one token, of unit length. `rows` has `features` values for each token.
    pub fn embedding(self, rows: &[f32], features: usize) -> Vec<f32> {
        let used = if self == Self::Mean { rows } else { &rows[..features.min(rows.len())] };
        let mut sum = vec![0.0; features];
        for row in used.chunks_exact(features) {
            sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += v);
        }
        // The length of a mean is scaled away with its count.
        let length = sum.iter().map(|v| v * v).sum::<f32>().sqrt();
        if length > 0.0 { sum.iter().map(|v| v / length).collect() } else { sum }
    }
}

fn unserved(name: String, got: String, expected: &str) -> Error {
    qgemm_api::Error::UnservedSetting { name, got, expected: expected.to_owned() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embeddings_have_unit_length() {
        let rows = [3.0, 0.0, 0.0, 4.0];
        assert_eq!(Pooling::Mean.embedding(&rows, 2), [0.6, 0.8]);
        assert_eq!(Pooling::First.embedding(&rows, 2), [1.0, 0.0]);
        assert_eq!(Pooling::Mean.embedding(&[0.0, 0.0], 2), [0.0, 0.0]);
    }
}
