//! Checks of [`Context::load_plan`](crate::Context::load_plan): device, memory, and
//! each operation against a new plan of it.

use std::collections::HashSet;
use std::fmt::Display;

use qgemm_formats::model::Model;
use qgemm_formats::{DType, Format};
use qgemm_hal::{DeviceKind, Operation as _};

use super::arena::WORKSPACE;
use super::build::END;
use super::file::{ExecPlan, MemoryPlan, PlannedOp, PlannedWeight, Region, RegionKind};
use super::layout::overlap;
use super::mismatch::expect;
use super::stated::{Stated, with_segments};
use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::experts::ExpertProblem;
use crate::gemm::{Candidate, Problem};
use crate::gradient::ThroughShape;
use crate::record::{DeviceRecord, Dispatch, PlanRecord, Reduction, Sizes};

/// Checks the device. A plan for a chip description fits every device of that
/// chip's architecture and size.
pub(super) fn check_device(planned: &DeviceRecord, here: &DeviceRecord) -> Result<(), Error> {
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

/// Checks that regions are in the arena, aligned, and disjoint while live.
pub(super) fn check_memory(memory: &MemoryPlan, ops: usize) -> Result<(), Error> {
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
    // The arena size must follow from the regions, so that a wrong
    // number allocates nothing.
    let last = memory.regions.iter().map(|region| region.offset + region.reserved).max();
    expect("memory.arena_bytes", last.unwrap_or(0), memory.arena_bytes)?;
    match overlap(&memory.regions) {
        None => Ok(()),
        Some((a, b)) => wrong(
            format!("memory.regions ({})", b.name),
            format!("no byte of `{}`, which is live at the same time", a.name),
            format!("offset {}", b.offset),
        ),
    }
}

/// Checks that barriers and phases name existing operations and regions, and
/// weights existing tensors.
pub(super) fn check_names(plan: &ExecPlan, model: &Model) -> Result<(), Error> {
    let ops: HashSet<&str> = plan.ops.iter().map(|op| op.op_id.as_str()).collect();
    expect("ops", format!("{} different names", plan.ops.len()), format!("{} different names", ops.len()))?;
    let regions: HashSet<&str> = plan.memory.regions.iter().map(|region| region.name.as_str()).collect();
    let named = |known: &HashSet<&str>, at: String, what: &str, name: &str| {
        if known.contains(name) { Ok(()) } else { expect(at, format!("the name of {what}"), name) }
    };
    for (place, barrier) in plan.barriers.iter().enumerate() {
        let at = |field: &str| format!("barriers[{place}].{field}");
        if barrier.before != END {
            named(&ops, at("before"), "an operation, or `end`", &barrier.before)?;
        }
        barrier.after.iter().try_for_each(|name| named(&ops, at("after"), "an operation", name))?;
        barrier.reads.iter().try_for_each(|name| named(&regions, at("reads"), "a region", name))?;
        barrier.writes.iter().try_for_each(|name| named(&regions, at("writes"), "a region", name))?;
    }
    for (place, phase) in plan.phases.iter().enumerate() {
        for (field, name) in [("first", &phase.first), ("last", &phase.last)] {
            named(&ops, format!("phases[{place}].{field}"), "an operation", name)?;
        }
    }
    for (place, op) in plan.ops.iter().enumerate() {
        for name in op.weight.iter().flat_map(|weight| &weight.tensors) {
            let found = model.info(name).map_or_else(|error| error.to_string(), |_| name.clone());
            expect(format!("ops[{place}] ({}).weight.tensors", op.op_id), found, name)?;
        }
    }
    Ok(())
}

/// Checks of one operation.
pub(super) struct OpChecks<'a> {
    pub ctx: &'a Context,
    pub place: usize,
    pub at: String,
    pub op: &'a PlannedOp,
}

impl OpChecks<'_> {
    fn expect(&self, field: &str, expected: impl Display, got: impl Display) -> Result<(), Error> {
        expect(format!("{}.{field}", self.at), expected, got)
    }

    /// Runs all checks. Returns the candidate of a product.
    pub fn all(&self, memory: &MemoryPlan) -> Result<Option<Candidate>, Error> {
        let op = self.op;
        let mut found = None;
        match (op.operation.as_str(), &op.weight) {
            ("gemm", Some(weight)) => found = Some(self.product(weight)?),
            ("experts", Some(weight)) => {
                if op.ids.is_none() && op.offsets.is_none() {
                    self.expect("ids", "the name of a region, or offsets", "none")?;
                }
                self.experts(weight)?;
            }
            ("gradient", Some(weight)) => self.gradient(weight)?,
            ("gather_rows", Some(weight)) => self.gather_rows(weight)?,
            ("routing", None) => {
                if op.renormalized.is_none() {
                    self.expect("renormalized", "true or false", "none")?;
                }
                self.record(&self.ctx.explain_routing(&op.as_routing()?)?)?;
            }
            ("matmul", None) => self.record(&self.ctx.explain_matmul(&op.as_matmul()?)?)?,
            ("norm", None) => {
                if op.residual.is_some() != op.of_norm()?.sum.is_some() {
                    self.expect("norm.sum", "regions of residual and sum, or none", "one of them")?;
                }
                self.record(&self.ctx.explain_norm(&op.as_norm()?)?)?;
            }
            ("kv_append", None) if op.rotation.is_some() => {
                self.in_place()?;
                self.record(&self.ctx.explain_kv_append(&op.as_kv_append()?)?)?;
            }
            ("kv_append", None) => {
                if op.heads.as_ref().is_none_or(|heads| heads.new_k.is_none() || heads.new_v.is_none()) {
                    self.expect("heads", "regions of new keys and new values", "none of one")?;
                }
                self.record(&self.ctx.explain_kv_append(&op.as_kv_append()?)?)?;
            }
            ("attention", None) => self.record(&self.ctx.explain_attention(&op.as_attention()?)?)?,
            ("short_conv", None) => self.record(&self.ctx.explain_short_conv(&op.as_short_conv()?)?)?,
            ("linear_attention", None) => {
                self.record(&self.ctx.explain_linear_attention(&op.as_linear_attention()?)?)?;
            }
            ("sampling", None) => {
                if op.parameters.is_none() || op.status.is_none() {
                    self.expect("parameters", "regions of parameters and status", "none of one")?;
                }
                self.record(&self.ctx.explain_sampling(&op.as_sampling())?)?;
            }
            ("all_reduce", None) => {
                self.expect("d", &op.x, &op.d)?;
                op.as_collective()?;
            }
            ("all_gather", None) => drop(op.as_collective()?),
            ("optimizer", None) => self.record(&self.ctx.explain_optimizer(&op.as_optimizer()?)?)?,
            (operation, _) => {
                const KNOWN: &str = "gemm, experts, gradient or gather_rows with a weight, matmul, routing, norm, kv_append, attention, short_conv, linear_attention, sampling, optimizer, all_reduce or all_gather";
                self.expect("operation", KNOWN, operation)?;
            }
        }
        self.regions(memory)?;
        Ok(found)
    }

    /// Checks that D of a rotation in place is X, and has its heads.
    fn in_place(&self) -> Result<(), Error> {
        let op = self.op;
        self.expect("d", &op.x, &op.d)?;
        self.expect("d_dtype", &op.x_dtype, &op.d_dtype)?;
        let features = op.rotation.as_ref().and_then(|of| of.heads.checked_mul(of.head_dim)).unwrap_or(usize::MAX);
        self.expect("shape.k", features, op.shape.k)
    }

    /// Description of the weight on this device.
    pub fn weight(&self, weight: &PlannedWeight) -> Result<DescribedWeight, Error> {
        let format: Format = weight.format.parse()?;
        let Sizes { n, k, .. } = self.op.shape;
        let is_turned = matches!(self.op.operation.as_str(), "gradient" | "gather_rows");
        let (n, k) = if is_turned { (k, n) } else { (n, k) };
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
        let activation = op.activation.parse().map_err(|_| Error::PlanMismatch {
            at: format!("{}.activation", self.at),
            expected: "the name of an activation".into(),
            got: op.activation.clone(),
        })?;
        let stated = Stated {
            x,
            d,
            x_precision: op.x_precision.parse()?,
            batch_invariant: op.batch_invariant,
            activation,
            bias: op.bias_dtype.as_deref().map(str::parse).transpose()?,
            residual: op.residual.is_some().then_some(d),
            norm: op.norm.as_ref().map(|norm| norm.in_prologue(x)).transpose()?,
        };
        Ok(stated.of(problem))
    }

    /// Checks a gather from a table.
    fn gather_rows(&self, weight: &PlannedWeight) -> Result<(), Error> {
        let described = self.weight(weight)?;
        self.expect("weight.bytes", described.bytes(), weight.bytes)?;
        self.record(&self.ctx.explain_gather_rows(&self.op.as_gather_rows(&described)?)?)
    }

    fn product(&self, weight: &PlannedWeight) -> Result<Candidate, Error> {
        let (op, described) = (self.op, self.weight(weight)?);
        self.expect("weight.bytes", described.bytes(), weight.bytes)?;
        let problem =
            with_segments(self.state(described.problem(op.shape.m))?, &op.segments, [op.shape.m, op.shape.n])?;
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
            let expected = format!("one of {} work partitions", of_kernel.len());
            return Err(Error::PlanMismatch { at: format!("{}.dispatch", self.at), expected, got });
        };
        self.expect("workspace_bytes", found.op().workspace_bytes(found.launch()), op.workspace_bytes)?;
        let reduction = |reduction: &Option<Reduction>| format!("{reduction:?}");
        self.expect("reduction", reduction(&Some(Reduction::of(found.launch()))), reduction(&op.reduction))?;
        Ok(found.clone())
    }

    fn experts(&self, weight: &PlannedWeight) -> Result<(), Error> {
        let (problem, bytes) = self.experts_of(weight)?;
        self.expect("weight.bytes", bytes, weight.bytes)?;
        self.record(&self.ctx.explain_experts(&problem)?)
    }

    /// Problem of an `experts`, and bytes of its weights.
    pub fn experts_of(&self, weight: &PlannedWeight) -> Result<(ExpertProblem, usize), Error> {
        let (op, described) = (self.op, self.weight(weight)?.experts(weight.experts.unwrap_or(0))?);
        let (tokens, top_k) = op.slots();
        let problem = match op.offsets {
            Some(_) => described.contiguous(op.shape.m),
            None => described.indexed(tokens, top_k),
        };
        let problem = if op.status.is_some() { problem } else { problem.unchecked() };
        let problem = op.routed_to.into_iter().fold(problem, ExpertProblem::routed_to);
        Ok((self.expert_problem(problem)?, described.bytes()))
    }

    /// Checks a gradient through a weight.
    fn gradient(&self, weight: &PlannedWeight) -> Result<(), Error> {
        let (through, bytes) = self.through(weight)?;
        self.expect("weight.bytes", bytes, weight.bytes)?;
        self.record(&self.ctx.explain_gradient_by(&through, &self.op.as_gradient()?)?)
    }

    /// Weight of a `gradient`, and its bytes.
    pub fn through(&self, weight: &PlannedWeight) -> Result<(ThroughShape, usize), Error> {
        let described = self.weight(weight)?;
        match weight.experts {
            Some(experts) => {
                let experts = described.experts(experts)?;
                Ok(((*experts.shape()).into(), experts.bytes()))
            }
            None => Ok(((*described.shape()).into(), described.bytes())),
        }
    }

    /// Expert problem with everything that the operation states.
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

    /// Checks that a new plan has the same record.
    fn record(&self, record: &PlanRecord) -> Result<(), Error> {
        self.expect("kernel_id", record.kernel_id.as_deref().unwrap_or("none"), &self.op.kernel_id)?;
        self.expect("source_hash", record.source_hash.as_deref().unwrap_or("none"), &self.op.source_hash)?;
        let sharing =
            |dispatch: &Option<Dispatch>, reduction: &Option<Reduction>| format!("{dispatch:?}, {reduction:?}");
        let here = sharing(&record.dispatch, &record.reduction);
        self.expect("dispatch", here, sharing(&self.op.dispatch, &self.op.reduction))?;
        self.expect("workspace_bytes", record.workspace_bytes, self.op.workspace_bytes)
    }

    /// Checks that the operands' regions are long enough and live.
    pub fn regions(&self, memory: &MemoryPlan) -> Result<(), Error> {
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
                false => self.expect(field, format!("a region that is live in operation {place}"), name),
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
            ("sampling", _) => (matrix(m, n, &op.x_dtype), matrix(m, 1, &op.d_dtype)),
            ("gather_rows", _) => (matrix(m, 1, &op.x_dtype), matrix(m, n, &op.d_dtype)),
            // The cache's format sizes D.
            ("kv_append", _) if op.rotation.is_none() => (matrix(m, k, &op.x_dtype), Some(0)),
            ("gemm", _) => {
                let first = op.segments.first().map_or(n, |segment| segment.first);
                (matrix(m, k, &op.x_dtype), matrix(m, first, &op.d_dtype))
            }
            ("norm", _) => {
                let rows = m.checked_mul(op.norm.as_ref().and_then(|norm| norm.every).unwrap_or(1));
                (rows.and_then(|rows| matrix(rows, n, &op.x_dtype)), matrix(m, n, &op.d_dtype))
            }
            _ => (matrix(m, k, &op.x_dtype), matrix(m, n, &op.d_dtype)),
        };
        check("x", &op.x, x)?;
        check("d", &op.d, d)?;
        let residual = if op.operation == "norm" { x } else { d };
        op.residual.iter().try_for_each(|name| check("residual", name, residual))?;
        if let (Some(b), Some(dtype)) = (&op.b, &op.b_dtype) {
            check("b", b, matrix(k, n, dtype))?;
        }
        if let (Some(bias), Some(dtype)) = (&op.bias, &op.bias_dtype) {
            let pair = if op.weight.as_ref().is_some_and(|weight| weight.gated) { 2 } else { 1 };
            let rows = op.weight.as_ref().and_then(|weight| weight.experts).unwrap_or(1);
            check("bias", bias, n.checked_mul(pair).and_then(|n| matrix(rows, n, dtype)))?;
        }
        op.weight.iter().try_for_each(|weight| check("weight.region", &weight.region, Some(weight.bytes)))?;
        op.other_regions()?.into_iter().try_for_each(|(field, name, least)| check(field, name, least))?;
        match op.workspace_bytes {
            0 => Ok(()),
            bytes => check("workspace", WORKSPACE, Some(bytes)),
        }
    }
}
