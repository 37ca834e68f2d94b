//! Philox4x32-10, a counter-based random number generator
//! (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
//!
//! A number depends on seed and position alone. Other sessions
//! and earlier draws do not change it.

/// Rounds of the generator.
const ROUNDS: usize = 10;
/// Multipliers of a round.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Increments of the key, the golden ratio and √3 − 1.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words of a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut counter, mut key) = (counter, key);
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let [low0, high0] = halves(MULTIPLIERS[0], counter[0]);
        let [low1, high1] = halves(MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

/// A uniform number in `[0, 1)` for the token at `position`, a multiple of 2⁻⁵³.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [a, b, ..] = philox4x32([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 * 2f64.powi(-53)
}

/// The low and the high word of a product.
fn halves(a: u32, b: u32) -> [u32; 2] {
    let product = u64::from(a) * u64::from(b);
    [product as u32, (product >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        let ones = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected, "{counter:x?}");
        }
    }

    #[test]
    fn numbers_are_uniform_and_depend_on_seed_and_position_alone() {
        const COUNT: u64 = 20_000;
        let mean = (0..COUNT).map(|position| uniform(7, position)).sum::<f64>() / COUNT as f64;
        // Five standard deviations.
        assert!((mean - 0.5).abs() < 5.0 / (12.0 * COUNT as f64).sqrt(), "{mean}");
        assert!((0..COUNT).all(|position| (0.0..1.0).contains(&uniform(7, position))));
        assert_eq!(uniform(7, 3), uniform(7, 3));
        assert_ne!(uniform(7, 3), uniform(8, 3));
        assert_ne!(uniform(7, 3), uniform(7, 3 + (1 << 32)));
    }
}
