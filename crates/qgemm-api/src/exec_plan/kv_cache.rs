//! KV cache of a plan: format, pages, and the regions of a layer.

use qgemm_formats::DType;
use qgemm_hal::KvFormat;

use super::build::{Buffer, Builder};
use super::file::RegionKind;
use super::operands::{PlannedCache, PlannedHeads, PlannedPages};
use super::sizes::{NamedRegion, WORD, too_large};
use crate::attention::{Attention, Keys};
use crate::error::Error;
use crate::kv_append::KvAppend;

/// Region of the block table.
const BLOCK_TABLE: &str = "block_table";
/// Region of the factors of all caches.
const FACTORS: &str = "kv_factors";

/// Regions of a layer's cache.
pub(super) struct LayerCache {
    pub k: Buffer,
    pub v: Buffer,
    /// None for rows in the type of the queries.
    pub planned: Option<PlannedCache>,
}

impl Builder<'_> {
    /// Cache of layer `i` for such keys and values.
    pub(super) fn layer_cache(&self, i: usize, [k, v]: [&Buffer; 2]) -> Result<LayerCache, Error> {
        let kind = if self.options.train { RegionKind::Activation } else { RegionKind::KvCache };
        let format = self.options.kv_format.filter(|_| !self.options.train);
        let pages = match self.options.page_size.filter(|_| !self.options.train) {
            Some(size) => {
                let enough = self.context.div_ceil(size).checked_mul(self.sequences).ok_or_else(too_large)?;
                let count = self.options.pages.unwrap_or(enough);
                Some(PlannedPages { count, size, table: BLOCK_TABLE.into() })
            }
            None => None,
        };
        let rows = match &pages {
            Some(pages) => pages.count.checked_mul(pages.size),
            None => self.sequences.checked_mul(self.context),
        };
        let rows = rows.ok_or_else(too_large)?;
        let cache = |role: &str, of: &Buffer| {
            let name = format!("blk.{i}.{role}_cache");
            Buffer { name, kind, rows, kv: format, ..of.clone() }
        };
        let of_format = format.unwrap_or(KvFormat::Plain(k.dtype));
        let scales = |role: &str| of_format.has_scales().then(|| format!("blk.{i}.{role}_scales"));
        let planned = (format.is_some() || pages.is_some()).then(|| PlannedCache {
            format: of_format.name().to_owned(),
            pages,
            k_scales: scales("k"),
            v_scales: scales("v"),
            factors: of_format.has_factors().then(|| FACTORS.to_owned()),
        });
        Ok(LayerCache { k: cache("k", k), v: cache("v", v), planned })
    }

    /// Records that the next operation uses lengths, block table, scales, factors and
    /// tables of angles.
    pub(super) fn uses_cache(&mut self, heads: &PlannedHeads) -> Result<(), Error> {
        heads.lengths.iter().for_each(|name| self.out.uses(name, RegionKind::Input, heads.sequences * WORD));
        heads.sinks.iter().for_each(|name| self.out.uses(name, RegionKind::Weight, heads.heads * WORD));
        for (_, name, bytes) in heads.rotary.iter().flat_map(|rotary| rotary.regions(heads.capacity)) {
            self.out.uses(name, RegionKind::Weight, bytes.ok_or_else(too_large)?);
        }
        for (_, name, bytes) in heads.cache_regions()? {
            let kind = match name {
                BLOCK_TABLE => RegionKind::Input,
                FACTORS => RegionKind::Weight,
                _ => RegionKind::KvCache,
            };
            self.out.uses(name, kind, bytes.ok_or_else(too_large)?);
        }
        Ok(())
    }

    /// The block table, an input of the caller.
    pub(super) fn block_table(&self) -> Option<Buffer> {
        let size = self.options.page_size.filter(|_| !self.options.train)?;
        let (kind, dtype) = (RegionKind::Input, DType::F32);
        let columns = self.context.div_ceil(size);
        Some(Buffer { name: BLOCK_TABLE.into(), kind, rows: self.sequences, columns, dtype, kv: None })
    }
}

impl PlannedHeads {
    /// Format of the cache.
    fn kv_format(&self) -> Result<Option<KvFormat>, Error> {
        let Some(cache) = &self.cache else { return Ok(None) };
        let known = KvFormat::ALL.into_iter().find(|format| format.name() == cache.format);
        let wrong = || Error::PlanMismatch {
            at: "heads.cache.format".into(),
            expected: KvFormat::ALL.map(KvFormat::name).join(", "),
            got: cache.format.clone(),
        };
        known.map(Some).ok_or_else(wrong)
    }

    /// Keys of the sequences.
    pub(super) fn keys(&self) -> Keys {
        let keys = match self.cache.as_ref().and_then(|cache| cache.pages.as_ref()) {
            Some(PlannedPages { count, size, .. }) => Keys::paged(*count, *size, self.width(*size)).most(self.capacity),
            None if self.lengths.is_some() => Keys::lengths(self.capacity),
            None => Keys::each(self.capacity),
        };
        // Lengths and tables are inputs of the plan, and a layer's
        // cache has no other writer than the layer's append.
        if self.lengths.is_some() { keys.ready() } else { keys }
    }

    /// Pages of a sequence at most.
    fn width(&self, page_size: usize) -> usize {
        self.capacity.checked_div(page_size).unwrap_or(0) + usize::from(!self.capacity.is_multiple_of(page_size.max(1)))
    }

    /// States the cache's format.
    pub(super) fn append_to_cache(&self, append: KvAppend) -> Result<KvAppend, Error> {
        Ok(self.kv_format()?.into_iter().fold(append, KvAppend::kv_format))
    }

    /// States the cache's format.
    pub(super) fn attend_to_cache(&self, attention: Attention) -> Result<Attention, Error> {
        Ok(self.kv_format()?.into_iter().fold(attention, Attention::kv_format))
    }

    /// Elements of the keys of all sequences.
    fn elements(&self) -> Option<usize> {
        let rows = match self.cache.as_ref().and_then(|cache| cache.pages.as_ref()) {
            Some(pages) => pages.count.checked_mul(pages.size),
            None => self.sequences.checked_mul(self.capacity),
        };
        rows?.checked_mul(self.kv_heads)?.checked_mul(self.head_dim)
    }

    /// Bytes of the keys of all sequences; `None` on overflow.
    pub(super) fn cache_bytes(&self, dtype: DType) -> Result<Option<usize>, Error> {
        let format = self.kv_format()?.unwrap_or(KvFormat::Plain(dtype));
        Ok(self.elements().and_then(|elements| elements.checked_mul(format.bits())).map(|bits| bits / 8))
    }

    /// Region of the factors of heads.
    pub(super) fn factors(&self) -> Option<&String> {
        self.cache.as_ref()?.factors.as_ref()
    }

    /// Regions of the block table, and of the scales of keys and values.
    pub(super) fn table_and_scales(&self) -> (Option<&str>, [Option<&str>; 2]) {
        let Some(PlannedCache { pages, k_scales, v_scales, .. }) = &self.cache else { return (None, [None; 2]) };
        (pages.as_ref().map(|pages| pages.table.as_str()), [k_scales.as_deref(), v_scales.as_deref()])
    }

    /// Regions beside keys, values and lengths.
    pub(super) fn cache_regions(&self) -> Result<Vec<NamedRegion<'_>>, Error> {
        let (Some(cache), Some(format)) = (&self.cache, self.kv_format()?) else { return Ok(Vec::new()) };
        let PlannedCache { pages, k_scales, v_scales, factors, .. } = cache;
        let scales = self.elements().map(|elements| format.scale_bytes_of(elements));
        let mut found: Vec<NamedRegion<'_>> = Vec::new();
        found.extend(k_scales.as_deref().map(|name| ("heads.cache.k_scales", name, scales)));
        found.extend(v_scales.as_deref().map(|name| ("heads.cache.v_scales", name, scales)));
        found.extend(factors.as_deref().map(|name| ("heads.cache.factors", name, self.kv_heads.checked_mul(WORD))));
        if let Some(PlannedPages { size, table, .. }) = pages {
            let words = self.sequences.checked_mul(self.width(*size));
            found.push(("heads.cache.pages.table", table, words.and_then(|words| words.checked_mul(WORD))));
        }
        Ok(found)
    }
}
