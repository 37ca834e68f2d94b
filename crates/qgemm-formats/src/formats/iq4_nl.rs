//! IQ4_NL: 32 values in 18 bytes, `d · table[q]` with a fixed non-linear
//! table. Nibble order is that of Q4_0.

use super::{field, fit, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{Minimum, SubScales};

/// Table of IQ4_NL and IQ4_XS, from ggml.
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
    unit_range: 127.0,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 2, span: 32, rows: 1 }],
    dequant: "iq4_nl",
    ggml_type: Some(20),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Offset(0)),
    quantize_blocks: Some(quantize_blocks),
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

/// Quantizes as ggml's `ggml_quantize_chunk`. (Its
/// `quantize_row_iq4_nl_ref` tries fewer scales.) Codes are chosen with
/// the scale before f16 rounding.
fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(32).zip(out.chunks_exact_mut(18)) {
        quantize_block(x, &fit::squares::<32>(x), block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    let blocks = values.chunks_exact(32).zip(importance.chunks_exact(32)).zip(out.chunks_exact_mut(18));
    for ((x, importance), block) in blocks {
        let weights: [f32; 32] = fit::weigh(x, importance, 2.0 * fit::energy(x) / 32.0);
        quantize_block(x, &weights, block);
    }
}

fn quantize_block(x: &[f32], weights: &[f32], block: &mut [u8]) {
    let scale = fit_scale(x, weights);
    field::write_f16(block, 0, scale);
    let inverse = field::inverse(scale);
    let codes: [u32; 32] = std::array::from_fn(|j| nearest_level(inverse * x[j]));
    nibbles::pack(&codes, &mut block[2..]);
}

/// Code of the table entry nearest to `value`. Ties take the larger code.
pub(super) fn nearest_level(value: f32) -> u32 {
    let above = IQ4_TABLE.partition_point(|&level| f32::from(level) <= value);
    match above {
        0 => 0,
        16 => 15,
        _ => {
            let (below, over) = (f32::from(IQ4_TABLE[above - 1]), f32::from(IQ4_TABLE[above]));
            if value - below < over - value { above as u32 - 1 } else { above as u32 }
        }
    }
}

/// Scale with the least weighted error of `x ≈ scale · level`, out
/// of 16 candidates.
///
/// The first maps the value of largest magnitude to the positive end
/// of the table. The other fifteen map it near the negative end, one level
/// apart. Returns 0 for zeros.
pub(super) fn fit_scale(x: &[f32], weights: &[f32]) -> f32 {
    const TRIES: i16 = 7;
    let extreme = field::extreme(x);
    if extreme.abs() < fit::ZERO {
        return 0.0;
    }
    let moments = |inverse: f32| {
        x.iter().zip(weights).fold((0.0, 0.0), |(xq, qq), (&v, &weight)| {
            let level = f32::from(IQ4_TABLE[nearest_level(inverse * v) as usize]);
            (xq + weight * level * v, qq + weight * level * level)
        })
    };
    let lowest = f32::from(IQ4_TABLE[0]);
    let (xq, qq): (f32, f32) = moments(1.0 / (-extreme / lowest));
    let mut scale = if qq > 0.0 { xq / qq } else { 0.0 };
    let mut best = scale * xq;
    for shift in -TRIES..=TRIES {
        let (xq, qq) = moments((f32::from(shift) + lowest) / extreme);
        if qq > 0.0 && xq * xq > best * qq {
            scale = xq / qq;
            best = scale * xq;
        }
    }
    scale
}
