//! Q6_K: 256 values in 210 bytes, sixteen sub-blocks
//! of 16. A value is `d · s · (q − 32)` with
//! a signed 8-bit scale.
//!
//! Bytes: 128 of low nibbles, 64 of upper bit pairs, 16
//! scales, d. In each 128 values, nibble byte `l` of 64
//! holds value `l` (low) and value `l + 64` (high).
//! Pair byte `l` of 32 holds values `l`, `l + 32`,
//! `l + 64` and `l + 96`, low bits first.

use super::{field, fit};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{BitField, Minimum, SubCodes, SubScales};

/// GGUF Q6_K.
pub static Q6_K: FormatDesc = FormatDesc {
    name: "q6_k",
    summary: "6-bit super-blocks of 256, 8-bit scale per 16 (GGUF)",
    block_len: 256,
    block_bytes: 210,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntOffset { offset: 32 },
    sub_block: 16,
    unit_range: 4096.0,
    code_planes: &[4, 2],
    scale_planes: &[
        ScalePlane { name: "scales", bytes: 16, span: 256, rows: 1 },
        ScalePlane { name: "d", bytes: 2, span: 256, rows: 1 },
    ],
    dequant: "q6_k",
    ggml_type: Some(14),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales {
        codes: Some(SubCodes { fields: &SCALES, flip: 0x80, shift: 0, offset: 128 }),
        ..SubScales::stored(FloatScale { offset: 16, kind: ScaleType::F16 }, Minimum::Offset(32))
    },
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 208, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[192..210]);
    unpack_codes(block, codes);
}

fn unpack_codes(block: &[u8], codes: &mut [u32]) {
    for (half, codes) in codes.chunks_exact_mut(128).enumerate() {
        let (low, high) = (&block[half * 64..][..64], &block[128 + half * 32..][..32]);
        for (i, code) in codes.iter_mut().enumerate() {
            let low = low[i % 64] >> (i / 64 * 4) & 0xf;
            let high = high[i % 32] >> (i / 32 * 2) & 3;
            *code = u32::from(low | high << 4);
        }
    }
}

/// Sub-block scales, one byte each.
const SCALES: [[BitField; 2]; 16] = {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 16];
    let mut sub = 0;
    while sub < 16 {
        fields[sub] = [BitField::new(sub, 0, 8), BitField::new(0, 0, 0)];
        sub += 1;
    }
    fields
};

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 208);
    let mut codes = [0; 256];
    unpack_codes(block, &mut codes);
    for (i, (value, code)) in out.iter_mut().zip(codes).enumerate() {
        *value = d * f32::from(block[192 + i / 16] as i8) * (code as i32 - 32) as f32;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(210)) {
        quantize_block(x, &fit::squares::<256>(x), block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    let blocks = values.chunks_exact(256).zip(importance.chunks_exact(256)).zip(out.chunks_exact_mut(210));
    // Unlike in other formats, values do not add to their weight.
    blocks.for_each(|((x, importance), block)| quantize_block(x, importance, block));
}

fn quantize_block(x: &[f32], weights: &[f32], block: &mut [u8]) {
    let mut codes = [0; 256];
    let mut scales = [0.0; 16];
    let subs = x.chunks_exact(16).zip(weights.chunks_exact(16)).zip(codes.chunks_exact_mut(16));
    for (scale, ((x, weights), codes)) in scales.iter_mut().zip(subs) {
        *scale = fit::symmetric(x, weights, 32, codes);
    }
    // The signed scale of largest magnitude maps to −128.
    let extreme = field::extreme(&scales);
    if extreme.abs() < fit::ZERO {
        block.fill(0);
        return;
    }
    let inverse = -128.0 / extreme;
    field::write_f16(block, 208, 1.0 / inverse);
    let d = field::read_f16(block, 208);
    for (sub, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        let scale = fit::nearest(inverse * scales[sub]).min(127) as i8;
        block[192 + sub] = scale as u8;
        fit::recode(x, d * f32::from(scale), 0.0, -32, 63, codes);
    }
    pack_codes(&codes, block);
}

fn pack_codes(codes: &[u32], block: &mut [u8]) {
    let (low, rest) = block.split_at_mut(128);
    for ((low, high), codes) in low.chunks_exact_mut(64).zip(rest.chunks_exact_mut(32)).zip(codes.chunks_exact(128)) {
        for (l, byte) in low.iter_mut().enumerate() {
            *byte = (codes[l] & 0xf | (codes[l + 64] & 0xf) << 4) as u8;
        }
        for (l, byte) in high.iter_mut().enumerate() {
            *byte = (0..4).fold(0, |byte, i| byte | ((codes[l + 32 * i] >> 4) << (2 * i)) as u8);
        }
    }
}
