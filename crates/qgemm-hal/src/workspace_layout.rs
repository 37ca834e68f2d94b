//! Where a plan's partial sums and counters lie in its workspace: agreed between scheduler and kernels.

use crate::family::LaunchPlan;

/// Tiles that a plan may split along K: more fill every device without a split.
const MAX_SPLIT_TILES: u64 = 1 << 14;

/// Byte offsets in the workspace of a plan whose tiles are split along K.
///
/// First comes one `u32` arrival counter a tile, zero between launches; then partial sums: `tile_m · tile_n` f32
/// for every split of every tile, in the kernel's own order. Plans of different shapes share a workspace, so the
/// room for counters is the same in every plan: none finds what another left of its partial sums there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Offset of the partial sums, a multiple of 256.
    pub partials: usize,
    /// Offset of the counters.
    pub counters: usize,
    /// Size of the workspace; 0 when tiles are not split.
    pub bytes: usize,
}

impl WorkspaceLayout {
    /// The layout for `splits` parts of each of `tiles` tiles with `tile_values` outputs, or `None` when there
    /// are more tiles than counters or the size overflows.
    pub fn new(splits: u32, tiles: u64, tile_values: u64) -> Option<Self> {
        if splits <= 1 {
            return Some(Self { partials: 0, counters: 0, bytes: 0 });
        }
        if tiles > MAX_SPLIT_TILES {
            return None;
        }
        let partials = MAX_SPLIT_TILES * 4;
        let partial_bytes = u64::from(splits).checked_mul(tiles)?.checked_mul(tile_values)?.checked_mul(4)?;
        let bytes = partials.checked_add(partial_bytes)?;
        Some(Self { partials: partials.try_into().ok()?, counters: 0, bytes: bytes.try_into().ok()? })
    }
}

impl LaunchPlan {
    /// Offsets in this plan's workspace, or `None` when its size overflows (no plan of `qgemm-sched` does).
    pub fn workspace_layout(&self) -> Option<WorkspaceLayout> {
        let tiles = u64::from(self.n_tiles) * u64::from(self.m_tiles);
        WorkspaceLayout::new(self.splits, tiles, u64::from(self.config.tile_m) * u64::from(self.config.tile_n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsplit_plans_need_nothing() {
        assert_eq!(WorkspaceLayout::new(1, 7, 64).expect("small").bytes, 0);
    }

    #[test]
    fn partials_follow_the_counters_aligned() {
        let layout = WorkspaceLayout::new(3, 5, 6).expect("small");
        assert_eq!(layout, WorkspaceLayout { partials: 1 << 16, counters: 0, bytes: (1 << 16) + 360 });
        assert_eq!(layout.partials % 256, 0);
        assert_eq!(WorkspaceLayout::new(2, MAX_SPLIT_TILES + 1, 64), None);
        assert_eq!(WorkspaceLayout::new(2, 1 << 10, u64::MAX / 8), None);
    }

    #[test]
    fn no_plan_keeps_partials_where_another_counts() {
        let plans = [(2, 1, 64), (8, 3, 4096), (2, MAX_SPLIT_TILES, 1024)];
        for (splits, tiles, tile_values) in plans {
            let layout = WorkspaceLayout::new(splits, tiles, tile_values).expect("small");
            for (_, other_tiles, _) in plans {
                assert!(layout.counters + other_tiles as usize * 4 <= layout.partials);
            }
        }
    }
}
