//! MXFP4 (OCP microscaling): 32 values in 17 bytes, an E8M0 scale and E2M1
//! codes in the order of Q4_0.
//!
//! The table holds doubled values, so that they are integers. Scales
//! are halved to compensate.

use super::{field, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::float8::{E2M1_DOUBLED, E2M1_MAX, e8m0_to_f32};
use crate::sub_scale::{Minimum, SubScales};

/// GGUF MXFP4.
pub static MXFP4: FormatDesc = FormatDesc {
    name: "mxfp4",
    summary: "FP4 (E2M1), one power-of-two E8M0 scale per 32 (OCP, GGUF)",
    block_len: 32,
    block_bytes: 17,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::Codebook(&E2M1_DOUBLED),
    sub_block: 32,
    unit_range: E2M1_MAX,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 1, span: 32, rows: 1 }],
    dequant: "mxfp4",
    ggml_type: Some(39),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales {
        times: 0.5,
        ..SubScales::stored(FloatScale { offset: 0, kind: ScaleType::E8M0 }, Minimum::Offset(0))
    },
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::E8M0 }],
    unpack_block,
};

/// Half of an E8M0 scale, for the doubled table. Subnormal for
/// the two smallest scales.
fn half_scale(e8m0: u8) -> f32 {
    e8m0_to_f32(e8m0) * 0.5
}

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales[0] = block[0];
    nibbles::unpack(&block[1..], codes);
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = half_scale(block[0]);
    let mut codes = [0; 32];
    nibbles::unpack(&block[1..], &mut codes);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = f32::from(E2M1_DOUBLED[code as usize]) * d;
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(17)) {
        let max = field::extreme(x).abs();
        // FP4's top binade has exponent 2, and the largest value goes there.
        // The logarithm is f32, as in ggml: it rounds up just below a large power
        // of two. Below 2^−125 the exponent would be negative. C leaves that
        // undefined; here it is 0.
        let exponent = f64::from(max).log2() as f32;
        block[0] = if max > 0.0 { (exponent.floor() - 2.0 + 127.0) as u8 } else { 0 };
        let d = half_scale(block[0]);
        let codes: [u32; 32] = std::array::from_fn(|j| nearest_code(x[j], d));
        nibbles::pack(&codes, &mut block[1..]);
    }
}

/// First code nearest to `value`.
fn nearest_code(value: f32, d: f32) -> u32 {
    let error = |code: usize| (f32::from(E2M1_DOUBLED[code]) * d - value).abs();
    (1..16).fold(0, |best, code| if error(code) < error(best) { code } else { best }) as u32
}
