//! Q5_K: 256 values in 176 bytes, Q4_K
//! with a fifth bit.
//!
//! Bytes: d, dmin, 12 of scales and minima, 32
//! of fifth bits, 128 of nibbles (as Q4_K).
//! Bit `i / 32` of fifth-bit byte `i % 32` is the fifth
//! bit of value `i`.

use super::fit::AffineSearch;
use super::q4_k;
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};

/// GGUF Q5_K.
pub static Q5_K: FormatDesc = FormatDesc {
    name: "q5_k",
    summary: "5-bit super-blocks of 256, 6-bit scale and minimum per 32 (GGUF)",
    block_len: 256,
    block_bytes: 176,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntAffine,
    sub_block: 32,
    unit_range: 2016.0,
    code_planes: &[4, 1],
    scale_planes: &[ScalePlane { name: "scales", bytes: 16, span: 256, rows: 1 }],
    dequant: "q5_k",
    ggml_type: Some(13),
    is_rare: false,
    dequantize_block,
    sub_scales: q4_k::SUB_SCALES,
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }, FloatScale { offset: 2, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..16]);
    unpack_codes(block, codes);
}

fn unpack_codes(block: &[u8], codes: &mut [u32]) {
    q4_k::unpack_nibbles(&block[48..], codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= u32::from(block[16 + i % 32] >> (i / 32) & 1) << 4;
    }
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let mut codes = [0; 256];
    unpack_codes(block, &mut codes);
    q4_k::dequantize_codes(block, &codes, out);
}

const SEARCH: AffineSearch = AffineSearch { max_code: 31, first: -0.5, step: 0.1, tries: 15, cost: |v| v * v };

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(176)) {
        let codes = q4_k::quantize_codes(&SEARCH, x, &mut block[..16]);
        pack_codes(&codes, block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    let blocks = values.chunks_exact(256).zip(importance.chunks_exact(256)).zip(out.chunks_exact_mut(176));
    for ((x, importance), block) in blocks {
        let codes = q4_k::codes_by_importance(&AffineSearch::by_importance(31), x, importance, &mut block[..16]);
        pack_codes(&codes, block);
    }
}

fn pack_codes(codes: &[u32; 256], block: &mut [u8]) {
    for (l, byte) in block[16..48].iter_mut().enumerate() {
        *byte = (0..8).fold(0, |byte, i| byte | ((codes[l + 32 * i] >> 4 & 1) << i) as u8);
    }
    q4_k::pack_nibbles(codes, &mut block[48..]);
}
