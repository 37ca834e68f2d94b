//! [`LaunchSequence`]: the kernels of a plan in launch order, with their operands.
//!
//! Every backend runs its plans as such a sequence: an X
//! prologue, the product, and further steps. A step sees only the
//! operands of its kernel; each is bound to an operand of
//! the whole operation or to a part of its workspace. Kernels
//! therefore know neither their caller nor the other steps.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::caps::Math;
use crate::device::Stream;
use crate::error::HalError;
use crate::kernel_id::KernelId;
use crate::op::{Operand, OperandDesc, Operation};
use crate::operands::{MAX_OPERANDS, Operands};
use crate::profile;

/// A kernel that is ready to launch.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// Submits the kernel to `stream` with the operands of its operation.
    /// On CUDA it does not allocate, wait or lock. `qgemm_api::Plan::run`
    /// documents what other backends do.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError>;

    /// Whether a launch may cover only a
    /// [portion](Operands::take_portion) of its tokens.
    fn takes_portions(&self) -> bool {
        false
    }
}

/// Launch geometry: threads, and shared memory of each CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Grid of CTAs (wgpu workgroups, CPU
    /// blocks of rows): x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
}

/// Binding of a step's operand to an operand of the operation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Binding {
    /// Index in the step's operands.
    slot: usize,
    /// Index in the operation's operands.
    operand: usize,
    /// Byte range that the step sees; all bytes when `None`.
    range: Option<Range<usize>>,
}

/// One kernel of a sequence.
#[derive(Clone, Debug)]
pub struct LaunchStep {
    kernel_id: KernelId,
    geometry: Geometry,
    kernel: Arc<dyn Kernel>,
    slots: &'static [OperandDesc],
    bindings: Vec<Binding>,
}

impl LaunchStep {
    /// A kernel with operands of type `S`, none bound yet.
    pub fn new<S: Operand>(kernel_id: KernelId, geometry: Geometry, kernel: Arc<dyn Kernel>) -> Self {
        const { assert!(S::ALL.len() <= MAX_OPERANDS, "an operation has too many operands") };
        Self { kernel_id, geometry, kernel, slots: S::ALL, bindings: Vec::new() }
    }

    /// Binds every operand to the operation's operand of the same name,
    /// for a kernel of the operation itself.
    pub fn of_operation(mut self) -> Self {
        let all = 0..self.slots.len();
        self.bindings = all.map(|slot| Binding { slot, operand: slot, range: None }).collect();
        self
    }

    /// Binds the step's operand `slot` to `operand` of the operation.
    pub fn bind(self, slot: impl Operand, operand: impl Operand) -> Self {
        self.bound(Binding { slot: slot.slot(), operand: operand.slot(), range: None })
    }

    /// Binds each of the step's `operands` to the operation's
    /// operand in the same slot.
    pub fn bind_all(self, operands: impl IntoIterator<Item = impl Operand>) -> Self {
        operands.into_iter().fold(self, |step, operand| step.bind(operand, operand))
    }

    /// Binds the step's operand `slot` to the bytes `range` of
    /// `operand` of the operation.
    pub fn bind_part(self, slot: impl Operand, operand: impl Operand, range: Range<usize>) -> Self {
        self.bound(Binding { slot: slot.slot(), operand: operand.slot(), range: Some(range) })
    }

    /// Leaves the step's operand `slot` unbound.
    pub fn unbind(mut self, slot: impl Operand) -> Self {
        self.bindings.retain(|binding| binding.slot != slot.slot());
        self
    }

    fn bound(mut self, binding: Binding) -> Self {
        self.bindings.retain(|other| other.slot != binding.slot);
        self.bindings.push(binding);
        self.bindings.sort_by_key(|binding| binding.slot);
        self
    }

    /// The kernel's identity.
    pub fn kernel_id(&self) -> &KernelId {
        &self.kernel_id
    }

    /// Its launch geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Submits the kernel with its operands taken from
    /// those of the operation.
    pub(crate) fn launch(&self, stream: &Stream, of_operation: &mut Operands<'_>) -> Result<(), HalError> {
        self.kernel.launch(stream, self.operands(of_operation)?)
    }

    /// Whether the kernel's written bytes are not also bound
    /// to another of its operands.
    fn is_exclusive(&self) -> bool {
        let overlap = |a: &Binding, b: &Binding| match (&a.range, &b.range) {
            (Some(a), Some(b)) => a.start < b.end && b.start < a.end,
            _ => true,
        };
        let writes = |binding: &Binding| self.slots[binding.slot].access.writes();
        self.bindings.iter().enumerate().all(|(i, a)| {
            let others = self.bindings[i + 1..].iter().filter(|b| b.operand == a.operand && (writes(a) || writes(b)));
            others.into_iter().all(|b| !overlap(a, b))
        })
    }

    /// The step's operands, taken from those of the operation.
    fn operands<'s>(&self, of_operation: &'s mut Operands<'_>) -> Result<Operands<'s>, HalError> {
        let mut own = Operands::new();
        own.take_portion(of_operation.portion());
        for Binding { slot, operand, range } in &self.bindings {
            let Some((view, writable)) = of_operation.view_at(*operand) else { continue };
            let view = match range {
                Some(range) => view.slice(range.clone())?,
                None => view,
            };
            own.lend(*slot, view, writable && self.slots[*slot].access.writes());
        }
        Ok(own)
    }
}

/// The kernels of one plan.
#[derive(Clone, Debug)]
pub struct LaunchSequence {
    /// Name of the plan's kernel in tables and messages: `gemm_nt_q4_k_f16`.
    name: String,
    operands: &'static [OperandDesc],
    steps: Vec<LaunchStep>,
    /// Arithmetic, if declared.
    math: Option<Math>,
}

impl LaunchSequence {
    /// The sequence of `steps` for an operation with operands of type
    /// `O`. `name` refers to the last step.
    ///
    /// # Panics
    /// When a step writes bytes that are also bound to another
    /// of its operands: a bug of the backend.
    pub fn new<O: Operand>(name: impl Into<String>, steps: Vec<LaunchStep>) -> Self {
        assert!(steps.iter().all(LaunchStep::is_exclusive), "a step writes what it reads under another name");
        Self { name: name.into(), operands: O::ALL, steps, math: None }
    }

    /// Declares the arithmetic, for profiles.
    pub fn with_math(self, math: Math) -> Self {
        Self { math: Some(math), ..self }
    }

    /// The arithmetic, if declared.
    pub fn math(&self) -> Option<Math> {
        self.math
    }

    /// Name in tables and messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The steps in order.
    pub fn steps(&self) -> &[LaunchStep] {
        &self.steps
    }

    /// Whether a run may cover only a
    /// [portion](Operands::take_portion) of the planned tokens.
    pub fn takes_portions(&self) -> bool {
        self.steps.iter().all(|step| step.kernel.takes_portions())
    }

    /// Refuses a portion that some kernel would ignore.
    fn check_portion(&self, stream: &Stream, operands: &Operands<'_>) -> Result<(), HalError> {
        if operands.portion().is_none() || self.takes_portions() {
            return Ok(());
        }
        let why = "it is launched for as many tokens as were planned".to_owned();
        Err(HalError::Unsupported { device: stream.device(), what: self.name.clone(), why })
    }

    /// Submits every step to `stream`. The overhead is
    /// negligible beside the launches.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`], [`HalError::OutOfBounds`] when an operand is
    /// too short for a step, [`HalError::Unsupported`] for a portion that a
    /// kernel does not support, or a driver error.
    pub fn run(&self, stream: &Stream, mut operands: Operands<'_>) -> Result<(), HalError> {
        self.check_portion(stream, &operands)?;
        self.steps.iter().try_for_each(|step| step.launch(stream, &mut operands))
    }

    /// As [`LaunchSequence::run`]; a recording notes that the run was for `op`
    /// ([`record_launches`](crate::record_launches)).
    ///
    /// # Errors
    /// As [`LaunchSequence::run`].
    pub fn run_for<O: Operation>(&self, op: &O, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        if profile::is_recording() {
            self.check_portion(stream, &operands)?;
            return profile::run(self, op, stream, operands);
        }
        self.run(stream, operands)
    }
}

/// Where an operand of a sequence is found in the larger
/// operation that embeds it.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The operand of the embedded sequence.
    from: usize,
    /// The operand of the larger operation.
    to: usize,
    /// Byte range of that operand; all bytes when `None`.
    range: Option<Range<usize>>,
}

impl Placed {
    /// `from` is the whole of `to`.
    pub fn at(from: impl Operand, to: impl Operand) -> Self {
        Self { from: from.slot(), to: to.slot(), range: None }
    }

    /// `from` is the bytes `range` of `to`.
    pub fn part(from: impl Operand, to: impl Operand, range: Range<usize>) -> Self {
        Self { from: from.slot(), to: to.slot(), range: Some(range) }
    }
}

impl Binding {
    /// Rebinds its operands by `places`.
    fn placed(&self, places: &[Placed]) -> Self {
        let Some(place) = places.iter().find(|place| place.from == self.operand) else { return self.clone() };
        let range = match (&place.range, &self.range) {
            (Some(outer), Some(inner)) => Some(outer.start + inner.start..outer.start + inner.end),
            (outer, inner) => outer.as_ref().or(inner.as_ref()).cloned(),
        };
        Self { slot: self.slot, operand: place.to, range }
    }
}

impl LaunchSequence {
    /// Appends this sequence to `first`, both as parts of an
    /// operation with operands of type `O`.
    ///
    /// The places list operands that are not found under the same
    /// name. The result keeps the name of this sequence.
    ///
    /// # Panics
    /// As [`LaunchSequence::new`].
    pub fn behind<O: Operand>(self, first: Self, places_of_first: &[Placed], places: &[Placed]) -> Self {
        let placed = |steps: Vec<LaunchStep>, places: &[Placed]| {
            let step = |step: LaunchStep| {
                let bindings = step.bindings.iter().map(|binding| binding.placed(places)).collect();
                LaunchStep { bindings, ..step }
            };
            steps.into_iter().map(step).collect::<Vec<_>>()
        };
        let mut steps = placed(first.steps, places_of_first);
        steps.extend(placed(self.steps, places));
        Self { math: self.math, ..Self::new::<O>(self.name, steps) }
    }

    /// Leaves `operand` of the operation unbound in every step.
    pub fn unbind(mut self, operand: impl Operand) -> Self {
        self.steps.iter_mut().for_each(|step| step.bindings.retain(|binding| binding.operand != operand.slot()));
        self
    }

    /// The sequence under another name.
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// The sequence as text, for a run with these operands: one
    /// line for each step with identity and geometry, followed by one
    /// line for each operand with its access.
    pub fn display_with<O: Operand>(&self, given: &[O]) -> impl fmt::Display {
        let given = given.iter().fold(0u32, |set, operand| set | 1 << operand.slot());
        Described { sequence: self, given }
    }
}

/// As [`LaunchSequence::display_with`], with every operand that a step has.
impl fmt::Display for LaunchSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Described { sequence: self, given: u32::MAX }.fmt(f)
    }
}

/// A sequence with a bit set of the given
/// operands, for display.
struct Described<'s> {
    sequence: &'s LaunchSequence,
    given: u32,
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.sequence.steps.iter().enumerate() {
            let Geometry { grid: [x, y, z], threads, shared_bytes } = step.geometry;
            let line = if i > 0 { "\n" } else { "" };
            write!(f, "{line}{} <<<({x}, {y}, {z}), {threads}, {shared_bytes}>>>", step.kernel_id)?;
            for Binding { slot, operand, range } in step.bindings.iter().filter(|b| self.given >> b.operand & 1 == 1) {
                let OperandDesc { name, access } = step.slots[*slot];
                let of_operation = self.sequence.operands[*operand].name;
                write!(f, "\n  {} {name}", access.name())?;
                match range {
                    Some(range) => write!(f, " = {of_operation}[{}..{}]", range.start, range.end)?,
                    None if of_operation != name => write!(f, " = {of_operation}")?,
                    None => {}
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use qgemm_formats::DType;

    use super::*;
    use crate::kernel_id::Spec;
    use crate::noop;
    use crate::op::convert::{ConvertOperand, ConvertSpec};
    use crate::op::gemm::GemmOperand;
    use crate::operands::Portion;

    /// Records the operands it saw, and their lengths.
    #[derive(Debug, Default)]
    struct Witness(Mutex<Vec<(usize, usize, bool)>>);

    impl Kernel for Witness {
        fn launch(&self, _: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
            let mut seen = self.0.lock().expect("no test panics with it");
            for slot in 0..MAX_OPERANDS {
                seen.extend(operands.view_at(slot).map(|(view, writable)| (slot, view.len(), writable)));
            }
            Ok(())
        }
    }

    fn step(kernel: &Arc<Witness>) -> LaunchStep {
        let spec =
            ConvertSpec { x: DType::F32, d: DType::F16, transposed: false, row_factors: false, whole_groups: false };
        let geometry = Geometry { grid: [1, 2, 3], threads: 32, shared_bytes: 0 };
        LaunchStep::new::<ConvertOperand>(KernelId::new("convert", None, Spec::Convert(spec)), geometry, kernel.clone())
    }

    #[test]
    fn a_step_sees_its_part_of_the_operands() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let (x, mut workspace) = (device.allocate(16, "x").expect("memory"), device.allocate(64, "").expect("memory"));
        let kernel = Arc::new(Witness::default());
        let prologue =
            step(&kernel).bind(ConvertOperand::X, GemmOperand::X).bind(ConvertOperand::Order, GemmOperand::KOrder);
        let prologue = prologue.bind_part(ConvertOperand::D, GemmOperand::Workspace, 8..40);
        let sequence = LaunchSequence::new::<GemmOperand>("gemm_nt_f16_f16", vec![prologue]);
        let mut operands = Operands::new();
        operands.read(GemmOperand::X, (&x).into());
        operands.write(GemmOperand::Workspace, (&mut workspace).into());
        sequence.run(&device.default_stream(), operands).expect("fits");
        let (x_at, d_at) = (ConvertOperand::X.slot(), ConvertOperand::D.slot());
        assert_eq!(*kernel.0.lock().expect("not poisoned"), [(x_at, 16, false), (d_at, 32, true)]);
        let text = sequence.to_string();
        assert!(
            text.starts_with("convert:convert:-:x=f32,d=f16,transposed=false,row_factors=false,whole_groups=false <<<(1, 2, 3), 32, 0>>>"),
            "{text}"
        );
        assert!(text.contains("read x\n") && text.contains("write d = the workspace[8..40]"), "{text}");
        assert!(text.contains("the column order"), "{text}");
        let given = sequence.display_with(&[GemmOperand::X, GemmOperand::Workspace]).to_string();
        assert!(given.contains("read x\n") && !given.contains("the column order"), "{given}");
    }

    #[test]
    fn a_portion_is_refused_where_a_kernel_does_not_take_it() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let sequence = LaunchSequence::new::<GemmOperand>("x", vec![step(&Arc::default())]);
        let stream = device.default_stream();
        let mut operands = Operands::new();
        operands.take_portion(Portion::new(1, 2));
        assert!(matches!(sequence.run(&stream, operands), Err(HalError::Unsupported { .. })));
        assert!(sequence.run(&stream, Operands::new()).is_ok() && !sequence.takes_portions());
    }

    #[test]
    fn a_part_beyond_the_workspace_is_refused() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let mut workspace = device.allocate(16, "").expect("memory");
        let step = step(&Arc::default()).bind_part(ConvertOperand::D, GemmOperand::Workspace, 8..40);
        let mut operands = Operands::new();
        operands.write(GemmOperand::Workspace, (&mut workspace).into());
        let run = LaunchSequence::new::<GemmOperand>("x", vec![step]).run(&device.default_stream(), operands);
        assert!(matches!(run, Err(HalError::OutOfBounds { end: 40, len: 16, .. })), "{run:?}");
    }

    #[test]
    fn a_step_that_writes_what_it_reads_is_found() {
        let step = step(&Arc::default());
        let parts = |x, d| {
            let step = step.clone().bind_part(ConvertOperand::X, GemmOperand::Workspace, x);
            step.bind_part(ConvertOperand::D, GemmOperand::Workspace, d).is_exclusive()
        };
        assert!(parts(0..8, 8..16) && !parts(0..9, 8..16));
        assert!(step.of_operation().is_exclusive());
    }
}
