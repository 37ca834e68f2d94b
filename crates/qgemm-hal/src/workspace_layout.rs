//! Where a plan's partial sums and counters lie in its workspace: agreed between scheduler and kernels.

use crate::family::LaunchPlan;

/// Byte offsets in the workspace of a plan whose tiles are split along K.
///
/// Partial sums come first: `tile_m · tile_n` f32 for every split of every tile, in the kernel's own order. Then
/// one `u32` arrival counter a tile, zero between launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// Offset of the partial sums.
    pub partials: usize,
    /// Offset of the counters, a multiple of 256.
    pub counters: usize,
    /// Size of the workspace; 0 when tiles are not split.
    pub bytes: usize,
}

impl WorkspaceLayout {
    /// The layout for `splits` parts of each of `tiles` tiles with `tile_values` outputs, or `None` when the
    /// size overflows.
    pub fn new(splits: u32, tiles: u64, tile_values: u64) -> Option<Self> {
        if splits <= 1 {
            return Some(Self { partials: 0, counters: 0, bytes: 0 });
        }
        let partial_bytes = u64::from(splits).checked_mul(tiles)?.checked_mul(tile_values)?.checked_mul(4)?;
        let counters = partial_bytes.checked_next_multiple_of(256)?;
        let bytes = counters.checked_add(tiles.checked_mul(4)?)?;
        Some(Self { partials: 0, counters: counters.try_into().ok()?, bytes: bytes.try_into().ok()? })
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
    fn counters_follow_the_partials_aligned() {
        let layout = WorkspaceLayout::new(3, 5, 6).expect("small");
        assert_eq!(layout, WorkspaceLayout { partials: 0, counters: 512, bytes: 512 + 20 });
        assert_eq!(WorkspaceLayout::new(2, u64::MAX / 4, 64), None);
    }
}
