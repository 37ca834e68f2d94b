//! Rotary embedding in plan files.

use qgemm_hal::RotaryPairs;
use serde::{Deserialize, Serialize};

use super::mismatch::wrong;
use super::sizes::{NamedRegion, WORD};
use crate::architecture::RotarySettings;
use crate::error::Error;
use crate::kv_append::{Rotary, RotaryScaling};

/// Rotary embedding ([`Rotary`](crate::Rotary)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedRotary {
    /// Rotated features per head.
    pub dim: usize,
    /// Pairing: `neox` or `interleaved`.
    pub pairs: String,
    /// Frequency base (theta).
    pub base: f64,
    /// Factor of rotated features, where it is not that of the scaling.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub amplitude: Option<f32>,
    /// Frequency scaling.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scaling: Option<PlannedScaling>,
    /// Tables of angles, where each pair has a factor of its own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tables: Option<PlannedTables>,
}

/// Tables of angles: f32 `[capacity, dim / 2]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedTables {
    /// Tensor of the factors, by which frequencies are divided.
    pub factors: String,
    /// Region of the cosines.
    pub cos: String,
    /// Region of the sines.
    pub sin: String,
}

/// Frequency scaling ([`RotaryScaling`](crate::RotaryScaling)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedScaling {
    /// `linear`, `llama3` or `yarn`.
    pub kind: String,
    /// Scaling factor.
    pub factor: f64,
    /// `low_freq_factor` (`llama3`) or `beta_slow` (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub low: Option<f64>,
    /// `high_freq_factor` (`llama3`) or `beta_fast` (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub high: Option<f64>,
    /// Original context length (`llama3` and `yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub original: Option<usize>,
    /// Whether the ramp begins and ends at whole pairs (`yarn`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub truncate: Option<bool>,
}

impl PlannedRotary {
    /// Rotary embedding of a model, with the tensor of its divisors, if there is one.
    pub(super) fn of(settings: &RotarySettings, factors: Option<&String>) -> Self {
        let RotarySettings { dim, pairs, base, scaling, amplitude } = *settings;
        let tables = factors.map(|factors| PlannedTables {
            factors: factors.clone(),
            cos: "rotary.cos".into(),
            sin: "rotary.sin".into(),
        });
        Self { dim, pairs: pairs.name().to_owned(), base, amplitude, scaling: PlannedScaling::of(scaling), tables }
    }

    /// Rotary embedding of up to `positions` positions.
    pub fn describe(&self, positions: usize) -> Result<Rotary, Error> {
        let rotary = self.of_frequencies()?;
        Ok(if self.tables.is_some() { rotary.tables(positions) } else { rotary })
    }

    /// Regions of the tables, with their bytes.
    pub(super) fn regions(&self, positions: usize) -> Vec<NamedRegion<'_>> {
        let Some(PlannedTables { cos, sin, .. }) = &self.tables else { return Vec::new() };
        let bytes = positions.checked_mul(self.dim / 2).and_then(|values| values.checked_mul(WORD));
        vec![("heads.rotary.tables.cos", cos, bytes), ("heads.rotary.tables.sin", sin, bytes)]
    }

    /// Rotary embedding before factors of pairs apply.
    pub(super) fn of_frequencies(&self) -> Result<Rotary, Error> {
        let pairs = RotaryPairs::ALL.into_iter().find(|pairs| pairs.name() == self.pairs);
        let rotary = match pairs {
            Some(RotaryPairs::Neox) => Rotary::neox(self.dim),
            Some(RotaryPairs::Interleaved) => Rotary::interleaved(self.dim),
            None => return Err(wrong("heads.rotary.pairs", "neox or interleaved", &self.pairs)),
        };
        let rotary = self.amplitude.into_iter().fold(rotary.base(self.base), Rotary::amplitude);
        let Some(PlannedScaling { kind, factor, low, high, original, truncate }) = &self.scaling else {
            return Ok(rotary);
        };
        // A missing number becomes NaN, which the rotary embedding refuses by name.
        let (factor, low, high) = (*factor, low.unwrap_or(f64::NAN), high.unwrap_or(f64::NAN));
        let original = original.unwrap_or(0);
        let scaling = match kind.as_str() {
            "linear" => RotaryScaling::Linear { factor },
            "llama3" => RotaryScaling::Llama3 { factor, low, high, original },
            "yarn" => {
                let truncate =
                    truncate.ok_or_else(|| wrong("heads.rotary.scaling.truncate", "true or false", "none"))?;
                RotaryScaling::Yarn { factor, fast: high, slow: low, original, truncate }
            }
            other => return Err(wrong("heads.rotary.scaling.kind", "linear, llama3 or yarn", other)),
        };
        Ok(rotary.scaling(scaling))
    }
}

impl PlannedScaling {
    fn of(scaling: RotaryScaling) -> Option<Self> {
        let of = |kind: &str, factor, [low, high]: [Option<f64>; 2], original| {
            Some(Self { kind: kind.to_owned(), factor, low, high, original, truncate: None })
        };
        match scaling {
            RotaryScaling::None => None,
            RotaryScaling::Linear { factor } => of("linear", factor, [None; 2], None),
            RotaryScaling::Llama3 { factor, low, high, original } => {
                of("llama3", factor, [Some(low), Some(high)], Some(original))
            }
            RotaryScaling::Yarn { factor, fast, slow, original, truncate } => {
                let yarn = of("yarn", factor, [Some(slow), Some(fast)], Some(original));
                yarn.map(|yarn| Self { truncate: Some(truncate), ..yarn })
            }
        }
    }
}
