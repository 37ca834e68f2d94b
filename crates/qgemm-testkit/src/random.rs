//! Random sizes of cases.

use rand::Rng;
use rand::rngs::StdRng;

pub(crate) fn pick<T: Copy>(rng: &mut StdRng, from: &[T]) -> T {
    from[rng.random_range(0..from.len())]
}

/// From 1 to `max`, skewed towards small numbers.
pub(crate) fn skewed(rng: &mut StdRng, max: usize) -> usize {
    let bound = rng.random_range(0.0..=(max as f64).log2()).exp2() as usize;
    rng.random_range(1..=bound.clamp(1, max))
}

/// 0 in two of three cases, otherwise less than `most`.
pub(crate) fn gap(rng: &mut StdRng, most: usize) -> usize {
    if rng.random_ratio(1, 3) { rng.random_range(1..most) } else { 0 }
}
