//! Summation models of matrix instructions: published properties
//! of each chip, as parameters.
//!
//! Products are exact on every chip; the sums differ. A tensor
//! core aligns a group of products and the accumulator to
//! their largest exponent, truncates below a fixed number of
//! bits, adds, and truncates the sum to f32. NVIDIA does not
//! document this; it was measured:
//!
//! - Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor
//!   cores" (PeerJ CS 2021): V100, T4, A100.
//! - Khattak, Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv
//!   2512.07004): V100, A100, Ada, H100, H200, B200.
//! - Xie, Wang, Yang, Yang, "MMA-Sim" (arXiv 2511.10909): Volta to RTX
//!   Blackwell, including FP8 and block-scaled FP4.
//!
//! When a chip emulates an instruction, the machine code
//! of ptxas 12.9 shows the sum: `m8n8k4` from sm_80 on
//! is shuffles and f32 FMA; FP8 `mma` on sm_90 is two
//! f16 `mma` and an addition.

use qgemm_hal::Variant;

/// The rounding of a sum to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to even.
    NearestEven,
    /// Toward zero: keeps this many of the 23 fraction
    /// bits and clears the others.
    TowardZero {
        /// 23, or 13 when the chip's accumulator is shorter than f32.
        fraction_bits: u32,
    },
}

/// Order in which groups take the K dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order of K.
    Natural,
    /// First two of each four, then the last two. FP8 on
    /// Hopper: one f16 instruction for the lower halves of all registers,
    /// a second for the upper halves.
    PairsOfFour,
}

/// When the accumulator is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulator {
    /// Aligned and added with the first group of products.
    WithProducts,
    /// Added to the finished sum in f32, rounded to nearest even.
    After,
}

/// A sum of aligned and truncated terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aligned {
    /// Products added at once, 1 to K. The sum of one
    /// group is the accumulator of the next.
    pub group_k: usize,
    /// Bits kept below the leading bit of the largest term; at
    /// most 26. A term's exponent is the sum of its factors'
    /// exponents: products of significands are below 4 and not normalized.
    pub fraction_bits: u32,
    /// Minimum exponent for the alignment.
    pub least_exponent: i32,
    /// Rounding of a group's sum.
    pub rounding: Rounding,
    /// Order of K.
    pub order: Order,
    /// When the accumulator is added.
    pub accumulator: Accumulator,
}

/// Summation model of a matrix instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// f64 from the accumulator on, rounded to f32 once at the
    /// end. Fast, and more accurate than any chip.
    Wide,
    /// f32 FMAs from zero in K order, then the
    /// accumulator is added.
    FmaChain,
    /// As a tensor core.
    Aligned(Aligned),
}

/// Summation model of a block-scaled matrix instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledSum {
    /// f64, rounded to f32 once at the end.
    Wide,
    /// Sixteen products are added exactly and multiplied by both scales. These
    /// terms and the accumulator are aligned to the largest exponent (of
    /// a term: that of its scales), truncated to this many fraction
    /// bits, and added. The sum is truncated to f32.
    Aligned {
        /// At most 38.
        fraction_bits: u32,
    },
}

/// Summation models of a device's matrix instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// f16 in the quad-pair shape `m8n8k4`.
    pub quad_pair: Sum,
    /// f16 and bf16 in 16-row shapes.
    pub half: Sum,
    /// E4M3 and E5M2 in `mma`.
    pub fp8: Sum,
    /// E4M3 and E5M2 in `wgmma`.
    pub fp8_wgmma: Sum,
    /// Block-scaled E2M1.
    pub block_scaled: ScaledSum,
}

/// A sum truncated to all bits of f32, with the accumulator
/// in the first group and K in order.
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

    /// One model for every instruction without block scales;
    /// block-scaled ones use f64.
    pub const fn uniform(sum: Sum) -> Precision {
        Precision { quad_pair: sum, half: sum, fp8: sum, fp8_wgmma: sum, block_scaled: ScaledSum::Wide }
    }

    /// Summation models of a variant's chips. Instructions
    /// that a variant lacks use f64.
    ///
    /// Only Sm90 can be checked on a chip here. The dot
    /// products of ordinary random numbers that Khattak and Mikaitis published
    /// are equal in all bits: 5000 each of f16 on V100,
    /// f16 and bf16 on A100, Ada, H100, H200 and B200, FP8
    /// on Ada and L40S, and FP8 on B200, whose `mma` equals
    /// Sm90's. Turing, the two groups of `m16n8k16` on Ampere and Ada,
    /// and FP8 and block scales of Sm120 follow MMA-Sim.
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
