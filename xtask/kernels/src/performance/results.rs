//! Contents of a result file.

use anyhow::ensure;
use qgemm_formats::{DType, Format};
use serde::Deserialize;

/// Name of this library's runs.
pub const OURS: &str = "qgemm";

/// Measurements on one device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    pub device: String,
    /// API, and driver if known.
    pub through: String,
    /// Time unit of the table; rows are in microseconds.
    pub unit: Unit,
    /// Roof of every run that does not state another.
    pub roof: Option<Roof>,
    pub table: Table,
    pub runs: Vec<Run>,
    pub loading: Option<Loading>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Us,
    Ms,
}

/// Peak rates of a device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roof {
    pub read_gb_per_s: Span,
    /// 10¹² additions and multiplications per second. Without
    /// it, only one token has a roof.
    pub tera_ops: Option<Span>,
    /// Source of the figures.
    pub source: String,
}

/// Columns and rows that the page shows; the
/// rest stays in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Heading of the settings column.
    pub setting: Option<String>,
    /// N and K, in order.
    pub shapes: Vec<[usize; 2]>,
    /// Weight formats and names of peers, in order.
    pub columns: Vec<String>,
}

/// Figures of one program at one commit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// `qgemm`, or the identifier of a peer.
    pub by: String,
    /// A peer's name on the page.
    pub name: Option<String>,
    /// Distinguishes table rows beside shape and tokens,
    /// such as the SIMD level.
    pub setting: Option<String>,
    /// Distinguishes machines of one kind. Their figures share a cell.
    pub machine: Option<u32>,
    pub date: String,
    pub commit: Option<String>,
    /// A peer's version.
    pub version: Option<String>,
    pub command: String,
    /// Conditions that a reader of the file must know.
    pub note: Option<String>,
    pub roof: Option<Roof>,
    /// Kept in the file but not shown.
    #[serde(default)]
    pub hidden: bool,
    pub rows: Vec<Row>,
}

/// Time of one product.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Format name; absent when a peer has a different one.
    pub weights: Option<String>,
    /// Type of X and D.
    #[serde(default = "f16")]
    pub x: String,
    pub n: usize,
    pub k: usize,
    pub m: usize,
    pub us: Span,
    /// Kept in the file but not shown.
    #[serde(default)]
    pub hidden: bool,
}

/// Speed of loading weights onto the device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loading {
    pub date: String,
    pub commit: String,
    pub command: String,
    /// Conditions that a reader of the file must know.
    pub note: Option<String>,
    pub n: usize,
    pub k: usize,
    /// Copy bandwidth within device memory, bytes read and written.
    pub copy_gb_per_s: f64,
    pub rows: Vec<LoadingRow>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadingRow {
    /// Formats that share the figures.
    pub weights: Vec<String>,
    pub packing_gb_per_s: Span,
    pub load_ms: Span,
    /// Packing on the host.
    pub host_ms: Option<f64>,
}

/// A number, or both ends of a range.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Span {
    One(f64),
    Range([f64; 2]),
}

impl Span {
    pub fn ends(self) -> [f64; 2] {
        match self {
            Span::One(value) => [value, value],
            Span::Range(ends) => ends,
        }
    }
}

fn f16() -> String {
    "f16".into()
}

impl Results {
    /// Checks what the types alone do not guarantee.
    ///
    /// # Errors
    /// The run and what is wrong with it.
    pub fn check(&self) -> anyhow::Result<()> {
        if let Some(loading) = &self.loading {
            loading.check()?;
        }
        let mut seen = Vec::new();
        for run in &self.runs {
            let what = format!("{} of {}", run.by, run.date);
            ensure!(!run.command.is_empty(), "{what}: no command");
            ensure!(run.note.as_deref() != Some(""), "{what}: an empty note");
            match run.by.as_str() {
                OURS => ensure!(run.commit.is_some(), "{what}: no commit"),
                _ => ensure!(run.version.is_some() && run.name.is_some(), "{what}: no version or no name"),
            }
            for row in &run.rows {
                if let Some(weights) = &row.weights {
                    weights.parse::<Format>()?;
                }
                row.x.parse::<DType>()?;
                let [low, high] = row.us.ends();
                ensure!(0.0 < low && low <= high, "{what}: {low} to {high} µs");
                let cell = (&run.by, &run.setting, run.machine, &row.weights, &row.x, row.n, row.k, row.m);
                ensure!(run.hidden || !seen.contains(&cell), "{what}: {cell:?} twice");
                if !run.hidden {
                    seen.push(cell);
                }
            }
        }
        Ok(())
    }
}

impl Loading {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.note.as_deref() != Some(""), "loading: an empty note");
        ensure!(self.n * self.k > 0 && !self.command.is_empty(), "loading: no shape or no command");
        for row in &self.rows {
            for weights in &row.weights {
                weights.parse::<Format>()?;
            }
            ensure!(row.host_ms.is_none_or(|ms| ms > 0.0), "loading of {:?}: not a time", row.weights);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(runs: &str) -> anyhow::Result<()> {
        let text = format!(
            r#"{{"device": "d", "through": "t", "unit": "us", "table": {{"shapes": [], "columns": []}}, "runs": [{runs}]}}"#
        );
        serde_json::from_str::<Results>(&text)?.check()
    }

    fn run(of: &str, rows: &str) -> String {
        format!(r#"{{{of}, "date": "2026-01-01", "command": "c", "rows": [{rows}]}}"#)
    }

    const ROW: &str = r#"{"weights": "q4_0", "n": 64, "k": 64, "m": 1, "us": [1, 2]}"#;
    const BY_US: &str = r#""by": "qgemm", "commit": "abc""#;

    #[test]
    fn a_run_names_its_commit_or_version() {
        results(&run(BY_US, ROW)).unwrap();
        assert!(results(&run(r#""by": "qgemm""#, ROW)).is_err());
        assert!(results(&run(r#""by": "peer""#, ROW)).is_err());
        results(&run(r#""by": "peer", "name": "Peer", "version": "1""#, ROW)).unwrap();
    }

    #[test]
    fn unknown_formats_reversed_ranges_and_figures_that_stand_twice_are_refused() {
        assert!(results(&run(BY_US, &ROW.replace("q4_0", "q4_9"))).is_err());
        assert!(results(&run(BY_US, &ROW.replace("[1, 2]", "[2, 1]"))).is_err());
        assert!(results(&run(BY_US, &ROW.replace("\"us\"", "\"ns\""))).is_err());
        assert!(results(&run(BY_US, &format!("{ROW}, {ROW}"))).is_err());
    }
}
