//! FP4 layers: MXFP4 of gpt-oss, Quark, ModelOpt, compressed-tensors and
//! DeepSeek V4; NVFP4 of ModelOpt and compressed-tensors.
//!
//! ```text
//! MXFP4  X_blocks […, N, K/32, 16] U8, X_scales […, N, K/32] U8        value = 2^(scale − 127) · fp4
//!        codes […, N, K/2] U8, I8 or F4, scales […, N, K/32] U8 or F8_E8M0
//! NVFP4  weight [N, K/2] U8, weight_scale [N, K/16] F8_E4M3, weight_scale_2 F32    value = scale_2 · scale · fp4
//!        weight_packed, weight_scale, weight_global_scale F32          value = scale / global scale · fp4
//! ```
//!
//! Two consecutive values share a byte, the even one in the low nibble. Leading
//! dimensions of MXFP4 are experts.

use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::layer::{Layer, matrix_of, stack_size, stack_slice};
use super::raw::{RawTensor, bad};
use super::scales::{is_e8m0, row_scales};
use crate::desc::Format;
use crate::error::FormatError;
use crate::formats::{mxfp4::MXFP4, nvfp4::NVFP4};
use crate::weight::{HostWeight, SharedBytes};

/// Code bytes per MXFP4 block.
const MX_CODES: usize = 16;
/// Code bytes per NVFP4 block.
const NV_CODES: usize = 8;

/// MXFP4 layer, or a stack of them.
#[derive(Debug)]
pub(super) struct Mxfp4Layer {
    shape: Vec<usize>,
    blocks: SharedBytes,
    scales: SharedBytes,
}

impl Mxfp4Layer {
    /// Checks the shapes.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when types or shapes differ from the module's description.
    pub fn new(blocks: RawTensor, scales: RawTensor) -> Result<Self, FormatError> {
        blocks.expect_type(Dtype::U8)?;
        if !is_e8m0(&scales) {
            return Err(bad(&scales.name, format!("expected type U8 or F8_E8M0, got {:?}", scales.dtype)));
        }
        let Some((&MX_CODES, outer)) = blocks.shape.split_last().filter(|(_, outer)| outer.len() >= 2) else {
            return Err(bad(&blocks.name, format!("expected shape [.., N, K/32, 16], got {:?}", blocks.shape)));
        };
        scales.expect_shape(outer)?;
        if scales.elements() == 0 {
            return Err(bad(&scales.name, format!("has no elements: shape {:?}", scales.shape)));
        }
        let mut shape = outer.to_vec();
        if let Some(k) = shape.last_mut() {
            // Cannot overflow: the file holds 16 bytes for each of them.
            *k *= 2 * MX_CODES;
        }
        Ok(Self { shape, blocks: blocks.bytes, scales: scales.bytes })
    }

    /// Layer of rows of codes, `[…, N, K/2]` bytes. Tensors of type F4 count
    /// codes: `[…, N, K]`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_rows(codes: RawTensor, scales: RawTensor) -> Result<Self, FormatError> {
        let of_block = if codes.dtype == Dtype::F4 { 2 * MX_CODES } else { MX_CODES };
        let mut shape = codes.shape.clone();
        match shape.pop() {
            Some(row) if row.is_multiple_of(of_block) && !shape.is_empty() => shape.extend([row / of_block, MX_CODES]),
            _ => {
                let what = format!("expected rows of whole blocks of 32 codes, got shape {:?}", codes.shape);
                return Err(bad(&codes.name, what));
            }
        }
        Self::new(RawTensor { shape, dtype: Dtype::U8, ..codes }, scales)
    }
}

impl Layer for Mxfp4Layer {
    fn format(&self) -> Format {
        Format::new(&MXFP4)
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn bytes(&self) -> usize {
        self.blocks.len() + self.scales.len()
    }

    fn weight(&self, index: usize) -> Result<HostWeight, FormatError> {
        let (n, k) = matrix_of(&self.shape);
        let count = stack_size(&self.shape);
        let (codes, scales) = (stack_slice(&self.blocks, index, count), stack_slice(&self.scales, index, count));
        let mut blocks = vec![0u8; scales.len() * (1 + MX_CODES)];
        blocks
            .par_chunks_exact_mut(1 + MX_CODES)
            .zip(codes.par_chunks_exact(MX_CODES))
            .zip(scales.par_iter())
            .with_min_len(1024)
            .for_each(|((block, codes), &scale)| {
                block[0] = scale;
                // A byte of a GGUF block holds values j and j + 16.
                for (j, byte) in block[1..].iter_mut().enumerate() {
                    let nibble = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 0xf;
                    *byte = nibble(j) | nibble(j + 16) << 4;
                }
            });
        HostWeight::new(self.format(), n, k, blocks.into())
    }
}

/// NVFP4 layer.
#[derive(Debug)]
pub(super) struct Nvfp4Layer {
    n: usize,
    k: usize,
    codes: SharedBytes,
    scales: SharedBytes,
    tensor_scale: RawTensor,
    /// Whether the tensor scale is a divisor.
    divides: bool,
}

impl Nvfp4Layer {
    /// Checks the shapes. `divides`: the tensor scale is a divisor (`weight_global_scale`).
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when types or shapes differ from the module's description.
    pub fn new(
        codes: RawTensor,
        scales: RawTensor,
        tensor_scale: RawTensor,
        divides: bool,
    ) -> Result<Self, FormatError> {
        codes.expect_type(Dtype::U8)?;
        scales.expect_type(Dtype::F8_E4M3)?;
        tensor_scale.scale_type()?;
        let (n, row_bytes) = codes.matrix()?;
        if !row_bytes.is_multiple_of(NV_CODES) {
            return Err(bad(&codes.name, format!("expected K/2 bytes a row, K a multiple of 16, got {row_bytes}")));
        }
        scales.expect_shape(&[n, row_bytes / NV_CODES])?;
        if tensor_scale.elements() != 1 {
            return Err(bad(&tensor_scale.name, format!("expected one scale, got shape {:?}", tensor_scale.shape)));
        }
        let k = row_bytes * 2;
        Ok(Self { n, k, codes: codes.bytes, scales: scales.bytes, tensor_scale, divides })
    }
}

impl Layer for Nvfp4Layer {
    fn format(&self) -> Format {
        Format::new(&NVFP4)
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.k]
    }

    fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.tensor_scale.bytes.len()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let mut blocks = vec![0u8; self.scales.len() * (NV_CODES + 1)];
        blocks
            .par_chunks_exact_mut(NV_CODES + 1)
            .zip(self.codes.par_chunks_exact(NV_CODES))
            .zip(self.scales.par_iter())
            .with_min_len(1024)
            .for_each(|((block, codes), &scale)| {
                block[..NV_CODES].copy_from_slice(codes);
                block[NV_CODES] = scale;
            });
        let mut row_scale = row_scales(&self.tensor_scale, self.n)?;
        if self.divides {
            row_scale.iter_mut().for_each(|scale| *scale = 1.0 / *scale);
        }
        HostWeight::new(self.format(), self.n, self.k, blocks.into())?.with_row_scale(row_scale)
    }
}
