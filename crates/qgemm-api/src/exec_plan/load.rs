//! Plan loader ([`Context::load_plan`]): checks a file against this device and model.

use std::sync::{Arc, OnceLock};

use qgemm_formats::model::Model;
use qgemm_hal::{Buffer, BufferRef, Stream};

use super::architecture::{SERVED, fingerprint};
use super::arena::PlanArena;
use super::check::{OpChecks, check_device, check_memory, check_names, expect};
use super::file::{EXEC_SCHEMA, ExecPlan, MEMORY_SCHEMA, PlannedOp};
use crate::context::Context;
use crate::error::Error;
use crate::experts::{ExpertArgs, ExpertProblem, Experts};
use crate::gemm::{Args, Candidate, Plan};
use crate::gradient::{GradientInputs, GradientWeight};
use crate::matmul::MatmulArgs;
use crate::record::DeviceRecord;
use crate::routing::RoutingArgs;
use crate::weight::Weight;

/// Plan from a file, valid for this device, its kernels and a model. Its
/// operations run by `op_id`.
#[derive(Debug)]
pub struct LoadedPlan {
    pub(super) ctx: Context,
    plan: ExecPlan,
    /// Candidate of each product, with its plan once made.
    products: Vec<Option<Arc<Product>>>,
}

#[derive(Debug)]
struct Product {
    candidate: Candidate,
    plan: OnceLock<Plan>,
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
        let plan: ExecPlan = serde_json::from_value(value).map_err(Error::BadPlanFile)?;
        check_device(&plan.runtime.device, &DeviceRecord::of(self.info()))?;
        if !SERVED.contains(&plan.model.architecture.as_str()) {
            return Err(Error::UnknownArchitecture { architecture: plan.model.architecture, served: SERVED });
        }
        expect("model.tensors", fingerprint(model), &plan.model.tensors)?;
        check_memory(&plan.memory, plan.ops.len())?;
        check_names(&plan, model)?;
        let mut products: Vec<Option<Arc<Product>>> = Vec::with_capacity(plan.ops.len());
        for (place, op) in plan.ops.iter().enumerate() {
            // Layers are alike: one check serves all of them.
            let alike = plan.ops[..place].iter().rposition(|other| other.is_alike(op));
            let known = alike.and_then(|place| products.get(place).cloned());
            let checks = OpChecks { ctx: self, place, at: format!("ops[{place}] ({})", op.op_id), op };
            let product = match known {
                Some(known) => {
                    checks.regions(&plan.memory)?;
                    known
                }
                None => {
                    checks.all(&plan.memory)?.map(|candidate| Arc::new(Product { candidate, plan: OnceLock::new() }))
                }
            };
            products.push(product);
        }
        Ok(LoadedPlan { ctx: self.clone(), plan, products })
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
        PlanArena::new(&**self.ctx.device(), &self.plan.memory)
    }

    /// Plan of one product, with the kernel and launch geometry of the file. The first call
    /// makes the kernel ready. Equal products share it.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is no `gemm`.
    /// [`Error::CallersStep`] when it is a caller's step. Or when the
    /// kernel cannot be made ready.
    pub fn product(&self, op_id: &str) -> Result<&Plan, Error> {
        let product = self.products[self.place(op_id)?].as_ref();
        let product = product.ok_or_else(|| Error::NotInPlan { what: "product", name: op_id.to_owned() })?;
        if let Some(plan) = product.plan.get() {
            return Ok(plan);
        }
        let plan = self.ctx.plan_candidate(&product.candidate)?;
        Ok(product.plan.get_or_init(|| plan))
    }

    /// Submits one product to `stream`. X, D, residual and workspace are in `arena`.
    ///
    /// # Errors
    /// As [`LoadedPlan::product`] and [`Plan::run`]. [`Error::MissingOperand`] when the
    /// bias is missing. [`Error::CanaryOverwritten`] by canary checks.
    pub fn run(
        &self,
        stream: &Stream,
        op_id: &str,
        arena: &mut PlanArena,
        weight: &Weight,
        bias: Option<&Buffer>,
    ) -> Result<(), Error> {
        let (place, product) = (self.place(op_id)?, self.product(op_id)?);
        let (op, device) = (&self.plan.ops[place], self.ctx.device());
        arena.arm(&**device, stream, place)?;
        let (x, d) = (arena.range(&op.x)?, arena.range(&op.d)?);
        // An absent residual is an empty range.
        let residual = op.residual.as_deref().map_or(Ok(0..0), |name| arena.range(name))?;
        let workspace = arena.workspace(op.workspace_bytes)?;
        let ([x, residual], [d, workspace]) = arena.parts([x, residual], [d, workspace])?;
        let args = Args {
            residual: op.residual.is_some().then_some(residual),
            bias: bias.map(BufferRef::from),
            ..Args::new(x, weight, d)
        };
        product.run_within(stream, args, Some(workspace))?;
        arena.check(&**device, stream, op_id)
    }

    /// Submits one `gradient` (dX through a [`Weight`](crate::Weight) or [`Experts`])
    /// to `stream`, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is no
    /// `gradient`. As [`GradientPlan::run`](crate::GradientPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_gradient<'w>(
        &self,
        stream: &Stream,
        op_id: &str,
        arena: &mut PlanArena,
        weight: impl Into<GradientWeight<'w>>,
    ) -> Result<(), Error> {
        let weight = weight.into();
        let (place, op) = self.operation(op_id, "gradient")?;
        let plan = self.ctx.plan_gradient(weight, &op.as_gradient()?)?;
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let workspace = arena.workspace(plan.workspace_bytes())?;
        let read = [arena.range(&op.x)?, arena.given(&op.offsets)?];
        let ([dy, offsets], [dx, workspace]) = arena.parts(read, [arena.range(&op.d)?, workspace])?;
        let offsets = op.offsets.is_some().then_some(offsets);
        plan.run_within(stream, GradientInputs { dy, weight, offsets }, dx, Some(workspace))?;
        arena.check(device, stream, op_id)
    }

    /// Submits one `routing` (logits to ids and router weights) to `stream`, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is
    /// no `routing`. As [`RoutingPlan::run`](crate::RoutingPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_routing(&self, stream: &Stream, op_id: &str, arena: &mut PlanArena) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "routing")?;
        let plan = self.ctx.plan_routing(&op.as_routing())?;
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let [ids, weights, status] =
            [&op.ids, &op.router_weights, &op.status].map(|name| arena.range(name.as_deref().unwrap_or_default()));
        let workspace = arena.workspace(plan.workspace_bytes())?;
        let ([logits], [ids, weights, status, workspace]) =
            arena.parts([arena.range(&op.x)?], [ids?, weights?, status?, workspace])?;
        plan.run_within(stream, RoutingArgs::of_logits(logits, ids, weights, status), Some(workspace))?;
        arena.check(device, stream, op_id)
    }

    /// Submits one `experts` to `stream`, in `arena`. Rows are selected by a routing's
    /// ids, or sorted with offsets.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is
    /// no `experts`. As [`ExpertPlan::run`](crate::ExpertPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_experts(
        &self,
        stream: &Stream,
        op_id: &str,
        arena: &mut PlanArena,
        experts: &Experts,
    ) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "experts")?;
        let (tokens, top_k) = op.slots();
        let stated = OpChecks { ctx: &self.ctx, place, at: op_id.to_owned(), op };
        let problem = match op.offsets {
            Some(_) => ExpertProblem::contiguous(experts, op.shape.m),
            None => ExpertProblem::indexed(experts, tokens, top_k),
        };
        let plan = self.ctx.plan_experts(&stated.expert_problem(problem)?)?;
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let given = |name: &Option<String>| arena.given(name);
        let index = if op.offsets.is_some() { &op.offsets } else { &op.ids };
        let read = [arena.range(&op.x)?, given(index)?, given(&op.router_weights)?, given(&op.residual)?];
        let write = [arena.range(&op.d)?, given(&op.status)?, arena.workspace(plan.workspace_bytes())?];
        let ([x, index, weights, residual], [d, status, workspace]) = arena.parts(read, write)?;
        let args = ExpertArgs {
            router_weights: op.router_weights.is_some().then_some(weights),
            residual: op.residual.is_some().then_some(residual),
            status: Some(status),
            ..ExpertArgs::new(x, experts, index, d)
        };
        plan.run_within(stream, args, Some(workspace))?;
        arena.check(device, stream, op_id)
    }

    /// Submits one `matmul` (the gradient of a weight) to `stream`, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when the operation does not exist or is
    /// no `matmul`. As [`MatmulPlan::run`](crate::MatmulPlan::run).
    /// [`Error::CanaryOverwritten`] by canary checks.
    pub fn run_matmul(&self, stream: &Stream, op_id: &str, arena: &mut PlanArena) -> Result<(), Error> {
        let (place, op) = self.operation(op_id, "matmul")?;
        let plan = self.ctx.plan_matmul(&op.as_matmul()?)?;
        let device = &**self.ctx.device();
        arena.arm(device, stream, place)?;
        let b = arena.range(op.b.as_deref().unwrap_or_default())?;
        let workspace = arena.workspace(plan.workspace_bytes())?;
        let read = [arena.range(&op.x)?, b, arena.given(&op.offsets)?];
        let ([a, b, offsets], [d, workspace]) = arena.parts(read, [arena.range(&op.d)?, workspace])?;
        let offsets = op.offsets.is_some().then_some(offsets);
        plan.run_within(stream, MatmulArgs { offsets, ..MatmulArgs::new(a, b, d) }, Some(workspace))?;
        arena.check(device, stream, op_id)
    }

    pub(super) fn operation(&self, op_id: &str, operation: &'static str) -> Result<(usize, &PlannedOp), Error> {
        let place = self.place(op_id)?;
        let op = &self.plan.ops[place];
        let fits = op.operation == operation;
        if fits { Ok((place, op)) } else { Err(Error::NotInPlan { what: operation, name: op_id.to_owned() }) }
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

    fn place(&self, op_id: &str) -> Result<usize, Error> {
        let place = self.plan.ops.iter().position(|op| op.op_id == op_id);
        place.ok_or_else(|| {
            let step = op_id.to_owned();
            let is_callers = self.plan.barriers.iter().any(|barrier| barrier.step.as_deref() == Some(op_id));
            if is_callers { Error::CallersStep { step } } else { Error::NotInPlan { what: "operation", name: step } }
        })
    }
}
