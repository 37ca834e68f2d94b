//! Measured configurations, which overrule the cost model.

use std::collections::BTreeMap;

use qgemm_hal::{CheckedGemm, DeviceInfo, LaunchPlan, TileConfig};
use serde::{Deserialize, Serialize};

use crate::error::TunedError;
use crate::partition::Cut;

/// The best configuration measured for each device (by name), kernel ([`CheckedGemm::kernel_name`]) and shape.
///
/// A measurement stands for a range of tokens, of which it was taken at the last: 1, 2, 4, 8, then up to every multiple
/// of 8 to 64, of 32 to 256, and every power of two. Plans of shapes without one are left to the cost model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedTable {
    best: BTreeMap<Key, Tuned>,
}

/// What a measurement stands for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Key {
    device: String,
    kernel: String,
    m: usize,
    n: usize,
    k: usize,
}

impl Key {
    fn of(info: &DeviceInfo, op: &CheckedGemm, family: &str) -> Self {
        let device = info.name.clone();
        Self { device, kernel: op.kernel_name(family), m: last_of_range(op.m), n: op.n, k: op.k }
    }
}

/// The last of the numbers of tokens that are measured as one.
fn last_of_range(m: usize) -> usize {
    match m {
        0..=8 => m.next_power_of_two(),
        9..=64 => m.next_multiple_of(8),
        65..=256 => m.next_multiple_of(32),
        _ => m.checked_next_power_of_two().unwrap_or(m),
    }
}

/// A measured configuration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tuned {
    tile: Tile,
    /// How K was cut.
    pub cut: Cut,
    /// The time measured.
    pub seconds: f64,
}

impl Tuned {
    /// Whether `config` is the one that was measured. What it is expected to reach may have changed since.
    pub fn is_of(&self, config: &TileConfig) -> bool {
        self.tile == Tile::of(config)
    }
}

/// What tells the configurations of a family apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Tile {
    tile_n: u32,
    tile_m: u32,
    tile_k: u32,
    threads: u32,
    blocks_per_unit: u32,
    stages: u32,
    shared_bytes: u32,
}

impl Tile {
    fn of(config: &TileConfig) -> Self {
        let &TileConfig { tile_n, tile_m, tile_k, threads, blocks_per_unit, stages, shared_bytes, .. } = config;
        Self { tile_n, tile_m, tile_k, threads, blocks_per_unit, stages, shared_bytes }
    }
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    key: Key,
    #[serde(flatten)]
    tuned: Tuned,
}

/// The file.
#[derive(Serialize, Deserialize)]
struct File {
    version: u32,
    tuned: Vec<Record>,
}

/// Version of the file's format.
const VERSION: u32 = 1;

impl TunedTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that a launch of `plan` for `op` took `seconds` on a device like `info`. Dropped, with `false`, when a
    /// faster one is known, or when `op` has fewer tokens than the last of the range that it would stand for.
    pub fn record(&mut self, info: &DeviceInfo, op: &CheckedGemm, plan: &LaunchPlan, seconds: f64) -> bool {
        let key = Key::of(info, op, plan.config.family);
        let known = self.best.get(&key);
        if key.m != op.m || known.is_some_and(|known| known.seconds <= seconds) {
            return false;
        }
        self.best.insert(key, Tuned { tile: Tile::of(&plan.config), cut: Cut::of(plan), seconds });
        true
    }

    /// The best measurement of a family for `op`, if there is one.
    pub(crate) fn find(&self, info: &DeviceInfo, op: &CheckedGemm, family: &str) -> Option<&Tuned> {
        // Most tables are empty.
        if self.is_empty() {
            return None;
        }
        self.best.get(&Key::of(info, op, family))
    }

    /// Measurements in the table.
    pub fn len(&self) -> usize {
        self.best.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.best.is_empty()
    }

    /// The table as JSON.
    ///
    /// # Errors
    /// [`TunedError::Json`] when a time is not finite.
    pub fn to_json(&self) -> Result<String, TunedError> {
        let record = |(key, tuned): (&Key, &Tuned)| Record { key: key.clone(), tuned: *tuned };
        let file = File { version: VERSION, tuned: self.best.iter().map(record).collect() };
        Ok(serde_json::to_string_pretty(&file)?)
    }

    /// Reads what [`TunedTable::to_json`] wrote. Configurations that no longer exist are kept, and not found.
    ///
    /// # Errors
    /// [`TunedError::Json`] when it is something else, [`TunedError::Version`] when another version wrote it.
    pub fn from_json(text: &str) -> Result<Self, TunedError> {
        let File { version, tuned } = serde_json::from_str(text)?;
        if version != VERSION {
            return Err(TunedError::Version { expected: VERSION, got: version });
        }
        Ok(Self { best: tuned.into_iter().map(|record| (record.key, record.tuned)).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::Partition;
    use crate::select::tests::{config, info, op};

    fn table() -> TunedTable {
        let mut table = TunedTable::new();
        let tuned = TileConfig { max_splits: 4, ..config("gemm") };
        for (m, parts, seconds) in [(8, 2, 2e-6), (8, 3, 1e-6), (8, 1, 3e-6), (512, 1, 4e-6)] {
            let op = op(m, 256, 1024);
            let plan = Partition::new(&op, &tuned, Cut::Parts(parts), 132).expect("small").plan(0.0);
            assert_eq!(table.record(&info(), &op, &plan, seconds), seconds < 3e-6 || m == 512);
        }
        table
    }

    #[test]
    fn the_fastest_is_kept_for_its_range_of_tokens() {
        let table = table();
        assert_eq!(table.len(), 2);
        for m in [5, 8, 300, 512] {
            assert!(table.find(&info(), &op(m, 256, 1024), "gemm").is_some_and(|t| t.is_of(&config("gemm"))), "{m}");
        }
        assert_eq!(table.find(&info(), &op(6, 256, 1024), "gemm").map(|t| t.cut), Some(Cut::Parts(3)));
        for (m, n, family) in [(4, 256, "gemm"), (9, 256, "gemm"), (8, 128, "gemm"), (8, 256, "gemv")] {
            assert_eq!(table.find(&info(), &op(m, n, 1024), family), None);
        }
        let mut table = table;
        let plan = Partition::new(&op(7, 256, 1024), &config("gemm"), Cut::NONE, 132).expect("small").plan(0.0);
        assert!(!table.record(&info(), &op(7, 256, 1024), &plan, 1e-9), "7 tokens don't stand for 8");
    }

    #[test]
    fn a_table_survives_its_file() {
        let table = table();
        let json = table.to_json().expect("finite");
        assert_eq!(TunedTable::from_json(&json).expect("as written"), table);
        let newer = json.replace("\"version\": 1", "\"version\": 2");
        assert!(matches!(TunedTable::from_json(&newer), Err(TunedError::Version { expected: 1, got: 2 })));
        assert!(matches!(TunedTable::from_json("[]"), Err(TunedError::Json(_))));
    }

    #[test]
    fn ranges_of_tokens_end_at_tiles() {
        let ends: Vec<_> = [1, 2, 3, 5, 9, 16, 17, 65, 96, 250, 257, 1000].map(last_of_range).to_vec();
        assert_eq!(ends, [1, 2, 4, 8, 16, 16, 24, 96, 96, 256, 512, 1024]);
    }
}
