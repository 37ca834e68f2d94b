//! Recurrent-state kernel: one token of linear attention, for rows
//! of a state.

use super::attention::total;
use super::vector::{LANES, Vector};

/// A token's part of the recurrence. Rows of the state are as long
/// as `k`.
#[derive(Clone, Copy, Debug)]
pub struct Recurrence<'a> {
    /// Scaled query.
    pub q: &'a [f32],
    /// Key.
    pub k: &'a [f32],
    /// Decay of each key feature, or a single one.
    pub decay: &'a [f32],
    /// Product of query and key.
    pub qk: f32,
    /// Factor of the update.
    pub beta: f32,
    /// Whether there is a delta term.
    pub delta: bool,
}

/// For each row: `s ← s · decay`, `u = beta (value − s · k)`,
/// `s ← s + u k`, `out = s · q`. Without the delta term
/// `u = beta · value`. Bits of a row do not depend on other rows.
///
/// # Safety
/// The CPU must support the level's instructions. The length of `k` is a
/// multiple of `LANES`, `q` has the same length, and `decay` too or 1.
/// `states` has a row of that length for each value, and `out` a number.
#[inline(always)]
pub unsafe fn recur<V: Vector>(token: &Recurrence<'_>, values: &[f32], states: &mut [f32], out: &mut [f32]) {
    let mut row = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while row + 4 <= values.len() {
            of_rows::<V, 4>(token, values, row, states, out);
            row += 4;
        }
        while row < values.len() {
            of_rows::<V, 1>(token, values, row, states, out);
            row += 1;
        }
    }
}

/// # Safety
/// As for [`recur`]; `R` rows from `row` on must exist.
#[inline(always)]
unsafe fn of_rows<V: Vector, const R: usize>(
    token: &Recurrence<'_>,
    values: &[f32],
    row: usize,
    states: &mut [f32],
    out: &mut [f32],
) {
    let &Recurrence { q, k, decay, qk, beta, delta } = token;
    let width = k.len();
    // SAFETY: guaranteed by the caller: columns are within whole rows.
    unsafe {
        let first = states.as_mut_ptr().add(row * width);
        let mut of_keys = [V::splat(0.0); R];
        let mut of_queries = [V::splat(0.0); R];
        let single = V::splat(decay[0]);
        for column in (0..width).step_by(LANES) {
            let (k, q) = (V::load(k.as_ptr().add(column)), V::load(q.as_ptr().add(column)));
            let decay = if decay.len() == 1 { single } else { V::load(decay.as_ptr().add(column)) };
            for (r, (of_key, of_query)) in of_keys.iter_mut().zip(&mut of_queries).enumerate() {
                let at = first.add(r * width + column);
                let state = V::multiply(V::load(at), decay);
                V::store(at, state);
                *of_key = V::multiply_add(state, k, *of_key);
                *of_query = V::multiply_add(state, q, *of_query);
            }
        }
        let mut updates = [0.0; R];
        let sums = updates.iter_mut().zip(of_keys.into_iter().zip(of_queries));
        for ((update, (of_key, of_query)), (value, out)) in sums.zip(values[row..].iter().zip(&mut out[row..])) {
            *update = beta * if delta { *value - total::<V>(of_key) } else { *value };
            *out = total::<V>(of_query) + *update * qk;
        }
        for column in (0..width).step_by(LANES) {
            let k = V::load(k.as_ptr().add(column));
            for (r, update) in updates.into_iter().enumerate() {
                let at = first.add(r * width + column);
                V::store(at, V::multiply_add(V::splat(update), k, V::load(at)));
            }
        }
    }
}
