//! `int8_channel`: signed 8-bit integers with one f32 scale per output
//! feature, outside the blocks.
//!
//! A byte holds `value + 128`, so codes are unsigned as in all formats.
//! A row may end inside a block.

use crate::desc::{Encoding, FormatDesc};
use crate::error::FormatError;
use crate::formats::matrix;
use crate::sub_scale::{Minimum, SubScales};
use crate::weight::HostWeight;

const BLOCK: usize = 32;

/// Code of the value 0.
pub(crate) const ZERO_CODE: u8 = 128;

/// 8-bit integers with a scale per row.
pub static INT8_CHANNEL: FormatDesc = FormatDesc {
    name: "int8_channel",
    summary: "8-bit, one f32 scale per output channel",
    block_len: BLOCK,
    block_bytes: BLOCK,
    ragged_k: true,
    row_scale: true,
    encoding: Encoding::IntOffset { offset: 128 },
    sub_block: BLOCK,
    unit_range: 128.0,
    code_planes: &[8],
    scale_planes: &[],
    dequant: "int8_channel",
    ggml_type: None,
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales { minimum: Minimum::Offset(128), ..SubScales::ONE },
    quantize_blocks: None,
    quantize_matrix: Some(quantize),
    float_scales: &[],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], _scales: &mut [u8]) {
    for (code, &byte) in codes.iter_mut().zip(block) {
        *code = u32::from(byte);
    }
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    for (value, &byte) in out.iter_mut().zip(block) {
        *value = (i32::from(byte) - i32::from(ZERO_CODE)) as f32;
    }
}

/// Symmetric quantization with `scale = max|x| / 127` per row, to nearest even.
///
/// # Errors
/// When there are not `n × k` values, or one is not finite.
pub fn quantize(values: &[f32], n: usize, k: usize) -> Result<HostWeight, FormatError> {
    matrix::quantize_rows(&INT8_CHANNEL, values, n, k, ZERO_CODE, |row, codes| {
        let scale = matrix::absmax(row) / 127.0;
        for (code, &v) in codes.iter_mut().zip(row) {
            *code = if scale == 0.0 {
                ZERO_CODE
            } else {
                ((v / scale).round_ties_even().clamp(-127.0, 127.0) + 128.0) as u8
            };
        }
        scale
    })
}
