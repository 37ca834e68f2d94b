//! Q3_K: 256 values in 110 bytes, sixteen sub-blocks
//! of 16. A value is `d · (s − 32) · (q − 4)`
//! with a 6-bit scale.
//!
//! Bytes: 32 of high bits, 64 of low bits (as Q2_K),
//! 12 of scales, d. Bit `i / 32` of high byte `i % 32`
//! is the high bit of value `i`.

use super::{field, fit, q2_k};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{BitField, Minimum, SubCodes, SubScales};

/// GGUF Q3_K.
pub static Q3_K: FormatDesc = FormatDesc {
    name: "q3_k",
    summary: "3-bit super-blocks of 256, 6-bit scale per 16 (GGUF)",
    block_len: 256,
    block_bytes: 110,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntOffset { offset: 4 },
    sub_block: 16,
    unit_range: 128.0,
    code_planes: &[2, 1],
    scale_planes: &[
        ScalePlane { name: "scales", bytes: 12, span: 256, rows: 1 },
        ScalePlane { name: "d", bytes: 2, span: 256, rows: 1 },
    ],
    dequant: "q3_k",
    ggml_type: Some(11),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales {
        codes: Some(SubCodes::less(&SCALES, 32)),
        ..SubScales::stored(FloatScale { offset: 12, kind: ScaleType::F16 }, Minimum::Offset(4))
    },
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 108, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[96..110]);
    unpack_codes(block, codes);
}

fn unpack_codes(block: &[u8], codes: &mut [u32]) {
    q2_k::unpack_codes(&block[32..96], codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= u32::from(block[i % 32] >> (i / 32) & 1) << 2;
    }
}

/// Scale of sub-block `sub`, −32..=31.
///
/// Low nibbles are in bytes 0–7: the low half for
/// sub-blocks 0–7, the high half for 8–15.
/// The two upper bits are in bytes 8–11, four
/// sub-blocks a shift.
fn sub_scale(scales: &[u8], sub: usize) -> i32 {
    let low = scales[sub % 8] >> (sub / 8 * 4) & 0xf;
    let high = scales[8 + sub % 4] >> (sub / 4 * 2) & 3;
    i32::from(low | high << 4) - 32
}

/// Bit fields of the scales, for [`sub_scale`].
const SCALES: [[BitField; 2]; 16] = {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 16];
    let mut sub = 0;
    while sub < 16 {
        fields[sub] = [BitField::new(sub % 8, sub / 8 * 4, 4), BitField::new(8 + sub % 4, sub / 4 * 2, 2)];
        sub += 1;
    }
    fields
};

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 108);
    let mut codes = [0; 256];
    unpack_codes(block, &mut codes);
    for (i, (value, code)) in out.iter_mut().zip(codes).enumerate() {
        *value = d * sub_scale(&block[96..108], i / 16) as f32 * (code as i32 - 4) as f32;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(110)) {
        let mut codes = [0; 256];
        let mut scales = [0.0; 16];
        for (sub, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
            scales[sub] = fit::symmetric_descent(x, 4, codes);
        }
        // The signed scale of largest magnitude maps to −32.
        let extreme = field::extreme(&scales);
        let (scales, d) = if extreme == 0.0 {
            ([0; 16], 0.0)
        } else {
            let inverse = -32.0 / extreme;
            (scales.map(|scale| (fit::nearest(inverse * scale).clamp(-32, 31) + 32) as u32), 1.0 / inverse)
        };
        write_block(x, scales, d, codes, block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    let blocks = values.chunks_exact(256).zip(importance.chunks_exact(256)).zip(out.chunks_exact_mut(110));
    for ((x, importance), block) in blocks {
        let variance = 2.0 * fit::energy(x) / 256.0;
        let mut codes = [0; 256];
        let (mut scales, mut totals) = ([0.0; 16], [0.0; 16]);
        let subs = x.chunks_exact(16).zip(importance.chunks_exact(16)).zip(codes.chunks_exact_mut(16));
        for (sub, ((x, importance), codes)) in subs.enumerate() {
            let weights: [f32; 16] = fit::weigh(x, importance, variance);
            totals[sub] = fit::total(&weights);
            scales[sub] = fit::symmetric(x, &weights, 4, codes);
        }
        let mut coded = [0; 16];
        let d = fit::symmetric(&scales, &totals, 32, &mut coded);
        write_block(x, coded, d, codes, block);
    }
}

/// Writes a block of 6-bit scales (plus 32) and their unit.
///
/// Codes of sub-blocks with scale 0 are kept.
fn write_block(x: &[f32], scales: [u32; 16], d: f32, mut codes: [u32; 256], block: &mut [u8]) {
    block[96..108].fill(0);
    for (sub, &scale) in scales.iter().enumerate() {
        block[96 + sub % 8] |= (scale as u8 & 0xf) << (sub / 8 * 4);
        block[104 + sub % 4] |= (scale as u8) >> 4 << (sub / 4 * 2);
    }
    field::write_f16(block, 108, d);
    let d = field::read_f16(block, 108);
    for (sub, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        fit::recode(x, d * sub_scale(&block[96..108], sub) as f32, 0.0, -4, 7, codes);
    }
    q2_k::pack_codes(&codes, &mut block[32..96]);
    for (l, byte) in block[..32].iter_mut().enumerate() {
        *byte = (0..8).fold(0, |byte, i| byte | ((codes[l + 32 * i] >> 2 & 1) << i) as u8);
    }
}
