//! GEMM candidate ([`Candidate`]): a config weighed for one problem.

use qgemm_hal::{CheckedGemm, Device, DeviceId, Family, KernelId, LaunchPlan};
use qgemm_sched::TunedTable;
use qgemm_sched::gemm::{candidates, choose};

use super::problem::Problem;
use crate::error::Error;
use crate::normed::preferences_beside;

/// Candidate of a [`Problem`]: kernel family, config and launch geometry.
///
/// [`Context::candidates`](crate::Context::candidates) makes them, so that tuners can
/// time other configs than the planned one.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub(super) problem: Problem,
    pub(super) op: CheckedGemm,
    pub(super) family: &'static dyn Family<CheckedGemm>,
    pub(super) launch: LaunchPlan,
}

impl Candidate {
    /// All candidates, fastest by the cost model first. None for 0 tokens.
    pub(crate) fn all(device: &dyn Device, tuned: &TunedTable, problem: &Problem) -> Result<Vec<Self>, Error> {
        let op = problem.check()?;
        if op.m == 0 {
            return Ok(Vec::new());
        }
        let preferences = preferences_beside(op.normed_regions(op.m, 0), problem.preferences())?;
        let all = candidates(&op, device.info(), device.catalog().gemm, &preferences, tuned)?;
        let candidate = |(family, launch)| Self { problem: problem.clone(), op: op.clone(), family, launch };
        Ok(all.into_iter().map(candidate).collect())
    }

    /// Config and launch geometry.
    pub fn launch(&self) -> &LaunchPlan {
        &self.launch
    }

    /// Kernel id.
    pub fn kernel_id(&self) -> KernelId {
        self.launch.config.kernel_id(self.op.format)
    }

    /// Hash of the kernel's sources.
    pub fn source_hash(&self) -> u64 {
        self.family.source_hash(&self.op.product(&self.launch), &self.launch.config)
    }

    /// Launch of a plan without measurements.
    pub(crate) fn planned(&self, device: &dyn Device) -> Result<LaunchPlan, Error> {
        let preferences = preferences_beside(self.op.normed_regions(self.op.m, 0), self.problem.preferences())?;
        Ok(choose(&self.op, device.info(), device.catalog().gemm, &preferences, &TunedTable::new())?.1)
    }

    pub(crate) fn op(&self) -> &CheckedGemm {
        &self.op
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.problem.weight().device
    }
}
