//! K and V in memory, and their description for the API.

use std::ops::Range;

use qgemm_api::{Keys, KvStrides, Queries};
use qgemm_formats::DType;
use qgemm_formats::float8::e4m3_to_f32;
use qgemm_hal::KvFormat;
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES};

use super::case::{AttentionCase, AttentionStorage, e4m3};

/// A multiple of the alignment of every device's buffers.
const GUARD_BYTES: usize = 256;
const POISON: u8 = 0xff;

/// Keys or values in an otherwise poisoned buffer.
pub(crate) struct KvOperand {
    /// The buffer.
    pub bytes: Vec<u8>,
    /// Block scales in an otherwise poisoned buffer; empty if the
    /// format has none.
    pub scales: Vec<u8>,
    /// The operand in it.
    pub range: Range<usize>,
    /// Strides of the operand.
    pub strides: KvStrides,
    /// Alignment of its address, at most 16.
    pub alignment: usize,
    /// Rows of a page.
    page_rows: usize,
}

impl KvOperand {
    /// A poisoned buffer for the keys or values of a case in its
    /// format of keys.
    pub fn empty(case: &AttentionCase, columns: usize) -> Self {
        Self::empty_in(case, case.kv, columns)
    }

    /// A poisoned buffer for the keys or values of a case in a format.
    fn empty_in(case: &AttentionCase, format: KvFormat, columns: usize) -> Self {
        let (kv_heads, width) = (case.heads.1, format.width());
        let (pages, rows) = (case.pages(), case.rows());
        let page_rows = rows.checked_div(pages).unwrap_or(0);
        let pitch = (columns + case.gap).next_multiple_of(format.step());
        let strides = match case.head_major {
            false => KvStrides {
                page: (page_rows * kv_heads * pitch) as u64,
                token: (kv_heads * pitch) as u64,
                head: pitch as u64,
            },
            true => KvStrides {
                page: (page_rows * kv_heads * pitch) as u64,
                token: pitch as u64,
                head: (page_rows * pitch) as u64,
            },
        };
        let start = GUARD_BYTES + case.offset * width;
        let elements = (rows * kv_heads * pitch).saturating_sub(pitch - columns);
        let len = format.bytes_of(elements);
        let blocks = if format.has_scales() { elements / KV_BLOCK } else { 0 };
        let scales = vec![POISON; (blocks * KV_SCALE_BYTES).next_multiple_of(4)];
        let bytes = vec![POISON; (start + len + GUARD_BYTES).next_multiple_of(4)];
        let alignment = match case.offset * width {
            0 => 16,
            bytes => 16.min(1 << bytes.trailing_zeros()),
        };
        Self { bytes, scales, range: start..start + len, strides, alignment, page_rows }
    }

    /// A buffer with values: `[row][head][column]`.
    pub fn new(case: &AttentionCase, format: KvFormat, columns: usize, values: &[f32]) -> Self {
        let mut operand = Self::empty_in(case, format, columns);
        let (kv_heads, start) = (case.heads.1, operand.range.start);
        for row in 0..case.rows() {
            for head in 0..kv_heads {
                let first = operand.element(row, head);
                for (i, &value) in values[(row * kv_heads + head) * columns..][..columns].iter().enumerate() {
                    let at = first + i;
                    let byte = start + format.bytes_of(at);
                    if format.has_scales() {
                        // Rows of no sequence stay poison.
                        if value.is_nan() {
                            continue;
                        }
                        let scale = case.block_scale(format, row * kv_heads + head, i / KV_BLOCK);
                        DType::F16.write(&mut operand.scales, at / KV_BLOCK, scale);
                        let code = (value / scale).round() as i32;
                        operand.bytes[byte] = match (format, at % 2) {
                            (KvFormat::Q4_0, 0) => (code + 8) as u8,
                            (KvFormat::Q4_0, _) => operand.bytes[byte] | ((code + 8) as u8) << 4,
                            _ => (code as i8).cast_unsigned(),
                        };
                        continue;
                    }
                    match format {
                        KvFormat::Plain(dtype) => dtype.write(&mut operand.bytes[start..], first + i, value),
                        _ => operand.bytes[start + first + i] = e4m3(value),
                    }
                }
            }
        }
        operand
    }

    /// Index of the first element of a head in a row.
    fn element(&self, row: usize, head: usize) -> usize {
        let KvStrides { page, token, head: head_stride } = self.strides;
        let (at_page, at_row) = (row / self.page_rows, row % self.page_rows);
        at_page * page as usize + at_row * token as usize + head * head_stride as usize
    }

    /// Reads a head of a row of `buffer`, times `factor`, and
    /// replaces it by poison.
    pub fn take(
        &self,
        case: &AttentionCase,
        columns: usize,
        [row, head]: [usize; 2],
        factor: f32,
        scales: &[u8],
        buffer: &mut [u8],
    ) -> Vec<f32> {
        let first = self.element(row, head);
        let bytes = &mut buffer[self.range.start + case.kv.bytes_of(first)..][..case.kv.bytes_of(columns)];
        let values = match case.kv {
            KvFormat::Q8_0 | KvFormat::Q4_0 => {
                let code = |i: usize| match case.kv {
                    KvFormat::Q4_0 => i32::from(bytes[i / 2] >> (4 * (i % 2)) & 15) - 8,
                    _ => i32::from(bytes[i].cast_signed()),
                };
                let scale = |i: usize| DType::F16.read(scales, (first + i) / KV_BLOCK);
                (0..columns).map(|i| code(i) as f32 * scale(i)).collect()
            }
            KvFormat::Plain(dtype) => dtype.decode(bytes),
            _ => bytes.iter().map(|&code| e4m3_to_f32(code) * factor).collect(),
        };
        bytes.fill(POISON);
        values
    }
}

/// The queries of a case.
pub(crate) fn api_queries(case: &AttentionCase) -> Queries {
    api_queries_of(case, case.lengths.len())
}

/// Queries of the first `sequences` sequences of a case.
pub(super) fn api_queries_of(case: &AttentionCase, sequences: usize) -> Queries {
    match case.ragged {
        true => Queries::offsets(sequences, case.tokens(), case.most_queries()),
        false => Queries::each(sequences, case.most_queries()),
    }
}

/// The keys of a case.
pub(crate) fn api_keys(case: &AttentionCase) -> Keys {
    let keys = match case.places {
        AttentionStorage::Each => Keys::each(case.most_keys()),
        AttentionStorage::Lengths(spare) => Keys::lengths(case.most_keys() + spare),
        AttentionStorage::Offsets => Keys::offsets(case.rows(), case.most_keys()),
        AttentionStorage::Paged(size) => Keys::paged(case.pages(), size, case.table_width(size)).most(case.most_keys()),
    };
    // Nothing writes operands while a case runs. Every other one
    // says so, and its kernels read them early.
    if case.seed % 2 == 1 { keys.ready() } else { keys }
}
