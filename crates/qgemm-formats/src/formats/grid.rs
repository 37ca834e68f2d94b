//! Grid formats: codes into a codebook of at most 16
//! numbers.
//!
//! ```text
//! block = 256 × bits / 8 bytes of codes | a 4-bit s for each sub-block | d
//! value = d · (2 s + 1) · times · table[code]
//! ```
//!
//! Code `i` is at bits `i × bits ..`, low bits first. Two
//! sub-blocks share a byte of scales, the first in the
//! low nibble. GGUF files store indices into grids of
//! four or eight numbers, which their reader looks up.

use super::{field, linear};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{BitField, Minimum, SubCodes, SubScales};

/// GGUF IQ2_XXS, IQ2_XS and IQ2_S.
pub static IQ2: FormatDesc =
    describe::<Iq2>("iq2", "3-bit codebook in super-blocks of 256, 4-bit scale per 16 (GGUF IQ2_XXS, IQ2_XS, IQ2_S)");
/// GGUF IQ3_XXS.
pub static IQ3_XXS: FormatDesc =
    describe::<Iq3Xxs>("iq3_xxs", "4-bit codebook in super-blocks of 256, 4-bit scale per 32 (GGUF)");
/// GGUF IQ3_S.
pub static IQ3_S: FormatDesc =
    describe::<Iq3S>("iq3_s", "4-bit odd integers in super-blocks of 256, 4-bit scale per 32 (GGUF)");
/// GGUF IQ1_M.
pub static IQ1_M: FormatDesc =
    describe::<Iq1M>("iq1_m", "3-bit codebook in super-blocks of 256, 4-bit scale per 16 (GGUF)");

/// Values of a block.
const BLOCK: usize = 256;

/// Numbers of one grid format.
trait Grid {
    /// Number of each code. Codes that no file has repeat a
    /// number.
    const TABLE: &'static [i8; 16];
    /// Bits of a code.
    const BITS: usize;
    /// Values that share a scale.
    const SUB_BLOCK: usize;
    /// Factor of the table.
    const TIMES: f32;

    /// Bytes of the codes.
    const CODES: usize = BLOCK * Self::BITS / 8;
    /// Bytes of the sub-block scales.
    const SCALES: usize = BLOCK / Self::SUB_BLOCK / 2;
    const SCALE_PLANES: &'static [ScalePlane] = &[
        ScalePlane { name: "scales", bytes: Self::SCALES, span: BLOCK, rows: 1 },
        ScalePlane { name: "d", bytes: 2, span: BLOCK, rows: 1 },
    ];
    const FLOAT_SCALES: &'static [FloatScale] =
        &[FloatScale { offset: Self::CODES + Self::SCALES, kind: ScaleType::F16 }];
}

/// Magnitude in the low two bits, sign above.
struct Iq2;
impl Grid for Iq2 {
    const TABLE: &'static [i8; 16] = &[8, 25, 43, 43, -8, -25, -43, -43, 8, 25, 43, 43, -8, -25, -43, -43];
    const BITS: usize = 3;
    const SUB_BLOCK: usize = 16;
    const TIMES: f32 = 0.125;
}

/// Magnitude in the low three bits, sign above.
struct Iq3Xxs;
impl Grid for Iq3Xxs {
    const TABLE: &'static [i8; 16] = &[4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
    const BITS: usize = 4;
    const SUB_BLOCK: usize = 32;
    const TIMES: f32 = 0.25;
}

/// Magnitude in the low three bits, sign above.
struct Iq3S;
impl Grid for Iq3S {
    const TABLE: &'static [i8; 16] = &[1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];
    const BITS: usize = 4;
    const SUB_BLOCK: usize = 32;
    const TIMES: f32 = 1.0;
}

/// Eighths of −1, 0 and 1 in the low two bits, plus 1/8,
/// or minus 1/8 if the bit above is set.
struct Iq1M;
impl Grid for Iq1M {
    const TABLE: &'static [i8; 16] = &[-7, 1, 9, 9, -9, -1, 7, 7, -7, 1, 9, 9, -9, -1, 7, 7];
    const BITS: usize = 3;
    const SUB_BLOCK: usize = 16;
    const TIMES: f32 = 0.125;
}

/// Low nibble, then high nibble, of consecutive bytes.
const NIBBLES: [[BitField; 2]; 16] = {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 16];
    let mut sub = 0;
    while sub < 16 {
        fields[sub][0] = BitField::new(sub / 2, sub % 2 * 4, 4);
        sub += 1;
    }
    fields
};

/// Description of a format, whose kernels' stem is its
/// name.
const fn describe<G: Grid>(name: &'static str, summary: &'static str) -> FormatDesc {
    FormatDesc {
        name,
        summary,
        block_len: BLOCK,
        block_bytes: G::CODES + G::SCALES + 2,
        ragged_k: false,
        row_scale: false,
        encoding: Encoding::Codebook(G::TABLE),
        sub_block: G::SUB_BLOCK,
        unit_range: largest(G::TABLE) * 31.0 * G::TIMES,
        code_planes: if G::BITS == 3 { &[2, 1] } else { &[4] },
        scale_planes: G::SCALE_PLANES,
        dequant: name,
        ggml_type: None,
        is_rare: true,
        dequantize_block: dequantize_block::<G>,
        sub_scales: SubScales {
            factor: Some(FloatScale { offset: G::SCALES, kind: ScaleType::F16 }),
            times: G::TIMES,
            codes: Some(SubCodes::odd(&NIBBLES, 1)),
            minimum: Minimum::Offset(0),
        },
        quantize_blocks: None,
        quantize_matrix: None,
        float_scales: G::FLOAT_SCALES,
        unpack_block: unpack_block::<G>,
    }
}

/// Largest magnitude of a table.
const fn largest(table: &[i8; 16]) -> f32 {
    let (mut largest, mut i) = (0, 0);
    while i < table.len() {
        let magnitude = table[i].unsigned_abs();
        largest = if magnitude > largest { magnitude } else { largest };
        i += 1;
    }
    largest as f32
}

fn unpack_block<G: Grid>(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    let (packed, records) = block.split_at(G::CODES);
    scales.copy_from_slice(records);
    linear::unpack(G::BITS, packed, codes);
}

fn dequantize_block<G: Grid>(block: &[u8], out: &mut [f32]) {
    let mut codes = [0; BLOCK];
    linear::unpack(G::BITS, &block[..G::CODES], &mut codes);
    let scales = &block[G::CODES..][..G::SCALES];
    let d = field::read_f16(block, G::CODES + G::SCALES);
    for (sub, (values, codes)) in out.chunks_exact_mut(G::SUB_BLOCK).zip(codes.chunks(G::SUB_BLOCK)).enumerate() {
        let s = scales[sub / 2] >> (sub % 2 * 4) & 0xf;
        let scale = d * f32::from(2 * s + 1) * G::TIMES;
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * f32::from(G::TABLE[code as usize]);
        }
    }
}
