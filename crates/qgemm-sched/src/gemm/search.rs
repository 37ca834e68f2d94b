//! [`Search`]: the plans that a family offers for an operation,
//! with their ranks.

use std::borrow::Cow;

use qgemm_hal::{
    CheckedDequantize, CheckedGemm, CheckedQuantize, DeviceInfo, Family, LaunchPlan, Math, Operation, TileConfig,
    Unsupported, WorkspaceLayout,
};

use super::bound::Cost;
use super::cost::{cost, estimate};
use super::partition::{Cut, Partition};
use super::tuned::TunedTable;
use crate::error::SchedError;
use crate::families::wanted_families;

/// The M that batch-invariant operations are planned for, whatever their M.
pub const INVARIANT_M: usize = 64;
/// A batch-invariant operation uses only families
/// that support all of these.
const INVARIANT_PROBES: [usize; 3] = [1, INVARIANT_M, 1 << 16];
/// Minimum expected saving, as a share of the time, for rounding
/// weights or quantizing a plain X.
const EXACTNESS: f64 = 0.05;

/// User preferences for a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Preferences {
    /// Only the family with this name.
    pub family: Option<String>,
    /// Only configs with this arithmetic.
    pub math: Option<Math>,
    /// Workspace limit in bytes; unlimited when absent.
    ///
    /// A limit can rule out split-K and converted copies of the
    /// activations. Kernels then read X in place, which is slower.
    pub max_workspace: Option<usize>,
}

/// The operation that candidates are ranked for.
pub(super) fn ranked(op: &CheckedGemm) -> CheckedGemm {
    let mut ranked = op.clone();
    if op.batch_invariant {
        ranked.m = INVARIANT_M;
        // A transposed X of one token looks untransposed. It must run
        // the kernel that its batch runs.
        if op.x.row_stride == 1 {
            ranked.x.col_stride = op.x.col_stride.max(INVARIANT_M as u64);
        }
    }
    ranked
}

/// Refusal of a batch-invariant plan by a family that
/// does not support every M.
fn not_any_m(reason: Unsupported) -> Unsupported {
    Unsupported::new(format!("{}, and a batch-invariant plan must serve any M", reason.why))
}

/// A plan with its rank: measured times rank before estimates.
pub(super) struct Offer {
    pub plan: LaunchPlan,
    pub seconds: f64,
    /// Estimate; `None` for a measured plan.
    pub cost: Option<Cost>,
    pub measured: bool,
}

impl Offer {
    pub(super) fn is_better_than(&self, other: &Offer) -> bool {
        match (self.measured, other.measured) {
            (true, false) => true,
            (false, true) => false,
            (true, true) => self.seconds < other.seconds,
            (false, false) => self.rank() < other.rank(),
        }
    }

    /// Expected seconds, plus a penalty for rounding weights or quantizing a
    /// plain X. Small operations are launch-bound whatever the arithmetic, and
    /// each rounding would show in their few values.
    fn rank(&self) -> f64 {
        let rounds = self.plan.config.rounded_weights.is_some() || self.plan.workspace.quantized.is_some();
        self.seconds * if rounds { 1.0 + EXACTNESS } else { 1.0 }
    }
}

/// A step that runs before the product.
#[derive(Clone, Copy, Debug)]
pub(crate) enum First {
    Dequantize(CheckedDequantize),
    Quantize(CheckedQuantize),
}

impl First {
    /// Bytes that the step moves for `rows` tokens.
    pub fn traffic(&self, rows: usize) -> f64 {
        match *self {
            First::Dequantize(step) => CheckedDequantize { rows, ..step }.traffic(),
            First::Quantize(step) => CheckedQuantize { rows, ..step }.traffic(),
        }
    }

    /// The workspace layout with room for the step's output.
    fn room(&self, layout: WorkspaceLayout) -> Option<WorkspaceLayout> {
        match self {
            First::Dequantize(step) => layout.with_dequantized(step),
            First::Quantize(step) => layout.with_quantized(step),
        }
    }
}

/// One search of a plan: the operation as families see it.
pub(super) struct Search<'a> {
    pub op: Cow<'a, CheckedGemm>,
    /// The step that dequantizes or quantizes X
    /// before the families see it.
    pub first: Option<First>,
    pub ranked: CheckedGemm,
    pub info: &'a DeviceInfo,
    pub prefs: &'a Preferences,
    pub tuned: &'a TunedTable,
}

impl<'a> Search<'a> {
    /// All problems to search: X unchanged, a quantized X dequantized,
    /// or X quantized where allowed.
    pub(super) fn all(
        op: &'a CheckedGemm,
        info: &'a DeviceInfo,
        prefs: &'a Preferences,
        tuned: &'a TunedTable,
    ) -> impl Iterator<Item = Self> {
        let plain = op.dequantized().map(|(op, first)| (Cow::Owned(op), Some(First::Dequantize(first))));
        let quantized = op.quantized().map(|(op, first)| (Cow::Owned(op), Some(First::Quantize(first))));
        let variants = std::iter::once((Cow::Borrowed(op), None)).chain(plain).chain(quantized);
        variants.map(move |(op, first)| Self { ranked: ranked(&op), op, first, info, prefs, tuned })
    }

    /// Seconds of the first step for `rows` tokens.
    fn seconds_before(&self, rows: usize) -> f64 {
        let of = |first: &First| self.info.launch_seconds + first.traffic(rows) / self.info.bandwidth;
        self.first.as_ref().map_or(0.0, of)
    }

    /// Launch plan of a partition with its expected seconds, and room
    /// for the first step's output.
    fn plan(&self, partition: &Partition, seconds: f64) -> Option<LaunchPlan> {
        let plan = partition.plan(seconds);
        let workspace = match &self.first {
            None => plan.workspace,
            Some(first) => first.room(plan.workspace)?,
        };
        let fits = self.prefs.max_workspace.is_none_or(|limit| workspace.bytes <= limit);
        fits.then_some(LaunchPlan { workspace, ..plan })
    }

    /// The families to ask.
    pub(super) fn wanted<'f>(
        &self,
        families: &[&'f dyn Family<CheckedGemm>],
    ) -> Result<Vec<&'f dyn Family<CheckedGemm>>, SchedError> {
        wanted_families(families, self.prefs.family.as_deref(), self.info)
    }

    /// The best plan of a family.
    pub(super) fn best_of(&self, family: &dyn Family<CheckedGemm>) -> Result<Offer, Unsupported> {
        let configs = self.configs_of(family)?;
        if let Some(offer) = self.tuned_offer(family, &configs) {
            return Ok(offer);
        }
        let offers = configs.iter().flat_map(|config| self.offers(config));
        offers
            .reduce(|best, offer| if offer.is_better_than(&best) { offer } else { best })
            .ok_or_else(|| Unsupported::new("has no configuration for this device and shape"))
    }

    /// Configs that a family offers for the operation.
    pub(super) fn configs_of(&self, family: &dyn Family<CheckedGemm>) -> Result<Vec<TileConfig>, Unsupported> {
        if self.op.batch_invariant {
            for m in INVARIANT_PROBES.into_iter().filter(|&m| m != INVARIANT_M) {
                let probe = CheckedGemm { m, ..self.op.as_ref().clone() };
                family.configs(&probe, self.info).map_err(not_any_m)?;
            }
            family.configs(&self.op, self.info)?;
        }
        let configs = family.configs(&self.ranked, self.info);
        let mut configs = if self.op.batch_invariant { configs.map_err(not_any_m) } else { configs }?;
        configs.retain(|config| self.prefs.math.is_none_or(|math| config.math == math));
        let mut avoided = None;
        configs.retain(|config| {
            let why = self.tuned.why_avoided(self.info, &config.kernel_id(self.op.format));
            avoided = avoided.or(why);
            why.is_none()
        });
        match avoided {
            Some(why) if configs.is_empty() => Err(Unsupported::new(format!("what it has is to be avoided: {why}"))),
            _ => Ok(configs),
        }
    }

    /// The measured config, if the family still has it and
    /// its sources are unchanged.
    pub(super) fn tuned_offer(&self, family: &dyn Family<CheckedGemm>, configs: &[TileConfig]) -> Option<Offer> {
        let tuned = self.tuned.find(self.info, &self.ranked, family.name())?;
        let config = configs.iter().find(|config| config.kernel_id(self.op.format) == tuned.kernel)?;
        if family.source_hash(&self.op, config) != tuned.source_hash {
            return None;
        }
        let partition = self.partition(config, tuned.cut)?;
        let seconds = tuned.seconds + self.seconds_before(self.op.m);
        Some(Offer { plan: self.plan(&partition, seconds)?, seconds, cost: None, measured: true })
    }

    /// Plans with this config, one for each K split.
    pub(super) fn offers(&self, config: &TileConfig) -> impl Iterator<Item = Offer> {
        let parts = (1..=config.max_splits.max(1)).map(Cut::Parts);
        let ranges = [0, 1].map(|full_waves| Cut::Ranges { full_waves });
        parts.chain(ranges).filter_map(move |cut| {
            let partition = self.partition(config, cut)?;
            let mut own = cost(&self.op, self.info, config, &partition)?;
            let before = self.seconds_before(self.op.m);
            own.prologue += before;
            own.seconds += before;
            let seconds = match self.op.batch_invariant {
                false => own.seconds,
                true => {
                    let ranked = Partition::new(&self.ranked, config, cut, self.slots(config))?;
                    estimate(&self.ranked, self.info, config, &ranked)? + self.seconds_before(self.ranked.m)
                }
            };
            Some(Offer { plan: self.plan(&partition, own.seconds)?, seconds, cost: Some(own), measured: false })
        })
    }

    /// Partition of the operation, if the preferences allow it.
    fn partition(&self, config: &TileConfig, cut: Cut) -> Option<Partition> {
        if cut != Cut::NONE && self.op.batch_invariant {
            return None;
        }
        // Converted X grows with M. Under a workspace limit, large
        // batches would get another config.
        if config.x_prologue.is_some() && self.op.batch_invariant && self.prefs.max_workspace.is_some() {
            return None;
        }
        let partition = Partition::new(&self.op, config, cut, self.slots(config))?;
        let bytes = partition.workspace_layout().bytes;
        self.prefs.max_workspace.is_none_or(|limit| bytes <= limit).then_some(partition)
    }

    /// CTAs (or clusters) of `config` that the device runs concurrently.
    fn slots(&self, config: &TileConfig) -> u32 {
        (self.info.units / config.cluster.max(1)).max(1).saturating_mul(config.ctas_per_unit.max(1))
    }
}
