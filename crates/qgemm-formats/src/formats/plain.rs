//! F32, F16, BF16: unquantized weights as blocks of one value.

use half::{bf16, f16};

use crate::DType;
use crate::desc::{Encoding, FormatDesc};
use crate::sub_scale::SubScales;

/// Unquantized f32.
pub static F32: FormatDesc = FormatDesc {
    name: "f32",
    summary: "unquantized, IEEE binary32",
    block_bytes: 4,
    encoding: Encoding::Plain(DType::F32),
    unit_range: f32::MAX,
    code_planes: &[32],
    dequant: "f32",
    ggml_type: Some(0),
    is_rare: false,
    dequantize_block: |block, out| out[0] = DType::F32.read(block, 0),
    quantize_blocks: Some(|values, out| quantize(DType::F32, values, out)),
    unpack_block: |block, codes, _| codes[0] = u32::from_le_bytes([block[0], block[1], block[2], block[3]]),
    ..PLAIN
};

/// Unquantized f16.
pub static F16: FormatDesc = FormatDesc {
    name: "f16",
    summary: "unquantized, IEEE binary16",
    encoding: Encoding::Plain(DType::F16),
    unit_range: f16::MAX.to_f32_const(),
    dequant: "f16",
    ggml_type: Some(1),
    is_rare: false,
    dequantize_block: |block, out| out[0] = DType::F16.read(block, 0),
    quantize_blocks: Some(|values, out| quantize(DType::F16, values, out)),
    ..PLAIN
};

/// Unquantized bf16.
pub static BF16: FormatDesc = FormatDesc { name: "bf16", summary: "unquantized, bfloat16", ..PLAIN };

/// Common fields of the three. A const, because statics copy its fields.
const PLAIN: FormatDesc = FormatDesc {
    name: "bf16",
    summary: "",
    block_len: 1,
    block_bytes: 2,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::Plain(DType::BF16),
    sub_block: 1,
    unit_range: bf16::MAX.to_f32_const(),
    code_planes: &[16],
    scale_planes: &[],
    dequant: "bf16",
    ggml_type: Some(30),
    is_rare: false,
    dequantize_block: |block, out| out[0] = DType::BF16.read(block, 0),
    sub_scales: SubScales::ONE,
    quantize_blocks: Some(|values, out| quantize(DType::BF16, values, out)),
    quantize_matrix: None,
    float_scales: &[],
    unpack_block: |block, codes, _| codes[0] = u32::from(u16::from_le_bytes([block[0], block[1]])),
};

fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) {
    for (i, &value) in values.iter().enumerate() {
        dtype.write(out, i, value);
    }
}
