//! `qgemm report`: measurements of a device, on one
//! self-contained page.

mod charts;
pub mod input;
pub mod page;
pub mod sections;

use std::path::PathBuf;

use anyhow::ensure;
use qgemm_api::Context;

use crate::holds::Holds;
use crate::out;
use crate::table::bytes;
use crate::whole_file::{Existing, WholeFile};
use input::{Results, read};
use page::Page;

/// Options of the command. Every file adds a section.
#[derive(clap::Args)]
pub struct Args {
    /// Device of the roofline: cpu, cuda:0, wgpu:0, auto (the best
    /// available), or a chip that need not be present, such as
    /// emu:sm90.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Output files of `qgemm verify --json`.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    verify: Vec<PathBuf>,
    /// A plan of `qgemm plan`: the roofline of a model's layers.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Results with peers, as in `benches/results`: time over tokens.
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// Output of `qgemm bench --sweep-m … --json`: predicted and
    /// measured times.
    #[arg(long, value_name = "FILE")]
    sweep: Option<PathBuf>,
    /// Results of `qgemm bench --save`.
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,
    /// Earlier results of `qgemm bench --save`, for comparison.
    #[arg(long, value_name = "FILE", requires = "bench")]
    baseline: Option<PathBuf>,
    /// File for the page.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Size limit of a page, which should open at once on a phone.
const MOST_BYTES: usize = 2 << 20;

/// Runs the command.
///
/// # Errors
/// When the device or a file fails, or the page would be too large.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let ctx = Context::open(&args.device)?;
    let file = WholeFile::create(&args.output, Existing::Replace)?;
    let mut page = Page::new(&format!("qgemm on {}", ctx.info().name));
    sections::device(&mut page, ctx.info());
    if !args.verify.is_empty() {
        let cases = args.verify.iter().map(|path| input::cases(path)).collect::<anyhow::Result<Vec<_>>>()?;
        sections::conformance(&mut page, &cases.concat());
    }
    if let Some(path) = &args.plan {
        sections::roofline(&mut page, &read(path)?, ctx.info())?;
    }
    if let Some(path) = &args.results {
        let results: Results = read(path)?;
        sections::tokens(&mut page, &results)?;
    }
    if let Some(path) = &args.sweep {
        sections::predicted(&mut page, &read::<Vec<input::SweepPoint>>(path)?)?;
    }
    if let Some(path) = &args.bench {
        let baseline = args.baseline.as_deref().map(read::<Vec<input::BenchPoint>>).transpose()?;
        sections::regressions(&mut page, &read::<Vec<input::BenchPoint>>(path)?, baseline.as_deref());
    }
    let html = page.html();
    ensure!(html.len() <= MOST_BYTES, "the page has {}: give it fewer results", bytes(html.len() as u64));
    file.finish_with(html.as_bytes())?;
    if !json {
        out::line(&format!("{} in {}", bytes(html.len() as u64), args.output.display()))?;
    }
    Ok(Holds::Yes)
}
