//! Sliding window of attention, and which layers have it.

use super::description::{Architecture, Window};
use super::settings::{Key, Settings};
use crate::error::Error;

const KEYS: Key = Key { gguf: "attention.sliding_window", config: &["/sliding_window"] };
const USED: Key = Key { gguf: "attention.use_sliding_window", config: &["/use_sliding_window"] };
const FIRST_LAYER: Key = Key { gguf: "", config: &["/max_window_layers"] };
const PATTERN: Key = Key { gguf: "attention.sliding_window_pattern", config: &["/sliding_window_pattern"] };
const LAYER_TYPES: Key = Key { gguf: "", config: &["/layer_types"] };

/// Sliding window of some or all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct SlidingWindow {
    /// Keys that a query attends to at most.
    keys: usize,
    layers: Layers,
}

/// Layers with a window.
#[derive(Clone, Debug, PartialEq)]
enum Layers {
    /// Layers from this one on.
    From(usize),
    /// All layers but every n-th.
    AllButEvery(usize),
    /// Layers with `true`.
    Listed(Vec<bool>),
}

impl SlidingWindow {
    /// Reads the window of a decoder of `layers` layers, if it has one.
    ///
    /// # Errors
    /// [`Error::UnservedSetting`], [`Error::MissingSetting`].
    pub fn read(settings: &Settings<'_>, architecture: &Architecture, layers: usize) -> Result<Option<Self>, Error> {
        let Some(keys) = settings.count(KEYS).filter(|&keys| keys > 0) else { return Ok(None) };
        let layers = match architecture.window {
            Window::None => return Ok(None),
            Window::AllLayers => Layers::From(0),
            Window::SomeLayers if !settings.flag(USED).unwrap_or(false) => return Ok(None),
            Window::SomeLayers | Window::AllButEvery(_) => match (settings.texts(LAYER_TYPES), architecture.window) {
                (Some(types), _) => Layers::Listed(listed(settings, &types, layers)?),
                (None, Window::AllButEvery(n)) => pattern(settings, n, layers)?,
                (None, _) => Layers::From(settings.required(settings.count(FIRST_LAYER), FIRST_LAYER)?),
            },
        };
        Ok(Some(Self { keys, layers }))
    }

    /// The window of a layer: keys that a query attends to at most.
    pub fn of_layer(&self, layer: usize) -> Option<usize> {
        let has_window = match &self.layers {
            Layers::From(first) => layer >= *first,
            Layers::AllButEvery(n) => !(layer + 1).is_multiple_of(*n),
            Layers::Listed(listed) => listed.get(layer) == Some(&true),
        };
        has_window.then_some(self.keys)
    }
}

/// Layers by a stated pattern: every how many layers one has no window, or a flag for each layer.
fn pattern(settings: &Settings<'_>, default: usize, layers: usize) -> Result<Layers, Error> {
    let unserved =
        |got: String, expected: String| Error::UnservedSetting { name: settings.name(PATTERN), got, expected };
    match (settings.flags(PATTERN), settings.count(PATTERN)) {
        (Some(flags), _) if flags.len() == layers => Ok(Layers::Listed(flags)),
        (Some(flags), _) => {
            Err(unserved(format!("a list of {}", flags.len()), format!("{layers}, one for each layer")))
        }
        (None, Some(0)) => Err(unserved("0".into(), "1 or more".into())),
        (None, stated) => Ok(Layers::AllButEvery(stated.unwrap_or(default))),
    }
}

/// Window flags of layers, by their types.
fn listed(settings: &Settings<'_>, types: &[&str], layers: usize) -> Result<Vec<bool>, Error> {
    let unserved =
        |got: String, expected: String| Error::UnservedSetting { name: settings.name(LAYER_TYPES), got, expected };
    if types.len() != layers {
        return Err(unserved(format!("a list of {}", types.len()), format!("{layers}, one for each layer")));
    }
    let has_window = |kind: &&str| match *kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(unserved(other.to_owned(), "full_attention or sliding_attention".to_owned())),
    };
    types.iter().map(has_window).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::architecture::served::architecture;

    fn read(name: &str, config: Value) -> Result<Vec<Option<usize>>, Error> {
        let window = SlidingWindow::read(&Settings::Config(config), architecture(name)?, 4)?;
        Ok((0..4).map(|layer| window.as_ref().and_then(|window| window.of_layer(layer))).collect())
    }

    #[test]
    fn layers_have_the_window_that_the_config_states() {
        let of = |name, config| read(name, config).expect("read");
        assert_eq!(of("llama", json!({ "sliding_window": 8 })), [None; 4]);
        assert_eq!(of("mistral", json!({ "sliding_window": 8 })), [Some(8); 4]);
        assert_eq!(of("mistral", json!({ "sliding_window": null })), [None; 4]);
        let unused = json!({ "sliding_window": 8, "use_sliding_window": false, "max_window_layers": 0 });
        assert_eq!(of("qwen2", unused), [None; 4]);
        let last = json!({ "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3 });
        assert_eq!(of("qwen2", last), [None, None, None, Some(8)]);
        let types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
        let listed =
            json!({ "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3, "layer_types": types });
        assert_eq!(of("qwen3", listed), [Some(8), None, Some(8), None]);
    }

    #[test]
    fn other_layers_are_refused() {
        let with = |types: &[&str]| {
            let config = json!({ "sliding_window": 8, "use_sliding_window": true, "layer_types": types });
            read("qwen2", config).expect_err("refused").to_string()
        };
        assert_eq!(with(&["full_attention"]), "`layer_types` is a list of 1: expected 4, one for each layer");
        let chunked = with(&["chunked_attention"; 4]);
        assert_eq!(chunked, "`layer_types` is chunked_attention: expected full_attention or sliding_attention");
        let missing = read("qwen2", json!({ "sliding_window": 8, "use_sliding_window": true }));
        assert!(matches!(missing, Err(Error::MissingSetting { .. })), "{missing:?}");
    }
}
