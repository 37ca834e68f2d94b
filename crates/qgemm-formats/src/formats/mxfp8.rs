//! MXFP8 (OCP microscaling): E4M3 or E5M2 in blocks of
//! 32 with an E8M0 scale.
//!
//! ```text
//! block = 32 codes | e8m0      value = 2^(e8m0 − 127) · e4m3(code), or e5m2(code)
//! ```
//!
//! Scales of 32×32 blocks are stored as well: each row has a copy
//! of the scale. A row may end inside a block.

use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::float8::{E4M3_MAX, E5M2_MAX, e4m3_to_f32, e5m2_to_f32, e8m0_to_f32, f32_to_e4m3, f32_to_e5m2};
use crate::formats::matrix;
use crate::sub_scale::{Minimum, SubScales};

/// Values per scale.
pub const SCALE_BLOCK: usize = 32;
/// Exponents of the largest finite numbers, and their
/// common fraction as f32 bits. A larger fraction at
/// that exponent overflows.
const E4M3_EXPONENT: u32 = 8;
const E5M2_EXPONENT: u32 = 15;
const MAX_FRACTION: u32 = 0x60_0000;

/// E4M3 with one E8M0 scale per 32 values.
pub static MXFP8: FormatDesc = FormatDesc {
    name: "mxfp8",
    summary: "8-bit float E4M3, one power-of-two E8M0 scale per 32 (OCP) or per 32x32 block",
    block_len: SCALE_BLOCK,
    block_bytes: SCALE_BLOCK + 1,
    ragged_k: true,
    row_scale: false,
    encoding: Encoding::E4M3,
    sub_block: SCALE_BLOCK,
    unit_range: E4M3_MAX,
    code_planes: &[8],
    scale_planes: &[ScalePlane { name: "d", bytes: 1, span: SCALE_BLOCK, rows: 1 }],
    dequant: "mxfp8",
    ggml_type: None,
    is_rare: false,
    dequantize_block: |block, out| dequantize(block, out, e4m3_to_f32),
    sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::E8M0 }, Minimum::Offset(0)),
    quantize_blocks: Some(|values, out| quantize(values, out, E4M3_EXPONENT, f32_to_e4m3)),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: SCALE_BLOCK, kind: ScaleType::E8M0 }],
    unpack_block,
};

/// E5M2 with one E8M0 scale per 32 values.
pub static MXFP8_E5M2: FormatDesc = FormatDesc {
    name: "mxfp8_e5m2",
    summary: "8-bit float E5M2, one power-of-two E8M0 scale per 32 (OCP) or per 32x32 block",
    encoding: Encoding::E5M2,
    unit_range: E5M2_MAX,
    dequant: "mxfp8_e5m2",
    dequantize_block: |block, out| dequantize(block, out, e5m2_to_f32),
    quantize_blocks: Some(|values, out| quantize(values, out, E5M2_EXPONENT, f32_to_e5m2)),
    ..MXFP8
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    for (code, &byte) in codes.iter_mut().zip(block) {
        *code = u32::from(byte);
    }
    scales[0] = block[SCALE_BLOCK];
}

fn dequantize(block: &[u8], out: &mut [f32], decode: fn(u8) -> f32) {
    let scale = e8m0_to_f32(block[SCALE_BLOCK]);
    for (value, &code) in out.iter_mut().zip(block) {
        *value = scale * decode(code);
    }
}

/// Quantizes to nearest even with the smallest power-of-two scale
/// that does not overflow, at least 2⁻¹²⁶.
///
/// `exponent` is that of the largest finite number.
fn quantize(values: &[f32], out: &mut [u8], exponent: u32, encode: fn(f32) -> u8) {
    for (x, block) in values.chunks_exact(SCALE_BLOCK).zip(out.chunks_exact_mut(SCALE_BLOCK + 1)) {
        let bits = matrix::absmax(x).to_bits();
        let beyond = u32::from(bits & 0x7f_ffff > MAX_FRACTION);
        let scale = ((bits >> 23) + beyond).saturating_sub(exponent).max(1);
        block[SCALE_BLOCK] = scale as u8;
        let inverse = f32::from_bits((254 - scale) << 23);
        for (code, &v) in block.iter_mut().zip(x) {
            *code = encode(v * inverse);
        }
    }
}
