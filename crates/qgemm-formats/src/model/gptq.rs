//! GPTQ layers: `qweight`, `qzeros`, `scales` and, with act-order, `g_idx`.
//!
//! ```text
//! qweight [⌈K·bits/32⌉, N] i32   codes of a column of N, along K, low bits first (3-bit codes straddle words)
//! qzeros  [groups, ⌈N·bits/32⌉] i32   zero points, along N in the same way
//! scales  [groups, N]            value = scale · (code − zero)
//! g_idx   [K] i32                group of every input feature; k / group size where absent
//! ```
//!
//! Version 1 of the format stores `zero − 1`, modulo `2^bits`: like the reference implementation (AutoGPTQ),
//! reading adds 1 and drops the carry, so that a stored 255 of an 8-bit layer means 0, and 256 never arises.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::GptqZeros;
use super::config::QuantConfig;
use super::groups::{GroupContents, GroupPlan};
use super::layer::Layer;
use super::raw::{RawTensor, bad, unsupported, word};
use super::scales::group_scales;
use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

/// The tensors of a layer, before anything is checked.
pub(super) struct GptqParts {
    pub qweight: RawTensor,
    pub qzeros: RawTensor,
    pub scales: RawTensor,
    pub g_idx: Option<RawTensor>,
}

/// A GPTQ layer.
#[derive(Debug)]
pub(super) struct GptqLayer {
    n: usize,
    bits: usize,
    plan: GroupPlan,
    qweight: SharedBytes,
    qzeros: RawTensor,
    scales: RawTensor,
    /// What is added to a stored zero point.
    zero_offset: u32,
}

impl GptqLayer {
    /// Checks shapes, finds the width and sorts columns by group.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the tensors do not fit one another or the settings,
    /// [`FormatError::UnsupportedFile`] for other packings.
    pub fn new(parts: GptqParts, config: &QuantConfig, zeros: GptqZeros) -> Result<Self, FormatError> {
        let GptqParts { qweight, qzeros, scales, g_idx } = parts;
        let name = qweight.name.clone();
        qweight.expect_type(Dtype::I32)?;
        qzeros.expect_type(Dtype::I32)?;
        scales.scale_type()?;
        let stored_less_one = stores_zero_less_one(&name, config, zeros)?;
        let (words, n) = qweight.matrix()?;
        let (groups, scale_columns) = scales.matrix()?;
        if scale_columns != n {
            return Err(bad(&scales.name, format!("expected {n} columns as in qweight, got {scale_columns}")));
        }
        let g_idx = g_idx.filter(|g_idx| g_idx.elements() > 0);
        let features = g_idx.as_ref().map(RawTensor::elements);
        let bits = width(&qweight, &qzeros, n, features, config)?;
        qzeros.expect_shape(&[groups, (n * bits).div_ceil(32)])?;
        let k = features.unwrap_or(words * 32 / bits);
        let group_of = match g_idx {
            Some(g_idx) => read_groups(&g_idx)?,
            None => consecutive_groups(&name, k, groups, config)?,
        };
        let plan = GroupPlan::new(&name, bits, &group_of, groups)?;
        let zero_offset = u32::from(stored_less_one);
        Ok(Self { n, bits, plan, qweight: qweight.bytes, qzeros, scales, zero_offset })
    }

    fn stored_zero(&self, group: usize, row: usize) -> u32 {
        let words = &self.qzeros.bytes[group * self.qzeros.shape[1] * 4..];
        field(|index| word(words, index), row, self.bits)
    }

    fn unpack_rows(&self, rows: Range<usize>, codes: &mut [u8]) {
        for (row, codes) in rows.zip(codes.chunks_exact_mut(self.plan.k())) {
            for (column, code) in codes.iter_mut().enumerate() {
                *code = field(|index| word(&self.qweight, index * self.n + row), column, self.bits) as u8;
            }
        }
    }

    /// Symmetric layers have one zero point, `2^(bits − 1)`, throughout, which shows how it is stored.
    fn warn_if_mislabelled(&self) {
        let middle = 1 << (self.bits - 1);
        let first = self.stored_zero(0, 0);
        let expected = middle - self.zero_offset;
        let other = middle - (1 - self.zero_offset);
        if first != other || expected == other {
            return;
        }
        let all_same = (0..self.qzeros.shape[0]).all(|g| (0..self.n).all(|row| self.stored_zero(g, row) == first));
        if all_same {
            let (read_as, looks_like) = if self.zero_offset == 1 { ("v1", "v2") } else { ("v2", "v1") };
            tracing::warn!(
                tensor = %self.qzeros.name,
                "every zero point is stored as {first}: the file looks like GPTQ {looks_like} but is read as \
                 {read_as}; set `ModelOptions::gptq_zeros` if it is mislabelled"
            );
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
        self.qweight.len() + self.qzeros.bytes.len() + self.scales.bytes.len()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        self.warn_if_mislabelled();
        let scale = group_scales(&self.scales, self.n)?;
        let mask = (1 << self.bits) - 1;
        self.plan.build(
            self.n,
            &GroupContents {
                codes: &|rows, codes| self.unpack_rows(rows, codes),
                scale: &scale,
                zero: &|group, row| ((self.stored_zero(group, row) + self.zero_offset) & mask) as u8,
            },
        )
    }
}

/// Field `index` of a stream of `bits`-bit fields in 32-bit words, low bits first.
fn field(word: impl Fn(usize) -> u32, index: usize, bits: usize) -> u32 {
    let (at, shift) = (index * bits / 32, index * bits % 32);
    let mut window = u64::from(word(at));
    if shift + bits > 32 {
        window |= u64::from(word(at + 1)) << 32;
    }
    (window >> shift) as u32 & ((1 << bits) - 1)
}

fn stores_zero_less_one(name: &str, config: &QuantConfig, zeros: GptqZeros) -> Result<bool, FormatError> {
    let by_config = match config.checkpoint_format.as_deref() {
        None | Some("" | "gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => return Err(unsupported(name, format!("checkpoint format `{other}`: expected gptq or gptq_v2"))),
    };
    Ok(match zeros {
        GptqZeros::FromConfig => by_config,
        GptqZeros::LessOne => true,
        GptqZeros::AsIs => false,
    })
}

/// The width of codes that the shapes allow; the settings decide only where several do.
fn width(
    qweight: &RawTensor,
    qzeros: &RawTensor,
    n: usize,
    features: Option<usize>,
    config: &QuantConfig,
) -> Result<usize, FormatError> {
    let (words, _) = qweight.matrix()?;
    let (_, zero_words) = qzeros.matrix()?;
    let fits = |bits: usize| {
        let columns_fit = match features {
            Some(k) => k.checked_mul(bits).is_some_and(|total| total.div_ceil(32) == words),
            None => words > 0 && (words * 32).is_multiple_of(bits),
        };
        n.checked_mul(bits).is_some_and(|total| total.div_ceil(32) == zero_words) && columns_fit
    };
    let candidates: Vec<usize> = [2, 3, 4, 8].into_iter().filter(|&bits| fits(bits)).collect();
    let stated = config.bits.map(|bits| bits as usize).filter(|_| !config.varies_by_layer());
    match (stated, &candidates[..]) {
        (Some(bits), _) if candidates.contains(&bits) => Ok(bits),
        (None, &[bits]) => Ok(bits),
        (stated, _) => Err(bad(
            &qweight.name,
            format!(
                "qweight {:?} and qzeros {:?} fit codes of {candidates:?} bits, the settings say {stated:?}: expected \
                 one of 2, 3, 4 and 8",
                qweight.shape, qzeros.shape
            ),
        )),
    }
}

fn read_groups(g_idx: &RawTensor) -> Result<Vec<u32>, FormatError> {
    g_idx.expect_type(Dtype::I32)?;
    g_idx.expect_shape(&[g_idx.elements()])?;
    // Negative groups become huge numbers, which the plan refuses.
    Ok((0..g_idx.elements()).map(|k| word(&g_idx.bytes, k)).collect())
}

/// The group of every input feature of a layer without act-order.
///
/// # Errors
/// [`FormatError::BadFile`] when `groups` groups of the stated size do not make up `k` features, or the size is
/// no multiple of 32.
pub(super) fn consecutive_groups(
    name: &str,
    k: usize,
    groups: usize,
    config: &QuantConfig,
) -> Result<Vec<u32>, FormatError> {
    let stated = config.group_size.filter(|_| !config.varies_by_layer());
    let size = match stated {
        Some(-1) => k,
        Some(size) => usize::try_from(size).unwrap_or(0),
        None if groups > 0 && k.is_multiple_of(groups) => k / groups,
        None => return Err(bad(name, format!("K = {k} does not divide into {groups} groups"))),
    };
    if size == 0 || (groups > 1 && !size.is_multiple_of(32)) {
        return Err(bad(name, format!("groups of {size}: expected -1 (one group) or a multiple of 32")));
    }
    if k.div_ceil(size) != groups {
        return Err(bad(
            name,
            format!("K = {k} in groups of {size} makes {} groups, but there are scales for {groups}", k.div_ceil(size)),
        ));
    }
    Ok((0..k).map(|column| (column / size) as u32).collect())
}
