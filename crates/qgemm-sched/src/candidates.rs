//! [`Candidates`]: what the families of an operation offer, ranked, and who refused.

use qgemm_hal::{DeviceInfo, Family, Operation, Unsupported};

use crate::error::Refusal;
use crate::gemm::Cost;

/// One way to run an operation.
#[derive(Clone, Debug)]
pub struct Offered<'f, O: Operation> {
    /// The family.
    pub family: &'f dyn Family<O>,
    /// The configuration, with all that a launch needs.
    pub plan: O::Plan,
    /// What the cost model expects.
    pub cost: Cost,
}

/// Every way to run an operation, the fastest by the cost model first; among equals, earlier families and configurations.
#[derive(Debug)]
pub struct Candidates<'f, O: Operation> {
    /// The ways.
    pub offered: Vec<Offered<'f, O>>,
    /// Families that do not serve it.
    pub refusals: Vec<Refusal>,
}

impl<'f, O: Operation> Candidates<'f, O> {
    /// Asks the families, each for its configurations, of each of which `plans` makes plans.
    pub(crate) fn ask<P: IntoIterator<Item = (O::Plan, Cost)>>(
        families: &[&'f dyn Family<O>],
        configs: impl Fn(&dyn Family<O>) -> Result<Vec<O::Config>, Unsupported>,
        plans: impl Fn(O::Config) -> P,
    ) -> Self {
        let (mut offered, mut refusals) = (Vec::new(), Vec::new());
        for &family in families {
            match configs(family) {
                Err(reason) => refusals.push(Refusal { family: family.name(), reason }),
                Ok(configs) => {
                    let plans = configs.into_iter().flat_map(&plans);
                    offered.extend(plans.map(|(plan, cost)| Offered { family, plan, cost }));
                }
            }
        }
        Self { offered, refusals }.sorted()
    }

    /// These and the ways to run the same behind other steps.
    pub(crate) fn and(mut self, others: Self) -> Self {
        self.offered.extend(others.offered);
        self.refusals.extend(others.refusals);
        self.sorted()
    }

    fn sorted(mut self) -> Self {
        self.offered.sort_by(|a, b| a.cost.seconds.total_cmp(&b.cost.seconds));
        self
    }
}

/// Of an operation that moves its bytes with this share (per mille) of the bandwidth in so many launches.
pub(crate) fn moving(op: &impl Operation, info: &DeviceInfo, per_mille: u32, launches: u32) -> Cost {
    let memory = op.traffic() / (info.bandwidth * (f64::from(per_mille.max(1)) / 1000.0));
    let launch = f64::from(launches) * info.launch_seconds;
    Cost::of_parts(memory, 0.0, launch, launch + memory)
}
