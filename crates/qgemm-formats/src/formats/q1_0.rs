//! Q1_0: 128 values in 18 bytes, `d` where a bit is set and
//! `−d` elsewhere. Bytes: d, bits in order.

use super::{field, linear};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// Numbers of the two codes, repeated.
static SIGNS: [i8; 16] = [-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1];

/// GGUF Q1_0.
pub static Q1_0: FormatDesc = FormatDesc {
    name: "q1_0",
    summary: "signs, one f16 scale per 128 (GGUF)",
    block_len: 128,
    block_bytes: 18,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::Codebook(&SIGNS),
    sub_block: 128,
    unit_range: 1.0,
    code_planes: &[1],
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 128, rows: 1 }],
    dequant: "q1_0",
    ggml_type: None,
    is_rare: true,
    dequantize_block,
    sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Offset(0)),
    quantize_blocks: None,
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..2]);
    linear::unpack(1, &block[2..], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 0);
    let mut codes = [0; 128];
    linear::unpack(1, &block[2..], &mut codes);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = if code == 1 { d } else { -d };
    }
}
