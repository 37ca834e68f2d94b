//! Hardware abstraction layer: devices, capabilities, memory, streams,
//! events, the traits of a backend, and the parameter ABI of
//! kernels. It neither interprets formats nor chooses kernels.
//!
//! # Contract
//! `qgemm-api` has validated all arguments; a violated invariant below it
//! is a bug of qgemm. Errors cover what a caller cannot
//! foresee: a missing driver, exhausted memory, a lost device.
#![deny(missing_docs)]

pub mod abi;
mod buffer;
mod caps;
mod device;
mod error;
mod family;
mod file_lock;
mod host;
mod host_memory;
mod host_stream;
mod kernel_id;
mod mapped_file;
pub mod noop;
pub mod op;
mod operands;
mod pack_spec;
mod pool;
mod profile;
mod sequence;

pub use buffer::{Buffer, BufferMut, BufferRef, RawBuffer};
pub use caps::{DeviceId, DeviceInfo, DeviceKind, Math, Variant};
pub use device::{Device, Event, RawEvent, RawStream, Stream};
pub use error::{HalError, Unsupported};
pub use family::{
    AttentionFamilies, Catalog, ConvertFamilies, DequantizeFamilies, ExpertsFamilies, Family, GemmFamilies,
    IndexerFamilies, KvAppendFamilies, MatmulFamilies, NormFamilies, OptimizerFamilies, QuantizeFamilies,
    RoutingFamilies, UnpackFamilies,
};
pub use file_lock::FileLock;
pub use host::{Host, SimdLevel, read_bandwidth};
pub use host_memory::{HostMemory, HostSlice, HostSliceMut};
pub use host_stream::{HostEvent, HostStream};
pub use kernel_id::{KernelId, KernelIdError, Name, Spec};
pub use mapped_file::{MappedFile, check_regular};
pub use op::attention::{
    Addressing, AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, HeadRows, KvFormat, KvPlaces, KvRows,
    MaskBits, Paging, QueryLengths,
};
pub use op::convert::{ConvertConfig, ConvertOperand, ConvertPlan, ConvertSpec};
pub use op::dequantize::{DequantizeConfig, DequantizeOperand, DequantizePlan, DequantizeSpec};
pub use op::expert_lists::list_parts;
pub use op::experts::{Combine, ExpertFault, ExpertForm, ExpertOperand, ExpertStepSpec, ExpertsConfig, ExpertsPlan};
pub use op::gemm::{
    Activation, GemmOperand, GemmSpec, LaunchPlan, NormedX, Schedule, Segment, StreamK, TileConfig, WorkTile,
    WorkspaceLayout, XOperand, XPlaneRegions, XPlanes, XPrecision, XPrologue, XRegion,
};
pub use op::indexer::{
    IndexerConfig, IndexerKeys, IndexerLaunch, IndexerOperand, IndexerResult, IndexerRows, IndexerSpec,
};
pub use op::kv_append::{
    CheckedRotary, KvAppendConfig, KvAppendLaunch, KvAppendOperand, KvAppendSpec, KvAppendStep, RotaryAngles,
    RotaryPairs,
};
pub use op::listed_slots::ListedSlots;
pub use op::matmul::{BatchedDense, FactorFormat, MatmulConfig, MatmulLayout, MatmulOperand, MatmulPlan, MatmulSpec};
pub use op::norm::{
    AddedResidual, NormConfig, NormFunction, NormKind, NormLaunch, NormOperand, NormQuantizeSpec, NormSpec, QuantizedD,
    XPlace,
};
pub use op::optimizer::{
    MomentFactors, OptimizerConfig, OptimizerLaunch, OptimizerOperand, OptimizerSpec, StepFactors, UpdateKind,
    UpdateRule,
};
pub use op::quantize::{QuantizeConfig, QuantizeOperand, QuantizePlan, QuantizeSpec};
pub use op::routing::{
    ExpertGroups, RoutingConfig, RoutingLaunches, RoutingOperand, RoutingSource, RoutingSpec, RoutingStep, Scoring,
};
pub use op::unpack::{UnpackConfig, UnpackOperand, UnpackPlan, UnpackSpec};
pub use op::{
    Access, CheckedAttention, CheckedConvert, CheckedDequantize, CheckedExperts, CheckedGemm, CheckedIndexer,
    CheckedKvAppend, CheckedMatmul, CheckedNorm, CheckedOptimizer, CheckedQuantize, CheckedRouting, CheckedUnpack,
    Dense, Operand, OperandDesc, Operation,
};
pub use operands::{MAX_OPERANDS, Operands, Portion};
pub use pack_spec::{PackSpec, ProbeSpec};
pub use pool::{BufferPool, PoolStats, PooledBuffer};
pub use profile::{LaunchTimes, StepTimes, record_launches};
pub use sequence::{Geometry, Kernel, LaunchSequence, LaunchStep, Placed};
