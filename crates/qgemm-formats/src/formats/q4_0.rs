//! Q4_0: 32 values in 18 bytes, `d · (q − 8)`; low nibbles hold values 0–15, high nibbles 16–31.

use half::f16;

use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};

/// GGUF Q4_0.
pub static Q4_0: FormatDesc = FormatDesc {
    name: "q4_0",
    summary: "4-bit, one f16 scale per 32 (GGUF)",
    block_len: 32,
    block_bytes: 18,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::IntOffset { offset: 8 },
    sub_block: 32,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 32, rows: 1 }],
    dequant: "q4_0",
    ggml_type: Some(2),
    dequantize_block,
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..2]);
    for (j, &byte) in block[2..18].iter().enumerate() {
        codes[j] = u32::from(byte & 0xf);
        codes[j + 16] = u32::from(byte >> 4);
    }
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
    for (j, &byte) in block[2..18].iter().enumerate() {
        out[j] = (i32::from(byte & 0xf) - 8) as f32 * d;
        out[j + 16] = (i32::from(byte >> 4) - 8) as f32 * d;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(18)) {
        // The signed value of largest magnitude maps to code 0 (−8), as ggml's reference does.
        let extreme = x.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
        let d = extreme / -8.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        block[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        let code = |v: f32| ((v * inverse + 8.5) as i8).min(15) as u8;
        for j in 0..16 {
            block[2 + j] = code(x[j]) | (code(x[j + 16]) << 4);
        }
    }
}
