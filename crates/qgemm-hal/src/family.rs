//! Kernel families: the kernels of a backend for an operation,
//! which the scheduler chooses from.

use std::fmt;

use crate::caps::DeviceInfo;
use crate::device::Device;
use crate::error::{HalError, Unsupported};
use crate::op::{
    CheckedAttention, CheckedConvert, CheckedDequantize, CheckedExperts, CheckedGemm, CheckedIndexer, CheckedKvAppend,
    CheckedMatmul, CheckedNorm, CheckedOptimizer, CheckedQuantize, CheckedRouting, CheckedUnpack, Operation,
};
use crate::sequence::LaunchSequence;

/// One kernel algorithm of one backend for one operation. Families are
/// `static`s listed in the device's [`Catalog`].
pub trait Family<O: Operation>: Send + Sync + fmt::Debug {
    /// Name: `gemv`, `gemm`.
    fn name(&self) -> &'static str;

    /// Candidate configs for the operation on a device; never empty.
    ///
    /// # Errors
    /// Why the family does not support the operation.
    fn configs(&self, op: &O, info: &DeviceInfo) -> Result<Vec<O::Config>, Unsupported>;

    /// Prepares the kernels of a plan: finds or compiles them,
    /// and loads them on the device.
    ///
    /// # Errors
    /// [`HalError::Compile`],
    /// [`HalError::KernelUnavailable`] or a driver error.
    fn prepare(&self, device: &dyn Device, op: &O, plan: &O::Plan) -> Result<LaunchSequence, HalError>;

    /// Hash of the sources of a config's kernels. Measurements
    /// with another hash are ignored.
    fn source_hash(&self, op: &O, config: &O::Config) -> u64;
}

/// Families of `gemm`.
pub type GemmFamilies = &'static [&'static dyn Family<CheckedGemm>];
/// Families of `convert`.
pub type ConvertFamilies = &'static [&'static dyn Family<CheckedConvert>];
/// Families of `unpack`.
pub type UnpackFamilies = &'static [&'static dyn Family<CheckedUnpack>];
/// Families of `experts`.
pub type ExpertsFamilies = &'static [&'static dyn Family<CheckedExperts>];
/// Families of `routing`.
pub type RoutingFamilies = &'static [&'static dyn Family<CheckedRouting>];
/// Families of `matmul`.
pub type MatmulFamilies = &'static [&'static dyn Family<CheckedMatmul>];

/// Families of `quantize`.
pub type QuantizeFamilies = &'static [&'static dyn Family<CheckedQuantize>];
/// Families of `dequantize`.
pub type DequantizeFamilies = &'static [&'static dyn Family<CheckedDequantize>];
/// Families of `attention`.
pub type AttentionFamilies = &'static [&'static dyn Family<CheckedAttention>];
/// Families of `norm`.
pub type NormFamilies = &'static [&'static dyn Family<CheckedNorm>];
/// Families of `kv_append`.
pub type KvAppendFamilies = &'static [&'static dyn Family<CheckedKvAppend>];
/// Families of `indexer`.
pub type IndexerFamilies = &'static [&'static dyn Family<CheckedIndexer>];

/// Families of `optimizer`.
pub type OptimizerFamilies = &'static [&'static dyn Family<CheckedOptimizer>];

/// Kernel families of a device for each operation,
/// in no particular order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Catalog {
    /// GEMM with a quantized weight.
    pub gemm: GemmFamilies,
    /// Type and layout conversion.
    pub convert: ConvertFamilies,
    /// MoE grouped GEMM.
    pub experts: ExpertsFamilies,
    /// Router top-k and expert lists.
    pub routing: RoutingFamilies,
    /// Matrix product of two matrices in device memory.
    pub matmul: MatmulFamilies,
    /// Quantization of activations (INT8, FP8, FP4).
    pub quantize: QuantizeFamilies,
    /// Dequantization of quantized activations.
    pub dequantize: DequantizeFamilies,
    /// Attention.
    pub attention: AttentionFamilies,
    /// RMSNorm and LayerNorm.
    pub norm: NormFamilies,
    /// Rotary embedding and KV-cache append.
    pub kv_append: KvAppendFamilies,
    /// Sparse-attention indexer: scores and top-k.
    pub indexer: IndexerFamilies,
    /// Transposed rows of a packed weight, dequantized.
    pub unpack: UnpackFamilies,
    /// Optimizer step (SGD, AdamW).
    pub optimizer: OptimizerFamilies,
}

impl Catalog {
    /// Every operation with the names of its families.
    pub fn operations(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        fn names<O: Operation>(families: &[&'static dyn Family<O>]) -> (&'static str, Vec<&'static str>) {
            (O::NAME, families.iter().map(|family| family.name()).collect())
        }
        vec![
            names(self.gemm),
            names(self.convert),
            names(self.experts),
            names(self.routing),
            names(self.matmul),
            names(self.quantize),
            names(self.dequantize),
            names(self.attention),
            names(self.norm),
            names(self.kv_append),
            names(self.indexer),
            names(self.unpack),
            names(self.optimizer),
        ]
    }
}
