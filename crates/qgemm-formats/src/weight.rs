//! Weight matrices in host memory ([`HostWeight`]), in canonical rows of blocks.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use crate::desc::Format;
use crate::error::FormatError;
use crate::gated::row_difference;
use crate::prepack::SHARED_ROWS;
use crate::x_format::XFormat;

/// Bytes that are owned or shared (e.g. with a memory-mapped file),
/// cheap to clone and slice.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..(*owner).as_ref().len();
        Self { owner, range }
    }

    /// Slice `range` of these bytes. `None` when out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self { owner: self.owner.clone(), range: start..start + range.len() })
    }
}

impl std::ops::Deref for SharedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.len())
    }
}

/// Padding entry of a column order: no input feature, weight 0.
pub const NO_COLUMN: u32 = u32::MAX;

/// Weight `W[N, K]` in host memory: `n` rows of `⌈stored_k / block_len⌉` blocks.
///
/// `k` is the number of input features. `stored_k` is the length of a stored
/// row. It differs from `k` only with act-order: columns are sorted by group
/// ([`HostWeight::k_order`]), and smaller groups may be padded.
#[derive(Clone, Debug)]
pub struct HostWeight {
    format: Format,
    n: usize,
    k: usize,
    stored_k: usize,
    blocks: SharedBytes,
    row_scale: Option<Arc<[f32]>>,
    k_order: Option<Arc<[u32]>>,
    stated_x: Option<XFormat>,
}

impl HostWeight {
    /// Weight of canonical blocks.
    ///
    /// # Errors
    /// A [`FormatError`] when a dimension is 0, `k` does not fit the format, the size
    /// overflows, `blocks` is not exactly `n` rows long, or a zero point exceeds
    /// [`FormatDesc::largest_zero_point`](crate::FormatDesc::largest_zero_point).
    pub fn new(format: Format, n: usize, k: usize, blocks: SharedBytes) -> Result<Self, FormatError> {
        Self::build(format, n, k, k, blocks)
    }

    /// Weight with rows of `stored_k`. The caller keeps the column order.
    pub(crate) fn of_stored(
        format: Format,
        n: usize,
        k: usize,
        stored_k: usize,
        blocks: SharedBytes,
    ) -> Result<Self, FormatError> {
        Self::build(format, n, k, stored_k, blocks)
    }

    fn build(format: Format, n: usize, k: usize, stored_k: usize, blocks: SharedBytes) -> Result<Self, FormatError> {
        if n == 0 {
            return Err(FormatError::ZeroDimension { name: "N" });
        }
        format.check_k(stored_k)?;
        let expected = stored_k
            .checked_add(format.block_len)
            .and_then(|_| format.blocks_per_row(stored_k).checked_mul(format.block_bytes))
            .and_then(|row| row.checked_mul(n))
            .ok_or_else(|| FormatError::Overflow {
                what: format!("{format} weight"),
                dims: vec![n as u64, stored_k as u64],
            })?;
        if blocks.len() != expected {
            return Err(FormatError::WrongLength {
                what: format!("{format} weight of {n} x {stored_k}"),
                expected,
                got: blocks.len(),
            });
        }
        check_zero_points(format, &blocks, format.blocks_per_row(stored_k))?;
        Ok(Self { format, n, k, stored_k, blocks, row_scale: None, k_order: None, stated_x: None })
    }

    /// Adds an f32 factor per row.
    ///
    /// # Errors
    /// When there are not exactly `n` factors, or one is not finite.
    pub fn with_row_scale(mut self, row_scale: Vec<f32>) -> Result<Self, FormatError> {
        if row_scale.len() != self.n {
            return Err(FormatError::WrongLength {
                what: "row scales (4 bytes each)".into(),
                expected: self.n * 4,
                got: row_scale.len() * 4,
            });
        }
        if let Some(row) = row_scale.iter().position(|s| !s.is_finite()) {
            return Err(FormatError::NonFiniteScale { what: "row scales".into(), row, block: 0 });
        }
        self.row_scale = Some(row_scale.into());
        Ok(self)
    }

    /// Act-order weight: stored column `i` multiplies input feature `k_order[i]`,
    /// or none for [`NO_COLUMN`].
    ///
    /// `k` is the number of input features; `k_order.len()` is the stored row length.
    ///
    /// # Errors
    /// As [`HostWeight::new`]. [`FormatError::ColumnOrder`] when an entry is out of range
    /// or a duplicate. [`FormatError::TooManyColumns`] when `k` exceeds 32-bit entries.
    pub fn with_k_order(
        format: Format,
        n: usize,
        k: usize,
        blocks: SharedBytes,
        k_order: Vec<u32>,
    ) -> Result<Self, FormatError> {
        if k > NO_COLUMN as usize {
            return Err(FormatError::TooManyColumns { k });
        }
        let mut weight = Self::build(format, n, k, k_order.len(), blocks)?;
        // A set instead of a flag per column: an invalid `k` may be far larger than
        // the order and the blocks.
        let mut named = HashSet::with_capacity(k_order.len());
        let is_bad = |&(_, &column): &(usize, &u32)| column as usize >= k || !named.insert(column);
        let columns = k_order.iter().enumerate().filter(|&(_, &column)| column != NO_COLUMN);
        if let Some((at, &column)) = { columns }.find(is_bad) {
            return Err(FormatError::ColumnOrder { at, column, k });
        }
        weight.k_order = Some(k_order.into());
        Ok(weight)
    }

    /// Sets the X format that the checkpoint states for this weight. It does not
    /// change products by itself.
    pub fn with_stated_x(mut self, stated_x: Option<XFormat>) -> Self {
        self.stated_x = stated_x;
        self
    }

    /// X format that the checkpoint states. `None` when it states nothing of the kind.
    ///
    /// [`XFormat::E4M3Block`] and [`XFormat::E4M3Token`] are dynamic: each token is
    /// quantized as it comes. [`XFormat::E4M3Tensor`] is static, with one calibrated factor
    /// (the tensor `input_scale`).
    pub fn stated_x(&self) -> Option<XFormat> {
        self.stated_x
    }

    /// Stated X format of all `parts`, if equal.
    pub(crate) fn stated_by_all<'a>(mut parts: impl Iterator<Item = &'a HostWeight>) -> Option<XFormat> {
        let stated = parts.next()?.stated_x;
        stated.filter(|_| parts.all(|part| part.stated_x == stated))
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Columns of a stored row, without block padding.
    pub fn stored_k(&self) -> usize {
        self.stored_k
    }

    /// All blocks, row after row.
    pub fn blocks(&self) -> &[u8] {
        &self.blocks
    }

    /// [`HostWeight::blocks`], to be shared.
    pub(crate) fn shared_blocks(&self) -> &SharedBytes {
        &self.blocks
    }

    /// The blocks of row `n`.
    pub fn row(&self, n: usize) -> &[u8] {
        let start = self.format.row_offset(n, self.stored_k);
        &self.blocks[start..start + self.format.row_bytes(self.stored_k)]
    }

    /// Row factors, f32. `None` means 1.
    pub fn row_scale(&self) -> Option<&[f32]> {
        self.row_scale.as_deref()
    }

    /// Input feature of each stored column. `None` means the natural order.
    pub fn k_order(&self) -> Option<&[u32]> {
        self.k_order.as_deref()
    }

    /// Dequantizes row `n` in stored order, with its row scale.
    ///
    /// `out` holds `blocks_per_row × block_len` values. Values from
    /// [`HostWeight::stored_k`] on are block padding.
    pub fn dequantize_stored_row(&self, n: usize, out: &mut [f32]) {
        let f = self.format;
        for (block, values) in self.row(n).chunks_exact(f.block_bytes).zip(out.chunks_exact_mut(f.block_len)) {
            (f.dequantize_block)(block, values);
        }
        if let Some(scale) = &self.row_scale {
            for v in out.iter_mut() {
                *v *= scale[n];
            }
        }
    }

    /// Dequantizes row `n` in the order of input features: `k` values.
    pub fn dequantize_row(&self, n: usize) -> Vec<f32> {
        let mut stored = vec![0.0; self.format.blocks_per_row(self.stored_k) * self.format.block_len];
        self.dequantize_stored_row(n, &mut stored);
        match &self.k_order {
            None => {
                stored.truncate(self.k);
                stored
            }
            Some(order) => {
                let mut row = vec![0.0; self.k];
                for (&column, &value) in order.iter().zip(&stored) {
                    if column != NO_COLUMN {
                        row[column as usize] = value;
                    }
                }
                row
            }
        }
    }

    /// Dequantizes to row-major `[n, k]`, in the order of input features. Runs on all
    /// threads of the current rayon pool.
    ///
    /// ```
    /// use qgemm_formats::quantize_matrix;
    /// let weight = quantize_matrix(&[1.0; 3 * 64], 3, 64, "q4_k".parse()?)?.weight;
    /// assert_eq!((weight.format().name, weight.dequantize()?.len()), ("q5_0", 3 * 64));
    /// # Ok::<(), qgemm_formats::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::Overflow`] when the values exceed the address space. A large K may
    /// have few stored columns.
    pub fn dequantize(&self) -> Result<Vec<f32>, FormatError> {
        let size = self.n.checked_mul(self.k).filter(|&count| count <= isize::MAX as usize / size_of::<f32>());
        let size = size.ok_or_else(|| FormatError::Overflow {
            what: format!("values of a {} weight", self.format),
            dims: vec![self.n as u64, self.k as u64],
        })?;
        let mut values = vec![0.0; size];
        values.par_chunks_mut(self.k).enumerate().for_each(|(n, row)| row.copy_from_slice(&self.dequantize_row(n)));
        Ok(values)
    }

    /// Concatenates weights along N, e.g. Q, K and V for one product. A weight without row
    /// factors gets factors of 1 if another has them.
    ///
    /// ```
    /// use qgemm_formats::{HostWeight, quantize_matrix};
    /// let part = |n: usize| quantize_matrix(&vec![0.5; n * 32], n, 32, "q8_0".parse()?);
    /// let qkv = HostWeight::concat_rows(&[&part(4)?.weight, &part(2)?.weight, &part(2)?.weight])?;
    /// assert_eq!((qkv.n(), qkv.k()), (8, 32));
    /// # Ok::<(), qgemm_formats::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::PartMismatch`] when format, K or column order differ.
    /// [`FormatError::PartEndsInScale`] when rows share scales (128×128 blocks)
    /// and a weight before the last has a row count that is no multiple of 8.
    /// [`FormatError::NoParts`]; [`FormatError::Overflow`].
    pub fn concat_rows(parts: &[&HostWeight]) -> Result<HostWeight, FormatError> {
        let (&first, others) = parts.split_first().ok_or(FormatError::NoParts)?;
        for (i, other) in others.iter().enumerate() {
            if let Some((what, first, got)) = row_difference(first, other) {
                return Err(FormatError::PartMismatch { what, number: i + 2, first, got });
            }
        }
        let format = first.format;
        let shares = format.scale_planes.iter().any(|plane| plane.rows > 1);
        let ends = parts[..parts.len() - 1].iter().position(|part| shares && !part.n.is_multiple_of(SHARED_ROWS));
        if let Some(part) = ends {
            let n = parts[part].n;
            return Err(FormatError::PartEndsInScale {
                format: format.desc().name,
                number: part + 1,
                n,
                rows: SHARED_ROWS,
            });
        }
        let overflow = || FormatError::Overflow {
            what: format!("concatenated {format} weights"),
            dims: parts.iter().map(|part| part.n as u64).collect(),
        };
        let sum = |of: fn(&HostWeight) -> usize| parts.iter().try_fold(0usize, |sum, part| sum.checked_add(of(part)));
        let (n, bytes) = (sum(|w| w.n).ok_or_else(overflow)?, sum(|w| w.blocks.len()).ok_or_else(overflow)?);
        let mut blocks = Vec::with_capacity(bytes);
        parts.iter().for_each(|part| blocks.extend_from_slice(&part.blocks));
        let mut weight = Self::build(format, n, first.k, first.stored_k, blocks.into())?;
        weight.k_order = first.k_order.clone();
        weight.stated_x = Self::stated_by_all(parts.iter().copied());
        if parts.iter().all(|part| part.row_scale.is_none()) {
            return Ok(weight);
        }
        let ones = |part: &HostWeight| vec![1.0; part.n];
        let scales = parts.iter().flat_map(|&part| part.row_scale().map_or_else(|| ones(part), <[f32]>::to_vec));
        weight.with_row_scale(scales.collect())
    }
}

/// Checks zero points: kernels store code minus zero point in few bits.
fn check_zero_points(format: Format, blocks: &[u8], per_row: usize) -> Result<(), FormatError> {
    let Some(largest) = format.largest_zero_point().filter(|&largest| largest < u8::MAX) else { return Ok(()) };
    let bad =
        blocks.par_chunks_exact(format.block_bytes).position_first(|block| block[format.block_bytes - 1] > largest);
    match bad {
        None => Ok(()),
        Some(at) => Err(FormatError::ZeroPoint {
            format: format.desc().name,
            row: at / per_row,
            block: at % per_row,
            largest,
            got: blocks[(at + 1) * format.block_bytes - 1],
        }),
    }
}
