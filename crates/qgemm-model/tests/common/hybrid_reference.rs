//! Forward pass of small models with recurrent layers, in plain
//! f64 loops over all tokens, on the tensors of their GGUF files.

use qgemm_api::Model;

use super::checkpoint::{EXPERTS, EXPERTS_PER_TOKEN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS};
use super::hybrid::{CONV_WIDTH, Hybrid, KEY_DIM, KEY_HEADS, KEYS, ROTATED, VALUE_DIM, VALUE_HEADS, VALUES, WIDTH};

type Row = Vec<f64>;
type Rows = Vec<Row>;

/// Logits of every token.
pub fn logits(model: &Model, kind: Hybrid, ids: &[u32]) -> Rows {
    let pass = Pass { model, kind };
    let embedding = pass.matrix("token_embd");
    let mut x: Rows = ids.iter().map(|&id| embedding[id as usize].clone()).collect();
    for (layer, letter) in kind.layers().chars().enumerate() {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let normed = pass.normed(&name("attn_norm"), &x);
        let part = match letter {
            '*' => pass.attention(&name, &normed),
            'M' if kind == Hybrid::Lfm2 => pass.short_conv(&name, &normed),
            'M' => pass.linear_attention(&name, &normed),
            _ => pass.feed_forward(&name, &normed),
        };
        add(&mut x, &part);
        if !kind.has_one_part() {
            let part = pass.feed_forward(&name, &pass.normed(&name(kind.ffn_norm()), &x));
            add(&mut x, &part);
        }
    }
    let last = if kind == Hybrid::Lfm2 { "token_embd_norm" } else { "output_norm" };
    products(&embedding, &pass.normed(last, &x))
}

struct Pass<'a> {
    model: &'a Model,
    kind: Hybrid,
}

impl Pass<'_> {
    fn short_conv(&self, name: &dyn Fn(&str) -> String, x: &[Row]) -> Rows {
        let bcx = self.linear(&name("shortconv.in_proj"), x);
        let gated: Rows = bcx.iter().map(|row| (0..HIDDEN).map(|c| row[c] * row[2 * HIDDEN + c]).collect()).collect();
        let convolved = convolve(&self.values(&name("shortconv.conv")), &[], CONV_WIDTH, &gated);
        let of_token = |(row, bcx): (&Row, &Row)| (0..HIDDEN).map(|c| row[c] * bcx[HIDDEN + c]).collect();
        let mixed: Rows = convolved.iter().zip(&bcx).map(of_token).collect();
        self.linear(&name("shortconv.out_proj"), &mixed)
    }

    fn linear_attention(&self, name: &dyn Fn(&str) -> String, x: &[Row]) -> Rows {
        let is_mamba = self.kind == Hybrid::NemotronH;
        let channels = 2 * KEYS + VALUES;
        let (qkv, z, beta, step): (Rows, Rows, Rows, Rows) = if is_mamba {
            let all = self.linear(&name("ssm_in"), x);
            let part = |first: usize, count: usize| all.iter().map(|row| row[first..first + count].to_vec()).collect();
            (part(VALUES, channels), part(0, VALUES), Rows::new(), part(VALUES + channels, VALUE_HEADS))
        } else {
            let (beta, step) = self.gates(name, x);
            (self.linear(&name("attn_qkv"), x), self.linear(&name("attn_gate"), x), beta, step)
        };
        let bias = if is_mamba { self.values(&name("ssm_conv1d.bias")) } else { Row::new() };
        let mut convolved = convolve(&self.values(&name("ssm_conv1d.weight")), &bias, WIDTH, &qkv);
        convolved.iter_mut().flatten().for_each(|v| *v = silu(*v));
        let (rates, biases) = (self.values(&name("ssm_a")), self.values(&name("ssm_dt.bias")));
        let skips = if is_mamba { self.values(&name("ssm_d")) } else { Row::new() };
        // Mamba-2 has values, keys, queries in this order.
        let [q_at, k_at, v_at] = if is_mamba { [VALUES + KEYS, VALUES, 0] } else { [0, KEYS, 2 * KEYS] };
        let mut mixed = vec![vec![0.0; VALUES]; x.len()];
        for head in 0..VALUE_HEADS {
            let key_head =
                if self.kind == Hybrid::Qwen35 { head % KEY_HEADS } else { head / (VALUE_HEADS / KEY_HEADS) };
            let mut state = vec![vec![0.0; KEY_DIM]; VALUE_DIM];
            for (token, row) in convolved.iter().enumerate() {
                let key = |at: usize| row[at + key_head * KEY_DIM..][..KEY_DIM].to_vec();
                let (mut q, mut k) = (key(q_at), key(k_at));
                if !is_mamba {
                    (q, k) = (unit(&q), unit(&k));
                    q.iter_mut().for_each(|q| *q /= (KEY_DIM as f64).sqrt());
                }
                let time_step = (step[token][head] + biases[head]).exp().ln_1p();
                let decay = (rates[head] * time_step).exp();
                let factor = if is_mamba { time_step } else { sigmoid(beta[token][head]) };
                for (i, state) in state.iter_mut().enumerate() {
                    state.iter_mut().for_each(|s| *s *= decay);
                    let value = row[v_at + head * VALUE_DIM + i];
                    let known = if is_mamba { 0.0 } else { dot(state, &k) };
                    let update = factor * (value - known);
                    state.iter_mut().zip(&k).for_each(|(s, k)| *s += update * k);
                    let skip = if is_mamba { skips[head] * value } else { 0.0 };
                    mixed[token][head * VALUE_DIM + i] = dot(state, &q) + skip;
                }
            }
        }
        let gamma = self.values(&name("ssm_norm.weight"));
        for (row, z) in mixed.iter_mut().zip(&z) {
            if is_mamba {
                row.iter_mut().zip(z).for_each(|(v, z)| *v *= silu(*z));
                let group = VALUES / KEY_HEADS;
                let normed = row.chunks(group).zip(gamma.chunks(group)).flat_map(|(part, gamma)| rms_norm(part, gamma));
                *row = normed.collect();
            } else {
                *row = row.chunks(VALUE_DIM).flat_map(|head| rms_norm(head, &gamma)).collect();
                row.iter_mut().zip(z).for_each(|(v, z)| *v *= silu(*z));
            }
        }
        self.linear(&name("ssm_out"), &mixed)
    }

    /// Gates: what makes β, and the summand of the time step.
    fn gates(&self, name: &dyn Fn(&str) -> String, x: &[Row]) -> (Rows, Rows) {
        if self.kind == Hybrid::Qwen35 {
            return (self.linear(&name("ssm_beta"), x), self.linear(&name("ssm_alpha"), x));
        }
        // For each key head: β of its heads, then the others.
        let all = self.linear(&name("ssm_ba"), x);
        let shared = VALUE_HEADS / KEY_HEADS;
        let pick = |first: usize| {
            let of = |row: &Row| (0..VALUE_HEADS).map(|h| row[h / shared * 2 * shared + first + h % shared]).collect();
            all.iter().map(of).collect()
        };
        (pick(0), pick(shared))
    }

    fn attention(&self, name: &dyn Fn(&str) -> String, x: &[Row]) -> Rows {
        let [q_all, mut k, v] = ["attn_q", "attn_k", "attn_v"].map(|part| self.linear(&name(part), x));
        let each = if self.kind.is_qwen() { 2 * HEAD_DIM } else { HEAD_DIM };
        let part = |first: usize| -> Rows {
            q_all
                .iter()
                .map(|row| row.chunks(each).flat_map(|head| head[first..first + HEAD_DIM].to_vec()).collect())
                .collect()
        };
        let mut q = part(0);
        if self.kind != Hybrid::NemotronH {
            for (rows, part) in [(&mut q, "attn_q_norm"), (&mut k, "attn_k_norm")] {
                let gamma = self.values(&name(&format!("{part}.weight")));
                for (position, row) in rows.iter_mut().enumerate() {
                    *row = row.chunks(HEAD_DIM).flat_map(|head| rms_norm(head, &gamma)).collect();
                    row.chunks_mut(HEAD_DIM).for_each(|head| self.rotate(position, head));
                }
            }
        }
        let of_token = |(token, q): (usize, &Row)| -> Row {
            let of_head = |h: usize| {
                let shared = h / (HEADS / KV_HEADS) * HEAD_DIM;
                let score = |k: &Row| dot(&q[h * HEAD_DIM..][..HEAD_DIM], &k[shared..][..HEAD_DIM]);
                let scores: Row = k[..=token].iter().map(|k| score(k) / (HEAD_DIM as f64).sqrt()).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Row = scores.iter().map(|s| (s - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                let of = |i: usize| weights.iter().zip(&v).map(|(w, v)| w / total * v[shared + i]).sum::<f64>();
                (0..HEAD_DIM).map(of).collect::<Row>()
            };
            (0..HEADS).flat_map(of_head).collect()
        };
        let mut mixed: Rows = q.iter().enumerate().map(of_token).collect();
        if self.kind.is_qwen() {
            let gates = part(HEAD_DIM);
            mixed.iter_mut().flatten().zip(gates.iter().flatten()).for_each(|(v, gate)| *v *= sigmoid(*gate));
        }
        self.linear(&name("attn_output"), &mixed)
    }

    fn rotate(&self, position: usize, head: &mut [f64]) {
        let dim = if self.kind.is_qwen() { ROTATED } else { HEAD_DIM };
        for pair in 0..dim / 2 {
            let angle = position as f64 * 10_000f64.powf(-2.0 * pair as f64 / dim as f64);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = (head[pair], head[pair + dim / 2]);
            (head[pair], head[pair + dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }

    fn feed_forward(&self, name: &dyn Fn(&str) -> String, x: &[Row]) -> Rows {
        if self.kind.has_experts() {
            return self.experts(name, x);
        }
        let up = self.linear(&name("ffn_up"), x);
        let inner: Rows = match self.kind {
            Hybrid::NemotronH => up.iter().map(|row| row.iter().map(|v| v.max(0.0).powi(2)).collect()).collect(),
            _ => gated(&self.linear(&name("ffn_gate"), x), &up),
        };
        self.linear(&name("ffn_down"), &inner)
    }

    fn experts(&self, name: &dyn Fn(&str) -> String, x: &[Row]) -> Rows {
        let router = self.linear(&name("ffn_gate_inp"), x);
        let stacks = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
            .map(|part| (0..EXPERTS).map(|expert| self.of_expert(&name(part), expert)).collect::<Vec<Rows>>());
        let shared_gate = self.values(&name("ffn_gate_inp_shexp"));
        let [gate, up] = ["ffn_gate_shexp", "ffn_up_shexp"].map(|part| self.linear(&name(part), x));
        let shared = self.linear(&name("ffn_down_shexp"), &gated(&gate, &up));
        let of_token = |(token, logits): (usize, &Row)| {
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            order.truncate(EXPERTS_PER_TOKEN);
            let total: f64 = order.iter().map(|&expert| logits[expert].exp()).sum();
            let factor = sigmoid(dot(&shared_gate, &x[token]));
            let mut sum: Row = shared[token].iter().map(|v| v * factor).collect();
            for expert in order {
                let [gate, up] = [0, 1].map(|part| products(&stacks[part][expert], &x[token..=token]));
                let down = products(&stacks[2][expert], &gated(&gate, &up)).remove(0);
                sum.iter_mut().zip(down).for_each(|(sum, v)| *sum += logits[expert].exp() / total * v);
            }
            sum
        };
        router.iter().enumerate().map(of_token).collect()
    }

    fn of_expert(&self, name: &str, expert: usize) -> Rows {
        let weight = self.model.stacked_weight(name, expert).expect("an expert");
        (0..weight.n()).map(|row| weight.dequantize_row(row).into_iter().map(f64::from).collect()).collect()
    }

    fn linear(&self, name: &str, x: &[Row]) -> Rows {
        products(&self.matrix(name), x)
    }

    fn matrix(&self, name: &str) -> Rows {
        let weight = self.model.weight(name).expect("a weight");
        (0..weight.n()).map(|row| weight.dequantize_row(row).into_iter().map(f64::from).collect()).collect()
    }

    fn values(&self, name: &str) -> Row {
        self.model.dense(name).expect("plain numbers").to_f32().into_iter().map(f64::from).collect()
    }

    fn normed(&self, name: &str, x: &[Row]) -> Rows {
        let gamma = self.values(name);
        x.iter().map(|row| rms_norm(row, &gamma)).collect()
    }
}

/// Causal convolution of each channel: the last of `width` taps
/// is that of the token.
fn convolve(taps: &[f64], bias: &[f64], width: usize, x: &[Row]) -> Rows {
    let of = |token: usize, channel: usize| {
        let tap = |back: usize| {
            let row = token.checked_sub(back)?;
            Some(taps[channel * width + width - 1 - back] * x[row][channel])
        };
        bias.get(channel).copied().unwrap_or(0.0) + (0..width).filter_map(tap).sum::<f64>()
    };
    (0..x.len()).map(|token| (0..x[token].len()).map(|channel| of(token, channel)).collect()).collect()
}

fn products(weight: &[Row], x: &[Row]) -> Rows {
    x.iter().map(|x| weight.iter().map(|row| dot(row, x)).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [Row], more: &[Row]) {
    x.iter_mut().flatten().zip(more.iter().flatten()).for_each(|(x, more)| *x += more);
}

fn gated(gate: &[Row], up: &[Row]) -> Rows {
    gate.iter().zip(up).map(|(gate, up)| gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect()).collect()
}

fn rms_norm(row: &[f64], gamma: &[f64]) -> Row {
    let square = dot(row, row) / row.len() as f64;
    row.iter().zip(gamma).map(|(v, gamma)| v / (square + 1e-5).sqrt() * gamma).collect()
}

fn unit(row: &[f64]) -> Row {
    let norm = (dot(row, row) + 1e-6).sqrt();
    row.iter().map(|v| v / norm).collect()
}

fn silu(v: f64) -> f64 {
    v * sigmoid(v)
}

fn sigmoid(v: f64) -> f64 {
    1.0 / (1.0 + (-v).exp())
}
