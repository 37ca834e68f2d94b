//! MXFP4 (OCP microscaling): 32 values in 17 bytes, an E8M0 scale and FP4 (E2M1) codes in the order of Q4_0.

use super::nibbles;
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};

/// Twice the values of the FP4 (E2M1) codes, so that they are integers; scales count half in exchange.
pub static FP4_TABLE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// GGUF MXFP4.
pub static MXFP4: FormatDesc = FormatDesc {
    name: "mxfp4",
    summary: "FP4 (E2M1), one power-of-two E8M0 scale per 32 (OCP, GGUF)",
    block_len: 32,
    block_bytes: 17,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::Codebook(&FP4_TABLE),
    sub_block: 32,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 1, span: 32, rows: 1 }],
    dequant: "mxfp4",
    ggml_type: Some(39),
    dequantize_block,
    quantize_blocks: None,
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::E8M0 }],
    unpack_block,
};

/// Half of the E8M0 number `e`: `2^(e − 128)`, which is denormal in f32 below 2. Code 255, NaN in the OCP
/// specification, counts as `2^127`, as it does in ggml.
pub fn e8m0_half(e: u8) -> f32 {
    match e {
        0 | 1 => f32::from_bits(0x0020_0000 << e),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales[0] = block[0];
    nibbles::unpack(&block[1..], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = e8m0_half(block[0]);
    let mut codes = [0; 32];
    nibbles::unpack(&block[1..], &mut codes);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = f32::from(FP4_TABLE[code as usize]) * d;
    }
}
