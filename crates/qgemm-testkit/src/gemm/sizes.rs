//! M, N and K that cases share.

use qgemm_formats::Format;

/// Token counts for every format: around each tile width of every
/// kernel family.
pub const TOKENS: [usize; 11] = [1, 2, 3, 7, 8, 9, 17, 33, 64, 65, 129];

/// Odd numbers of output features, from one to past every tile
/// height.
pub(super) const FEATURES: [usize; 4] = [33, 1, 129, 67];

/// The smallest K of the format, and one that ends inside a
/// kernel's step (and inside a block, if the format allows).
pub(super) fn depths(format: Format) -> Vec<usize> {
    let block = format.block_len;
    match (block, format.ragged_k) {
        (1, _) => vec![1, 67, 256],
        (_, true) => vec![1, block - 1, 2 * block + 5],
        (16, false) => vec![16, 13 * 16],
        (_, false) => vec![block, 3 * block],
    }
}

/// A medium K that suits every kernel step.
pub(super) fn medium_k(format: Format) -> usize {
    match format.ragged_k {
        true => 2 * format.block_len + 5,
        false => 512usize.next_multiple_of(format.block_len),
    }
}
