//! `optimizer`: optimizer step (SGD, AdamW).

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{FLAG_COPY, OptimizerShape, dtype_code};
use qgemm_hal::{
    CheckedOptimizer, Device, DeviceInfo, Families, Family, Geometry, HalError, Kernel, KernelId, LaunchSequence,
    LaunchStep, MomentFactors, Operand, Operands, Operation, OptimizerConfig, OptimizerLaunch, OptimizerOperand,
    OptimizerSpec, Spec, StepFactors, Stream, Unsupported, UpdateKind,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, submit, too_large};
use super::operands::Touched;
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{OPTIMIZER_TEXTS, compose_optimizer};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `optimizer`.
pub(super) const FAMILIES: Families<CheckedOptimizer> = &[&Optimizer];

/// Kernel interface: the operands of `shaders/optimizer.wgsl`.
pub(crate) const INTERFACE: Interface =
    Interface { name: NAME, bindings: "rrwwww", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "optimizer";
/// Invocations of a workgroup.
const THREADS: u32 = 64;
/// Parameters of an invocation.
const EACH: usize = 2;
/// Bytes of an f32.
const WORD: usize = 4;
/// Maximum parameters of a dispatch; they are counted in 31 bits.
const MOST: usize = 1 << 30;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(OPTIMIZER_TEXTS));

/// `Params` of `shaders/optimizer.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: OptimizerShape,
    weights_base: u32,
    gradient_base: u32,
    moment1_base: u32,
    moment2_base: u32,
    step_base: u32,
    copy_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Optimizer;

/// Number of an update rule in the shader.
fn rule(kind: UpdateKind) -> u32 {
    match kind {
        UpdateKind::AdamW => 0,
        UpdateKind::Sgd => 1,
        UpdateKind::Momentum => 2,
    }
}

fn kernel_id(op: &CheckedOptimizer) -> KernelId {
    KernelId::new(NAME, None, Spec::Optimizer(OptimizerSpec::new(op.rule.kind())))
}

impl Family<CheckedOptimizer> for Optimizer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedOptimizer, info: &DeviceInfo) -> Result<Vec<OptimizerConfig>, Unsupported> {
        parts(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![OptimizerConfig { kernel: kernel_id(op), efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedOptimizer,
        _: &OptimizerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "an optimizer of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let parts = parts(op, device.info().max_buffer_bytes).map_err(refused)?;
        let shader = compose_optimizer(THREADS, rule(op.rule.kind()));
        let compiled = Compiled::new(shared, &INTERFACE, NAME.to_owned(), shader)?;
        let grid = parts.first().map_or([0; 3], |part| grid(part.len()));
        let geometry = Geometry { grid, threads: THREADS, shared_bytes: 0 };
        let kernel = OptimizerKernel { compiled, shared: shared.clone(), op: *op, parts };
        let step = LaunchStep::new::<OptimizerOperand>(kernel_id(op), geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<OptimizerOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedOptimizer, _: &OptimizerConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// Parameters of each dispatch, with bindings of at most `limit` bytes.
/// All but the last have an even number, so that pairs
/// of 16-bit values never share a word with another dispatch.
///
/// # Errors
/// When a binding cannot hold any.
fn parts(op: &CheckedOptimizer, limit: u64) -> Result<Vec<Range<usize>>, Unsupported> {
    let fitting = usize::try_from(limit.saturating_sub(MARGIN)).unwrap_or(usize::MAX) / WORD / EACH * EACH;
    let each = fitting.min(MOST);
    if each == 0 {
        return Err(too_large("a pair of parameters", (EACH * WORD) as u64, limit));
    }
    Ok((0..op.len).step_by(each).map(|first| first..op.len.min(first + each)).collect())
}

/// Workgroups for `len` parameters.
fn grid(len: usize) -> [u32; 3] {
    let groups = (len.div_ceil(EACH) as u32).div_ceil(THREADS);
    let x = groups.min(MAX_GROUPS);
    [x, groups.div_ceil(x.max(1)), 1]
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct OptimizerKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedOptimizer,
    parts: Vec<Range<usize>>,
}

impl OptimizerKernel {
    /// Bindings and parameters of a part.
    fn dispatch<'a>(
        &'a self,
        part: &Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, Params>, HalError> {
        use OptimizerOperand as O;
        let (shared, op) = (&self.shared, &self.op);
        let touched = |operand: O, width: usize, is_there: bool| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes: if is_there { part.start * width..part.end * width } else { 0..0 },
            width,
        };
        let MomentFactors { decay1, gain1, decay2, gain2, eps } = op.rule.factors();
        let moments = op.rule.kind().moments();
        let step =
            Touched { what: O::Step.name(), view: operands.get(O::Step), bytes: 0..StepFactors::BYTES, width: WORD };
        let (gradient, gradient_base) = touched(O::Gradient, op.gradient.bytes(), true).bind(shared)?;
        let (step, step_base) = step.bind(shared)?;
        let (weights, weights_base) = touched(O::Weights, WORD, true).bind_written(shared)?;
        let (moment1, moment1_base) = touched(O::Moment1, WORD, moments > 0).bind_written(shared)?;
        let (moment2, moment2_base) = touched(O::Moment2, WORD, moments > 1).bind_written(shared)?;
        let copy_width = op.copy.map_or(WORD, DType::bytes);
        let (copy, copy_base) = touched(O::Copy, copy_width, op.copy.is_some()).bind_written(shared)?;
        let shape = OptimizerShape {
            len: part.len() as u32,
            flags: if op.copy.is_some() { FLAG_COPY } else { 0 },
            gradient: dtype_code(op.gradient),
            copy: op.copy.map_or(0, dtype_code),
            decay1,
            gain1,
            decay2,
            gain2,
            eps,
            reserved: 0,
        };
        let params = Params { shape, weights_base, gradient_base, moment1_base, moment2_base, step_base, copy_base };
        let bindings = vec![gradient, step, weights, moment1, moment2, copy];
        Ok(Dispatch { params, bindings, grid: grid(part.len()) })
    }
}

impl Kernel for OptimizerKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatches: Vec<_> =
            self.parts.iter().map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, &INTERFACE, &self.compiled, &dispatches)
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::UpdateRule;

    use super::*;

    #[test]
    fn parts_are_even_and_cover_every_parameter() {
        let op = CheckedOptimizer {
            len: 1001,
            rule: UpdateRule::Sgd { momentum: 0.0 },
            gradient: DType::F32,
            copy: Some(DType::BF16),
        };
        assert_eq!(parts(&op, 1 << 20).expect("fits"), std::slice::from_ref(&(0..1001)));
        let cut = parts(&op, 1 << 10).expect("cut");
        assert!(cut.len() > 1 && cut.iter().all(|part| part.start.is_multiple_of(2)));
        assert_eq!(cut.iter().map(ExactSizeIterator::len).sum::<usize>(), 1001);
        assert!(parts(&op, 1 << 8).is_err());
        assert_eq!(grid(1 << 24), [65_535, 3, 1]);
    }
}
