//! Decoders of Llama's kind: their tensors by the names of an [`Architecture`].

use qgemm_formats::model::Model;

use super::description::Architecture;
use super::hyperparameters::{ExpertNumbers, Hyperparameters};
use super::names::TensorNames;
use super::network::{
    ExpertTensors, FeedForward, Heads, LayerTensors, Matrix, Network, NormTensors, WeightBytes, fingerprint,
};
use super::reader::{Reader, incomplete};
use super::rotary::RotarySettings;
use super::settings::Settings;
use crate::error::Error;

/// Reads a decoder.
///
/// # Errors
/// As [`Network::read`].
pub(super) fn decoder(
    model: &Model,
    settings: &Settings<'_>,
    architecture: &'static Architecture,
) -> Result<Network, Error> {
    let names = architecture.names(settings.is_gguf());
    let numbers = Hyperparameters::read(settings, architecture)?;
    let rotary = match RotarySettings::read(settings, architecture, &numbers) {
        Ok(rotary) => Ok(rotary),
        Err(Error::UnservedSetting { name, got, expected }) => {
            Err(format!("`{name}` is {got}: the library has {expected}"))
        }
        Err(error) => return Err(error),
    };
    let window_rotary =
        rotary.as_ref().ok().and_then(|rotary: &RotarySettings| rotary.of_window(settings, architecture));
    let offset = architecture.gamma_offset && !settings.is_gguf();
    let mut loader =
        Decoder { reader: Reader::new(model, architecture.name), architecture, names, numbers: &numbers, offset };
    let layers = (0..numbers.layers).map(|layer| loader.layer(layer)).collect::<Result<Vec<_>, _>>()?;
    let outer_norm = loader.norm(names.output_norm, numbers.hidden)?;
    let reader = &mut loader.reader;
    let embedding = reader.table(names.embedding, numbers.hidden)?;
    let head = match reader.has(names.head) {
        true => reader.matrix(names.head.to_owned(), "head", [embedding.n, numbers.hidden])?,
        // A tied head is the embedding, which the step reads as a weight then.
        false => reader.matrix(names.embedding.to_owned(), "embedding", [embedding.n, numbers.hidden])?,
    };
    let rotary_factors = match (&rotary, reader.has(names.rotary_factors)) {
        (Ok(rotary), true) => Some(reader.vector(names.rotary_factors, rotary.dim / 2)?.0),
        _ => None,
    };
    let idle = numbers.experts.map_or(0.0, |experts| 1.0 - experts.per_token as f64 / experts.count as f64);
    let weight_bytes = WeightBytes { idle, ..reader.finish()? };
    Ok(Network {
        architecture: architecture.name,
        layers,
        embedding: Some(embedding),
        head: Some(head),
        pre_norm: true,
        activation: numbers.activation,
        embedding_scale: if architecture.scaled_embedding { (numbers.hidden as f32).sqrt() } else { 1.0 },
        score_scale: numbers.score_scale,
        heads: Heads { heads: numbers.heads, kv_heads: numbers.kv_heads, head_dim: numbers.head_dim },
        rotary: Some(rotary),
        window_rotary,
        rotary_factors,
        eps: numbers.eps,
        outer_norm,
        context: Some(numbers.context),
        numbers: Some(numbers),
        fingerprint: fingerprint(model),
        weight_bytes,
    })
}

/// Reads the layers of a decoder.
struct Decoder<'a> {
    reader: Reader<'a>,
    architecture: &'static Architecture,
    names: &'static TensorNames,
    numbers: &'a Hyperparameters,
    /// Whether gammas are 1 more than their tensors.
    offset: bool,
}

impl Decoder<'_> {
    fn layer(&mut self, index: usize) -> Result<LayerTensors, Error> {
        let names = self.names;
        let &Hyperparameters { hidden, heads, kv_heads, head_dim, .. } = self.numbers;
        let name = |part: &str| format!("{}{index}.{part}", names.layer);
        let mut qkv = Vec::new();
        for (part, heads) in names.qkv.into_iter().zip([heads, kv_heads, kv_heads]) {
            let matrix = self.reader.matrix(name(part), part, [heads * head_dim, hidden])?;
            if matrix.bias.is_none() && self.architecture.qkv_bias {
                self.reader.model.info(&format!("{}.bias", name(part)))?;
            }
            qkv.push(matrix);
        }
        let Ok([q, k, v]) = <[_; 3]>::try_from(qkv) else { unreachable!("three names") };
        let head_norms = match self.architecture.head_norms {
            true => {
                let [q, k] = names.head_norms.map(|part| self.norm(&name(part), head_dim));
                Some([q?, k?])
            }
            false => None,
        };
        let norms = self.norms([names.attention_norm, names.ffn_norm].map(name))?;
        let post_norms = match self.architecture.post_norms {
            true => Some(self.norms([names.attention_post_norm, names.ffn_post_norm].map(name))?),
            false => None,
        };
        let sinks = match self.architecture.sinks {
            true => Some(self.reader.vector(&name(names.sinks), heads)?.0),
            false => None,
        };
        Ok(LayerTensors {
            q,
            k,
            v,
            o: self.matrix(index, names.attention_output, [hidden, heads * head_dim])?,
            norms,
            post_norms,
            head_norms,
            sinks,
            window: self.numbers.window_of(index),
            feed_forward: self.feed_forward(index)?,
        })
    }

    /// Norms at attention and at the feed-forward part.
    fn norms(&mut self, [attention, feed_forward]: [String; 2]) -> Result<[NormTensors; 2], Error> {
        let hidden = self.numbers.hidden;
        Ok([self.norm(&attention, hidden)?, self.norm(&feed_forward, hidden)?])
    }

    fn norm(&mut self, name: &str, columns: usize) -> Result<NormTensors, Error> {
        Ok(NormTensors { gamma_offset: self.offset, ..self.reader.norm(name, columns)? })
    }

    fn matrix(&mut self, layer: usize, part: &'static str, shape: [usize; 2]) -> Result<Matrix, Error> {
        self.reader.matrix(format!("{}{layer}.{part}", self.names.layer), part, shape)
    }

    /// Feed-forward part of a layer. It has experts if it has a router.
    fn feed_forward(&mut self, layer: usize) -> Result<FeedForward, Error> {
        let (names, &Hyperparameters { hidden, intermediate, .. }) = (self.names, self.numbers);
        let router = format!("{}{layer}.{}", names.layer, names.experts.router);
        match (self.reader.has(&router), self.numbers.experts) {
            (true, Some(experts)) => self.experts(layer, experts),
            (true, None) => Err(incomplete(format!("`{router}` stands for experts, and their number is missing"))),
            (false, _) => Ok(FeedForward::Dense {
                gate: Some(self.matrix(layer, names.gate, [intermediate, hidden])?),
                up: self.matrix(layer, names.up, [intermediate, hidden])?,
                down: self.matrix(layer, names.down, [hidden, intermediate])?,
            }),
        }
    }

    fn experts(&mut self, layer: usize, numbers: ExpertNumbers) -> Result<FeedForward, Error> {
        let ExpertNumbers { count, per_token, intermediate, renormalized } = numbers;
        let (names, hidden) = (&self.names.experts, self.numbers.hidden);
        if per_token > count {
            return Err(incomplete(format!("{per_token} experts a token: expected 1 to {count}")));
        }
        let name = |part: &str| format!("{}{layer}.{part}", self.names.layer);
        let down = name(names.down);
        let [gate, up] = match names.gate == names.up {
            true => {
                let pair =
                    self.reader.interleaved_experts(&name(names.gate), names.gate, count, [intermediate, hidden])?;
                [pair.clone(), pair]
            }
            false => {
                let [gate, up] = [names.gate, names.up]
                    .map(|part| self.reader.experts(&name(part), part, count, [intermediate, hidden]));
                [gate?, up?]
            }
        };
        Ok(FeedForward::Experts(ExpertTensors {
            router: self.matrix(layer, names.router, [count, hidden])?,
            gate,
            up,
            down: self.reader.experts(&down, names.down, count, [hidden, intermediate])?,
            experts: count,
            top_k: per_token,
            renormalized,
        }))
    }
}
