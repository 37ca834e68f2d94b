//! A decoder's forward pass in plain loops, on dequantized
//! weights.

use std::thread;

use qgemm_api::half::f16;
use qgemm_api::{HostWeight, Model};
use qgemm_model::{ExpertNumbers, Hyperparameters};

/// Rows of features, one for each token.
type Rows = Vec<Vec<f32>>;

/// The pass, without qgemm's products.
pub struct Reference<'a> {
    pub model: &'a Model,
    pub numbers: Hyperparameters,
    pub rotary_base: f64,
    /// Whether rotary pairs are `(2i, 2i + 1)`.
    pub interleaved: bool,
    /// Whether activations are rounded to f16 where the model
    /// stores them.
    pub rounds: bool,
}

impl Reference<'_> {
    /// Logits of each token from `from` on, for each sequence:
    /// its tokens and `from`.
    pub fn logits(&self, sequences: &[(&[u32], usize)]) -> Vec<Rows> {
        let embedding = self.weight("token_embd");
        let ids = sequences.iter().flat_map(|(ids, _)| ids.iter());
        let mut x: Rows = ids.map(|&id| embedding.dequantize_row(id as usize)).collect();
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
            if self.model.info(&name(part)).is_ok() {
                rows.iter_mut().for_each(|row| self.norm_heads(&name(part), row));
            }
        }
        let mut attended = Rows::new();
        let mut start = 0;
        for (ids, _) in sequences {
            let rows = start..start + ids.len();
            start = rows.end;
            for row in q[rows.clone()].iter_mut().enumerate().chain(k[rows.clone()].iter_mut().enumerate()) {
                self.rotate(row.0, row.1);
            }
            let window = self.numbers.window_of(layer);
            attended.extend(self.attention(&q[rows.clone()], &k[rows.clone()], &v[rows], window));
        }
        add(x, &self.unrounded(&name("attn_output"), &attended));
        let normed = self.normed(&name("ffn_norm"), x);
        let part = match self.numbers.experts {
            Some(experts) => self.experts(&name, experts, &normed),
            None => {
                let [gate, up, down] = ["ffn_gate", "ffn_up", "ffn_down"].map(&name);
                let gated = self.gated(&self.unrounded(&gate, &normed), &self.unrounded(&up, &normed));
                self.unrounded(&down, &gated)
            }
        };
        add(x, &part);
    }

    /// SiLU of the gate, times up.
    fn gated(&self, gate: &[Vec<f32>], up: &[Vec<f32>]) -> Rows {
        let of_row = |(gate, up): (&Vec<f32>, &Vec<f32>)| {
            self.rounded(gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect())
        };
        gate.iter().zip(up).map(of_row).collect()
    }

    /// Sums of each token's experts.
    fn experts(&self, name: &dyn Fn(&str) -> String, experts: ExpertNumbers, x: &[Vec<f32>]) -> Rows {
        let ExpertNumbers { count, per_token, renormalized, .. } = experts;
        let logits = self.unrounded(&name("ffn_gate_inp"), x);
        let stacks = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"].map(|part| self.stack(&name(part), count));
        let of_token = |(x, logits): (&Vec<f32>, &Vec<f32>)| {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scores: Vec<f32> = logits.iter().map(|logit| (logit - most).exp()).collect();
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            order.truncate(per_token);
            let all = if renormalized { order.iter().map(|&e| scores[e]).sum() } else { scores.iter().sum::<f32>() };
            let mut sum = vec![0.0; x.len()];
            for expert in order {
                let of = |stack: &[Rows], x: &[f32]| vec![stack[expert].iter().map(|row| dot(row, x)).collect()];
                let gated = self.gated(&of(&stacks[0], x), &of(&stacks[1], x)).remove(0);
                let [down] = &of(&stacks[2], &gated)[..] else { unreachable!("one token") };
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
    fn attention(&self, q: &[Vec<f32>], k: &[Vec<f32>], v: &[Vec<f32>], window: Option<usize>) -> Rows {
        let Hyperparameters { heads, kv_heads, head_dim, .. } = self.numbers;
        let head = |row: &[f32], head: usize| row[head * head_dim..][..head_dim].to_vec();
        let of_token = |(token, q): (usize, &Vec<f32>)| {
            let of_head = |h: usize| {
                let (query, shared) = (head(q, h), h / (heads / kv_heads));
                let score = |key: &Vec<f32>| dot(&query, &head(key, shared)) / (head_dim as f32).sqrt();
                let first = window.map_or(0, |keys| (token + 1).saturating_sub(keys));
                let scores: Vec<f32> = k[first..=token].iter().map(score).collect();
                let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - most).exp()).collect();
                let total: f32 = weights.iter().sum();
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

    fn rotate(&self, position: usize, row: &mut Vec<f32>) {
        let dim = self.numbers.head_dim;
        let factors = self.model.dense("rope_freqs").map(|tensor| tensor.to_f32());
        for head in row.chunks_exact_mut(dim) {
            for pair in 0..dim / 2 {
                let factor = factors.as_ref().map_or(1.0, |all| f64::from(all[pair]));
                let angle = position as f64 * self.rotary_base.powf(-2.0 * pair as f64 / dim as f64) / factor;
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
        if self.model.info(&format!("{name}.bias")).is_ok() {
            let bias = self.vector(&format!("{name}.bias"));
            rows.iter_mut().for_each(|row| row.iter_mut().zip(&bias).for_each(|(v, b)| *v += b));
        }
        rows
    }

    fn rounded(&self, row: Vec<f32>) -> Vec<f32> {
        if self.rounds { row.into_iter().map(|v| f16::from_f32(v).to_f32()).collect() } else { row }
    }

    fn weight(&self, name: &str) -> HostWeight {
        self.model.weight(name).expect("a weight")
    }

    fn vector(&self, name: &str) -> Vec<f32> {
        self.model.dense(name).expect("a vector").to_f32()
    }
}

/// `X·Wᵀ`, rows of W shared among threads.
fn product(weight: &HostWeight, x: &[Vec<f32>]) -> Rows {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let share = weight.n().div_ceil(threads).max(1);
    let columns: Rows = thread::scope(|scope| {
        let part = |begin: usize| {
            let rows = begin..(begin + share).min(weight.n());
            scope.spawn(move || {
                let of_row = |n: usize| {
                    let row = weight.dequantize_row(n);
                    x.iter().map(|x| dot(&row, x)).collect::<Vec<f32>>()
                };
                rows.map(of_row).collect::<Rows>()
            })
        };
        let parts: Vec<_> = (0..weight.n()).step_by(share).map(part).collect();
        parts.into_iter().flat_map(|part| part.join().expect("no panic")).collect()
    });
    (0..x.len()).map(|token| columns.iter().map(|column| column[token]).collect()).collect()
}

/// Sixteen sums, so that additions do not wait for one another.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (a, b) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
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
