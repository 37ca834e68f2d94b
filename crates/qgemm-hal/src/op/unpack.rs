//! `unpack`: transposed rows of a packed weight, dequantized, for products
//! that reduce over output features.

use qgemm_formats::PAIR_ROWS;
use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{DType, Format};

use super::dense::Dense;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Name, Spec, spec};

/// Transposed rows of W: `D[i, n] = W[n, first + i]`
/// with row scales applied, rounded once to nearest even; validated by
/// the API. D holds rows of Wᵀ. For a gated pair,
/// each row has the gate's values, then the up's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedUnpack {
    /// Rows of W (columns of D), or the rows of each
    /// weight of a gated pair; at least 1.
    pub out_features: usize,
    /// Whether W is a gated pair.
    pub gated: bool,
    /// Input features of W; at least 1.
    pub k: usize,
    /// Length of a stored row of W. It differs from `k`
    /// only with act-order padding.
    pub stored_k: usize,
    /// Input feature of D's first row.
    pub first: usize,
    /// Rows of D; at least 1. All of them are
    /// input features of W.
    pub features: usize,
    /// Format of W.
    pub format: Format,
    /// Layout of W.
    pub class: FragmentLayout,
    /// Whether W has row scales.
    pub row_scale: bool,
    /// Whether W's columns are permuted (act-order).
    pub k_order: bool,
    /// D, `[features, columns]`, row-major.
    pub d: Dense,
}

operands! {
    /// Operands of `unpack`.
    pub enum UnpackOperand {
        /// Packed weight.
        W: "the weight" Constant,
        /// Row scales of W, f32.
        RowScale: "the row scales" Constant,
        /// Stored column of W → input feature, u32, padded with
        /// `NO_COLUMN` to whole k-tiles.
        KOrder: "the column order" Constant,
        /// The values.
        D: "d" Write,
    }
}

spec! {
    /// Kernel identity keys of `unpack`.
    pub struct UnpackSpec {
        /// The main loop.
        main_loop: Name,
        /// Format of W.
        w: Format,
        /// Rows of W that a CTA decodes.
        n: u32,
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnpackConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnpackPlan {
    /// The config.
    pub config: UnpackConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedUnpack {
    /// Name in tables and messages: `unpack_q4_k_f16`.
    pub fn kernel_name(&self, family: &str) -> String {
        format!("{family}_{}_{}", self.format.name, self.d.dtype)
    }

    /// Rows of W as stored.
    pub fn stored_rows(&self) -> usize {
        if self.gated { self.out_features.div_ceil(PAIR_ROWS) * 2 * PAIR_ROWS } else { self.out_features }
    }

    /// Columns of D.
    pub fn columns(&self) -> usize {
        if self.gated { 2 * self.out_features } else { self.out_features }
    }

    /// Stored columns of W that may hold the features of D:
    /// their range, or all columns with act-order.
    pub fn stored_columns(&self) -> std::ops::Range<usize> {
        if self.k_order { 0..self.stored_k } else { self.first..self.first + self.features }
    }
}

impl Operation for CheckedUnpack {
    type Operand = UnpackOperand;
    type Config = UnpackConfig;
    type Plan = UnpackPlan;

    fn operands(&self) -> Vec<UnpackOperand> {
        use UnpackOperand as O;
        let optional = [(self.row_scale, O::RowScale), (self.k_order, O::KOrder)];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        [O::W, O::D].into_iter().chain(given).collect()
    }

    /// The columns of W, and D, once each.
    fn traffic(&self) -> f64 {
        let values = |columns: usize| self.columns() as f64 * columns as f64;
        let row_bytes = self.format.row_bytes(self.stored_k) as f64 / self.stored_k as f64;
        let factors = if self.row_scale { self.columns() as f64 * DType::F32.bytes() as f64 } else { 0.0 };
        values(self.stored_columns().len()) * row_bytes + values(self.features) * self.d.dtype.bytes() as f64 + factors
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { out_features, features, format, d, .. } = self;
        format!("{out_features} x {features} {} to {}", format.name, d.dtype)
    }

    fn is_nothing(&self) -> bool {
        self.out_features == 0 || self.features == 0
    }

    fn config(plan: &UnpackPlan) -> &UnpackConfig {
        &plan.config
    }

    fn estimate(plan: &UnpackPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &UnpackPlan) -> KernelId {
        plan.config.kernel
    }

    fn plan_name(&self, family: &str) -> String {
        self.kernel_name(family)
    }

    fn noop_config(&self) -> Result<UnpackConfig, Unsupported> {
        let spec = UnpackSpec { main_loop: Name::new("noop"), w: self.format, n: 64 };
        Ok(UnpackConfig { kernel: KernelId::new("noop", None, Spec::Unpack(spec)), efficiency: 1000 })
    }
}

memory_bound!(CheckedUnpack, UnpackConfig, UnpackPlan, |_| 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permuted_columns_are_all_read() {
        let op = CheckedUnpack {
            out_features: 10,
            gated: false,
            k: 256,
            stored_k: 256,
            first: 64,
            features: 32,
            format: "q8_0".parse().expect("exists"),
            class: FragmentLayout::Simd16,
            row_scale: false,
            k_order: false,
            d: Dense::rows_of(DType::F16, 10),
        };
        assert_eq!((op.stored_columns(), op.traffic()), (64..96, (10 * 34 + 32 * 10 * 2) as f64));
        let permuted = CheckedUnpack { k_order: true, row_scale: true, ..op };
        assert_eq!((permuted.stored_columns(), permuted.operands().len()), (0..256, 4));
        let pair = CheckedUnpack { gated: true, ..op };
        assert_eq!((pair.stored_rows(), pair.columns()), (32, 20));
    }
}
