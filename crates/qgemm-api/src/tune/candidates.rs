//! Candidates of a problem on a device, with buffers to time them.

use std::time::Instant;

use qgemm_formats::DType;
use qgemm_hal::{
    BatchedDense, Buffer, BufferRef, CheckedExperts, CheckedMatmul, DeviceInfo, ExpertForm, FactorFormat, LaunchPlan,
    Operation, Stream,
};
use qgemm_sched::Preferences;
use qgemm_sched::{Measured, Offered, TunedTable};

use super::problem::TuneProblem;
use super::search::Timed;
use crate::context::Context;
use crate::error::Error;
use crate::experts::{ExpertArgs, ExpertPlan, ExpertProblem, Experts};
use crate::gemm::{Args, Candidate, Plan, Problem, stored_x};
use crate::matmul::{MatmulArgs, MatmulPlan};
use crate::operand::Extent;
use crate::planned::candidates;
use crate::record::{Recorded, cut_text};
use crate::weight::Weight;

/// Bytes of the status of expert products.
const STATUS_BYTES: usize = 8;

/// Candidates of one problem, from the cost model's choice on.
pub(super) struct Candidates<'a> {
    ctx: &'a Context,
    start: Instant,
    stream: Stream,
    of: Of<'a>,
    /// Index of the next copy in the rotation.
    turn: usize,
}

/// Operation-specific part.
enum Of<'a> {
    Gemm {
        candidates: Vec<Candidate>,
        weights: &'a [Weight],
        x: Buffer,
        d: Buffer,
        ready: Option<Box<Plan>>,
    },
    Experts {
        problem: &'a ExpertProblem,
        op: Box<CheckedExperts>,
        candidates: Vec<Offered<'static, CheckedExperts>>,
        experts: &'a [Experts],
        x: Buffer,
        index: Buffer,
        weights: Option<Buffer>,
        status: Buffer,
        d: Buffer,
        ready: Option<Box<ExpertPlan>>,
    },
    Matmul {
        op: Box<CheckedMatmul>,
        candidates: Vec<Offered<'static, CheckedMatmul>>,
        /// A and B, in enough copies to exceed the cache.
        factors: Vec<[Buffer; 2]>,
        d: Buffer,
        ready: Option<MatmulPlan>,
    },
}

impl<'a> Candidates<'a> {
    /// Candidates of a problem. `None` when there is nothing to launch.
    pub fn new(ctx: &'a Context, problem: &'a TuneProblem<'_>, start: Instant) -> Result<Option<Self>, Error> {
        let of = match problem {
            TuneProblem::Gemm { problem, weights } => Of::gemm(ctx, problem, weights)?,
            TuneProblem::Experts { problem, experts } => Of::experts(ctx, problem, experts)?,
            TuneProblem::Matmul(matmul) => {
                let op = matmul.check()?;
                let mut candidates = candidates(ctx, &op, &Preferences::default())?.offered;
                by_cost(&mut candidates);
                let factor = |dense: &BatchedDense<FactorFormat>, rows, columns| {
                    Extent::of_batch(dense, op.batch, rows, columns).bytes()
                };
                let (a, b) = (factor(&op.a, op.m, op.k), factor(&op.b, op.k, op.n));
                let d = Extent::of_batch(&op.d, op.batch, op.m, op.n).bytes();
                let copies = if candidates.is_empty() { 0 } else { ctx.copies_beyond_cache(a + b) };
                let (a, b) = (unlike_values(a), unlike_values(b));
                let factors = (0..copies).map(|_| Ok([ctx.upload(&a)?, ctx.upload(&b)?]));
                let factors = factors.collect::<Result<_, Error>>()?;
                Of::Matmul { op: Box::new(op), candidates, factors, d: ctx.allocate(d)?, ready: None }
            }
        };
        let nothing = match &of {
            Of::Gemm { candidates, .. } => candidates.is_empty(),
            Of::Experts { candidates, .. } => candidates.is_empty(),
            Of::Matmul { candidates, .. } => candidates.is_empty(),
        };
        Ok(if nothing { None } else { Some(Self { ctx, start, stream: ctx.new_stream()?, of, turn: 0 }) })
    }

    /// Kernel id of a candidate.
    pub fn kernel_id(&self, candidate: usize) -> String {
        match &self.of {
            Of::Gemm { candidates, .. } => candidates[candidate].kernel_id().to_string(),
            Of::Experts { op, candidates, .. } => op.kernel_id(&candidates[candidate].plan).to_string(),
            Of::Matmul { op, candidates, .. } => op.kernel_id(&candidates[candidate].plan).to_string(),
        }
    }

    /// Split of a candidate's tiles, in words.
    pub fn cut(&self, candidate: usize) -> String {
        match &self.of {
            Of::Gemm { candidates, .. } => cut_text(candidates[candidate].launch()),
            Of::Experts { candidates, .. } => CheckedExperts::cut(&candidates[candidate].plan),
            Of::Matmul { candidates, .. } => CheckedMatmul::cut(&candidates[candidate].plan),
        }
    }

    /// Adds a candidate's time to the table.
    pub fn record(&self, candidate: usize, seconds: f64, table: &mut TunedTable) {
        let info = self.ctx.info();
        match &self.of {
            Of::Gemm { candidates, .. } => {
                let candidate = &candidates[candidate];
                table.record(info, candidate.op(), candidate.launch(), candidate.source_hash(), seconds);
            }
            Of::Experts { op, candidates, .. } => record(&**op, &candidates[candidate], seconds, info, table),
            Of::Matmul { op, candidates, .. } => record(&**op, &candidates[candidate], seconds, info, table),
        }
    }
}

/// Whether two launches have the same kernel and split.
fn is_same(a: &LaunchPlan, b: &LaunchPlan) -> bool {
    (a.config, a.splits, a.stream_k) == (b.config, b.splits, b.stream_k)
}

fn record<O: Measured>(
    op: &O,
    candidate: &Offered<'static, O>,
    seconds: f64,
    info: &DeviceInfo,
    table: &mut TunedTable,
) {
    table.record_other(
        info,
        op,
        &candidate.plan,
        candidate.family.source_hash(op, O::config(&candidate.plan)),
        seconds,
    );
}

/// Sorts by the cost model, ignoring measurements.
fn by_cost<O: Measured>(candidates: &mut [Offered<'static, O>]) {
    candidates.sort_by(|a, b| a.cost.seconds.total_cmp(&b.cost.seconds));
}

impl<'a> Of<'a> {
    fn gemm(ctx: &Context, problem: &Problem, weights: &'a [Weight]) -> Result<Self, Error> {
        let (x, d) = problem.bytes_of_x_and_d()?;
        let mut candidates = ctx.candidates(problem)?;
        // A plan may not be the fastest by estimate: it accepts a slightly
        // slower one for exact weights.
        let planned = candidates.first().map(|first| first.planned(&**ctx.device())).transpose()?;
        if let Some(place) =
            planned.and_then(|planned| candidates.iter().position(|candidate| is_same(candidate.launch(), &planned)))
        {
            let planned = candidates.remove(place);
            candidates.insert(0, planned);
        }
        Ok(Self::Gemm { candidates, weights, x: ctx.upload(&unlike_values(x))?, d: ctx.allocate(d)?, ready: None })
    }

    fn experts(ctx: &Context, problem: &'a ExpertProblem, experts: &'a [Experts]) -> Result<Self, Error> {
        let (op, mut candidates) = ExpertPlan::candidates(ctx, problem)?;
        by_cost(&mut candidates);
        let each = &op.each;
        let x = stored_x(each)
            .ok_or(Error::MissingOperand { operand: "X", why: "problems are measured with plain activations" })?;
        let (rows, all) = (each.m, op.experts.max(1));
        // Rows are spread evenly over the experts. Neighbouring ids differ.
        let index: Vec<u32> = match op.form {
            ExpertForm::Contiguous => (0..=op.experts).map(|expert| (rows * expert / all) as u32).collect(),
            ExpertForm::Masked { capacity } => vec![capacity as u32; op.experts],
            ExpertForm::Indexed { .. } => (0..rows).map(|slot| (slot % all) as u32).collect(),
            _ => {
                let why = "problems are measured with sorted rows, with capacities and with ids";
                return Err(Error::MissingOperand { operand: "index", why });
            }
        };
        let (weights, d) = match &op.combine {
            None => (None, Extent::of(&each.d, rows, each.out_features)),
            Some(combine) => {
                let ones = DType::F32.encode(&vec![1.0; rows]);
                (Some(ctx.upload(&ones)?), Extent::of(&combine.d, op.tokens(), each.out_features))
            }
        };
        Ok(Self::Experts {
            problem,
            candidates,
            experts,
            x: ctx.upload(&unlike_values(Extent::of(&x, op.x_rows(), each.k).bytes()))?,
            index: ctx.upload(&index)?,
            weights,
            status: ctx.allocate(STATUS_BYTES)?,
            d: ctx.allocate(d.bytes())?,
            ready: None,
            op: Box::new(op),
        })
    }
}

/// Varied values between 0.5 and 2 in f16, finite in every type, `bytes` bytes in all.
///
/// Power draw, and thereby the clock, depends on the values. Candidates may rank
/// differently on equal numbers.
fn unlike_values(bytes: usize) -> Vec<u8> {
    /// Not a power of two, so that neighbouring rows differ.
    const REPEATED_AFTER: usize = 65_537;
    let word = |i: usize| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u16 & 0x87b7 | 0x3800;
    let few: Vec<u8> = (0..REPEATED_AFTER).flat_map(|i| word(i).to_le_bytes()).collect();
    let mut values = few.repeat(bytes.div_ceil(few.len()));
    values.truncate(bytes);
    values
}

impl Timed for Candidates<'_> {
    fn estimates(&self) -> Vec<f64> {
        match &self.of {
            Of::Gemm { candidates, .. } => candidates.iter().map(|candidate| candidate.launch().estimate).collect(),
            Of::Experts { candidates, .. } => candidates.iter().map(|candidate| candidate.cost.seconds).collect(),
            Of::Matmul { candidates, .. } => candidates.iter().map(|candidate| candidate.cost.seconds).collect(),
        }
    }

    fn ready(&mut self, candidate: usize) -> Result<(), Error> {
        let ctx = self.ctx;
        match &mut self.of {
            Of::Gemm { candidates, ready, .. } => *ready = Some(Box::new(ctx.plan_candidate(&candidates[candidate])?)),
            Of::Experts { problem, op, candidates, ready, .. } => {
                *ready = Some(Box::new(ExpertPlan::of_candidate(ctx, problem, op, &candidates[candidate])?));
            }
            Of::Matmul { op, candidates, ready, .. } => {
                *ready = Some(MatmulPlan::of_candidate(ctx, op, &candidates[candidate])?)
            }
        }
        Ok(())
    }

    fn round(&mut self, launches: usize) -> Result<f64, Error> {
        let (device, stream) = (self.ctx.device(), &self.stream);
        let bytes = match &self.of {
            Of::Gemm { ready, .. } => ready.as_ref().map(|plan| plan.workspace_bytes()),
            Of::Experts { ready, .. } => ready.as_ref().map(|plan| plan.workspace_bytes()),
            Of::Matmul { ready, .. } => ready.as_ref().map(MatmulPlan::workspace_bytes),
        };
        let mut workspace = self.ctx.workspace(bytes.unwrap_or(0))?;
        let before = device.record(stream)?;
        for _ in 0..launches {
            let turn = self.turn;
            self.turn += 1;
            match &mut self.of {
                Of::Gemm { weights, x, d, ready: Some(plan), .. } => {
                    let weight = &weights[turn % weights.len()];
                    plan.run(stream, Args::new(&*x, weight, &mut *d).workspace(&mut workspace))?;
                }
                Of::Experts { op, experts, x, index, weights, status, d, ready: Some(plan), .. } => {
                    let experts = &experts[turn % experts.len()];
                    let mut args = ExpertArgs::new(&*x, experts, &*index, &mut *d).workspace(&mut workspace);
                    args.status = op.checks_index.then(|| (&mut *status).into());
                    args.router_weights = weights.as_ref().map(BufferRef::from);
                    plan.run(stream, args)?;
                }
                Of::Matmul { factors, d, ready: Some(plan), .. } => {
                    let [a, b] = &factors[turn % factors.len()];
                    plan.run(stream, MatmulArgs::new(a, b, &mut *d).workspace(&mut workspace))?;
                }
                _ => {}
            }
        }
        let after = device.record(stream)?;
        let elapsed = device.elapsed(&before, &after)?;
        device.synchronize(stream)?;
        Ok(elapsed.as_secs_f64())
    }

    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_differ_are_finite_in_every_type() {
        let bytes = unlike_values(1 << 18);
        assert_eq!(bytes.len(), 1 << 18);
        for dtype in DType::ALL {
            let values = dtype.decode(&bytes);
            assert!(values.iter().all(|value| value.is_finite()), "{dtype}");
            assert!(values.windows(2).filter(|pair| pair[0] != pair[1]).count() > values.len() * 3 / 4, "{dtype}");
        }
        // No NaN of E4M3.
        assert!(bytes.iter().all(|byte| byte & 0x7f != 0x7f));
        assert!(unlike_values(0).is_empty() && unlike_values(3).len() == 3);
    }
}
