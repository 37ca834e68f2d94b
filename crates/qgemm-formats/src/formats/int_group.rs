//! Integer groups: 2, 3, 4 or 8-bit codes in
//! groups of 32, 64 or 128, with an f16 scale and
//! an integer zero point. GPTQ and AWQ checkpoints are
//! converted to them.
//!
//! ```text
//! block = group × bits / 8 bytes of codes | f16 scale | u8 zero point        value = scale · (code − zero)
//! ```
//!
//! Code `i` is at bits `i × bits ..` of the code bytes,
//! low bits first, in K order. 3-bit codes therefore
//! straddle bytes. The zero point is at most one past
//! the largest code; 8-bit zero points are any byte.
//! A row may end inside a group, whose remaining codes
//! equal the zero point.

use half::f16;

use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// Defines one `static` per name.
macro_rules! int_groups {
    ($($static:ident = $bits:literal, $group:literal, $name:literal, $stem:literal;)*) => {
        $(
            #[doc = concat!($bits, "-bit integers in groups of ", $group, ".")]
            pub static $static: FormatDesc = IntGroup::<$bits, $group>::desc(
                $name,
                concat!($bits, "-bit, f16 scale and zero point per ", $group, " (GPTQ, AWQ)"),
                $stem,
            );
        )*
    };
}

int_groups! {
    INT2_G32 = 2, 32, "int2_g32", "int2";
    INT2_G64 = 2, 64, "int2_g64", "int2";
    INT2_G128 = 2, 128, "int2_g128", "int2";
    INT3_G32 = 3, 32, "int3_g32", "int3";
    INT3_G64 = 3, 64, "int3_g64", "int3";
    INT3_G128 = 3, 128, "int3_g128", "int3";
    INT4_G32 = 4, 32, "int4_g32", "int4";
    INT4_G64 = 4, 64, "int4_g64", "int4";
    INT4_G128 = 4, 128, "int4_g128", "int4";
    INT8_G32 = 8, 32, "int8_g32", "int8";
    INT8_G64 = 8, 64, "int8_g64", "int8";
    INT8_G128 = 8, 128, "int8_g128", "int8";
}

/// Writes one block. `codes` has one entry per value
/// of the group, each below `2^bits`.
pub(crate) fn write_block(bits: usize, codes: &[u8], scale: f16, zero: u8, block: &mut [u8]) {
    let (code_bytes, tail) = block.split_at_mut(codes.len() * bits / 8);
    // Eight codes fill `bits` bytes at any width.
    for (octet, bytes) in codes.chunks_exact(8).zip(code_bytes.chunks_exact_mut(bits)) {
        let word = octet.iter().enumerate().fold(0u64, |word, (i, &code)| word | u64::from(code) << (i * bits));
        bytes.copy_from_slice(&word.to_le_bytes()[..bits]);
    }
    tail[..2].copy_from_slice(&scale.to_le_bytes());
    tail[2] = zero;
}

/// Block functions of one width and group.
struct IntGroup<const BITS: usize, const GROUP: usize>;

impl<const BITS: usize, const GROUP: usize> IntGroup<BITS, GROUP> {
    const CODE_BYTES: usize = GROUP * BITS / 8;
    const MAX_CODE: u8 = ((1u16 << BITS) - 1) as u8;
    const SCALE_PLANES: &'static [ScalePlane] = &[
        ScalePlane { name: "d", bytes: 2, span: GROUP, rows: 1 },
        ScalePlane { name: "z", bytes: 1, span: GROUP, rows: 1 },
    ];
    const FLOAT_SCALES: &'static [FloatScale] = &[FloatScale { offset: Self::CODE_BYTES, kind: ScaleType::F16 }];

    const fn desc(name: &'static str, summary: &'static str, stem: &'static str) -> FormatDesc {
        FormatDesc {
            name,
            summary,
            block_len: GROUP,
            block_bytes: Self::CODE_BYTES + 3,
            ragged_k: true,
            row_scale: false,
            encoding: Encoding::IntZero,
            sub_block: GROUP,
            // Code 0 minus the largest zero point. 8-bit zero
            // points are any byte.
            unit_range: if BITS == 8 { 255.0 } else { (1u32 << BITS) as f32 },
            code_planes: match BITS {
                2 => &[2],
                3 => &[2, 1],
                4 => &[4],
                _ => &[8],
            },
            scale_planes: Self::SCALE_PLANES,
            dequant: stem,
            ggml_type: None,
            is_rare: false,
            dequantize_block: Self::dequantize_block,
            sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Zero(2)),
            quantize_blocks: Some(Self::quantize_blocks),
            quantize_matrix: None,
            float_scales: Self::FLOAT_SCALES,
            unpack_block: Self::unpack_block,
        }
    }

    /// The eight codes of `octet`, one a byte.
    fn octet_codes(octet: &[u8]) -> [u8; 8] {
        let mut word = [0u8; 8];
        word[..BITS].copy_from_slice(octet);
        let word = u64::from_le_bytes(word);
        std::array::from_fn(|i| (word >> (i * BITS)) as u8 & Self::MAX_CODE)
    }

    fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
        let (code_bytes, tail) = block.split_at(Self::CODE_BYTES);
        for (octet, codes) in code_bytes.chunks_exact(BITS).zip(codes.chunks_exact_mut(8)) {
            for (to, code) in codes.iter_mut().zip(Self::octet_codes(octet)) {
                *to = u32::from(code);
            }
        }
        scales.copy_from_slice(&tail[..3]);
    }

    fn dequantize_block(block: &[u8], out: &mut [f32]) {
        let (code_bytes, tail) = block.split_at(Self::CODE_BYTES);
        let scale = f16::from_le_bytes([tail[0], tail[1]]).to_f32();
        let zero = i32::from(tail[2]);
        for (octet, values) in code_bytes.chunks_exact(BITS).zip(out.chunks_exact_mut(8)) {
            for (value, code) in values.iter_mut().zip(Self::octet_codes(octet)) {
                *value = scale * (i32::from(code) - zero) as f32;
            }
        }
    }

    /// Asymmetric quantization of the range
    /// `[min(x, 0), max(x, 0)]` with `2^bits − 1` steps.
    ///
    /// The scale is rounded to f16 first. The zero point is
    /// the step nearest to 0, so 0 is exact.
    fn quantize_blocks(values: &[f32], out: &mut [u8]) {
        let mut codes = [0u8; GROUP];
        let max_code = f32::from(Self::MAX_CODE);
        for (x, block) in values.chunks_exact(GROUP).zip(out.chunks_exact_mut(Self::CODE_BYTES + 3)) {
            let (low, high) = x.iter().fold((0.0f32, 0.0f32), |(low, high), &v| (low.min(v), high.max(v)));
            // Halving first keeps `high − low` finite.
            // A step beyond f16 becomes an infinite scale, which
            // the caller refuses.
            let step = (high / 2.0 - low / 2.0) / max_code * 2.0;
            let scale = f16::from_f32(step);
            let step = scale.to_f32();
            let zero = if step == 0.0 { 0.0 } else { (-low / step).round_ties_even().clamp(0.0, max_code) };
            for (code, &v) in codes.iter_mut().zip(x) {
                *code = if step == 0.0 { 0 } else { (v / step + zero).round_ties_even().clamp(0.0, max_code) as u8 };
            }
            write_block(BITS, &codes, scale, zero as u8, block);
        }
    }
}
