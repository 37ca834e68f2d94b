//! Kernel choice for `indexer`.

use qgemm_hal::{CheckedIndexer, DeviceInfo, Family, IndexerConfig, IndexerLaunch, Operation};

use crate::candidates::Candidates;
use crate::error::SchedError;
use crate::gemm::Cost;

/// Picks the family and config for `op` on the device
/// of `info`. The shortest expected time wins, and
/// the earlier one of equals.
///
/// # Errors
/// [`SchedError::NoFamily`] with the reason of every family.
pub fn choose<'f>(
    op: &CheckedIndexer,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedIndexer>],
) -> Result<(&'f dyn Family<CheckedIndexer>, IndexerLaunch), SchedError> {
    candidates(op, info, families).best(op, info)
}

/// All candidates that [`choose`] ranks for `op`.
pub fn candidates<'f>(
    op: &CheckedIndexer,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedIndexer>],
) -> Candidates<'f, CheckedIndexer> {
    Candidates::ask(
        families,
        |family| family.configs(op, info),
        |config| {
            let cost = cost(op, info, &config);
            [(IndexerLaunch { config, estimate: cost.seconds }, cost)]
        },
    )
}

/// Expected cost of `config`: launches, then the larger of
/// memory and arithmetic time.
fn cost(op: &CheckedIndexer, info: &DeviceInfo, config: &IndexerConfig) -> Cost {
    let share = |per_mille: u32| f64::from(per_mille.max(1)) / 1000.0;
    let (of_bandwidth, of_rate) = config.efficiency;
    let scores = 4.0 * op.queries as f64 * op.most_keys() as f64;
    let moving = (op.read_bytes() + scores) / (info.bandwidth * share(of_bandwidth));
    let multiplying = info.rate(config.math).map_or(0.0, |rate| op.macs() * config.padding / (rate * share(of_rate)));
    let launches = f64::from(config.launches) * info.launch_seconds;
    // Top-k reads the scores about twice more. This does not change
    // the ranking: every family pays it.
    let choosing = if op.chosen() > 0 { 2.0 * scores / info.bandwidth } else { 0.0 };
    Cost::of_parts(moving, multiplying, launches, launches + moving.max(multiplying) + choosing)
}
