//! Workspace layout of a plan: counters, partial sums and converted X.
//! Scheduler and kernels agree on it.

use std::ops::Range;

use qgemm_formats::{XFactor, XFormat};

use super::super::dequantize::CheckedDequantize;
use super::super::quantize::CheckedQuantize;
use super::plan::{LaunchPlan, StreamK, TileConfig, XPrologue};

/// Maximum tiles that a plan may split along K. More tiles
/// fill every device without a split.
const MAX_SPLIT_TILES: u64 = 1 << 14;
/// Bytes reserved for counters at the start of the
/// workspace of every operation.
pub(crate) const COUNTER_BYTES: u64 = MAX_SPLIT_TILES * 4;
/// Alignment of workspace parts, in bytes.
const ALIGNMENT: u64 = 256;
/// Bytes of a token factor.
const FACTOR_BYTES: usize = 4;

/// Byte offsets in the workspace of a plan.
///
/// First one `u32` arrival counter for each split tile, zero between
/// launches. Then partial sums: slots of `tile_m · tile_n` f32 in
/// the kernel's order. Then converted X. Plans of different shapes share
/// a workspace, so the counters have the same size in every
/// plan: no plan finds another plan's partial sums in its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Offset of the partial sums, a multiple of 256.
    pub partials: usize,
    /// Bytes of the partial sums; 0 without split tiles.
    pub partial_bytes: usize,
    /// Offset of the counters.
    pub counters: usize,
    /// Output region of the X prologue.
    pub x: Option<XRegion>,
    /// Region of a dequantized X.
    pub dequantized: Option<XRegion>,
    /// Regions of a quantized X.
    pub quantized: Option<XPlaneRegions>,
    /// Workspace bytes; 0 when none is needed.
    pub bytes: usize,
}

/// Output region of an X prologue: `rows` contiguous
/// rows of `columns` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XRegion {
    /// Offset of the first row, a multiple of 256.
    pub x: usize,
    /// Offset of the f32 factor of each token's accumulators, a multiple
    /// of 256; `None` without factors.
    pub factors: Option<usize>,
    /// Rows: whole tiles.
    pub rows: usize,
    /// Columns: whole k-tiles.
    pub columns: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

/// Regions of the planes of a quantized X. Planes that the
/// format lacks have 0 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XPlaneRegions {
    /// The format.
    pub format: XFormat,
    /// Offset and bytes of codes, scales, token factors and sums.
    /// Offsets are multiples of 256.
    pub planes: [(usize, usize); 4],
}

impl XPlaneRegions {
    /// Planes with `rows` rows of these byte sizes, after the first
    /// `bytes` bytes; `None` on overflow.
    pub(super) fn new(format: XFormat, rows: usize, row_bytes: [u64; 4], bytes: usize) -> Option<Self> {
        let mut end = bytes as u64;
        let mut planes = [(0, 0); 4];
        for (plane, row) in planes.iter_mut().zip(row_bytes) {
            let start = if row > 0 { end.checked_next_multiple_of(ALIGNMENT)? } else { end };
            let bytes = (rows as u64).checked_mul(row)?;
            end = start.checked_add(bytes)?;
            *plane = (start.try_into().ok()?, bytes.try_into().ok()?);
        }
        Some(Self { format, planes })
    }

    /// Output of `quantize`, after the first `bytes` bytes; `None` on overflow.
    pub fn of(quantize: &CheckedQuantize, bytes: usize) -> Option<Self> {
        let factor = if quantize.parts.factor == XFactor::PerToken { FACTOR_BYTES as u64 } else { 0 };
        let rows = [quantize.codes_row, quantize.scales_row, factor, quantize.sums_row];
        Self::new(quantize.format, quantize.rows, rows, bytes)
    }

    /// Byte range of all planes.
    pub fn all(&self) -> Range<usize> {
        self.range(0).start..self.range(3).end
    }

    /// Byte range of plane number `plane` in [`XPlaneRegions::planes`].
    pub fn range(&self, plane: usize) -> Range<usize> {
        let (start, bytes) = self.planes[plane];
        start..start + bytes
    }
}

impl XRegion {
    /// Byte range of the first `tokens` rows.
    pub fn x_of(&self, tokens: usize) -> Range<usize> {
        self.x..self.x + tokens.min(self.rows) * self.row_bytes
    }

    /// Byte range of the first `tokens` factors, if any.
    pub fn factors_of(&self, tokens: usize) -> Option<Range<usize>> {
        self.factors.map(|first| first..first + tokens.min(self.rows) * FACTOR_BYTES)
    }
}

impl WorkspaceLayout {
    /// Bytes at the start of a workspace reserved for the counters
    /// of products and attention in any plan. They are zero between
    /// launches, and other operations do not touch them.
    pub const RESERVED: usize = COUNTER_BYTES as usize;

    /// Layout for `tiles` tiles of `tile_values` outputs with split-K. `None`
    /// when there are more tiles than counters or the size overflows.
    pub fn split(splits: u32, tiles: u64, tile_values: u64) -> Option<Self> {
        match splits {
            0 | 1 => Self::of_slots(0, 0, tile_values),
            _ => Self::of_slots(u64::from(splits).checked_mul(tiles)?, tiles, tile_values),
        }
    }

    /// Layout for the split tiles of `cut` with `tile_values` outputs each;
    /// `None` as for [`WorkspaceLayout::split`].
    ///
    /// The slots of a tile are contiguous, in peer order.
    /// The first slot is the index of the tile's first CTA
    /// plus the number of tiles split before it. That
    /// number is at most the number of earlier tiles and of
    /// earlier CTAs, because each CTA begins at most one
    /// tile that it does not end.
    pub fn stream_k(cut: &StreamK, tile_values: u64) -> Option<Self> {
        match (cut.cut_tiles, cut.cut_ctas) {
            (0, _) | (_, 0) => Self::of_slots(0, 0, tile_values),
            (tiles, blocks) => {
                let slots = u64::from(blocks) + u64::from(tiles.min(blocks)) - 1;
                Self::of_slots(slots, tiles.into(), tile_values)
            }
        }
    }

    fn of_slots(slots: u64, tiles: u64, tile_values: u64) -> Option<Self> {
        if slots == 0 {
            return Some(Self {
                partials: 0,
                partial_bytes: 0,
                counters: 0,
                x: None,
                dequantized: None,
                quantized: None,
                bytes: 0,
            });
        }
        if tiles > MAX_SPLIT_TILES {
            return None;
        }
        let partial_bytes = slots.checked_mul(tile_values)?.checked_mul(4)?;
        let bytes = COUNTER_BYTES.checked_add(partial_bytes)?;
        Some(Self {
            partials: COUNTER_BYTES.try_into().ok()?,
            partial_bytes: partial_bytes.try_into().ok()?,
            counters: 0,
            x: None,
            dequantized: None,
            quantized: None,
            bytes: bytes.try_into().ok()?,
        })
    }

    /// Adds room for the X prologue of `config` with `m_tiles` M
    /// tiles and `k_tiles` k-tiles. Unchanged without a
    /// prologue; `None` on overflow.
    pub fn with_x(self, config: &TileConfig, m_tiles: u32, k_tiles: u32) -> Option<Self> {
        let Some(XPrologue::Convert { row_factors }) = config.x_prologue else { return Some(self) };
        let after = |offset: u64| offset.checked_next_multiple_of(ALIGNMENT);
        let rows = u64::from(m_tiles) * u64::from(config.tile_m);
        let columns = u64::from(k_tiles) * u64::from(config.tile_k);
        let row_bytes = columns.checked_mul(u64::from(config.x_format.desc().bits))? / 8;
        let x = after((self.bytes as u64).max(COUNTER_BYTES))?;
        let factors = after(x.checked_add(rows.checked_mul(row_bytes)?)?)?;
        let factor_bytes = if row_factors { rows.checked_mul(FACTOR_BYTES as u64)? } else { 0 };
        Some(Self {
            x: Some(XRegion {
                x: x.try_into().ok()?,
                factors: if row_factors { Some(factors.try_into().ok()?) } else { None },
                rows: rows.try_into().ok()?,
                columns: columns.try_into().ok()?,
                row_bytes: row_bytes.try_into().ok()?,
            }),
            bytes: factors.checked_add(factor_bytes)?.try_into().ok()?,
            ..self
        })
    }

    /// Adds room for the output of `quantize` at the
    /// end; `None` on overflow.
    pub fn with_quantized(self, quantize: &CheckedQuantize) -> Option<Self> {
        let regions = XPlaneRegions::of(quantize, self.bytes.max(Self::RESERVED))?;
        Some(Self { quantized: Some(regions), bytes: regions.all().end, ..self })
    }

    /// Adds `bytes` bytes of factors at the end and returns their
    /// offset. Unchanged for 0 bytes; `None` on overflow.
    pub fn with_factors(self, bytes: u64) -> Option<(Self, usize)> {
        if bytes == 0 {
            return Some((self, self.bytes));
        }
        let factors = (self.bytes as u64).max(COUNTER_BYTES).checked_next_multiple_of(ALIGNMENT)?;
        let end = factors.checked_add(bytes)?;
        Some((Self { bytes: end.try_into().ok()?, ..self }, factors.try_into().ok()?))
    }

    /// Adds room for the output of `dequantize` at the
    /// end; `None` on overflow.
    pub fn with_dequantized(self, dequantize: &CheckedDequantize) -> Option<Self> {
        let x = (self.bytes as u64).max(COUNTER_BYTES).checked_next_multiple_of(ALIGNMENT)?;
        let region = dequantize.region(x.try_into().ok()?);
        let bytes = x.checked_add((dequantize.rows as u64).checked_mul(region.row_bytes as u64)?)?;
        Some(Self { dequantized: Some(region), bytes: bytes.try_into().ok()?, ..self })
    }
}

impl LaunchPlan {
    /// Output tiles.
    fn tiles(&self) -> u64 {
        u64::from(self.n_tiles) * u64::from(self.m_tiles)
    }

    /// Tiles that several CTAs may share: the
    /// number of counters in use.
    pub fn shared_tiles(&self) -> u64 {
        match &self.stream_k {
            Some(cut) => cut.cut_tiles.into(),
            None if self.splits > 1 => self.tiles(),
            None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::{DType, XFormat};

    use super::*;
    use crate::caps::Math;
    use crate::kernel_id::Name;
    use crate::op::gemm::Schedule;

    #[test]
    fn unsplit_plans_need_nothing() {
        assert_eq!(WorkspaceLayout::split(1, 7, 64).expect("small").bytes, 0);
    }

    #[test]
    fn partials_follow_the_counters_aligned() {
        let layout = WorkspaceLayout::split(3, 5, 6).expect("small");
        let expected = WorkspaceLayout { bytes: (1 << 16) + 360, partials: 1 << 16, partial_bytes: 360, ..layout };
        assert_eq!(layout, expected);
        assert_eq!(layout.partials % 256, 0);
        assert_eq!(WorkspaceLayout::split(2, MAX_SPLIT_TILES + 1, 64), None);
        assert_eq!(WorkspaceLayout::split(2, 1 << 10, u64::MAX / 8), None);
    }

    #[test]
    fn ranges_of_blocks_have_their_slots() {
        let layout = |cut_tiles, cut_ctas| {
            let cut = StreamK { cut_tiles, cut_ctas, ..StreamK::default() };
            WorkspaceLayout::stream_k(&cut, 8).expect("small")
        };
        assert_eq!(layout(0, 0).bytes, 0);
        assert_eq!(layout(3, 7).partial_bytes, (7 + 3 - 1) * 32);
        assert_eq!(layout(9, 4).partial_bytes, (4 + 4 - 1) * 32);
    }

    fn config(tile_m: u32, tile_k: u32, row_factors: bool) -> TileConfig {
        TileConfig {
            family: "gemm",
            main_loop: Name::new("main_loop"),
            variant: None,
            math: Math::TensorF16,
            tile_n: 64,
            tile_m,
            tile_k,
            threads: 128,
            ctas_per_unit: 1,
            cluster: 1,
            schedule: Schedule::Grid,
            max_splits: 1,
            warps_n: 4,
            k_groups: 1,
            stages: 1,
            shared_bytes: 0,
            x_format: XFormat::Plain(DType::F16),
            x_prologue: Some(XPrologue::Convert { row_factors }),
            rounded_weights: None,
            normalizes_x: false,
            efficiency: (1, 1),
        }
    }

    #[test]
    fn converted_activations_follow_the_partials_and_leave_the_counters_alone() {
        for splits in [1, 3] {
            let plain = WorkspaceLayout::split(splits, 5, 6).expect("small");
            let layout = plain.with_x(&config(16, 64, true), 1, 3).expect("small");
            let at = layout.x.expect("asked for");
            assert_eq!((at.rows, at.columns, at.row_bytes), (16, 192, 384));
            assert!(at.x >= plain.bytes && at.x as u64 >= COUNTER_BYTES, "{layout:?}");
            let factors = at.factors.expect("asked for");
            assert!(factors >= at.x + 16 * 192 * 2 && layout.bytes == factors + 16 * 4, "{layout:?}");
            assert_eq!((at.x % 256, factors % 256), (0, 0));
            assert_eq!((at.x_of(3), at.factors_of(3)), (at.x..at.x + 3 * 384, Some(factors..factors + 12)));
            let unscaled = plain.with_x(&config(16, 64, false), 1, 3).expect("small");
            assert_eq!((unscaled.bytes, unscaled.x.and_then(|x| x.factors)), (factors, None));
            assert_eq!(plain.with_x(&config(u32::MAX, u32::MAX, true), u32::MAX, u32::MAX), None);
            assert_eq!(plain.with_x(&TileConfig { x_prologue: None, ..config(16, 64, false) }, 1, 3), Some(plain));
        }
    }

    #[test]
    fn factors_follow_the_partials_and_leave_the_counters_alone() {
        for splits in [1, 3] {
            let plain = WorkspaceLayout::split(splits, 5, 6).expect("small");
            let (layout, at) = plain.with_factors(100).expect("small");
            assert!(at >= plain.bytes && at as u64 >= COUNTER_BYTES && at % 256 == 0, "{layout:?}");
            assert_eq!(layout.bytes, at + 100);
            assert_eq!(plain.with_factors(0), Some((plain, plain.bytes)));
            assert_eq!(plain.with_factors(u64::MAX), None);
        }
    }

    #[test]
    fn no_plan_keeps_partials_where_another_counts() {
        let plans = [(2, 1, 64), (8, 3, 4096), (2, MAX_SPLIT_TILES, 1024)];
        for (splits, tiles, tile_values) in plans {
            let layout = WorkspaceLayout::split(splits, tiles, tile_values).expect("small");
            for (_, other_tiles, _) in plans {
                assert!(layout.counters + other_tiles as usize * 4 <= layout.partials);
            }
        }
    }
}
