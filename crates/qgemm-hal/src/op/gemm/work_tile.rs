//! Work tiles of each CTA. The scheduler decides them and kernels
//! compute the same (`kernels/sched/tile.cuh`).

use std::ops::Range;

use super::plan::{LaunchPlan, StreamK};

/// An output tile, or the part of its K
/// that one CTA computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkTile {
    /// Index of the tile in processing order, and of its counter.
    pub tile: u32,
    /// N coordinate of the tile.
    pub n_tile: u32,
    /// M coordinate of the tile.
    pub m_tile: u32,
    /// K steps.
    pub k_tiles: Range<u32>,
    /// CTAs that share the tile.
    pub peers: u32,
    /// Index of this CTA among the peers, in K order.
    pub index: u32,
    /// Partial-sum slot of this CTA when the tile is split. The
    /// slots of a tile are contiguous.
    pub slot: u32,
}

impl LaunchPlan {
    /// Work tiles of the CTA at grid position `place`, in order.
    pub fn work_tiles(&self, place: [u32; 3]) -> Vec<WorkTile> {
        match &self.stream_k {
            None => vec![self.part(place)],
            Some(cut) => self.range(cut, place[0]).chain(self.whole_tiles(cut, place[0])).collect(),
        }
    }

    /// The single work tile of a CTA in a plain grid.
    fn part(&self, [n_tile, m_tile, part]: [u32; 3]) -> WorkTile {
        let bound = |s: u32| (u64::from(s) * u64::from(self.k_tiles) / u64::from(self.splits)) as u32;
        let tile = m_tile * self.n_tiles + n_tile;
        let k_tiles = bound(part)..bound(part + 1);
        WorkTile { tile, n_tile, m_tile, k_tiles, peers: self.splits, index: part, slot: tile * self.splits + part }
    }

    /// Parts of split tiles in a CTA's range.
    fn range(&self, cut: &StreamK, block: u32) -> impl Iterator<Item = WorkTile> {
        let units = cut.units(self.k_tiles);
        let range = cut.range(units, block);
        let tiles = if range.is_empty() { 0..0 } else { range.start / units..range.end.div_ceil(units) };
        tiles.map(move |tile| {
            let first_unit = tile * units;
            let begin = range.start.max(first_unit) - first_unit;
            let end = range.end.min(first_unit + units) - first_unit;
            let first_block = cut.owner(units, first_unit);
            let index = block - first_block;
            WorkTile {
                k_tiles: begin * cut.cut_k_tiles..(end * cut.cut_k_tiles).min(self.k_tiles),
                peers: cut.owner(units, first_unit + units - 1) - first_block + 1,
                index,
                // Upper bound of the tiles split before this one.
                slot: first_block + tile.min(first_block) + index,
                ..self.whole_tile(cut, tile)
            }
        })
    }

    /// Whole tiles of a CTA.
    fn whole_tiles(&self, cut: &StreamK, block: u32) -> impl Iterator<Item = WorkTile> {
        let tiles = cut.cut_tiles + block..self.n_tiles * self.m_tiles;
        tiles.step_by(self.grid[0] as usize).map(|tile| self.whole_tile(cut, tile))
    }

    /// The whole tile at a position in swizzle order.
    fn whole_tile(&self, cut: &StreamK, tile: u32) -> WorkTile {
        let first = tile / (cut.swizzle_group * self.m_tiles) * cut.swizzle_group;
        let width = cut.swizzle_group.min(self.n_tiles - first);
        let rest = tile - first * self.m_tiles;
        WorkTile {
            tile,
            n_tile: first + rest % width,
            m_tile: rest / width,
            k_tiles: 0..self.k_tiles,
            peers: 1,
            index: 0,
            slot: 0,
        }
    }
}

/// Geometry of split tiles, in units of `cut_k_tiles` K steps.
impl StreamK {
    /// Units of a tile with `k_tiles` steps.
    pub fn units(&self, k_tiles: u32) -> u32 {
        k_tiles.div_ceil(self.cut_k_tiles)
    }

    /// Whether ranges end at tile borders.
    pub fn is_even(&self) -> bool {
        self.cut_tiles > 0 && self.cut_ctas.is_multiple_of(self.cut_tiles)
    }

    /// Range of a CTA over all split tiles with `units` units
    /// each. Empty for CTAs without a range.
    pub fn range(&self, units: u32, block: u32) -> Range<u32> {
        if block >= self.cut_ctas {
            return 0..0;
        }
        let total = u64::from(self.cut_tiles) * u64::from(units);
        let bound = |block: u64| (block * total / u64::from(self.cut_ctas)) as u32;
        bound(block.into())..bound(u64::from(block) + 1)
    }

    /// The CTA whose range holds `unit`.
    fn owner(&self, units: u32, unit: u32) -> u32 {
        let total = u64::from(self.cut_tiles) * u64::from(units);
        (((u64::from(unit) + 1) * u64::from(self.cut_ctas) - 1) / total) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_held_by_its_owner() {
        let cut = StreamK { cut_tiles: 5, cut_ctas: 7, cut_k_tiles: 2, swizzle_group: 1 };
        let units = cut.units(13);
        assert_eq!(units, 7);
        for unit in 0..5 * units {
            assert!(cut.range(units, cut.owner(units, unit)).contains(&unit), "{unit}");
        }
        assert!(cut.range(units, 7).is_empty());
    }
}
