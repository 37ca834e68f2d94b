//! Operations: definition, operands, minimum traffic and multiply-adds. One
//! file or folder for each operation.
//!
//! An operation is a checked description such as
//! [`CheckedGemm`](crate::CheckedGemm): the API has validated it, and
//! backends trust it. Its [`Operand`] type names what kernels read and write.
//! [`KernelId`] has its kernel identity keys.

pub mod attention;
pub mod convert;
mod dense;
pub mod dequantize;
pub mod expert_lists;
pub mod experts;
pub mod gather_rows;
pub mod gemm;
pub mod indexer;
pub mod kv_append;
pub mod linear_attention;
pub mod listed_slots;
pub mod matmul;
pub mod merge_attention;
pub mod norm;
mod operand;
pub mod optimizer;
pub mod quantize;
pub mod routing;
pub mod sampling;
pub mod short_conv;
pub mod unpack;

use std::fmt;

pub use dense::Dense;
pub(crate) use operand::operands;
pub use operand::{Access, Operand, OperandDesc};

use qgemm_formats::DType;

use crate::caps::{DeviceInfo, Math};
use crate::error::Unsupported;
use crate::kernel_id::KernelId;
use crate::operations::Listed;

/// An operation's checked description.
pub trait Operation: Listed + Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// Name in kernel identities, tables and options: `gemm`.
    const NAME: &'static str = Self::INFO.name;

    /// One line in the field's words.
    const SUMMARY: &'static str = Self::INFO.summary;

    /// The operands.
    type Operand: Operand;

    /// A candidate kernel, with what the scheduler ranks it by.
    type Config: Clone + fmt::Debug + Send + Sync;

    /// A config with launch geometry and workspace, as the scheduler decides.
    type Plan: Clone + fmt::Debug + Send + Sync;

    /// The workspace among the operands, if plans may have one.
    const WORKSPACE: Option<Self::Operand> = None;

    /// Operands of a run without the workspace. Optional operands
    /// are included only when used.
    fn operands(&self) -> Vec<Self::Operand>;

    /// Minimum bytes moved.
    fn traffic(&self) -> f64;

    /// Multiply-adds.
    fn macs(&self) -> f64;

    /// Sizes, formats and element types, for messages and records.
    fn describe(&self) -> String;

    /// Whether there is nothing to compute. Families are not asked
    /// then, and nothing is launched.
    fn is_nothing(&self) -> bool;

    /// The config of a plan.
    fn config(plan: &Self::Plan) -> &Self::Config;

    /// Estimated seconds of a plan.
    fn estimate(plan: &Self::Plan) -> f64;

    /// Identity of a plan's kernel, the first of several.
    fn kernel_id(&self, plan: &Self::Plan) -> KernelId;

    /// Arithmetic of a plan's kernel; `None` if it multiplies nothing.
    fn math(_: &Self::Plan) -> Option<Math> {
        None
    }

    /// Type that operands may have in a matrix instruction; `None`
    /// if the problem does not permit a 16-bit type.
    fn matrix_type(&self) -> Option<DType> {
        None
    }

    /// Matrix instructions that a plan leaves unused: FMA bounds
    /// it, although the device multiplies the problem's types by them.
    fn unused_math(&self, plan: &Self::Plan, info: &DeviceInfo) -> Option<Math> {
        let math = info.matrix_math(self.matrix_type()?)?;
        let (fma, matrix) = (info.rate(Math::FmaF32)?, info.rate(math)?);
        let is_bound_by_fma = self.macs() / fma > self.traffic() / info.bandwidth;
        (Self::math(plan) == Some(Math::FmaF32) && is_bound_by_fma && matrix > fma).then_some(math)
    }

    /// Workspace bytes of a plan; 0 when none is needed.
    fn workspace_bytes(&self, _: &Self::Plan) -> usize {
        0
    }

    /// Name of a plan's launches in tables and messages.
    fn plan_name(&self, family: &str) -> String {
        family.to_owned()
    }

    /// Config of the no-op device's family.
    ///
    /// # Errors
    /// Why the no-op device does not support the operation.
    fn noop_config(&self) -> Result<Self::Config, Unsupported>;
}

/// An operation whose time is that of its bytes and launches.
pub trait MemoryBound: Operation {
    /// Reached share of the device's bandwidth, per mille.
    fn efficiency(config: &Self::Config) -> u32;

    /// Kernel launches of a run.
    fn launches(config: &Self::Config) -> u32;

    /// Seconds of the longest chain of dependent steps, which may
    /// exceed the time of the bytes.
    fn chain_seconds(_: &Self::Config) -> f64 {
        0.0
    }

    /// A config with its estimated seconds.
    fn plan(config: Self::Config, estimate: f64) -> Self::Plan;
}

/// Implements [`MemoryBound`] for an operation whose config has an
/// `efficiency`, and whose plan is a config with an `estimate`.
macro_rules! memory_bound {
    ($op:ty, $config:ident, $plan:ident, |$of:pat_param| $launches:expr $(, chain $chain:expr)?) => {
        impl $crate::op::MemoryBound for $op {
            fn efficiency(config: &$config) -> u32 {
                config.efficiency
            }

            fn launches($of: &$config) -> u32 {
                $launches
            }

            $(fn chain_seconds($of: &$config) -> f64 {
                $chain
            })?

            fn plan(config: $config, estimate: f64) -> $plan {
                $plan { config, estimate }
            }
        }
    };
}
pub(crate) use memory_bound;
