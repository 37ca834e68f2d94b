//! compressed-tensors pack-quantized layers (llm-compressor).
//!
//! ```text
//! weight_packed     [N, words] i32         code of a row along K, plus 2^(bits − 1), low bits first
//! weight_scale      [N, groups] or [1]     value = scale · (code − zero)
//! weight_shape      [2] i64 or i32         N, K
//! weight_zero_point [words, groups] i32    packed likewise along N; absent where symmetric
//! weight_g_idx      [K] i32                group of every input feature, with act-order
//! ```
//!
//! 3-bit codes straddle words; older files have ten
//! whole codes a word. Stacks of experts have another
//! dimension in front: `[E, N, words]`.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::gptq::field;
use super::grouped::{GroupedSettings, consecutive_groups};
use super::groups::{GroupContents, GroupPlan};
use super::json::Json;
use super::layer::{Found, Layer, erase};
use super::raw::{RawTensor, RawTensors, bad, unsupported, word};
use super::scales::scales_in_f16;
use super::stack::StackLayer;
use super::stated::Stated;
use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

/// Bits of a code.
const BITS: [usize; 4] = [2, 3, 4, 8];

/// A pack-quantized layer.
#[derive(Debug)]
pub(super) struct PackQuantizedLayer {
    n: usize,
    plan: GroupPlan,
    codes: Packing,
    packed: SharedBytes,
    scales: RawTensor,
    zeros: Option<Zeros>,
}

#[derive(Debug)]
struct Zeros {
    packing: Packing,
    tensor: RawTensor,
    /// Whether the settings say that there are none.
    stated_symmetric: bool,
}

/// Codes in words of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packing {
    bits: usize,
    /// Words of a sequence of codes.
    words: usize,
    /// Codes of a word, if none straddles two.
    whole: Option<usize>,
}

impl Packing {
    /// Packing of `count` codes in `words` words; `None` if they do not fit.
    fn of(bits: usize, count: usize, words: usize) -> Option<Self> {
        let dense = count.checked_mul(bits).map(|bits| bits.div_ceil(32)) == Some(words);
        let whole = 32 / bits;
        let is_whole = count.div_ceil(whole) == words;
        match (dense, is_whole) {
            // The same bits, but of few 3-bit codes either may be meant.
            (true, true) if 32 % bits != 0 && count > whole => None,
            (true, _) => Some(Self { bits, words, whole: None }),
            (false, true) => Some(Self { bits, words, whole: Some(whole) }),
            (false, false) => None,
        }
    }

    /// The same packing of `count` codes; `None` if they do not fit.
    fn like(self, count: usize, words: usize) -> Option<Self> {
        let expected = match self.whole {
            None => count.checked_mul(self.bits)?.div_ceil(32),
            Some(whole) => count.div_ceil(whole),
        };
        (words == expected).then_some(Self { words, ..self })
    }

    fn read(&self, word: impl Fn(usize) -> u32, index: usize) -> u32 {
        match self.whole {
            None => field(word, index, self.bits),
            Some(whole) => word(index / whole) >> (index % whole * self.bits) & ((1 << self.bits) - 1),
        }
    }
}

/// Takes the layer whose codes are tensor `name`.
pub(super) fn take_pack_quantized(tensors: &mut RawTensors, name: &str, stated: &Stated<'_>) -> Option<Found> {
    let base = name.strip_suffix(".weight_packed")?;
    if tensors.get(name)?.dtype != Dtype::I32 {
        return None;
    }
    let scales = tensors.remove(&format!("{base}.weight_scale"))?;
    let packed = tensors.remove(name)?;
    let mut other = |part: &str| tensors.remove(&format!("{base}.weight_{part}")).filter(|other| other.elements() > 0);
    let (shape, zeros, g_idx) = (other("shape"), other("zero_point"), other("g_idx"));
    let layer = match shape {
        None => {
            let names = [format!("{base}.weight_shape")];
            Err(FormatError::missing(name, "compressed-tensors pack-quantized", names))
        }
        Some(shape) => read_shape(&shape, packed.shape.len()).and_then(|[n, k]| {
            let settings = settings(stated, base)?;
            match (packed.shape.len(), zeros, g_idx) {
                (3, _, Some(_)) => Err(unsupported(name, "act-order of a stack of experts")),
                (3, None, None) => erase(StackLayer::new(packed, [scales], move |packed, [scales]| {
                    PackQuantizedLayer::new(packed, scales, None, None, [n, k], &settings)
                })),
                (3, Some(zeros), None) => {
                    erase(StackLayer::new(packed, [scales, zeros], move |packed, [scales, zeros]| {
                        PackQuantizedLayer::new(packed, scales, Some(zeros), None, [n, k], &settings)
                    }))
                }
                (_, zeros, g_idx) => erase(PackQuantizedLayer::new(packed, scales, zeros, g_idx, [n, k], &settings)),
            }
        }),
    };
    Some((format!("{base}.weight"), layer))
}

/// Settings of a module, from its group.
fn settings(stated: &Stated<'_>, module: &str) -> Result<GroupedSettings, FormatError> {
    let group = stated.group_of(module);
    let value = |key: &str| group.map(|group| group.weights.get(key)).filter(|value| !value.is_null());
    let who_says = |key: &str| match (group, value(key)) {
        (Some(group), Some(value)) => format!("`{key}` {value} of {}", group.name),
        _ => "no settings say which".into(),
    };
    let wrong = |key: &str, expected: &str| bad(module, format!("{}: expected {expected}", who_says(key)));
    let number = |key: &str| match value(key) {
        Some(value) => value.integer().map(Some).ok_or_else(|| wrong(key, "a number")),
        None => Ok(None),
    };
    let bits = number("num_bits")?.map(|bits| u32::try_from(bits).map_err(|_| wrong("num_bits", "a number of bits")));
    let symmetric = value("symmetric").map(|value| value.boolean().ok_or_else(|| wrong("symmetric", "true or false")));
    let group_size = match value("strategy").and_then(Json::word).as_deref() {
        // One scale a row, or one in all.
        Some("channel" | "tensor") => Some(-1),
        _ => number("group_size")?,
    };
    Ok(GroupedSettings {
        bits: bits.transpose()?,
        who_says_bits: who_says("num_bits"),
        group_size,
        who_says_group: who_says("group_size"),
        symmetric: symmetric.transpose()?,
    })
}

/// N and K of `weight_shape`, whose numbers are those of a shape of `dimensions`.
fn read_shape(shape: &RawTensor, dimensions: usize) -> Result<[usize; 2], FormatError> {
    let (width, count) = match shape.dtype {
        Dtype::I64 => (8, shape.bytes.len() / 8),
        Dtype::I32 => (4, shape.bytes.len() / 4),
        other => return Err(bad(&shape.name, format!("expected type I64 or I32, got {other:?}"))),
    };
    if count != dimensions.max(2) {
        return Err(bad(&shape.name, format!("expected {} numbers, got shape {:?}", dimensions.max(2), shape.shape)));
    }
    let number = |i: usize| {
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(&shape.bytes[i * width..(i + 1) * width]);
        let number = if width == 8 { i64::from_le_bytes(bytes) } else { i64::from(word(&bytes, 0).cast_signed()) };
        let is_dimension = usize::try_from(number).ok().filter(|&number| number > 0);
        is_dimension.ok_or_else(|| bad(&shape.name, format!("expected positive numbers, got {number}")))
    };
    Ok([number(count - 2)?, number(count - 1)?])
}

impl PackQuantizedLayer {
    /// Checks shapes, finds the width and sorts columns by group.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the tensors do not match each other or the
    /// settings, [`FormatError::UnsupportedFile`] for other widths.
    fn new(
        packed: RawTensor,
        scales: RawTensor,
        zeros: Option<RawTensor>,
        g_idx: Option<RawTensor>,
        [n, k]: [usize; 2],
        settings: &GroupedSettings,
    ) -> Result<Self, FormatError> {
        let name = packed.name.clone();
        scales.scale_type()?;
        let (rows, words) = packed.matrix()?;
        if rows != n {
            return Err(bad(&name, format!("weight_shape has {n} rows: expected the same, got {rows}")));
        }
        let codes = packing(&name, k, words, settings)?;
        let groups = groups_of(&scales, n)?;
        let group_of = match g_idx.map(|g_idx| read_groups(&g_idx, k)).transpose()?.flatten() {
            Some(group_of) => group_of,
            None => consecutive_groups(&name, k, groups, settings)?,
        };
        let plan = GroupPlan::new(&name, codes.bits, &group_of, groups)?;
        let zeros = match (zeros, settings.symmetric) {
            (None, Some(false)) => {
                let kind = format!("compressed-tensors pack-quantized int{}, which is not symmetric", codes.bits);
                let names = [name.replace("weight_packed", "weight_zero_point")];
                return Err(FormatError::missing(&name, &kind, names));
            }
            (None, _) => None,
            (Some(tensor), symmetric) => {
                tensor.expect_type(Dtype::I32)?;
                let (words, columns) = tensor.matrix()?;
                let packing = codes.like(n, words).filter(|_| columns == groups);
                let packing = packing.ok_or_else(|| {
                    let (bits, shape) = (codes.bits, &tensor.shape);
                    bad(
                        &tensor.name,
                        format!("expected {n} × {groups} zero points of {bits} bits, got shape {shape:?}"),
                    )
                })?;
                Some(Zeros { packing, tensor, stated_symmetric: symmetric == Some(true) })
            }
        };
        Ok(Self { n, plan, codes, packed: packed.bytes, scales, zeros })
    }

    /// Zero point of (group, row).
    fn zero_point(&self, zeros: &Zeros, group: usize, row: usize) -> u8 {
        let groups = zeros.tensor.shape[1];
        zeros.packing.read(|at| word(&zeros.tensor.bytes, at * groups + group), row) as u8
    }

    /// Refuses zero points beside settings that say there are none.
    fn check_symmetry(&self, zeros: &Zeros) -> Result<(), FormatError> {
        let middle = 1u8 << (self.codes.bits - 1);
        let groups = 0..zeros.tensor.shape[1];
        let is_other = |group: usize| (0..self.n).any(|row| self.zero_point(zeros, group, row) != middle);
        if zeros.stated_symmetric && groups.into_iter().any(is_other) {
            let what = "has zero points other than 0, and the settings say that the layer is symmetric";
            return Err(bad(&zeros.tensor.name, what));
        }
        Ok(())
    }

    fn unpack_rows(&self, rows: Range<usize>, codes: &mut [u8]) {
        for (row, codes) in rows.zip(codes.chunks_exact_mut(self.plan.k())) {
            let words = &self.packed[row * self.codes.words * 4..];
            for (column, code) in codes.iter_mut().enumerate() {
                *code = self.codes.read(|index| word(words, index), column) as u8;
            }
        }
    }
}

/// Packing of K codes a row, by the number of words and the settings.
fn packing(name: &str, k: usize, words: usize, settings: &GroupedSettings) -> Result<Packing, FormatError> {
    let candidates: Vec<Packing> = BITS.into_iter().filter_map(|bits| Packing::of(bits, k, words)).collect();
    let stated = settings.bits.map(|bits| bits as usize);
    if let Some(&packing) = candidates.iter().find(|packing| stated == Some(packing.bits)) {
        return Ok(packing);
    }
    match (stated, &candidates[..]) {
        (Some(bits), _) if !BITS.contains(&bits) => Err(unsupported(
            name,
            format!("is compressed-tensors pack-quantized int{bits}: expected 2, 3, 4 or 8 bits"),
        )),
        (None, &[packing]) => Ok(packing),
        _ => {
            let fitting: Vec<usize> = candidates.iter().map(|packing| packing.bits).collect();
            let said = &settings.who_says_bits;
            Err(bad(
                name,
                format!("{words} words a row of {k} codes fit {fitting:?} bits, but {said}: expected one width"),
            ))
        }
    }
}

/// Groups of a row: scales are `[N, groups]`, `[N]`, or one.
fn groups_of(scales: &RawTensor, n: usize) -> Result<usize, FormatError> {
    match scales.shape[..] {
        _ if scales.elements() == 1 => Ok(1),
        [rows] if rows == n => Ok(1),
        [rows, groups] if rows == n && groups > 0 => Ok(groups),
        _ => Err(bad(&scales.name, format!("expected scales of {n} rows, got shape {:?}", scales.shape))),
    }
}

/// Groups of input features. `None` where all are −1, the value of layers
/// without act-order.
fn read_groups(g_idx: &RawTensor, k: usize) -> Result<Option<Vec<u32>>, FormatError> {
    g_idx.expect_type(Dtype::I32)?;
    g_idx.expect_shape(&[k])?;
    let groups: Vec<u32> = (0..k).map(|column| word(&g_idx.bytes, column)).collect();
    // Other negative groups become huge numbers, which the plan refuses.
    Ok(Some(groups).filter(|groups| groups.iter().any(|&group| group != u32::MAX)))
}

impl Layer for PackQuantizedLayer {
    fn format(&self) -> Format {
        self.plan.format()
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.plan.k()]
    }

    fn bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, |zeros| zeros.tensor.bytes.len());
        self.packed.len() + zeros + self.scales.bytes.len()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let (count, groups) = (self.scales.elements(), groups_of(&self.scales, self.n)?);
        let scale = scales_in_f16(&self.scales, move |group, row| if count == 1 { 0 } else { row * groups + group })?;
        if let Some(zeros) = &self.zeros {
            self.check_symmetry(zeros)?;
        }
        let middle = 1u8 << (self.codes.bits - 1);
        let zero = |group: usize, row: usize| self.zeros.as_ref().map_or(middle, |z| self.zero_point(z, group, row));
        let codes = |rows: Range<usize>, codes: &mut [u8]| self.unpack_rows(rows, codes);
        self.plan.build(self.n, &GroupContents { codes: &codes, scale: &scale, zero: &zero })
    }
}
