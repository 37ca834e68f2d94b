//! Q8_0: 32 values in 34 bytes, `d · q`. Stored bytes are signed;
//! a code is the byte + 128.

use super::field;
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// GGUF Q8_0.
pub static Q8_0: FormatDesc = FormatDesc {
    name: "q8_0",
    summary: "8-bit, one f16 scale per 32 (GGUF)",
    block_len: 32,
    block_bytes: 34,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntOffset { offset: 128 },
    sub_block: 32,
    unit_range: 128.0,
    code_planes: &[8],
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 32, rows: 1 }],
    dequant: "q8_0",
    ggml_type: Some(8),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Offset(128)),
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..2]);
    for (code, &byte) in codes.iter_mut().zip(&block[2..34]) {
        *code = u32::from(byte ^ 0x80);
    }
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 0);
    for (value, &byte) in out.iter_mut().zip(&block[2..34]) {
        *value = f32::from(byte as i8) * d;
    }
}

pub(crate) fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(34)) {
        let d = field::extreme(x).abs() / 127.0;
        let inverse = field::inverse(d);
        field::write_f16(block, 0, d);
        for (byte, &v) in block[2..].iter_mut().zip(x) {
            *byte = field::truncate((v * inverse).round()) as u8;
        }
    }
}
