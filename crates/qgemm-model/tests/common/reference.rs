//! A decoder's forward pass in plain loops, on dequantized
//! weights.

use ndarray::Array2;
use qgemm_api::half::f16;
use qgemm_api::{HostWeight, Model};
use qgemm_model::{ExpertNumbers, Hyperparameters};

/// Rows of features, one for each token.
type Rows = Vec<Vec<f32>>;

/// Activation of a gated pair.
#[derive(Clone, Copy)]
pub enum Gate {
    /// SiLU of the gate, times up.
    Silu,
    /// GELU of the gate by tanh, times up.
    GeluTanh,
    /// gpt-oss's SwiGLU of clamped values.
    Clamped,
}

/// The pass, without qgemm's products.
pub struct Reference<'a> {
    pub model: &'a Model,
    pub numbers: Hyperparameters,
    pub rotary_base: f64,
    /// Frequency base of layers with a window, where it differs.
    pub window_rotary_base: Option<f64>,
    /// Factor of the embedding.
    pub embedding_scale: f32,
    pub gate: Gate,
    /// Whether rotary pairs are `(2i, 2i + 1)`.
    pub interleaved: bool,
    /// Whether activations are rounded to f16 where the model
    /// stores them.
    pub rounds: bool,
}

impl<'a> Reference<'a> {
    /// A Llama without roundings.
    pub fn new(model: &'a Model, numbers: Hyperparameters) -> Self {
        Self {
            model,
            numbers,
            rotary_base: 10_000.0,
            window_rotary_base: None,
            embedding_scale: 1.0,
            gate: Gate::Silu,
            interleaved: true,
            rounds: false,
        }
    }

    /// Logits of each token from `from` on, for each sequence:
    /// its tokens and `from`.
    pub fn logits(&self, sequences: &[(&[u32], usize)]) -> Vec<Rows> {
        let embedding = self.weight("token_embd");
        let ids = sequences.iter().flat_map(|(ids, _)| ids.iter());
        let of_token = |id: u32| embedding.dequantize_row(id as usize).into_iter().map(|v| v * self.embedding_scale);
        let mut x: Rows = ids.map(|&id| of_token(id).collect()).collect();
        for layer in 0..self.numbers.layers {
            self.layer(layer, sequences, &mut x);
        }
        let x = self.normed("output_norm", &x);
        let head = if self.model.info("output").is_ok() { self.weight("output") } else { embedding };
        let mut start = 0;
        let mut wanted = Vec::new();
        for (ids, from) in sequences {
            wanted.push(x[start + from..start + ids.len()].to_vec());
            start += ids.len();
        }
        let mut logits = product(&head, &wanted.concat()).into_iter();
        wanted.iter().map(|rows| logits.by_ref().take(rows.len()).collect()).collect()
    }

    fn layer(&self, layer: usize, sequences: &[(&[u32], usize)], x: &mut Rows) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let normed = self.normed(&name("attn_norm"), x);
        let [mut q, mut k, v] = ["attn_q", "attn_k", "attn_v"].map(|part| self.linear(&name(part), &normed));
        for (rows, part) in [(&mut q, "attn_q_norm"), (&mut k, "attn_k_norm")] {
            if self.has(&name(part)) {
                rows.iter_mut().for_each(|row| self.norm_heads(&name(part), row));
            }
        }
        let mut attended = Rows::new();
        let mut start = 0;
        for (ids, _) in sequences {
            let rows = start..start + ids.len();
            start = rows.end;
            for row in q[rows.clone()].iter_mut().enumerate().chain(k[rows.clone()].iter_mut().enumerate()) {
                self.rotate(layer, row.0, row.1);
            }
            attended.extend(self.attention(layer, &q[rows.clone()], &k[rows.clone()], &v[rows]));
        }
        let has_post_norms = self.has(&name("post_ffw_norm"));
        let post_norm = |part: &str, rows: Rows| match has_post_norms {
            true => rows.iter().map(|row| self.rms_norm(row, &self.vector(&name(part)))).collect(),
            false => rows,
        };
        add(x, &post_norm("post_attention_norm", self.unrounded(&name("attn_output"), &attended)));
        let ffn_norm = if self.has(&name("ffn_norm")) { "ffn_norm" } else { "post_attention_norm" };
        let normed = self.normed(&name(ffn_norm), x);
        let part = match self.numbers.experts {
            Some(experts) => self.experts(&name, experts, &normed),
            None => {
                let [gate, up, down] = ["ffn_gate", "ffn_up", "ffn_down"].map(&name);
                let gated = self.gated(&self.unrounded(&gate, &normed), &self.unrounded(&up, &normed));
                self.unrounded(&down, &gated)
            }
        };
        add(x, &post_norm("post_ffw_norm", part));
    }

    fn gated(&self, gate: &[Vec<f32>], up: &[Vec<f32>]) -> Rows {
        let of_pair = |(g, u): (&f32, &f32)| match self.gate {
            Gate::Silu => g / (1.0 + (-g).exp()) * u,
            Gate::Clamped => {
                let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
                (u + 1.0) * g / (1.0 + (-1.702 * g).exp())
            }
            Gate::GeluTanh => {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                0.5 * g * (1.0 + inner.tanh()) * u
            }
        };
        let of_row = |(gate, up): (&Vec<f32>, &Vec<f32>)| self.rounded(gate.iter().zip(up).map(of_pair).collect());
        gate.iter().zip(up).map(of_row).collect()
    }

    /// Sums of each token's experts.
    fn experts(&self, name: &dyn Fn(&str) -> String, experts: ExpertNumbers, x: &[Vec<f32>]) -> Rows {
        let ExpertNumbers { count, per_token, renormalized, .. } = experts;
        let logits = self.unrounded(&name("ffn_gate_inp"), x);
        const PARTS: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
        let stacks = PARTS.map(|part| self.stack(&name(part), count));
        let biases = PARTS.map(|part| {
            let bias = format!("{}.bias", name(part));
            if self.has(&bias) { self.vector(&bias) } else { Vec::new() }
        });
        let of_token = |(x, logits): (&Vec<f32>, &Vec<f32>)| {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scores: Vec<f32> = logits.iter().map(|logit| (logit - most).exp()).collect();
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            order.truncate(per_token);
            let all = if renormalized { order.iter().map(|&e| scores[e]).sum() } else { scores.iter().sum::<f32>() };
            let mut sum = vec![0.0; x.len()];
            for expert in order {
                let of = |part: usize, x: &[f32]| -> Rows {
                    let rows = &stacks[part][expert];
                    let bias = |n: usize| biases[part].get(expert * rows.len() + n).copied().unwrap_or(0.0);
                    vec![rows.iter().enumerate().map(|(n, row)| dot(row, x) + bias(n)).collect()]
                };
                let gated = self.gated(&of(0, x), &of(1, x)).remove(0);
                let [down] = &of(2, &gated)[..] else { unreachable!("one token") };
                let weight = scores[expert] / all;
                sum.iter_mut().zip(down as &Vec<f32>).for_each(|(sum, v)| *sum += weight * v);
            }
            sum
        };
        x.iter().zip(&logits).map(of_token).collect()
    }

    /// Rows of each expert.
    fn stack(&self, name: &str, count: usize) -> Vec<Rows> {
        let experts = self.model.experts(name).expect("a stack");
        let stacked = experts.stacked();
        let pitch = stacked.n() / count;
        let rows = |expert: usize| (0..experts.n()).map(move |n| stacked.dequantize_row(expert * pitch + n)).collect();
        (0..count).map(rows).collect()
    }

    /// Causal attention of a sequence.
    fn attention(&self, layer: usize, q: &[Vec<f32>], k: &[Vec<f32>], v: &[Vec<f32>]) -> Rows {
        let Hyperparameters { heads, kv_heads, head_dim, score_scale, .. } = self.numbers;
        let (window, sinks) = (self.numbers.window_of(layer), format!("blk.{layer}.attn_sinks"));
        let sinks = self.has(&sinks).then(|| self.vector(&sinks));
        let scale = score_scale.unwrap_or((head_dim as f32).sqrt().recip());
        let head = |row: &[f32], head: usize| row[head * head_dim..][..head_dim].to_vec();
        let of_token = |(token, q): (usize, &Vec<f32>)| {
            let of_head = |h: usize| {
                let (query, shared) = (head(q, h), h / (heads / kv_heads));
                let score = |key: &Vec<f32>| dot(&query, &head(key, shared)) * scale;
                let first = window.map_or(0, |keys| (token + 1).saturating_sub(keys));
                let scores: Vec<f32> = k[first..=token].iter().map(score).collect();
                let sink = sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks[h]);
                let most = scores.iter().copied().fold(sink, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - most).exp()).collect();
                let total = weights.iter().sum::<f32>() + (sink - most).exp();
                let mut sum = vec![0.0; head_dim];
                for (weight, value) in weights.iter().zip(&v[first..]) {
                    sum.iter_mut().zip(head(value, shared)).for_each(|(sum, v)| *sum += weight / total * v);
                }
                sum
            };
            self.rounded((0..heads).flat_map(of_head).collect())
        };
        q.iter().enumerate().map(of_token).collect()
    }

    fn rotate(&self, layer: usize, position: usize, row: &mut Vec<f32>) {
        let dim = self.numbers.head_dim;
        let of_window = self.window_rotary_base.filter(|_| self.numbers.window_of(layer).is_some());
        let base = of_window.unwrap_or(self.rotary_base);
        let factors = self.model.dense("rope_freqs").map(|tensor| tensor.to_f32());
        for head in row.chunks_exact_mut(dim) {
            for pair in 0..dim / 2 {
                let factor = factors.as_ref().map_or(1.0, |all| f64::from(all[pair]));
                let angle = position as f64 * base.powf(-2.0 * pair as f64 / dim as f64) / factor;
                let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
                let (a, b) = if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + dim / 2) };
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
            }
        }
        *row = self.rounded(std::mem::take(row));
    }

    fn normed(&self, name: &str, x: &[Vec<f32>]) -> Rows {
        let gamma = self.vector(name);
        x.iter().map(|row| self.rounded(self.rms_norm(row, &gamma))).collect()
    }

    fn norm_heads(&self, name: &str, row: &mut Vec<f32>) {
        let gamma = self.vector(name);
        let heads = row.chunks_exact(self.numbers.head_dim).flat_map(|head| self.rms_norm(head, &gamma));
        *row = self.rounded(heads.collect());
    }

    fn rms_norm(&self, row: &[f32], gamma: &[f32]) -> Vec<f32> {
        let square: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
        let scale = (square / row.len() as f64 + f64::from(self.numbers.eps)).sqrt().recip();
        row.iter().zip(gamma).map(|(v, g)| (f64::from(*v) * scale * f64::from(*g)) as f32).collect()
    }

    fn linear(&self, name: &str, x: &[Vec<f32>]) -> Rows {
        self.unrounded(name, x).into_iter().map(|row| self.rounded(row)).collect()
    }

    fn unrounded(&self, name: &str, x: &[Vec<f32>]) -> Rows {
        let mut rows = product(&self.weight(name), x);
        if self.has(&format!("{name}.bias")) {
            let bias = self.vector(&format!("{name}.bias"));
            rows.iter_mut().for_each(|row| row.iter_mut().zip(&bias).for_each(|(v, b)| *v += b));
        }
        rows
    }

    fn rounded(&self, row: Vec<f32>) -> Vec<f32> {
        if self.rounds { row.into_iter().map(|v| f16::from_f32(v).to_f32()).collect() } else { row }
    }

    fn has(&self, name: &str) -> bool {
        self.model.info(name).is_ok()
    }

    fn weight(&self, name: &str) -> HostWeight {
        self.model.weight(name).expect("a weight")
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        self.model.dense(name).expect("a vector").to_f32()
    }
}

/// `X·Wᵀ`.
fn product(weight: &HostWeight, x: &[Vec<f32>]) -> Rows {
    let w = Array2::from_shape_vec((weight.n(), weight.k()), weight.dequantize().expect("memory")).expect("its shape");
    let x = Array2::from_shape_vec((x.len(), weight.k()), x.concat()).expect("rows of K");
    x.dot(&w.t()).rows().into_iter().map(|row| row.to_vec()).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, more: &[Vec<f32>]) {
    x.iter_mut().zip(more).for_each(|(x, more)| x.iter_mut().zip(more).for_each(|(x, more)| *x += more));
}

/// The token with the largest logit, and by how much it exceeds
/// the logit of `id`.
pub fn argmax(logits: &[f32], id: u32) -> (u32, f32) {
    let (best, most) =
        (0..).zip(logits).fold(
            (0, f32::NEG_INFINITY),
            |(best, most), (id, &logit)| {
                if logit > most { (id, logit) } else { (best, most) }
            },
        );
    (best, most - logits[id as usize])
}
