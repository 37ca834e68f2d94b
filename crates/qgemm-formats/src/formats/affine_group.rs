//! Affine groups: 2 to 8-bit codes with an f16 scale and
//! addend, `d · (q − center) + m`. MLX checkpoints have
//! center 0, torchao's int4 has 8.
//!
//! ```text
//! block = group × bits / 8 bytes of codes | f16 d | f16 m
//! ```
//!
//! Code `i` is at bits `i × bits ..`, low bits first.
//! Scales of other types are f16 numbers times a power of
//! two of their row, which is its row scale.

use half::f16;

use super::{field, linear};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// Defines one `static` per name.
macro_rules! affine_groups {
    ($($static:ident = $bits:literal, $group:literal, $center:literal, $name:literal, $what:literal;)*) => {
        $(
            #[doc = concat!($bits, "-bit integers in groups of ", $group, ", ", $what, ".")]
            pub static $static: FormatDesc = AffineGroup::<$bits, $group, $center>::desc(
                $name,
                concat!($bits, "-bit, f16 scale and addend per ", $group, ", f32 scale per row (", $what, ")"),
            );
        )*
    };
}

affine_groups! {
    AFFINE2_G64 = 2, 64, 0, "affine2_g64", "MLX";
    AFFINE3_G64 = 3, 64, 0, "affine3_g64", "MLX";
    AFFINE4_G64 = 4, 64, 0, "affine4_g64", "MLX";
    AFFINE5_G64 = 5, 64, 0, "affine5_g64", "MLX";
    AFFINE6_G64 = 6, 64, 0, "affine6_g64", "MLX";
    AFFINE8_G32 = 8, 32, 0, "affine8_g32", "MLX";
    AFFINE8_G64 = 8, 64, 0, "affine8_g64", "MLX";
    CENTERED4_G32 = 4, 32, 8, "centered4_g32", "torchao";
    CENTERED4_G64 = 4, 64, 8, "centered4_g64", "torchao";
}

/// Bytes of a block's scale and addend.
const SCALES: usize = 4;

/// Writes one block of codes that are packed already. `scales`
/// are scale and addend.
pub(crate) fn write_block(codes: &[u8], scales: [f16; 2], block: &mut [u8]) {
    let (packed, records) = block.split_at_mut(codes.len());
    packed.copy_from_slice(codes);
    records[..2].copy_from_slice(&scales[0].to_le_bytes());
    records[2..].copy_from_slice(&scales[1].to_le_bytes());
}

/// Block functions of one width, group and center.
struct AffineGroup<const BITS: usize, const GROUP: usize, const CENTER: i32>;

impl<const BITS: usize, const GROUP: usize, const CENTER: i32> AffineGroup<BITS, GROUP, CENTER> {
    const CODES: usize = GROUP * BITS / 8;
    const SCALE_PLANES: &'static [ScalePlane] = &[ScalePlane { name: "d", bytes: SCALES, span: GROUP, rows: 1 }];
    /// The addend among the records.
    const ADDEND: FloatScale = FloatScale { offset: 2, kind: ScaleType::F16 };
    const FLOAT_SCALES: &'static [FloatScale] = &[
        FloatScale { offset: Self::CODES, kind: ScaleType::F16 },
        FloatScale { offset: Self::CODES + 2, kind: ScaleType::F16 },
    ];

    const fn desc(name: &'static str, summary: &'static str) -> FormatDesc {
        FormatDesc {
            name,
            summary,
            block_len: GROUP,
            block_bytes: Self::CODES + SCALES,
            ragged_k: false,
            row_scale: true,
            encoding: Encoding::IntAffine,
            sub_block: GROUP,
            // The code farthest from the center, and the addend.
            unit_range: if CENTER == 0 { (1u32 << BITS) as f32 } else { (CENTER + 1) as f32 },
            code_planes: match BITS {
                2 => &[2],
                3 => &[2, 1],
                4 => &[4],
                5 => &[4, 1],
                6 => &[4, 2],
                _ => &[8],
            },
            scale_planes: Self::SCALE_PLANES,
            dequant: if CENTER == 0 { "affine_group" } else { "centered_group" },
            ggml_type: None,
            is_rare: true,
            dequantize_block: Self::dequantize_block,
            sub_scales: SubScales::stored(
                FloatScale { offset: 0, kind: ScaleType::F16 },
                if CENTER == 0 { Minimum::Stored(Self::ADDEND) } else { Minimum::Centered(Self::ADDEND, CENTER) },
            ),
            quantize_blocks: None,
            quantize_matrix: None,
            float_scales: Self::FLOAT_SCALES,
            unpack_block: Self::unpack_block,
        }
    }

    fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
        let (packed, records) = block.split_at(Self::CODES);
        scales.copy_from_slice(records);
        linear::unpack(BITS, packed, codes);
    }

    fn dequantize_block(block: &[u8], out: &mut [f32]) {
        let mut codes = [0; GROUP];
        linear::unpack(BITS, &block[..Self::CODES], &mut codes);
        let (d, m) = (field::read_f16(block, Self::CODES), field::read_f16(block, Self::CODES + 2));
        for (value, code) in out.iter_mut().zip(codes) {
            *value = (code as i32 - CENTER) as f32 * d + m;
        }
    }
}
