//! Tables of operations other than GEMM: one row for each case,
//! next to the peer's figure if there is one.

use anyhow::ensure;
use serde::Deserialize;

use super::results::Span;
use super::tables::{line, span, wrapped};

/// Times of operations on a device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationResults {
    device: String,
    /// API, and driver if known.
    through: String,
    runs: Vec<OperationRun>,
}

/// Figures of one commit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OperationRun {
    date: String,
    commit: String,
    command: String,
    rows: Vec<OperationRow>,
}

/// Time of one case.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OperationRow {
    operation: String,
    /// Sizes and types, as `qgemm bench` prints them.
    case: String,
    kernel: String,
    us: Span,
    /// The limiting rate of the case: `3.6 TB/s`, `690 TFLOP/s`.
    rate: Option<String>,
    peer: Option<Peer>,
}

/// Time of another library for the same case.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Peer {
    name: String,
    us: f64,
}

impl OperationResults {
    /// Checks what the types alone do not guarantee.
    ///
    /// # Errors
    /// The case and what is wrong with it.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut seen = Vec::new();
        for run in &self.runs {
            ensure!(
                !run.command.is_empty() && !run.commit.is_empty(),
                "a run of {} without command or commit",
                run.date
            );
            for row in &run.rows {
                let [low, high] = row.us.ends();
                ensure!(0.0 < low && low <= high, "{} {}: {low} to {high} µs", row.operation, row.case);
                let cell = (&row.operation, &row.case, &row.kernel);
                ensure!(!seen.contains(&cell), "{cell:?} twice");
                seen.push(cell);
            }
        }
        Ok(())
    }
}

/// Text between a file's markers.
pub fn text(results: &OperationResults) -> String {
    let runs: Vec<String> = results.runs.iter().map(|run| format!("{} at `{}`", run.date, run.commit)).collect();
    let mut out = wrapped(&format!("{} ({}), {}.", results.device, results.through, runs.join(", ")));
    let header = ["operation", "case", "kernel", "µs", "rate", "peer, µs"].map(str::to_owned);
    out += &line(&header);
    out += &("|---".repeat(header.len()) + "|\n");
    for row in results.runs.iter().flat_map(|run| &run.rows) {
        let peer = row.peer.as_ref().map_or(String::new(), |peer| format!("{} {}", peer.name, peer.us));
        let rate = row.rate.clone().unwrap_or_default();
        out += &line(&[row.operation.clone(), row.case.clone(), row.kernel.clone(), span(row.us, 1.0), rate, peer]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = r#"{"operation": "norm", "case": "1x4096", "kernel": "norm_rms_f16_f16", "us": 1.5, "rate": "1 TB/s",
        "peer": {"name": "FlashInfer", "us": 1.6}}"#;

    fn results(rows: &str) -> OperationResults {
        let text = format!(
            r#"{{"device": "d", "through": "t",
                "runs": [{{"date": "2026-01-01", "commit": "abc", "command": "c", "rows": [{rows}]}}]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_row_has_the_case_and_the_peer() {
        let text = text(&results(ROW));
        assert!(text.contains("| norm | 1x4096 | norm_rms_f16_f16 | 1.5 | 1 TB/s | FlashInfer 1.6 |"), "{text}");
    }

    #[test]
    fn a_case_that_stands_twice_and_times_below_zero_are_refused() {
        results(ROW).check().unwrap();
        assert!(results(&format!("{ROW}, {ROW}")).check().is_err());
        assert!(results(&ROW.replace("1.5", "-1.5")).check().is_err());
    }
}
