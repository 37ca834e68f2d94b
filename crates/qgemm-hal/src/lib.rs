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
mod axis;
mod buffer;
mod caps;
mod collective;
mod device;
mod error;
mod family;
mod feature;
mod file_lock;
mod host;
mod host_memory;
mod host_stream;
mod kernel_id;
mod mapped_file;
pub mod noop;
pub mod op;
mod operands;
mod operations;
mod pack_spec;
mod pool;
mod profile;
mod sequence;

pub use axis::KernelDType;
pub use buffer::{Buffer, BufferMut, BufferRef, RawBuffer};
pub use caps::{DeviceId, DeviceInfo, DeviceKind, Math, Variant};
pub use collective::{Collective, Communicator, Exchange, HostCommunicator, Latency, Message, Rendezvous, ThreadGroup};
pub use device::{Device, Event, RawEvent, RawStream, Stream};
pub use error::{HalError, Unsupported};
pub use family::{Catalog, Families, Family};
pub use feature::Feature;
pub use file_lock::FileLock;
pub use host::{Host, SimdLevel, read_bandwidth};
pub use host_memory::{HostMemory, HostSlice, HostSliceMut};
pub use host_stream::{HostEvent, HostStream};
pub use kernel_id::{KernelId, KernelIdError, Name, Spec};
pub use mapped_file::{MappedFile, check_regular};
pub use op::attention::{
    Addressing, AttentionStep, HeadRows, KvAddressing, KvFormat, KvFormats, KvPaging, KvRows, MaskBits, Paging,
    QueryLengths,
};
pub use op::expert_lists::list_parts;
pub use op::experts::{Combine, ExpertFault, ExpertForm, ExpertStep};
pub use op::gemm::{
    Activation, ClampedSwiglu, NormedX, Schedule, Segment, StreamK, WorkTile, WorkspaceLayout, XOperand, XPlaneRegions,
    XPlanes, XPrecision, XPrologue, XRegion,
};
pub use op::indexer::{IndexerKeys, IndexerResult, IndexerRows, IndexerStep};
pub use op::kv_append::{CheckedRotary, HeadNorm, KvAppendStep, RotaryAngles, RotaryPairs};
pub use op::listed_slots::ListedSlots;
pub use op::matmul::{BatchedDense, FactorFormat, MatmulLayout};
pub use op::norm::{AddedResidual, GateFunction, NormFunction, NormGate, NormKind, QuantizedD, XOverwrite};
pub use op::optimizer::{MomentFactors, StepFactors, UpdateKind, UpdateRule};
pub use op::routing::{ExpertGroups, RoutingSource, RoutingStep, Scoring};
pub use op::{Access, Dense, MemoryBound, Operand, OperandDesc, Operation};
pub use operands::{MAX_OPERANDS, Operands, Portion};
pub use operations::{Listed, OPERATIONS, OperationInfo};
pub use pack_spec::{AllReduceSpec, PackFragments, PackSpec, ProbeSpec};
pub use pool::{BufferPool, PoolStats, PooledBuffer};
pub use profile::{LaunchTimes, StepTimes, record_launches};
pub use sequence::{Geometry, Kernel, LaunchSequence, LaunchStep, Placed};

/// Re-exports the types of every operation of the list.
macro_rules! types {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        $(pub use op::$name::{$op, $($part,)* $($keys,)*};)*
    };
}
crate::with_operations!(types);
