//! Daily random cases: `qgemm verify --stress` with seeds
//! from the date, on the CPU and one emulated GPU, for
//! GEMM and two other operations.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use qgemm_hal::OPERATIONS;
use xtask::workspace;

/// Seconds for GEMM on each device, and for each other
/// operation; a minute in total.
const SECONDS_OF_GEMM: u64 = 16;
const SECONDS_OF_OTHERS: u64 = 7;
/// Seeds of a day: more than any machine can run.
const SEEDS_OF_A_DAY: u64 = 1_000_000;
/// Emulated variants, which take turns.
const VARIANTS: [&str; 6] = ["emu:sm70", "emu:sm75", "emu:sm80", "emu:sm89", "emu:sm90", "emu:sm120"];
/// Operations that run as steps of others and have no suite.
const STEPS: [&str; 2] = ["dequantize", "unpack"];
/// An operation made of others, with a suite.
const COMPOSED: &str = "gradient";

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Days since 1970.
    #[arg(long)]
    day: u64,
    /// The command `qgemm`, instead of one that is built first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Runs the cases of the day.
///
/// # Errors
/// When a case fails.
pub fn run(args: &Args) -> anyhow::Result<()> {
    for run in runs(args.day) {
        println!("$ qgemm {}", run.join(" "));
        let mut command = match &args.program {
            Some(program) => Command::new(program),
            None => workspace::cargo(),
        };
        if args.program.is_none() {
            command.args(["run", "--quiet", "--package", "qgemm-cli", "--"]);
        }
        let status = command.args(&run).status().with_context(|| format!("starting {command:?}"))?;
        ensure!(status.success(), "qgemm {}: {status}", run.join(" "));
    }
    Ok(())
}

/// All operations but GEMM; two of them take turns each day.
fn others() -> Vec<&'static str> {
    let listed = OPERATIONS.iter().map(|info| info.name);
    listed.filter(|name| *name != "gemm" && !STEPS.contains(name)).chain([COMPOSED]).collect()
}

/// The variant of a day. It skips one whenever operations and
/// variants have met in every way that their turns allow, so that
/// each operation meets all variants.
fn variant(day: u64, others: u64) -> &'static str {
    let variants = VARIANTS.len() as u64;
    let turns = (1..).find(|turn| (turn * variants).is_multiple_of(others)).unwrap_or(1) * variants;
    VARIANTS[((day + day / turns) % variants) as usize]
}

/// Arguments of the day's runs.
fn runs(day: u64) -> Vec<Vec<String>> {
    let seed = (day * SEEDS_OF_A_DAY).to_string();
    let others = others();
    let variant = variant(day, others.len() as u64);
    let other = |number: u64| others[((2 * day + number) % others.len() as u64) as usize];
    let ops = [("gemm", SECONDS_OF_GEMM), (other(0), SECONDS_OF_OTHERS), (other(1), SECONDS_OF_OTHERS)];
    let run = |(op, seconds): (&str, u64), device| {
        let seconds = seconds.to_string();
        let verify = ["verify", "--failures", "--op", op, "--stress", &seconds, "--seed", &seed, "--device", device];
        verify.map(str::to_owned).to_vec()
    };
    ops.into_iter().flat_map(|op| ["cpu", variant].map(|device| run(op, device))).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn after<'a>(run: &'a [String], option: &str) -> &'a str {
        run.iter().skip_while(|argument| *argument != option).nth(1).expect("a value")
    }

    #[test]
    fn days_draw_other_seeds_variants_and_operations_by_turns() {
        let seed = |day: u64| after(&runs(day)[0], "--seed").parse::<u64>().expect("a number");
        assert_eq!(seed(20_781), seed(20_780) + SEEDS_OF_A_DAY);
        let period = (VARIANTS.len() * VARIANTS.len() * others().len()) as u64;
        let mut met = BTreeSet::new();
        for day in 20_780..20_780 + period {
            let runs = runs(day);
            let seconds = runs.iter().map(|run| after(run, "--stress").parse::<u64>().expect("a number"));
            assert_eq!(seconds.sum::<u64>(), 60);
            met.extend(runs.iter().map(|run| (after(run, "--op").to_owned(), after(run, "--device").to_owned())));
        }
        assert_eq!(met.len(), (1 + others().len()) * (1 + VARIANTS.len()));
    }
}
