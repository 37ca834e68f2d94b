//! Ranks of a command: devices that run one model together.

use std::time::Duration;

use qgemm_api::{Context, Error, Tuned};

/// How long a rank waits for the others. A rank that fails is seen at once; compiling kernels may take
/// one longer than another.
const LIMIT: Duration = Duration::from_secs(60);

/// Option of commands that run a model.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct RankArgs {
    /// Divide the model among this many ranks (tensor parallelism): GPUs from the device on, with NCCL, or
    /// threads of the CPU.
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tp: u32,
}

impl RankArgs {
    /// Opens the device of each rank.
    ///
    /// # Errors
    /// When a device or NCCL is missing.
    pub fn open(self, device: &str, tuned: &Tuned) -> Result<Vec<Context>, Error> {
        let ranks = match self.tp {
            1 => vec![Context::open(device)?],
            world => Context::open_ranks(device, world as usize, LIMIT)?,
        };
        Ok(ranks.into_iter().map(|ctx| ctx.with_tuned(tuned.clone())).collect())
    }
}
