//! A device that does nothing, for testing higher
//! layers without a backend.
//!
//! Its memory is real (zeroed host RAM). Its one kernel family
//! accepts every operation and leaves the output unchanged.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use qgemm_formats::Format;
use qgemm_formats::prepack::FragmentLayout;

use crate::buffer::{Buffer, BufferMut, BufferRef};
use crate::caps::{DeviceId, DeviceInfo, DeviceKind, Math};
use crate::device::{Device, Event, Stream};
use crate::error::{HalError, Unsupported};
use crate::family::{Catalog, Family};
use crate::host_memory::HostMemory;
use crate::host_stream::{HostEvent, HostStream};
use crate::kernel_id::{KernelId, Name, Spec};
use crate::op::attention::{AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec};
use crate::op::convert::{ConvertConfig, ConvertOperand, ConvertPlan, ConvertSpec};
use crate::op::dequantize::{DequantizeConfig, DequantizeOperand, DequantizePlan, DequantizeSpec};
use crate::op::experts::{ExpertOperand, ExpertsConfig, ExpertsPlan};
use crate::op::gemm::{GemmOperand, LaunchPlan, Schedule, TileConfig};
use crate::op::indexer::{IndexerConfig, IndexerLaunch, IndexerOperand, IndexerSpec, IndexerStep};
use crate::op::kv_append::{KvAppendConfig, KvAppendLaunch, KvAppendOperand, KvAppendSpec, KvAppendStep};
use crate::op::matmul::{MatmulConfig, MatmulOperand, MatmulPlan, MatmulSpec};
use crate::op::norm::{NormConfig, NormLaunch, NormOperand, NormSpec};
use crate::op::optimizer::{OptimizerConfig, OptimizerLaunch, OptimizerOperand, OptimizerSpec};
use crate::op::quantize::{QuantizeConfig, QuantizeOperand, QuantizePlan, QuantizeSpec};
use crate::op::routing::{RoutingConfig, RoutingLaunches, RoutingOperand, RoutingSpec, RoutingStep};
use crate::op::unpack::{UnpackConfig, UnpackOperand, UnpackPlan, UnpackSpec};
use crate::op::{
    CheckedAttention, CheckedConvert, CheckedDequantize, CheckedExperts, CheckedGemm, CheckedIndexer, CheckedKvAppend,
    CheckedMatmul, CheckedNorm, CheckedOptimizer, CheckedQuantize, CheckedRouting, CheckedUnpack, Operand, OperandDesc,
};
use crate::operands::Operands;
use crate::sequence::{Geometry, Kernel, LaunchSequence, LaunchStep};

const ID: DeviceId = DeviceId { kind: DeviceKind::Noop, ordinal: 0 };

/// Opens the no-op device.
///
/// # Errors
/// [`HalError::NoDevice`] when `id` is not `noop`.
pub fn open(id: DeviceId) -> Result<Arc<dyn Device>, HalError> {
    if id != ID {
        return Err(HalError::NoDevice { device: id.to_string(), why: "there is one no-op device, `noop`".into() });
    }
    Ok(Arc::new(NoopDevice::new()))
}

/// All no-op devices: one.
pub fn devices() -> Vec<DeviceInfo> {
    vec![NoopDevice::new().info]
}

/// The no-op device.
#[derive(Debug)]
pub struct NoopDevice {
    info: DeviceInfo,
    default_stream: Stream,
    launches: Arc<AtomicU64>,
}

impl NoopDevice {
    fn new() -> Self {
        let info = DeviceInfo {
            id: ID,
            name: "no-op device".into(),
            arch: "none".into(),
            variant: None,
            driver: String::new(),
            units: 4,
            memory_bytes: 0,
            bandwidth: 1e9,
            cache_bytes: 0,
            shared_bytes: 0,
            max_buffer_bytes: isize::MAX as u64,
            rates: vec![(Math::FmaF32, 1e9)],
            launch_seconds: 0.0,
            features: BTreeSet::new(),
        };
        Self { info, default_stream: HostStream::stream(ID), launches: Arc::default() }
    }

    /// Kernel launches so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}

impl Device for NoopDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
        HostMemory::allocate(ID, bytes, what)
    }

    fn default_stream(&self) -> Stream {
        self.default_stream.clone()
    }

    fn new_stream(&self) -> Result<Stream, HalError> {
        Ok(HostStream::stream(ID))
    }

    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostMemory::upload(ID, src, dst)
    }

    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostMemory::download(ID, src, dst)
    }

    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostMemory::fill(ID, dst, value)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), HalError> {
        HostStream::check(ID, stream)
    }

    fn record(&self, stream: &Stream) -> Result<Event, HalError> {
        HostStream::check(ID, stream)?;
        Ok(HostEvent::now())
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostEvent::check(ID, event)
    }

    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError> {
        HostEvent::elapsed(ID, start, end)
    }

    fn fragment_layout(&self, _format: Format) -> FragmentLayout {
        FragmentLayout::Canonical
    }

    fn catalog(&self) -> Catalog {
        Catalog {
            gemm: &[&NoopFamily],
            convert: &[&NoopFamily],
            experts: &[&NoopFamily],
            routing: &[&NoopFamily],
            matmul: &[&NoopFamily],
            quantize: &[&NoopFamily],
            dequantize: &[&NoopFamily],
            attention: &[&NoopFamily],
            norm: &[&NoopFamily],
            kv_append: &[&NoopFamily],
            indexer: &[&NoopFamily],
            unpack: &[&NoopFamily],
            optimizer: &[&NoopFamily],
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The family `noop` of every operation. Its `gemm` config supports
/// split-K, so that some plans have a workspace.
#[derive(Debug)]
struct NoopFamily;

impl NoopFamily {
    /// A sequence of one step without operands.
    fn sequence<O: Operand>(device: &dyn Device, name: String, id: KernelId) -> Result<LaunchSequence, HalError> {
        let device = device
            .as_any()
            .downcast_ref::<NoopDevice>()
            .ok_or(HalError::WrongDevice { device: device.info().id, what: "the family `noop`" })?;
        let kernel = NoopKernel { operands: O::ALL, launches: device.launches.clone() };
        let geometry = Geometry { grid: [1, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<O>(id, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<O>(name, vec![step]))
    }
}

impl Family<CheckedGemm> for NoopFamily {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn configs(&self, op: &CheckedGemm, _info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        let config = TileConfig {
            family: "noop",
            main_loop: "noop",
            variant: None,
            math: Math::FmaF32,
            tile_n: 64,
            tile_m: 64,
            tile_k: 64,
            threads: 1,
            ctas_per_unit: 1,
            cluster: 1,
            schedule: Schedule::Grid,
            max_splits: 4,
            warps_n: 1,
            k_groups: 1,
            stages: 1,
            shared_bytes: 0,
            x_format: op.plain_x()?.dtype.into(),
            x_prologue: None,
            rounded_weights: None,
            normalizes_x: false,
            efficiency: (1000, 1000),
        };
        Ok(vec![config])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        Self::sequence::<GemmOperand>(device, op.kernel_name("noop"), plan.config.kernel_id(op.format))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        0
    }
}

impl Family<CheckedExperts> for NoopFamily {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        let tiles = Family::<CheckedGemm>::configs(self, &op.each, info)?;
        Ok(tiles
            .into_iter()
            .map(|tile| ExpertsConfig { tile, grouped: false, scratch_bytes: 0, settles: false })
            .collect())
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        Self::sequence::<ExpertOperand>(device, op.kernel_name("noop"), plan.config.kernel_id(op))
    }

    fn source_hash(&self, _: &CheckedExperts, _: &ExpertsConfig) -> u64 {
        0
    }
}

/// Implements the family `noop` for an operation whose config
/// provides its kernel identity.
macro_rules! noop_family {
    ($op:ty: $config:ty, $plan:ty, $operand:ty; config: $one:expr; name: $name:expr;) => {
        impl Family<$op> for NoopFamily {
            fn name(&self) -> &'static str {
                "noop"
            }

            fn configs(&self, op: &$op, _info: &DeviceInfo) -> Result<Vec<$config>, Unsupported> {
                let one: fn(&$op) -> $config = $one;
                Ok(vec![one(op)])
            }

            fn prepare(&self, device: &dyn Device, op: &$op, plan: &$plan) -> Result<LaunchSequence, HalError> {
                let name: fn(&$op) -> String = $name;
                Self::sequence::<$operand>(device, name(op), plan.config.kernel)
            }

            fn source_hash(&self, _: &$op, _: &$config) -> u64 {
                0
            }
        }
    };
}

noop_family! {
    CheckedConvert: ConvertConfig, ConvertPlan, ConvertOperand;
    config: |op| {
        let spec = ConvertSpec::of(op);
        ConvertConfig { kernel: KernelId::new("noop", None, Spec::Convert(spec)), efficiency: 1000 }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedRouting: RoutingConfig, RoutingLaunches, RoutingOperand;
    config: |op| {
        let step = if op.logits().is_some() { RoutingStep::TopK } else { RoutingStep::Lists };
        let spec = RoutingSpec { step, experts: op.experts as u32 };
        let kernel = KernelId::new("noop", None, Spec::Routing(spec));
        // Large operations have a workspace, so that higher
        // layers can test with one.
        let workspace_bytes = if op.tokens > 64 { 1024 } else { 0 };
        RoutingConfig { kernel, launches: 1, workspace_bytes, efficiency: 1000 }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedMatmul: MatmulConfig, MatmulPlan, MatmulOperand;
    config: |op| {
        let (a, b, layout) = (op.a.dtype, op.b.dtype, op.layout());
        let spec = MatmulSpec { main_loop: Name::new("noop"), a, b, layout, m: 64, n: 64, k: 64 };
        MatmulConfig {
            kernel: KernelId::new("noop", None, Spec::Matmul(spec)),
            math: Math::FmaF32,
            tile_m: 64,
            tile_n: 64,
            tile_k: 64,
            ctas_per_unit: 1,
            max_splits: 4,
            efficiency: 1000,
            factor_bytes: 0,
        }
    };
    name: |op| op.kernel_name("noop");
}

noop_family! {
    CheckedUnpack: UnpackConfig, UnpackPlan, UnpackOperand;
    config: |op| {
        let spec = UnpackSpec { main_loop: Name::new("noop"), w: op.format, n: 64 };
        UnpackConfig { kernel: KernelId::new("noop", None, Spec::Unpack(spec)), efficiency: 1000 }
    };
    name: |op| op.kernel_name("noop");
}

noop_family! {
    CheckedQuantize: QuantizeConfig, QuantizePlan, QuantizeOperand;
    config: |op| {
        let kernel = KernelId::new("noop", None, Spec::Quantize(QuantizeSpec::of(op)));
        QuantizeConfig { kernel, efficiency: 1000 }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedDequantize: DequantizeConfig, DequantizePlan, DequantizeOperand;
    config: |op| {
        let kernel = KernelId::new("noop", None, Spec::Dequantize(DequantizeSpec::of(op)));
        DequantizeConfig { kernel, efficiency: 1000 }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedAttention: AttentionConfig, AttentionPlan, AttentionOperand;
    config: |op| {
        let (qk, v) = (op.qk_dim as u32, op.v_dim as u32);
        let spec = AttentionSpec::attend(op.kv, [qk, v], 1, 1);
        AttentionConfig {
            kernel: KernelId::new("noop", None, Spec::Attention(spec)),
            launches: 1,
            parts: 1,
            part_keys: op.most_keys as u32,
            // Operations with many queries have a workspace, so that
            // higher layers can test with one.
            workspace_bytes: if op.tokens > 64 { 1024 } else { 0 },
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (1000, 1000),
        }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedNorm: NormConfig, NormLaunch, NormOperand;
    config: |_| {
        let spec = NormSpec::any(0);
        NormConfig { kernel: KernelId::new("noop", None, Spec::Norm(spec)), efficiency: 1000 }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedKvAppend: KvAppendConfig, KvAppendLaunch, KvAppendOperand;
    config: |op| {
        let spec = KvAppendSpec { step: KvAppendStep::All, x: op.dtype, kv: op.kv };
        let kernel = KernelId::new("noop", None, Spec::KvAppend(spec));
        KvAppendConfig { kernel, launches: 1, efficiency: 1000 }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedIndexer: IndexerConfig, IndexerLaunch, IndexerOperand;
    config: |op| {
        let spec = IndexerSpec::of(IndexerStep::Index, op.format, op.features as u32, 1);
        IndexerConfig {
            kernel: KernelId::new("noop", None, Spec::Indexer(spec)),
            launches: 1,
            part_queries: op.queries,
            workspace_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (1000, 1000),
        }
    };
    name: |_| "noop".into();
}

noop_family! {
    CheckedOptimizer: OptimizerConfig, OptimizerLaunch, OptimizerOperand;
    config: |op| {
        let kernel = KernelId::new("noop", None, Spec::Optimizer(OptimizerSpec::new(op.rule.kind())));
        OptimizerConfig { kernel, efficiency: 1000 }
    };
    name: |_| "noop".into();
}

#[derive(Debug)]
struct NoopKernel {
    operands: &'static [OperandDesc],
    launches: Arc<AtomicU64>,
}

impl Kernel for NoopKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        for (slot, desc) in self.operands.iter().enumerate() {
            operands.at(slot).map(|view| HostMemory::of_device(ID, view, desc.name)).transpose()?;
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_by_name_only() {
        let device = open("noop".parse().expect("a name")).expect("always there");
        assert_eq!(device.info().id.to_string(), "noop");
        assert!(matches!(open(DeviceId::CPU), Err(HalError::NoDevice { .. })));
        assert_eq!(devices().len(), 1);
    }

    #[test]
    fn memory_and_events_work() {
        let device = open(ID).expect("always there");
        let stream = device.default_stream();
        let mut buffer = device.allocate(16, "test").expect("memory");
        let start = device.record(&stream).expect("an event");
        device.upload(&stream, &[5; 8], (&mut buffer).into()).expect("fits");
        let end = device.record(&stream).expect("an event");
        let mut out = [1; 16];
        device.download(&stream, (&buffer).into(), &mut out).expect("fits");
        assert_eq!((&out[..8], &out[8..]), (&[5u8; 8][..], &[0u8; 8][..]));
        assert!(device.elapsed(&start, &end).is_ok());
        let foreign = HostStream::stream(DeviceId::CPU);
        assert!(matches!(device.synchronize(&foreign), Err(HalError::WrongDevice { what: "stream", .. })));
    }
}
