//! Attention in f64, on the operands that kernels read.

use qgemm_hal::KvFormat;
use qgemm_hal::op::attention::KV_BLOCK;
use rayon::prelude::*;

use super::case::{AttentionCase, AttentionStorage};

/// Correct result of a query head.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// The row of D.
    pub values: Vec<f64>,
    /// Sum of squares of each value's summands.
    pub energy: Vec<f64>,
    /// Absolute error of values whose weights leave the normal numbers
    /// of f32, as beside a large sink.
    pub floor: Vec<f64>,
    /// Log-sum-exp.
    pub lse: f64,
    /// Largest sum of magnitudes over a visible score's summands. f32
    /// rounding of scores is relative to it.
    pub magnitude: f64,
}

/// Smallest normal number of f32.
const LEAST: f64 = f32::MIN_POSITIVE as f64;

/// All rows, `tokens × heads`; `None` for tokens of no sequence.
pub(super) fn attend(case: &AttentionCase, q: &[f32], k: &[f32], v: &[f32]) -> Vec<Option<Row>> {
    let table = match case.places {
        AttentionStorage::Paged(size) => case.table(size),
        _ => Vec::new(),
    };
    let offsets = case.q_offsets();
    let factors = |format, salt| match format {
        KvFormat::E4M3 => case.factors(salt),
        _ => vec![1.0; case.heads.1],
    };
    let sinks = if case.sinks { case.head_sinks() } else { vec![f32::NEG_INFINITY; case.heads.0] };
    let gates = if case.gated { case.gates() } else { Vec::new() };
    let inputs = Inputs {
        gates,
        case,
        q,
        k,
        v,
        table,
        k_factors: factors(case.formats().k, 4),
        v_factors: factors(case.formats().v, 5),
        sinks,
    };
    let of_token = |token: usize| -> Vec<Option<Row>> {
        let sequence = (0..case.lengths.len()).find(|&s| (offsets[s]..offsets[s + 1]).contains(&(token as u32)));
        (0..case.heads.0)
            .map(|head| sequence.map(|s| inputs.gated_row(s, token, token - offsets[s] as usize, head)))
            .collect()
    };
    (0..case.tokens()).into_par_iter().flat_map_iter(of_token).collect()
}

struct Inputs<'a> {
    case: &'a AttentionCase,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    table: Vec<u32>,
    k_factors: Vec<f32>,
    v_factors: Vec<f32>,
    /// Sink of each query head; −∞ without sinks.
    sinks: Vec<f32>,
    /// Output gates; empty without.
    gates: Vec<f32>,
}

impl Inputs<'_> {
    /// The row times the sigmoid of its gate.
    fn gated_row(&self, sequence: usize, token: usize, query: usize, head: usize) -> Row {
        let mut row = self.row(sequence, token, query, head);
        let v_dim = self.case.dims.1;
        let gates = self.gates.chunks(v_dim).nth(token * self.case.heads.0 + head).unwrap_or_default();
        for (i, gate) in gates.iter().enumerate() {
            let factor = 1.0 / (1.0 + (-f64::from(*gate)).exp());
            row.values[i] *= factor;
            row.energy[i] *= factor * factor;
            row.floor[i] = row.floor[i] * factor + LEAST;
        }
        row
    }

    fn row(&self, sequence: usize, token: usize, query: usize, head: usize) -> Row {
        let case = self.case;
        let ((heads, kv_heads), (qk, v_dim)) = (case.heads, case.dims);
        let (queries, keys) = case.lengths[sequence];
        let kv_head = head / (heads / kv_heads);
        let scale = f64::from(case.scale.unwrap_or(1.0 / (qk as f32).sqrt()) * self.k_factors[kv_head]);
        let q = &self.q[(token * heads + head) * qk..][..qk];
        // End of the causal range. It may be before the first key.
        let end = (keys + query + 1) as i64 - queries as i64;
        let is_visible = |key: usize| {
            let key = key as i64;
            (!case.causal || key < end) && case.window.is_none_or(|window| key >= end - window as i64)
        };
        let mut scores: Vec<(f64, usize)> = Vec::new();
        let mut magnitude = 0.0f64;
        let is_set = |key: usize| case.mask.is_none_or(|mask| mask.is_set(case, sequence, query, head, key));
        for key in (0..keys).filter(|&key| is_visible(key) && is_set(key)) {
            let Some(row) = case.row(sequence, key, &self.table) else { continue };
            let k = &self.k[(row * kv_heads + kv_head) * qk..][..qk];
            let (product, parts) = dot(q, k);
            if product.is_finite() {
                magnitude = magnitude.max((parts + self.offset_magnitude(q, row * kv_heads + kv_head)) * scale.abs());
            }
            let score = case.soft_cap.map_or(product * scale, |cap| {
                let cap = f64::from(cap);
                cap * (product * scale / cap).tanh()
            });
            scores.push((score, row));
        }
        // NaN counts as the largest.
        let most =
            scores.iter().fold(
                f64::from(self.sinks[head]),
                |most, (score, _)| if score.is_nan() { f64::NAN } else { most.max(*score) },
            );
        let (values, energy) = (vec![0.0; v_dim], vec![0.0; v_dim]);
        let floor = vec![LEAST; v_dim];
        let mut out = Row { values, energy, floor, lse: f64::NEG_INFINITY, magnitude };
        if most == f64::NEG_INFINITY {
            return out;
        }
        let row_sum: f64 = scores.iter().map(|(score, _)| (score - most).exp()).sum();
        let row_sum = row_sum + (f64::from(self.sinks[head]) - most).exp();
        let factor = f64::from(self.v_factors[kv_head]);
        for (score, row) in scores {
            let weight = (score - most).exp() / row_sum * factor;
            let v = &self.v[(row * kv_heads + kv_head) * v_dim..][..v_dim];
            for (((value, energy), floor), v) in out.values.iter_mut().zip(&mut out.energy).zip(&mut out.floor).zip(v) {
                let part = weight * f64::from(*v);
                *value += part;
                *energy += part * part;
                if v.is_finite() {
                    *floor += LEAST * f64::from(v.abs());
                }
            }
        }
        out.lse = most + row_sum.ln();
        out
    }

    /// Magnitude that the offset of unsigned codes adds to a score
    /// before its subtraction.
    /// Q4_0 keys are multiplied as code + 16, so the sum is too large
    /// by 24 times Q's sum over each block.
    fn offset_magnitude(&self, q: &[f32], row: usize) -> f64 {
        const OFFSET: f64 = 24.0;
        let blocks = q.chunks(KV_BLOCK).enumerate();
        let of_block = |(block, q): (usize, &[f32])| {
            let sum: f64 = q.iter().map(|q| f64::from(*q)).sum();
            OFFSET * f64::from(self.case.block_scale(self.case.kv, row, block)) * sum.abs()
        };
        if self.case.kv == KvFormat::Q4_0 { blocks.map(of_block).sum() } else { 0.0 }
    }
}

/// `Σ q·k` and `Σ |q·k|`, in interleaved sums for vectorization.
fn dot(q: &[f32], k: &[f32]) -> (f64, f64) {
    const LANES: usize = 4;
    let (q_parts, q_rest) = q.as_chunks::<LANES>();
    let (k_parts, k_rest) = k.as_chunks::<LANES>();
    let (mut sums, mut magnitudes) = ([0.0; LANES], [0.0; LANES]);
    for (q, k) in q_parts.iter().zip(k_parts) {
        for lane in 0..LANES {
            let product = f64::from(q[lane]) * f64::from(k[lane]);
            sums[lane] += product;
            magnitudes[lane] += product.abs();
        }
    }
    for (lane, (q, k)) in q_rest.iter().zip(k_rest).enumerate() {
        let product = f64::from(*q) * f64::from(*k);
        sums[lane] += product;
        magnitudes[lane] += product.abs();
    }
    (sums.iter().sum(), magnitudes.iter().sum())
}
