//! Random test weights: random bits reach all codes, sub-scales and scales, beyond
//! those that quantizers write.

use crate::desc::Format;
use crate::weight::{HostWeight, SharedBytes};

/// Random weight of `n` rows of `k` values. The same arguments give the same weight.
///
/// # Panics
/// When `n` is 0, or `k` does not fit the format.
pub(crate) fn sample(format: Format, n: usize, k: usize, seed: u32) -> HostWeight {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let mut blocks: Vec<u8> = (0..format.row_offset(n, k)).map(|_| random()).collect();
    if let Some(largest) = format.largest_zero_point() {
        for zero in blocks.iter_mut().skip(format.block_bytes - 1).step_by(format.block_bytes) {
            *zero = (*zero).min(largest);
        }
    }
    HostWeight::new(format, n, k, SharedBytes::from(blocks))
        .unwrap_or_else(|e| unreachable!("a sample of {format} is no weight: {e}"))
}
