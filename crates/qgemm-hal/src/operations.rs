//! The list of operations: name, description with its operand, config and
//! plan types, kernel identities, one-line summary.
//!
//! Everything that enumerates operations expands over this list:
//! [`Catalog`](crate::Catalog), [`Spec`](crate::Spec), [`OPERATIONS`], the
//! no-op device, and the catalogs and plan caches of other crates.

/// Expands `callback!` over the list of operations. An entry is
/// `name: Description(Operand, Config, Plan) ["kernels" Spec(SpecType)] "summary",`;
/// `name` is also the module below `op`.
///
/// ```
/// macro_rules! names {
///     ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
///         [$(stringify!($name)),*]
///     };
/// }
/// let names = qgemm_hal::with_operations!(names);
/// assert_eq!(names.len(), qgemm_hal::OPERATIONS.len());
/// ```
#[macro_export]
macro_rules! with_operations {
    ($callback:ident) => {
        $callback! {
            gemm: CheckedGemm(GemmOperand, TileConfig, LaunchPlan)
                ["gemm" Gemm(GemmSpec)]
                "GEMM with a quantized weight",
            convert: CheckedConvert(ConvertOperand, ConvertConfig, ConvertPlan)
                ["convert" Convert(ConvertSpec)]
                "Type and layout conversion",
            experts: CheckedExperts(ExpertOperand, ExpertsConfig, ExpertsPlan)
                ["experts" Experts(ExpertsSpec), "experts_step" ExpertStep(ExpertStepSpec)]
                "Mixture-of-experts GEMM",
            routing: CheckedRouting(RoutingOperand, RoutingConfig, RoutingLaunches)
                ["routing" Routing(RoutingSpec)]
                "Router top-k and expert lists",
            matmul: CheckedMatmul(MatmulOperand, MatmulConfig, MatmulPlan)
                ["matmul" Matmul(MatmulSpec)]
                "Matrix product of two matrices in device memory",
            quantize: CheckedQuantize(QuantizeOperand, QuantizeConfig, QuantizePlan)
                ["quantize" Quantize(QuantizeSpec)]
                "Quantization of activations (INT8, FP8, FP4)",
            dequantize: CheckedDequantize(DequantizeOperand, DequantizeConfig, DequantizePlan)
                ["dequantize" Dequantize(DequantizeSpec)]
                "Dequantization of quantized activations",
            attention: CheckedAttention(AttentionOperand, AttentionConfig, AttentionPlan)
                ["attention" Attention(AttentionSpec)]
                "Attention",
            merge_attention: CheckedMergeAttention(MergeAttentionOperand, MergeAttentionConfig, MergeAttentionPlan)
                ["merge_attention" MergeAttention(MergeAttentionSpec)]
                "Merge of partial attention results by log-sum-exp",
            linear_attention: CheckedLinearAttention(LinearAttentionOperand, LinearAttentionConfig, LinearAttentionPlan)
                ["linear_attention" LinearAttention(LinearAttentionSpec)]
                "Linear attention with a recurrent state: gated delta rule, KDA, Mamba-2",
            short_conv: CheckedShortConv(ShortConvOperand, ShortConvConfig, ShortConvLaunch)
                ["short_conv" ShortConv(ShortConvSpec)]
                "Short causal depthwise convolution with state",
            norm: CheckedNorm(NormOperand, NormConfig, NormLaunch)
                ["norm" Norm(NormSpec), "norm_quantize" NormQuantize(NormQuantizeSpec), "norm_gated" NormGated(NormGatedSpec)]
                "RMSNorm and LayerNorm",
            kv_append: CheckedKvAppend(KvAppendOperand, KvAppendConfig, KvAppendLaunch)
                ["kv_append" KvAppend(KvAppendSpec)]
                "Rotary embedding and KV-cache append",
            indexer: CheckedIndexer(IndexerOperand, IndexerConfig, IndexerLaunch)
                ["indexer" Indexer(IndexerSpec)]
                "Sparse-attention indexer: scores and top-k",
            unpack: CheckedUnpack(UnpackOperand, UnpackConfig, UnpackPlan)
                ["unpack" Unpack(UnpackSpec)]
                "Transposed rows of a packed weight, dequantized",
            gather_rows: CheckedGatherRows(GatherRowsOperand, GatherRowsConfig, GatherRowsPlan)
                ["gather_rows" GatherRows(GatherRowsSpec)]
                "Rows of a packed weight by index: embedding look-up",
            sampling: CheckedSampling(SamplingOperand, SamplingConfig, SamplingPlan)
                ["sampling" Sampling(SamplingSpec)]
                "Sampling of tokens from logits",
            optimizer: CheckedOptimizer(OptimizerOperand, OptimizerConfig, OptimizerLaunch)
                ["optimizer" Optimizer(OptimizerSpec)]
                "Optimizer step (SGD, AdamW)",
        }
    };
}

/// Name and summary of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationInfo {
    /// Name in kernel identities, tables and options: `gemm`.
    pub name: &'static str,
    /// One line: `GEMM with a quantized weight`.
    pub summary: &'static str,
}

/// An entry of the list of operations.
pub trait Listed {
    /// Name and summary.
    const INFO: OperationInfo;
}

macro_rules! list {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// All operations in the order of the list.
        pub const OPERATIONS: &[OperationInfo] =
            &[$(OperationInfo { name: stringify!($name), summary: $summary },)*];

        $(impl Listed for $crate::op::$name::$op {
            const INFO: OperationInfo = OperationInfo { name: stringify!($name), summary: $summary };
        })*
    };
}
with_operations!(list);
