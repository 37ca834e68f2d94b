//! `qgemm report`: measurements on one self-contained page, with their
//! origin as the results state it.

mod chart;
mod escape;
pub mod input;
mod origin;
pub mod page;
mod roofline;
pub mod sections;
mod series;
mod styles;
mod ticks;
mod tokens;

use std::path::PathBuf;

use anyhow::ensure;
use qgemm_api::exec::ExecPlan;
use qgemm_api::{Context, DeviceInfo};

use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::table::bytes;
use crate::whole_file::{Existing, WholeFile};
use input::{Inputs, read};
use origin::Origins;
use page::Page;
pub use roofline::roofline;
pub use tokens::tokens;

/// Options of the command. Every file adds a section.
#[derive(clap::Args)]
pub struct Args {
    /// Device whose bandwidth and arithmetic are the roofs of `--plan`
    /// (default: the plan's device, if this machine has it): cpu,
    /// cuda:0, wgpu:0, or a chip that need not be present, such as
    /// emu:sm90.
    #[arg(long, requires = "plan")]
    device: Option<String>,
    /// Output files of `qgemm verify --json`.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    verify: Vec<PathBuf>,
    /// A plan of `qgemm plan`: the roofline of a model's layers.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Results with peers, as in `benches/results`: time over tokens.
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// In `--results`: the peer that speed-ups are relative to, by its
    /// name or column (default: the first).
    #[arg(long, value_name = "NAME", requires = "results")]
    peer: Option<String>,
    /// Output of `qgemm bench --sweep-m … --json`: predicted and
    /// measured times.
    #[arg(long, value_name = "FILE")]
    sweep: Option<PathBuf>,
    /// Results of `qgemm bench --save` or `--json`.
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,
    /// Earlier results of `qgemm bench`, for comparison.
    #[arg(long, value_name = "FILE", requires = "bench")]
    baseline: Option<PathBuf>,
    /// File for the page. With `--json` it may be absent.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Size limit of a page, which should open at once on a phone.
const MOST_BYTES: usize = 2 << 20;

/// Runs the command.
///
/// # Errors
/// When the device or a file fails, or the page would be too large.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let json = printing.json("report")?;
    ensure!(json || args.output.is_some(), "expected a file for the page (--output), or --json");
    let file = args.output.as_ref().map(|path| WholeFile::create(path, Existing::Replace)).transpose()?;
    let page = args.page(&args.inputs()?)?;
    let html = page.html();
    ensure!(html.len() <= MOST_BYTES, "the page has {}: give it fewer results", bytes(html.len() as u64));
    if let Some(file) = file {
        file.finish_with(html.as_bytes())?;
    }
    match (json, &args.output) {
        (true, _) => out::json(&page)?,
        (false, Some(path)) => out::line(&format!("{} in {}", bytes(html.len() as u64), path.display()))?,
        (false, None) => {}
    }
    Ok(Holds::Yes)
}

impl Args {
    fn inputs(&self) -> anyhow::Result<Inputs> {
        let cases = self.verify.iter().map(|path| input::cases(path)).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Inputs {
            cases: cases.concat(),
            plan: self.plan.as_deref().map(read).transpose()?,
            results: self.results.as_deref().map(read).transpose()?,
            sweep: self.sweep.as_deref().map(read).transpose()?.unwrap_or_default(),
            bench: self.bench.as_deref().map(read).transpose()?.unwrap_or_default(),
            baseline: self.baseline.as_deref().map(read).transpose()?,
        })
    }

    fn page(&self, inputs: &Inputs) -> anyhow::Result<Page> {
        let origins = Origins::of(inputs);
        let mut page = Page::new(&origins.title());
        origins.show(&mut page);
        if !self.verify.is_empty() {
            sections::conformance(&mut page, &inputs.cases);
        }
        if let Some(plan) = &inputs.plan {
            roofline(&mut page, plan, self.roofs(plan)?.as_ref())?;
        }
        if let Some(results) = &inputs.results {
            tokens(&mut page, results, self.peer.as_deref())?;
        }
        if self.sweep.is_some() {
            sections::predicted(&mut page, &inputs.sweep)?;
        }
        if self.bench.is_some() {
            sections::regressions(&mut page, &inputs.bench, inputs.baseline.as_deref());
        }
        Ok(page)
    }

    /// The device of the roofs: the stated one, or the plan's, if this
    /// machine has it.
    fn roofs(&self, plan: &ExecPlan) -> anyhow::Result<Option<DeviceInfo>> {
        if let Some(device) = &self.device {
            return Ok(Some(Context::open(device)?.info().clone()));
        }
        let planned = &plan.runtime.device;
        let ctx = Context::open(&planned.id).ok();
        Ok(ctx.map(|ctx| ctx.info().clone()).filter(|info| info.name == planned.name && info.arch == planned.arch))
    }
}
