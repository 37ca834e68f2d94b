//! Where a plan's counters, partial sums and staged activations lie in its workspace: agreed between scheduler and
//! kernels.

use crate::family::{LaunchPlan, StagedX, StreamK};

/// Tiles that a plan may split along K: more fill every device without a split.
const MAX_SPLIT_TILES: u64 = 1 << 14;
/// Bytes at the start of every workspace that only counters lie in.
const COUNTER_BYTES: u64 = MAX_SPLIT_TILES * 4;
/// What parts of a workspace are aligned to.
const ALIGNMENT: u64 = 256;

/// Byte offsets in the workspace of a plan.
///
/// First comes one `u32` arrival counter a tile that is split, zero between launches; then partial sums: slots of
/// `tile_m · tile_n` f32 each, in the kernel's own order; then staged activations. Plans of different shapes share a
/// workspace, so the room for counters is the same in every plan: none finds what another left of its partial sums there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Offset of the partial sums, a multiple of 256.
    pub partials: usize,
    /// Bytes of the partial sums; 0 when tiles are not split.
    pub partial_bytes: usize,
    /// Offset of the counters.
    pub counters: usize,
    /// The staged activations.
    pub staged_x: Option<StagedLayout>,
    /// Size of the workspace; 0 when nothing is kept in it.
    pub bytes: usize,
}

/// Where [staged activations](StagedX) lie: `rows` rows of `columns` elements without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedLayout {
    /// Offset of the first row, a multiple of 256.
    pub x: usize,
    /// Offset of the f32 that each token's sums are multiplied with, a multiple of 256.
    pub factors: usize,
    /// Rows that there is room for: whole tiles.
    pub rows: usize,
    /// Columns of a row: whole steps of K.
    pub columns: usize,
}

impl WorkspaceLayout {
    /// The layout for `tiles` tiles of `tile_values` outputs whose K is cut into `splits` parts each, or `None` when
    /// there are more tiles than counters or the size overflows.
    pub fn split(splits: u32, tiles: u64, tile_values: u64) -> Option<Self> {
        match splits {
            0 | 1 => Self::of_slots(0, 0, tile_values),
            _ => Self::of_slots(u64::from(splits).checked_mul(tiles)?, tiles, tile_values),
        }
    }

    /// The layout for what `cut` cuts of tiles with `tile_values` outputs; `None` as for [`WorkspaceLayout::split`].
    ///
    /// A tile's slots follow one another, in the order of its contributors. Its first is the index of the first block
    /// that contributes, plus the tiles cut before it: at most as many as their number, and as that of the blocks
    /// before, of which each begins at most one tile that it does not end.
    pub fn stream_k(cut: &StreamK, tile_values: u64) -> Option<Self> {
        match (cut.cut_tiles, cut.cut_blocks) {
            (0, _) | (_, 0) => Self::of_slots(0, 0, tile_values),
            (tiles, blocks) => {
                let slots = u64::from(blocks) + u64::from(tiles.min(blocks)) - 1;
                Self::of_slots(slots, tiles.into(), tile_values)
            }
        }
    }

    fn of_slots(slots: u64, tiles: u64, tile_values: u64) -> Option<Self> {
        if slots == 0 {
            return Some(Self { partials: 0, partial_bytes: 0, counters: 0, staged_x: None, bytes: 0 });
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
            staged_x: None,
            bytes: bytes.try_into().ok()?,
        })
    }

    /// The layout with room for `rows` staged tokens of `columns` columns, or `None` when the size overflows.
    pub fn with_staged_x(self, staged: StagedX, rows: u64, columns: u64) -> Option<Self> {
        let after = |offset: u64| offset.checked_next_multiple_of(ALIGNMENT);
        let x = after((self.bytes as u64).max(COUNTER_BYTES))?;
        let x_bytes = rows.checked_mul(columns)?.checked_mul(staged.dtype.bytes() as u64)?;
        let factors = after(x.checked_add(x_bytes)?)?;
        let factor_bytes = if staged.scaled { rows.checked_mul(4)? } else { 0 };
        Some(Self {
            staged_x: Some(StagedLayout {
                x: x.try_into().ok()?,
                factors: factors.try_into().ok()?,
                rows: rows.try_into().ok()?,
                columns: columns.try_into().ok()?,
            }),
            bytes: factors.checked_add(factor_bytes)?.try_into().ok()?,
            ..self
        })
    }
}

impl LaunchPlan {
    /// Output tiles.
    fn tiles(&self) -> u64 {
        u64::from(self.n_tiles) * u64::from(self.m_tiles)
    }

    /// Tiles that several blocks may share: so many counters are in use.
    pub fn shared_tiles(&self) -> u64 {
        match &self.stream_k {
            Some(cut) => cut.cut_tiles.into(),
            None if self.splits > 1 => self.tiles(),
            None => 0,
        }
    }

    /// Offsets in this plan's workspace, or `None` when its size overflows (no plan of `qgemm-sched` does).
    pub fn workspace_layout(&self) -> Option<WorkspaceLayout> {
        let tile_values = u64::from(self.config.tile_m) * u64::from(self.config.tile_n);
        let layout = match &self.stream_k {
            Some(cut) => WorkspaceLayout::stream_k(cut, tile_values),
            None => WorkspaceLayout::split(self.splits, self.tiles(), tile_values),
        }?;
        let Some(staged) = self.config.staged_x else { return Some(layout) };
        let rows = u64::from(self.m_tiles) * u64::from(self.config.tile_m);
        layout.with_staged_x(staged, rows, u64::from(self.k_steps) * u64::from(self.config.tile_k))
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;

    #[test]
    fn unsplit_plans_need_nothing() {
        assert_eq!(WorkspaceLayout::split(1, 7, 64).expect("small").bytes, 0);
    }

    #[test]
    fn partials_follow_the_counters_aligned() {
        let layout = WorkspaceLayout::split(3, 5, 6).expect("small");
        let expected = WorkspaceLayout {
            partials: 1 << 16,
            partial_bytes: 360,
            counters: 0,
            staged_x: None,
            bytes: (1 << 16) + 360,
        };
        assert_eq!(layout, expected);
        assert_eq!(layout.partials % 256, 0);
        assert_eq!(WorkspaceLayout::split(2, MAX_SPLIT_TILES + 1, 64), None);
        assert_eq!(WorkspaceLayout::split(2, 1 << 10, u64::MAX / 8), None);
    }

    #[test]
    fn ranges_of_blocks_have_their_slots() {
        let layout = |cut_tiles, cut_blocks| {
            let cut = StreamK { cut_tiles, cut_blocks, ..StreamK::default() };
            WorkspaceLayout::stream_k(&cut, 8).expect("small")
        };
        assert_eq!(layout(0, 0).bytes, 0);
        assert_eq!(layout(3, 7).partial_bytes, (7 + 3 - 1) * 32);
        assert_eq!(layout(9, 4).partial_bytes, (4 + 4 - 1) * 32);
    }

    #[test]
    fn staged_activations_follow_the_partials_and_leave_the_counters_alone() {
        let staged = StagedX { dtype: DType::F16, scaled: true };
        for splits in [1, 3] {
            let plain = WorkspaceLayout::split(splits, 5, 6).expect("small");
            let layout = plain.with_staged_x(staged, 16, 192).expect("small");
            let at = layout.staged_x.expect("asked for");
            assert!(at.x >= plain.bytes && at.x as u64 >= COUNTER_BYTES, "{layout:?}");
            assert!(at.factors >= at.x + 16 * 192 * 2 && layout.bytes == at.factors + 16 * 4, "{layout:?}");
            assert_eq!((at.x % 256, at.factors % 256), (0, 0));
            let unscaled = plain.with_staged_x(StagedX { scaled: false, ..staged }, 16, 192).expect("small");
            assert_eq!(unscaled.bytes, at.factors);
            assert_eq!(plain.with_staged_x(staged, 1 << 32, 1 << 31), None);
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
