//! FP8 weights (E4M3, E5M2): one scale per output feature or per 128×128 block.
//! A per-tensor scale is stored per output feature.
//!
//! ```text
//! fp8_e4m3, fp8_e5m2                    block = 32 codes            value = row scale · fp8(code)
//! fp8_e4m3_block128, fp8_e5m2_block128  block = 128 codes | f32 scale   value = scale · fp8(code)
//! ```
//!
//! Each of the 128 rows of a block has a copy of its scale. A row may end inside
//! a block.

use rayon::prelude::*;

use crate::desc::{Encoding, FloatScale, Format, FormatDesc, ScalePlane, ScaleType};
use crate::error::FormatError;
use crate::float8::{E4M3_MAX, E5M2_MAX, e4m3_to_f32, e5m2_to_f32, f32_to_e4m3, f32_to_e5m2};
use crate::formats::matrix;
use crate::sub_scale::{Minimum, SubScales};
use crate::weight::HostWeight;

/// Edge of a scale block.
pub const SCALE_BLOCK: usize = 128;
const ROW_BLOCK: usize = 32;
const SCALED_BYTES: usize = SCALE_BLOCK + 4;

/// E4M3 with a scale per row.
pub static FP8_E4M3: FormatDesc = FormatDesc {
    quantize_matrix: Some(|values, n, k| quantize_by_row(&FP8_E4M3, &E4M3, values, n, k)),
    ..by_row(
        "fp8_e4m3",
        "8-bit float E4M3, one f32 scale per tensor or output channel",
        Encoding::E4M3,
        E4M3_MAX,
        |block, out| decode_codes(block, out, e4m3_to_f32),
    )
};

/// E5M2 with a scale per row.
pub static FP8_E5M2: FormatDesc = FormatDesc {
    quantize_matrix: Some(|values, n, k| quantize_by_row(&FP8_E5M2, &E5M2, values, n, k)),
    ..by_row(
        "fp8_e5m2",
        "8-bit float E5M2, one f32 scale per tensor or output channel",
        Encoding::E5M2,
        E5M2_MAX,
        |block, out| decode_codes(block, out, e5m2_to_f32),
    )
};

/// E4M3 with a scale per 128×128 block.
pub static FP8_E4M3_BLOCK128: FormatDesc = FormatDesc {
    quantize_matrix: Some(|values, n, k| quantize_by_block(&FP8_E4M3_BLOCK128, &E4M3, values, n, k)),
    ..by_block(
        "fp8_e4m3_block128",
        "8-bit float E4M3, one f32 scale per 128x128 block",
        Encoding::E4M3,
        E4M3_MAX,
        |block, out| decode_scaled(block, out, e4m3_to_f32),
    )
};

/// E5M2 with a scale per 128×128 block.
pub static FP8_E5M2_BLOCK128: FormatDesc = FormatDesc {
    quantize_matrix: Some(|values, n, k| quantize_by_block(&FP8_E5M2_BLOCK128, &E5M2, values, n, k)),
    ..by_block(
        "fp8_e5m2_block128",
        "8-bit float E5M2, one f32 scale per 128x128 block",
        Encoding::E5M2,
        E5M2_MAX,
        |block, out| decode_scaled(block, out, e5m2_to_f32),
    )
};

/// FP8 element type, for quantizers.
struct NumberType {
    max: f32,
    encode: fn(f32) -> u8,
}

const E4M3: NumberType = NumberType { max: E4M3_MAX, encode: f32_to_e4m3 };
const E5M2: NumberType = NumberType { max: E5M2_MAX, encode: f32_to_e5m2 };

type Dequantize = fn(block: &[u8], out: &mut [f32]);

const fn by_row(
    name: &'static str,
    summary: &'static str,
    encoding: Encoding,
    unit_range: f32,
    dequantize_block: Dequantize,
) -> FormatDesc {
    FormatDesc {
        name,
        summary,
        block_len: ROW_BLOCK,
        block_bytes: ROW_BLOCK,
        ragged_k: true,
        row_scale: true,
        encoding,
        sub_block: ROW_BLOCK,
        unit_range,
        code_planes: &[8],
        scale_planes: &[],
        dequant: name,
        ggml_type: None,
        is_rare: false,
        dequantize_block,
        sub_scales: SubScales::ONE,
        quantize_blocks: None,
        quantize_matrix: None,
        float_scales: &[],
        unpack_block,
    }
}

const fn by_block(
    name: &'static str,
    summary: &'static str,
    encoding: Encoding,
    unit_range: f32,
    dequantize_block: Dequantize,
) -> FormatDesc {
    FormatDesc {
        block_len: SCALE_BLOCK,
        block_bytes: SCALED_BYTES,
        row_scale: false,
        sub_block: SCALE_BLOCK,
        scale_planes: &[ScalePlane { name: "d", bytes: 4, span: SCALE_BLOCK, rows: SCALE_BLOCK }],
        float_scales: &[FloatScale { offset: SCALE_BLOCK, kind: ScaleType::F32 }],
        sub_scales: SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F32 }, Minimum::Offset(0)),
        ..by_row(name, summary, encoding, unit_range, dequantize_block)
    }
}

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    let (code_bytes, tail) = block.split_at(codes.len());
    for (code, &byte) in codes.iter_mut().zip(code_bytes) {
        *code = u32::from(byte);
    }
    scales.copy_from_slice(tail);
}

fn decode_codes(block: &[u8], out: &mut [f32], decode: fn(u8) -> f32) {
    for (value, &code) in out.iter_mut().zip(block) {
        *value = decode(code);
    }
}

fn decode_scaled(block: &[u8], out: &mut [f32], decode: fn(u8) -> f32) {
    let (codes, tail) = block.split_at(SCALE_BLOCK);
    let scale = f32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
    for (value, &code) in out.iter_mut().zip(codes) {
        *value = scale * decode(code);
    }
}

/// Quantizes with `scale = max|x| / largest fp8` per row, to nearest even.
fn quantize_by_row(
    format: &'static FormatDesc,
    number: &NumberType,
    values: &[f32],
    n: usize,
    k: usize,
) -> Result<HostWeight, FormatError> {
    matrix::quantize_rows(format, values, n, k, 0, |row, codes| {
        let scale = matrix::absmax(row) / number.max;
        encode_row(number, row, scale, codes);
        scale
    })
}

/// Quantizes with `scale = max|x| / largest fp8` per 128×128 block, to nearest
/// even.
fn quantize_by_block(
    format: &'static FormatDesc,
    number: &NumberType,
    values: &[f32],
    n: usize,
    k: usize,
) -> Result<HostWeight, FormatError> {
    let mut blocks = vec![0u8; matrix::check(format, values, n, k)?];
    let row_bytes = format.row_bytes(k);
    let bands = blocks.par_chunks_mut(SCALE_BLOCK * row_bytes).zip(values.par_chunks(SCALE_BLOCK * k));
    bands.for_each(|(out, x)| {
        let mut maxima = vec![0.0f32; k.div_ceil(SCALE_BLOCK)];
        for row in x.chunks_exact(k) {
            for (max, part) in maxima.iter_mut().zip(row.chunks(SCALE_BLOCK)) {
                *max = max.max(matrix::absmax(part));
            }
        }
        for (row, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(row_bytes)) {
            for ((part, block), max) in row.chunks(SCALE_BLOCK).zip(out.chunks_exact_mut(SCALED_BYTES)).zip(&maxima) {
                let scale = max / number.max;
                encode_row(number, part, scale, block);
                block[SCALE_BLOCK..].copy_from_slice(&scale.to_le_bytes());
            }
        }
    });
    HostWeight::new(Format::new(format), n, k, blocks.into())
}

fn encode_row(number: &NumberType, values: &[f32], scale: f32, codes: &mut [u8]) {
    // Divides, because the inverse of the smallest scales overflows.
    for (code, &v) in codes.iter_mut().zip(values) {
        *code = if scale == 0.0 { 0 } else { (number.encode)(v / scale) };
    }
}
