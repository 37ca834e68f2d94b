//! `qgemm report`: what is known of a device, on one page that needs nothing but itself.

mod charts;
pub mod input;
pub mod page;
pub mod sections;

use std::path::PathBuf;

use anyhow::ensure;
use qgemm_api::Context;

use crate::table::bytes;
use crate::whole_file::{Existing, WholeFile};
use crate::{Holds, out};
use input::{Results, read};
use page::Page;

/// Options of the command. Every file adds a section.
#[derive(clap::Args)]
pub struct Args {
    /// Device whose roofs are drawn: cpu, cuda:0, wgpu:0, auto for the best there is, or a chip that need not be here, such as emu:sm90.
    #[arg(long, default_value = "auto")]
    device: String,
    /// What `qgemm verify --json` printed: any number of files.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    verify: Vec<PathBuf>,
    /// A plan file of `qgemm plan`: the roofline of a model's layers.
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Results with peers, as in `benches/results`: time against tokens.
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// What `qgemm bench --sweep-m … --json` printed: predicted against measured.
    #[arg(long, value_name = "FILE")]
    sweep: Option<PathBuf>,
    /// Results of `qgemm bench --save`.
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,
    /// Earlier results of `qgemm bench --save`, to compare with.
    #[arg(long, value_name = "FILE", requires = "bench")]
    baseline: Option<PathBuf>,
    /// Where to write the page.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Bytes of a page, at most: it is to open at once on a telephone.
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
