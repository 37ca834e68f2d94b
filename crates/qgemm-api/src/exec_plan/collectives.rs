//! Collectives of a plan: what is planned, checked and agreed on.
//!
//! A collective is no operation of the library's list: it has no
//! kernel to choose, and runs on a group that exists at run time
//! only.

use std::sync::atomic::Ordering;

use qgemm_formats::DType;
use qgemm_hal::Collective;
use qgemm_sched::Bound;

use super::build::{Buffer, Builder};
use super::file::{ExecPlan, Phase, PlannedOp};
use super::load::LoadedPlan;
use super::mismatch::expect;
use super::ranks::Ranks;
use super::sizes::too_large;
use crate::context::Context;
use crate::error::Error;
use crate::record::Sizes;

/// Sum over ranks, in place.
const ALL_REDUCE: &str = "all_reduce";
/// Columns of all ranks side by side.
const ALL_GATHER: &str = "all_gather";

impl Builder<'_> {
    /// Adds the sum of `d` over all ranks, in place. Nothing for one
    /// rank.
    pub(super) fn all_reduce(&mut self, op_id: String, d: &Buffer) -> Result<(), Error> {
        if !self.part.is_one_of_many() {
            return Ok(());
        }
        let op = self.collective(op_id, ALL_REDUCE, [d, d], None)?;
        self.push(op, d, std::slice::from_ref(&d.name))
    }

    /// Adds a product that makes `d`, a column for each row of the
    /// head: this rank's, and those of the others beside them.
    pub(super) fn vocabulary(
        &mut self,
        d: Buffer,
        product: impl FnOnce(&mut Self, Buffer) -> Result<(), Error>,
    ) -> Result<Buffer, Error> {
        let Some(columns) = self.part.vocabulary().map(<[usize]>::to_vec) else {
            product(self, d.clone())?;
            return Ok(d);
        };
        let own = Buffer { name: format!("{}_part", d.name), ..d.clone() };
        product(self, own.clone())?;
        let total = columns.iter().try_fold(0usize, |sum, columns| sum.checked_add(*columns));
        let d = Buffer { columns: total.ok_or_else(too_large)?, ..d };
        self.reads(&own)?;
        let op = self.collective("logits_gather".into(), ALL_GATHER, [&own, &d], Some(columns))?;
        self.push(op, &d, std::slice::from_ref(&own.name))?;
        Ok(d)
    }

    /// A collective, with the algorithm of the rank's group.
    fn collective(
        &self,
        op_id: String,
        operation: &str,
        buffers: [&Buffer; 2],
        columns: Option<Vec<usize>>,
    ) -> Result<PlannedOp, Error> {
        let op = PlannedOp::collective(op_id, operation, buffers, columns);
        let collective = op.as_collective()?;
        let algorithm = self.ctx.communicator().map(|group| group.algorithm(&collective).to_owned());
        Ok(PlannedOp { algorithm, ..op })
    }
}

impl PlannedOp {
    fn collective(op_id: String, operation: &str, [x, d]: [&Buffer; 2], columns: Option<Vec<usize>>) -> Self {
        Self {
            op_id,
            phase: Phase::Forward,
            operation: operation.into(),
            kernel_id: operation.into(),
            source_hash: format!("{:016x}", 0),
            shape: Sizes { m: d.rows, n: d.columns, k: x.columns },
            columns,
            x: x.name.clone(),
            x_dtype: x.dtype.name().to_owned(),
            x_precision: qgemm_hal::XPrecision::Exact.name().to_owned(),
            d: d.name.clone(),
            d_dtype: d.dtype.name().to_owned(),
            activation: qgemm_hal::Activation::Identity.to_string(),
            bound: Bound::Memory,
            ..Self::empty()
        }
    }

    /// The collective.
    pub(super) fn as_collective(&self) -> Result<Collective, Error> {
        let (Sizes { m: rows, n, k }, dtype) = (self.shape, self.d_dtype.parse()?);
        let count = rows.checked_mul(n).ok_or_else(too_large)?;
        match &self.columns {
            None => {
                expect("shape.k", n, k)?;
                Ok(Collective::AllReduce { dtype, count })
            }
            Some(columns) => {
                let total = columns.iter().try_fold(0usize, |sum, columns| sum.checked_add(*columns));
                expect("columns", n, total.ok_or_else(too_large)?)?;
                Ok(Collective::AllGather { dtype, rows, columns: columns.clone() })
            }
        }
    }

    fn is_collective(&self) -> bool {
        [ALL_REDUCE, ALL_GATHER].contains(&self.operation.as_str())
    }
}

impl ExecPlan {
    /// Collectives of a step, with the bytes of their results. None
    /// for the whole model.
    pub fn collectives(&self) -> impl Iterator<Item = (&PlannedOp, usize)> {
        let bytes = |op: &PlannedOp| {
            let element = op.d_dtype.parse().map_or(0, DType::bytes);
            op.shape.m.saturating_mul(op.shape.n).saturating_mul(element)
        };
        self.ops.iter().filter(|op| op.is_collective()).map(move |op| (op, bytes(op)))
    }
}

impl Context {
    /// Checks that a plan is of this context's rank, where it has
    /// one, and its collectives of the plan's ranks.
    pub(super) fn check_ranks(&self, plan: &ExecPlan) -> Result<(), Error> {
        let Ranks { rank, world } = plan.runtime.ranks.unwrap_or(Ranks { rank: 0, world: 1 });
        if let Some(communicator) = self.communicator() {
            expect("runtime.ranks.world", communicator.world(), world)?;
            expect("runtime.ranks.rank", communicator.rank(), rank)?;
        }
        if rank >= world {
            expect("runtime.ranks.rank", format!("less than {world}"), rank)?;
        }
        for op in plan.ops.iter().filter(|op| op.is_collective()) {
            let at = |field: &str| format!("{}.{field}", op.op_id);
            if world == 1 {
                expect(at("operation"), "one of a single rank", &op.operation)?;
            }
            expect(at("operation"), if op.columns.is_some() { ALL_GATHER } else { ALL_REDUCE }, &op.operation)?;
            if let Some(columns) = &op.columns {
                expect(at("columns"), format!("{world} ranks"), format!("{} ranks", columns.len()))?;
                expect(at("shape.k"), columns[rank], op.shape.k)?;
            }
        }
        Ok(())
    }
}

impl LoadedPlan {
    /// Compares the plan's collectives with those of the other ranks,
    /// once.
    pub(super) fn agree(&self) -> Result<(), Error> {
        let plan = self.exec_plan();
        if plan.runtime.ranks.is_none() || self.is_agreed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let communicator = self.ctx.communicator().ok_or(Error::NoCommunicator)?;
        let mut hash = hmac_sha256::Hash::new();
        for op in plan.ops.iter().filter(|op| op.is_collective()) {
            hash.update(op.as_collective()?.to_string());
        }
        let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let model = &plan.model;
        let by_expert = plan.ops.iter().any(|op| op.local_experts.is_some());
        let experts = if by_expert { ", experts by expert" } else { "" };
        communicator.agree(&format!(
            "a step of {} tokens of {} sequences of a {} of {} layers{experts} ({hash})",
            model.batch, model.sequences, model.architecture, model.layers
        ))?;
        self.is_agreed.store(true, Ordering::Relaxed);
        Ok(())
    }
}
