//! Row of a measurement.

use qgemm_api::{Context, Profile};
use serde::{Deserialize, Serialize};

use super::roof::{AboveRoof, share_text};
use super::timing::Timing;
use crate::measured;
use crate::provenance::Provenance;
use crate::table::{Column, Row, numbers, words};

/// Spread of samples that is worth a remark.
const UNSTEADY: f64 = 0.25;

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchRow {
    pub device: String,
    pub shape: String,
    pub format: String,
    pub x_dtype: String,
    pub kernel: String,
    /// Identity of the kernel.
    #[serde(default)]
    pub kernel_id: Option<String>,
    /// Matrix instructions that the kernel leaves unused, though
    /// FMA bounds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_math: Option<String>,
    /// Median time of a launch.
    #[serde(deserialize_with = "measured::time")]
    pub microseconds: f64,
    /// Half the interquartile range, relative to the median.
    #[serde(deserialize_with = "measured::share")]
    pub noise: f64,
    /// Minimum traffic over time.
    pub bytes_per_second: f64,
    /// Operations (two per multiply-add) over time.
    pub flops: f64,
    /// Share of the device's read bandwidth.
    pub bandwidth_share: f64,
    /// Why the share exceeds 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub above_roof: Option<AboveRoof>,
    /// Range that holds nine tenths of the samples, relative to the
    /// median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// Other work during the measurement, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<String>,
    /// Copies of the weight that launches rotate through.
    pub copies: usize,
    /// Whether launches were replayed from a CUDA graph.
    pub graph: bool,
    /// Times of a launch's kernels, in order; only with `--profile`.
    #[serde(skip_deserializing, default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// Slowdown relative to the baseline: 0.1 is 10 % slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slower: Option<f64>,
    /// Whether the slowdown exceeds the noise.
    #[serde(default)]
    pub regressed: bool,
    #[serde(flatten)]
    pub provenance: Provenance,
}

impl BenchRow {
    /// Row of launches that move `bytes` each, without names and
    /// arithmetic. `bandwidth` is the device's read bandwidth.
    pub fn timed(ctx: &Context, timing: Timing, bytes: f64, bandwidth: f64, copies: usize) -> Self {
        let Timing { median, noise, spread, graph, profile } = timing;
        let bytes_per_second = bytes / median;
        let share = bytes_per_second / bandwidth;
        Self {
            device: ctx.info().name.clone(),
            shape: String::new(),
            format: String::new(),
            x_dtype: String::new(),
            kernel: String::new(),
            kernel_id: None,
            unused_math: None,
            microseconds: median * 1e6,
            noise,
            bytes_per_second,
            flops: 0.0,
            bandwidth_share: share,
            above_roof: AboveRoof::of(ctx, share, bytes * copies as f64),
            spread: Some(spread),
            contention: None,
            copies,
            graph,
            profile: Some(profile),
            slower: None,
            regressed: false,
            provenance: Provenance::now(ctx.info()),
        }
    }

    /// Compares with another read bandwidth.
    pub fn judge_share(&mut self, ctx: &Context, bandwidth: f64) {
        self.bandwidth_share = self.bytes_per_second / bandwidth;
        let bytes = self.bytes_per_second * self.microseconds * 1e-6;
        self.above_roof = AboveRoof::of(ctx, self.bandwidth_share, bytes * self.copies as f64);
    }

    /// Remarks that a reader of the measurement needs.
    fn remarks(&self) -> String {
        let against = self.slower.map(|slower| {
            let mark = if self.regressed { "  REGRESSION" } else { "" };
            format!("{:+.1}% against baseline{mark}", slower * 100.0)
        });
        let spread = self.spread.filter(|spread| *spread > UNSTEADY);
        let unsteady = spread.map(|spread| format!("unsteady: samples spread by {:.0} %", spread * 100.0));
        let remarks = [against, unsteady, self.contention.clone()];
        remarks.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }
}

impl Row for BenchRow {
    const COLUMNS: &'static [Column] = &[
        words("shape", 18),
        words("format", 18),
        words("kernel", 32),
        numbers("time us", 10),
        numbers("noise", 6),
        numbers("GB/s", 8),
        numbers("TFLOP/s", 8),
        numbers("of read", 8),
        numbers("copies", 6),
        words("remarks", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        vec![
            self.shape.clone(),
            self.format.clone(),
            match &self.unused_math {
                Some(math) => format!("{} (FMA, no {math})", self.kernel),
                None => self.kernel.clone(),
            },
            format!("{:.2}", self.microseconds),
            percent(self.noise),
            format!("{:.1}", self.bytes_per_second / 1e9),
            if self.flops > 0.0 { format!("{:.3}", self.flops / 1e12) } else { "-".to_owned() },
            share_text(self.bandwidth_share, self.above_roof),
            self.copies.to_string(),
            self.remarks(),
        ]
    }
}
