//! IQ4_NL: 32 values in 18 bytes, `d · table[q]` with a fixed non-linear table; nibbles in the order of Q4_0.

use super::{field, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};

/// The 16 levels of IQ4_NL and IQ4_XS, from ggml.
pub static IQ4_TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// GGUF IQ4_NL.
pub static IQ4_NL: FormatDesc = FormatDesc {
    name: "iq4_nl",
    summary: "4-bit non-linear codebook, one f16 scale per 32 (GGUF)",
    block_len: 32,
    block_bytes: 18,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::Codebook(&IQ4_TABLE),
    sub_block: 32,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 32, rows: 1 }],
    dequant: "iq4_nl",
    ggml_type: Some(20),
    dequantize_block,
    quantize_blocks: None,
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..2]);
    nibbles::unpack(&block[2..], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 0);
    let mut codes = [0; 32];
    nibbles::unpack(&block[2..], &mut codes);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = d * f32::from(IQ4_TABLE[code as usize]);
    }
}
