//! [`Context::load_plan`]: plans from files, each checked against what is here.

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

/// A plan from a file that fits this device, its kernels and a model. Products of it run by their `op_id`.
#[derive(Debug)]
pub struct LoadedPlan {
    pub(super) ctx: Context,
    plan: ExecPlan,
    /// A way to run it for each product of the plan, and its plan once it is made.
    products: Vec<Option<Arc<Product>>>,
}

#[derive(Debug)]
struct Product {
    candidate: Candidate,
    plan: OnceLock<Plan>,
}

impl Context {
    /// Reads the text of a plan file ([`Context::plan_model`]) and checks it against this device and its driver, the sources of its
    /// kernels, and `model`: everything that is stated twice, sizes and strides of weights among it. Compiles nothing.
    ///
    /// # Errors
    /// [`Error::BadPlanFile`]; [`Error::PlanMismatch`], which names the first thing that does not fit.
    pub fn load_plan(&self, text: &str, model: &Model) -> Result<LoadedPlan, Error> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(Error::BadPlanFile)?;
        // Before all else: of other schemas nothing is known.
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
            // Layers are alike: what was found for one serves the next.
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
    /// What the file says.
    pub fn exec_plan(&self) -> &ExecPlan {
        &self.plan
    }

    /// Memory for all of the plan but its weights.
    ///
    /// # Errors
    /// A device error such as exhausted memory.
    pub fn arena(&self) -> Result<PlanArena, Error> {
        PlanArena::new(&**self.ctx.device(), &self.plan.memory)
    }

    /// The plan of one product, with the kernel and the launch geometry that the file names. Its first call makes the kernel ready;
    /// products that are alike share it.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when there is no such operation, or it is not `gemm`, [`Error::CallersStep`] when the plan leaves it to the caller; or
    /// when the kernel cannot be made ready.
    pub fn product(&self, op_id: &str) -> Result<&Plan, Error> {
        let product = self.products[self.place(op_id)?].as_ref();
        let product = product.ok_or_else(|| Error::NotInPlan { what: "product", name: op_id.to_owned() })?;
        if let Some(plan) = product.plan.get() {
            return Ok(plan);
        }
        let plan = self.ctx.plan_candidate(&product.candidate)?;
        Ok(product.plan.get_or_init(|| plan))
    }

    /// Submits one product to `stream`, with activations, output, residual and workspace in `arena`.
    ///
    /// # Errors
    /// As [`LoadedPlan::product`] and [`Plan::run`]; [`Error::MissingOperand`] when the product has a bias and none came;
    /// [`Error::CanaryOverwritten`] when canaries are checked and one is wrong.
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
        // Where there is none, no byte of the arena stands for it.
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

    /// Submits one `gradient` to `stream`: dX through `weight`, or [`Experts`], in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when there is no such operation, or it is no `gradient`; as [`GradientPlan::run`](crate::GradientPlan::run);
    /// [`Error::CanaryOverwritten`] when canaries are checked and one is wrong.
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

    /// Submits one `routing` to `stream`: logits to ids and router weights, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when there is no such operation, or it is no `routing`; as [`RoutingPlan::run`](crate::RoutingPlan::run);
    /// [`Error::CanaryOverwritten`] when canaries are checked and one is wrong.
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

    /// Submits one `experts` to `stream`: rows by the ids that a `routing` wrote, or sorted rows by their offsets, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when there is no such operation, or it is no `experts`; as [`ExpertPlan::run`](crate::ExpertPlan::run);
    /// [`Error::CanaryOverwritten`] when canaries are checked and one is wrong.
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

    /// Submits one `matmul` to `stream`: the gradient of a weight, in `arena`.
    ///
    /// # Errors
    /// [`Error::NotInPlan`] when there is no such operation, or it is no `matmul`; as [`MatmulPlan::run`](crate::MatmulPlan::run);
    /// [`Error::CanaryOverwritten`] when canaries are checked and one is wrong.
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

    /// Looks at the canaries of all regions that live during operation `op_id`, where they are checked: after work of the caller's own.
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
