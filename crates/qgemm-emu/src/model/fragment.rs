//! Fragment layouts: which lane holds which matrix element (PTX
//! ISA, "Matrix Fragments for mma").
//!
//! With g = lane / 4 and t = lane %
//! 4, every shape but `m8n8k4` follows one rule for all element
//! widths. With E elements per word:
//!
//! - word w of A: row
//!   `g + 8 * (w % row blocks)`, columns
//!   `(w / row blocks) * 4E + t * E ..+ E`;
//! - word w of B: the same elements of its transpose;
//! - word w of the accumulators:
//!   row `g + 8 * (w / 2)`,
//!   column `2t + w % 2`.

use super::words::WarpWords;

/// Reads the M x K operand from words `first..` of every
/// lane. Elements have `BITS` bits, low bits first.
pub(crate) fn operand<const M: usize, const K: usize, const BITS: usize>(
    words: &WarpWords,
    first: usize,
) -> [[u16; K]; M] {
    let (per_word, row_blocks) = (32 / BITS, M / 8);
    let mask = ((1u32 << BITS) - 1) as u16;
    let mut matrix = [[0; K]; M];
    for (lane, words) in words.iter().enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        for word in 0..row_blocks * K / (4 * per_word) {
            let row = g + 8 * (word % row_blocks);
            let column = (word / row_blocks) * 4 * per_word + t * per_word;
            for e in 0..per_word {
                matrix[row][column + e] = (words[first + word] >> (BITS * e)) as u16 & mask;
            }
        }
    }
    matrix
}

/// Reads the M x 8 accumulators from words
/// `first..` of every lane.
pub(crate) fn accumulators<const M: usize>(words: &WarpWords, first: usize) -> [[u32; 8]; M] {
    let mut matrix = [[0; 8]; M];
    for (lane, words) in words.iter().enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        for word in 0..M / 4 {
            matrix[g + 8 * (word / 2)][2 * t + word % 2] = words[first + word];
        }
    }
    matrix
}

/// Writes the M x 8 accumulators to the first
/// words of every lane.
pub(crate) fn put_accumulators<const M: usize>(matrix: &[[u32; 8]; M], words: &mut WarpWords) {
    for (lane, words) in words.iter_mut().enumerate() {
        let (g, t) = (lane / 4, lane % 4);
        for word in 0..M / 4 {
            words[word] = matrix[g + 8 * (word / 2)][2 * t + word % 2];
        }
    }
}

/// `m8n8k4` runs four products, one for each quad-pair: lanes 4q to
/// 4q+3 and the lanes 16 higher.
pub(crate) mod quad_pair {
    use super::WarpWords;

    /// Lane with a row of A or a column of B
    /// of product `pair`.
    fn lane_of(pair: usize, row: usize) -> usize {
        4 * pair + row % 4 + 16 * (row / 4)
    }

    /// Lane and word of an f32 accumulator of product `pair`.
    fn place_of(pair: usize, row: usize, column: usize) -> (usize, usize) {
        let lane = 4 * pair + (row & 1) + (column & 2) + 16 * (row / 4);
        (lane, (column & 4) + (row & 2) + (column & 1))
    }

    /// Reads 8 rows of four f16 from words `first..first + 2`.
    pub(crate) fn operand(words: &WarpWords, first: usize, pair: usize) -> [[u16; 4]; 8] {
        std::array::from_fn(|row| {
            let words = &words[lane_of(pair, row)];
            std::array::from_fn(|k| (words[first + k / 2] >> (16 * (k % 2))) as u16)
        })
    }

    /// Reads eight f16 for each of four k, half of them
    /// per lane, from the same words.
    pub(crate) fn operand_across(words: &WarpWords, first: usize, pair: usize) -> [[u16; 8]; 4] {
        std::array::from_fn(|k| {
            std::array::from_fn(|column| {
                let lane = 4 * pair + k + 16 * (column / 4);
                (words[lane][first + column % 4 / 2] >> (16 * (column % 2))) as u16
            })
        })
    }

    /// Reads the f32 accumulators of one product from
    /// words `first..first + 8`.
    pub(crate) fn accumulators(words: &WarpWords, first: usize, pair: usize) -> [[u32; 8]; 8] {
        std::array::from_fn(|row| {
            std::array::from_fn(|column| {
                let (lane, word) = place_of(pair, row, column);
                words[lane][first + word]
            })
        })
    }

    /// Writes the f32 accumulators of one product to the first
    /// eight words of its lanes.
    pub(crate) fn put_accumulators(matrix: &[[u32; 8]; 8], words: &mut WarpWords, pair: usize) {
        for (row, values) in matrix.iter().enumerate() {
            for (column, &value) in values.iter().enumerate() {
                let (lane, word) = place_of(pair, row, column);
                words[lane][word] = value;
            }
        }
    }
}
