//! Work partition: output tiles, and the K ranges of
//! CTAs that share a tile.

use qgemm_hal::{CheckedGemm, LaunchPlan, Schedule, StreamK, TileConfig, WorkspaceLayout};
use serde::{Deserialize, Serialize};

/// Split of K among CTAs.
///
/// The numbers that it implies depend on the operation, so that
/// one measured cut also fits neighbouring shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Split-K: every tile's K is split into this many parts, one
    /// CTA each. 1 means no split.
    Parts(u32),
    /// Stream-K ([`Schedule::StreamK`] only). The tiles after the whole waves,
    /// and the last `full_waves` (0 or 1) whole waves, are split
    /// into equal ranges, one for each concurrent CTA.
    Ranges {
        /// Whole waves that are split, too. With 1,
        /// no range is shorter than a tile, so a tile
        /// has at most two peers.
        full_waves: u32,
    },
}

impl Cut {
    /// No tile is split.
    pub const NONE: Cut = Cut::Parts(1);

    /// The cut that `plan` uses.
    pub fn of(plan: &LaunchPlan) -> Self {
        let Some(cut) = &plan.stream_k else { return Cut::Parts(plan.splits) };
        let cuts_all = u64::from(cut.cut_tiles) == u64::from(plan.n_tiles) * u64::from(plan.m_tiles);
        match cut.cut_tiles {
            0 => Cut::NONE,
            tiles if cuts_all && cut.is_even() => Cut::Parts(cut.cut_ctas / tiles),
            tiles => Cut::Ranges { full_waves: u32::from(tiles >= cut.cut_ctas) },
        }
    }
}

/// Columns between the points where a persistent grid may cut a
/// tile. Shorter parts cost more to start than they save.
const CUT_COLUMNS: u32 = 256;
/// Minimum number of such units in a CTA's
/// range, for the same reason.
const RANGE_UNITS: u64 = 2;
/// Maximum tiles of one launch. Tile counters have 32 bits and
/// run one grid beyond the last tile.
const MAX_TILES: u64 = 1 << 31;

/// Work of one launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Partition {
    config: TileConfig,
    n_tiles: u32,
    m_tiles: u32,
    k_tiles: u32,
    splits: u32,
    stream_k: Option<StreamK>,
    grid: [u32; 3],
    workspace: WorkspaceLayout,
}

/// CTAs that do the same work concurrently, for the cost model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Phase {
    /// Number of CTAs. A CTA of a persistent grid counts
    /// once for each of its tiles.
    pub blocks: f64,
    /// K steps of each CTA, or of the busiest one.
    pub steps_a_block: f64,
    /// Tiles that these steps belong to.
    pub tiles_a_block: f64,
}

impl Phase {
    /// K steps of all CTAs.
    pub(crate) fn steps(&self) -> f64 {
        self.blocks * self.steps_a_block
    }
}

impl Partition {
    /// Splits `op` into tiles of `config`, and the tiles as `cut`
    /// says, for a device with `slots` concurrent CTAs.
    ///
    /// `None` when the config does not support the cut, or a
    /// tile count or the workspace size overflows.
    pub fn new(op: &CheckedGemm, config: &TileConfig, cut: Cut, slots: u32) -> Option<Self> {
        let tiles = |len: usize, tile: u32| u32::try_from(len.div_ceil(tile as usize)).ok();
        let n_tiles = tiles(op.stored_rows, config.tile_n)?;
        let m_tiles = tiles(op.m, config.tile_m)?;
        let k_tiles = tiles(op.stored_k, config.tile_k)?;
        let tiles = u64::from(n_tiles) * u64::from(m_tiles);
        let tile_values = u64::from(config.tile_n) * u64::from(config.tile_m);
        let fixed = Self {
            config: *config,
            n_tiles,
            m_tiles,
            k_tiles,
            splits: 1,
            stream_k: None,
            grid: [n_tiles, m_tiles, 1],
            workspace: WorkspaceLayout::split(1, 0, 0)?,
        };
        let partition = match (config.schedule, cut) {
            (Schedule::Grid, Cut::Parts(splits)) => {
                let allowed = (1..=config.max_splits.min(k_tiles).max(1)).contains(&splits);
                let workspace = WorkspaceLayout::split(splits, tiles, tile_values)?;
                allowed.then_some(Self { splits, grid: [n_tiles, m_tiles, splits], workspace, ..fixed })
            }
            (Schedule::Grid | Schedule::Threads, Cut::Ranges { .. }) => None,
            // Thread kernels choose their own split.
            (Schedule::Threads, cut) => (cut == Cut::NONE).then_some(fixed),
            (Schedule::StreamK, cut) => {
                let tiles = u32::try_from(tiles).ok().filter(|&t| u64::from(t) < MAX_TILES)?;
                let slots = slots.max(1);
                let cut = Cutter { config, tiles, k_tiles, slots }.cut(cut)?;
                let blocks = match cut.cut_tiles < tiles {
                    // Cluster tiles are bound by arithmetic and thus by power: launch
                    // only as many clusters as fill all waves evenly.
                    true if config.cluster > 1 && cut.cut_ctas == 0 => tiles.div_ceil(tiles.div_ceil(slots)),
                    true => slots.min(tiles).max(cut.cut_ctas),
                    false => cut.cut_ctas,
                };
                let swizzle_group = swizzle_group(op, config, [n_tiles, m_tiles], blocks);
                let workspace = WorkspaceLayout::stream_k(&cut, tile_values)?;
                let stream_k = Some(StreamK { swizzle_group, ..cut });
                Some(Self { stream_k, grid: [blocks, 1, 1], workspace, ..fixed })
            }
        }?;
        let workspace = partition.workspace.with_x(config, m_tiles, k_tiles)?;
        Some(Self { workspace, ..partition })
    }

    /// Grid dimensions, x fastest.
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// K steps of a tile.
    pub fn k_tiles(&self) -> u32 {
        self.k_tiles
    }

    /// M tiles.
    pub(crate) fn m_tiles(&self) -> u32 {
        self.m_tiles
    }

    /// Offsets of counters, partial sums and converted X.
    pub fn workspace_layout(&self) -> WorkspaceLayout {
        self.workspace
    }

    /// Maximum CTAs that share a tile.
    pub(crate) fn peers(&self) -> u32 {
        match &self.stream_k {
            None => self.splits,
            Some(cut) if cut.cut_ctas == 0 => 1,
            Some(cut) if cut.is_even() => cut.cut_ctas / cut.cut_tiles,
            Some(cut) => cut.cut_ctas.div_ceil(cut.cut_tiles) + 1,
        }
    }

    /// Phases that CTAs run one after another. Never empty;
    /// phases without work are left out.
    pub(crate) fn phases(&self) -> Vec<Phase> {
        let tiles = f64::from(self.n_tiles) * f64::from(self.m_tiles);
        let Some(cut) = &self.stream_k else {
            let steps_a_block = f64::from(self.k_tiles.div_ceil(self.splits));
            return vec![Phase { blocks: tiles * f64::from(self.splits), steps_a_block, tiles_a_block: 1.0 }];
        };
        let whole = Phase {
            blocks: tiles - f64::from(cut.cut_tiles),
            steps_a_block: f64::from(self.k_tiles),
            tiles_a_block: 1.0,
        };
        let ranges = (cut.cut_ctas > 0).then(|| {
            let units = u64::from(cut.cut_tiles) * u64::from(cut.units(self.k_tiles));
            let steps_a_block = units.div_ceil(cut.cut_ctas.into()) as f64 * f64::from(cut.cut_k_tiles);
            // A range that does not end with a tile covers
            // parts of one tile more.
            let begun = u32::from(!cut.is_even());
            let tiles_a_block = f64::from(cut.cut_tiles.div_ceil(cut.cut_ctas) + begun);
            Phase { blocks: cut.cut_ctas.into(), steps_a_block, tiles_a_block }
        });
        ranges.into_iter().chain((whole.blocks > 0.0).then_some(whole)).collect()
    }

    /// Whether the first phase consists of ranges of split tiles.
    pub(crate) fn cuts_tiles(&self) -> bool {
        self.stream_k.is_some_and(|cut| cut.cut_ctas > 0)
    }

    /// Launch plan of this partition, with its estimate in seconds.
    pub fn plan(&self, estimate: f64) -> LaunchPlan {
        LaunchPlan {
            config: self.config,
            n_tiles: self.n_tiles,
            m_tiles: self.m_tiles,
            k_tiles: self.k_tiles,
            splits: self.splits,
            stream_k: self.stream_k,
            grid: self.grid,
            workspace: self.workspace,
            estimate,
        }
    }
}

/// Turns a [`Cut`] into numbers for a tile count.
struct Cutter<'a> {
    config: &'a TileConfig,
    tiles: u32,
    k_tiles: u32,
    slots: u32,
}

impl Cutter<'_> {
    fn cut(&self, cut: Cut) -> Option<StreamK> {
        let none = StreamK { cut_k_tiles: (CUT_COLUMNS / self.config.tile_k).max(1), ..StreamK::default() };
        let units = u64::from(none.units(self.k_tiles));
        let (cut_tiles, cut_ctas) = match cut {
            Cut::Parts(1) => return Some(none),
            Cut::Parts(parts) => {
                let allowed = parts > 1 && parts <= self.config.max_splits && u64::from(parts) <= units;
                (self.tiles, self.tiles.checked_mul(parts).filter(|_| allowed)?)
            }
            Cut::Ranges { full_waves } => {
                let rest = self.tiles % self.slots;
                let cut_tiles = u64::from(rest) + u64::from(full_waves) * u64::from(self.slots);
                let cut_tiles = u32::try_from(cut_tiles).ok().filter(|&cut| cut <= self.tiles && rest > 0)?;
                // A tile has at most two peers more than the whole
                // ranges that fit into it.
                let most = match self.config.max_splits {
                    0..=1 => return None,
                    2 => u64::from(cut_tiles),
                    most => u64::from(cut_tiles) * u64::from(most - 2),
                };
                let blocks = u64::from(self.slots).min(most).min(u64::from(cut_tiles) * units / RANGE_UNITS);
                // Useless if ranges are as long as a tile,
                // or the tail grows.
                let gains =
                    if full_waves == 0 { blocks > u64::from(cut_tiles) } else { blocks == u64::from(self.slots) };
                (cut_tiles, gains.then_some(blocks as u32)?)
            }
        };
        // Ranges of split tiles are counted in 32 bits.
        let counted = u64::from(cut_tiles) * units < u64::from(u32::MAX);
        (counted && cut_ctas > 1).then_some(StreamK { cut_tiles, cut_ctas, ..none })
    }
}

/// Swizzle group: N tiles that are processed together.
///
/// `blocks` concurrent CTAs then read the fewest distinct bytes: `g` tiles
/// of W and `blocks / g` of X. Clusters process all
/// of X at once if the bytes of a wave hardly
/// grow: the next wave then finds X in L2.
fn swizzle_group(op: &CheckedGemm, config: &TileConfig, [n_tiles, m_tiles]: [u32; 2], blocks: u32) -> u32 {
    let w_tile = f64::from(config.tile_n) * op.format.row_bytes(op.stored_k) as f64;
    let x_tile = f64::from(config.tile_m) * op.x_row_bytes();
    let best = (f64::from(blocks) * x_tile / w_tile.max(1.0)).sqrt();
    let of_all_x = blocks / m_tiles.max(1);
    let near = (0.45..=1.0).contains(&(f64::from(of_all_x) / best));
    match config.cluster > 1 && blocks.is_multiple_of(m_tiles.max(1)) && near {
        true => of_all_x.clamp(1, n_tiles.max(1)),
        false => (best.round() as u32).clamp(1, n_tiles.max(1)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::ops::Range;

    use proptest::prelude::*;
    use qgemm_hal::WorkTile;

    use super::*;
    use crate::gemm::select::tests::{config, op};

    fn cuts() -> impl Strategy<Value = Cut> {
        prop_oneof![(1u32..9).prop_map(Cut::Parts), (0u32..2).prop_map(|full_waves| Cut::Ranges { full_waves })]
    }

    fn schedules() -> impl Strategy<Value = Schedule> {
        prop_oneof![Just(Schedule::Grid), Just(Schedule::StreamK)]
    }

    /// Every work tile of every CTA.
    fn all_work_tiles(partition: &Partition) -> Vec<WorkTile> {
        let [gx, gy, gz] = partition.grid();
        let places = (0..gz).flat_map(|z| (0..gy).flat_map(move |y| (0..gx).map(move |x| [x, y, z])));
        let plan = partition.plan(0.0);
        places.flat_map(|place| plan.work_tiles(place)).collect()
    }

    /// Rows or columns of `tile`, clipped to `end`.
    fn outputs(tile: u32, len: u32, end: usize) -> Range<usize> {
        let start = tile as usize * len as usize;
        start..end.min(start + len as usize)
    }

    /// N and M coordinates of every tile, in processing order.
    fn tile_order(partition: &Partition) -> Vec<(u32, u32)> {
        let mut work_tiles = all_work_tiles(partition);
        work_tiles.sort_by_key(|p| p.tile);
        work_tiles.dedup_by_key(|p| p.tile);
        work_tiles.into_iter().map(|p| (p.n_tile, p.m_tile)).collect()
    }

    proptest! {
        #[test]
        fn every_product_is_computed_exactly_once(
            (m, n, blocks) in (1usize..70, 1usize..70, 1usize..40),
            (tile_m, tile_n, tile_k) in (1u32..20, 1u32..20, 1u32..12),
            (schedule, cut, slots) in (schedules(), cuts(), 1u32..60),
        ) {
            let op = op(m, n, blocks * 32);
            let config = TileConfig { tile_m, tile_n, tile_k: tile_k * 32, max_splits: 8, schedule, ..config("gemm") };
            let Some(partition) = Partition::new(&op, &config, cut, slots) else { return Ok(()) };
            let steps = partition.k_tiles() as usize;
            let mut visits = vec![0u8; m * n * steps];
            for work_tile in all_work_tiles(&partition) {
                prop_assert!(!work_tile.k_tiles.is_empty(), "no work tile is empty");
                for i in outputs(work_tile.m_tile, tile_m, m) {
                    for j in outputs(work_tile.n_tile, tile_n, n) {
                        for s in work_tile.k_tiles.clone() {
                            visits[(i * n + j) * steps + s as usize] += 1;
                        }
                    }
                }
            }
            prop_assert!(visits.iter().all(|&v| v == 1));
            prop_assert!(steps * config.tile_k as usize >= op.stored_k);
        }

        #[test]
        fn peers_follow_one_another_and_have_a_slot_each(
            (m, n, blocks) in (1usize..900, 1usize..900, 1usize..300),
            (schedule, cut, slots) in (schedules(), cuts(), 1u32..200),
        ) {
            let config = TileConfig { tile_m: 16, tile_n: 64, tile_k: 64, max_splits: 8, schedule, ..config("gemm") };
            let Some(partition) = Partition::new(&op(m, n, blocks * 32), &config, cut, slots) else { return Ok(()) };
            let plan = partition.plan(0.0);
            let again = Partition::new(&op(m, n, blocks * 32), &config, Cut::of(&plan), slots);
            prop_assert_eq!(again, Some(partition), "{:?} is read back as {:?}", cut, Cut::of(&plan));
            let layout = partition.workspace_layout();
            prop_assert_eq!(plan.workspace, layout);
            let slots_there = layout.partial_bytes / (16 * 64 * 4);
            let mut taken = vec![false; slots_there];
            let mut tiles: HashMap<u32, Vec<WorkTile>> = HashMap::new();
            for work_tile in all_work_tiles(&partition) {
                if work_tile.peers > 1 {
                    prop_assert!(u64::from(work_tile.tile) < plan.shared_tiles());
                    prop_assert!(layout.counters + work_tile.tile as usize * 4 + 4 <= layout.partials);
                    prop_assert!(!std::mem::replace(&mut taken[work_tile.slot as usize], true), "one work tile a slot");
                }
                tiles.entry(work_tile.tile).or_default().push(work_tile);
            }
            for work_tiles in tiles.values_mut() {
                work_tiles.sort_by_key(|p| p.k_tiles.start);
                prop_assert!(work_tiles.len() <= config.max_splits as usize);
                for (index, work_tile) in work_tiles.iter().enumerate() {
                    prop_assert_eq!((work_tile.index as usize, work_tile.peers as usize), (index, work_tiles.len()));
                    prop_assert_eq!((work_tile.n_tile, work_tile.m_tile), (work_tiles[0].n_tile, work_tiles[0].m_tile));
                    prop_assert_eq!(work_tile.slot, work_tiles[0].slot + work_tile.index);
                }
            }
        }

        #[test]
        fn ranges_of_blocks_are_even(m in 1usize..5000, n in 1usize..5000, full_waves in 0u32..2) {
            let config = TileConfig {
                tile_m: 128, tile_n: 128, max_splits: 16, schedule: Schedule::StreamK, ..config("gemm")
            };
            let cut = Cut::Ranges { full_waves };
            let Some(partition) = Partition::new(&op(m, n, 8192), &config, cut, 132) else { return Ok(()) };
            let cut = partition.stream_k.expect("stream-K");
            let lengths: Vec<u32> = (0..cut.cut_ctas).map(|b| cut.range(cut.units(partition.k_tiles()), b).len() as u32).collect();
            let (least, most) = (lengths.iter().min().expect("blocks"), lengths.iter().max().expect("blocks"));
            prop_assert!(*least >= RANGE_UNITS as u32 && most - least <= 1, "{} to {}", least, most);
            let plan = partition.plan(0.0);
            let whole = |block| plan.work_tiles([block, 0, 0]).iter().filter(|p| p.tile >= cut.cut_tiles).count();
            prop_assert!((1..plan.grid[0]).all(|block| whole(block) == whole(0)), "whole tiles fill whole waves");
        }

        #[test]
        fn tile_orders_visit_every_tile_once(n_tiles in 1usize..40, m_tiles in 1usize..40, slots in 1u32..200) {
            let config = TileConfig { tile_m: 128, tile_n: 128, schedule: Schedule::StreamK, ..config("gemm") };
            let op = op(m_tiles * 128, n_tiles * 128, 4096);
            let partition = Partition::new(&op, &config, Cut::NONE, slots).expect("small");
            let mut places = tile_order(&partition);
            prop_assert_eq!(places.len(), n_tiles * m_tiles);
            places.sort_unstable();
            places.dedup();
            prop_assert_eq!(places.len(), n_tiles * m_tiles);
            prop_assert!(places.iter().all(|&(n, m)| (n as usize) < n_tiles && (m as usize) < m_tiles));
        }
    }

    #[test]
    fn parts_of_a_persistent_grid_are_the_same_for_every_tile() {
        let config = TileConfig { max_splits: 4, tile_k: 64, schedule: Schedule::StreamK, ..config("gemm") };
        let bounds = |m, n| {
            let partition = Partition::new(&op(m, n, 7 * 256), &config, Cut::Parts(3), 132).expect("small");
            let mut bounds: Vec<_> = all_work_tiles(&partition).into_iter().map(|p| (p.index, p.k_tiles)).collect();
            bounds.sort_by_key(|(index, steps)| (*index, steps.start, steps.end));
            bounds.dedup();
            bounds
        };
        assert_eq!(bounds(16, 64).len(), 3);
        assert_eq!(bounds(16, 64), bounds(500, 640));
    }

    #[test]
    fn blocks_at_work_share_weights_and_activations() {
        let config = TileConfig { tile_m: 128, tile_n: 256, schedule: Schedule::StreamK, ..config("gemm") };
        let partition = Partition::new(&op(4096, 14336, 4096), &config, Cut::NONE, 132).expect("small");
        let (n, m): (HashSet<_>, HashSet<_>) = tile_order(&partition).into_iter().take(132).unzip();
        assert!((12..20).contains(&n.len()) && (7..12).contains(&m.len()), "{n:?} {m:?}");
    }

    #[test]
    fn clusters_fill_all_waves_alike_with_all_tokens_at_work() {
        let config = TileConfig { tile_m: 256, tile_n: 256, cluster: 2, schedule: Schedule::StreamK, ..config("gemm") };
        let whole = |m, n| Partition::new(&op(m, n, 4096), &config, Cut::NONE, 66).expect("small");
        let grids = [(512, 14336), (4096, 14336), (512, 28672), (4096, 4096)].map(|(m, n)| whole(m, n).grid()[0]);
        assert_eq!(grids, [56, 64, 56, 64]);
        let (n, m): (HashSet<_>, HashSet<_>) = tile_order(&whole(1024, 14336)).into_iter().take(56).unzip();
        assert_eq!((n.len(), m.len()), (14, 4));
    }

    #[test]
    fn more_token_tiles_than_a_grid_has_along_y_are_worked_through() {
        let config = TileConfig { schedule: Schedule::StreamK, ..config("gemm") };
        let partition = Partition::new(&op(16 * 70_000, 64, 64), &config, Cut::NONE, 132).expect("fits");
        assert_eq!(partition.grid(), [132, 1, 1]);
        assert_eq!(partition.plan(0.0).work_tiles([131, 0, 0]).len(), (70_000 - 131usize).div_ceil(132));
    }

    #[test]
    fn a_size_beyond_u32_is_refused() {
        for schedule in [Schedule::Grid, Schedule::StreamK] {
            let config = TileConfig { tile_m: 1, schedule, ..config("gemm") };
            assert_eq!(Partition::new(&op(1 << 33, 1, 32), &config, Cut::NONE, 132), None);
        }
        let config = TileConfig { tile_m: 1, tile_n: 1, schedule: Schedule::StreamK, ..config("gemm") };
        assert_eq!(Partition::new(&op(1 << 16, 1 << 16, 32), &config, Cut::NONE, 132), None);
    }
}
