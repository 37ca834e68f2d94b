//! Q4_K: 256 values in 144 bytes, eight sub-blocks of 32.
//! A value is `d · s · q − dmin · m` with 6-bit `s` and `m`.
//!
//! Bytes: d, dmin, 12 of scales and minima (see
//! `scale_min.rs`), 128 of nibbles. In each 64 values, byte `l`
//! of 32 holds value `l` (low) and value `l + 32` (high).

use super::fit::{self, AffineSearch};
use super::{field, scale_min};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubCodes, SubScales};

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
    unit_range: 1008.0,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "scales", bytes: 16, span: 256, rows: 1 }],
    dequant: "q4_k",
    ggml_type: Some(12),
    is_rare: false,
    dequantize_block,
    sub_scales: SUB_SCALES,
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }, FloatScale { offset: 2, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..16]);
    unpack_nibbles(&block[16..], codes);
}

/// Unpacks 128 bytes of nibbles into 256 codes. Q5_K packs its
/// low bits the same way.
pub(super) fn unpack_nibbles(bytes: &[u8], codes: &mut [u32]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        for (l, &byte) in bytes.iter().enumerate() {
            codes[l] = u32::from(byte & 0xf);
            codes[l + 32] = u32::from(byte >> 4);
        }
    }
}

/// Packs the low four bits of 256 codes into 128 bytes.
pub(super) fn pack_nibbles(codes: &[u32], bytes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact_mut(32).zip(codes.chunks_exact(64)) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = (codes[l] & 0xf | (codes[l + 32] & 0xf) << 4) as u8;
        }
    }
}

/// Sub-block scales and minima of Q4_K and Q5_K, from the first
/// 16 bytes of a block.
pub(super) const SUB_SCALES: SubScales = SubScales {
    codes: Some(SubCodes::unsigned(&scale_min::SCALES)),
    ..SubScales::stored(
        FloatScale { offset: 0, kind: ScaleType::F16 },
        Minimum::Coded(FloatScale { offset: 2, kind: ScaleType::F16 }, SubCodes::unsigned(&scale_min::MINIMA)),
    )
};

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let mut codes = [0; 256];
    unpack_nibbles(&block[16..], &mut codes);
    dequantize_codes(block, &codes, out);
}

/// Dequantizes 256 codes with the 16 scale bytes at the start
/// of a Q4_K or Q5_K block.
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

const SEARCH: AffineSearch = AffineSearch { max_code: 15, first: -1.0, step: 0.1, tries: 20, cost: |v| v * v };

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(144)) {
        let codes = quantize_codes(&SEARCH, x, &mut block[..16]);
        pack_nibbles(&codes, &mut block[16..]);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    let blocks = values.chunks_exact(256).zip(importance.chunks_exact(256)).zip(out.chunks_exact_mut(144));
    for ((x, importance), block) in blocks {
        let codes = codes_by_importance(&AffineSearch::by_importance(15), x, importance, &mut block[..16]);
        pack_nibbles(&codes, &mut block[16..]);
    }
}

/// Quantizes 256 values as [`quantize_codes`], with errors weighted
/// by the importance of the columns.
pub(super) fn codes_by_importance(
    search: &AffineSearch,
    x: &[f32],
    importance: &[f32],
    header: &mut [u8],
) -> [u32; 256] {
    let variance = 2.0 * fit::energy(x) / 256.0;
    let mut codes = [0; 256];
    let coded = fit::super_block_by_importance::<32, 8>(search, (x, importance, variance), 63, &mut codes);
    let [scales, mins] = coded.map(|(codes, unit)| (codes.map(|code| code.min(63)), unit));
    write_scales(x, scales, mins, search.max_code, header, &mut codes);
    codes
}

/// Quantizes 256 values to codes and the 16 scale bytes at
/// the start of a Q4_K or Q5_K block.
///
/// A value's weight in the search is its magnitude plus the
/// RMS of its sub-block.
pub(super) fn quantize_codes(search: &AffineSearch, x: &[f32], header: &mut [u8]) -> [u32; 256] {
    let mut codes = [0; 256];
    let (mut scales, mut mins) = ([0.0; 8], [0.0; 8]);
    for (sub, (x, codes)) in x.chunks_exact(32).zip(codes.chunks_exact_mut(32)).enumerate() {
        let rms = (x.iter().fold(0.0, |sum, v| sum + v * v) / 32.0).sqrt();
        let weights: [f32; 32] = std::array::from_fn(|i| rms + x[i].abs());
        (scales[sub], mins[sub]) = search.fit(x, &weights, codes);
    }
    write_scales(x, sixty_thirds(&scales), sixty_thirds(&mins), search.max_code, header, &mut codes);
    codes
}

/// Writes 6-bit scales and minima with their units, and
/// requantizes the codes of non-zero scales by them.
fn write_scales(
    x: &[f32],
    (scales, d): ([u8; 8], f32),
    (mins, dmin): ([u8; 8], f32),
    max_code: i32,
    header: &mut [u8],
    codes: &mut [u32],
) {
    field::write_f16(header, 0, d);
    field::write_f16(header, 2, dmin);
    scale_min::pack(&scales, &mins, &mut header[4..16]);
    let (d, dmin) = (field::read_f16(header, 0), field::read_f16(header, 2));
    for (sub, (x, codes)) in x.chunks_exact(32).zip(codes.chunks_exact_mut(32)).enumerate() {
        let (scale, min) = (d * f32::from(scales[sub]), dmin * f32::from(mins[sub]));
        fit::recode(x, scale, min, 0, max_code, codes);
    }
}

/// Eight numbers in units of a 63rd of their
/// maximum, and that unit.
fn sixty_thirds(numbers: &[f32; 8]) -> ([u8; 8], f32) {
    let max = numbers.iter().fold(0.0, |max: f32, &v| if v > max { v } else { max });
    let inverse = if max > 0.0 { 63.0 / max } else { 0.0 };
    (numbers.map(|v| (fit::nearest(inverse * v) as u8).min(63)), max / 63.0)
}
