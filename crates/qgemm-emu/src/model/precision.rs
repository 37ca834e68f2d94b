//! How matrix instructions add: what is published about each chip, as parameters.
//!
//! Products are exact on every chip. What differs is the sum: a tensor core aligns a group of products and the accumulator
//! to the largest exponent among them, cuts what lies below a fixed number of bits, adds, and cuts the sum to f32. Found by
//! measurement, never documented by NVIDIA:
//! - Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (PeerJ CS 2021): V100, T4, A100.
//! - Khattak, Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004): V100, A100, Ada, H100, H200, B200.
//! - Xie, Wang, Yang, Yang, "MMA-Sim" (arXiv 2511.10909): Volta to RTX Blackwell, FP8 and block-scaled FP4 too.
//!
//! Where an instruction is not the chip's own, the machine code that ptxas 12.9 makes of it says how it adds: `m8n8k4` from
//! sm_80 on is shuffles and f32 FMAs, FP8 `mma` on sm_90 is two f16 `mma` and an addition.

use qgemm_hal::Variant;

/// The rounding of a sum to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to even.
    NearestEven,
    /// Toward zero, keeping this many of the 23 fraction bits and clearing the others.
    TowardZero {
        /// 23, or 13 where the chip's accumulator is shorter than f32.
        fraction_bits: u32,
    },
}

/// The order in which a group takes the K dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of K.
    Natural,
    /// The first two of each four, then the last two: FP8 on Hopper, where the lower halves of all registers are unpacked
    /// for one f16 instruction and the upper halves for a second.
    PairsOfFour,
}

/// When a product's accumulator comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulator {
    /// It is aligned and added with the first group of products.
    WithProducts,
    /// The sum starts from zero, and the accumulator is added to it in f32, rounding to nearest even.
    After,
}

/// A sum of aligned and cut terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aligned {
    /// Products added at once; the sum of one group is the accumulator of the next. From 1 to K.
    pub group_k: usize,
    /// Bits kept below the largest term's leading bit, whose exponent is the sum of its factors' exponents (a product of
    /// significands is less than 4 and is not normalized). At most 26.
    pub fraction_bits: u32,
    /// Exponent that the terms are aligned to when all are smaller.
    pub least_exponent: i32,
    /// Of a group's sum.
    pub rounding: Rounding,
    /// Of K.
    pub order: Order,
    /// Where the accumulator enters.
    pub accumulator: Accumulator,
}

/// How one matrix instruction adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// In f64 from the accumulator on, rounded to f32 once at the end: fast, and more exact than any chip.
    Wide,
    /// f32 FMAs from zero in the order of K, then the accumulator is added.
    FmaChain,
    /// As a tensor core.
    Aligned(Aligned),
}

/// How a block-scaled matrix instruction adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledSum {
    /// In f64, rounded to f32 once at the end.
    Wide,
    /// Sixteen products are added exactly and multiplied by both scales; these terms and the accumulator are aligned to
    /// the largest exponent, which a term has from its scales alone, cut to this many fraction bits, added, and the sum
    /// is cut to f32.
    Aligned {
        /// At most 38.
        fraction_bits: u32,
    },
}

/// How the matrix instructions of a device add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// f16 in the quad-pair shape `m8n8k4`.
    pub quad_pair: Sum,
    /// f16 and bf16 in 16-row shapes.
    pub half: Sum,
    /// E4M3 and E5M2, of `mma`.
    pub fp8: Sum,
    /// The same, of `wgmma`.
    pub fp8_wgmma: Sum,
    /// Block-scaled E2M1.
    pub block_scaled: ScaledSum,
}

/// A sum cut to all of f32's bits, the accumulator with the first products, K in order.
const fn aligned(group_k: usize, fraction_bits: u32, least_exponent: i32) -> Aligned {
    Aligned {
        group_k,
        fraction_bits,
        least_exponent,
        rounding: Rounding::TowardZero { fraction_bits: 23 },
        order: Order::Natural,
        accumulator: Accumulator::WithProducts,
    }
}

impl Precision {
    /// Every sum in f64, rounded once.
    pub const WIDE: Precision = Precision::uniform(Sum::Wide);

    /// One way to add for every instruction that has no block scales; those add in f64.
    pub const fn uniform(sum: Sum) -> Precision {
        Precision { quad_pair: sum, half: sum, fp8: sum, fp8_wgmma: sum, block_scaled: ScaledSum::Wide }
    }

    /// How the chips of a variant add. Where a variant lacks an instruction, its sum is in f64.
    ///
    /// Only Sm90's can be checked on a chip at hand. The dot products that Khattak and Mikaitis recorded and published,
    /// of ordinary random numbers, come out equal in all bits: 5000 for each of f16 on V100, f16 and bf16 on A100, Ada,
    /// H100, H200 and B200, FP8 on Ada and L40S, and FP8 on B200, whose `mma` is Sm90's. Turing, the two groups that
    /// `m16n8k16` makes on Ampere and Ada, and Sm120's FP8 and block scales are as MMA-Sim has them.
    pub const fn of(variant: Variant) -> Precision {
        let volta = Sum::Aligned(aligned(4, 23, -133));
        let turing = aligned(8, 24, -132);
        let ampere = turing;
        let hopper = aligned(16, 25, -133);
        match variant {
            Variant::Sm70 => Precision { quad_pair: volta, ..Precision::WIDE },
            Variant::Sm75 => Precision {
                quad_pair: Sum::Aligned(Aligned { group_k: 4, ..turing }),
                half: Sum::Aligned(turing),
                ..Precision::WIDE
            },
            Variant::Sm80 => Precision { quad_pair: Sum::FmaChain, half: Sum::Aligned(ampere), ..Precision::WIDE },
            Variant::Sm89 => Precision {
                quad_pair: Sum::FmaChain,
                half: Sum::Aligned(ampere),
                fp8: Sum::Aligned(Aligned {
                    rounding: Rounding::TowardZero { fraction_bits: 13 },
                    ..aligned(16, 13, -133)
                }),
                ..Precision::WIDE
            },
            Variant::Sm90 => Precision {
                quad_pair: Sum::FmaChain,
                half: Sum::Aligned(hopper),
                fp8: Sum::Aligned(Aligned { order: Order::PairsOfFour, accumulator: Accumulator::After, ..hopper }),
                fp8_wgmma: Sum::Aligned(Aligned {
                    rounding: Rounding::TowardZero { fraction_bits: 13 },
                    ..aligned(32, 13, -133)
                }),
                ..Precision::WIDE
            },
            Variant::Sm120 => Precision {
                quad_pair: Sum::FmaChain,
                half: Sum::Aligned(hopper),
                fp8: Sum::Aligned(Aligned { group_k: 32, ..hopper }),
                block_scaled: ScaledSum::Aligned { fraction_bits: 35 },
                ..Precision::WIDE
            },
        }
    }
}
