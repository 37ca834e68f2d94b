//! Q5_0: 32 values in 22 bytes, `d · (q − 16)`. One word before the nibbles holds
//! the fifth bits.

use super::{field, fit, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// GGUF Q5_0.
pub static Q5_0: FormatDesc = FormatDesc {
    name: "q5_0",
    summary: "5-bit, one f16 scale per 32 (GGUF)",
    block_len: 32,
    block_bytes: 22,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntOffset { offset: 16 },
    sub_block: 32,
    unit_range: 16.0,
    code_planes: &[4, 1],
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 32, rows: 1 }],
    dequant: "q5_0",
    ggml_type: Some(6),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Offset(16)),
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..2]);
    nibbles::unpack(&block[6..], codes);
    nibbles::unpack_fifth(&block[2..6], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 0);
    let mut codes = [0; 32];
    unpack_block(block, &mut codes, &mut [0; 2]);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = (code as i32 - 16) as f32 * d;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(22)) {
        // The signed value of largest magnitude maps to code 0 (−16).
        let d = field::extreme(x) / -16.0;
        let inverse = field::inverse(d);
        field::write_f16(block, 0, d);
        let codes: [u32; 32] = std::array::from_fn(|j| (field::truncate(x[j] * inverse + 16.5) as i8).min(31) as u32);
        nibbles::pack_fifth(&codes, &mut block[2..6]);
        nibbles::pack(&codes, &mut block[6..]);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    fit::blocks_by_importance(values, importance, (out, 22), |x, weights, block| {
        let mut codes = [0; 32];
        field::write_f16(block, 0, fit::symmetric(x, weights, 16, &mut codes));
        nibbles::pack_fifth(&codes, &mut block[2..6]);
        nibbles::pack(&codes, &mut block[6..]);
    });
}
