//! Quantized matrix multiplication on NVIDIA GPUs from Volta on,
//! wgpu adapters and the CPU. The product is
//! `D = activation(alpha · X·Wᵀ + beta · C + bias) + residual`
//! with quantized weights `W`; gated pairs are served, too.
//! qgemm-api is the only crate that a user depends on.
//!
//! A layer from a model file to a result:
//!
//! ```
//! use qgemm_api::{Context, XPrecision, open_model};
//! # use qgemm_api::gguf::GgufHeader;
//! # let folder = tempfile::tempdir().expect("a writable folder");
//! # let path = folder.path().join("model.gguf");
//! # let values: Vec<f32> = (0..96 * 256).map(|i| (i % 7) as f32 - 3.0).collect();
//! # let (host, format) = qgemm_api::quantize(&values, 96, 256, "q4_k".parse()?)?;
//! # let mut header = GgufHeader::new();
//! # header.tensor("blk.0.ffn_up.weight", &[96, 256], format)?;
//! # let mut writer = header.write(std::fs::File::create(&path).expect("a writable folder"))?;
//! # writer.tensor(host.blocks())?;
//! # writer.finish()?;
//!
//! let ctx = Context::open("auto")?; // CUDA, else a GPU through wgpu, else the CPU
//! let model = open_model(&path)?; // GGUF or safetensors, mapped
//! let weight = ctx.load(&model.weight("blk.0.ffn_up")?)?; // packed for the device, once
//!
//! let tokens = 2;
//! let x = vec![0.5; tokens * weight.k()];
//! let y = ctx.linear(&weight, &x, tokens, XPrecision::Auto)?; // tokens × N
//! assert_eq!(y.len(), tokens * weight.n());
//! # let expected: f32 = host.dequantize_row(5).iter().map(|w| w * 0.5).sum();
//! # assert!((y[96 + 5] - expected).abs() <= 1e-3 * expected.abs().max(1.0));
//! # Ok::<(), qgemm_api::Error>(())
//! ```
//!
//! This example copies activations and results, and plans for
//! every call. An engine keeps them on the device and plans once
//! per shape. [`Plan::run`] then only launches:
//!
//! ```
//! use qgemm_api::half::f16;
//! use qgemm_api::{Args, Context, DType, Problem, quantize};
//!
//! let ctx = Context::open("cpu")?;
//! let (host, _) = quantize(&[0.25; 64 * 128], 64, 128, "q8_0".parse()?)?;
//! let weight = ctx.load(&host)?;
//!
//! let problem = Problem::new(&weight, 4).x_dtype(DType::F16).bias(DType::F32);
//! let plan = ctx.plan(&problem)?;
//! let mut workspace = ctx.workspace(plan.workspace_bytes())?; // one a stream, shared by its plans
//!
//! let x = ctx.upload(&[f16::ONE; 4 * 128])?;
//! let bias = ctx.upload(&[3.0f32; 64])?;
//! let mut d = ctx.allocate_elements(DType::F16, 4 * 64)?;
//! let stream = ctx.default_stream();
//! plan.run(&stream, Args::new(&x, &weight, &mut d).bias(&bias).workspace(&mut workspace))?;
//! let values: Vec<f16> = ctx.download(&d)?;
//! assert!(values.iter().all(|v| (v.to_f32() - 35.0).abs() < 0.1));
//! # Ok::<(), qgemm_api::Error>(())
//! ```
//!
//! # Operations
//!
//! | operation | description | plan |
//! |---|---|---|
//! | product with a quantized weight | [`Problem`] | [`Context::plan`], [`Context::layer`] |
//! | product with fused weights, an output each | [`FusedProblem`] | [`Context::plan_fused`] |
//! | grouped product with experts | [`ExpertProblem`] | [`Context::plan_experts`] |
//! | layer of experts | [`Moe`] | [`Context::moe_layer`] |
//! | router top-k and expert lists | [`Routing`] | [`Context::plan_routing`] |
//! | attention | [`Attention`] | [`Context::plan_attention`] |
//! | merge of partial attention results | [`MergeAttention`] | [`Context::plan_merge_attention`] |
//! | linear attention (gated delta rule, KDA, Mamba-2) | [`LinearAttention`] | [`Context::plan_linear_attention`] |
//! | rotary embedding and KV-cache append | [`KvAppend`] | [`Context::plan_kv_append`] |
//! | sparse-attention indexer | [`Indexer`] | [`Context::plan_indexer`] |
//! | short causal convolution with state | [`ShortConv`] | [`Context::plan_short_conv`] |
//! | RMSNorm and LayerNorm | [`Norm`] | [`Context::plan_norm`] |
//! | product of two matrices | [`Matmul`] | [`Context::plan_matmul`] |
//! | row gather: embedding look-up | [`GatherRows`] | [`Context::plan_gather_rows`] |
//! | sampling of tokens | [`Sampling`] | [`Context::plan_sampling`] |
//! | quantization of activations | [`Quantization`] | [`Context::plan_quantization`] |
//! | gradient through a weight | [`Gradient`] | [`Context::plan_gradient`] |
//! | optimizer step: AdamW, SGD | [`Optimizer`] | [`Context::plan_optimizer`] |
//! | type and layout conversion | [`Conversion`] | [`Context::plan_conversion`] |
//! | step of a whole model | [`PlanOptions`] | [`Context::plan_model`] |
//!
//! # Words
//! `M` is the number of tokens (rows of X and D). `N` is the
//! number of output features (rows of W, columns of D). `K` is
//! the number of input features. A *format* is the storage format
//! of weights ([`Format`]). *Act-order* weights have permuted
//! columns.
//!
//! # Errors
//! Every argument is validated once, and [`Error`] has the
//! expected and the given value. Bad input never panics, and a
//! failed call has written nothing.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `cpu` | yes | SIMD kernels of the CPU; without them the device `cpu` stays, on slow portable loops |
//! | `cuda` | yes | NVIDIA GPUs, and the module `cuda` |
//! | `wgpu` | yes | Vulkan, Metal and Direct3D 12, and the module `wgpu` |
//! | `embed-kernels` | no | compiled CUDA kernels in the program |
//! | `emu` | no | devices that emulate GPUs (`emu:sm75`), for tests |
//! | `experimental-cooperative-matrix` | no | f16 matrix instructions of wgpu adapters, which wgpu calls experimental and possibly unsound |
//!
//! No feature needs a driver or a toolkit to build or to start;
//! [`devices`] reports what is absent.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod activation;
mod architecture;
mod attention;
mod backends;
mod context;
mod convert;
mod described;
mod error;
mod exec_plan;
mod experts;
mod explain;
mod fused;
mod gather_rows;
mod gemm;
mod gradient;
mod indexer;
mod kv_append;
mod linear_attention;
mod matmul;
mod merge_attention;
mod model;
mod norm;
mod normed;
mod operand;
mod optimizer;
mod plain_x;
mod plan_cache;
mod planned;
mod plans_by_tokens;
mod prepare;
mod profile;
mod quantization;
mod quantize;
mod record;
mod routing;
mod sampling;
mod setters;
mod short_conv;
mod tune;
mod weight;
mod workspace;

pub use architecture::{
    ENCODERS, EncoderNames, EncoderNumbers, ExpertNumbers, GGUF_ENCODER, GgufConversion, GgufName,
    HUGGING_FACE_ENCODER, Hyperparameters, Key, Network, Settings,
};
pub use attention::{Attention, AttentionArgs, AttentionPlan, Keys, KvStrides, Queries};
pub use backends::{DeviceChoice, DeviceListing, devices};
pub use context::Context;
pub use convert::{Conversion, ConversionArgs, ConversionPlan};
pub use described::{DescribedExperts, DescribedWeight};
pub use error::Error;
pub use exec_plan::{ExecPlan, LoadedPlan, OpWeights, PlanArena, PlanOptions, PlanWeights, Ranks, StepGraph};
pub use experts::{
    ExpertArgs, ExpertPlan, ExpertProblem, Experts, Moe, MoeArgs, MoeLayer, MoePlan, MoeSource, MoeWorkspace,
    expert_lists,
};
pub use fused::{FusedArgs, FusedPlan, FusedProblem, FusedWeight};
pub use gather_rows::{GatherRows, GatherRowsArgs, GatherRowsPlan};
pub use gemm::{Args, Linear, Plan, Problem, XRef};
pub use gradient::{Gradient, GradientArgs, GradientPlan, GradientWeight};
pub use indexer::{Indexer, IndexerArgs, IndexerPlan};
pub use kv_append::{KvAppend, KvAppendArgs, KvAppendPlan, Rotary, RotaryScaling};
pub use linear_attention::{Decay, LinearAttention, LinearAttentionArgs, LinearAttentionPlan};
pub use matmul::{Matmul, MatmulArgs, MatmulPlan};
pub use merge_attention::{MergeAttention, MergeAttentionArgs, MergeAttentionPlan};
pub use model::{model_files, open_model, open_model_with, open_packed, read_model};
pub use norm::{Norm, NormArgs, NormPlan};
pub use optimizer::{Optimizer, OptimizerArgs, OptimizerPlan, OptimizerStep};
pub use planned::Planned;
pub use prepare::PrepareLimits;
pub use profile::{Profile, ProfiledRun, ProfiledStep};
pub use quantization::{Quantization, QuantizationArgs, QuantizationPlan, QuantizedX, QuantizedXParts};
pub use quantize::{model_shape, quantize};
pub use record::PlanRecord;
pub use routing::{Routing, RoutingArgs, RoutingLists, RoutingPlan};
pub use sampling::{EarlierArgs, SampledLogProbabilities, Sampling, SamplingArgs, SamplingFault, SamplingPlan};
pub use short_conv::{ShortConv, ShortConvArgs, ShortConvPlan};
pub use tune::{
    Budget, TuneOutcome, TuneProblem, Tuned, TunedCandidate, Tuning, read_tuned, tuned_table_path, update_tuned,
};
pub use weight::{Weight, WeightOrder};
pub use workspace::Workspace;

pub use qgemm_formats::model::{
    DenseTensor, GptqZeros, Model, ModelOptions, NumberTensor, NumberType, TensorInfo, TensorKind, gguf, printable,
    strict_json,
};
pub use qgemm_formats::packed_file::{PackedParts, PackedWeight};
pub use qgemm_formats::prepack::FragmentLayout;
pub use qgemm_formats::{
    ActivationFormat, DType, Element, ElementType, Format, FormatError, HostExperts, HostWeight, ImportanceMatrix,
    ModelShape, NO_COLUMN, Quantized, Recipe, RecipeOptions, ShardAxis, ShardFeatures, SharedBytes, TypeChooser, XCode,
    XFactor, XFormat, XParts, format_for_k, half, pair_bias, quantize_by_importance, quantize_matrix, shard_of,
};
pub use qgemm_hal::op::sampling::SamplingParameters;
pub use qgemm_hal::{
    Activation, Buffer, BufferMut, BufferRef, ClampedSwiglu, Collective, Combine, Communicator, Device, DeviceId,
    DeviceInfo, DeviceKind, Event, ExpertFault, ExpertGroups, FactorFormat, Feature, GateFunction, HalError,
    HostCommunicator, KvFormat, KvFormats, MaskBits, MatmulLayout, NormFunction, NormKind, Rendezvous, Scoring, Stream,
    ThreadGroup, UpdateKind, UpdateRule, XPrecision,
};
pub use qgemm_sched::SchedError;

/// Chosen kernels, configs, launches and measurements, for
/// tuning, benchmarks and tests.
pub mod tuning {
    pub use crate::gemm::Candidate;
    pub use crate::record::{
        CandidateRecord, DeviceRecord, Dispatch, DispatchSchedule, LaunchRecord, PermissionRecord, PrologueRecord,
        Reduction, ReductionOrder, ReductionType, RefusalRecord, Roof, Sizes, SplitAxis, Tile, WorkspaceRegion,
    };
    pub use qgemm_hal::{
        Catalog, CheckedAttention, CheckedConvert, CheckedExperts, CheckedGemm, CheckedMatmul, CheckedQuantize,
        CheckedRouting, ConvertConfig, ConvertPlan, ExpertForm, ExpertsPlan, Geometry, KernelId, LaunchPlan,
        LaunchSequence, LaunchStep, Math, MatmulConfig, MatmulPlan as MatmulLaunch, OPERATIONS, Operation,
        OperationInfo, QuantizeConfig, QuantizePlan, RoutingConfig, RoutingLaunches, Schedule, StreamK, TileConfig,
        Variant, WorkspaceLayout, XPrologue,
    };
    pub use qgemm_sched::{AvoidedKernel, Bound, Cost, TunedError, TunedTable};
}

/// Contents of a plan file ([`ExecPlan`]).
pub mod exec {
    pub use crate::exec_plan::{
        Barrier, BarrierKind, ExecPlan, MemoryPlan, ModelRecord, Phase, PhaseRange, PlannedCache, PlannedConv,
        PlannedGate, PlannedHeads, PlannedLinear, PlannedNorm, PlannedOp, PlannedOptimizer, PlannedPages,
        PlannedRotary, PlannedRotation, PlannedRows, PlannedScaling, PlannedSegment, PlannedShard, PlannedState,
        PlannedTables, PlannedWeight, Region, RegionKind, Runtime, RuntimeMode,
    };
}

pub mod cpu;

/// CUDA interop and extras: external memory and streams, graphs,
/// and measured bandwidths.
///
/// [`wrap_device_ptr`](cuda::wrap_device_ptr) and
/// [`wrap_stream`](cuda::wrap_stream) wrap external pointers and
/// streams, without copies. They may come from the CUDA runtime,
/// PyTorch or other code in the process. Their first argument is
/// the [`device`](Context::device) of a context. An
/// [`AddressSpace`](cuda::AddressSpace) makes views of external
/// pointers at no cost. [`device_address`](cuda::device_address)
/// returns a buffer's pointer.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use qgemm_cuda::{
        AddressSpace, BundleContents, CacheFolder, Compiler, Graph, Installation, LentGraph, TimelineEntry, capture,
        capture_lent, capture_with, copy_bandwidth, cudarc, device_address, from_cudarc_stream, installation, nccl,
        read_bandwidth, record_timeline, repack_bandwidth, wrap_device_ptr, wrap_stream,
    };
}

/// wgpu interop: external devices and buffers.
///
/// An engine with its own wgpu device shares it. qgemm then
/// multiplies on that device's queue and in its buffers:
///
/// ```no_run
/// use qgemm_api::wgpu::{from_device, wgpu, wrap_buffer};
/// use qgemm_api::{Args, Context, DType, HostWeight, Problem};
///
/// fn layer(
///     device: &wgpu::Device, // with Features::IMMEDIATES: see `from_device`
///     queue: &wgpu::Queue,
///     weight: &HostWeight,
///     x: &wgpu::Buffer, // f16, with BufferUsages::STORAGE
///     d: &wgpu::Buffer,
/// ) -> Result<(), qgemm_api::Error> {
///     let ctx = Context::from_device(from_device(device, queue)?);
///     let weight = ctx.load(weight)?;
///     let plan = ctx.plan(&Problem::new(&weight, 1).x_dtype(DType::F16))?;
///     let (x, mut d) = (wrap_buffer(&**ctx.device(), x)?, wrap_buffer(&**ctx.device(), d)?);
///     plan.run(&ctx.default_stream(), Args::new(&x, &weight, &mut d))
///     // What is submitted to `queue` from here on sees the result in `d`.
/// }
/// ```
#[cfg(feature = "wgpu")]
pub mod wgpu {
    pub use qgemm_wgpu::{from_device, report_loss, wgpu, wrap_buffer};
}

#[cfg(feature = "emu")]
pub mod emu;

/// Example of the README, compiled with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Programs of the engine guide, run with the doctests.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../../../docs/guide/engines.md")]
struct Engines;

/// Examples of the operation pages, run with the doctests.
#[cfg(doctest)]
mod operations {
    macro_rules! pages {
        ($($name:ident: $file:literal)*) => { $(#[doc = include_str!(concat!("../../../docs/ops/", $file))] struct $name;)* };
    }

    pages! {
        Attention: "attention.md"
        Experts: "experts.md"
        GatherRows: "gather_rows.md"
        Indexer: "indexer.md"
        LinearAttention: "linear_attention.md"
        Matmul: "matmul.md"
        QuantizedX: "quantized-x.md"
        Sampling: "sampling.md"
        ShortConv: "short_conv.md"
    }
}
