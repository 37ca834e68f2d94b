//! KV caches in shaders: format numbers, and the
//! extents of a cache's operands.

use qgemm_hal::abi::dtype_code;
use qgemm_hal::op::attention::KV_BLOCK;
use qgemm_hal::{KvFormat, KvRows, Paging, Unsupported};

use super::dispatch::MARGIN;

/// Scaling of a cache's elements, in a separate operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvNumbers {
    /// None: unquantized elements.
    Plain,
    /// A factor per head.
    Factors,
    /// A scale per block.
    Blocks,
}

impl KvNumbers {
    /// Scaling of a format.
    pub fn of(kv: KvFormat) -> Self {
        match kv {
            _ if kv.has_scales() => KvNumbers::Blocks,
            _ if kv.has_factors() => KvNumbers::Factors,
            _ => KvNumbers::Plain,
        }
    }
}

/// Number of a format in shaders, as in `shaders/numbers.wgsl`
/// and `shaders/kv_codes.wgsl`.
pub(super) fn kv_code(kv: KvFormat) -> u32 {
    match kv {
        KvFormat::Plain(dtype) => dtype_code(dtype),
        KvFormat::Q8_0 => 4,
        KvFormat::Q4_0 => 5,
        _ => 3,
    }
}

/// The keys or values of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cache {
    kv: KvFormat,
    heads: usize,
    /// Elements up to the end of the last
    /// head of the last page.
    elements: usize,
}

impl Cache {
    /// A cache with these heads and columns.
    pub fn new(
        kv: KvFormat,
        heads: usize,
        Paging { pages, page_size, .. }: Paging,
        at: &KvRows,
        columns: usize,
    ) -> Self {
        let KvRows { page_stride, rows } = at;
        let elements = match pages > 0 && page_size > 0 {
            true => {
                let last = (pages - 1) as u64 * page_stride
                    + (page_size - 1) as u64 * rows.token_stride
                    + (heads - 1) as u64 * rows.head_stride;
                last as usize + columns
            }
            false => 0,
        };
        Self { kv, heads, elements }
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.kv.bytes_of(self.elements)
    }

    /// Bytes of all factors or scales, and of one of them.
    pub fn scale_bytes(&self) -> (usize, usize) {
        match KvNumbers::of(self.kv) {
            KvNumbers::Plain => (0, size_of::<u32>()),
            KvNumbers::Factors => (self.heads * size_of::<f32>(), size_of::<f32>()),
            KvNumbers::Blocks => (self.kv.scale_bytes_of(self.elements), self.kv.scale_bytes_of(KV_BLOCK)),
        }
    }

    /// Checks that shaders can count the elements of `name`.
    pub fn check(&self, name: &str) -> Result<(), Unsupported> {
        let elements = self.elements as u64;
        if elements + MARGIN <= u64::from(u32::MAX) {
            return Ok(());
        }
        Err(Unsupported::new(format!("counts elements in 32 bits, and {name} has {elements}: use fewer pages or rows")))
    }
}
