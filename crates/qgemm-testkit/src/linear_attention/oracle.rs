//! The oracle of `linear_attention`: the recurrence in f64.

use qgemm_hal::op::linear_attention::{BetaSource, DecaySource};

use super::case::LinearAttentionCase;
use crate::expected::Expected;

/// Epsilon of the L2 norm of all cases.
pub(super) const EPSILON: f32 = 1e-6;
/// Scale of all cases.
pub(super) const SCALE: f32 = 0.3;

/// Results, with the magnitude of their summands.
pub(super) struct Attended {
    /// Rows `[tokens, heads]` of values; 0 where no output is written.
    pub d: Expected,
    /// Whether a row of D is written.
    pub is_written: Vec<bool>,
    /// Rows `[slots, heads, v_dim]` of states.
    pub states: Expected,
}

/// A case's operands, as stored.
pub(super) struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub decays: Vec<f32>,
    pub decay_parameters: [Vec<f32>; 2],
    pub betas: Vec<f32>,
    pub skips: Vec<f32>,
    pub states: Vec<f32>,
}

impl Inputs {
    pub fn of(case: &LinearAttentionCase) -> Self {
        let [q, k, v] = case.inputs();
        Self {
            q,
            k,
            v,
            decays: case.decays(),
            decay_parameters: case.decay_parameters(),
            betas: case.betas(),
            skips: case.skips(),
            states: case.states(),
        }
    }
}

/// A state, with the magnitude of the last token's summands.
#[derive(Clone)]
struct State {
    values: Vec<f64>,
    energy: Vec<f64>,
}

/// The results of `case`.
pub(super) fn attend(case: &LinearAttentionCase, inputs: &Inputs) -> Attended {
    let ((heads, _), (qk_dim, v_dim)) = (case.heads, case.dims);
    let rows = case.tokens() * heads;
    let mut d = Expected { m: rows, n: v_dim, ..zeros(rows * v_dim) };
    let mut is_written = vec![false; rows];
    let state_rows = case.slots.0 * heads * v_dim;
    let mut states = Expected { m: state_rows, n: qk_dim, ..zeros(state_rows * qk_dim) };
    states.values.iter_mut().zip(&inputs.states).for_each(|(to, &from)| *to = from.into());
    let offsets = case.offsets();
    let (advances, pendings) = (case.advances(), case.pendings());
    for (sequence, slot) in case.slot_of_each().into_iter().enumerate() {
        let tokens = offsets[sequence] as usize..offsets[sequence + 1] as usize;
        let slot = usize::try_from(slot).ok().filter(|&slot| slot < case.slots.0);
        let count = |is_given, counts: &[u32], default: usize| match is_given {
            true => tokens.len().min(counts[sequence] as usize),
            false => default,
        };
        let advance = count(case.advance, &advances, tokens.len());
        let pending = count(case.pending, &pendings, 0);
        for head in 0..heads {
            let stored = slot.map(|slot| {
                let first = (slot * heads + head) * v_dim * qk_dim;
                first..first + v_dim * qk_dim
            });
            let zero = vec![0.0; v_dim * qk_dim];
            let mut state = State { values: zero.clone(), energy: zero };
            if let (Some(stored), false) = (&stored, case.from_zero) {
                state.values.copy_from_slice(&states.values[stored.clone()]);
                state.energy.iter_mut().zip(&state.values).for_each(|(energy, value)| *energy = value * value);
            }
            let mut kept = (advance == 0).then(|| state.clone());
            for (place, token) in tokens.clone().enumerate() {
                let row = token * heads + head;
                let results = step(case, inputs, token, head, &mut state);
                if place >= pending {
                    is_written[row] = true;
                    for (i, (value, energy)) in results.into_iter().enumerate() {
                        (d.values[row * v_dim + i], d.energy[row * v_dim + i]) = (value, energy);
                    }
                }
                if place + 1 == advance {
                    kept = Some(state.clone());
                }
            }
            if let (Some(stored), Some(kept), false) = (stored, kept, tokens.is_empty()) {
                states.values[stored.clone()].copy_from_slice(&kept.values);
                states.energy[stored].copy_from_slice(&kept.energy);
            }
        }
    }
    // A decay that underflows in f32 is 0.
    d.floor.fill(f64::from(f32::MIN_POSITIVE) * 1e3);
    states.floor.fill(f64::from(f32::MIN_POSITIVE) * 1e3);
    Attended { d, is_written, states }
}

fn zeros(count: usize) -> Expected {
    let zeros = vec![0.0; count];
    Expected { m: 0, n: 0, values: zeros.clone(), energy: zeros.clone(), floor: zeros }
}

/// One token of a head: results with their magnitude.
fn step(case: &LinearAttentionCase, inputs: &Inputs, token: usize, head: usize, state: &mut State) -> Vec<(f64, f64)> {
    let ((heads, key_heads), (qk_dim, v_dim)) = (case.heads, case.dims);
    let key_head = if case.tiled { head % key_heads } else { head * key_heads / heads };
    let key_row = (token * key_heads + key_head) * qk_dim;
    let row = token * heads + head;
    let normalized = |rows: &[f32]| -> Vec<f64> {
        let row: Vec<f64> = rows[key_row..key_row + qk_dim].iter().map(|&x| x.into()).collect();
        let sum: f64 = row.iter().map(|x| x * x).sum();
        let norm = if case.norm { (sum + f64::from(EPSILON)).sqrt() } else { 1.0 };
        row.into_iter().map(|x| x / norm).collect()
    };
    let (q, k) = (normalized(&inputs.q), normalized(&inputs.k));
    let decays = decays(case, inputs, token, head);
    let beta = beta(case, inputs, row, head);
    let scale = f64::from(SCALE);
    let of_value = |i: usize| {
        let of_row = i * qk_dim..(i + 1) * qk_dim;
        let (values, energy) = (&mut state.values[of_row.clone()], &mut state.energy[of_row]);
        for (j, value) in values.iter_mut().enumerate() {
            // A reset forgets everything.
            let decay = if decays.is_empty() { 1.0 } else { decays[j % decays.len()] };
            *value = if decay == 0.0 { 0.0 } else { *value * decay };
        }
        let predicted: f64 = values.iter().zip(&k).map(|(s, k)| s * k).sum();
        let value = f64::from(inputs.v[row * v_dim + i]);
        let update = beta * if case.delta { value - predicted } else { value };
        let (mut sum, mut of_sum) = (0.0, 0.0);
        for (j, (state, energy)) in values.iter_mut().zip(energy).enumerate() {
            // An update may cancel the old state.
            let (old, added) = (*state, update * k[j]);
            *state += added;
            *energy = old * old + added * added;
            sum += *state * q[j];
            of_sum += *energy * q[j] * q[j];
        }
        let skip = if case.skip { f64::from(inputs.skips[head]) * value } else { 0.0 };
        (scale * sum + skip, scale * scale * of_sum + skip * skip)
    };
    (0..v_dim).map(of_value).collect()
}

/// Factor of a head's update.
fn beta(case: &LinearAttentionCase, inputs: &Inputs, row: usize, head: usize) -> f64 {
    let given = || f64::from(inputs.betas[row]);
    match case.beta {
        None => 1.0,
        Some(BetaSource::Given) => given(),
        Some(BetaSource::Sigmoid) => 1.0 / (1.0 + (-given()).exp()),
        // Decays are one a head.
        Some(BetaSource::TimeStep) => {
            softplus(f64::from(inputs.decays[row]) + f64::from(inputs.decay_parameters[1][head]))
        }
    }
}

/// ln(1 + exp(x)).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Decays of a head.
fn decays(case: &LinearAttentionCase, inputs: &Inputs, token: usize, head: usize) -> Vec<f64> {
    let columns = case.head_decays();
    let first = (token * case.heads.0 + head) * columns;
    let Some((_, source)) = case.decay else { return Vec::new() };
    let [a_log, dt_bias] = &inputs.decay_parameters;
    let of_column = |column: usize| {
        let given = f64::from(inputs.decays[first + column]);
        let g = match source {
            DecaySource::Log => given,
            DecaySource::Softplus(_) => {
                -f64::from(a_log[head]).exp() * softplus(given + f64::from(dt_bias[head * columns + column]))
            }
        };
        g.exp()
    };
    (0..columns).map(of_column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_key_replaces_its_value() {
        // One head of one key feature that matters: β = 1 keeps the last value.
        let case = LinearAttentionCase { beta: None, decay: None, ..LinearAttentionCase::new(&[3], (1, 1), (16, 16)) };
        let mut inputs = Inputs::of(&case);
        let mut key = [0.0; 16];
        key[5] = 2.0;
        inputs.k = key.repeat(3);
        inputs.q = inputs.k.clone();
        let attended = attend(&case, &inputs);
        for (got, value) in attended.d.values.iter().zip(&inputs.v) {
            assert!((got - f64::from(SCALE) * f64::from(*value)).abs() < 1e-5, "{got} {value}");
        }
        let last: Vec<f64> = (0..16).map(|i| attended.states.values[i * 16 + 5]).collect();
        assert!(last.iter().zip(&inputs.v[32..]).all(|(s, v)| (s - f64::from(*v)).abs() < 1e-5));
        // Without the delta term they add up.
        let sums = attend(&LinearAttentionCase { delta: false, from_zero: true, ..case }, &inputs);
        let sum: f64 = [0, 16, 32].iter().map(|&i| f64::from(inputs.v[i])).sum();
        assert!((sums.states.values[5] - sum).abs() < 1e-5);
    }
}
