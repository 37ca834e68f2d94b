//! Parts of each layer: which mixer it has, and whether a feed-forward part.

use super::description::{Architecture, LayerPattern};
use super::settings::{Key, Settings};
use super::sizes::{INTERMEDIATE, KV_HEADS, LAYERS};
use crate::error::Error;

const LAYER_TYPES: Key = Key { gguf: "", config: &["/layer_types"] };
const ATTENTION_LAYERS: Key = Key { gguf: "", config: &["/full_attn_idxs"] };
const INTERVAL: Key = Key { gguf: "full_attention_interval", config: &["/full_attention_interval"] };
const RECURRENT: Key = Key { gguf: "attention.recurrent_layers", config: &[] };
const PATTERN: Key = Key { gguf: "", config: &["/hybrid_override_pattern"] };

/// Token mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Attention.
    Attention,
    /// The architecture's recurrence.
    Recurrent,
}

/// Parts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerParts {
    /// Token mixer.
    pub mixer: Option<MixerKind>,
    /// Whether there is a feed-forward part.
    pub feed_forward: bool,
}

impl LayerParts {
    /// A mixer and a feed-forward part.
    const fn both(mixer: MixerKind) -> Self {
        Self { mixer: Some(mixer), feed_forward: true }
    }

    /// Reads the parts of all layers.
    ///
    /// # Errors
    /// [`Error::MissingSetting`], [`Error::UnservedSetting`].
    pub fn read(settings: &Settings<'_>, architecture: &Architecture, layers: usize) -> Result<Vec<Self>, Error> {
        let all = match architecture.layers {
            LayerPattern::Attention => return Ok(vec![Self::both(MixerKind::Attention); layers]),
            LayerPattern::ByHeads(recurrent) => by_heads(settings, recurrent)?,
            LayerPattern::AllButEvery(n, recurrent) => all_but_every(settings, n, recurrent, layers)?,
            LayerPattern::OnePart => one_part(settings)?,
        };
        if all.len() == layers { Ok(all) } else { Err(wrong_count(settings, architecture, all.len(), layers)) }
    }
}

fn wrong_count(settings: &Settings<'_>, architecture: &Architecture, got: usize, layers: usize) -> Error {
    let key = match (architecture.layers, settings.is_gguf()) {
        (LayerPattern::OnePart, false) => PATTERN,
        (LayerPattern::AllButEvery(..), true) => RECURRENT,
        (_, true) => KV_HEADS,
        (_, false) => LAYER_TYPES,
    };
    let expected = format!("{layers}, one for each layer");
    Error::UnservedSetting { name: settings.name(key), got: format!("a list of {got}"), expected }
}

/// Layers without heads of keys and values are recurrent.
fn by_heads(settings: &Settings<'_>, recurrent: &str) -> Result<Vec<LayerParts>, Error> {
    if settings.is_gguf() {
        let heads = settings.required(settings.counts(KV_HEADS), KV_HEADS)?;
        return Ok(heads.into_iter().map(|heads| LayerParts::both(mixer(heads > 0))).collect());
    }
    if let (None, Some(places)) = (settings.texts(LAYER_TYPES), settings.counts(ATTENTION_LAYERS)) {
        let layers = settings.required(settings.count(LAYERS), LAYERS)?;
        let parts = |layer| LayerParts::both(mixer(places.contains(&layer)));
        // A list may be longer than any model.
        return Ok((0..layers.min(1 << 16)).map(parts).collect());
    }
    listed(settings, recurrent)
}

/// All layers but every n-th are recurrent, unless they are listed.
fn all_but_every(
    settings: &Settings<'_>,
    default: usize,
    recurrent: &str,
    layers: usize,
) -> Result<Vec<LayerParts>, Error> {
    if settings.texts(LAYER_TYPES).is_some() {
        return listed(settings, recurrent);
    }
    if let Some(flags) = settings.flags(RECURRENT) {
        return Ok(flags.into_iter().take(layers).map(|is_recurrent| LayerParts::both(mixer(!is_recurrent))).collect());
    }
    match settings.count(INTERVAL).unwrap_or(default) {
        0 => {
            let (name, got) = (settings.name(INTERVAL), "0".to_owned());
            Err(Error::UnservedSetting { name, got, expected: "1 or more".into() })
        }
        n => Ok((0..layers).map(|layer| LayerParts::both(mixer((layer + 1).is_multiple_of(n)))).collect()),
    }
}

/// Layers by `layer_types`.
fn listed(settings: &Settings<'_>, recurrent: &str) -> Result<Vec<LayerParts>, Error> {
    let types = settings.required(settings.texts(LAYER_TYPES), LAYER_TYPES)?;
    let parts = |kind: &str| match kind {
        "full_attention" => Ok(LayerParts::both(MixerKind::Attention)),
        kind if kind == recurrent => Ok(LayerParts::both(MixerKind::Recurrent)),
        other => Err(Error::UnservedSetting {
            name: settings.name(LAYER_TYPES),
            got: other.to_owned(),
            expected: format!("full_attention or {recurrent}"),
        }),
    };
    types.into_iter().map(parts).collect()
}

/// Layers of one part.
fn one_part(settings: &Settings<'_>) -> Result<Vec<LayerParts>, Error> {
    const FEED_FORWARD: LayerParts = LayerParts { mixer: None, feed_forward: true };
    let of_mixer = |mixer| LayerParts { mixer: Some(mixer), feed_forward: false };
    if settings.is_gguf() {
        let heads = settings.required(settings.counts(KV_HEADS), KV_HEADS)?;
        let features = settings.required(settings.counts(INTERMEDIATE), INTERMEDIATE)?;
        let parts = |(heads, features)| match (heads, features) {
            (0, 0) => of_mixer(MixerKind::Recurrent),
            (_, 0) => of_mixer(MixerKind::Attention),
            _ => FEED_FORWARD,
        };
        return Ok(heads.into_iter().zip(features).map(parts).collect());
    }
    let parts = |letter| match letter {
        'M' => Ok(of_mixer(MixerKind::Recurrent)),
        '*' => Ok(of_mixer(MixerKind::Attention)),
        '-' => Ok(FEED_FORWARD),
        other => Err(Error::UnservedSetting {
            name: settings.name(PATTERN),
            got: other.to_string(),
            expected: "letters M, * and -".into(),
        }),
    };
    settings.required(settings.text(PATTERN), PATTERN)?.chars().map(parts).collect()
}

fn mixer(is_attention: bool) -> MixerKind {
    if is_attention { MixerKind::Attention } else { MixerKind::Recurrent }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::architecture::served::architecture;

    /// A letter for each layer: attention, recurrence, feed-forward part.
    fn letters(name: &str, layers: usize, config: Value) -> Result<String, Error> {
        let parts = LayerParts::read(&Settings::Config(config), architecture(name)?, layers)?;
        let letter = |parts: &LayerParts| match (parts.mixer, parts.feed_forward) {
            (Some(MixerKind::Attention), true) => 'A',
            (Some(MixerKind::Recurrent), true) => 'R',
            (Some(MixerKind::Attention), false) => 'a',
            (Some(MixerKind::Recurrent), false) => 'r',
            (None, _) => 'f',
        };
        Ok(parts.iter().map(letter).collect())
    }

    #[test]
    fn layers_have_the_parts_that_the_config_states() {
        let of = |name, layers, config| letters(name, layers, config).expect("read");
        assert_eq!(of("llama", 2, json!({})), "AA");
        assert_eq!(of("lfm2", 3, json!({ "layer_types": ["conv", "full_attention", "conv"] })), "RAR");
        assert_eq!(of("lfm2", 3, json!({ "full_attn_idxs": [2], "num_hidden_layers": 3 })), "RRA");
        assert_eq!(of("qwen3_next", 8, json!({})), "RRRARRRA");
        assert_eq!(of("qwen3_next", 4, json!({ "full_attention_interval": 2 })), "RARA");
        assert_eq!(of("qwen3_next", 2, json!({ "layer_types": ["full_attention", "linear_attention"] })), "AR");
        assert_eq!(of("nemotron_h", 4, json!({ "hybrid_override_pattern": "M-*M" })), "rfar");
    }

    #[test]
    fn other_layers_are_refused() {
        let refused = |name, config| letters(name, 2, config).expect_err("refused").to_string();
        let types = refused("lfm2", json!({ "layer_types": ["conv", "mamba"] }));
        assert_eq!(types, "`layer_types` is mamba: expected full_attention or conv");
        let pattern = refused("nemotron_h", json!({ "hybrid_override_pattern": "ME" }));
        assert_eq!(pattern, "`hybrid_override_pattern` is E: expected letters M, * and -");
        let count = refused("nemotron_h", json!({ "hybrid_override_pattern": "M" }));
        assert_eq!(count, "`hybrid_override_pattern` is a list of 1: expected 2, one for each layer");
        assert!(refused("qwen3_next", json!({ "full_attention_interval": 0 })).contains("expected 1 or more"));
        assert!(refused("lfm2", json!({})).contains("layer_types"));
    }
}
