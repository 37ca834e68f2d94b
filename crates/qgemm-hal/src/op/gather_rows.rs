//! `gather_rows`: rows of a packed weight by index, dequantized: an
//! embedding look-up.

use std::hash::{Hash, Hasher};

use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, Format};

use super::dense::Dense;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Name, Spec, spec};

/// Words of the status: code, row of D, 0, id.
pub const STATUS_WORDS: usize = 4;
/// [`GatherRowsOperand::Status`]: every id is a row of W.
pub const STATUS_FINE: u32 = 0;
/// [`GatherRowsOperand::Status`]: an id is not a row of W.
pub const STATUS_BAD_ID: u32 = 1;

/// Row gather: `D[i, :] = scale · W[ids[i], :]` with row scales
/// applied, rounded once to nearest even; validated by the API.
///
/// An id outside W gives a row of zeros. The status names
/// the first such row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckedGatherRows {
    /// Ids, and rows of D; at least 1.
    pub rows: usize,
    /// Rows of W; at least 1.
    pub table_rows: usize,
    /// Columns of D; at least 1.
    pub k: usize,
    /// Length of a stored row of W. It differs from `k`
    /// only with act-order padding.
    pub stored_k: usize,
    /// Format of W.
    pub format: Format,
    /// Layout of W.
    pub class: FragmentLayout,
    /// Whether W has row scales.
    pub row_scale: bool,
    /// Whether W's columns are permuted (act-order).
    pub k_order: bool,
    /// D, `[rows, k]`, row-major.
    pub d: Dense,
    /// Factor of every element; finite.
    pub scale: f32,
}

/// Plan cache key: the scale is finite and is
/// compared by its bits.
impl Eq for CheckedGatherRows {}

impl Hash for CheckedGatherRows {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let &Self { rows, table_rows, k, stored_k, format, class, row_scale, k_order, d, scale } = self;
        (rows, table_rows, k, stored_k, format, class, row_scale, k_order, d, scale.to_bits()).hash(state);
    }
}

operands! {
    /// Operands of `gather_rows`.
    pub enum GatherRowsOperand {
        /// Packed weight.
        W: "the weight" Constant,
        /// Row scales of W, f32.
        RowScale: "the row scales" Constant,
        /// Stored column of W → column of D, u32, padded with
        /// `NO_COLUMN` to whole k-tiles.
        KOrder: "the column order" Constant,
        /// Row of W for each row of D, u32.
        Ids: "the ids" Read,
        /// The gathered rows.
        D: "d" Write,
        /// First id outside W: see [`STATUS_WORDS`].
        Status: "the status" Write,
    }
}

spec! {
    /// Kernel identity keys of `gather_rows`.
    pub struct GatherRowsSpec {
        /// The main loop.
        main_loop: Name,
        /// Format of W.
        w: Format,
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherRowsConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherRowsPlan {
    /// The config.
    pub config: GatherRowsConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedGatherRows {
    /// Name in tables and messages: `gather_rows_q4_k_f16`.
    pub fn kernel_name(&self) -> String {
        format!("gather_rows_{}_{}", self.format.name, self.d.dtype)
    }
}

impl Operation for CheckedGatherRows {
    type Operand = GatherRowsOperand;
    type Config = GatherRowsConfig;
    type Plan = GatherRowsPlan;

    fn operands(&self) -> Vec<GatherRowsOperand> {
        use GatherRowsOperand as O;
        let optional = [(self.row_scale, O::RowScale), (self.k_order, O::KOrder)];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        [O::W, O::Ids, O::D, O::Status].into_iter().chain(given).collect()
    }

    /// One row of W and of D for each id.
    fn traffic(&self) -> f64 {
        let factor = if self.row_scale { DType::F32.bytes() } else { 0 };
        let row = self.format.row_bytes(self.stored_k) + self.k * self.d.dtype.bytes() + size_of::<u32>() + factor;
        self.rows as f64 * row as f64 + (STATUS_WORDS * size_of::<u32>()) as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { rows, table_rows, k, format, d, .. } = self;
        format!("{rows} of {table_rows} rows x {k} from {} to {}", format.name, d.dtype)
    }

    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.k == 0
    }

    fn config(plan: &GatherRowsPlan) -> &GatherRowsConfig {
        &plan.config
    }

    fn estimate(plan: &GatherRowsPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &GatherRowsPlan) -> KernelId {
        plan.config.kernel
    }

    fn plan_name(&self, _: &str) -> String {
        self.kernel_name()
    }

    fn noop_config(&self) -> Result<GatherRowsConfig, Unsupported> {
        let spec = GatherRowsSpec { main_loop: Name::new("noop"), w: self.format };
        let kernel = KernelId::new("noop", None, Spec::GatherRows(spec));
        Ok(GatherRowsConfig { kernel, launches: 1, efficiency: 1000 })
    }
}

memory_bound!(CheckedGatherRows, GatherRowsConfig, GatherRowsPlan, |config| config.launches);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gathered_rows_are_traffic() {
        let op = CheckedGatherRows {
            rows: 3,
            table_rows: 1000,
            k: 256,
            stored_k: 256,
            format: "q8_0".parse().expect("exists"),
            class: FragmentLayout::Simd16,
            row_scale: false,
            k_order: false,
            d: Dense::rows_of(DType::F16, 256),
            scale: 1.0,
        };
        assert_eq!((op.traffic(), op.operands().len()), ((3 * (272 + 512 + 4) + 16) as f64, 4));
        assert_eq!(op.describe(), "3 of 1000 rows x 256 from q8_0 to f16");
        let permuted = CheckedGatherRows { k_order: true, row_scale: true, ..op };
        assert_eq!(permuted.operands().len(), 6);
        assert!(CheckedGatherRows { rows: 0, ..op }.is_nothing());
    }
}
