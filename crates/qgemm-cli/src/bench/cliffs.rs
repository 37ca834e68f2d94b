//! Cliffs in a sweep over token counts: one more token costs too
//! much, or more tokens take less time.

/// One point of a sweep.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Tokens.
    pub m: usize,
    /// Tokens of the config's tile.
    pub tile_m: usize,
    /// Time of a launch, in microseconds.
    pub microseconds: f64,
}

/// Tolerance of both checks: two measurements of the same kernel
/// differ by this much.
const TOLERANCE: f64 = 0.03;

/// The cliff at each point, if any. `points` are in the order of
/// tokens.
pub fn find(points: &[Point]) -> Vec<Option<String>> {
    (0..points.len()).map(|i| slower_than_more(points, i).or_else(|| steep(points, i))).collect()
}

/// Cliff: more tokens take less time.
fn slower_than_more(points: &[Point], i: usize) -> Option<String> {
    let here = points[i];
    let fastest = points[i + 1..].iter().min_by(|a, b| a.microseconds.total_cmp(&b.microseconds))?;
    let ratio = here.microseconds / fastest.microseconds;
    (ratio > 1.0 + TOLERANCE).then(|| format!("{:+.1}% against M={}", (ratio - 1.0) * 100.0, fastest.m))
}

/// Cliff: one more token costs more than a tile of tokens, at the
/// time per token of the sweep's end.
fn steep(points: &[Point], i: usize) -> Option<String> {
    let (here, before, last) = (points[i], points.get(i.checked_sub(1)?)?, points.last()?);
    if here.m != before.m + 1 {
        return None;
    }
    let tile = last.microseconds / last.m as f64 * here.tile_m as f64;
    let step = here.microseconds - before.microseconds;
    let allowed = tile + TOLERANCE * before.microseconds;
    (step > allowed).then(|| format!("{step:+.2} us for a token, a tile takes {tile:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(times: &[(usize, usize, f64)]) -> Vec<Option<String>> {
        let point = |&(m, tile_m, microseconds)| Point { m, tile_m, microseconds };
        find(&times.iter().map(point).collect::<Vec<_>>())
    }

    #[test]
    fn a_call_slower_than_a_larger_one_is_found() {
        let found = sweep(&[(1, 8, 10.0), (7, 8, 10.5), (8, 8, 10.0), (9, 16, 10.1)]);
        assert!(found[1].as_ref().is_some_and(|what| what.contains("M=8")), "{found:?}");
        assert!([0, 2, 3].iter().all(|&i| found[i].is_none()), "{found:?}");
    }

    #[test]
    fn a_step_beyond_a_token_tile_is_found() {
        // At the end a token takes 0.2, so a tile of 16 may cost 3.2.
        let found = sweep(&[(15, 16, 10.0), (16, 16, 10.1), (17, 16, 13.0), (18, 16, 17.0), (100, 16, 20.0)]);
        assert_eq!(found.iter().map(Option::is_some).collect::<Vec<_>>(), [false, false, false, true, false]);
    }
}
