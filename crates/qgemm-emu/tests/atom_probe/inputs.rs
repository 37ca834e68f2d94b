//! Input registers of probes, identical on every machine, because recordings of GPU
//! results do not include inputs.

use half::{bf16, f16};

use super::Probe;

/// Interpretation of an input word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A pair of finite f16 numbers.
    F16,
    /// A pair of finite bf16 numbers.
    Bf16,
    /// Four finite E4M3 numbers.
    E4m3,
    /// Four finite E5M2 numbers.
    E5m2,
    /// Four signed bytes.
    S8,
    /// A finite f32 number.
    F32,
    /// As [`Kind::F16`], but `Wide` includes infinities and NaN.
    AnyF16,
    /// As [`Kind::F32`], but `Wide` includes infinities and NaN.
    AnyF32,
    /// Integer: random bits in random cases.
    Bits,
    /// Integer below this bound.
    Below(u32),
}

/// Fill of a case's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// A distinct small number per element, so that a misplaced one shows.
    Index,
    /// Small integers with exact products and sums.
    Integers,
    /// Numbers of moderate size.
    Normal,
    /// Numbers of very different sizes.
    Wide,
}

const FILLS: [Fill; 4] = [Fill::Index, Fill::Integers, Fill::Normal, Fill::Wide];

/// Inputs of the first `cases` cases of `probe`: `[case][lane][word]`. They are
/// a prefix of those of more cases.
pub fn fill(probe: &Probe, cases: usize) -> Vec<u32> {
    let mut words = Vec::with_capacity(cases * probe.lanes() * probe.words_in());
    for case in 0..cases {
        let mut random = Random::new(probe.name, case);
        let fill = FILLS[case % FILLS.len()];
        // Another start in each round of fills.
        let shift = (case / FILLS.len() * 7) as u32;
        for lane in 0..probe.lanes() {
            for &(kind, count) in probe.inputs {
                words.extend((0..count).map(|i| word(kind, fill, (lane * count + i) as u32, shift, &mut random)));
            }
        }
    }
    words
}

/// Whether sums in `case` are exact on every chip, for any order and accumulator width.
pub fn sums_are_exact(case: usize) -> bool {
    matches!(FILLS[case % FILLS.len()], Fill::Index | Fill::Integers)
}

/// Word `index` of its kind in the warp.
fn word(kind: Kind, fill: Fill, index: u32, shift: u32, random: &mut Random) -> u32 {
    let elements = match kind {
        Kind::F16 | Kind::AnyF16 | Kind::Bf16 => 2,
        Kind::E4m3 | Kind::E5m2 | Kind::S8 => 4,
        Kind::F32 | Kind::AnyF32 | Kind::Bits | Kind::Below(_) => 1,
    };
    let bits = 32 / elements;
    (0..elements).fold(0, |word, i| {
        let number = index * elements + i + shift;
        word | element(kind, fill, number, random) << (bits * i)
    })
}

/// Bits of one element.
fn element(kind: Kind, fill: Fill, number: u32, random: &mut Random) -> u32 {
    let f16_bits = |value: f32| u32::from(f16::from_f32(value).to_bits());
    let bf16_bits = |value: f32| u32::from(bf16::from_f32(value).to_bits());
    match (kind, fill) {
        // Integers exact in the type. FP8's are small enough for Ada's short accumulators.
        (Kind::F16 | Kind::AnyF16, Fill::Index) => f16_bits(cycle(number, 2048) as f32),
        (Kind::Bf16, Fill::Index) => bf16_bits(cycle(number, 256) as f32),
        (Kind::F32 | Kind::AnyF32, Fill::Index) => (number as f32).to_bits(),
        (Kind::E4m3, Fill::Index) => small_fp8(cycle(number, 8) as i32 + 1, 7, 3),
        (Kind::E5m2, Fill::Index) => small_fp8(cycle(number, 8) as i32 + 1, 15, 2),
        (Kind::S8, Fill::Index) => cycle(number, 256),
        (Kind::Bits, Fill::Index) => number,
        (Kind::Below(limit), Fill::Index) => number % limit,

        (Kind::F16 | Kind::AnyF16, Fill::Integers) => f16_bits(random.integer(8) as f32),
        (Kind::Bf16, Fill::Integers) => bf16_bits(random.integer(8) as f32),
        (Kind::F32 | Kind::AnyF32, Fill::Integers) => (random.integer(1000) as f32).to_bits(),
        (Kind::E4m3, Fill::Integers) => small_fp8(random.integer(4), 7, 3),
        (Kind::E5m2, Fill::Integers) => small_fp8(random.integer(4), 15, 2),
        (Kind::S8, Fill::Integers) => random.integer(8) as u32 & 0xff,
        (Kind::Bits, Fill::Integers) => random.integer(1000) as u32,

        (Kind::F16 | Kind::AnyF16, Fill::Normal) => f16_bits(random.normal()),
        (Kind::Bf16, Fill::Normal) => bf16_bits(random.normal()),
        (Kind::F32 | Kind::AnyF32, Fill::Normal) => random.normal().to_bits(),
        (Kind::E4m3, Fill::Normal) => random.float(3, 4..10, 4),
        (Kind::E5m2, Fill::Normal) => random.float(2, 12..18, 5),

        (Kind::F16, Fill::Wide) => random.float(10, 0..31, 5),
        (Kind::Bf16, Fill::Wide) => random.float(7, 87..168, 8),
        (Kind::F32, Fill::Wide) => random.float(23, 97..158, 8),
        // Every binade except E4M3's largest, which has the NaN.
        (Kind::E4m3, Fill::Wide) => random.float(3, 0..15, 4),
        (Kind::E5m2, Fill::Wide) => random.float(2, 0..31, 5),
        (Kind::AnyF16, Fill::Wide) => random.bits() & 0xffff,
        // Half of them in the range of narrower types.
        (Kind::AnyF32, Fill::Wide) if random.bits().is_multiple_of(2) => random.float(23, 100..147, 8),
        (Kind::AnyF32, Fill::Wide) => random.bits(),
        (Kind::S8, Fill::Normal | Fill::Wide) => random.bits() & 0xff,
        (Kind::Bits, Fill::Normal | Fill::Wide) => random.bits(),
        (Kind::Below(limit), _) => random.bits() % limit,
    }
}

/// `number` modulo `count`, advanced by one per cycle, so that lanes a
/// whole cycle apart differ.
fn cycle(number: u32, count: u32) -> u32 {
    (number + number / count) % count
}

/// Integer of at most three significant bits, as an FP8 number with this
/// exponent bias and mantissa.
fn small_fp8(value: i32, bias: u32, mantissa_bits: u32) -> u32 {
    let sign = u32::from(value < 0) << 7;
    let magnitude = value.unsigned_abs();
    if magnitude == 0 {
        return sign;
    }
    let exponent = magnitude.ilog2();
    let mantissa = (magnitude << mantissa_bits >> exponent) & ((1 << mantissa_bits) - 1);
    sign | (exponent + bias) << mantissa_bits | mantissa
}

/// SplitMix64. Recordings depend on its sequence, which must never change.
struct Random(u64);

impl Random {
    fn new(name: &str, case: usize) -> Self {
        let seed = name.bytes().fold(case as u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Self(seed)
    }

    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    /// Integer in `-limit..=limit`.
    fn integer(&mut self, limit: i32) -> i32 {
        (self.bits() % (2 * limit as u32 + 1)) as i32 - limit
    }

    /// Nearly normal with variance 1: twelve uniform numbers, added as integers to be
    /// independent of libraries.
    fn normal(&mut self) -> f32 {
        let sum: i64 = (0..12).map(|_| i64::from(self.bits() >> 8)).sum();
        (sum - 6 * (1 << 24)) as f32 / (1 << 24) as f32
    }

    /// Number of random sign and mantissa, with an exponent field in this range.
    fn float(&mut self, mantissa_bits: u32, exponents: std::ops::Range<u32>, exponent_bits: u32) -> u32 {
        let sign = (self.bits() & 1) << (mantissa_bits + exponent_bits);
        let exponent = exponents.start + self.bits() % (exponents.end - exponents.start);
        sign | exponent << mantissa_bits | self.bits() & ((1 << mantissa_bits) - 1)
    }
}
