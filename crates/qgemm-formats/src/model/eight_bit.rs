//! Layers of one byte per weight: INT8 per channel; FP8 per tensor, per
//! channel, or per 128×128, 32×32 or 1×32 block.
//!
//! ```text
//! weight           [N, K] I8, F8_E4M3 or F8_E5M2
//! weight_scale     one, [N] or [N, 1]                     value = scale · weight
//! weight_zero_point  the same shapes, I8, of INT8 only    value = scale · (weight − zero point)
//! weight_scale_inv [⌈N/128⌉, ⌈K/128⌉] (also as weight_scale)  value = scale · weight, despite the name
//!                  [⌈N/32⌉, ⌈K/32⌉] or [N, ⌈K/32⌉]: powers of two
//! ```
//!
//! FP8 scales are F32, F16, BF16, or E8M0 bytes (F8_E8M0 or U8). Scales of
//! 32 columns must be powers of two, as must all scales when the settings
//! have `"scale_fmt": "ue8m0"`. Any other value is an error, never rounded.
//!
//! FP8 weights without a scale have scale 1, unless the settings promise
//! scales. NaN codes of FP8 weights are data and pass unchecked.
//! INT8 with zero points becomes integer groups with group scales of 1,
//! because the row scale stays an f32 factor. Zero points that are all 0
//! are dropped: some writers store them for symmetric layers.

use half::f16;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::layer::Layer;
use super::raw::{RawTensor, bad, unsupported};
use super::scales::{Scales, e8m0_of, row_scales};
use super::settings::LayerSettings;
use crate::desc::Format;
use crate::error::FormatError;
use crate::formats::fp8::{FP8_E4M3, FP8_E4M3_BLOCK128, FP8_E5M2, FP8_E5M2_BLOCK128, SCALE_BLOCK};
use crate::formats::int_group::{INT8_G128, write_block};
use crate::formats::int8_channel::{INT8_CHANNEL, ZERO_CODE};
use crate::formats::mxfp8::{MXFP8, MXFP8_E5M2, SCALE_BLOCK as MX_BLOCK};
use crate::weight::{HostWeight, SharedBytes};
use crate::x_format::XFormat;

/// Settings of 8-bit layers. An invalid setting fails only
/// the layers that use it.
#[derive(Clone, Debug)]
pub(super) struct EightBitSettings {
    /// Rows and columns per FP8 scale.
    block: Result<Option<Vec<usize>>, FormatError>,
    /// Whether FP8 scales must be powers of two.
    ue8m0_scales: Result<bool, FormatError>,
    /// X format of FP8 layers, as stated.
    stated_x: Option<XFormat>,
}

impl EightBitSettings {
    /// Reads the settings of one layer.
    pub fn of(layer: &LayerSettings<'_>) -> Self {
        Self { block: layer.weight_block_size(), ue8m0_scales: layer.has_ue8m0_scales(), stated_x: layer.stated_x() }
    }
}

/// An INT8 or FP8 layer.
#[derive(Debug)]
pub(super) struct EightBitLayer {
    n: usize,
    k: usize,
    weight: SharedBytes,
    scale: Option<RawTensor>,
    format: Format,
    /// XOR mask from file codes to format codes. Two's complement and offset
    /// binary differ in the top bit.
    flip: u8,
    /// Zero point of every row. `None` when the format fixes it.
    zeros: Option<Vec<u8>>,
    /// Rows per block scale. 1 without blocks.
    scale_rows: usize,
    /// Whether scales must be powers of two.
    ue8m0_scales: bool,
    /// X format, as stated by the settings.
    stated_x: Option<XFormat>,
}

impl EightBitLayer {
    /// Whether a tensor of this type can be such a layer.
    /// INT8 also needs a scale.
    pub fn has_type(dtype: Dtype) -> bool {
        matches!(dtype, Dtype::I8 | Dtype::F8_E4M3 | Dtype::F8_E5M2)
    }

    /// Checks the shapes.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when scales match neither tensor,
    /// rows nor blocks, or zero points neither tensor nor rows.
    /// [`FormatError::UnsupportedFile`] for other block sizes, and
    /// for zero points of FP8.
    pub fn new(
        weight: RawTensor,
        scale: Option<RawTensor>,
        zero_point: Option<RawTensor>,
        config: &EightBitSettings,
    ) -> Result<Self, FormatError> {
        let (n, k) = weight.matrix()?;
        let (by_row, by_block) = match weight.dtype {
            Dtype::I8 => (&INT8_CHANNEL, None),
            Dtype::F8_E4M3 => (&FP8_E4M3, Some([&FP8_E4M3_BLOCK128, &MXFP8])),
            _ => (&FP8_E5M2, Some([&FP8_E5M2_BLOCK128, &MXFP8_E5M2])),
        };
        let (format, scale_rows) = match (&scale, by_block) {
            (Some(scale), _) if is_row_scale(scale, n) => (by_row, 1),
            (None, Some(_)) => (by_row, 1),
            (Some(scale), Some([by_block, by_power])) => match scale_block(scale, &weight, config)? {
                [SCALE_BLOCK, _] => (by_block, SCALE_BLOCK),
                [rows, _] => (by_power, rows),
            },
            (Some(scale), None) if matches!(scale.shape[..], [rows, groups] if rows == n && groups < k) => {
                let what = format!(
                    "is int8 with a scale for each group of columns (compressed-tensors int-quantized), which is not \
                     supported: expected 1 or {n} scales, got shape {:?}",
                    scale.shape
                );
                return Err(unsupported(&weight.name, what));
            }
            (Some(scale), None) => {
                return Err(bad(&scale.name, format!("expected 1 or {n} scales, got shape {:?}", scale.shape)));
            }
            (None, None) => return Err(bad(&weight.name, "8-bit integers without a scale")),
        };
        if let Some(scale) = &scale {
            match weight.dtype {
                Dtype::I8 => {
                    scale.scale_type()?;
                }
                _ => {
                    Scales::of(scale)?;
                }
            }
        }
        let ue8m0_scales = match by_block {
            Some([_, by_power]) => std::ptr::eq(format, by_power) || config.ue8m0_scales.clone()?,
            None => false,
        };
        let stated_x = by_block.and(config.stated_x);
        let flip = if weight.dtype == Dtype::I8 { ZERO_CODE } else { 0 };
        let zeros = zero_point.filter(|zero_point| zero_point.bytes.iter().any(|&byte| byte != 0));
        let zeros = zeros.map(|zero_point| zero_codes(&zero_point, &weight, n)).transpose()?;
        let format = Format::new(if zeros.is_some() { &INT8_G128 } else { format });
        Ok(Self { n, k, weight: weight.bytes, scale, format, flip, zeros, scale_rows, ue8m0_scales, stated_x })
    }

    /// Blocks of integer groups with group scale 1 and the
    /// zero point of their row.
    fn grouped_blocks(&self, zeros: &[u8]) -> Result<SharedBytes, FormatError> {
        const BITS: usize = 8;
        let (len, bytes) = (self.format.block_len, self.format.block_bytes);
        let mut blocks = vec![0u8; self.size()?];
        let rows = blocks.par_chunks_mut(self.format.row_bytes(self.k)).zip(self.weight.par_chunks(self.k)).zip(zeros);
        rows.for_each(|((out, row), &zero)| {
            let mut codes = vec![zero; len];
            for (block, values) in out.chunks_exact_mut(bytes).zip(row.chunks(len)) {
                codes.fill(zero);
                for (code, &byte) in codes.iter_mut().zip(values) {
                    *code = byte ^ self.flip;
                }
                write_block(BITS, &codes, f16::ONE, zero, block);
            }
        });
        Ok(blocks.into())
    }

    /// Blocks of one byte per code without block scales. Shares the
    /// file's bytes where possible.
    fn plain_blocks(&self) -> Result<SharedBytes, FormatError> {
        if self.flip == 0 && self.k.is_multiple_of(self.format.block_len) {
            return Ok(self.weight.clone());
        }
        // A ragged last block is padded with the code of byte 0.
        let mut blocks = vec![self.flip; self.size()?];
        let rows = blocks.par_chunks_mut(self.format.row_bytes(self.k)).zip(self.weight.par_chunks(self.k));
        rows.for_each(|(out, row)| {
            for (code, &byte) in out.iter_mut().zip(row) {
                *code = byte ^ self.flip;
            }
        });
        Ok(blocks.into())
    }

    fn scaled_blocks(&self, scale: &RawTensor) -> Result<SharedBytes, FormatError> {
        let (format, scales) = (self.format, Scales::of(scale)?);
        let (block_len, per_row) = (format.block_len, self.k.div_ceil(format.block_len));
        let in_bytes = format.block_bytes == block_len + 1;
        let mut blocks = vec![0u8; self.size()?];
        let rows = blocks.par_chunks_mut(format.row_bytes(self.k)).zip(self.weight.par_chunks(self.k));
        rows.enumerate().for_each(|(n, (out, row))| {
            for (b, (block, codes)) in out.chunks_exact_mut(format.block_bytes).zip(row.chunks(block_len)).enumerate() {
                block[..codes.len()].copy_from_slice(codes);
                let value = scales.read(n / self.scale_rows * per_row + b);
                match in_bytes {
                    // NaN stays NaN. Loading then refuses it.
                    true => block[block_len] = e8m0_of(value).unwrap_or(0xff),
                    false => block[block_len..].copy_from_slice(&value.to_le_bytes()),
                }
            }
        });
        Ok(blocks.into())
    }

    /// Size of the blocks in bytes. The shape is not empty.
    fn size(&self) -> Result<usize, FormatError> {
        let format = self.format;
        if self.n == 0 {
            return Err(FormatError::ZeroDimension { name: "N" });
        }
        format.check_k(self.k)?;
        format.row_bytes(self.k).checked_mul(self.n).ok_or_else(|| FormatError::Overflow {
            what: format!("{format} weight"),
            dims: vec![self.n as u64, self.k as u64],
        })
    }

    fn row_scales(&self) -> Result<Vec<f32>, FormatError> {
        self.scale.as_ref().map_or_else(|| Ok(vec![1.0; self.n]), |scale| row_scales(scale, self.n))
    }
}

/// Rows and columns per FP8 scale, by settings and shape.
///
/// # Errors
/// [`FormatError::UnsupportedFile`] for other block sizes.
/// [`FormatError::BadFile`] for a shape that matches none.
fn scale_block(scale: &RawTensor, weight: &RawTensor, config: &EightBitSettings) -> Result<[usize; 2], FormatError> {
    const BLOCKS: [[usize; 2]; 3] = [[SCALE_BLOCK, SCALE_BLOCK], [MX_BLOCK, MX_BLOCK], [1, MX_BLOCK]];
    let (n, k) = weight.matrix()?;
    let stated = config.block.clone()?;
    if let Some(block) = stated.as_deref().filter(|stated| !BLOCKS.iter().any(|block| block == stated)) {
        let what = format!("scale blocks of {block:?} of {:?} weights: expected one of {BLOCKS:?}", weight.dtype);
        return Err(unsupported(&weight.name, what));
    }
    let shape = |[rows, columns]: [usize; 2]| [n.div_ceil(rows), k.div_ceil(columns)];
    let mut wanted = BLOCKS.into_iter().filter(|block| stated.as_deref().is_none_or(|stated| stated == block));
    let found = wanted.clone().find(|&block| scale.shape == shape(block));
    let expected: Vec<_> = wanted.by_ref().map(shape).collect();
    found.ok_or_else(|| bad(&scale.name, format!("expected one of the shapes {expected:?}, got {:?}", scale.shape)))
}

/// Zero points of `n` rows, as codes.
fn zero_codes(zero_point: &RawTensor, weight: &RawTensor, n: usize) -> Result<Vec<u8>, FormatError> {
    if weight.dtype != Dtype::I8 {
        return Err(unsupported(&zero_point.name, format!("zero points of {:?} weights: expected 0", weight.dtype)));
    }
    zero_point.expect_type(Dtype::I8)?;
    if !is_row_scale(zero_point, n) {
        let what = format!("expected 1 or {n} zero points, got shape {:?}", zero_point.shape);
        return Err(bad(&zero_point.name, what));
    }
    let codes = zero_point.bytes.iter().map(|byte| byte ^ ZERO_CODE);
    Ok(if zero_point.elements() == 1 { codes.cycle().take(n).collect() } else { codes.collect() })
}

/// Whether the shape is that of one scale per tensor or per row.
fn is_row_scale(scale: &RawTensor, n: usize) -> bool {
    scale.elements() == 1 || scale.shape == [n] || scale.shape == [n, 1]
}

impl Layer for EightBitLayer {
    fn format(&self) -> Format {
        self.format
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.k]
    }

    fn bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, Vec::len);
        self.weight.len() + self.scale.as_ref().map_or(0, |scale| scale.bytes.len()) + zeros
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        if let Some(scale) = self.scale.as_ref().filter(|_| self.ue8m0_scales) {
            Scales::of(scale)?.check_ue8m0()?;
        }
        if let Some(zeros) = &self.zeros {
            let blocks = self.grouped_blocks(zeros)?;
            return HostWeight::new(self.format, self.n, self.k, blocks)?.with_row_scale(self.row_scales()?);
        }
        let weight = match &self.scale {
            Some(scale) if !self.format.row_scale => {
                HostWeight::new(self.format, self.n, self.k, self.scaled_blocks(scale)?)?
            }
            _ => HostWeight::new(self.format, self.n, self.k, self.plain_blocks()?)?
                .with_row_scale(self.row_scales()?)?,
        };
        Ok(weight.with_stated_x(self.stated_x))
    }
}
