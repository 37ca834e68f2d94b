//! Hyperparameters of a decoder: sizes, norms, context, layers, window, experts.

use qgemm_formats::{DType, ModelShape};
use qgemm_hal::{Activation, ClampedSwiglu};

use super::description::{Architecture, Experts};
use super::layer_parts::{LayerParts, MixerKind};
use super::recurrence::RecurrentNumbers;
use super::settings::{Key, Settings};
use super::sizes::{INTERMEDIATE, KV_HEADS, LAYERS, size, uniform};
use super::sliding_window::SlidingWindow;
use crate::error::Error;

/// Features between layers.
pub const HIDDEN: Key = Key { gguf: "embedding_length", config: &["/hidden_size"] };
/// Heads of attention.
pub const HEADS: Key = Key { gguf: "attention.head_count", config: &["/num_attention_heads"] };
const HEAD_DIM: Key = Key { gguf: "attention.key_length", config: &["/head_dim", "/attention_head_dim"] };
const V_HEAD_DIM: Key = Key { gguf: "attention.value_length", config: &["/v_head_dim"] };
const EPS: Key =
    Key { gguf: "attention.layer_norm_rms_epsilon", config: &["/rms_norm_eps", "/norm_eps", "/layer_norm_epsilon"] };
/// Nemotron-H states this one.
const OTHER_EPS: Key = Key { gguf: "attention.layer_norm_epsilon", config: &[] };
/// Tokens that the model is made for.
pub const CONTEXT: Key = Key { gguf: "context_length", config: &["/max_position_embeddings"] };
const EXPERTS: Key = Key { gguf: "expert_count", config: &["/num_experts", "/num_local_experts"] };
const EXPERTS_PER_TOKEN: Key = Key { gguf: "expert_used_count", config: &["/num_experts_per_tok"] };
const EXPERT_INTERMEDIATE: Key = Key { gguf: "expert_feed_forward_length", config: &["/moe_intermediate_size"] };
const SHARED_INTERMEDIATE: Key =
    Key { gguf: "expert_shared_feed_forward_length", config: &["/shared_expert_intermediate_size"] };
const RENORMALIZED: Key = Key { gguf: "expert_weights_norm", config: &["/norm_topk_prob"] };
const SCORE_SCALE: Key = Key { gguf: "attention.scale", config: &[] };
const LIMIT: Key = Key { gguf: "", config: &["/swiglu_limit"] };
const QUERY_SCALAR: Key = Key { gguf: "", config: &["/query_pre_attn_scalar"] };
/// Activation of feed-forward parts.
pub const ACTIVATION: Key = Key { gguf: "", config: &["/hidden_act", "/hidden_activation", "/mlp_hidden_act"] };
const ADJUSTED: Key = Key { gguf: "", config: &["/block_auto_adjust_ff_dim"] };
const MULTIPLIER: Key = Key { gguf: "", config: &["/block_ffn_dim_multiplier"] };
const MULTIPLE: Key = Key { gguf: "", config: &["/block_multiple_of"] };
const CAUSAL: Key = Key { gguf: "attention.causal", config: &[] };
const DRAFT_LAYERS: Key = Key { gguf: "nextn_predict_layers", config: &[] };

/// Sizes and constants of a decoder.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hyperparameters {
    /// Decoder layers.
    pub layers: usize,
    /// Layers behind them that draft tokens, which nothing runs.
    pub(crate) draft_layers: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Features between gate·up and down.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Activation of the gate.
    pub activation: Activation,
    /// Factor of attention's scores, where it is not the root of `1 / head_dim`.
    pub score_scale: Option<f32>,
    /// Epsilon of RMSNorm.
    pub eps: f32,
    /// Tokens that the model is made for.
    pub context: usize,
    /// Sliding window of attention.
    pub(crate) window: Option<SlidingWindow>,
    /// Parts of each layer.
    pub(crate) parts: Vec<LayerParts>,
    /// Recurrent mixer of layers that have one.
    pub(crate) recurrent: Option<RecurrentNumbers>,
    /// Experts of layers that have some.
    pub experts: Option<ExpertNumbers>,
}

/// Sizes and routing of layers of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpertNumbers {
    /// Experts of a layer.
    pub count: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Features between gate·up and down of an expert.
    pub intermediate: usize,
    /// Features of the shared expert; 0 without one.
    pub shared: usize,
    /// Whether the weights of a token's experts are scaled to a sum of 1.
    pub renormalized: bool,
}

impl Hyperparameters {
    /// Reads the hyperparameters of a model.
    ///
    /// # Errors
    /// [`Error::MissingSetting`], [`Error::UnservedSetting`].
    pub fn read(settings: &Settings<'_>, architecture: &Architecture) -> Result<Self, Error> {
        let stated = |key| size(settings, key);
        let required = |key| settings.required(stated(key)?, key);
        let (hidden, heads) = (required(HIDDEN)?, required(HEADS)?);
        let head_dim = stated(HEAD_DIM)?.unwrap_or(hidden / heads);
        let eps = settings.number(EPS).or_else(|| settings.number(OTHER_EPS));
        let eps = settings.required(eps, EPS)? as f32;
        let all_layers = required(LAYERS)?;
        let draft_layers = settings.count(DRAFT_LAYERS).unwrap_or(0).min(all_layers);
        let layers = all_layers - draft_layers;
        let experts_intermediate = size(settings, EXPERT_INTERMEDIATE)?;
        let intermediate = intermediate(settings)?.or(experts_intermediate);
        let intermediate = settings.required(intermediate, INTERMEDIATE)?;
        let numbers = Self {
            layers,
            draft_layers,
            hidden,
            intermediate,
            heads,
            kv_heads: uniform(settings, KV_HEADS)?.unwrap_or(heads),
            head_dim,
            activation: activation(settings, architecture),
            score_scale: score_scale(settings, architecture, [layers, hidden, heads]),
            eps,
            context: required(CONTEXT)?,
            window: SlidingWindow::read(settings, architecture, layers)?,
            parts: LayerParts::read(settings, architecture, layers)?,
            recurrent: RecurrentNumbers::read(settings, architecture)?,
            experts: experts(settings, architecture, intermediate)?,
        };
        let expect = |key, got: String, holds: bool, expected: &str| match holds {
            true => Ok(()),
            false => Err(Error::UnservedSetting { name: settings.name(key), got, expected: expected.to_owned() }),
        };
        let v_dim = settings.count(V_HEAD_DIM).unwrap_or(head_dim);
        expect(V_HEAD_DIM, v_dim.to_string(), v_dim == head_dim, &format!("{head_dim}, as keys have"))?;
        expect(
            KV_HEADS,
            numbers.kv_heads.to_string(),
            heads.is_multiple_of(numbers.kv_heads),
            "a divisor of the heads",
        )?;
        let is_causal = settings.flag(CAUSAL).unwrap_or(true);
        expect(CAUSAL, is_causal.to_string(), is_causal, "true")?;
        let (_, names) = architecture.activation;
        if let Some(activation) = settings.text(ACTIVATION) {
            expect(ACTIVATION, activation.to_owned(), names.contains(&activation), &names.join(" or "))?;
        }
        Ok(numbers)
    }

    /// Whether a layer has attention, and so keys and values in the cache.
    pub fn attends(&self, layer: usize) -> bool {
        self.parts.get(layer).is_some_and(|parts| parts.mixer == Some(MixerKind::Attention))
    }

    /// Bytes of a session's recurrent states, which a step reads and writes, with activations
    /// of this type.
    pub fn state_bytes(&self, activations: DType) -> usize {
        let each = match self.recurrent {
            None => 0,
            Some(RecurrentNumbers::ShortConv { width }) => (width - 1) * self.hidden * activations.bytes(),
            Some(RecurrentNumbers::Linear(of)) => {
                let window = (of.width - 1) * of.channels() * activations.bytes();
                window + of.values() * of.key_dim * DType::F32.bytes()
            }
        };
        each * self.parts.iter().filter(|parts| parts.mixer == Some(MixerKind::Recurrent)).count()
    }

    /// Keys that a query of this layer attends to at most.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.as_ref()?.of_layer(layer)
    }
}

/// Sizes that recipes of formats depend on. Unlike [`Hyperparameters`],
/// any architecture has them.
///
/// # Errors
/// [`Error::MissingSetting`] without a number of layers.
pub fn shape(settings: &Settings<'_>) -> Result<ModelShape, Error> {
    let heads = size(settings, HEADS)?.unwrap_or(0);
    Ok(ModelShape {
        architecture: settings.architecture().to_owned(),
        layers: settings.required(size(settings, LAYERS)?, LAYERS)?,
        heads,
        kv_heads: uniform(settings, KV_HEADS)?.unwrap_or(heads),
        experts: size(settings, EXPERTS)?.unwrap_or(0),
    })
}

/// Features within feed-forward parts. LFM2 states them before an adjustment.
fn intermediate(settings: &Settings<'_>) -> Result<Option<usize>, Error> {
    let Some(stated) = uniform(settings, INTERMEDIATE)? else { return Ok(None) };
    if settings.flag(ADJUSTED) != Some(true) {
        return Ok(Some(stated));
    }
    let scaled = (2 * stated / 3) as f64 * settings.number(MULTIPLIER).unwrap_or(1.0).clamp(0.0, 8.0);
    let multiple = settings.required(size(settings, MULTIPLE)?, MULTIPLE)?;
    Ok(Some((scaled as usize).div_ceil(multiple) * multiple))
}

/// Activation of the gate. A model may state another limit of clamped values.
fn activation(settings: &Settings<'_>, architecture: &Architecture) -> Activation {
    match (architecture.activation.0, settings.number(LIMIT)) {
        (Activation::ClampedSwiglu(of), Some(limit)) => {
            Activation::ClampedSwiglu(ClampedSwiglu::new(of.alpha, of.beta, limit as f32))
        }
        (activation, _) => activation,
    }
}

/// Factor of attention's scores, where it is not that of the features of a head.
fn score_scale(
    settings: &Settings<'_>,
    architecture: &Architecture,
    [layers, hidden, heads]: [usize; 3],
) -> Option<f32> {
    let root = |features: f64| features.sqrt().recip() as f32;
    let stated = settings.number(SCORE_SCALE).filter(|&scale| scale > 0.0).map(|scale| scale as f32);
    let is_unstated = settings.is_gguf() && architecture.unstated_scale_layers == Some(layers);
    stated
        .or_else(|| settings.number(QUERY_SCALAR).filter(|&features| features > 0.0).map(root))
        .or_else(|| is_unstated.then(|| root(hidden as f64 / heads as f64)))
}

/// Experts of an architecture that has some, if the model states them.
fn experts(settings: &Settings<'_>, architecture: &Architecture, dense: usize) -> Result<Option<ExpertNumbers>, Error> {
    let renormalized = match architecture.experts {
        Experts::None => return Ok(None),
        Experts::Renormalized => true,
        // Converters to GGUF leave the setting out, because it is true.
        Experts::AsStated | Experts::WithShared => settings.flag(RENORMALIZED).unwrap_or(settings.is_gguf()),
    };
    let Some(count) = size(settings, EXPERTS)? else { return Ok(None) };
    let per_token = settings.required(size(settings, EXPERTS_PER_TOKEN)?, EXPERTS_PER_TOKEN)?;
    let intermediate = size(settings, EXPERT_INTERMEDIATE)?.unwrap_or(dense);
    let shared = match architecture.experts {
        Experts::WithShared => size(settings, SHARED_INTERMEDIATE)?.unwrap_or(intermediate),
        _ => 0,
    };
    Ok(Some(ExpertNumbers { count, per_token, intermediate, shared, renormalized }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::architecture::served::architecture;

    fn read(name: &str, changes: &[(&str, serde_json::Value)]) -> Result<Hyperparameters, Error> {
        let mut config = json!({
            "model_type": name, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        });
        changes.iter().for_each(|(key, value)| config[key] = value.clone());
        Hyperparameters::read(&Settings::Config(config), architecture(name)?)
    }

    #[test]
    fn numbers_of_a_config() {
        let got = read("llama", &[]).expect("complete");
        let expected = Hyperparameters {
            layers: 3,
            draft_layers: 0,
            hidden: 64,
            intermediate: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            activation: Activation::Silu,
            score_scale: None,
            eps: 1e-5,
            context: 512,
            window: None,
            parts: vec![LayerParts { mixer: Some(MixerKind::Attention), feed_forward: true }; 3],
            recurrent: None,
            experts: None,
        };
        assert_eq!(got, expected);
        assert_eq!(read("qwen3", &[("head_dim", json!(32))]).expect("complete").head_dim, 32);
        let windowed = read("mistral", &[("sliding_window", json!(128))]).expect("complete");
        assert_eq!(windowed.window_of(2), Some(128));
    }

    #[test]
    fn experts_of_a_config() {
        let stated =
            [("num_experts", json!(8)), ("num_experts_per_tok", json!(2)), ("moe_intermediate_size", json!(48))];
        let of =
            |name, more: &[(&str, serde_json::Value)]| read(name, &[&stated, more].concat()).expect("complete").experts;
        let expected = ExpertNumbers { count: 8, per_token: 2, intermediate: 48, shared: 0, renormalized: false };
        assert_eq!(of("qwen3_moe", &[]), Some(expected));
        let renormalized = Some(ExpertNumbers { renormalized: true, ..expected });
        assert_eq!(of("qwen3_moe", &[("norm_topk_prob", json!(true))]), renormalized);
        assert_eq!(of("qwen3", &[]), None);
        let mixtral = [("num_local_experts", json!(8)), ("num_experts_per_tok", json!(2))];
        let got = read("mixtral", &mixtral).expect("complete").experts;
        assert_eq!(got, Some(ExpertNumbers { intermediate: 96, renormalized: true, ..expected }));
        let missing = read("qwen3_moe", &[("num_experts", json!(8))]).expect_err("missing").to_string();
        assert_eq!(missing, "the model does not state `num_experts_per_tok`");
    }

    #[test]
    fn other_settings_are_refused_by_name() {
        let refused = read("llama", &[("hidden_act", json!("gelu"))]).expect_err("no SiLU").to_string();
        assert_eq!(refused, "`hidden_act` is gelu: expected silu");
        assert!(matches!(read("llama", &[("num_key_value_heads", json!(3))]), Err(Error::UnservedSetting { .. })));
        let huge = [("num_attention_heads", json!(1u64 << 39)), ("head_dim", json!(1u64 << 39))];
        assert!(matches!(read("llama", &huge), Err(Error::UnservedSetting { .. })));
        let missing = read("llama", &[("rms_norm_eps", json!(null))]).expect_err("missing").to_string();
        assert_eq!(missing, "the model does not state `rms_norm_eps`");
    }
}
