//! Shuffles, votes and reductions of one word per lane.

use super::precision::Precision;
use super::words::WarpWords;

/// `shfl.sync.bfly.b32`: word 0 of the lane whose
/// number is XORed with word 1.
pub(crate) fn shfl_xor(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    for (lane, output) in outputs.iter_mut().enumerate() {
        output[0] = inputs[lane ^ (inputs[lane][1] % 32) as usize][0];
    }
}

/// `shfl.sync.idx.b32`: word 0 of lane number word 1, modulo 32.
pub(crate) fn shfl_idx(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    for (lane, output) in outputs.iter_mut().enumerate() {
        output[0] = inputs[(inputs[lane][1] % 32) as usize][0];
    }
}

/// `vote.sync.ballot.b32`: a bit for each lane with a nonzero word.
pub(crate) fn ballot(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    let bits = inputs.iter().enumerate().fold(0, |bits, (lane, words)| bits | u32::from(words[0] != 0) << lane);
    give_all(outputs, bits);
}

/// `match.any.sync.b32`: a bit for each lane with the same word.
pub(crate) fn match_any(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    for (lane, output) in outputs.iter_mut().enumerate() {
        let same = |bits, (other, words): (usize, &[u32; _])| bits | u32::from(words[0] == inputs[lane][0]) << other;
        output[0] = inputs.iter().enumerate().fold(0, same);
    }
}

/// `redux.sync.add.u32`: wrapping sum of all lanes' words.
pub(crate) fn redux_add(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    give_all(outputs, inputs.iter().fold(0, |sum, words| sum.wrapping_add(words[0])));
}

/// `redux.sync.max.u32`: maximum of all lanes' words.
pub(crate) fn redux_max_u32(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    give_all(outputs, inputs.iter().fold(0, |largest, words| largest.max(words[0])));
}

/// `bar.warp.sync`: lanes converge without exchanging words.
pub(crate) fn warp_barrier(_: &WarpWords, _: &mut WarpWords, _: &Precision) {}

fn give_all(outputs: &mut WarpWords, word: u32) {
    for output in outputs {
        output[0] = word;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::NO_WORDS;

    fn run(op: fn(&WarpWords, &mut WarpWords, &Precision), word: impl Fn(usize) -> [u32; 2]) -> [u32; 32] {
        let mut inputs = NO_WORDS;
        for (lane, words) in inputs.iter_mut().enumerate() {
            words[..2].copy_from_slice(&word(lane));
        }
        let mut outputs = NO_WORDS;
        op(&inputs, &mut outputs, &Precision::WIDE);
        outputs.map(|words| words[0])
    }

    #[test]
    fn shuffles() {
        let butterfly = run(shfl_xor, |lane| [100 + lane as u32, 16]);
        assert_eq!(butterfly[..2], [116, 117]);
        assert_eq!(butterfly[16..18], [100, 101]);
        // Each lane uses its own mask.
        assert_eq!(run(shfl_xor, |lane| [lane as u32, lane as u32]), [0; 32]);
        let rotated = run(shfl_idx, |lane| [lane as u32 * 3, lane as u32 + 1]);
        assert_eq!(rotated[..3], [3, 6, 9]);
        assert_eq!(rotated[31], 0, "lane 32 is lane 0");
    }

    #[test]
    fn votes_and_reductions() {
        assert_eq!(run(ballot, |lane| [u32::from(lane % 4 == 1) * 7, 0]), [0x2222_2222; 32]);
        assert_eq!(run(ballot, |lane| [u32::from(lane == 31), 0]), [0x8000_0000; 32]);
        let pairs = run(match_any, |lane| [lane as u32 / 2, 0]);
        assert_eq!([pairs[0], pairs[1], pairs[31]], [3, 3, 0xc000_0000]);
        assert_eq!(run(redux_add, |lane| [lane as u32, 0]), [496; 32]);
        assert_eq!(run(redux_add, |_| [0x1000_0000, 0]), [0; 32], "wraps");
        assert_eq!(run(redux_max_u32, |lane| [(lane as u32 * 29) % 37, 0]), [36; 32]);
        assert_eq!(run(redux_max_u32, |_| [0xffff_fff0, 0]), [0xffff_fff0; 32], "unsigned");
    }
}
