//! Input files of a report, with the fields that it uses.

use std::path::Path;

use anyhow::{Context as _, bail};
use qgemm_api::exec::ExecPlan;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::bench::roof::AboveRoof;
use crate::provenance::Provenance;
use crate::{measured, text_file};

/// The files of the options.
pub struct Inputs {
    pub cases: Vec<CasePoint>,
    pub plan: Option<ExecPlan>,
    pub results: Option<Results>,
    pub sweep: Vec<SweepPoint>,
    pub bench: Vec<BenchPoint>,
    pub baseline: Option<Vec<BenchPoint>>,
}

/// Reads a JSON file.
///
/// # Errors
/// When it cannot be read, or has other contents.
pub fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = text_file::read(path)?;
    serde_json::from_str(&text).with_context(|| format!("{} is something else", path.display()))
}

/// A case of `qgemm verify --json`.
#[derive(Clone, Deserialize)]
pub struct CasePoint {
    pub case: String,
    pub nmse: Option<f64>,
    pub limit: Option<f64>,
    pub verdict: String,
    pub detail: Option<String>,
    pub device: Option<String>,
    #[serde(flatten)]
    pub provenance: Provenance,
}

/// The cases in a file, with or without counters.
///
/// # Errors
/// As [`read`].
pub fn cases(path: &Path) -> anyhow::Result<Vec<CasePoint>> {
    match cases_of(read(path)?) {
        Ok(cases) => Ok(cases),
        Err(error) => bail!("{} holds no cases of `qgemm verify --json`: {error}", path.display()),
    }
}

/// The cases in parsed contents.
pub fn cases_of(contents: Value) -> serde_json::Result<Vec<CasePoint>> {
    serde_json::from_value(match contents {
        Value::Object(mut both) => both.remove("cases").unwrap_or_default(),
        cases => cases,
    })
}

/// A row of `qgemm bench --sweep-m … --json`.
#[derive(Deserialize)]
pub struct SweepPoint {
    pub format: String,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub family: String,
    #[serde(deserialize_with = "measured::time")]
    pub microseconds: f64,
    #[serde(deserialize_with = "measured::time")]
    pub estimated_microseconds: f64,
    pub planned: bool,
    pub device: Option<String>,
    #[serde(flatten)]
    pub provenance: Provenance,
}

/// A row of `qgemm bench --save`.
#[derive(Deserialize)]
pub struct BenchPoint {
    pub device: String,
    pub shape: String,
    pub format: String,
    pub x_dtype: String,
    #[serde(deserialize_with = "measured::time")]
    pub microseconds: f64,
    #[serde(deserialize_with = "measured::share")]
    pub noise: f64,
    #[serde(deserialize_with = "measured::share")]
    pub bandwidth_share: f64,
    pub above_roof: Option<AboveRoof>,
    pub contention: Option<String>,
    #[serde(flatten)]
    pub provenance: Provenance,
}

/// A file of `benches/results`.
#[derive(Deserialize)]
pub struct Results {
    pub device: String,
    pub through: String,
    pub table: ResultsTable,
    pub runs: Vec<Run>,
}

/// Description of the results.
#[derive(Deserialize)]
pub struct ResultsTable {
    pub shapes: Vec<[usize; 2]>,
    pub columns: Vec<String>,
}

/// Figures of one program.
#[derive(Deserialize)]
pub struct Run {
    pub by: String,
    pub name: Option<String>,
    pub date: Option<String>,
    pub commit: Option<String>,
    pub version: Option<String>,
    pub command: Option<String>,
    #[serde(default)]
    pub hidden: bool,
    pub rows: Vec<ResultRow>,
}

/// One figure.
#[derive(Deserialize)]
pub struct ResultRow {
    pub weights: Option<String>,
    pub n: usize,
    pub k: usize,
    pub m: usize,
    pub us: Microseconds,
}

/// A time, or both ends of a range.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
pub enum Microseconds {
    One(#[serde(deserialize_with = "measured::time")] f64),
    Range([Time; 2]),
}

/// One end of a range.
#[derive(Clone, Copy, Deserialize)]
pub struct Time(#[serde(deserialize_with = "measured::time")] f64);

impl Microseconds {
    /// The middle.
    pub fn middle(self) -> f64 {
        match self {
            Self::One(time) => time,
            Self::Range([Time(from), Time(to)]) => f64::midpoint(from, to),
        }
    }
}
