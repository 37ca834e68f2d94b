//! Decoders: their tensors by the names of an [`Architecture`].

use qgemm_formats::DType;
use qgemm_formats::model::Model;

use super::description::{Architecture, Recurrence};
use super::hyperparameters::{ExpertNumbers, Hyperparameters};
use super::layer_parts::{LayerParts, MixerKind};
use super::names::TensorNames;
use super::network::{
    AttentionTensors, ConvTensors, ExpertTensors, FeedForward, Heads, LayerTensors, LinearForm, LinearTensors, Matrix,
    Mixer, Network, NormTensors, Rows, SharedExpert, WeightBytes, fingerprint,
};
use super::reader::{Reader, incomplete};
use super::recurrence::{LinearNumbers, RecurrentNumbers};
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
    let mut loader = Decoder {
        reader: Reader::new(model, architecture.name),
        architecture,
        names,
        is_gguf: settings.is_gguf(),
        numbers: &numbers,
        offset,
    };
    let parts = numbers.parts.iter().enumerate();
    let layers = parts.map(|(layer, parts)| loader.layer(layer, *parts)).collect::<Result<Vec<_>, _>>()?;
    let outer_norm = loader.norm(names.output_norm, numbers.hidden)?;
    let reader = &mut loader.reader;
    architecture.ignored.iter().for_each(|beginning| reader.ignore(beginning));
    // Layers that draft tokens stand behind the others.
    (numbers.layers..numbers.layers + numbers.draft_layers)
        .for_each(|layer| reader.ignore(&format!("{}{layer}.", names.layer)));
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
        hidden: numbers.hidden,
        layers,
        embedding: Some(embedding),
        head: Some(head),
        pre_norm: true,
        activation: numbers.activation,
        embedding_scale: if architecture.scaled_embedding { (numbers.hidden as f32).sqrt() } else { 1.0 },
        score_scale: numbers.score_scale,
        heads: Heads { heads: numbers.heads, kv_heads: numbers.kv_heads, head_dim: numbers.head_dim },
        rotary: architecture.rotary.then_some(rotary),
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
    is_gguf: bool,
    numbers: &'a Hyperparameters,
    /// Whether gammas are 1 more than their tensors.
    offset: bool,
}

impl Decoder<'_> {
    fn layer(&mut self, index: usize, parts: LayerParts) -> Result<LayerTensors, Error> {
        let (names, hidden) = (self.names, self.numbers.hidden);
        let name = |part: &str| format!("{}{index}.{part}", names.layer);
        let mixer = match parts.mixer {
            Some(kind) => Some((self.norm(&name(names.attention_norm), hidden)?, self.mixer(index, kind)?)),
            None => None,
        };
        let feed_forward = match parts.feed_forward {
            true => Some((self.norm(&name(names.ffn_norm), hidden)?, self.feed_forward(index)?)),
            false => None,
        };
        let post_norms = match self.architecture.post_norms {
            true => {
                let of_mixer = self.norm(&name(names.attention_post_norm), hidden)?;
                Some([of_mixer, self.norm(&name(names.ffn_post_norm), hidden)?])
            }
            false => None,
        };
        Ok(LayerTensors { mixer, feed_forward, post_norms })
    }

    fn mixer(&mut self, layer: usize, kind: MixerKind) -> Result<Mixer, Error> {
        match (kind, self.numbers.recurrent, self.architecture.recurrence) {
            (MixerKind::Attention, ..) => Ok(Mixer::Attention(self.attention(layer)?)),
            (_, Some(RecurrentNumbers::ShortConv { width }), _) => Ok(Mixer::ShortConv(self.short_conv(layer, width)?)),
            (_, Some(RecurrentNumbers::Linear(numbers)), Recurrence::GatedDelta { tiled }) => {
                Ok(Mixer::Linear(self.gated_delta(layer, numbers, tiled)?))
            }
            (_, Some(RecurrentNumbers::Linear(numbers)), _) => Ok(Mixer::Linear(self.mamba2(layer, numbers)?)),
            (MixerKind::Recurrent, None, _) => Err(incomplete(format!("layer {layer} has no attention"))),
        }
    }

    fn attention(&mut self, layer: usize) -> Result<AttentionTensors, Error> {
        let names = self.names;
        let &Hyperparameters { hidden, heads, kv_heads, head_dim, .. } = self.numbers;
        let name = |part: &str| format!("{}{layer}.{part}", names.layer);
        let [of_q, of_k, of_v] = names.qkv;
        let (q, gate) = match self.architecture.attention_gate {
            false => (self.projection(layer, of_q, heads * head_dim)?, None),
            true => {
                let every = 2 * head_dim;
                let mut rows = |first| {
                    let rows = vec![Rows { first, count: head_dim, every }];
                    self.reader.rows_of(&name(of_q), of_q, [heads * every, hidden], rows)
                };
                (rows(0)?, Some(rows(head_dim)?))
            }
        };
        let [k, v] = [of_k, of_v].map(|part| self.projection(layer, part, kv_heads * head_dim));
        let head_norms = match self.architecture.head_norms {
            true => {
                let [q, k] = names.head_norms.map(|part| self.norm(&name(part), head_dim));
                Some([q?, k?])
            }
            false => None,
        };
        let sinks = match self.architecture.sinks {
            true => Some(self.reader.vector(&name(names.sinks), heads)?.0),
            false => None,
        };
        Ok(AttentionTensors {
            q,
            gate,
            k: k?,
            v: v?,
            o: self.matrix(layer, names.attention_output, [hidden, heads * head_dim])?,
            head_norms,
            sinks,
            window: self.numbers.window_of(layer),
        })
    }

    /// Query, key or value projection.
    fn projection(&mut self, layer: usize, part: &'static str, n: usize) -> Result<Matrix, Error> {
        let matrix = self.matrix(layer, part, [n, self.numbers.hidden])?;
        if matrix.bias.is_none() && self.architecture.qkv_bias {
            self.reader.model.info(&format!("{}{layer}.{part}.bias", self.names.layer))?;
        }
        Ok(matrix)
    }

    fn short_conv(&mut self, layer: usize, width: usize) -> Result<ConvTensors, Error> {
        let (hidden, [input, conv, output]) = (self.numbers.hidden, self.names.short_conv);
        let conv = format!("{}{layer}.{conv}", self.names.layer);
        Ok(ConvTensors {
            input: self.matrix(layer, input, [3 * hidden, hidden])?,
            conv: self.reader.kernel(&conv, [hidden, width])?,
            o: self.matrix(layer, output, [hidden, hidden])?,
        })
    }

    fn gated_delta(&mut self, layer: usize, numbers: LinearNumbers, tiled: bool) -> Result<LinearTensors, Error> {
        let (names, hidden) = (&self.names.linear, self.numbers.hidden);
        let name = |part: &str| format!("{}{layer}.{part}", self.names.layer);
        let [in_qkv, in_gate] = names.projections;
        let LinearNumbers { heads, key_heads, key_dim, .. } = numbers;
        let (keys, shared) = (numbers.keys(), heads / key_heads);
        let (qkv, gate) = match in_qkv == in_gate {
            false => {
                let qkv = self.matrix(layer, in_qkv, [2 * keys + numbers.values(), hidden])?;
                (qkv, self.matrix(layer, in_gate, [numbers.values(), hidden])?)
            }
            // Rows of a key head: its query and key, values and gates of its heads.
            true => {
                let values = shared * numbers.v_dim;
                let every = 2 * (key_dim + values);
                let part = |first, count| Rows { first, count, every };
                let qkv = vec![part(0, key_dim), part(key_dim, key_dim), part(2 * key_dim, values)];
                let gate = vec![part(2 * key_dim + values, values)];
                let mut rows = |rows| self.reader.rows_of(&name(in_qkv), in_qkv, [key_heads * every, hidden], rows);
                (rows(qkv)?, rows(gate)?)
            }
        };
        let [in_beta, in_step] = names.gates;
        let (beta, step) = match in_beta == in_step {
            false => (self.matrix(layer, in_beta, [heads, hidden])?, self.matrix(layer, in_step, [heads, hidden])?),
            true => {
                let mut rows = |first| {
                    let rows = vec![Rows { first, count: shared, every: 2 * shared }];
                    self.reader.rows_of(&name(in_beta), in_beta, [2 * heads, hidden], rows)
                };
                (rows(0)?, rows(shared)?)
            }
        };
        let form = LinearForm::GatedDelta { tiled: tiled && self.is_gguf };
        self.linear(layer, numbers, form, ([qkv, gate], Some(beta), step))
    }

    fn mamba2(&mut self, layer: usize, numbers: LinearNumbers) -> Result<LinearTensors, Error> {
        let (names, hidden) = (&self.names.linear, self.numbers.hidden);
        let ([input, _], values, channels) = (names.projections, numbers.values(), numbers.channels());
        let name = format!("{}{layer}.{input}", self.names.layer);
        let every = values + channels + numbers.heads;
        let mut rows =
            |first, count| self.reader.rows_of(&name, input, [every, hidden], vec![Rows { first, count, every }]);
        let (gate, xbc) = (rows(0, values)?, rows(values, channels)?);
        let step = rows(values + channels, numbers.heads)?;
        self.linear(layer, numbers, LinearForm::Mamba2, ([xbc, gate], None, step))
    }

    /// Tensors of both forms of linear attention, behind the projections.
    fn linear(
        &mut self,
        layer: usize,
        numbers: LinearNumbers,
        form: LinearForm,
        ([qkv, gate], beta, step): ([Matrix; 2], Option<Matrix>, Matrix),
    ) -> Result<LinearTensors, Error> {
        let names = &self.names.linear;
        let name = |part: &str| format!("{}{layer}.{part}", self.names.layer);
        let (heads, values) = (numbers.heads, numbers.values());
        let a_log = self.reader.numbers(&name(names.a_log), &[&[heads], &[heads, 1]])?;
        let skip = match names.skip {
            "" => None,
            skip => Some(self.reader.numbers(&name(skip), &[&[heads], &[heads, 1]])?),
        };
        let norm = match form {
            LinearForm::GatedDelta { .. } => self.reader.norm(&name(names.norm), numbers.v_dim)?,
            LinearForm::Mamba2 => {
                let groups = numbers.key_heads;
                let gamma = self.reader.numbers(&name(names.norm), &[&[values], &[groups, values / groups]])?;
                NormTensors { gamma: (gamma, DType::F32), beta: None, gamma_offset: false }
            }
        };
        Ok(LinearTensors {
            form,
            qkv,
            gate,
            beta,
            step,
            conv: self.reader.kernel(&name(names.conv), [numbers.channels(), numbers.width])?,
            a_log: (a_log, self.is_gguf),
            dt_bias: self.reader.vector(&name(names.dt_bias), heads)?.0,
            skip,
            norm,
            o: self.matrix(layer, names.output, [self.numbers.hidden, values])?,
            numbers,
        })
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
                gate: match names.gate {
                    "" => None,
                    gate => Some(self.matrix(layer, gate, [intermediate, hidden])?),
                },
                up: self.matrix(layer, names.up, [intermediate, hidden])?,
                down: self.matrix(layer, names.down, [hidden, intermediate])?,
            }),
        }
    }

    fn experts(&mut self, layer: usize, numbers: ExpertNumbers) -> Result<FeedForward, Error> {
        let ExpertNumbers { count, per_token, intermediate, shared, renormalized } = numbers;
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
            shared: if shared > 0 { Some(self.shared_expert(layer, shared)?) } else { None },
            local: 0..count,
        }))
    }

    fn shared_expert(&mut self, layer: usize, intermediate: usize) -> Result<SharedExpert, Error> {
        let (names, hidden) = (&self.names.experts, self.numbers.hidden);
        let [gate, up, down] = names.shared;
        let weight = format!("{}{layer}.{}", self.names.layer, names.shared_gate);
        Ok(SharedExpert {
            weight: self.reader.row(&weight, names.shared_gate, hidden)?,
            gate: self.matrix(layer, gate, [intermediate, hidden])?,
            up: self.matrix(layer, up, [intermediate, hidden])?,
            down: self.matrix(layer, down, [hidden, intermediate])?,
        })
    }
}
