//! Measurements of operations with a text key: experts and matmul.

use qgemm_hal::{CheckedExperts, CheckedMatmul, DeviceInfo, ExpertForm, ExpertsPlan, KernelId, MatmulPlan, Operation};
use serde::{Deserialize, Serialize};

/// Upper end of the M range that `m` belongs to.
pub(crate) fn last_of_range(m: usize) -> usize {
    match m {
        0..=8 => m.next_power_of_two(),
        9..=64 => m.next_multiple_of(8),
        65..=256 => m.next_multiple_of(32),
        _ => m.checked_next_power_of_two().unwrap_or(m),
    }
}

/// An operation with measured configs in a
/// [`TunedTable`](crate::TunedTable).
pub trait Measured: Operation {
    /// Text key of the problem, with token counts rounded up to
    /// the end of their range. `None` when measurements must not decide.
    fn problem(&self) -> Option<String>;
    /// Whether its token counts are the upper ends of their ranges.
    fn stands_for_its_range(&self) -> bool;
    /// Parts that the work of a tile is split into.
    fn parts(plan: &Self::Plan) -> u32;
}

impl Measured for CheckedExperts {
    fn problem(&self) -> Option<String> {
        let each = &self.each;
        if each.batch_invariant {
            return None;
        }
        let form = match self.form {
            ExpertForm::Indexed { top_k, x_per_slot } => {
                let x = if x_per_slot { "slot" } else { "token" };
                let lists = if self.lists { ", lists" } else { "" };
                format!("{top_k} of a token, X of a {x}{lists}")
            }
            ExpertForm::Masked { capacity } => format!("{capacity} rows of each"),
            ExpertForm::Contiguous => "sorted".to_owned(),
            // The key does not cover other forms.
            _ => return None,
        };
        let ready = if self.index_ready { ", settled" } else { "" };
        let sums = if self.combine.is_some() { ", summed" } else { "" };
        let (tokens, experts) = (last_of_range(self.tokens()), self.experts);
        let among = if self.routed_to == experts { String::new() } else { format!(" of {}", self.routed_to) };
        let (n, k, w, x) = (each.stored_rows, each.k, each.format, each.x.format);
        Some(format!("{tokens} tokens, {experts}{among} experts of {n} x {k} in {w}, X in {x}, {form}{ready}{sums}"))
    }

    fn stands_for_its_range(&self) -> bool {
        last_of_range(self.tokens()) == self.tokens()
    }

    fn parts(_: &ExpertsPlan) -> u32 {
        1
    }
}

impl Measured for CheckedMatmul {
    fn problem(&self) -> Option<String> {
        let Self { batch, m, n, k, a, b, d, .. } = self;
        let groups = match (self.k_grouped, self.rows_grouped) {
            (true, _) => ", of parts of K",
            (_, true) => ", of groups of rows",
            _ => "",
        };
        Some(format!("{batch} x {m} x {n} x {k}, {}, {} by {} to {}{groups}", self.layout(), a.dtype, b.dtype, d.dtype))
    }

    fn stands_for_its_range(&self) -> bool {
        true
    }

    fn parts(plan: &MatmulPlan) -> u32 {
        plan.splits
    }
}

/// The problem that a measurement represents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ProblemKey {
    device: String,
    driver: String,
    operation: String,
    problem: String,
}

impl ProblemKey {
    pub fn of<O: Measured>(info: &DeviceInfo, op: &O) -> Option<Self> {
        let (device, driver, operation) = (info.name.clone(), info.driver.clone(), O::NAME.to_owned());
        Some(Self { device, driver, operation, problem: op.problem()? })
    }
}

/// A measured config.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredKernel {
    /// The kernel.
    #[serde(with = "as_text")]
    pub kernel: KernelId,
    /// Hash of the kernel's sources.
    pub source_hash: u64,
    /// Parts that the work of a tile is split into.
    pub parts: u32,
    /// Measured seconds.
    pub seconds: f64,
}

/// One entry of the file.
#[derive(Serialize, Deserialize)]
pub(crate) struct MeasuredRecord {
    #[serde(flatten)]
    pub key: ProblemKey,
    #[serde(flatten)]
    pub found: MeasuredKernel,
}

/// Kernel identities as JSON strings.
pub(crate) mod as_text {
    use qgemm_hal::KernelId;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(id: &KernelId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<KernelId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
