//! Plan loader ([`Context::load_plan`]): checks a file against this device and model.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use qgemm_formats::model::Model;
use qgemm_hal::Stream;

use super::arena::{PlanArena, Regions};
use super::check::{OpChecks, check_device, check_memory, check_names};
use super::file::{EXEC_SCHEMA, ExecPlan, MEMORY_SCHEMA, PlannedOp};
use super::mismatch::expect;
use super::ready::{Kernels, Ready};
use crate::architecture::{NAMES, fingerprint};
use crate::context::Context;
use crate::error::Error;
use crate::gemm::Plan;
use crate::prepare::{self, PrepareLimits};
use crate::record::DeviceRecord;

/// Plan from a file, valid for this device, its kernels and a model. Its
/// operations run by `op_id`.
#[derive(Debug)]
pub struct LoadedPlan {
    pub(super) ctx: Context,
    plan: ExecPlan,
    /// Kernels of each operation.
    kernels: Vec<Arc<Kernels>>,
    pub(super) regions: Arc<Regions>,
    /// Whether the other ranks are known to have this plan's collectives.
    pub(super) is_agreed: AtomicBool,
}

impl Context {
    /// Parses a plan file ([`Context::plan_model`]) and checks it against this device,
    /// its driver, kernel sources and `model`.
    ///
    /// The check covers all redundant values, including sizes and strides of
    /// weights. It compiles nothing.
    ///
    /// # Errors
    /// [`Error::BadPlanFile`]. [`Error::PlanMismatch`] names the first difference.
    pub fn load_plan(&self, text: &str, model: &Model) -> Result<LoadedPlan, Error> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(Error::BadPlanFile)?;
        // Checked first: other schemas are unknown.
        let schema = |at: &str, value: &serde_json::Value, expected: &str| {
            expect(at, expected, value.get("schema").and_then(|v| v.as_str()).unwrap_or("none"))
        };
        schema("schema", &value, EXEC_SCHEMA)?;
        schema("memory.schema", value.get("memory").unwrap_or(&serde_json::Value::Null), MEMORY_SCHEMA)?;
        self.load_exec_plan(serde_json::from_value(value).map_err(Error::BadPlanFile)?, model)
    }

    /// [`Context::load_plan`] for a plan that was not read from a file.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`] names the first difference.
    pub fn load_exec_plan(&self, plan: ExecPlan, model: &Model) -> Result<LoadedPlan, Error> {
        check_device(&plan.runtime.device, &DeviceRecord::of(self.info()))?;
        if !NAMES.contains(&plan.model.architecture.as_str()) {
            return Err(Error::UnknownArchitecture { architecture: plan.model.architecture, served: NAMES });
        }
        expect("model.tensors", fingerprint(model), &plan.model.tensors)?;
        self.check_ranks(&plan)?;
        check_memory(&plan.memory, plan.ops.len())?;
        check_names(&plan, model)?;
        let mut kernels: Vec<Arc<Kernels>> = Vec::with_capacity(plan.ops.len());
        for (place, op) in plan.ops.iter().enumerate() {
            // Layers are alike: one check serves all of them.
            let alike = plan.ops[..place].iter().rposition(|other| other.is_alike(op));
            let known = alike.and_then(|place| kernels.get(place).cloned());
            let checks = OpChecks { ctx: self, place, at: format!("ops[{place}] ({})", op.op_id), op };
            kernels.push(match known {
                Some(known) => {
                    checks.regions(&plan.memory)?;
                    known
                }
                None => Arc::new(Kernels::new(checks.all(&plan.memory)?)),
            });
        }
        let regions = Arc::new(Regions::new(&plan.memory));
        Ok(LoadedPlan { ctx: self.clone(), plan, kernels, regions, is_agreed: AtomicBool::new(false) })
    }
}

impl LoadedPlan {
    /// Contents of the file.
    pub fn exec_plan(&self) -> &ExecPlan {
        &self.plan
    }

    /// Allocates all memory of the plan except weights.
    ///
    /// # Errors
    /// A device error such as out of memory.
    pub fn arena(&self) -> Result<PlanArena, Error> {
        PlanArena::new(&**self.ctx.device(), &self.regions, 0)
    }

    /// [`LoadedPlan::arena`] with memory for `others`, too, which can
    /// [enter](LoadedPlan::enter) it.
    ///
    /// # Errors
    /// A device error such as out of memory.
    pub fn arena_beside(&self, others: &[&Self]) -> Result<PlanArena, Error> {
        let bytes = others.iter().map(|other| other.regions.bytes()).max().unwrap_or(0);
        PlanArena::new(&**self.ctx.device(), &self.regions, bytes)
    }

    /// Makes the arena of another plan of the model that of this one, such as a prompt's that
    /// of a decoding step. KV caches and recurrent states keep their contents, nothing else does:
    /// `stream` clears the workspace. Nothing happens in an arena that is this plan's already.
    ///
    /// # Errors
    /// [`Error::PlanMismatch`] when the caches differ in name, place or size;
    /// [`Error::BufferTooShort`] when the memory is too short
    /// ([`LoadedPlan::arena_beside`] makes enough). The arena is as before then.
    pub fn enter(&self, stream: &Stream, arena: &mut PlanArena) -> Result<(), Error> {
        arena.take_regions(&**self.ctx.device(), stream, &self.regions)
    }

    /// Fills the recurrent states of a slot with zeros, for a sequence that begins. A state cannot
    /// be rewound: a sequence that goes back begins again. Nothing happens in a plan without
    /// such states.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a slot beyond the plan's slots; [`Error::NotInPlan`] in the arena of
    /// another model; a device error.
    pub fn clear_slot(&self, stream: &Stream, arena: &mut PlanArena, slot: usize) -> Result<(), Error> {
        let mut states = self.plan.ops.iter().filter_map(PlannedOp::state);
        states.try_for_each(|state| arena.clear_slot(&**self.ctx.device(), stream, state, slot))
    }

    /// Byte range of a mutable region in the memory of an arena
    /// ([`PlanArena::into_memory`]).
    ///
    /// # Errors
    /// [`Error::NotInPlan`].
    pub fn region_range(&self, name: &str) -> Result<Range<usize>, Error> {
        self.regions.range(name)
    }

    /// Makes the kernels of all operations ready, in parallel. Otherwise the first run of each
    /// operation does.
    ///
    /// # Errors
    /// When a kernel cannot be made ready.
    pub fn prepare(&self) -> Result<(), Error> {
        self.prepare_within(PrepareLimits::default(), |_, _| ()).map(drop)
    }

    /// [`LoadedPlan::prepare`] within limits, as [`Context::prepare_within`]. After each operation
    /// `progress` receives the number of those made ready, and of those to make ready: operations
    /// with the same kernels count once. Returns the former.
    ///
    /// # Errors
    /// When a kernel cannot be made ready.
    pub fn prepare_within(
        &self,
        limits: PrepareLimits,
        mut progress: impl FnMut(usize, usize) + Send,
    ) -> Result<usize, Error> {
        let mut places = Vec::new();
        for (place, kernels) in self.kernels.iter().enumerate().filter(|(_, kernels)| !kernels.is_ready()) {
            if !places.iter().any(|&other: &usize| Arc::ptr_eq(&self.kernels[other], kernels)) {
                places.push(place);
            }
        }
        let make = |i: usize| self.ready(places[i]).map(|_| self.plan.ops[places[i]].op_id.as_str());
        prepare::in_parallel(places.len(), limits, make, |done| progress(done, places.len()))
    }

    /// Plan of one product, with the kernel and launch geometry of the file. The first call
    /// makes the kernel ready. Equal products share it.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is no `gemm`.
    /// [`Error::CallersStep`] when it is a caller's step. Or when the
    /// kernel cannot be made ready.
    pub fn product(&self, op_id: &str) -> Result<&Plan, Error> {
        let place = self.place(op_id)?;
        let not_one = || Error::NotInPlan { what: "product", name: op_id.to_owned() };
        self.kernels[place].candidate.as_ref().ok_or_else(not_one)?;
        match self.ready(place)? {
            Ready::Gemm(plan) => Ok(plan),
            _ => Err(not_one()),
        }
    }

    /// Checks the canaries of regions live during `op_id`, if enabled. For use
    /// after the caller's own work.
    ///
    /// # Errors
    /// [`Error::CanaryOverwritten`], [`Error::NotInPlan`], or a device error.
    pub fn check_canaries(&self, stream: &Stream, op_id: &str, arena: &PlanArena) -> Result<(), Error> {
        self.place(op_id)?;
        arena.check(&**self.ctx.device(), stream, op_id)
    }

    /// Plan of the operation at `place`.
    pub(super) fn ready(&self, place: usize) -> Result<&Ready, Error> {
        self.kernels[place].ready(&self.ctx, &self.plan.ops[place])
    }

    /// Place of an operation.
    pub(super) fn place(&self, op_id: &str) -> Result<usize, Error> {
        let place = self.plan.ops.iter().position(|op| op.op_id == op_id);
        place.ok_or_else(|| {
            let step = op_id.to_owned();
            let is_callers = self.plan.barriers.iter().any(|barrier| barrier.step.as_deref() == Some(op_id));
            if is_callers { Error::CallersStep { step } } else { Error::NotInPlan { what: "operation", name: step } }
        })
    }
}
