//! Ternary formats: `d · (q − 1)` with 2-bit codes, one
//! f16 scale per block.
//!
//! TQ2_0 has 256 values in 66 bytes: 64 of codes (as
//! Q2_K), then d. Q2_0 has d, then codes in order, low
//! bits first, in groups of 64 or 128. A code of 3 is
//! rare but valid.

use super::{field, linear, q2_k};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// GGUF TQ2_0. TQ1_0 is converted to it.
pub static TQ2_0: FormatDesc = FormatDesc {
    name: "tq2_0",
    summary: "ternary, one f16 scale per 256 (GGUF TQ2_0, TQ1_0)",
    block_len: 256,
    block_bytes: 66,
    sub_block: 256,
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 256, rows: 1 }],
    ggml_type: Some(35),
    dequantize_block: |block, out| dequantize(unpack_tq2_0, field::read_f16(block, 64), block, out),
    quantize_blocks: Some(quantize_blocks),
    float_scales: &[FloatScale { offset: 64, kind: ScaleType::F16 }],
    unpack_block: unpack_tq2_0,
    ..q2_0::<64>("", "")
};
/// GGUF Q2_0.
pub static Q2_0_G64: FormatDesc = q2_0::<64>("q2_0_g64", "2-bit, one f16 scale per 64 (GGUF Q2_0)");
/// Q2_0 of older GGUF files.
pub static Q2_0_G128: FormatDesc = q2_0::<128>("q2_0_g128", "2-bit, one f16 scale per 128 (GGUF Q2_0)");

const fn q2_0<const GROUP: usize>(name: &'static str, summary: &'static str) -> FormatDesc {
    FormatDesc {
        name,
        summary,
        block_len: GROUP,
        block_bytes: 2 + GROUP / 4,
        ragged_k: false,
        row_scale: false,
        encoding: Encoding::IntOffset { offset: 1 },
        sub_block: GROUP,
        unit_range: 2.0,
        code_planes: &[2],
        scale_planes: const { &[ScalePlane { name: "d", bytes: 2, span: GROUP, rows: 1 }] },
        dequant: "ternary",
        ggml_type: None,
        is_rare: true,
        dequantize_block: |block, out| dequantize(unpack_q2_0, field::read_f16(block, 0), block, out),
        sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Offset(1)),
        quantize_blocks: None,
        quantize_matrix: None,
        float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
        unpack_block: unpack_q2_0,
    }
}

fn unpack_tq2_0(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[64..]);
    q2_k::unpack_codes(&block[..64], codes);
}

fn unpack_q2_0(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..2]);
    linear::unpack(2, &block[2..], codes);
}

fn dequantize(unpack: fn(&[u8], &mut [u32], &mut [u8]), d: f32, block: &[u8], out: &mut [f32]) {
    let mut codes = [0; 256];
    let codes = &mut codes[..out.len()];
    unpack(block, codes, &mut [0; 2]);
    for (value, &code) in out.iter_mut().zip(&*codes) {
        *value = d * (code as i32 - 1) as f32;
    }
}

/// Quantizes TQ2_0 as ggml: d is the largest magnitude,
/// and halves are rounded away from zero.
fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(66)) {
        let d = field::extreme(x).abs();
        let inverse = field::inverse(d);
        let codes: [u32; 256] = std::array::from_fn(|i| (field::truncate((x[i] * inverse).round()) + 1) as u32);
        q2_k::pack_codes(&codes, &mut block[..64]);
        field::write_f16(block, 64, d);
    }
}
