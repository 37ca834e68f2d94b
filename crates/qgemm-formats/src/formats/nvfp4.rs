//! NVFP4: E2M1 with an E4M3 scale per 16 values and an f32
//! scale per tensor, stored as row scales.
//!
//! ```text
//! block = 8 bytes of codes (low nibble = even value) | E4M3 scale     value = tensor scale · scale · fp4(code)
//! ```

use rayon::prelude::*;

use crate::desc::{Encoding, FloatScale, Format, FormatDesc, ScalePlane, ScaleType};
use crate::error::FormatError;
use crate::float8::{E2M1_DOUBLED, E2M1_MAX, E4M3_MAX, e4m3_to_f32, f32_to_e2m1, f32_to_e4m3};
use crate::formats::matrix;
use crate::sub_scale::{Minimum, SubScales};
use crate::weight::HostWeight;

const BLOCK: usize = 16;
const BLOCK_BYTES: usize = 9;

/// NVIDIA's 4-bit floating-point format.
pub static NVFP4: FormatDesc = FormatDesc {
    name: "nvfp4",
    summary: "4-bit float E2M1, E4M3 scale per 16, f32 scale per tensor",
    block_len: BLOCK,
    block_bytes: BLOCK_BYTES,
    ragged_k: true,
    row_scale: true,
    // The table holds doubled values, so a value is
    // `table · scale · 0.5`.
    encoding: Encoding::Codebook(&E2M1_DOUBLED),
    sub_block: BLOCK,
    unit_range: E2M1_MAX,
    code_planes: &[4],
    scale_planes: &[ScalePlane { name: "d", bytes: 1, span: BLOCK, rows: 1 }],
    dequant: "nvfp4",
    ggml_type: None,
    is_rare: false,
    dequantize_block,
    sub_scales: SubScales {
        times: 0.5,
        ..SubScales::stored(FloatScale { offset: 0, kind: ScaleType::E4M3 }, Minimum::Offset(0))
    },
    quantize_blocks: None,
    quantize_matrix: Some(quantize),
    float_scales: &[FloatScale { offset: 8, kind: ScaleType::E4M3 }],
    unpack_block,
};

fn unpack_block(block: &[u8], codes: &mut [u32], scales: &mut [u8]) {
    for (pair, &byte) in codes.chunks_exact_mut(2).zip(&block[..8]) {
        pair[0] = u32::from(byte & 0xf);
        pair[1] = u32::from(byte >> 4);
    }
    scales[0] = block[8];
}

fn dequantize_block(block: &[u8], out: &mut [f32]) {
    let scale = e4m3_to_f32(block[8]) * 0.5;
    for (pair, &byte) in out.chunks_exact_mut(2).zip(&block[..8]) {
        pair[0] = scale * f32::from(E2M1_DOUBLED[usize::from(byte & 0xf)]);
        pair[1] = scale * f32::from(E2M1_DOUBLED[usize::from(byte >> 4)]);
    }
}

/// Two-level quantization:
/// `tensor scale = max|x| / (448 · 6)`, and
/// per 16 values the E4M3 number nearest to
/// `max|x| / (6 · tensor scale)`. Codes then round to
/// nearest even E2M1 with the stored scale.
///
/// # Errors
/// When there are not `n × k` values, or one is not finite.
pub fn quantize(values: &[f32], n: usize, k: usize) -> Result<HostWeight, FormatError> {
    let mut blocks = vec![0u8; matrix::check(&NVFP4, values, n, k)?];
    let tensor_scale = matrix::absmax(values) / (E4M3_MAX * E2M1_MAX);
    if tensor_scale > 0.0 {
        let rows = blocks.par_chunks_mut(NVFP4.row_bytes(k)).zip(values.par_chunks(k));
        rows.for_each(|(out, row)| {
            for (x, block) in row.chunks(BLOCK).zip(out.chunks_exact_mut(BLOCK_BYTES)) {
                block[8] = f32_to_e4m3(matrix::absmax(x) / E2M1_MAX / tensor_scale);
                let scale = e4m3_to_f32(block[8]);
                if scale == 0.0 {
                    continue;
                }
                for (i, &v) in x.iter().enumerate() {
                    block[i / 2] |= f32_to_e2m1(v / tensor_scale / scale) << (4 * (i % 2));
                }
            }
        });
    }
    HostWeight::new(Format::new(&NVFP4), n, k, blocks.into())?.with_row_scale(vec![tensor_scale; n])
}
