//! Baseline: results of an earlier run.

use std::path::Path;

use anyhow::Context;

use super::BenchRow;
use crate::text_file;
use crate::whole_file::WholeFile;

/// Smaller differences are never a regression: a machine varies
/// this much from day to day.
const SMALLEST: f64 = 0.03;
/// A difference counts if it exceeds the noise of both runs
/// together by this factor.
const NOISE_FACTOR: f64 = 3.0;

/// Results read from a file.
pub struct Baseline(Vec<BenchRow>);

impl Baseline {
    /// Reads a file of [`save`].
    ///
    /// # Errors
    /// When the file cannot be read or is invalid.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        Self::parse(&text_file::read(path)?).with_context(|| format!("{} is no baseline", path.display()))
    }

    /// Parses rows.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text).map(Self)
    }

    /// Compares `row` with the same measurement in the baseline, if
    /// any.
    pub fn judge(&self, row: &mut BenchRow) {
        let key = |r: &BenchRow| (r.device.clone(), r.shape.clone(), r.format.clone(), r.x_dtype.clone());
        let Some(before) = self.0.iter().find(|before| key(before) == key(row)) else { return };
        let slower = row.microseconds / before.microseconds - 1.0;
        row.slower = Some(slower);
        row.regressed = slower > SMALLEST.max(NOISE_FACTOR * (row.noise + before.noise));
    }
}

/// Saves results for a later run.
///
/// # Errors
/// When the file cannot be written. An existing file is then
/// unchanged.
pub fn save(file: WholeFile, rows: &[BenchRow]) -> anyhow::Result<()> {
    file.finish_with(serde_json::to_string_pretty(rows)?.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::Provenance;
    use crate::whole_file::Existing;

    fn row(microseconds: f64, noise: f64) -> BenchRow {
        BenchRow {
            device: "a device".into(),
            shape: "1x2x3".into(),
            format: "q4_0".into(),
            x_dtype: "f16".into(),
            kernel: "gemv".into(),
            kernel_id: None,
            unused_math: None,
            microseconds,
            noise,
            bytes_per_second: 1.0,
            flops: 1.0,
            bandwidth_share: 1.0,
            above_roof: None,
            spread: None,
            contention: None,
            copies: 2,
            graph: false,
            profile: None,
            slower: None,
            regressed: false,
            provenance: Provenance::default(),
        }
    }

    #[test]
    fn slower_beyond_the_noise_is_a_regression() {
        let baseline = Baseline(vec![row(100.0, 0.01)]);
        for (microseconds, noise, regressed) in
            [(110.0, 0.01, true), (110.0, 0.05, false), (102.0, 0.0, false), (104.0, 0.0, true), (50.0, 0.0, false)]
        {
            let mut now = row(microseconds, noise);
            baseline.judge(&mut now);
            assert_eq!(now.regressed, regressed, "{microseconds} us with noise {noise}");
        }
    }

    #[test]
    fn another_measurement_is_not_compared() {
        let baseline = Baseline(vec![row(100.0, 0.0)]);
        let mut other = BenchRow { shape: "8x2x3".into(), ..row(900.0, 0.0) };
        baseline.judge(&mut other);
        assert_eq!((other.slower, other.regressed), (None, false));
    }

    #[test]
    fn results_survive_the_file() {
        let folder = tempfile::tempdir().expect("a writable folder");
        let path = folder.path().join("baseline.json");
        save(WholeFile::create(&path, Existing::Replace).expect("writable"), &[row(7.0, 0.1)]).expect("written");
        let mut again = row(7.0, 0.1);
        Baseline::read(&path).expect("read").judge(&mut again);
        assert_eq!(again.slower, Some(0.0));
    }
}
