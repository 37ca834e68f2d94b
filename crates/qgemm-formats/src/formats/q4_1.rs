//! Q4_1: 32 values in 20 bytes, `d · q + m`. Nibble
//! order is that of Q4_0.

use half::f16;

use super::fit::{self, AffineSearch};
use super::{field, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// GGUF Q4_1.
pub static Q4_1: FormatDesc = FormatDesc {
    name: "q4_1",
    summary: "4-bit, f16 scale and minimum per 32 (GGUF)",
    block_len: 32,
    block_bytes: 20,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntAffine,
    sub_block: 32,
    unit_range: 16.0,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 4, span: 32, rows: 1 }],
    dequant: "q4_1",
    ggml_type: Some(3),
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
    nibbles::pack(codes, &mut block[4..]);
}

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..4]);
    nibbles::unpack(&block[4..], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let (d, m) = (field::read_f16(block, 0), field::read_f16(block, 2));
    let mut codes = [0; 32];
    nibbles::unpack(&block[4..], &mut codes);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = code as f32 * d + m;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(20)) {
        let (min, max) = field::min_max(x);
        let d = (max - min) / 15.0;
        let inverse = field::inverse(d);
        let codes: [u32; 32] =
            std::array::from_fn(|j| (field::truncate((x[j] - min) * inverse + 0.5) as i8).min(15) as u32);
        write_block(&codes, [d, min].map(f16::from_f32), block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    const SEARCH: AffineSearch = AffineSearch::by_importance(15);
    fit::blocks_by_importance(values, importance, (out, 20), |x, weights, block| {
        let mut codes = [0; 32];
        let (d, min) = SEARCH.fit(x, weights, &mut codes);
        write_block(&codes, [d, -min].map(f16::from_f32), block);
    });
}
