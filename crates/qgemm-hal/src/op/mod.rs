//! Operations: definition, operands, minimum traffic and multiply-adds. One
//! file or folder for each operation.
//!
//! An operation is a checked description ([`CheckedGemm`],
//! [`CheckedConvert`], [`CheckedRouting`], [`CheckedAttention`],
//! [`CheckedNorm`]): the API has validated it, and backends trust it. Its
//! [`Operand`] type names what kernels read and write.
//! [`KernelId`](crate::KernelId) has its kernel identity keys.

pub mod attention;
pub mod convert;
mod dense;
pub mod dequantize;
pub mod expert_lists;
pub mod experts;
pub mod gemm;
pub mod indexer;
pub mod kv_append;
pub mod listed_slots;
pub mod matmul;
pub mod norm;
mod operand;
pub mod optimizer;
pub mod quantize;
pub mod routing;
pub mod unpack;

use std::fmt;

pub use attention::CheckedAttention;
pub use convert::CheckedConvert;
pub use dense::Dense;
pub use dequantize::CheckedDequantize;
pub use experts::CheckedExperts;
pub use gemm::CheckedGemm;
pub use indexer::CheckedIndexer;
pub use kv_append::CheckedKvAppend;
pub use matmul::CheckedMatmul;
pub use norm::CheckedNorm;
pub(crate) use operand::operands;
pub use operand::{Access, Operand, OperandDesc};
pub use optimizer::CheckedOptimizer;
pub use quantize::CheckedQuantize;
pub use routing::CheckedRouting;
pub use unpack::CheckedUnpack;

/// An operation's checked description.
pub trait Operation: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// Name in kernel identities, tables and options: `gemm`.
    const NAME: &'static str;

    /// The operands.
    type Operand: Operand;

    /// A candidate kernel, with what the scheduler ranks it by.
    type Config: Clone + fmt::Debug + Send + Sync;

    /// A config with launch geometry and workspace, as the scheduler decides.
    type Plan: Clone + fmt::Debug + Send + Sync;

    /// Operands of a run without the workspace. Optional operands
    /// are included only when used.
    fn operands(&self) -> Vec<Self::Operand>;

    /// Minimum bytes moved.
    fn traffic(&self) -> f64;

    /// Multiply-adds.
    fn macs(&self) -> f64;
}
