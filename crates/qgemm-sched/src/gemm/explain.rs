//! Explanation of a choice: the cost of every
//! candidate, and the refusals.

use qgemm_hal::{CheckedGemm, DeviceInfo, Family, LaunchPlan};

use super::bound::Cost;
use super::partition::Cut;
use super::search::{Preferences, Search};
use super::select::choose;
use super::tuned::TunedTable;
use crate::error::{Refusal, SchedError};

/// One candidate that was weighed.
#[derive(Clone, Copy, Debug)]
pub struct Considered<'f> {
    /// The family.
    pub family: &'f dyn Family<CheckedGemm>,
    /// Config and launch geometry, with the estimate.
    pub plan: LaunchPlan,
    /// The estimate by cause.
    pub cost: Cost,
    /// Seconds in the tuned table, which holds at most one
    /// candidate for each family.
    pub measured: Option<f64>,
}

/// All inputs of a choice.
#[derive(Debug)]
pub struct Explanation<'f> {
    /// Every candidate, fastest by the cost model first.
    pub considered: Vec<Considered<'f>>,
    /// Families that refused the operation.
    pub refusals: Vec<Refusal>,
    /// Index in `considered` of the plan that [`choose`](super::choose)
    /// returns. `None` when no family supports the operation.
    pub chosen: Option<usize>,
}

impl Explanation<'_> {
    /// Index of a launch in `considered`.
    pub fn position(&self, plan: &LaunchPlan) -> Option<usize> {
        let cut = Cut::of(plan);
        self.considered.iter().position(|c| c.plan.config == plan.config && Cut::of(&c.plan) == cut)
    }
}

/// Weighs all candidates for `op` again and keeps
/// everything. Much slower than `choose`.
///
/// # Errors
/// [`SchedError::UnknownFamily`]. An operation that no family
/// supports is not an error here.
pub fn explain<'f>(
    op: &CheckedGemm,
    info: &DeviceInfo,
    families: &[&'f dyn Family<CheckedGemm>],
    prefs: &Preferences,
    tuned: &TunedTable,
) -> Result<Explanation<'f>, SchedError> {
    let mut refusals = Vec::new();
    let mut considered: Vec<(f64, Considered<'f>)> = Vec::new();
    for search in Search::all(op, info, prefs, tuned) {
        for family in search.wanted(families)? {
            let configs = match search.configs_of(family) {
                Ok(configs) => configs,
                Err(reason) => {
                    refusals.push(Refusal { family: family.name(), reason });
                    continue;
                }
            };
            let known = search.tuned_offer(family, &configs);
            for config in &configs {
                for offer in search.offers(config) {
                    let (Some(cost), cut) = (offer.cost, Cut::of(&offer.plan)) else { continue };
                    let is_known = |known: &LaunchPlan| known.config == *config && Cut::of(known) == cut;
                    let measured = known.as_ref().filter(|k| is_known(&k.plan)).map(|k| k.seconds);
                    considered.push((offer.seconds, Considered { family, plan: offer.plan, cost, measured }));
                }
            }
        }
    }
    considered.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let considered = considered.into_iter().map(|(_, c)| c).collect();
    let mut explanation = Explanation { considered, refusals, chosen: None };
    explanation.chosen = match choose(op, info, families, prefs, tuned) {
        Ok((_, plan)) => explanation.position(&plan),
        Err(SchedError::NoFamily { refusals, .. }) => {
            explanation.refusals = refusals;
            None
        }
        Err(other) => return Err(other),
    };
    Ok(explanation)
}

#[cfg(test)]
mod tests {
    use qgemm_hal::{Device, HalError, LaunchSequence, TileConfig, Unsupported};

    use super::*;
    use crate::gemm::partition::Partition;
    use crate::gemm::select::tests::{config, info, op};

    #[derive(Debug)]
    struct TestFamily(&'static str, Option<TileConfig>);

    impl Family<CheckedGemm> for TestFamily {
        fn name(&self) -> &'static str {
            self.0
        }
        fn configs(&self, _: &CheckedGemm, _: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
            self.1.map(|config| vec![config]).ok_or_else(|| Unsupported::new("serves nothing"))
        }
        fn prepare(&self, device: &dyn Device, _: &CheckedGemm, _: &LaunchPlan) -> Result<LaunchSequence, HalError> {
            Err(HalError::WrongDevice { device: device.info().id, what: "a family made for a test of the scheduler" })
        }
        fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
            7
        }
    }

    #[test]
    fn all_is_kept_and_the_choice_is_that_of_the_scheduler() {
        let gemm = TestFamily("gemm", Some(TileConfig { max_splits: 4, ..config("gemm") }));
        let never = TestFamily("never", None);
        let families: [&dyn Family<CheckedGemm>; 2] = [&never, &gemm];
        let op = op(16, 512, 16384);
        let (prefs, mut tuned) = (Preferences::default(), TunedTable::new());
        let first = explain(&op, &info(), &families, &prefs, &tuned).expect("no family is asked for");
        assert_eq!((first.considered.len(), first.refusals.len(), first.chosen), (4, 1, Some(0)));
        assert!(first.considered.iter().all(|c| c.plan.estimate == c.cost.seconds && c.measured.is_none()));

        let slowest = first.considered[3].plan;
        let partition = Partition::new(&op, &slowest.config, Cut::of(&slowest), 264).expect("small");
        assert!(tuned.record(&info(), &op, &partition.plan(0.0), 7, 1e-9));
        let measured = explain(&op, &info(), &families, &prefs, &tuned).expect("no family is asked for");
        assert_eq!((measured.chosen, measured.considered[3].measured), (Some(3), Some(1e-9)));

        let nobody = explain(&op, &info(), &families[..1], &prefs, &tuned).expect("no family is asked for");
        assert_eq!((nobody.chosen, nobody.refusals.len()), (None, 1));
    }
}
