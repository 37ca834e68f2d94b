//! E4M3 factors with a scale per block along K.

use qgemm_formats::{XFormat, XRow};
use qgemm_hal::FactorFormat;

use crate::activations::{ActivationKind, activations};

/// Codes and scales of a factor, row by row.
pub(super) struct Blocks {
    /// Values of the codes.
    pub codes: Vec<f32>,
    /// An f32 scale per block.
    pub scales: Vec<f32>,
    columns: usize,
}

impl Blocks {
    /// Quantizes values of a kind. Small integers are kept, with
    /// powers of two as scales.
    pub fn new(kind: ActivationKind, [rows, columns]: [usize; 2], seed: u64) -> Self {
        let values = activations(kind, rows, columns, qgemm_formats::DType::F32, seed);
        let blocks = columns.div_ceil(FactorFormat::BLOCK);
        if kind == ActivationKind::SmallIntegers {
            let scale = |i: usize| [1.0, 2.0, 4.0][(i / blocks + i % blocks) % 3];
            return Self { codes: values, scales: (0..rows * blocks).map(scale).collect(), columns };
        }
        let parts = XFormat::E4M3Block.parts(false, None).unwrap_or_else(|| unreachable!("it has planes"));
        let mut made = Self { codes: Vec::new(), scales: Vec::new(), columns };
        let (mut codes, mut scales) = (vec![0; parts.code_bytes(columns)], vec![0; parts.scale_bytes(columns)]);
        for row in values.chunks(columns.max(1)) {
            parts.quantize_row(row, None, XRow { codes: &mut codes, scales: &mut scales, sums: &mut [] });
            made.codes.extend((0..columns).map(|i| FactorFormat::E4M3Block.read(&codes, i)));
            made.scales.extend(scales.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)));
        }
        made
    }

    /// The dequantized values.
    pub fn values(&self) -> Vec<f32> {
        let blocks = self.columns.div_ceil(FactorFormat::BLOCK);
        let value = |(i, code): (usize, &f32)| {
            let (row, column) = (i / self.columns, i % self.columns);
            code * self.scales[row * blocks + column / FactorFormat::BLOCK]
        };
        self.codes.iter().enumerate().map(value).collect()
    }
}
