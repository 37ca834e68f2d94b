//! [`Context::load_plan`]: plans from files, each checked against what is here.

use std::fmt::Display;
use std::sync::{Arc, OnceLock};

use qgemm_formats::model::Model;
use qgemm_formats::{DType, Format};
use qgemm_hal::{Activation, Buffer, BufferRef, DeviceKind, Stream};

use super::architecture::{SERVED, fingerprint};
use super::arena::PlanArena;
use super::backward::weight_gradient;
use super::file::{EXEC_SCHEMA, ExecPlan, MEMORY_SCHEMA, MemoryPlan, PlannedOp, PlannedWeight, Region, RegionKind};
use super::layout::overlap;
use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::experts::{ExpertArgs, ExpertProblem, Experts};
use crate::gemm::{Args, Candidate, Plan, Problem};
use crate::gradient::{Gradient, GradientInputs, GradientWeight, ThroughShape};
use crate::matmul::{Matmul, MatmulArgs};
use crate::record::{DeviceRecord, Dispatch, PlanRecord, Reduction, Sizes};
use crate::routing::{Routing, RoutingArgs};
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
        let mut products: Vec<Option<Arc<Product>>> = Vec::with_capacity(plan.ops.len());
        for (place, op) in plan.ops.iter().enumerate() {
            // Layers are alike: what was found for one serves the next.
            let alike = plan.ops[..place].iter().rposition(|other| is_alike(other, op));
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
        let plan = self.ctx.plan_gradient(weight, &gradient(op)?)?;
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
        let plan = self.ctx.plan_routing(&routing(op))?;
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
        let (tokens, top_k) = slots_of(op);
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
        let plan = self.ctx.plan_matmul(&matmul(op)?)?;
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

/// Name of the workspace's region.
pub(super) const WORKSPACE: &str = "workspace";

/// That the file says what is here.
fn expect(at: impl Display, expected: impl Display, got: impl Display) -> Result<(), Error> {
    let (expected, got) = (expected.to_string(), got.to_string());
    if expected == got { Ok(()) } else { Err(Error::PlanMismatch { at: at.to_string(), expected, got }) }
}

/// That a plan is for this device. One for a chip's description fits every device with that chip's instructions and size.
fn check_device(planned: &DeviceRecord, here: &DeviceRecord) -> Result<(), Error> {
    let text = |variant: &Option<String>| variant.clone().unwrap_or_else(|| "none".into());
    expect("runtime.device.arch", &here.arch, &planned.arch)?;
    expect("runtime.device.variant", text(&here.variant), text(&planned.variant))?;
    expect("runtime.device.units", here.units, planned.units)?;
    let is_description = planned.id.starts_with(DeviceKind::Emu.name());
    if !is_description {
        expect("runtime.device.name", &here.name, &planned.name)?;
        expect("runtime.device.driver", &here.driver, &planned.driver)?;
    }
    Ok(())
}

/// That regions are within the arena, aligned, and apart.
fn check_memory(memory: &MemoryPlan, ops: usize) -> Result<(), Error> {
    let wrong = |at: String, expected: String, got: String| Err(Error::PlanMismatch { at, expected, got });
    if !memory.alignment.is_power_of_two() || memory.alignment < 256 {
        return wrong("memory.alignment".into(), "a power of two from 256 on".into(), memory.alignment.to_string());
    }
    if memory.weights_end > memory.arena_bytes {
        let limit = format!("at most {}", memory.arena_bytes);
        return wrong("memory.weights_end".into(), limit, memory.weights_end.to_string());
    }
    for region in &memory.regions {
        let at = |field: &str| format!("memory.regions ({}).{field}", region.name);
        let Region { offset, bytes, reserved, first_op, last_op, .. } = *region;
        if !offset.is_multiple_of(memory.alignment) {
            return wrong(at("offset"), format!("a multiple of {}", memory.alignment), offset.to_string());
        }
        if bytes.checked_add(memory.canary_bytes).is_none_or(|least| least > reserved) {
            return wrong(at("reserved"), format!("{bytes} bytes and a canary"), reserved.to_string());
        }
        let end = if region.kind == RegionKind::Weight { memory.weights_end } else { memory.arena_bytes };
        if offset.checked_add(reserved).is_none_or(|last| last > end) {
            return wrong(at("offset"), format!("an end of at most {end}"), offset.to_string());
        }
        if region.kind != RegionKind::Weight && offset < memory.weights_end {
            return wrong(at("offset"), format!("{} or more", memory.weights_end), offset.to_string());
        }
        if first_op > last_op || last_op >= ops {
            return wrong(at("last_op"), format!("{first_op} to {}", ops.saturating_sub(1)), last_op.to_string());
        }
    }
    // Nothing is allocated by a number that no region accounts for.
    let last = memory.regions.iter().map(|region| region.offset + region.reserved).max();
    expect("memory.arena_bytes", last.unwrap_or(0), memory.arena_bytes)?;
    match overlap(&memory.regions) {
        None => Ok(()),
        Some((a, b)) => wrong(
            format!("memory.regions ({})", b.name),
            format!("no byte of `{}`, which lives at the same time", a.name),
            format!("offset {}", b.offset),
        ),
    }
}

/// Whether two operations are the same but for names and regions.
fn is_alike(a: &PlannedOp, b: &PlannedOp) -> bool {
    let weight = |w: &Option<PlannedWeight>| {
        w.as_ref().map(|w| PlannedWeight { region: String::new(), tensors: Vec::new(), ..w.clone() })
    };
    let types = |op: &PlannedOp| {
        [&op.x_dtype, &op.x_precision, &op.d_dtype, &op.activation]
            .map(String::clone)
            .into_iter()
            .chain(op.bias_dtype.clone())
            .collect::<Vec<_>>()
    };
    let same_options = |a: &Option<String>, b: &Option<String>| a.is_some() == b.is_some();
    (&a.operation, &a.kernel_id, &a.source_hash, a.shape) == (&b.operation, &b.kernel_id, &b.source_hash, b.shape)
        && types(a) == types(b)
        && same_options(&a.residual, &b.residual)
        && same_options(&a.offsets, &b.offsets)
        && a.products == b.products
        && a.b_dtype == b.b_dtype
        && same_options(&a.router_weights, &b.router_weights)
        && (a.top_k, &a.dispatch, &a.reduction) == (b.top_k, &b.dispatch, &b.reduction)
        && a.workspace_bytes == b.workspace_bytes
        && weight(&a.weight) == weight(&b.weight)
        && a.numbers_between() == b.numbers_between()
}

/// The description of a `gradient`.
fn gradient(op: &PlannedOp) -> Result<Gradient, Error> {
    let gradient = Gradient::new(op.shape.m, op.x_dtype.parse()?, op.d_dtype.parse()?);
    Ok(if op.residual.is_some() { gradient.accumulate(1.0) } else { gradient })
}

/// The description of a `routing`.
fn routing(op: &PlannedOp) -> Routing {
    Routing::from_logits(op.shape.m, op.shape.n, op.top_k.unwrap_or(0), DType::F32).renormalized()
}

/// Tokens of an operation of experts, and slots of each.
fn slots_of(op: &PlannedOp) -> (usize, usize) {
    let top_k = op.top_k.unwrap_or(0);
    (op.shape.m.checked_div(top_k).unwrap_or(0), top_k)
}

/// The description of a `matmul`.
fn matmul(op: &PlannedOp) -> Result<Matmul, Error> {
    let Sizes { m, n, k } = op.shape;
    let b = op.b_dtype.as_deref().ok_or_else(|| Error::NotInPlan { what: "type of B of", name: op.op_id.clone() })?;
    Ok(weight_gradient([m, n, k], op.products, op.x_dtype.parse()?, b.parse()?))
}

/// Checks one operation.
struct OpChecks<'a> {
    ctx: &'a Context,
    place: usize,
    at: String,
    op: &'a PlannedOp,
}

impl OpChecks<'_> {
    fn expect(&self, field: &str, expected: impl Display, got: impl Display) -> Result<(), Error> {
        expect(format!("{}.{field}", self.at), expected, got)
    }

    /// Everything. The way to run it, of a product.
    fn all(&self, memory: &MemoryPlan) -> Result<Option<Candidate>, Error> {
        let op = self.op;
        let found = match (op.operation.as_str(), &op.weight) {
            ("gemm", Some(weight)) => Some(self.product(weight)?),
            ("experts", Some(weight)) => {
                self.experts(weight)?;
                None
            }
            ("routing", None) => {
                self.record(&self.ctx.explain_routing(&routing(op))?)?;
                None
            }
            ("gradient", Some(weight)) => {
                let (described, gradient) = (self.weight(weight)?, gradient(op)?);
                let (through, bytes) = match weight.experts {
                    Some(experts) => {
                        let experts = described.experts(experts)?;
                        (ThroughShape::from(*experts.shape()), experts.bytes())
                    }
                    None => ((*described.shape()).into(), described.bytes()),
                };
                self.expect("weight.bytes", bytes, weight.bytes)?;
                self.record(&self.ctx.explain_gradient_by(&through, &gradient)?)?;
                None
            }
            ("matmul", None) => {
                self.record(&self.ctx.explain_matmul(&matmul(op)?)?)?;
                None
            }
            ("norm", None) => {
                self.record(&self.ctx.explain_norm(&op.as_norm()?)?)?;
                None
            }
            ("kv_append", None) => {
                self.record(&self.ctx.explain_kv_append(&op.as_kv_append()?)?)?;
                None
            }
            ("attention", None) => {
                self.record(&self.ctx.explain_attention(&op.as_attention()?)?)?;
                None
            }
            ("optimizer", None) => {
                self.record(&self.ctx.explain_optimizer(&op.as_optimizer()?)?)?;
                None
            }
            (operation, _) => {
                const KNOWN: &str = "gemm, experts or gradient with a weight, matmul, routing, norm, kv_append, attention, or optimizer";
                self.expect("operation", KNOWN, operation)?;
                None
            }
        };
        self.regions(memory)?;
        Ok(found)
    }

    /// The weight as it would be on this device.
    fn weight(&self, weight: &PlannedWeight) -> Result<DescribedWeight, Error> {
        let format: Format = weight.format.parse()?;
        let Sizes { n, k, .. } = self.op.shape;
        let (n, k) = if self.op.operation == "gradient" { (k, n) } else { (n, k) };
        let described = self.ctx.describe_weight(format, n, k)?;
        let described = if weight.row_scale { described.row_scaled() } else { described };
        let described = if weight.k_order { described.permuted() } else { described };
        let described = if weight.gated { described.gated()? } else { described };
        self.expect("weight.row_bytes", format.row_bytes(k), weight.row_bytes)?;
        self.expect("weight.layout", format!("{:?}", described.shape().class), &weight.layout)?;
        Ok(described)
    }

    fn state(&self, problem: Problem) -> Result<Problem, Error> {
        let op = self.op;
        let (x, d): (DType, DType) = (op.x_dtype.parse()?, op.d_dtype.parse()?);
        let known = Activation::ALL.into_iter().find(|activation| activation.name() == op.activation);
        let names = || Activation::ALL.map(Activation::name).join(", ");
        let activation = known.ok_or_else(|| Error::PlanMismatch {
            at: format!("{}.activation", self.at),
            expected: format!("one of {}", names()),
            got: op.activation.clone(),
        })?;
        let problem = problem.x_dtype(x).d_dtype(d).x_precision(op.x_precision.parse()?).activation(activation);
        let problem = match &op.bias_dtype {
            Some(dtype) => problem.bias(dtype.parse()?),
            None => problem,
        };
        Ok(if op.residual.is_some() { problem.residual(d) } else { problem })
    }

    fn product(&self, weight: &PlannedWeight) -> Result<Candidate, Error> {
        let (op, described) = (self.op, self.weight(weight)?);
        self.expect("weight.bytes", described.bytes(), weight.bytes)?;
        let problem = self.state(described.problem(op.shape.m))?;
        let all = self.ctx.candidates(&problem)?;
        let of_kernel: Vec<&Candidate> = all.iter().filter(|c| c.kernel_id().to_string() == op.kernel_id).collect();
        let Some(&first) = of_kernel.first() else {
            let kernels = all.len();
            self.expect("kernel_id", format!("one of {kernels} that the device has for it"), &op.kernel_id)?;
            return Err(Error::NotInPlan { what: "kernel", name: op.kernel_id.clone() });
        };
        self.expect("source_hash", format!("{:016x}", first.source_hash()), &op.source_hash)?;
        let found = of_kernel.iter().find(|c| Some(Dispatch::of(c.launch())) == op.dispatch);
        let Some(&found) = found else {
            let got =
                op.dispatch.as_ref().map_or("none".into(), |d| format!("a grid of {:?}", d.grid.unwrap_or_default()));
            let expected = format!("one of {} ways to share its tiles", of_kernel.len());
            return Err(Error::PlanMismatch { at: format!("{}.dispatch", self.at), expected, got });
        };
        self.expect("workspace_bytes", found.launch().workspace.bytes, op.workspace_bytes)?;
        let reduction = |reduction: &Option<Reduction>| format!("{reduction:?}");
        self.expect("reduction", reduction(&Some(Reduction::of(found.launch()))), reduction(&op.reduction))?;
        Ok(found.clone())
    }

    fn experts(&self, weight: &PlannedWeight) -> Result<(), Error> {
        let (op, described) = (self.op, self.weight(weight)?.experts(weight.experts.unwrap_or(0))?);
        self.expect("weight.bytes", described.bytes(), weight.bytes)?;
        let (tokens, top_k) = slots_of(op);
        let problem = match op.offsets {
            Some(_) => described.contiguous(op.shape.m),
            None => described.indexed(tokens, top_k),
        };
        self.record(&self.ctx.explain_experts(&self.expert_problem(problem)?)?)
    }

    /// Rows of experts with all that the operation states.
    fn expert_problem(&self, problem: ExpertProblem) -> Result<ExpertProblem, Error> {
        let mut stated = Ok(());
        let problem = problem.each(|each| match self.state(each.clone()) {
            Ok(each) => each,
            Err(error) => {
                stated = Err(error);
                each
            }
        });
        stated?;
        Ok(if self.op.router_weights.is_some() { problem.x_per_slot().combined() } else { problem })
    }

    /// That the operation would still be planned so.
    fn record(&self, record: &PlanRecord) -> Result<(), Error> {
        self.expect("kernel_id", record.kernel_id.as_deref().unwrap_or("none"), &self.op.kernel_id)?;
        self.expect("source_hash", record.source_hash.as_deref().unwrap_or("none"), &self.op.source_hash)?;
        let sharing =
            |dispatch: &Option<Dispatch>, reduction: &Option<Reduction>| format!("{dispatch:?}, {reduction:?}");
        let here = sharing(&record.dispatch, &record.reduction);
        self.expect("dispatch", here, sharing(&self.op.dispatch, &self.op.reduction))?;
        self.expect("workspace_bytes", record.workspace_bytes, self.op.workspace_bytes)
    }

    /// That its operands have regions which are long enough and live.
    fn regions(&self, memory: &MemoryPlan) -> Result<(), Error> {
        let op = self.op;
        let place = self.place;
        let check = |field: &str, name: &str, least: Option<usize>| {
            let region = memory.regions.iter().find(|region| region.name == name);
            let Some(region) = region else { return self.expect(field, "the name of a region", name) };
            let Some(least) = least else { return self.expect(field, "a size", "one that overflows") };
            if region.bytes < least {
                let at = format!("memory.regions ({name}).bytes");
                return Err(Error::PlanMismatch {
                    at,
                    expected: format!("{least} or more"),
                    got: region.bytes.to_string(),
                });
            }
            match (region.first_op..=region.last_op).contains(&place) {
                true => Ok(()),
                false => self.expect(field, format!("a region that lives in operation {place}"), name),
            }
        };
        let matrix = |rows: usize, columns: usize, dtype: &str| -> Option<usize> {
            rows.checked_mul(columns)?.checked_mul(if dtype == "i32" {
                4
            } else {
                dtype.parse::<DType>().ok()?.bytes()
            })
        };
        let (m, n, k) = (op.shape.m, op.shape.n, op.shape.k);
        let tokens = m / op.top_k.unwrap_or(1).max(1);
        let is_combined = op.router_weights.is_some();
        let (x, d) = match (op.operation.as_str(), is_combined) {
            ("matmul", _) => {
                let rows = m.checked_mul(op.products.unwrap_or(1));
                (matrix(m, k, &op.x_dtype), rows.and_then(|rows| matrix(rows, n, &op.d_dtype)))
            }
            ("experts", true) => (matrix(m, k, &op.x_dtype), matrix(tokens, n, &op.d_dtype)),
            ("experts", false) => (matrix(tokens, k, &op.x_dtype), matrix(m, n, &op.d_dtype)),
            ("routing", _) => (matrix(m, n, &op.x_dtype), matrix(m, k, &op.d_dtype)),
            _ => (matrix(m, k, &op.x_dtype), matrix(m, n, &op.d_dtype)),
        };
        check("x", &op.x, x)?;
        check("d", &op.d, d)?;
        op.residual.iter().try_for_each(|name| check("residual", name, d))?;
        if let (Some(b), Some(dtype)) = (&op.b, &op.b_dtype) {
            check("b", b, matrix(k, n, dtype))?;
        }
        if let (Some(bias), Some(dtype)) = (&op.bias, &op.bias_dtype) {
            check("bias", bias, matrix(1, n, dtype))?;
        }
        op.weight.iter().try_for_each(|weight| check("weight.region", &weight.region, Some(weight.bytes)))?;
        op.other_regions()?.into_iter().try_for_each(|(field, name, least)| check(field, name, least))?;
        match op.workspace_bytes {
            0 => Ok(()),
            bytes => check("workspace", WORKSPACE, Some(bytes)),
        }
    }
}
