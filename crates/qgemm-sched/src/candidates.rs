//! [`Candidates`]: ranked plans of an operation, and refusals by family.

use qgemm_hal::{DeviceInfo, Family, Operation, Unsupported};

use crate::error::{Refusal, SchedError};
use crate::gemm::{Cost, TunedTable};
use crate::measured::Measured;

/// One candidate: a family with a plan.
#[derive(Clone, Debug)]
pub struct Offered<'f, O: Operation> {
    /// The family.
    pub family: &'f dyn Family<O>,
    /// The config with everything a launch needs.
    pub plan: O::Plan,
    /// Cost from the cost model.
    pub cost: Cost,
    /// Measured seconds, if known.
    pub measured: Option<f64>,
}

/// All candidates of an operation, fastest first.
///
/// Measured times rank before estimates. Ties keep the
/// order of families and configs.
#[derive(Debug)]
pub struct Candidates<'f, O: Operation> {
    /// The candidates.
    pub offered: Vec<Offered<'f, O>>,
    /// Families that refused the operation.
    pub refusals: Vec<Refusal>,
}

impl<'f, O: Operation> Candidates<'f, O> {
    /// Asks each family for its configs and turns
    /// each config into plans.
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
                    offered.extend(plans.map(|(plan, cost)| Offered { family, plan, cost, measured: None }));
                }
            }
        }
        Self { offered, refusals }.sorted()
    }

    /// Merges in the candidates of the same operation
    /// that run a step first.
    pub(crate) fn and(mut self, others: Self) -> Self {
        self.offered.extend(others.offered);
        self.refusals.extend(others.refusals);
        self.sorted()
    }

    /// The family and plan of the first candidate.
    ///
    /// # Errors
    /// [`SchedError::NoFamily`] with the reason of every family.
    pub fn best(self, op: &O, info: &DeviceInfo) -> Result<(&'f dyn Family<O>, O::Plan), SchedError> {
        let Self { offered, refusals } = self;
        let best = offered.into_iter().next().map(|best| (best.family, best.plan));
        best.ok_or_else(|| {
            let operation = format!("{} of {}", O::NAME, op.describe());
            SchedError::NoFamily { device: info.name.clone(), operation, refusals }
        })
    }

    fn sorted(mut self) -> Self {
        self.offered.sort_by(|a, b| a.cost.seconds.total_cmp(&b.cost.seconds));
        self
    }
}

impl<O: Measured> Candidates<'_, O> {
    /// Drops kernels to avoid, then ranks measured candidates before estimates.
    pub(crate) fn measured(mut self, op: &O, info: &DeviceInfo, tuned: &TunedTable) -> Self {
        if !tuned.avoided().is_empty() {
            let mut avoided = Vec::new();
            self.offered.retain(|offer| {
                let why = tuned.why_avoided(info, &op.kernel_id(&offer.plan));
                avoided.extend(why.map(|why| (offer.family.name(), why.to_owned())));
                why.is_none()
            });
            for (family, why) in avoided {
                let is_left = self.offered.iter().any(|offer| offer.family.name() == family);
                if !is_left && !self.refusals.iter().any(|refusal| refusal.family == family) {
                    let reason = Unsupported::new(format!("what it has is to be avoided: {why}"));
                    self.refusals.push(Refusal { family, reason });
                }
            }
        }
        let found = tuned.find_others(info, op);
        for offer in self.offered.iter_mut().filter(|_| !found.is_empty()) {
            let (kernel, parts) = (op.kernel_id(&offer.plan), O::parts(&offer.plan));
            let known = found.iter().find(|known| known.kernel == kernel && known.parts == parts);
            let is_current = |hash: u64| offer.family.source_hash(op, O::config(&offer.plan)) == hash;
            offer.measured = known.filter(|known| is_current(known.source_hash)).map(|known| known.seconds);
        }
        // The sort is stable, so unmeasured candidates keep their order.
        let rank = |offer: &Offered<'_, O>| offer.measured.unwrap_or(f64::INFINITY);
        self.offered.sort_by(|a, b| rank(a).total_cmp(&rank(b)));
        self
    }
}
