//! AWQ layers ("gemm" packing): `qweight`, `qzeros`, `scales`.
//!
//! ```text
//! qweight [K, N/8] i32        nibble i of a word holds column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]
//! qzeros  [groups, N/8] i32   in the same order, zero points as they are
//! scales  [groups, N]         value = scale · (code − zero)
//! ```
//!
//! Layers that the settings call symmetric may lack `qzeros`. All
//! their zero points are 8.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::grouped::{GroupedParts, GroupedSettings, consecutive_groups, symmetric_zero};
use super::groups::{GroupContents, GroupPlan};
use super::layer::Layer;
use super::raw::{RawTensor, bad, unsupported, word};
use super::scales::group_scales;
use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

const BITS: usize = 4;
/// Columns per word.
const PACKED: usize = 8;
/// Nibble of column `8c + j`: the inverse of the packing order.
const NIBBLE: [usize; PACKED] = [0, 4, 1, 5, 2, 6, 3, 7];

/// An AWQ layer.
#[derive(Debug)]
pub(super) struct AwqLayer {
    n: usize,
    plan: GroupPlan,
    qweight: SharedBytes,
    zeros: Zeros,
    scales: RawTensor,
}

#[derive(Debug)]
enum Zeros {
    /// One zero point for all groups, optional in the file.
    Symmetric(u8),
    Stored(SharedBytes),
}

impl AwqLayer {
    /// Whether the shapes are those of AWQ (codes packed along
    /// N), not of GPTQ (along K).
    pub fn has_shape(qweight: &RawTensor, scales: &RawTensor) -> bool {
        match (qweight.matrix(), scales.matrix()) {
            (Ok((_, columns)), Ok((_, n))) => columns.checked_mul(PACKED) == Some(n),
            _ => false,
        }
    }

    /// Checks the shapes.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the tensors do not match each other or the
    /// settings. [`FormatError::UnsupportedFile`] for other widths and for act-order.
    pub fn new(parts: GroupedParts, settings: &GroupedSettings) -> Result<Self, FormatError> {
        let GroupedParts { qweight, qzeros, scales, g_idx } = parts;
        let name = &qweight.name;
        qweight.expect_type(Dtype::I32)?;
        scales.scale_type()?;
        if let Some(bits) = settings.bits.filter(|&bits| bits as usize != BITS) {
            let who = &settings.who_says_bits;
            return Err(unsupported(name, format!("AWQ with {bits} bits ({who}): expected {BITS}")));
        }
        if let Some(g_idx) = g_idx {
            return Err(unsupported(&g_idx.name, "act-order in an AWQ layer: expected none"));
        }
        let (k, words) = qweight.matrix()?;
        let (groups, n) = scales.matrix()?;
        if words.checked_mul(PACKED) != Some(n) {
            return Err(bad(name, format!("expected {} words a row for {n} scales, got {words}", n / PACKED)));
        }
        let zeros = match qzeros {
            None => Zeros::Symmetric(symmetric_zero(name, BITS, settings)?),
            Some(qzeros) => {
                qzeros.expect_type(Dtype::I32)?;
                qzeros.expect_shape(&[groups, words])?;
                Zeros::Stored(qzeros.bytes)
            }
        };
        let group_of = consecutive_groups(name, k, groups, settings)?;
        let plan = GroupPlan::new(name, BITS, &group_of, groups)?;
        Ok(Self { n, plan, qweight: qweight.bytes, zeros, scales })
    }

    fn unpack_rows(&self, rows: Range<usize>, codes: &mut [u8]) {
        let k = self.plan.k();
        for column in 0..k {
            for (i, row) in rows.clone().enumerate() {
                codes[i * k + column] = self.nibble(&self.qweight, column, row);
            }
        }
    }

    fn nibble(&self, packed: &[u8], line: usize, row: usize) -> u8 {
        let word = word(packed, line * (self.n / PACKED) + row / PACKED);
        (word >> (4 * NIBBLE[row % PACKED]) & 0xf) as u8
    }
}

impl Layer for AwqLayer {
    fn format(&self) -> Format {
        self.plan.format()
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.plan.k()]
    }

    fn bytes(&self) -> usize {
        let zeros = match &self.zeros {
            Zeros::Symmetric(_) => 0,
            Zeros::Stored(qzeros) => qzeros.len(),
        };
        self.qweight.len() + zeros + self.scales.bytes.len()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let scale = group_scales(&self.scales, self.n)?;
        self.plan.build(
            self.n,
            &GroupContents {
                codes: &|rows, codes| self.unpack_rows(rows, codes),
                scale: &scale,
                zero: &|group, row| match &self.zeros {
                    Zeros::Symmetric(zero) => *zero,
                    Zeros::Stored(qzeros) => self.nibble(qzeros, group, row),
                },
            },
        )
    }
}
