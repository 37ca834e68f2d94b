//! Ranks of a command: devices that run one model
//! together.

use std::time::Duration;

use qgemm_api::{Context, Error, Rendezvous, Tuned};
use qgemm_model::{ModelOptions, Precision};

/// How long a rank waits for the others. A rank that
/// fails is seen at once; compiling kernels may take one
/// longer than another.
const LIMIT: Duration = Duration::from_secs(60);

/// Options of commands that run a model.
#[derive(clap::Args, Clone, Debug)]
pub struct RankArgs {
    /// Divide the model among this many ranks (tensor
    /// parallelism): GPUs from the device on, with NCCL, or
    /// threads of the CPU.
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tp: u32,
    /// Divide experts by expert: each rank has some of them, instead
    /// of a slice of each (expert parallelism).
    #[arg(long)]
    pub expert_parallel: bool,
    /// Run this rank alone, on the device. The others are
    /// processes with the same command. Rank 0 prints.
    #[arg(long, requires = "join")]
    pub rank: Option<usize>,
    /// Where the processes of the ranks meet: an address on
    /// loopback such as 127.0.0.1:29500, or a file that does
    /// not exist.
    #[arg(long, value_name = "PLACE", requires = "rank")]
    pub join: Option<Rendezvous>,
}

impl RankArgs {
    /// Opens the device of each rank of this process.
    ///
    /// # Errors
    /// When a device or NCCL is missing, or another rank does
    /// not come.
    pub fn open(&self, device: &str, tuned: &Tuned) -> Result<Vec<Context>, Error> {
        let world = self.tp as usize;
        let ranks = match (&self.join, self.rank) {
            (Some(place), Some(rank)) => vec![Context::join_rank(device, place, [rank, world], LIMIT)?],
            _ if world == 1 => vec![Context::open(device)?],
            _ => Context::open_ranks(device, world, LIMIT)?,
        };
        Ok(ranks.into_iter().map(|ctx| ctx.with_tuned(tuned.clone())).collect())
    }

    /// How the ranks open a model.
    pub fn model_options(&self, precision: Precision) -> ModelOptions {
        ModelOptions::from(precision).expert_parallel(self.expert_parallel)
    }

    /// Whether this process has the first rank.
    pub fn is_first(&self) -> bool {
        self.rank.unwrap_or(0) == 0
    }
}
