//! Q5_1: 32 values in 24 bytes, `d · q + m`. One word before the nibbles holds the
//! fifth bits.

use half::f16;

use super::fit::{self, AffineSearch};
use super::{field, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// GGUF Q5_1.
pub static Q5_1: FormatDesc = FormatDesc {
    name: "q5_1",
    summary: "5-bit, f16 scale and minimum per 32 (GGUF)",
    block_len: 32,
    block_bytes: 24,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntAffine,
    sub_block: 32,
    unit_range: 32.0,
    code_planes: &[4, 1],
    scale_planes: &[ScalePlane { name: "d", bytes: 4, span: 32, rows: 1 }],
    dequant: "q5_1",
    ggml_type: Some(7),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales::stored(
        FloatScale { offset: 0, kind: ScaleType::F16 },
        Minimum::Stored(FloatScale { offset: 2, kind: ScaleType::F16 }),
    ),
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }, FloatScale { offset: 2, kind: ScaleType::F16 }],
    unpack_block,
};

/// Writes one block. `scales` are scale and minimum.
pub(crate) fn write_block(codes: &[u32; 32], scales: [f16; 2], block: &mut [u8]) {
    block[..2].copy_from_slice(&scales[0].to_le_bytes());
    block[2..4].copy_from_slice(&scales[1].to_le_bytes());
    nibbles::pack_fifth(codes, &mut block[4..8]);
    nibbles::pack(codes, &mut block[8..]);
}

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..4]);
    nibbles::unpack(&block[8..], codes);
    nibbles::unpack_fifth(&block[4..8], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let (d, m) = (field::read_f16(block, 0), field::read_f16(block, 2));
    let mut codes = [0; 32];
    unpack_block(block, &mut codes, &mut [0; 4]);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = code as f32 * d + m;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(24)) {
        let (min, max) = field::min_max(x);
        let d = (max - min) / 31.0;
        let inverse = field::inverse(d);
        let codes: [u32; 32] = std::array::from_fn(|j| field::truncate((x[j] - min) * inverse + 0.5) as u32 & 0xff);
        write_block(&codes, [d, min].map(f16::from_f32), block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    const SEARCH: AffineSearch = AffineSearch::by_importance(31);
    fit::blocks_by_importance(values, importance, (out, 24), |x, weights, block| {
        let mut codes = [0; 32];
        let (d, min) = SEARCH.fit(x, weights, &mut codes);
        write_block(&codes, [d, -min].map(f16::from_f32), block);
    });
}
