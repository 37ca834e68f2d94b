//! NVFP4 of GGUF files (type 40), with the
//! f32 scales of its matrices.
//!
//! ```text
//! block = 4 scales (E4M3 without sign) | 4 × 8 bytes of codes
//! byte j of 16 values = value j (low), value j + 8 (high)
//! value = tensor scale · scale · fp4
//! X.weight [.., N, K], X.scale f32: one, or one a matrix
//! X.input_scale: of quantized activations
//! ```

use std::collections::{HashMap, HashSet};

use rayon::prelude::*;

use super::gguf::GgufTensor;
use super::layer::{Layer, elements, matrix_of, stack_size, stack_slice};
use super::raw::{bad, unsupported};
use crate::desc::Format;
use crate::dtype::DType;
use crate::error::FormatError;
use crate::formats::nvfp4::NVFP4;
use crate::weight::{HostWeight, SharedBytes};

/// Type number of ggml.
pub(super) const GGML_TYPE: u32 = 40;
/// Values and bytes of a block.
const BLOCK: usize = 64;
const BLOCK_BYTES: usize = 36;
/// Scales of a block, and code bytes of each.
const SCALES: usize = 4;
const CODES: usize = 8;
/// Scale code that ggml reads as 0.
const NAN: u8 = 0x7f;

/// An NVFP4 layer of a GGUF file, or a stack of them.
#[derive(Debug)]
pub(super) struct GgufNvfp4Layer {
    name: String,
    shape: Vec<usize>,
    blocks: SharedBytes,
    /// Scale of each matrix. Empty without scales.
    scales: Vec<f32>,
}

impl GgufNvfp4Layer {
    /// Checks the shapes. `scale` is the tensor `X.scale`.
    ///
    /// # Errors
    /// [`FormatError::KNotMultiple`], and
    /// [`FormatError::BadFile`] when shapes, sizes or
    /// types do not match.
    pub fn new(weight: GgufTensor, scale: Option<GgufTensor>) -> Result<Self, FormatError> {
        let GgufTensor { name, shape, bytes, .. } = weight;
        if shape.len() < 2 {
            return Err(unsupported(&name, format!("is NVFP4 of shape {shape:?}: expected a matrix")));
        }
        let (_, k) = matrix_of(&shape);
        if !k.is_multiple_of(BLOCK) {
            return Err(FormatError::KNotMultiple { format: NVFP4.name, block: BLOCK, k });
        }
        let size = elements(&shape).map(|values| values / BLOCK).and_then(|blocks| blocks.checked_mul(BLOCK_BYTES));
        let blocks = size.and_then(|size| bytes.slice(0..size)).ok_or_else(|| {
            bad(&name, format!("is NVFP4 of shape {shape:?}, and the file holds {} bytes of it", bytes.len()))
        })?;
        let scales = match scale {
            None => Vec::new(),
            Some(scale) => read_scales(&scale, stack_size(&shape))?,
        };
        Ok(Self { name, shape, blocks, scales })
    }
}

/// Takes the scales of NVFP4 layers, by the weight's name.
///
/// Scales of activations are dropped: X is quantized
/// by scales of its own.
pub(super) fn take_scales(tensors: &mut Vec<GgufTensor>) -> HashMap<String, GgufTensor> {
    let is_nvfp4 = |tensor: &&GgufTensor| tensor.ggml_type == GGML_TYPE;
    let weights: HashSet<String> = tensors.iter().filter(is_nvfp4).map(|tensor| tensor.name.clone()).collect();
    let weight_of = |name: &str, part: &str| {
        let weight = format!("{}.weight", name.strip_suffix(part)?);
        weights.contains(&weight).then_some(weight)
    };
    let mut scales = HashMap::new();
    tensors.retain(|tensor| {
        let of_weight = weight_of(&tensor.name, ".scale");
        let is_taken = of_weight.is_some() || weight_of(&tensor.name, ".input_scale").is_some();
        scales.extend(of_weight.map(|weight| (weight, tensor.clone())));
        !is_taken
    });
    scales
}

/// Scales of `matrices` matrices: one, or one each.
fn read_scales(scale: &GgufTensor, matrices: usize) -> Result<Vec<f32>, FormatError> {
    let is_float = scale.format.is_some_and(|format| format.name == DType::F32.name());
    let values = if is_float { DType::F32.decode(&scale.bytes) } else { Vec::new() };
    if values.len() != 1 && values.len() != matrices {
        let what = format!("expected 1 or {matrices} scales in F32, got {} {:?}", scale.type_name(), scale.shape);
        return Err(bad(&scale.name, what));
    }
    if let Some(wrong) = values.iter().find(|value| !value.is_finite()) {
        return Err(bad(&scale.name, format!("expected finite scales, got {wrong}")));
    }
    Ok(values)
}

impl Layer for GgufNvfp4Layer {
    fn format(&self) -> Format {
        Format::new(&NVFP4)
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn bytes(&self) -> usize {
        self.blocks.len() + size_of_val(&self.scales[..])
    }

    fn weight(&self, index: usize) -> Result<HostWeight, FormatError> {
        let (n, k) = matrix_of(&self.shape);
        let matrix = stack_slice(&self.blocks, index, stack_size(&self.shape));
        let signed = |block: &[u8]| block[..SCALES].iter().any(|&scale| scale > NAN);
        if matrix.par_chunks_exact(BLOCK_BYTES).any(signed) {
            return Err(bad(&self.name, "has scales with a sign: expected E4M3 without one"));
        }
        let mut blocks = vec![0u8; matrix.len() / BLOCK_BYTES * SCALES * (CODES + 1)];
        blocks
            .par_chunks_exact_mut(SCALES * (CODES + 1))
            .zip(matrix.par_chunks_exact(BLOCK_BYTES))
            .with_min_len(1024)
            .for_each(|(out, block)| repack(block, out));
        let scale = if self.scales.len() == 1 { self.scales.first() } else { self.scales.get(index) };
        HostWeight::new(self.format(), n, k, blocks.into())?.with_row_scale(vec![scale.copied().unwrap_or(1.0); n])
    }
}

/// A block of 64 values to four of 16.
fn repack(block: &[u8], out: &mut [u8]) {
    let (scales, codes) = block.split_at(SCALES);
    for ((out, codes), &scale) in out.chunks_exact_mut(CODES + 1).zip(codes.chunks_exact(CODES)).zip(scales) {
        let nibble = |i: usize| codes[i % CODES] >> (4 * (i / CODES)) & 0xf;
        for (i, byte) in out[..CODES].iter_mut().enumerate() {
            *byte = nibble(2 * i) | nibble(2 * i + 1) << 4;
        }
        out[CODES] = if scale == NAN { 0 } else { scale };
    }
}
