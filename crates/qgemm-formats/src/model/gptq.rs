//! GPTQ layers: `qweight`, `qzeros`, `scales` and, with act-order, `g_idx`.
//!
//! ```text
//! qweight [⌈K·bits/32⌉, N] i32   codes of a column of N, along K, low bits first (3-bit codes straddle words)
//! qzeros  [groups, ⌈N·bits/32⌉] i32   zero points, along N in the same way
//! scales  [groups, N]            value = scale · (code − zero)
//! g_idx   [K] i32                group of every input feature; k / group size where absent
//! ```
//!
//! Version 1 stores `zero − 1`, modulo `2^bits`. Like AutoGPTQ, the reader
//! adds 1 and drops the carry: a stored 255 of an 8-bit layer means 0, and 256
//! never arises. Some files state the wrong version. A symmetric layer reveals
//! the real one, because its zero points are all `2^(bits − 1)`. Symmetric
//! layers may lack `qzeros`.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::grouped::{GroupedParts, GroupedSettings, StoredZeros, consecutive_groups, symmetric_zero};
use super::groups::{GroupContents, GroupPlan};
use super::layer::Layer;
use super::raw::{RawTensor, bad, word};
use super::scales::group_scales;
use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

/// A GPTQ layer.
#[derive(Debug)]
pub(super) struct GptqLayer {
    n: usize,
    bits: usize,
    plan: GroupPlan,
    qweight: SharedBytes,
    zeros: Zeros,
    scales: RawTensor,
}

#[derive(Debug)]
enum Zeros {
    /// One zero point for all groups, optional in the file.
    Symmetric(u8),
    Stored {
        qzeros: RawTensor,
        label: StoredZeros,
        /// Whether the zero points may override the stated version.
        by_data: bool,
    },
}

impl GptqLayer {
    /// Checks shapes, finds the width and sorts columns by group.
    ///
    /// `label` is the stated storage of zero points. `chosen`
    /// is the caller's override.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the tensors do not match
    /// each other or the settings.
    pub fn new(
        parts: GroupedParts,
        settings: &GroupedSettings,
        label: StoredZeros,
        chosen: Option<StoredZeros>,
    ) -> Result<Self, FormatError> {
        let GroupedParts { qweight, qzeros, scales, g_idx } = parts;
        let name = qweight.name.clone();
        qweight.expect_type(Dtype::I32)?;
        scales.scale_type()?;
        let (words, n) = qweight.matrix()?;
        let (groups, scale_columns) = scales.matrix()?;
        if scale_columns != n {
            return Err(bad(&scales.name, format!("expected {n} columns as in qweight, got {scale_columns}")));
        }
        let features = g_idx.as_ref().map(RawTensor::elements);
        let bits = width(&qweight, qzeros.as_ref(), features, settings)?;
        let zeros = match qzeros {
            None => Zeros::Symmetric(symmetric_zero(&name, bits, settings)?),
            Some(qzeros) => {
                qzeros.expect_type(Dtype::I32)?;
                qzeros.expect_shape(&[groups, (n * bits).div_ceil(32)])?;
                // Without a setting, GPTQ is symmetric, as in AutoGPTQ,
                // GPTQModel and transformers.
                let by_data = chosen.is_none() && settings.symmetric != Some(false);
                Zeros::Stored { qzeros, label: chosen.unwrap_or(label), by_data }
            }
        };
        let k = features.unwrap_or(words * 32 / bits);
        let group_of = match g_idx {
            Some(g_idx) => read_groups(&g_idx)?,
            None => consecutive_groups(&name, k, groups, settings)?,
        };
        let plan = GroupPlan::new(&name, bits, &group_of, groups)?;
        Ok(Self { n, bits, plan, qweight: qweight.bytes, zeros, scales })
    }

    /// Reader of zero points by group and row.
    fn zero_points(&self) -> Box<dyn Fn(usize, usize) -> u8 + Sync + '_> {
        match &self.zeros {
            &Zeros::Symmetric(zero) => Box::new(move |_, _| zero),
            Zeros::Stored { qzeros, label, by_data } => {
                let stored = self.stored_zeros(qzeros, *label, *by_data);
                let (offset, mask) = (u32::from(stored == StoredZeros::LessOne), (1 << self.bits) - 1);
                Box::new(move |group, row| ((self.stored_zero(qzeros, group, row) + offset) & mask) as u8)
            }
        }
    }

    /// Storage of zero points. Symmetric layers reveal it, since all their zero
    /// points are `2^(bits − 1)`.
    fn stored_zeros(&self, qzeros: &RawTensor, label: StoredZeros, by_data: bool) -> StoredZeros {
        let first = self.stored_zero(qzeros, 0, 0);
        let shown = match (1 << (self.bits - 1)) - first as i32 {
            0 => StoredZeros::AsIs,
            1 => StoredZeros::LessOne,
            _ => return label,
        };
        let uniform = || (0..qzeros.shape[0]).all(|g| (0..self.n).all(|row| self.stored_zero(qzeros, g, row) == first));
        if shown == label || !uniform() {
            return label;
        }
        let tensor = &qzeros.name;
        if by_data {
            tracing::info!(%tensor, "mislabelled as GPTQ {label}: every zero point is stored as {first}, read as {shown}");
            return shown;
        }
        tracing::warn!(
            %tensor,
            "every zero point is stored as {first}: the layer looks like GPTQ {shown}, symmetric, but is read as {label}; \
             set `ModelOptions::gptq_zeros` if it is mislabelled"
        );
        label
    }

    fn stored_zero(&self, qzeros: &RawTensor, group: usize, row: usize) -> u32 {
        let words = &qzeros.bytes[group * qzeros.shape[1] * 4..];
        field(|index| word(words, index), row, self.bits)
    }

    fn unpack_rows(&self, rows: Range<usize>, codes: &mut [u8]) {
        for (row, codes) in rows.zip(codes.chunks_exact_mut(self.plan.k())) {
            for (column, code) in codes.iter_mut().enumerate() {
                *code = field(|index| word(&self.qweight, index * self.n + row), column, self.bits) as u8;
            }
        }
    }
}

impl Layer for GptqLayer {
    fn format(&self) -> Format {
        self.plan.format()
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.plan.k()]
    }

    fn bytes(&self) -> usize {
        let zeros = match &self.zeros {
            Zeros::Symmetric(_) => 0,
            Zeros::Stored { qzeros, .. } => qzeros.bytes.len(),
        };
        self.qweight.len() + zeros + self.scales.bytes.len()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let scale = group_scales(&self.scales, self.n)?;
        let zero = self.zero_points();
        let codes = |rows: Range<usize>, codes: &mut [u8]| self.unpack_rows(rows, codes);
        self.plan.build(self.n, &GroupContents { codes: &codes, scale: &scale, zero: &zero })
    }
}

/// Field `index` of a stream of `bits`-bit fields in
/// 32-bit words, low bits first.
pub(super) fn field(word: impl Fn(usize) -> u32, index: usize, bits: usize) -> u32 {
    let (at, shift) = (index * bits / 32, index * bits % 32);
    let mut window = u64::from(word(at));
    if shift + bits > 32 {
        window |= u64::from(word(at + 1)) << 32;
    }
    (window >> shift) as u32 & ((1 << bits) - 1)
}

/// Code width by the shapes. The settings decide only
/// when several widths match.
fn width(
    qweight: &RawTensor,
    qzeros: Option<&RawTensor>,
    features: Option<usize>,
    settings: &GroupedSettings,
) -> Result<usize, FormatError> {
    let (words, n) = qweight.matrix()?;
    let zero_words = qzeros.map(RawTensor::matrix).transpose()?.map(|(_, words)| words);
    let words_of = |count: usize, bits: usize| count.checked_mul(bits).map(|total| total.div_ceil(32));
    let fits = |bits: usize| {
        let columns_fit = match features {
            Some(k) => words_of(k, bits) == Some(words),
            None => words > 0 && (words * 32).is_multiple_of(bits),
        };
        columns_fit && zero_words.is_none_or(|zero_words| words_of(n, bits) == Some(zero_words))
    };
    let candidates: Vec<usize> = [2, 3, 4, 8].into_iter().filter(|&bits| fits(bits)).collect();
    match (settings.bits.map(|bits| bits as usize), &candidates[..]) {
        (Some(bits), _) if candidates.contains(&bits) => Ok(bits),
        (None, &[bits]) => Ok(bits),
        (stated, _) => {
            let said = if stated.is_some() { &settings.who_says_bits } else { "no settings say which" };
            let zeros = qzeros.map_or("no qzeros".into(), |qzeros| format!("qzeros {:?}", qzeros.shape));
            let shape = &qweight.shape;
            let what = format!("qweight {shape:?} and {zeros} fit codes of {candidates:?} bits, but {said}");
            Err(bad(&qweight.name, format!("{what}: expected one of 2, 3, 4 and 8")))
        }
    }
}

fn read_groups(g_idx: &RawTensor) -> Result<Vec<u32>, FormatError> {
    g_idx.expect_type(Dtype::I32)?;
    g_idx.expect_shape(&[g_idx.elements()])?;
    // Negative groups become huge numbers, which the plan refuses.
    Ok((0..g_idx.elements()).map(|k| word(&g_idx.bytes, k)).collect())
}
