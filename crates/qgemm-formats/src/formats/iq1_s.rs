//! IQ1_S: 256 values in 70 bytes, eight sub-blocks of 32.
//! A value is `d · (2 s + 1) · (q − 1 ± 1/8)`.
//!
//! Bytes: 64 of 2-bit codes, low bits first; four of
//! nibbles, each with the 3-bit scale `s` of a sub-block
//! and, above it, a bit that is set for −1/8; d.

use super::{field, linear};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{BitField, Minimum, SubCodes, SubScales};

/// GGUF IQ1_S.
pub static IQ1_S: FormatDesc = FormatDesc {
    name: "iq1_s",
    summary: "2-bit super-blocks of 256, 3-bit scale and a shift of 1/8 per 32 (GGUF)",
    block_len: 256,
    block_bytes: 70,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntAffine,
    sub_block: 32,
    unit_range: 31.875,
    code_planes: &[2],
    scale_planes: &[
        ScalePlane { name: "scales", bytes: 4, span: 256, rows: 1 },
        ScalePlane { name: "d", bytes: 2, span: 256, rows: 1 },
    ],
    dequant: "iq1_s",
    ggml_type: None,
    is_rare: true,
    dequantize_block,
    sub_scales: SubScales {
        codes: Some(SubCodes::odd(&SCALES, 1)),
        ..SubScales::stored(
            FloatScale { offset: 4, kind: ScaleType::F16 },
            // 7/8, or 9/8 with the upper bit.
            Minimum::Eighths(SubCodes::odd(&SHIFTS, 7)),
        )
    },
    quantize_blocks: None,
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 68, kind: ScaleType::F16 }],
    unpack_block,
};

/// Bits `from ..` of each nibble.
const fn fields(from: usize, bits: usize) -> [[BitField; 2]; 8] {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 8];
    let mut sub = 0;
    while sub < 8 {
        fields[sub][0] = BitField::new(sub / 2, sub % 2 * 4 + from, bits);
        sub += 1;
    }
    fields
}
const SCALES: [[BitField; 2]; 8] = fields(0, 3);
const SHIFTS: [[BitField; 2]; 8] = fields(3, 1);

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[64..]);
    linear::unpack(2, &block[..64], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 68);
    let mut codes = [0; 256];
    linear::unpack(2, &block[..64], &mut codes);
    for (sub, (values, codes)) in out.chunks_exact_mut(32).zip(codes.chunks_exact(32)).enumerate() {
        let nibble = block[64 + sub / 2] >> (sub % 2 * 4) & 0xf;
        let scale = d * f32::from(2 * (nibble & 7) + 1);
        let less = if nibble < 8 { 0.875 } else { 1.125 };
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * (code as f32 - less);
        }
    }
}
