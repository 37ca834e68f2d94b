//! IQ4_XS: 256 values in 136 bytes, eight sub-blocks of 32.
//! A value is `d · (s − 32) · table[q]`, with a 6-bit scale
//! and the table of IQ4_NL.
//!
//! Bytes: d; a word with the upper two bits of each scale; four bytes
//! with the lower nibbles of two scales each; 128 bytes of nibbles
//! (each sub-block in the order of Q4_0).

use super::iq4_nl::{IQ4_TABLE, fit_scale, nearest_level};
use super::{field, fit, nibbles};
use crate::desc::{Encoding, FloatScale, FormatDesc, ScalePlane, ScaleType};
use crate::sub_scale::{BitField, Minimum, SubCodes, SubScales};

/// GGUF IQ4_XS.
pub static IQ4_XS: FormatDesc = FormatDesc {
    name: "iq4_xs",
    summary: "4-bit non-linear codebook in super-blocks of 256, 6-bit scale per 32 (GGUF)",
    block_len: 256,
    block_bytes: 136,
    ragged_k: false,
    row_scale: false,
    encoding: Encoding::Codebook(&IQ4_TABLE),
    sub_block: 32,
    unit_range: 4064.0,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "scales", bytes: 8, span: 256, rows: 1 }],
    dequant: "iq4_xs",
    ggml_type: Some(23),
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales {
        codes: Some(SubCodes::less(&SCALES, 32)),
        ..SubScales::stored(FloatScale { offset: 0, kind: ScaleType::F16 }, Minimum::Offset(0))
    },
    quantize_blocks: Some(quantize_blocks),
    quantize_matrix: None,
    float_scales: &[FloatScale { offset: 0, kind: ScaleType::F16 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    scales.copy_from_slice(&block[..8]);
    for (bytes, codes) in block[8..].chunks_exact(16).zip(codes.chunks_exact_mut(32)) {
        nibbles::unpack(bytes, codes);
    }
}

/// Scale of sub-block `sub` in −32..=31, from the first 8 bytes of a
/// block.
fn sub_scale(scales: &[u8], sub: usize) -> i32 {
    let low = scales[4 + sub / 2] >> (sub % 2 * 4) & 0xf;
    let high = u16::from_le_bytes([scales[2], scales[3]]) >> (sub * 2) & 3;
    i32::from(low) + (i32::from(high) << 4) - 32
}

/// Bit fields of the scales, for [`sub_scale`].
const SCALES: [[BitField; 2]; 8] = {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 8];
    let mut sub = 0;
    while sub < 8 {
        fields[sub] = [BitField::new(4 + sub / 2, sub % 2 * 4, 4), BitField::new(2 + sub / 4, sub % 4 * 2, 2)];
        sub += 1;
    }
    fields
};

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let d = field::read_f16(block, 0);
    let mut codes = [0; 256];
    unpack_block(block, &mut codes, &mut [0; 8]);
    for (sub, (values, codes)) in out.chunks_exact_mut(32).zip(codes.chunks_exact(32)).enumerate() {
        let scale = d * sub_scale(block, sub) as f32;
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * f32::from(IQ4_TABLE[code as usize]);
        }
    }
}

fn quantize_blocks(values: &[f32], out: &mut [u8]) {
    for (x, block) in values.chunks_exact(256).zip(out.chunks_exact_mut(136)) {
        quantize_block(x, &fit::squares::<256>(x), block);
    }
}

/// Quantizes a row by the importance of its columns.
pub(crate) fn quantize_by_importance(values: &[f32], importance: &[f32], out: &mut [u8]) {
    let blocks = values.chunks_exact(256).zip(importance.chunks_exact(256)).zip(out.chunks_exact_mut(136));
    for ((x, importance), block) in blocks {
        let weights: [f32; 256] = fit::weigh(x, importance, 2.0 * fit::energy(x) / 256.0);
        quantize_block(x, &weights, block);
    }
}

fn quantize_block(x: &[f32], weights: &[f32], block: &mut [u8]) {
    let mut scales = [0.0; 8];
    for (scale, (x, weights)) in scales.iter_mut().zip(x.chunks_exact(32).zip(weights.chunks_exact(32))) {
        *scale = fit_scale(x, weights);
    }
    // The signed scale of largest magnitude maps to −32.
    let d = -field::extreme(&scales) / 32.0;
    field::write_f16(block, 0, d);
    block[2..8].fill(0);
    let inverse = field::inverse(d);
    let (header, code_bytes) = block.split_at_mut(8);
    for (sub, (x, bytes)) in x.chunks_exact(32).zip(code_bytes.chunks_exact_mut(16)).enumerate() {
        let scale = fit::nearest(inverse * scales[sub]).clamp(-32, 31);
        let stored = (scale + 32) as u8;
        header[4 + sub / 2] |= (stored & 0xf) << (sub % 2 * 4);
        header[2 + sub / 4] |= stored >> 4 << (sub % 4 * 2);
        // Codes use d before f16 rounding.
        let inverse = field::inverse(d * scale as f32);
        let codes: [u32; 32] = std::array::from_fn(|j| nearest_level(inverse * x[j]));
        nibbles::pack(&codes, bytes);
    }
}
