//! Families of the CUDA backend with emulated kernels.

use std::sync::{Arc, OnceLock};

use once_cell::sync::OnceCell;
use qgemm_cuda::{
    EncodedMap, KernelLaunch, MapSwizzle, Places, TileMap, attention_sequence, convert_sequence, dequantize_sequence,
    experts_sequence, gemm_sequence, indexer_sequence, kv_append_sequence, matmul_sequence, norm_sequence,
    optimizer_sequence, quantize_sequence, routing_sequence, unpack_sequence,
};
use qgemm_hal::{
    self as hal, AttentionConfig, AttentionPlan, BufferRef, Catalog, CheckedAttention, CheckedConvert,
    CheckedDequantize, CheckedExperts, CheckedGemm, CheckedIndexer, CheckedKvAppend, CheckedMatmul, CheckedNorm,
    CheckedOptimizer, CheckedQuantize, CheckedRouting, CheckedUnpack, ConvertConfig, ConvertPlan, DequantizeConfig,
    DequantizePlan, Device, DeviceId, DeviceInfo, ExpertsConfig, ExpertsPlan, Family, HalError, HostMemory, HostStream,
    IndexerConfig, IndexerLaunch, Kernel, KvAppendConfig, KvAppendLaunch, LaunchPlan, LaunchSequence, MatmulConfig,
    MatmulPlan, NormConfig, NormLaunch, Operands, Operation, OptimizerConfig, OptimizerLaunch, QuantizeConfig,
    QuantizePlan, RoutingConfig, RoutingLaunches, Stream, TileConfig, UnpackConfig, UnpackPlan, Unsupported,
};

use crate::device::{EmuDevice, Geometry};
use crate::kernel::LoadedKernel;
use crate::machine::{Access, Region, Swizzle, TensorMap};

/// The CUDA backend's catalog, emulated.
pub(crate) fn catalog() -> Catalog {
    static ALL: OnceLock<Catalog> = OnceLock::new();
    *ALL.get_or_init(|| {
        let Catalog {
            gemm,
            convert,
            experts,
            routing,
            matmul,
            quantize,
            dequantize,
            attention,
            norm,
            kv_append,
            indexer,
            unpack,
            optimizer,
            ..
        } = qgemm_cuda::CATALOG;
        // Leaked once per process.
        Catalog {
            gemm: Box::leak(gemm.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedGemm>).collect()),
            convert: Box::leak(
                convert.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedConvert>).collect(),
            ),
            experts: Box::leak(
                experts.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedExperts>).collect(),
            ),
            routing: Box::leak(
                routing.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedRouting>).collect(),
            ),
            matmul: Box::leak(
                matmul.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedMatmul>).collect(),
            ),
            quantize: Box::leak(
                quantize.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedQuantize>).collect(),
            ),
            dequantize: Box::leak(
                dequantize.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedDequantize>).collect(),
            ),
            attention: Box::leak(
                attention.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedAttention>).collect(),
            ),
            norm: Box::leak(norm.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedNorm>).collect()),
            indexer: Box::leak(
                indexer.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedIndexer>).collect(),
            ),
            kv_append: Box::leak(
                kv_append.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedKvAppend>).collect(),
            ),
            unpack: Box::leak(
                unpack.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedUnpack>).collect(),
            ),
            optimizer: Box::leak(
                optimizer.iter().map(|&family| leak(EmuFamily(family)) as &dyn Family<CheckedOptimizer>).collect(),
            ),
        }
    })
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// A family of the CUDA backend.
#[derive(Debug)]
struct EmuFamily<O: Operation>(&'static dyn Family<O>);

impl Family<CheckedGemm> for EmuFamily<CheckedGemm> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        gemm_sequence(op, plan, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedGemm, config: &TileConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedConvert> for EmuFamily<CheckedConvert> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedConvert, info: &DeviceInfo) -> Result<Vec<ConvertConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedConvert, _: &ConvertPlan) -> Result<LaunchSequence, HalError> {
        convert_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedConvert, config: &ConvertConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedExperts> for EmuFamily<CheckedExperts> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedExperts, info: &DeviceInfo) -> Result<Vec<ExpertsConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedExperts,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, HalError> {
        experts_sequence(op, plan, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedExperts, config: &ExpertsConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedRouting> for EmuFamily<CheckedRouting> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedRouting, info: &DeviceInfo) -> Result<Vec<RoutingConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedRouting,
        _: &RoutingLaunches,
    ) -> Result<LaunchSequence, HalError> {
        routing_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedRouting, config: &RoutingConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedUnpack> for EmuFamily<CheckedUnpack> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedUnpack, info: &DeviceInfo) -> Result<Vec<UnpackConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedUnpack, _: &UnpackPlan) -> Result<LaunchSequence, HalError> {
        unpack_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedUnpack, config: &UnpackConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedMatmul> for EmuFamily<CheckedMatmul> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedMatmul, info: &DeviceInfo) -> Result<Vec<MatmulConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedMatmul, plan: &MatmulPlan) -> Result<LaunchSequence, HalError> {
        matmul_sequence(op, plan, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedMatmul, config: &MatmulConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedQuantize> for EmuFamily<CheckedQuantize> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedQuantize, info: &DeviceInfo) -> Result<Vec<QuantizeConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedQuantize, _: &QuantizePlan) -> Result<LaunchSequence, HalError> {
        quantize_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedQuantize, config: &QuantizeConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedDequantize> for EmuFamily<CheckedDequantize> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedDequantize, info: &DeviceInfo) -> Result<Vec<DequantizeConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedDequantize,
        _: &DequantizePlan,
    ) -> Result<LaunchSequence, HalError> {
        dequantize_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedDequantize, config: &DequantizeConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedAttention> for EmuFamily<CheckedAttention> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        attention_sequence(op, plan, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedAttention, config: &AttentionConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedNorm> for EmuFamily<CheckedNorm> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedNorm, info: &DeviceInfo) -> Result<Vec<NormConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedNorm, _: &NormLaunch) -> Result<LaunchSequence, HalError> {
        norm_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedNorm, config: &NormConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedIndexer> for EmuFamily<CheckedIndexer> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedIndexer,
        plan: &IndexerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        indexer_sequence(op, plan, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedIndexer, config: &IndexerConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedOptimizer> for EmuFamily<CheckedOptimizer> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedOptimizer, info: &DeviceInfo) -> Result<Vec<OptimizerConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedOptimizer,
        _: &OptimizerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        optimizer_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedOptimizer, config: &OptimizerConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

impl Family<CheckedKvAppend> for EmuFamily<CheckedKvAppend> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn configs(&self, op: &CheckedKvAppend, info: &DeviceInfo) -> Result<Vec<KvAppendConfig>, Unsupported> {
        self.0.configs(op, info)
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedKvAppend,
        _: &KvAppendLaunch,
    ) -> Result<LaunchSequence, HalError> {
        kv_append_sequence(op, device.info(), &mut |launch| emulated(device, launch))
    }

    fn source_hash(&self, op: &CheckedKvAppend, config: &KvAppendConfig) -> u64 {
        self.0.source_hash(op, config)
    }
}

/// Compiles a launch's kernel for `device`.
fn emulated(device: &dyn Device, launch: KernelLaunch) -> Result<Arc<dyn Kernel>, HalError> {
    let emu = EmuDevice::of(device)?;
    let kernel = emu.kernel(&launch.spec)?;
    // The kernel keeps the device alive.
    let device = emu.handle().ok_or(HalError::WrongDevice { device: emu.id(), what: "the kernel" })?;
    Ok(Arc::new(EmuKernel { launch, kernel, device }))
}

/// A kernel that is ready to launch.
#[derive(Debug)]
struct EmuKernel {
    launch: KernelLaunch,
    kernel: Arc<OnceCell<LoadedKernel>>,
    device: Arc<EmuDevice>,
}

impl EmuKernel {
    /// The memory that the launch may access: its operands.
    fn regions(&self, operands: &Operands<'_>) -> Result<Vec<Region>, HalError> {
        let region = |(slot, desc): (usize, &hal::OperandDesc)| {
            let view = operands.at(slot)?;
            let start = address(self.device.id(), view, desc.name);
            let access = match desc.access {
                hal::Access::Constant => Access::Weight,
                hal::Access::Read => Access::Read,
                hal::Access::Write if self.launch.updated == Some(slot) => Access::ReadWrite,
                hal::Access::Write => Access::Write,
                hal::Access::Accumulate => Access::ReadWrite,
            };
            Some(start.map(|start| Region { name: desc.name, start: start as usize, len: view.len(), access }))
        };
        self.launch.operands.iter().enumerate().filter_map(region).collect()
    }
}

impl Kernel for EmuKernel {
    fn takes_portions(&self) -> bool {
        self.launch.takes_portions()
    }

    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        let id = self.device.id();
        HostStream::check(id, stream)?;
        let places = Places { address: &|view, what| address(id, view, what), encode: &|map| Ok(encode(map)) };
        let params = self.launch.params(&operands, &places)?;
        let regions = self.regions(&operands)?;
        let hal::Geometry { grid, threads, shared_bytes } = self.launch.geometry;
        let geometry = Geometry {
            blocks: grid,
            threads,
            shared_bytes,
            params: params.as_bytes(),
            starts_early: self.launch.starts_early,
        };
        let Some(kernel) = self.kernel.get() else {
            return Err(HalError::WrongDevice { device: id, what: "the kernel" });
        };
        // SAFETY: the parameter is that of the kernel, made for this
        // launch. The regions are views that `operands` borrows,
        // exclusively if they are written.
        unsafe { self.device.launch(&self.launch.spec.name, kernel, geometry, &regions) }
    }
}

/// Address of the first byte of a view of `device`'s memory.
pub(crate) fn address(device: DeviceId, view: BufferRef<'_>, what: &'static str) -> Result<u64, HalError> {
    let wrong = HalError::WrongDevice { device, what };
    if view.device() != device {
        return Err(wrong);
    }
    Ok(HostMemory::address(view).ok_or(wrong)?.as_ptr().expose_provenance() as u64)
}

/// A tensor map in the emulated TMA's format.
fn encode(tensor: &TileMap) -> EncodedMap {
    let TileMap { address, element, size, strides, tile, swizzle, .. } = *tensor;
    let swizzle = match swizzle {
        MapSwizzle::None => Swizzle::None,
        MapSwizzle::Bytes64 => Swizzle::Bytes64,
        MapSwizzle::Bytes128 => Swizzle::Bytes128,
    };
    TensorMap { address, element_bytes: element.bytes() as u32, size, strides, tile, swizzle }.encode()
}
