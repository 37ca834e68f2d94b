//! GGUF types whose blocks become blocks of another format at load: types of
//! grids, ternary types, and Q2_0, which has groups of 64 or 128.

mod grids;
mod iq1;
mod iq2;
mod iq3;
mod q2_0;
mod ternary;

pub(super) use q2_0::Q2_0;

use rayon::prelude::*;

use super::gguf::{GgufTensor, ggml_type_name};
use super::layer::{Layer, elements, matrix_of, stack_size, stack_slice};
use super::raw::{bad, unsupported};
use crate::desc::{Format, FormatDesc};
use crate::error::FormatError;
use crate::formats::{grid, iq1_s, linear, ternary as formats};
use crate::weight::{HostWeight, SharedBytes};

/// Conversion of a GGUF type, block by block.
#[derive(Debug)]
pub(super) struct Conversion {
    ggml_type: u32,
    /// Bytes of a block in the file. It has as many values as the format's.
    block_bytes: usize,
    format: &'static FormatDesc,
    /// Writes the block of `format`.
    convert: fn(block: &[u8], out: &mut [u8]),
}

const fn conversion(
    ggml_type: u32,
    block_bytes: usize,
    format: &'static FormatDesc,
    convert: fn(&[u8], &mut [u8]),
) -> Conversion {
    Conversion { ggml_type, block_bytes, format, convert }
}

static CONVERSIONS: [Conversion; 9] = [
    conversion(16, 66, &grid::IQ2, iq2::iq2_xxs),
    conversion(17, 74, &grid::IQ2, iq2::iq2_xs),
    conversion(18, 98, &grid::IQ3_XXS, iq3::iq3_xxs),
    conversion(19, 50, &iq1_s::IQ1_S, iq1::iq1_s),
    conversion(21, 110, &grid::IQ3_S, iq3::iq3_s),
    conversion(22, 82, &grid::IQ2, iq2::iq2_s),
    conversion(29, 56, &grid::IQ1_M, iq1::iq1_m),
    conversion(34, 54, &formats::TQ2_0, ternary::tq1_0),
    conversion(41, 18, &formats::Q2_0_G128, ternary::q1_0),
];

impl Conversion {
    /// Conversion of a type, if it has one.
    pub fn of(ggml_type: u32) -> Option<&'static Self> {
        CONVERSIONS.iter().find(|conversion| conversion.ggml_type == ggml_type)
    }
}

/// A layer of such a type, or a stack of them.
#[derive(Debug)]
pub(super) struct ConvertedLayer {
    conversion: &'static Conversion,
    shape: Vec<usize>,
    blocks: SharedBytes,
}

impl ConvertedLayer {
    /// Checks shape and size.
    ///
    /// # Errors
    /// As [`blocks_of`].
    pub fn new(tensor: &GgufTensor, conversion: &'static Conversion) -> Result<Self, FormatError> {
        let blocks = blocks_of(tensor, (conversion.format.block_len, conversion.block_bytes))?;
        Ok(Self { conversion, shape: tensor.shape.clone(), blocks })
    }
}

/// Bytes of a matrix or stack of matrices, in blocks of so many values and bytes.
///
/// # Errors
/// [`FormatError::KNotMultiple`]. [`FormatError::UnsupportedFile`] for
/// vectors. [`FormatError::BadFile`] when the file holds fewer bytes.
fn blocks_of(tensor: &GgufTensor, (block_len, block_bytes): (usize, usize)) -> Result<SharedBytes, FormatError> {
    let GgufTensor { name, shape, bytes, ggml_type, .. } = tensor;
    let type_name = ggml_type_name(*ggml_type).unwrap_or_default();
    if shape.len() < 2 {
        return Err(unsupported(name, format!("is {type_name} of shape {shape:?}: expected a matrix")));
    }
    let (_, k) = matrix_of(shape);
    if !k.is_multiple_of(block_len) {
        return Err(FormatError::KNotMultiple { format: type_name, block: block_len, k });
    }
    let size = elements(shape).map(|values| values / block_len).and_then(|blocks| blocks.checked_mul(block_bytes));
    size.and_then(|size| bytes.slice(0..size)).ok_or_else(|| {
        bad(name, format!("is {type_name} of shape {shape:?}, and the file holds {} bytes of it", bytes.len()))
    })
}

impl Layer for ConvertedLayer {
    fn format(&self) -> Format {
        Format::new(self.conversion.format)
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn bytes(&self) -> usize {
        self.blocks.len()
    }

    fn weight(&self, index: usize) -> Result<HostWeight, FormatError> {
        let Conversion { block_bytes, format, convert, .. } = *self.conversion;
        let (n, k) = matrix_of(&self.shape);
        let matrix = stack_slice(&self.blocks, index, stack_size(&self.shape));
        let mut blocks = vec![0u8; matrix.len() / block_bytes * format.block_bytes];
        let pairs = blocks.par_chunks_exact_mut(format.block_bytes).zip(matrix.par_chunks_exact(block_bytes));
        pairs.with_min_len(256).for_each(|(out, block)| convert(block, out));
        HostWeight::new(self.format(), n, k, blocks.into())
    }
}

/// Half-word `index` of `bytes`.
fn half_word(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

/// Signs of eight values. Seven are stored; their number of minus signs is even.
fn eighth_sign(signs: u32) -> u8 {
    let seven = (signs & 0x7f) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Writes eight codes of two bits from an entry of a grid, with a bit of `signs`
/// above each.
fn put_octet(codes: &mut [u8], entry: u16, signs: u8) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (entry >> (2 * i) & 3) as u8 | (signs >> i & 1) << 2;
    }
}

/// Sets nibble `index`, the low one of a byte first. Upper bits of `value` are ignored.
fn set_nibble(bytes: &mut [u8], index: usize, value: u8) {
    let shift = index % 2 * 4;
    let byte = &mut bytes[index / 2];
    *byte = *byte & !(0xf << shift) | (value & 0xf) << shift;
}

/// Writes a block: codes of `bits` bits, scales of sub-blocks, d.
fn write_codes(bits: usize, codes: &[u8; 256], scales: &[u8], d: &[u8], out: &mut [u8]) {
    let (packed, records) = out.split_at_mut(codes.len() * bits / 8);
    linear::pack(bits, codes, packed);
    records[..scales.len()].copy_from_slice(scales);
    records[scales.len()..].copy_from_slice(d);
}
