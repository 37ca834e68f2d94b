//! 4-bit groups around 8 with an addend, as torchao's int4
//! classes have them: `scale · (nibble − 8) + zero`.

use safetensors::tensor::Dtype;

use super::exact::{ExactScales, exact_f16, row_scale, scaled_rows};
use super::layer::Layer;
use super::raw::{RawTensor, bad, unsupported, word};
use crate::desc::{Format, FormatDesc};
use crate::error::FormatError;
use crate::formats::affine_group::{CENTERED4_G32, CENTERED4_G64, write_block};
use crate::weight::{HostWeight, SharedBytes};

/// Codes of a layer.
#[derive(Debug)]
pub(super) enum Nibbles {
    /// Rows of K / 2 bytes, the first code in the low nibble, in
    /// two's complement.
    SignedRows { codes: SharedBytes, k: usize },
    /// Tiles of the m16n8k16 instruction, `[N / 8, K / (16 ·
    /// inner), 32, inner / 2]` words.
    ///
    /// A word has a lane's eight codes of 32 columns: first
    /// those of even columns.
    Tiles { codes: SharedBytes, outer: usize, inner: usize },
}

impl Nibbles {
    /// Rows of K / 2 bytes.
    pub fn signed_rows(codes: RawTensor, k: usize) -> Self {
        Self::SignedRows { codes: codes.bytes, k }
    }

    /// Tiles of an `[n, k]` weight, padded to whole tiles.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the tiles do not hold as
    /// many codes.
    pub fn tiles(codes: RawTensor, [n, k]: [usize; 2]) -> Result<Self, FormatError> {
        let (outer, inner) = match codes.shape[..] {
            [tiles, outer, 32, words @ (1 | 2 | 4)]
                if tiles == n.div_ceil(8) && k <= outer.saturating_mul(32 * words) =>
            {
                (outer, 2 * words)
            }
            _ => {
                let what = format!("tiles have shape {:?}, but the metadata says [{n}, {k}]", codes.shape);
                return Err(bad(&codes.name, what));
            }
        };
        Ok(Self::Tiles { codes: codes.bytes, outer, inner })
    }

    /// Rows and columns with scales: those of whole tiles.
    fn padded(&self, [n, k]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::SignedRows { .. } => [n, k],
            Self::Tiles { outer, inner, .. } => [n.next_multiple_of(8), outer * inner * 16],
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::SignedRows { codes, .. } | Self::Tiles { codes, .. } => codes.len(),
        }
    }

    /// Unsigned code of a column.
    fn read(&self, row: usize, column: usize) -> u8 {
        match self {
            Self::SignedRows { codes, k } => (codes[(row * k + column) / 2] >> (4 * (column % 2)) & 0xf) ^ 8,
            Self::Tiles { codes, outer, inner } => {
                let (pair, words) = (column / 32, inner / 2);
                let byte = column % 32 / 2;
                let lane = row % 8 * 4 + byte % 4;
                let index = ((row / 8 * outer + pair / words) * 32 + lane) * words + pair % words;
                (word(codes, index) >> (4 * (byte / 4 + 4 * (column % 2))) & 0xf) as u8
            }
        }
    }
}

/// Addends of the groups.
#[derive(Debug)]
pub(super) enum Zeros {
    /// A tensor like that of the scales.
    Beside(RawTensor),
    /// Behind each scale.
    Interleaved,
}

/// A layer of 4-bit groups around 8.
#[derive(Debug)]
pub(super) struct CenteredLayer {
    n: usize,
    k: usize,
    group: usize,
    /// Rows that have scales.
    scaled_rows: usize,
    format: &'static FormatDesc,
    nibbles: Nibbles,
    scales: RawTensor,
    zeros: Zeros,
}

impl CenteredLayer {
    /// Checks the shapes. Scales are `[groups, N]`, or `[groups,
    /// N, 2]` with their zeros.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when scales and zeros do not
    /// match the codes. [`FormatError::UnsupportedFile`] for
    /// other groups than multiples of 32.
    pub fn new(
        [n, k]: [usize; 2],
        group: usize,
        nibbles: Nibbles,
        scales: RawTensor,
        zeros: Zeros,
    ) -> Result<Self, FormatError> {
        let [scaled_rows, columns] = nibbles.padded([n, k]);
        let format = if group.is_multiple_of(64) { &CENTERED4_G64 } else { &CENTERED4_G32 };
        if n == 0 || k == 0 || !group.is_multiple_of(format.block_len) || !k.is_multiple_of(format.block_len) {
            let what = format!("4-bit groups of {group} of {k} columns: expected multiples of {}", format.block_len);
            return Err(unsupported(&scales.name, what));
        }
        let groups = columns.div_ceil(group);
        scales.scale_type()?;
        match &zeros {
            Zeros::Interleaved => scales.expect_shape(&[groups, scaled_rows, 2])?,
            Zeros::Beside(zeros) => {
                scales.expect_shape(&[groups, scaled_rows])?;
                zeros.expect_shape(&scales.shape)?;
                zeros.scale_type()?;
            }
        }
        Ok(Self { n, k, group, scaled_rows, format, nibbles, scales, zeros })
    }

    /// Scale and zero of every group of `row`.
    fn records(&self, row: usize) -> Result<Vec<[f32; 2]>, FormatError> {
        let scales = &self.scales;
        let dtype = scales.scale_type()?;
        let at = |group: usize| group * self.scaled_rows + row;
        let groups = 0..self.k.div_ceil(self.group);
        Ok(match &self.zeros {
            Zeros::Interleaved => {
                groups.map(|group| [0, 1].map(|i| dtype.read(&scales.bytes, 2 * at(group) + i))).collect()
            }
            Zeros::Beside(zeros) => {
                let of_zeros = zeros.scale_type()?;
                groups
                    .map(|group| [dtype.read(&scales.bytes, at(group)), of_zeros.read(&zeros.bytes, at(group))])
                    .collect()
            }
        })
    }

    /// Writes the blocks of a row, and returns its row scale.
    fn write_row(&self, row: usize, out: &mut [u8]) -> Result<f32, FormatError> {
        let records = self.records(row)?;
        let factor = if self.scales.dtype == Dtype::F16 { 1.0 } else { row_scale(&records) };
        let mut packed = [0u8; 32];
        let packed = &mut packed[..self.format.block_len / 2];
        for (index, block) in out.chunks_exact_mut(self.format.block_bytes).enumerate() {
            let first = index * self.format.block_len;
            for (i, byte) in packed.iter_mut().enumerate() {
                let code = |column| self.nibbles.read(row, first + 2 * i + column);
                *byte = code(0) | code(1) << 4;
            }
            let group = first / self.group;
            let [scale, zero] = records[group];
            let place = ExactScales { tensor: &self.scales, row, group };
            write_block(packed, [exact_f16(scale, factor, place)?, exact_f16(zero, factor, place)?], block);
        }
        Ok(factor)
    }
}

impl Layer for CenteredLayer {
    fn format(&self) -> Format {
        Format::new(self.format)
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.k]
    }

    fn bytes(&self) -> usize {
        let zeros = match &self.zeros {
            Zeros::Beside(zeros) => zeros.bytes.len(),
            Zeros::Interleaved => 0,
        };
        self.nibbles.bytes() + self.scales.bytes.len() + zeros
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let (blocks, row_scale) = scaled_rows(self.format, [self.n, self.k], |row, out| self.write_row(row, out))?;
        HostWeight::new(self.format(), self.n, self.k, blocks)?.with_row_scale(row_scale)
    }
}
