//! Q4_K: 256 values in 144 bytes: eight sub-blocks of 32, each `d · s · q − dmin · m` with 6-bit `s` and `m`.
//!
//! Bytes: d, dmin, 12 of scales and minima ([`scale_min`]), 128 of nibbles. Of each 64 values, byte `l` of 32
//! holds value `l` below value `l + 32`.

use super::{field, scale_min};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};

/// GGUF Q4_K.
pub static Q4_K: FormatDesc = FormatDesc {
    name: "q4_k",
    summary: "4-bit super-blocks of 256, 6-bit scale and minimum per 32 (GGUF)",
    block_len: 256,
    block_bytes: 144,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntAffine,
    sub_block: 32,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "scales", bytes: 16, span: 256, rows: 1 }],
    dequant: "q4_k",
    ggml_type: Some(12),
    dequantize_block,
    quantize_blocks: None,
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }, FloatScale { offset: 2, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..16]);
    unpack_nibbles(&block[16..], codes);
}

/// Spreads 128 bytes of nibbles into 256 codes; Q5_K keeps its low bits the same way.
pub(super) fn unpack_nibbles(bytes: &[u8], codes: &mut [u32]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        for (l, &byte) in bytes.iter().enumerate() {
            codes[l] = u32::from(byte & 0xf);
            codes[l + 32] = u32::from(byte >> 4);
        }
    }
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let mut codes = [0; 256];
    unpack_nibbles(&block[16..], &mut codes);
    dequantize_codes(block, &codes, out);
}

/// The values of 256 codes under the 16 scale bytes that Q4_K and Q5_K begin with.
pub(super) fn dequantize_codes(scales: &[u8], codes: &[u32], out: &mut [f32]) {
    let (d, dmin) = (field::read_f16(scales, 0), field::read_f16(scales, 2));
    for (sub, (values, codes)) in out.chunks_exact_mut(32).zip(codes.chunks_exact(32)).enumerate() {
        let (scale, min) = scale_min::unpack(&scales[4..16], sub);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * code as f32 - min;
        }
    }
}
