//! `qgemm bench --sweep-m`: one weight with many token counts,
//! and its cliffs.

use qgemm_api::tuning::{Candidate, LaunchPlan, TunedTable};
use qgemm_api::{Context, NormFunction, Plan, Problem, Weight};
use serde::Serialize;

use super::Args;
use super::cliffs::{self, Point};
use super::subject::Subject;
use super::timing::{Pace, Timing};
use crate::choice::Shape;
use crate::holds::Holds;
use crate::operations::gemm::Bench;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::provenance::Provenance;
use crate::table::{self, Column, Row, Table, numbers, words};

/// One measurement of a sweep.
#[derive(Clone, Debug, Serialize)]
struct SweepRow {
    device: String,
    format: String,
    x_dtype: String,
    m: usize,
    n: usize,
    k: usize,
    family: &'static str,
    kernel_id: String,
    /// Tile and resources of the config.
    config: String,
    /// Split of K.
    cut: String,
    /// CTAs of the launch.
    blocks: u64,
    /// Median time of a launch.
    microseconds: f64,
    /// Half the interquartile range, relative to the median.
    noise: f64,
    /// Estimate of the cost model.
    estimated_microseconds: f64,
    bytes_per_second: f64,
    flops: f64,
    /// Whether a plan uses this config.
    planned: bool,
    /// Slowdown relative to the best config for these tokens; for
    /// planned configs, if others were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    behind_best: Option<f64>,
    /// Why this is a cliff.
    #[serde(skip_serializing_if = "Option::is_none")]
    cliff: Option<String>,
    #[serde(skip)]
    tile_m: usize,
    #[serde(flatten)]
    provenance: Provenance,
}

impl Row for SweepRow {
    const COLUMNS: &'static [Column] = &[
        numbers("M", 5),
        words("family", 6),
        words("tile NxMxK", 12),
        words("cut", 22),
        numbers("blocks", 6),
        numbers("time us", 9),
        numbers("noise", 6),
        numbers("expected", 9),
        numbers("TFLOP/s", 8),
        numbers("GB/s", 8),
        words("", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let behind = self.behind_best.map(|share| format!("{:+.1}% behind the best", share * 100.0));
        let cliff = self.cliff.as_ref().map(|what| format!("CLIFF {what}"));
        let notes = [self.planned.then(|| "planned".to_owned()), behind, cliff];
        vec![
            self.m.to_string(),
            self.family.to_owned(),
            self.config.clone(),
            self.cut.clone(),
            self.blocks.to_string(),
            format!("{:.2}", self.microseconds),
            format!("{:.1}%", self.noise * 100.0),
            format!("{:.2}", self.estimated_microseconds),
            format!("{:.2}", self.flops / 1e12),
            format!("{:.1}", self.bytes_per_second / 1e9),
            notes.into_iter().flatten().collect::<Vec<_>>().join(", "),
        ]
    }
}

/// Runs the command. A sweep's table is printed at its end,
/// because cliffs are known only then.
///
/// # Errors
/// When the device fails, no kernel supports a shape, or the
/// table of the best cannot be written.
pub fn run(
    ctx: &Context,
    args: &Args,
    tokens: &[usize],
    subjects: &[Subject],
    printing: Printing,
) -> anyhow::Result<Holds> {
    let progress = Progress::new((subjects.len() * tokens.len()) as u64, "measuring");
    let mut all = Vec::new();
    let mut tuned = TunedTable::new();
    for subject in subjects {
        let bench = Bench::new(ctx, args, subject, tokens.iter().copied().max().unwrap_or(1))?;
        let mut sweep = Sweep { args, bench, tuned: &mut tuned, rows: Vec::new() };
        for &m in tokens {
            progress.say(format!("{} {m} tokens", subject.format()));
            sweep.measure(m)?;
            progress.step(1);
        }
        let rows = sweep.judged();
        if printing.is_text() {
            let Shape { n, k, .. } = subject.shape;
            progress.print(&format!("\n{n}x{k} {}", subject.format()))?;
            let mut table = Table::new(printing);
            rows.iter().try_for_each(|row| table.push(row.clone(), &progress))?;
        }
        all.extend(rows);
    }
    drop(progress);
    if let Some(path) = &args.save_tuned {
        qgemm_api::update_tuned(path, |table| table.renew(tuned))?;
    }
    let cliffs = all.iter().filter(|row| row.cliff.is_some()).count();
    match printing {
        Printing::Text => out::line(&format!("{cliffs} cliffs"))?,
        other => table::print(all, other)?,
    }
    Ok(if cliffs == 0 { Holds::Yes } else { Holds::No })
}

/// A sweep in progress.
struct Sweep<'a> {
    args: &'a Args,
    bench: Bench<'a>,
    tuned: &'a mut TunedTable,
    rows: Vec<SweepRow>,
}

impl Sweep<'_> {
    /// Times the planned candidate for `m` tokens; with
    /// `--all-configs` also the others.
    fn measure(&mut self, m: usize) -> anyhow::Result<()> {
        let problem = self.args.problem(&self.bench.weights[0], m);
        let planned = self.bench.ctx.plan(&problem)?;
        let first = self.rows.len();
        self.time(&planned, true)?;
        for candidate in self.others(&problem, &planned)? {
            let plan = self.bench.ctx.plan_candidate(&candidate)?;
            self.time(&plan, false)?;
        }
        let here = &mut self.rows[first..];
        if here.len() > 1 {
            let best = here.iter().map(|row| row.microseconds).fold(f64::INFINITY, f64::min);
            here[0].behind_best = Some(here[0].microseconds / best - 1.0);
        }
        Ok(())
    }

    /// Candidates to time besides the planned one.
    fn others(&self, problem: &Problem, planned: &Plan) -> anyhow::Result<Vec<Candidate>> {
        let Some(within) = self.args.all_configs else { return Ok(Vec::new()) };
        let all = self.bench.ctx.candidates(problem)?;
        let most = all.first().map_or(0.0, |best| best.launch().estimate * within);
        let same =
            |launch: &LaunchPlan| planned.launch().is_some_and(|p| p.config == launch.config && cut(p) == cut(launch));
        Ok(all.into_iter().filter(|c| c.launch().estimate <= most && !same(c.launch())).collect())
    }

    fn time(&mut self, plan: &Plan, planned: bool) -> anyhow::Result<()> {
        let Some(launch) = plan.launch() else { return Ok(()) };
        let Timing { median, noise, .. } = self.bench.time(plan, Pace::Sweep)?;
        let (op, config) = (plan.op(), &launch.config);
        let source_hash = plan.source_hash().unwrap_or_default();
        self.tuned.record(self.bench.ctx.info(), op, launch, source_hash, median);
        self.rows.push(SweepRow {
            device: self.bench.ctx.info().name.clone(),
            format: op.format.to_string(),
            x_dtype: op.x.format.to_string(),
            m: op.m,
            n: op.out_features,
            k: op.k,
            family: config.family,
            kernel_id: config.kernel_id(op.format).to_string(),
            config: format!("{}x{}x{}", config.tile_n, config.tile_m, config.tile_k),
            cut: cut(launch),
            blocks: launch.grid.iter().map(|&g| u64::from(g)).product(),
            microseconds: median * 1e6,
            noise,
            estimated_microseconds: launch.estimate * 1e6,
            bytes_per_second: plan.bytes() / median,
            flops: 2.0 * plan.macs() / median,
            planned,
            behind_best: None,
            cliff: None,
            tile_m: config.tile_m as usize,
            provenance: Provenance::now(self.bench.ctx.info()),
        });
        Ok(())
    }

    /// The rows, with cliffs of the planned candidates.
    fn judged(mut self) -> Vec<SweepRow> {
        let mut planned: Vec<_> = self.rows.iter_mut().filter(|row| row.planned).collect();
        let point = |row: &SweepRow| Point { m: row.m, tile_m: row.tile_m, microseconds: row.microseconds };
        let points: Vec<_> = planned.iter().map(|row| point(row)).collect();
        for (row, cliff) in planned.iter_mut().zip(cliffs::find(&points)) {
            row.cliff = cliff;
        }
        self.rows
    }
}

/// Describes how K is split.
fn cut(launch: &LaunchPlan) -> String {
    match &launch.stream_k {
        Some(cut) if cut.cut_tiles > 0 => {
            format!("{} of {} by {}", cut.cut_tiles, launch.n_tiles * launch.m_tiles, cut.cut_ctas)
        }
        None if launch.splits > 1 => format!("{} parts", launch.splits),
        _ => "whole tiles".to_owned(),
    }
}

impl Args {
    /// The problem of the options, with `m` tokens.
    pub fn problem(&self, weight: &Weight, m: usize) -> Problem {
        let problem = Problem::new(weight, m).x_format(self.x_format.unwrap_or(self.x_dtype.into()));
        let problem = problem.d_dtype(self.x_dtype).x_precision(self.x_precision);
        let problem = match self.norm {
            Some(kind) => problem.norm(NormFunction::new(kind, 1e-5).gamma(self.x_dtype)),
            None => problem,
        };
        match &self.family {
            Some(family) => problem.family(family),
            None => problem,
        }
    }
}
