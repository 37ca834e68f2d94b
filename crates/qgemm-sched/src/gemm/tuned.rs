//! Tuned table: measured configs, which overrule the cost model.

use std::collections::BTreeMap;

use qgemm_hal::{CheckedGemm, DeviceInfo, KernelId, LaunchPlan};
use serde::{Deserialize, Serialize};

use super::avoided::AvoidedKernel;
use super::partition::Cut;
use crate::error::TunedError;
use crate::measured::{Measured, MeasuredKernel, MeasuredRecord, ProblemKey, as_text, last_of_range};

/// The best measured config for each device (name and
/// driver), problem and family.
///
/// A measurement represents a range of M and is taken
/// at its upper end. The ends are 1, 2, 4, 8,
/// then multiples of 8 up to 64, multiples of 32 up
/// to 256, and powers of two.
///
/// The cost model decides for shapes without a measurement, and for
/// kernels that no longer exist or whose sources changed. No plan
/// uses a kernel that is [avoided](Self::avoid).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedTable {
    best: BTreeMap<(Key, String), Tuned>,
    /// Measurements of operations other than `gemm`.
    others: BTreeMap<(ProblemKey, String), MeasuredKernel>,
    avoided: Vec<AvoidedKernel>,
}

/// The problem that a measurement represents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Key {
    device: String,
    driver: String,
    /// Format of W.
    w: String,
    /// Format of X in memory.
    x: String,
    m: usize,
    stored_rows: usize,
    k: usize,
}

impl Key {
    fn of(info: &DeviceInfo, op: &CheckedGemm) -> Self {
        Self {
            device: info.name.clone(),
            driver: info.driver.clone(),
            w: op.format.name.to_owned(),
            x: op.x.format.name().to_owned(),
            m: last_of_range(op.m),
            stored_rows: op.stored_rows,
            k: op.k,
        }
    }
}

/// A measured config.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tuned {
    /// The kernel.
    #[serde(with = "as_text")]
    pub kernel: KernelId,
    /// Hash of the kernel's sources
    /// ([`Family::source_hash`](qgemm_hal::Family::source_hash)).
    pub source_hash: u64,
    /// The K split.
    pub cut: Cut,
    /// Measured seconds.
    pub seconds: f64,
}

/// One entry of the file.
#[derive(Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    key: Key,
    #[serde(flatten)]
    tuned: Tuned,
}

/// The file.
#[derive(Serialize)]
struct File {
    version: u32,
    tuned: Vec<Record>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    others: Vec<MeasuredRecord>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    avoided: Vec<AvoidedKernel>,
}

/// The file as read: entries are parsed one by one, so
/// a damaged entry does not lose the others.
#[derive(Deserialize)]
struct Entries {
    tuned: Vec<serde_json::Value>,
    #[serde(default)]
    others: Vec<serde_json::Value>,
    #[serde(default)]
    avoided: Vec<serde_json::Value>,
}

/// The fields that every file version has.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// File format version. Version 1 named kernels by seven
/// numbers instead of an identity.
const VERSION: u32 = 2;

impl TunedTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that `plan` for `op` took `seconds` on a device like
    /// `info`, with kernel sources of this hash.
    ///
    /// Returns `false` and drops the measurement in three cases:
    /// - a faster one with the same sources exists;
    /// - `op.m` is not the upper end of its range;
    /// - a step before the product dequantized or quantized X, so
    ///   the time is not the kernel's.
    pub fn record(
        &mut self,
        info: &DeviceInfo,
        op: &CheckedGemm,
        plan: &LaunchPlan,
        source_hash: u64,
        seconds: f64,
    ) -> bool {
        let key = (Key::of(info, op), plan.config.family.to_owned());
        let is_faster = |known: &Tuned| known.source_hash == source_hash && known.seconds <= seconds;
        let has_step_before = plan.workspace.dequantized.is_some() || plan.workspace.quantized.is_some();
        if has_step_before || key.0.m != op.m || self.best.get(&key).is_some_and(is_faster) {
            return false;
        }
        let kernel = plan.config.kernel_id(op.format);
        self.best.insert(key, Tuned { kernel, source_hash, cut: Cut::of(plan), seconds });
        true
    }

    /// Records a measurement of an operation other than `gemm`. The time
    /// includes all launches of `plan`.
    pub fn record_other<O: Measured>(
        &mut self,
        info: &DeviceInfo,
        op: &O,
        plan: &O::Plan,
        source_hash: u64,
        seconds: f64,
    ) -> bool {
        let kernel = op.kernel_id(plan);
        let Some(key) = ProblemKey::of(info, op).filter(|_| op.stands_for_its_range()) else { return false };
        let key = (key, kernel.family.to_string());
        let is_faster = |known: &MeasuredKernel| known.source_hash == source_hash && known.seconds <= seconds;
        if self.others.get(&key).is_some_and(is_faster) {
            return false;
        }
        self.others.insert(key, MeasuredKernel { kernel, source_hash, parts: O::parts(plan), seconds });
        true
    }

    /// Measurements for `op` of all families.
    pub(crate) fn find_others<O: Measured>(&self, info: &DeviceInfo, op: &O) -> Vec<&MeasuredKernel> {
        // Most tables have no such entries.
        let key = if self.others.is_empty() { None } else { ProblemKey::of(info, op) };
        let Some(key) = key else { return Vec::new() };
        let first = (key.clone(), String::new());
        self.others.range(first..).take_while(|((found, _), _)| *found == key).map(|(_, found)| found).collect()
    }

    /// The best measurement of a family for `op`.
    pub(crate) fn find(&self, info: &DeviceInfo, op: &CheckedGemm, family: &str) -> Option<&Tuned> {
        // Most tables are empty.
        if self.best.is_empty() {
            return None;
        }
        self.best.get(&(Key::of(info, op), family.to_owned()))
    }

    /// Adds a kernel that plans must avoid; `false` when
    /// it was already avoided.
    pub fn avoid(&mut self, kernel: AvoidedKernel) -> bool {
        let is_new = !self.avoided.iter().any(|known| (known.kernel, &known.device) == (kernel.kernel, &kernel.device));
        if is_new {
            self.avoided.push(kernel);
        }
        is_new
    }

    /// Allows a kernel again on all devices; `false`
    /// when it was not avoided.
    pub fn allow(&mut self, kernel: &KernelId) -> bool {
        let before = self.avoided.len();
        self.avoided.retain(|known| known.kernel != *kernel);
        self.avoided.len() < before
    }

    /// The avoided kernels.
    pub fn avoided(&self) -> &[AvoidedKernel] {
        &self.avoided
    }

    /// Why a kernel is avoided on a device like
    /// `info`, or `None`.
    pub(crate) fn why_avoided(&self, info: &DeviceInfo, kernel: &KernelId) -> Option<&str> {
        self.avoided.iter().find(|known| known.is(info, kernel)).map(|known| known.why.as_str())
    }

    /// Number of measurements.
    pub fn len(&self) -> usize {
        self.best.len() + self.others.len()
    }

    /// Whether the table holds no measurement.
    pub fn is_empty(&self) -> bool {
        self.best.is_empty() && self.others.is_empty()
    }

    /// The table as JSON.
    ///
    /// # Errors
    /// [`TunedError::Json`] when a time is not finite.
    pub fn to_json(&self) -> Result<String, TunedError> {
        let record = |((key, _), tuned): (&(Key, String), &Tuned)| Record { key: key.clone(), tuned: *tuned };
        let other = |((key, _), found): (&(ProblemKey, String), &MeasuredKernel)| MeasuredRecord {
            key: key.clone(),
            found: *found,
        };
        let file = File {
            version: VERSION,
            tuned: self.best.iter().map(record).collect(),
            others: self.others.iter().map(other).collect(),
            avoided: self.avoided.clone(),
        };
        Ok(serde_json::to_string_pretty(&file)?)
    }

    /// Merges the measurements and avoided kernels of `other`, and returns
    /// how many measurements were taken.
    ///
    /// `other` wins for problems and families without a measurement
    /// here, for different kernel sources (assumed newer), and for a
    /// shorter time with the same sources.
    pub fn merge(&mut self, other: TunedTable) -> usize {
        let mut taken = 0;
        for kernel in other.avoided {
            self.avoid(kernel);
        }
        for (key, tuned) in other.best {
            let is_better = |known: &Tuned| known.source_hash != tuned.source_hash || tuned.seconds < known.seconds;
            if self.best.get(&key).is_none_or(is_better) {
                self.best.insert(key, tuned);
                taken += 1;
            }
        }
        for (key, found) in other.others {
            let is_better =
                |known: &MeasuredKernel| known.source_hash != found.source_hash || found.seconds < known.seconds;
            if self.others.get(&key).is_none_or(is_better) {
                self.others.insert(key, found);
                taken += 1;
            }
        }
        taken
    }

    /// Measurements that `before` lacks, or holds with other values.
    #[must_use]
    pub fn measured_since(&self, before: &TunedTable) -> TunedTable {
        let mut table = self.clone();
        table.best.retain(|key, tuned| before.best.get(key) != Some(tuned));
        table.others.retain(|key, found| before.others.get(key) != Some(found));
        table.avoided.clear();
        table
    }

    /// Takes all measurements of `newer`; on the same problem and
    /// family they replace those of `self`.
    pub fn renew(&mut self, newer: TunedTable) {
        self.best.extend(newer.best);
        self.others.extend(newer.others);
    }

    /// Reads the output of [`TunedTable::to_json`].
    ///
    /// Entries for configs that no longer exist are kept but never
    /// match. Unreadable entries are skipped with a warning.
    ///
    /// # Errors
    /// [`TunedError::Json`] when the text is not a tuned table,
    /// [`TunedError::Version`] when another version wrote it.
    pub fn from_json(text: &str) -> Result<Self, TunedError> {
        // Check the version first: other versions have unknown contents.
        let Versioned { version } = serde_json::from_str(text)?;
        if version != VERSION {
            return Err(TunedError::Version { expected: VERSION, got: version });
        }
        let Entries { tuned, others, avoided } = serde_json::from_str(text)?;
        let mut table = Self::new();
        for (place, entry) in tuned.into_iter().enumerate() {
            match serde_json::from_value::<Record>(entry) {
                Ok(Record { key, tuned }) if tuned.seconds.is_finite() && tuned.seconds > 0.0 => {
                    table.best.insert((key, tuned.kernel.family.to_string()), tuned);
                }
                Ok(Record { tuned, .. }) => {
                    tracing::warn!(place, seconds = tuned.seconds, "entry of a tuned table ignored: no time");
                }
                Err(error) => tracing::warn!(place, %error, "entry of a tuned table ignored"),
            }
        }
        for (place, entry) in others.into_iter().enumerate() {
            match serde_json::from_value::<MeasuredRecord>(entry) {
                Ok(MeasuredRecord { key, found }) if found.seconds.is_finite() && found.seconds > 0.0 => {
                    table.others.insert((key, found.kernel.family.to_string()), found);
                }
                Ok(MeasuredRecord { found, .. }) => {
                    tracing::warn!(place, seconds = found.seconds, "entry of a tuned table ignored: no time");
                }
                Err(error) => tracing::warn!(place, %error, "entry of a tuned table ignored"),
            }
        }
        for (place, entry) in avoided.into_iter().enumerate() {
            match serde_json::from_value::<AvoidedKernel>(entry) {
                Ok(kernel) => {
                    table.avoid(kernel);
                }
                // For example, the kernel no longer exists.
                Err(error) => tracing::warn!(place, %error, "kernel to avoid left out of a tuned table"),
            }
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::TileConfig;

    use super::*;
    use crate::gemm::partition::Partition;
    use crate::gemm::select::tests::{config, info, op};

    fn table() -> TunedTable {
        let mut table = TunedTable::new();
        let tuned = TileConfig { max_splits: 4, ..config("gemm") };
        for (m, parts, seconds) in [(8, 2, 2e-6), (8, 3, 1e-6), (8, 1, 3e-6), (512, 1, 4e-6)] {
            let op = op(m, 256, 1024);
            let plan = Partition::new(&op, &tuned, Cut::Parts(parts), 132).expect("small").plan(0.0);
            assert_eq!(table.record(&info(), &op, &plan, 7, seconds), seconds < 3e-6 || m == 512);
        }
        table
    }

    #[test]
    fn the_fastest_is_kept_for_its_range_of_tokens() {
        let table = table();
        assert_eq!(table.len(), 2);
        for m in [5, 8, 300, 512] {
            let (op, id) = (op(m, 256, 1024), config("gemm").kernel_id(op(m, 256, 1024).format));
            assert!(table.find(&info(), &op, "gemm").is_some_and(|t| t.kernel == id), "{m}");
        }
        assert_eq!(table.find(&info(), &op(6, 256, 1024), "gemm").map(|t| t.cut), Some(Cut::Parts(3)));
        for (m, n, family) in [(4, 256, "gemm"), (9, 256, "gemm"), (8, 128, "gemm"), (8, 256, "gemv")] {
            assert_eq!(table.find(&info(), &op(m, n, 1024), family), None);
        }
        let mut table = table;
        let plan = Partition::new(&op(7, 256, 1024), &config("gemm"), Cut::NONE, 132).expect("small").plan(0.0);
        assert!(!table.record(&info(), &op(7, 256, 1024), &plan, 7, 1e-9), "7 tokens don't stand for 8");
    }

    #[test]
    fn newer_measurements_replace_older_ones_of_their_problems_alone() {
        let (mine, others) = (op(16, 256, 1024), op(32, 256, 1024));
        let plan = |op| Partition::new(op, &config("gemm"), Cut::NONE, 132).expect("small").plan(0.0);
        let before = table();
        let mut after = before.clone();
        assert!(after.record(&info(), &mine, &plan(&mine), 7, 5e-6));
        let measured = after.measured_since(&before);
        assert_eq!((measured.len(), before.measured_since(&before).len()), (1, 0));
        // Another process has measured this problem meanwhile, and another one.
        let mut file = TunedTable::new();
        for (op, seconds) in [(&mine, 1e-6), (&others, 2e-6)] {
            assert!(file.record(&info(), op, &plan(op), 7, seconds));
        }
        file.renew(measured);
        let seconds = |op| file.find(&info(), op, "gemm").map(|tuned| tuned.seconds);
        assert_eq!((file.len(), seconds(&mine), seconds(&others)), (2, Some(5e-6), Some(2e-6)));
    }

    #[test]
    fn a_table_survives_its_file() {
        let table = table();
        let json = table.to_json().expect("finite");
        assert_eq!(TunedTable::from_json(&json).expect("as written"), table);
        let newer = json.replace("\"version\": 2", "\"version\": 3");
        assert!(matches!(TunedTable::from_json(&newer), Err(TunedError::Version { expected: 2, got: 3 })));
        // A table from before kernels had identities.
        let old = r#"{"version": 1, "tuned": [{"device": "x", "kernel": "gemm_nt_q4_0_f16", "m": 1, "n": 1, "k": 32, "tile": {}}]}"#;
        let error = TunedTable::from_json(old).expect_err("version 1");
        assert!(error.to_string().contains("measure again"), "{error}");
        assert!(matches!(TunedTable::from_json("[]"), Err(TunedError::Json(_))));
    }

    #[test]
    fn damaged_entries_are_left_out_and_the_others_kept() {
        let json = table().to_json().expect("finite");
        for (good, bad) in [("gemm:gemm:", "gemm:no such kernel:"), ("1e-6", "-1.0")] {
            let damaged = json.replacen(good, bad, 1);
            assert_ne!(damaged, json, "{good}");
            assert_eq!(TunedTable::from_json(&damaged).expect("a table").len(), 1, "{bad}");
        }
    }

    #[test]
    fn kernels_to_avoid_survive_the_file_and_a_merge() {
        let kernel = config("gemm").kernel_id(op(8, 256, 1024).format);
        let mut bad = TunedTable::new();
        assert!(bad.avoid(AvoidedKernel::new(kernel, "wrong with driver 1.2").on("another device")));
        assert_eq!(bad.why_avoided(&info(), &kernel), None);
        assert!(bad.avoid(AvoidedKernel::new(kernel, "too slow")) && !bad.avoid(AvoidedKernel::new(kernel, "again")));
        let again = TunedTable::from_json(&bad.to_json().expect("finite")).expect("as written");
        assert_eq!((&again, again.why_avoided(&info(), &kernel)), (&bad, Some("too slow")));
        let mut here = table();
        assert_eq!((here.merge(again), here.avoided().len()), (0, 2));
        assert!(here.allow(&kernel) && !here.allow(&kernel) && here.avoided().is_empty());
        assert!(!table().to_json().expect("finite").contains("avoided"), "files stay as they were");
    }

    #[test]
    fn merging_takes_the_new_and_the_faster() {
        let mut here = table();
        assert_eq!(here.merge(table()), 0, "nothing is new");
        let mut other = TunedTable::new();
        for (m, hash, seconds) in [(8, 7, 9e-7), (512, 8, 1.0), (16, 7, 1.0)] {
            let op = op(m, 256, 1024);
            let plan = Partition::new(&op, &config("gemm"), Cut::NONE, 132).expect("small").plan(0.0);
            assert!(other.record(&info(), &op, &plan, hash, seconds));
        }
        assert_eq!((here.merge(other), here.len()), (3, 3));
    }

    #[test]
    fn ranges_of_tokens_end_at_tiles() {
        let ends: Vec<_> = [1, 2, 3, 5, 9, 16, 17, 65, 96, 250, 257, 1000].map(last_of_range).to_vec();
        assert_eq!(ends, [1, 2, 4, 8, 16, 16, 24, 96, 96, 256, 512, 1024]);
    }
}
