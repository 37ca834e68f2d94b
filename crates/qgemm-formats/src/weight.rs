//! [`HostWeight`]: one weight matrix in host memory, in its canonical (row of blocks) layout.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::desc::Format;
use crate::error::FormatError;

/// Bytes that are owned or borrowed from something shared (a memory-mapped file), cheap to clone and slice.
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

    /// The part `range` of these bytes, or `None` when it leaves them.
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

/// Marks a stored position of an act-order weight that no input feature feeds (its weight is zero).
pub const NO_COLUMN: u32 = u32::MAX;

/// A weight `W[N, K]` in host memory: `n` rows of `⌈stored_k / block_len⌉` blocks.
///
/// `k` is the number of input features the layer has. `stored_k` is the length of a stored row: `k`, except
/// for act-order checkpoints, whose columns are stored sorted by group ([`HostWeight::k_order`]) and may be
/// padded where a group holds fewer columns than the others.
#[derive(Clone, Debug)]
pub struct HostWeight {
    format: Format,
    n: usize,
    k: usize,
    stored_k: usize,
    blocks: SharedBytes,
    row_scale: Option<Arc<[f32]>>,
    k_order: Option<Arc<[u32]>>,
}

impl HostWeight {
    /// A weight over canonical blocks.
    ///
    /// # Errors
    /// A [`FormatError`] when a dimension is 0, `k` does not suit the format, the size overflows, or
    /// `blocks` is not exactly `n` rows long.
    pub fn new(format: Format, n: usize, k: usize, blocks: SharedBytes) -> Result<Self, FormatError> {
        Self::build(format, n, k, k, blocks)
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
        Ok(Self { format, n, k, stored_k, blocks, row_scale: None, k_order: None })
    }

    /// Adds the f32 factor of every row.
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

    /// A weight whose stored column `i` multiplies input feature `k_order[i]`, or nothing where that is
    /// [`NO_COLUMN`]. `k` is the number of input features; `k_order.len()` is the stored row length.
    ///
    /// # Errors
    /// As [`HostWeight::new`], and when an entry is neither below `k` nor [`NO_COLUMN`], or comes twice.
    pub fn with_k_order(
        format: Format,
        n: usize,
        k: usize,
        blocks: SharedBytes,
        k_order: Vec<u32>,
    ) -> Result<Self, FormatError> {
        let mut seen = vec![false; k];
        for &column in k_order.iter().filter(|&&c| c != NO_COLUMN) {
            match seen.get_mut(column as usize) {
                Some(s) if !*s => *s = true,
                _ => {
                    return Err(FormatError::BadFile {
                        file: "act-order".into(),
                        what: format!("column {column} comes twice or is not below K = {k}"),
                    });
                }
            }
        }
        let mut weight = Self::build(format, n, k, k_order.len(), blocks)?;
        weight.k_order = Some(k_order.into());
        Ok(weight)
    }

    /// The format of the blocks.
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

    /// Values in a stored row, before padding to whole blocks.
    pub fn stored_k(&self) -> usize {
        self.stored_k
    }

    /// All blocks, row after row.
    pub fn blocks(&self) -> &[u8] {
        &self.blocks
    }

    /// The blocks of row `n`.
    pub fn row(&self, n: usize) -> &[u8] {
        let start = self.format.row_offset(n, self.stored_k);
        &self.blocks[start..start + self.format.row_bytes(self.stored_k)]
    }

    /// Factor of every row, where the format has one and the weight carries it (1 otherwise).
    pub fn row_scale(&self) -> Option<&[f32]> {
        self.row_scale.as_deref()
    }

    /// Which input feature each stored column multiplies, where that is not the identity.
    pub fn k_order(&self) -> Option<&[u32]> {
        self.k_order.as_deref()
    }

    /// Decodes row `n` in stored order, row scale applied; `out` holds `blocks_per_row × block_len` values,
    /// of which those past [`HostWeight::stored_k`] are block padding.
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

    /// Decodes row `n` in the order of the input features: `k` values.
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
}
