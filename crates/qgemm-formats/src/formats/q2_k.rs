//! Q2_K: 256 values in 84 bytes, sixteen sub-blocks of 16. A value
//! is `d · s · q − dmin · m`, with a 4-bit scale `s` (low nibble) and
//! a 4-bit minimum `m` (high nibble).
//!
//! Bytes: 16 of sub-scales, 64 of codes, d, dmin. In each 128
//! values, byte `l` of 32 holds values `l`, `l + 32`, `l + 64` and
//! `l + 96`, low bits first.

use super::field;
use super::fit::{self, AffineSearch};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{BitField, Minimum, SubCodes, SubScales};

/// GGUF Q2_K.
pub static Q2_K: FormatDesc = FormatDesc {
    name: "q2_k",
    summary: "2-bit super-blocks of 256, 4-bit scale and minimum per 16 (GGUF)",
    block_len: 256,
    block_bytes: 84,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntAffine,
    sub_block: 16,
    unit_range: 60.0,
    code_planes: &[2],
    scale_planes: &[
        ScalePlane { name: "scales", bytes: 16, span: 256, rows: 1 },
        ScalePlane { name: "d", bytes: 4, span: 256, rows: 1 },
    ],
    dequant: "q2_k",
    ggml_type: Some(10),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales {
        codes: Some(SubCodes::unsigned(&SCALES)),
        ..SubScales::stored(
            FloatScale { offset: 16, kind: ScaleType::F16 },
            Minimum::Coded(FloatScale { offset: 18, kind: ScaleType::F16 }, SubCodes::unsigned(&MINIMA)),
        )
    },
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 80, kind: ScaleType::F16 }, FloatScale { offset: 82, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales[..16].copy_from_slice(&block[..16]);
    scales[16..].copy_from_slice(&block[80..84]);
    unpack_codes(&block[16..80], codes);
}

/// Unpacks 64 bytes of 2-bit codes. Q3_K packs its low bits the same
/// way.
pub(super) fn unpack_codes(bytes: &[u8], codes: &mut [u32]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = u32::from(bytes[i % 32] >> (i / 32 * 2) & 3);
        }
    }
}

/// Packs 2-bit codes into 64 bytes. Upper bits of the codes are
/// ignored.
pub(crate) fn pack_codes(codes: &[u32], bytes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact_mut(32).zip(codes.chunks_exact(128)) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = (0..4).fold(0, |byte, i| byte | ((codes[l + 32 * i] & 3) << (2 * i)) as u8);
        }
    }
}

/// Sub-block scales: the low nibble of each byte.
const SCALES: [[BitField; 2]; 16] = {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 16];
    let mut sub = 0;
    while sub < 16 {
        fields[sub] = [BitField::new(sub, 0, 4), BitField::new(0, 0, 0)];
        sub += 1;
    }
    fields
};

/// Sub-block minima: the high nibble of each byte.
const MINIMA: [[BitField; 2]; 16] = {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 16];
    let mut sub = 0;
    while sub < 16 {
        fields[sub] = [BitField::new(sub, 4, 4), BitField::new(0, 0, 0)];
        sub += 1;
    }
    fields
};

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (field::read_f16(block, 80), field::read_f16(block, 82));
    let mut codes = [0; 256];
    unpack_codes(&block[16..80], &mut codes);
    for (i, (value, code)) in out.iter_mut().zip(codes).enumerate() {
        let sub = block[i / 16];
        *value = d * f32::from(sub & 0xf) * code as f32 - dmin * f32::from(sub >> 4);
    }
}

/// Search of scale and minimum. Both are stored as fifteenths of the
/// super-block's maximum.
const SEARCH: AffineSearch = AffineSearch { max_code: 3, first: -0.5, step: 0.1, tries: 15, cost: f32::abs };

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(84)) {
        let mut codes = [0; 256];
        let (mut scales, mut mins) = ([0.0; 16], [0.0; 16]);
        for (sub, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
            let weights: [f32; 16] = std::array::from_fn(|i| x[i].abs());
            (scales[sub], mins[sub]) = SEARCH.fit(x, &weights, codes);
        }
        write_block(x, fifteenths(&scales), fifteenths(&mins), codes, block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    const SEARCH: AffineSearch = AffineSearch::by_importance(3);
    let blocks = values.chunks_exact(256).zip(importance.chunks_exact(256)).zip(out.chunks_exact_mut(84));
    for ((x, importance), block) in blocks {
        let variance = fit::energy(x) / 256.0;
        let mut codes = [0; 256];
        let [scales, mins] =
            fit::super_block_by_importance::<16, 16>(&SEARCH, (x, importance, variance), 15, &mut codes);
        write_block(x, scales, mins, codes, block);
    }
}

/// Writes a block of 4-bit scales and minima and their units.
///
/// Codes of sub-blocks with scale 0 are kept.
fn write_block(
    x: &[f32],
    (scales, d): ([u8; 16], f32),
    (mins, dmin): ([u8; 16], f32),
    mut codes: [u32; 256],
    block: &mut [u8],
) {
    field::write_f16(block, 80, d);
    field::write_f16(block, 82, dmin);
    let (d, dmin) = (field::read_f16(block, 80), field::read_f16(block, 82));
    for (sub, (x, codes)) in x.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        block[sub] = scales[sub] | mins[sub] << 4;
        let (scale, min) = (d * f32::from(block[sub] & 0xf), dmin * f32::from(block[sub] >> 4));
        fit::recode(x, scale, min, 0, 3, codes);
    }
    pack_codes(&codes, &mut block[16..80]);
}

/// Sixteen numbers in units of a fifteenth of their
/// maximum, and that unit.
fn fifteenths(numbers: &[f32; 16]) -> ([u8; 16], f32) {
    let max = numbers.iter().fold(0.0, |max: f32, &v| if v > max { v } else { max });
    if max <= 0.0 {
        return ([0; 16], 0.0);
    }
    let inverse = 15.0 / max;
    (numbers.map(|v| fit::nearest(inverse * v) as u8), max / 15.0)
}
