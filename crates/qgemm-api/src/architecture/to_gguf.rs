//! [`GgufConversion`]: a checkpoint of `transformers` with the
//! names and settings of a GGUF file.

use std::collections::HashMap;
use std::f64::consts::TAU;
use std::path::Path;

use qgemm_formats::model::Model;
use qgemm_formats::model::gguf::{GgufScalar, GgufValue};
use qgemm_hal::RotaryPairs;

use super::description::Architecture;
use super::hyperparameters::Hyperparameters;
use super::llama::LLAMA;
use super::mistral::MISTRAL;
use super::names::TensorNames;
use super::reader::is_ignored;
use super::rotary::RotarySettings;
use super::served::architecture;
use super::settings::Settings;
use crate::error::Error;
use crate::kv_append::RotaryScaling;

/// A tensor's name in a GGUF file, and the order of its rows there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufName {
    /// Name.
    pub name: String,
    /// Heads whose rows are interleaved: row `2·i + h` of a head was row
    /// `i + h·half`. llama.cpp rotates neighbours in Llama.
    pub interleaved_heads: Option<usize>,
}

impl GgufName {
    /// A name of rows in their order.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), interleaved_heads: None }
    }
}

/// Metadata and names of a checkpoint of `transformers` in GGUF.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GgufConversion {
    /// Metadata, without a vocabulary: the file takes ids alone.
    pub metadata: Vec<(String, GgufValue)>,
    /// By name in the checkpoint. Tensors that no file has are missing.
    pub names: HashMap<String, GgufName>,
    /// `rope_freqs.weight`, where Llama 3 scales frequencies.
    pub rotary_factors: Option<Vec<f32>>,
}

impl GgufConversion {
    /// The conversion of `model`, which was opened at `path`: llama,
    /// mistral, qwen2 or qwen3 from safetensors.
    ///
    /// # Errors
    /// [`Error::IncompleteModel`] for architectures and settings that are not
    /// converted; [`Error::UnexpectedTensor`]; the errors of missing settings.
    pub fn of(model: &Model, path: impl AsRef<Path>) -> Result<Self, Error> {
        let settings = Settings::read(model, path.as_ref())?;
        if settings.is_gguf() {
            return Err(unserved("a GGUF file"));
        }
        let from = architecture(settings.architecture())?;
        // llama.cpp has no architecture of Mistral's name.
        let to = if std::ptr::eq(from, &MISTRAL) { &LLAMA } else { from };
        let numbers = Hyperparameters::read(&settings, from)?;
        let (recurs, has_experts) = (numbers.recurrent.is_some(), numbers.experts.is_some());
        let others = [from.gamma_offset, from.sinks, from.post_norms, recurs, has_experts, numbers.window.is_some()];
        if others.contains(&true) {
            return Err(unserved("a model with experts, recurrent layers, a sliding window, or norms of Gemma's kind"));
        }
        let rotary = RotarySettings::read(&settings, from, &numbers)?;
        Ok(Self {
            metadata: metadata(to.name, &numbers, &rotary, rows(model, from.names.embedding)?)?,
            names: names(model, from, to, &numbers)?,
            rotary_factors: rotary_factors(&rotary),
        })
    }
}

fn unserved(what: &str) -> Error {
    Error::IncompleteModel { what: format!("{what} is not converted to GGUF: expected llama, mistral, qwen2 or qwen3") }
}

fn metadata(
    architecture: &str,
    numbers: &Hyperparameters,
    rotary: &RotarySettings,
    vocabulary: usize,
) -> Result<Vec<(String, GgufValue)>, Error> {
    let float = |value: f64| GgufValue::from(GgufScalar::F32(value as f32));
    let mut pairs = vec![("general.architecture".to_owned(), GgufValue::from(architecture))];
    let counts = [
        ("vocab_size", vocabulary),
        ("block_count", numbers.layers),
        ("context_length", numbers.context),
        ("embedding_length", numbers.hidden),
        ("feed_forward_length", numbers.intermediate),
        ("attention.head_count", numbers.heads),
        ("attention.head_count_kv", numbers.kv_heads),
        ("attention.key_length", numbers.head_dim),
        ("attention.value_length", numbers.head_dim),
        ("rope.dimension_count", rotary.dim),
    ];
    for (key, count) in counts {
        let count = u32::try_from(count).map_err(|_| unserved("a size beyond 32 bits"))?;
        pairs.push((format!("{architecture}.{key}"), count.into()));
    }
    let mut push = |key: &str, value| pairs.push((format!("{architecture}.{key}"), value));
    push("attention.layer_norm_rms_epsilon", float(numbers.eps.into()));
    push("rope.freq_base", float(rotary.base));
    match rotary.scaling {
        RotaryScaling::None | RotaryScaling::Llama3 { .. } => {}
        RotaryScaling::Linear { factor } => {
            push("rope.scaling.type", "linear".into());
            push("rope.scaling.factor", float(factor));
        }
        RotaryScaling::Yarn { factor, fast, slow, original, truncate: true } if rotary.amplitude.is_none() => {
            push("rope.scaling.type", "yarn".into());
            push("rope.scaling.factor", float(factor));
            let original = u32::try_from(original).map_err(|_| unserved("a size beyond 32 bits"))?;
            push("rope.scaling.original_context_length", original.into());
            push("rope.scaling.yarn_beta_fast", float(fast));
            push("rope.scaling.yarn_beta_slow", float(slow));
        }
        _ => return Err(unserved("this scaling of rotary frequencies")),
    }
    pairs.push(("tokenizer.ggml.model".to_owned(), "none".into()));
    Ok(pairs)
}

/// Rows of a tensor.
fn rows(model: &Model, name: &str) -> Result<usize, Error> {
    Ok(model.info(name)?.shape.first().copied().unwrap_or(0))
}

/// Names of all tensors.
fn names(
    model: &Model,
    from: &'static Architecture,
    to: &Architecture,
    numbers: &Hyperparameters,
) -> Result<HashMap<String, GgufName>, Error> {
    let (old, new) = (from.names, to.gguf_names);
    let interleaves = to.gguf_rotary == RotaryPairs::Interleaved;
    let mut found = HashMap::new();
    for info in model.tensors().iter().filter(|info| !is_ignored(&info.name)) {
        let unexpected = || Error::UnexpectedTensor { tensor: info.name.clone(), architecture: from.name };
        let (stem, part) = info.name.rsplit_once('.').ok_or_else(unexpected)?;
        let outer = [(old.embedding, new.embedding), (old.output_norm, new.output_norm), (old.head, new.head)];
        let (stem, heads) = match (outer.iter().find(|(name, _)| *name == stem), stem.strip_prefix(old.layer)) {
            (Some((_, name)), _) => ((*name).to_owned(), None),
            (None, Some(rest)) => {
                let (layer, rest) = rest.split_once('.').ok_or_else(unexpected)?;
                let layer: usize = layer.parse().ok().filter(|&at| at < numbers.layers).ok_or_else(unexpected)?;
                let pairs = layer_names(old).into_iter().zip(layer_names(new));
                let (_, name) = pairs.into_iter().find(|(name, _)| *name == rest).ok_or_else(unexpected)?;
                let heads = [numbers.heads, numbers.kv_heads].into_iter().zip(new.qkv).find(|(_, qk)| *qk == name);
                (format!("{}{layer}.{name}", new.layer), heads.map(|(heads, _)| heads).filter(|_| interleaves))
            }
            (None, None) => return Err(unexpected()),
        };
        found.insert(info.name.clone(), GgufName { name: format!("{stem}.{part}"), interleaved_heads: heads });
    }
    Ok(found)
}

/// Names of a layer's tensors, in an order that both kinds of files share.
fn layer_names(names: &TensorNames) -> [&'static str; 11] {
    let ([q, k, v], [q_norm, k_norm]) = (names.qkv, names.head_norms);
    let of_attention = [names.attention_norm, q, k, v, q_norm, k_norm, names.attention_output];
    let [a, b, c, d, e, f, g] = of_attention;
    [a, b, c, d, e, f, g, names.ffn_norm, names.gate, names.up, names.down]
}

/// Divisors of the frequencies of Llama 3, one for each pair.
fn rotary_factors(rotary: &RotarySettings) -> Option<Vec<f32>> {
    let RotaryScaling::Llama3 { factor, low, high, original } = rotary.scaling else { return None };
    let of_pair = |pair: usize| {
        let wavelength = TAU * rotary.base.powf((2 * pair) as f64 / rotary.dim as f64);
        let turns = original as f64 / wavelength;
        let share = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - share) / factor + share)) as f32
    };
    Some((0..rotary.dim / 2).map(of_pair).collect())
}
