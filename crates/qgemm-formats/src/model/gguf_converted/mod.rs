//! GGUF types whose blocks become blocks of another
//! format at load: types of grids, ternary types, and
//! Q2_0, which has groups of 64 or 128.

mod blocks;
mod codes;
mod grids;
mod iq1;
mod iq2;
mod iq3;
mod q2_0;
mod ternary;

pub(super) use q2_0::Q2_0;

use rayon::prelude::*;

use blocks::blocks_of;

use super::gguf::GgufTensor;
use super::layer::{Layer, matrix_of, stack_size, stack_slice};
use crate::desc::{Format, FormatDesc};
use crate::error::FormatError;
use crate::formats::{grid, iq1_s, q1_0, ternary as formats};
use crate::weight::{HostWeight, SharedBytes};

/// Conversion of a block.
type Convert = fn(block: &[u8], out: &mut [u8]);

/// Conversion of a GGUF type, block by block.
#[derive(Debug)]
pub(super) struct Conversion {
    ggml_type: u32,
    /// Bytes of a block in the file. It has as many values as
    /// the format's.
    block_bytes: usize,
    format: &'static FormatDesc,
    /// Writes the block of `format`; `None` if it is the
    /// file's.
    convert: Option<Convert>,
}

const fn conversion(
    ggml_type: u32,
    block_bytes: usize,
    format: &'static FormatDesc,
    convert: Option<Convert>,
) -> Conversion {
    Conversion { ggml_type, block_bytes, format, convert }
}

static CONVERSIONS: [Conversion; 9] = [
    conversion(16, 66, &grid::IQ2, Some(iq2::iq2_xxs)),
    conversion(17, 74, &grid::IQ2, Some(iq2::iq2_xs)),
    conversion(18, 98, &grid::IQ3_XXS, Some(iq3::iq3_xxs)),
    conversion(19, 50, &iq1_s::IQ1_S, Some(iq1::iq1_s)),
    conversion(21, 110, &grid::IQ3_S, Some(iq3::iq3_s)),
    conversion(22, 82, &grid::IQ2, Some(iq2::iq2_s)),
    conversion(29, 56, &grid::IQ1_M, Some(iq1::iq1_m)),
    conversion(34, 54, &formats::TQ2_0, Some(ternary::tq1_0)),
    conversion(41, 18, &q1_0::Q1_0, None),
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
        let Some(convert) = convert else { return HostWeight::new(self.format(), n, k, matrix) };
        let mut blocks = vec![0u8; matrix.len() / block_bytes * format.block_bytes];
        let pairs = blocks.par_chunks_exact_mut(format.block_bytes).zip(matrix.par_chunks_exact(block_bytes));
        pairs.with_min_len(256).for_each(|(out, block)| convert(block, out));
        HostWeight::new(self.format(), n, k, blocks.into())
    }
}
